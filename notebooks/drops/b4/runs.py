"""b4's seven runs on four real ranks, six that hang and one that is only slow, and the record of each.

Their programs are data/hangs/run_*.py, which call the functions at the end of this file. A seed chooses the
rank and the step in which something differs from what the other ranks do.
"""

from __future__ import annotations

import ast
import copy
import linecache
import logging
import os
import pickle
import random
import re
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch

from helpers.ranks import PREFIX, RankError, RankStatus, World
from three_axes.files import find
from three_axes.table import Table

RUNS = range(1, 8)
SHOWN = 4  # the run that the notebook explains
SLOW = 7  # the run that does not hang
RANKS = 4
SECONDS = 1.0  # the timeout of a run


@dataclass(repr=False)
class Stopped:
    """The record that an engineer gets of a run that hung, was too slow, or died."""

    number: int
    seed: int
    report: str  # what the World reports of the failed call
    seen: list[RankStatus]
    stands: bool  # whether no rank moved any more, and each waited for another or had ended
    dumps: dict[int, dict]  # rank -> its flight record; a dead rank has none

    @property
    def script(self) -> str:
        """The program that every rank ran, with the numbers of its lines."""
        lines = source(self.number).splitlines()
        return "\n".join(f"{i:2}  {line}" for i, line in enumerate(lines, 1))

    @property
    def dead(self) -> list[int]:
        return [r for r, s in enumerate(self.seen) if s.exit is not None]

    @property
    def groups(self) -> dict[str, list[int]]:
        """Group -> its ranks, from the records; the group of all ranks is first."""
        ranks_of = {
            name: ast.literal_eval(group["ranks"])
            for record in self.dumps.values()
            for name, group in record["pg_config"].items()
        }
        return dict(sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1])))

    @property
    def last_numbers(self) -> dict[int, int]:
        """Rank -> the highest sequence number that it has called in the group of all ranks."""
        everyone = next(iter(self.groups))
        numbers = lambda record: (
            e["collective_seq_id"] for e in record["entries"] if e["process_group"][0] == everyone
        )
        return {r: max(numbers(record), default=0) for r, record in self.dumps.items()}

    def is_open(self, rank: int) -> bool:
        """Whether the rank's last collective in the group of all ranks has not ended."""
        everyone = next(iter(self.groups))
        return any(e["process_group"][0] == everyone for e in self._open(rank))

    def _open(self, rank: int) -> list[dict]:
        """The rank's collectives that have not ended, in any group."""
        return [e for e in self.dumps[rank]["entries"] if e["state"] != "completed"]

    def waits(self, rank: int) -> bool:
        """Whether the rank has an open collective in any group."""
        return bool(self._open(rank))

    def doing(self, rank: int) -> str:
        """The collective that the rank waits in; if there is none, what it does."""
        for entry in self._open(rank):
            mine = self.groups[entry["process_group"][0]]
            return name_of(entry) + ("" if len(mine) == len(self.seen) else f" in group {mine}")
        return "has ended the script" if self.seen[rank].finished else "in no collective"

    @property
    def stacks(self) -> str:
        """Where each rank's main thread was, innermost line first, as `py-spy dump` shows it."""
        texts = []
        for r, s in enumerate(self.seen):
            frames = s.where["stack"] if s.where else []
            mine = [f for f in frames if not re.search("site-packages|<frozen|helpers|three_axes", f.file)]
            at = " < ".join(f"{Path(f.file).name}:{f.number} {f.function}" for f in mine)
            texts.append(f"rank {r}: {at or ('dead' if s.exit is not None else 'no longer in the script')}")
        return "\n".join(texts)

    def table(self, rows: int = 3) -> Table:
        """The last `rows` numbers of every group with each rank's collectives. '…' has not ended."""
        ranks = range(len(self.seen))
        body = []
        for group, mine in self.groups.items():
            called = {
                (e["collective_seq_id"], r): _cell(e)
                for r, record in self.dumps.items()
                for e in record["entries"]
                if e["process_group"][0] == group
            }
            top = max((number for number, _ in called), default=0)
            absent = ["died" if r in self.dead else "never" if r in mine else "" for r in ranks]
            name = "" if len(self.groups) == 1 else "all: " if len(mine) == len(ranks) else f"{mine}: "
            for number in range(max(1, top - rows + 1), top + 1):
                body.append([f"{name}{number}", *(called.get((number, r), absent[r]) for r in ranks)])
        return Table(["number", *(f"rank {r}" for r in ranks)], body)

    def __repr__(self) -> str:
        wrapped = [textwrap.fill(line, 100, subsequent_indent="    ") for line in self.report.split("\n")]
        parts = (f"run {self.number}", self.script, "\n".join(wrapped), self.stacks, repr(self.table()))
        return "\n\n".join(parts)

    def write(self, folder: str) -> None:
        """The flight records as files, one a rank, for PyTorch's `torchfrtrace FOLDER`."""
        for rank, record in self.dumps.items():
            Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(record))


