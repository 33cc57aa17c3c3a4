"""How flight records are read: the last number of each rank, a table of who called what, PyTorch's own
analyzer.
"""

from __future__ import annotations

import ast
import copy
import csv
import logging
import re
from contextlib import redirect_stderr
from io import StringIO

from ....files import find
from ....table import Table
from .runs import SECONDS, Stopped, stop

OP = lambda entry: entry["profiling_name"].partition(":")[2]


def members(dumps: dict[int, dict]) -> dict[str, list[int]]:
    """Group -> its ranks, as the records have them."""
    return {
        name: ast.literal_eval(group["ranks"])
        for record in dumps.values()
        for name, group in record["pg_config"].items()
    }


def last(record: dict, group: str) -> dict | None:
    """What a rank called last in a group."""
    return next((e for e in reversed(record["entries"]) if e["process_group"][0] == group), None)


def who_waits(stopped: Stopped, rows: int = 3) -> Table:
    """The last numbers of every group, and what each rank called under them. '…' has not ended."""
    ranks = range(len(stopped.seen))
    body = []
    groups = members(stopped.dumps)
    for group, mine in groups.items():
        called = {
            (e["collective_seq_id"], r): OP(e) + " …" * (e["state"] != "completed")
            for r, record in stopped.dumps.items()
            for e in record["entries"]
            if e["process_group"][0] == group
        }
        top = max((number for number, _ in called), default=0)
        for number in range(max(1, top - rows + 1), top + 1):
            cells = [called.get((number, r), "(dead)" if r in stopped.dead else "–" if r in mine else "") for r in ranks]
            name = "" if len(groups) == 1 else "all: " if len(mine) == len(ranks) else f"{mine}: "
            body.append([f"{name}{number}", *cells])
    return Table(["number", *(f"rank {r}" for r in ranks)], body, title=f"run {stopped.number}")


def verdict(stopped: Stopped) -> str:
    """What PyTorch's analyzer says of these records: torchfrtrace, with the stack cut to the run's lines."""
    with redirect_stderr(StringIO()):  # it complains at its import where tabulate is not installed
        from torch.distributed.flight_recorder.components.builder import build_db
        from torch.distributed.flight_recorder.components.config_manager import JobConfig
    records = {
        f"rank_{r}": copy.deepcopy(record) | {"rank": r, "host_name": f"rank {r}"}
        for r, record in stopped.dumps.items()
    }
    log, said = logging.getLogger("Flight Recorder"), StringIO()
    log.handlers, before = [logging.StreamHandler(said)], log.handlers
    try:
        arguments = JobConfig().parse_args(["--allow-incomplete-ranks", "--mismatch_cap", "0"])
        build_db(records, arguments, next(iter(records.values()))["version"])
    finally:
        log.handlers = before
    kept = [
        line.strip()
        for line in said.getvalue().splitlines()
        if " at " not in line or re.search(r" at run_\d\.py", line)
    ]
    kept = [part for line in kept for part in _by_rank(line)]
    drop = ("internal record", "Too many", "world size", "expected ranks", "input sizes", "output sizes")
    return "\n".join(line for line in kept if line and not line.startswith(drop))


def _by_rank(line: str) -> list[str]:
    """The analyzer's culprits come in no order, in one line: one line a rank."""
    return sorted(re.split(r", (?=Culprit)", line.removeprefix("error msg: ")))


def look_twice(*numbers: int, seed: int = 0) -> Table:
    """How far the ranks had come when the run was stopped, and when it was given three times as long."""
    rows = []
    for number in numbers:
        first, later = stop(number, seed), stop(number, seed, 3 * SECONDS)
        moved = later is None or _reached(later) != _reached(first)
        rank, top = min(_reached(first), key=_reached(first).get), max(_reached(first).values())
        then = "they went on" if moved else f"rank {rank} at {_reached(later)[rank]}, the others at {top}"
        rows.append([f"run {number}", f"rank {rank} at {_reached(first)[rank]}, the others at {top}", then])
    return Table(["", f"after {SECONDS:.0f} s", f"after {3 * SECONDS:.0f} s"], rows)


def _reached(stopped: Stopped) -> dict[int, int]:
    """Rank -> its last number in any group."""
    return {
        r: max((e["collective_seq_id"] for e in record["entries"]), default=0)
        for r, record in stopped.dumps.items()
    }


def watchdog_logs() -> Table:
    """Two public logs of NCCL's watchdog, in figures."""
    with find("data/nccl_watchdog_logs.csv").open(encoding="utf-8") as f:
        rows = [
            [row["log"], row["rank"], row["op"], f"{int(row['seq']):,}", f"{int(row['ran_ms']) / 1000:,.1f} s"]
            for row in csv.DictReader(f)
        ]
    return Table(["log", "rank", "OpType", "SeqNum", "ran for"], rows)
