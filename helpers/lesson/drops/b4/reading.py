"""How flight records are read: the last number of each rank, a table of who called what, PyTorch's own
analyzer.
"""

from __future__ import annotations

import copy
import csv
import logging
import re
import textwrap
from contextlib import redirect_stderr
from io import StringIO

from ....files import find
from ....table import Table
from .diagnosing import deal
from .runs import SECONDS, Stopped, stop


def verdict(stopped: Stopped) -> str:
    """What PyTorch's analyzer says of these records: torchfrtrace, with the stack cut to the run's lines."""
    with redirect_stderr(StringIO()):  # it complains at its import where tabulate is not installed
        from torch.distributed.flight_recorder.components.builder import build_db
        from torch.distributed.flight_recorder.components.config_manager import JobConfig
    records = {
        f"rank_{r}": copy.deepcopy(record) | {"rank": r, "host_name": f"rank {r}"}
        for r, record in stopped.dumps.items()
    }
    for entry in (entry for record in records.values() for entry in record["entries"]):
        # The analyzer of PyTorch 2.11 refuses gloo's. What it says gets the right name again, below.
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
    log, report = logging.getLogger("Flight Recorder"), StringIO()
    log.handlers, before = [logging.StreamHandler(report)], log.handlers
    try:
        arguments = JobConfig().parse_args(["--allow-incomplete-ranks", "--mismatch_cap", "0"])
        build_db(records, arguments, next(iter(records.values()))["version"])
    finally:
        log.handlers = before
    kept = [
        line.strip()
        for line in report.getvalue().replace("nccl:", "gloo:").splitlines()
        if " at " not in line or re.search(r" at run_\d\.py", line)
    ]
    kept = [part for line in kept for part in _by_rank(line)]
    drop = ("internal record", "Too many", "world size", "expected ranks", "input sizes", "output sizes")
    kept = [line for line in kept if line and not line.startswith(drop)]
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in kept)


def _by_rank(line: str) -> list[str]:
    """The analyzer's culprits come in no order, in one line: one line a rank."""
    return sorted(re.split(r", (?=Culprit)", line.removeprefix("error msg: ")))


def look_twice(*numbers: int) -> Table:
    """How far the ranks had come when the run was stopped, and when it was given three times as long. Runs as
    they are dealt now.
    """
    rows = []
    for number in numbers:
        first, later = stop(number, deal()), stop(number, deal(), 3 * SECONDS)
        moved = later is None or later.last_numbers != first.last_numbers
        rows.append([f"run {number}", _behind(first), "they went on" if moved else _behind(later)])
    return Table(["", f"after {SECONDS:.0f} s", f"after {3 * SECONDS:.0f} s"], rows)


def _behind(stopped: Stopped) -> str:
    numbers = stopped.last_numbers
    rank = min(numbers, key=numbers.get)
    return f"rank {rank} at {numbers[rank]}, the others at {max(numbers.values())}"


def watchdog_logs() -> Table:
    """Two public logs of NCCL's watchdog, in figures."""
    with find("data/nccl_watchdog_logs.csv").open(encoding="utf-8") as f:
        rows = [
            [
                row["log"],
                row["rank"],
                row["op"],
                f"{int(row['seq']):,}",
                f"{int(row['ran_ms']) / 1000:,.1f} s",
            ]
            for row in csv.DictReader(f)
        ]
    return Table(["log", "rank", "OpType", "SeqNum", "ran for"], rows)
