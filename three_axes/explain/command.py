"""The command `explain`."""

from __future__ import annotations

import argparse
import json
import sys

from ..terminal import Manual, fitted, fold, put
from . import explain


def main(argv: list[str]) -> int:
    """Print where the time of some traces went. Raises ValueError, in a sentence, for files that are none."""
    parser = argparse.ArgumentParser(
        prog="three-axes explain",
        description="Say where the time of torch.profiler's traces went.",
        formatter_class=Manual,
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="one file for each rank")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    made = explain(args.traces)
    if args.json:
        return put(json.dumps(made.json(), default=float, allow_nan=False))
    with fitted(sys.stdout):
        return put(fold(repr(made)))
