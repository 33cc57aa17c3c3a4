"""The result of `count` and `counting()`: tables and sentences to print, a dict for JSON, a Chrome trace."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..table import Table, human, ranks
from .clock import chrome
from .counter import Counter, RankReport
from .report import CollectiveCount, alike
from .steps import BySteps
from .traffic import Traffic

MOST = 3  # tables that are printed at most for ranks that send something else than rank 0
PATIENCE = 60.0  # seconds after which a rank that has not sent its report is left out


class Counted(Traffic):
    """The traffic of a block or a script; read it after the block: `print(traffic)`.

    Only this rank's report is here at first. The others are fetched when an attribute that needs them is
    first read, for at most `patience` seconds. Then it has all attributes of `Traffic`, and two more.
    missing: the ranks that sent no report; they are not compared with others. steps[r]: rank r's collectives
    by optimizer step.
    """

    _mine: RankReport  # this rank's report, set when the block has ended

    def __init__(self, counter: Counter, patience: float = PATIENCE):
        self._counter, self._patience = counter, patience

    def finish(self) -> None:
        """Stop counting."""
        self._mine = self._counter.report()

    def __getattr__(self, name: str):
        if name.startswith("__") or "_reports" in self.__dict__:
            raise AttributeError(f"counted traffic has no {name!r}")
        if "_mine" not in self.__dict__:
            raise RuntimeError("the bytes are known when the block has ended: read `traffic` after it")
        self._gather()
        return getattr(self, name)

    def _gather(self) -> None:
        """Fetch the reports, and set the attributes of `Traffic`."""
        until = time.monotonic() + self._patience
        reports: dict[int, RankReport | None] = {self._mine.rank: self._mine}
        for rank in set(range(self._counter.size)) - set(reports):
            reports[rank] = self._counter.report_of(rank, until)
        self.missing = sorted(rank for rank, of_rank in reports.items() if of_rank is None)
        self._reports = [reports[rank] or RankReport(rank=rank) for rank in range(self._counter.size)]
        super().__init__([of_rank.report for of_rank in self._reports], self.missing)
        self.steps = [of_rank.steps for of_rank in self._reports]

    def tables(self, rank: int = 0) -> list[Table]:
        """Tables of a rank's collectives: of each first step, of the further ones, and after the last."""
        steps = self.steps[rank]
        if not steps.number:
            return [_table(f"rank {rank}, in all: no optimizer stepped", self.ranks[rank])]
        parts = [(f"step {i + 1}", rows) for i, rows in enumerate(steps.first)]
        if steps.further:
            title = f"each of steps {len(parts) + 1}–{steps.number}" if steps.further > 1 else "step 3"
            parts.append((title + ("" if steps.same else ", in the mean: they differ"), steps.mean()))
        if steps.after:
            parts.append(("after the last step", steps.after))
        return [_table(f"rank {rank}, {title}", rows) for title, rows in _merged(parts) if rows]

    def kinds(self) -> list[list[int]]:
        """Groups of ranks that send the same in a step: the stages of a pipeline are in different groups."""
        kinds: dict[frozenset, list[int]] = {}
        for rank in self._with_report():
            rows = self.of_a_step(rank)
            sent = frozenset((r.op, r.axis.split(" ")[0], len(r.members), r.calls, r.payload) for r in rows)
            kinds.setdefault(sent, []).append(rank)
        return list(kinds.values())

    def _with_report(self) -> list[int]:
        return [r for r in range(len(self.ranks)) if r not in self.missing]

    def _not_called_alike(self) -> list[str]:
        """Sentences on collectives that some members of their group called more often than others."""
        sentences = []
        groups = dict.fromkeys((r.op, r.axis, r.members) for rows in self.ranks for r in rows)
        for op, axis, members in groups:
            calls = {r: f"{self.calls(op, axis, r)} calls" for r in self._with_report() if r in members}
            if op not in ("send", "recv") and len(set(calls.values())) > 1:
                sentences.append(f"{op} on {axis}: {_by_value(calls)}")
        return sentences

    def _sharing(self) -> list[str]:
        """Sentences on which ranks computed on the same GPU."""
        users: dict[str, list[int]] = {}
        for rank in self._with_report():
            users.setdefault(self._reports[rank].gpu, []).append(rank)
        turns = "shared a GPU and took turns: seconds mean nothing"
        return [f"{ranks(those)} {turns}" for gpu, those in users.items() if gpu and len(those) > 1]

    def between_ranks(self) -> list[str]:
        """Sentences on differences between ranks that should be equal."""
        compared, sentences = self._with_report(), self._not_called_alike()
        shared = self._sharing()
        sentences += shared
        waited = {r: self.waited[r] for r in compared}
        if len(waited) > 1 and not shared and max(waited.values()) > 0:
            least, most = min(waited, key=waited.__getitem__), max(waited, key=waited.__getitem__)
            sentences.append(
                f"rank {least} waited least, {waited[least]:.2f} s; rank {most} most, {waited[most]:.2f} s:"
                f" rank {least} is the one that the others wait for"
                if waited[most] > 2 * waited[least]
                else f"all waited about alike, {waited[least]:.2f} to {waited[most]:.2f} s"
            )
        under_way = {r: self._reports[r].report.under_way for r in compared}
        if any(under_way.values()):
            sentences.append(
                f"collectives that had not ended when counting did, since nobody waited for them:"
                f" {_by_value({r: str(n) for r, n in under_way.items()})}. Their bytes on the wire are n/a"
            )
        if wrong := self.disagreement():
            sentences.append(wrong[1])
        if self.missing:
            sentences.append(f"{ranks(self.missing)} sent no report yet")
        return sentences

    def __repr__(self) -> str:
        if not any(self.ranks):
            return "no bytes moved: the ranks called no collective"
        parts = [*map(repr, self.tables(self._mine.rank))]
        others = self.kinds()[1:]
        for kind in others[:MOST]:
            title = f"{ranks(kind)}, a step" + f" (rank {kind[0]})" * (len(kind) > 1)
            parts.append(repr(_table(title, self.of_a_step(kind[0]))))
        if len(others) > MOST:
            parts.append(f"{len(others) - MOST} more kinds of rank: --json has them")
        if differences := self.between_ranks():
            parts.append("\n".join(["between ranks", *differences]))
        return "\n\n".join(parts)

    def _repr_html_(self) -> None:
        return None

    def json(self) -> dict:
        """The report as a dict for other programs. Times are in seconds, sizes in bytes."""
        return {
            "ranks": [
                {
                    "rank": of_rank.rank,
                    "missing": of_rank.rank in self.missing,
                    "backend": of_rank.backend,
                    "steps": of_rank.steps.number,
                    "total": _rows(of_rank.report.rows),
                    "first": [_rows(rows) for rows in of_rank.steps.first],
                    "each": _rows(of_rank.steps.mean()),
                    "each_is_the_same": of_rank.steps.same,
                    "seconds_of_a_step": of_rank.steps.seconds / max(1, of_rank.steps.further),
                    "after": _rows(of_rank.steps.after),
                    "wire": None if of_rank.report.wire is None else sum(of_rank.report.wire.values()),
                    "peak_in_flight": of_rank.report.peak_in_flight,
                }
                for of_rank in self._reports
            ],
            "between_ranks": self.between_ranks(),
        }

    def trace(self) -> dict:
        """The run as a Chrome trace, from the times that were kept."""
        shift = lambda spans, by: [s._replace(start=s.start + by, end=s.end + by) for s in spans]
        return chrome(
            [shift(of_rank.report.spans, of_rank.clock) for of_rank in self._reports],
            [shift(of_rank.report.streams, of_rank.clock) for of_rank in self._reports],
            [[(at + of_rank.clock, size) for at, size in of_rank.report.levels] for of_rank in self._reports],
        )

    def of_a_step(self, rank: int = 0) -> list[CollectiveCount]:
        """The rows of a usual step: the mean of the further ones, or else the last step."""
        steps: BySteps = self.steps[rank]
        return steps.mean() if steps.further else steps.first[-1] if steps.first else self.ranks[rank]


