"""The course of Three Axes: data, tensor and pipeline parallelism, learnt by running them.

`World` starts real ranks beside the notebook. For code on the ranks: `progress` wraps a loop;
`count_from_here`, `counted_so_far`, `peak_memory` and `rank_state` count and keep what a rank needs.
`predict` asks the reader before a cell answers. Each of these is imported when it is first used. In a
notebook `import helpers` also registers %%ranks.
"""

import re
import sys
from importlib.metadata import version

TORCH = 2, 11  # the oldest version that the course is tested with
ON_RANKS = ("progress", "count_from_here", "counted_so_far", "peak_memory", "rank_state")


def _know_ranks() -> None:
    """In a notebook, register %%ranks; the first such cell imports the magic."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        shell.magics_manager.register_lazy("ranks", "helpers.ranks.magic")


def _look_at(torch: str) -> None:
    """Raises ImportError for a version that is too old, which Colab sometimes has."""
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
        _look_at(version("torch"))
        from .ranks import World, current
    _know_ranks()
    return World if name == "World" else getattr(current, name)


_know_ranks()
