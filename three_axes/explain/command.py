"""Report where the time of torch.profiler's traces went."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace

from ..terminal import fitted, fold, put
from . import explain
from .change import Change
from .reading import files_of
from .report import Explained


def run(args: Namespace) -> int:
    """Print a report; of two folders, what changed. Raises Unreadable for files that are no traces."""
    if len(args.traces) == 2 and all(map(os.path.isdir, args.traces)):
        report: Change | Explained = Change(*(explain(files_of(folder)) for folder in args.traces))
    else:
        report = explain([file for given in args.traces for file in files_of(given)])
    if args.json:
        return put(json.dumps(report.json(), default=float, allow_nan=False))
    with fitted(sys.stdout):
        return put(fold(repr(report)))