def seed_of(number: int, seed: int) -> int:
    """The seed of one run. The runs of one deal have different seeds."""
    return 10 * seed + number


def name_of(entry: dict) -> str:
    """The operation of an entry of a flight record, such as 'all_reduce'."""
    return entry["profiling_name"].partition(":")[2]


def _cell(entry: dict) -> str:
    """'all_reduce …', 'all_to_all of 8'. '…': it has not ended. 'of 8': the number of rows that the rank
    sends.
    """
    rows = f" of {entry['input_sizes'][0][0]}" if name_of(entry) == "all_to_all" else ""
    return name_of(entry) + rows + " …" * (entry["state"] != "completed")


def source(number: int) -> str:
    """The text of a run. From then on messages can quote its lines."""
    text = find(f"data/hangs/run_{number}.py").read_text(encoding="utf-8")
    name = f"run_{number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return text


@cache
def stop(number: int, seed: int = 0, seconds: float = SECONDS) -> Stopped | None:
    """Run one of the seven on fresh ranks until it has stopped. None if it ended by itself in that time.

    If it had not settled yet, because the machine is slow, it runs again, with more time unless it is the
    slow run.
    """
    for more in (1, 3, 9):
        stopped = _run(number, seed, seconds if number == SLOW else more * seconds)
        if stopped is None or _has_settled(stopped):
            break
    return stopped


def _run(number: int, seed: int, seconds: float) -> Stopped | None:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        records = {PREFIX: os.path.join(folder, "rank_")}
        with patch.dict(os.environ, records), World(RANKS, timeout=seconds) as world:
            world.quiet = 0.6  # nothing beside the ranks' main threads can free a run
            world.push(seed=seed_of(number, seed))
            try:
                world.cell(source(number), f"run_{number}.py")
            except RankError as e:
                files = sorted(Path(folder).iterdir())
                dumps = {int(f.name[5:]): pickle.loads(f.read_bytes()) for f in files}
                # The seconds of their waits differ from run to run.
                report = re.sub(r", \d+\.\d s(?=\s)", "", e.report)
                stands = e.kind == "deadlock"
                return Stopped(number, seed, report, e.seen, stands, _until_the_death(dumps, e.seen))
    return None


def _has_settled(stopped: Stopped) -> bool:
    """Whether every rank waits, has finished, is dead, or sleeps in `fetch` (run 7), and not all are in one
    collective, which they would leave together. If a rank died in a collective, all must have reached it. If
    none died, and the run is not the slow one, no rank may move any more.
    """
    if not (stopped.stands or stopped.number == SLOW or stopped.dead):
        return False
    deaths = [s.box["number"] for s in stopped.seen if s.exit is not None and s.box]
    records = [{e["record_id"] for e in record["entries"]} for record in stopped.dumps.values()]
    if any(number - 1 not in numbers for number in deaths for numbers in records):
        return False
    inside = [s.where["in"] for s in stopped.seen if s.where and s.where["in"]]
    if len(inside) == RANKS and len({(at["op"], at.get("number"), *at["needs"]) for at in inside}) == 1:
        return False
    going = lambda s: not (s.finished or s.error or s.exit is not None or s.where and s.where["in"])
    sleeps = lambda s: s.where and any(f.function == "fetch" for f in s.where["stack"])
    return all(sleeps(s) for s in stopped.seen if going(s))


