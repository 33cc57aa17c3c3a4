"""Runs a module of the course by name. In a wheel Python cannot import helpers and tools without this.

    python -m three_axes.run tools.slides 07
    torchrun --nproc-per-node 4 -m three_axes.run helpers.train --tp 2

In a clone, `python -m tools.slides 07` does the same.
"""

from __future__ import annotations

import runpy
import sys

from .commands import course_needed
from .files import course_on_path


def main() -> None:
    """Run the module that the first argument names, with the other arguments. Exits with 1 without
    arguments.
    """
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    course_on_path()
    module = sys.argv[1]
    del sys.argv[1]
    with course_needed(module):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
