"""The command `explain`."""

from __future__ import annotations

import argparse
import json
import os
import sys

from ..terminal import Manual, fitted, fold, put
from . import explain
from .change import Change
from .reading import files_of


def main(argv: list[str]) -> int:
    """Print where the time of some traces went. Raises ValueError, in a sentence, for files that are none."""
    parser = argparse.ArgumentParser(
        prog="three-axes explain",
        description="Say where the time of torch.profiler's traces went.",
        formatter_class=Manual,
    )
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="one file for each rank, or a folder; two folders are compared",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if len(args.traces) == 2 and all(map(os.path.isdir, args.traces)):
        made = Change(*(explain(files_of(folder)) for folder in args.traces))
    else:
        made = explain([file for given in args.traces for file in files_of(given)])
    if args.json:
        return put(json.dumps(made.json(), default=float, allow_nan=False))
    with fitted(sys.stdout):
        return put(fold(repr(made)))