def _until_the_death(dumps: dict[int, dict], seen: list[RankStatus]) -> dict[int, dict]:
    """The records. If a rank died in a collective, entries after it are removed, and it counts as not ended:
    what the others still did before they lost the connection is chance.
    """
    for s in seen:
        if s.exit is not None and s.box:
            for record in dumps.values():
                record["entries"] = [e for e in record["entries"] if e["record_id"] < s.box["number"]]
                for entry in record["entries"]:
                    if entry["record_id"] == s.box["number"] - 1:
                        entry["state"] = "scheduled"
    return dumps


# -- PyTorch's analyzer ----------------------------------------------------------------------------


def verdict(stopped: Stopped) -> str:
    """The report of PyTorch's analyzer, torchfrtrace, on these records, with the stack cut to the run's
    lines.
    """
    with redirect_stderr(StringIO()):  # it complains at its import where tabulate is not installed
        from torch.distributed.flight_recorder.components.builder import build_db
        from torch.distributed.flight_recorder.components.config_manager import JobConfig
    records = {
        f"rank_{r}": copy.deepcopy(record) | {"rank": r, "host_name": f"rank {r}"}
        for r, record in stopped.dumps.items()
    }
    for entry in (entry for record in records.values() for entry in record["entries"]):
        # The analyzer of PyTorch 2.11 refuses gloo's names. Its report gets the right names again below.
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
    """A line for each rank, in order, of the analyzer's culprits, which are in one line without an order."""
    return sorted(re.split(r", (?=Culprit)", line.removeprefix("error msg: ")))


# -- functions that the runs call ------------------------------------------------------------------

STEPS, ROWS, WIDTH = 8, 8, 8
LATE = 1.5  # seconds that the slow file takes


def odd_one(seed: int) -> tuple[int, int]:
    """(rank, step) that differs from the others: rank 0 to 3, step 2 to 5."""
    chance = random.Random(seed)
    return chance.randrange(4), chance.randrange(2, 6)


def batches(seed: int, rank: int, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """x (rows, width) and y (rows,) of each step. In one batch of one rank no y is positive."""
    chance = torch.Generator().manual_seed(100 * seed + rank)
    for step in range(steps):
        x, y = torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, generator=chance)
        y[0] = 1.0
        yield x, -y.abs() if (rank, step) == odd_one(seed) else y


def shard(seed: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of this rank's files. One rank has fewer of them."""
    where, step = odd_one(seed)
    return batches(seed, rank, step if rank == where else STEPS)


def settings(seed: int) -> tuple[int, int]:
    """(the rank that writes, the step after which it does), as the job's settings have them."""
    return odd_one(seed)


def read(seed: int, rank: int, step: int) -> float:
    """A number from the file of this rank and step. One file is broken."""
    if (rank, step) == odd_one(seed):
        raise OSError(f"cannot read step-{step}.bin")
    return 0.0


def fetch(seed: int, rank: int, step: int) -> float:
    """A number from a file on another machine. One of them takes its time."""
    if (rank, step) == odd_one(seed):
        time.sleep(LATE)
    return 0.0


def ready(seed: int, rank: int, step: int) -> tuple[str, str]:
    """Names of gradients, in the order in which this rank's backward has them ready."""
    return ("expert", "dense") if (rank, step) == odd_one(seed) else ("dense", "expert")


def route(seed: int, rank: int, step: int) -> tuple[list[int], list[int]]:
    """(give, take): the number of rows to send to each rank, and to receive from each. One rank, in one step,
    counts a row that it sends twice.
    """
    share = (2, 1, 3, 2)
    give = [share[(other - rank + step) % 4] for other in range(4)]
    take = [share[(rank - other + step) % 4] for other in range(4)]
    if (rank, step) == odd_one(seed):
        give[(rank + 1) % 4] += 1
    return give, take