def _table(title: str, rows: Iterable[CollectiveCount]) -> Table:
    rows = sorted(rows, key=lambda row: (row.axis, -row.payload))
    wire = [row.wire for row in rows if row.wire is not None]
    return Table(
        ["axis", "collective", "calls", "payload", "must send", "on the wire", "waited"],
        [
            [
                f"{row.axis} ({len(row.members)})",
                row.op,
                f"{row.calls:g}",
                human(row.payload),
                human(row.algorithmic),
                human(row.wire),
                f"{1e3 * row.waited:.1f} ms",
            ]
            for row in rows
        ],
        [
            "total",
            "",
            f"{sum(row.calls for row in rows):g}",
            human(sum(row.payload for row in rows if row.op != "recv")),
            human(sum(row.algorithmic for row in rows)),
            human(sum(wire) if len(wire) == len(rows) else None),
            f"{1e3 * sum(row.waited for row in rows):.1f} ms",
        ],
        title=title,
    )


def _merged(parts: list[tuple[str, list[CollectiveCount]]]) -> list[tuple[str, list[CollectiveCount]]]:
    """The parts (title, rows) without the second step, if it equals the further ones; their title says so."""
    names = [title for title, _ in parts]
    if len(parts) > 2 and names[2].startswith("each of steps 3") and alike(parts[1][1], parts[2][1]):
        return [parts[0], (names[2] + " (step 2 is alike)", parts[2][1]), *parts[3:]]
    return parts


def _by_value(values: dict[int, str]) -> str:
    """The ranks of each value as text: 'ranks 0 and 1 4 calls, rank 2 0 calls'. values: rank -> its value."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return ", ".join(f"{ranks(members)} {value}" for value, members in groups.items())


def _rows(rows: Iterable[CollectiveCount]) -> list[dict]:
    return [
        {
            "collective": row.op,
            "axis": row.axis,
            "ranks": list(row.members),
            "calls": row.calls,
            "payload": row.payload,
            "must_send": row.algorithmic,
            "wire": row.wire,
            "waited": row.waited,
            "types": sorted(row.types),
        }
        for row in rows
    ]
