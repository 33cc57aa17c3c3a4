"""The course of Three Axes: data, tensor and pipeline parallelism, learnt by running them.

`World` starts ranks: real processes, beside the notebook. Code that runs on a rank may use `progress` (a bar
for a loop), `count_from_here` and `counted_so_far` (the rank's collectives), `peak_memory`, and `rank_state`
(variables that the rank keeps between cells). `predict` asks the reader a question before a cell answers it.
Each of these is imported when it is first used. In a notebook `import helpers` also registers %%ranks.
"""

import re
import sys
from importlib.metadata import version

TORCH = 2, 11  # the oldest version that the course is tested with
# Functions for code that runs on a rank.
ON_RANKS = ("progress", "count_from_here", "counted_so_far", "peak_memory", "rank_state")


def _register_magic() -> None:
    """In a notebook, register %%ranks. Its module is imported by the first cell that uses it."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        shell.magics_manager.register_lazy("ranks", "helpers.ranks.magic")


def _check_version(torch: str) -> None:
    """Raises ImportError if this version of PyTorch is too old. Colab sometimes has such a version."""
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < TORCH:
        raise ImportError(
            f"the course needs PyTorch {'.'.join(map(str, TORCH))} or newer, and {torch} is here:"
            " %pip install --upgrade torch, then restart the kernel"
        )


def __getattr__(name: str):
    if name == "predict":
        from .practice import predict

        return predict
    if name not in ("World", *ON_RANKS):
        raise AttributeError(f"module 'helpers' has no attribute {name!r}")
    from multiprocessing import parent_process

    from three_axes.commands import course_needed

    from .ranks import server

    if parent_process() is None:  # a rank that imports this needs no ranks of its own
        server.warm()  # first: the server imports torch for the ranks while the notebook imports it
    with server.undisturbed(), course_needed(f"helpers.{name}"):
        _check_version(version("torch"))
        from .ranks import World, current
    _register_magic()
    return World if name == "World" else getattr(current, name)


_register_magic()
