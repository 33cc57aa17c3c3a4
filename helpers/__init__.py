"""Three Axes: data, tensor and pipeline parallelism, learnt by running them.

`World` starts real ranks beside the notebook; `progress` wraps a loop that runs on them. `helpers.theory`
needs neither torch nor ranks, so nothing is imported here until it is asked for.
"""

import sys
from multiprocessing import parent_process


def __getattr__(name: str):
    if name not in ("World", "progress"):
        raise AttributeError(f"module 'helpers' has no attribute {name!r}")
    from .commands import course_needed
    from .runtime import server

    if parent_process() is None:  # a rank that imports this has no use for ranks
        server.warm()  # first of all: it imports torch for the ranks while the notebook does for itself
    with server.undisturbed(), course_needed(f"helpers.{name}"):
        from .runtime.current import progress
        from .runtime.world import World
    if "IPython" in sys.modules:
        from .lesson import magic

        magic.register()
    return {"World": World, "progress": progress}[name]
