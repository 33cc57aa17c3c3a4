"""`Traffic`: the bytes that each rank sent, by the calls of PyTorch and by the operating system's count."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..table import Table, human
from .moves import KEPT, Begun, sides_of, target_receives_any
from .report import CollectiveCount, Report

THREE_WAYS = ("predicted", "counted", "on the wire", "wire ÷ predicted")  # columns of tables


class Traffic:
    """The bytes of a script, of a block, or of a function that a World ran. `repr` is a table with a row for
    each kind of collective, as rank 0 counted it. ranks[r]: the rows of rank r. All sizes are bytes *sent by
    one rank*, except `payload`, which is the size of the tensors in the collectives. peak_in_flight[r]: the
    largest number of bytes of tensors that rank r's collectives held at one time. not_waited: how many
    collectives, isend and irecv were begun for which no Python code waited (DDP may have waited for some of
    them in C++). late: how many operations took longer on this machine than on the emulated network, if any.
    """

    def __init__(self, reports: Sequence[Report], missing: Collection[int] = ()):
        self._missing = missing  # ranks without a report
        self.ranks: list[list[CollectiveCount]] = [r.rows for r in reports]
        self.peak_in_flight = [r.peak_in_flight for r in reports]
        self.late = sum(r.late for r in reports)
        self.not_waited = sum(r.not_waited for r in reports)
        self._connections = [r.wire for r in reports]
        self._begun = [r.begun for r in reports]

    @property
    def counted(self) -> list[float]:
        """Per rank: bytes that it must send for PyTorch's calls, by the formula of each collective."""
        return [sum(row.algorithmic for row in rows) for rows in self.ranks]

    @property
    def payload(self) -> list[float]:
        """Per rank: bytes of the tensors that PyTorch was asked to reduce, gather or send."""
        return [sum(row.payload for row in rows if row.op != "recv") for rows in self.ranks]

    @property
    def wire(self) -> list[int | None]:
        """Per rank: bytes that it sent by the operating system's count. None without such a count."""
        return [None if c is None else sum(c.values()) for c in self._connections]

    @property
    def waited(self) -> list[float]:
        """Per rank: seconds for which it was blocked in collectives. DDP's waits in its constructor and in
        forward are not included.
        """
        return [sum(row.waited for row in rows) for rows in self.ranks]

    @property
    def matrix(self) -> list[list[int]] | None:
        """matrix[a][b]: bytes that rank a sent to rank b, by the operating system's count."""
        known = [c for c in self._connections if c is not None]
        if len(known) < len(self._connections):
            return None
        # Use both ends: the system may give one port to two ranks if they connect to different ranks.
        end = {ports: rank for rank, connections in enumerate(known) for ports in connections}
        n = len(known)
        sent = [[0] * n for _ in range(n)]
        for rank, connections in enumerate(known):
            for (here, there), size in connections.items():
                if (there, here) in end:
                    sent[rank][end[there, here]] += size
        return sent

    def disagreement(self, both: bool = False) -> tuple[list[int], str] | None:
        """Two ranks whose calls of one collective, or of the send and the receive of one message, do not
        match, and a sentence on them; None if all match. Such a call may end without an error, because
        PyTorch does not compare, but its result means nothing. both: whether to leave out collectives that
        one of the ranks has not called.
        """
        for channel in dict.fromkeys(channel for begun in self._begun for channel in begun):
            if target_receives_any(channel, self._begun):
                continue
            sides = {r: its for r, its in sides_of(channel).items() if r not in self._missing}
            counts = [self._begun[r].get(its, Begun()).count for r, its in sides.items()]
            is_message, last = channel.source is not None, max(counts)
            for number in range(max(1, last - KEPT + 1), 1 + (min(counts) if is_message else last)):
                called = {r: self._begun[r].get(its, Begun()).signature(number) for r, its in sides.items()}
                one, *others = called or [0]
                if both:
                    one, *others = [r for r in called if called[r] is not None] or [one]
                if differ := [r for r in others if called[r] != called[one]]:
                    other = differ[0]
                    where = f"rank {one} to rank {other}" if is_message else "the call"
                    return [one, other], (
                        f"{'message' if is_message else 'collective'} number {number} of {where} does not"
                        f" agree: rank {one} {'passed' if is_message else 'called'}"
                        f" {called[one] or 'nothing'}, rank {other} {called[other] or 'nothing'}. What it"
                        " left in the tensors means nothing."
                    )
        return None

    def calls(self, op: str, axis: str | None = None, rank: int = 0) -> int:
        """How often `rank` called `op` (on `axis`, if given)."""
        return sum(row.calls for row in self.ranks[rank] if row.op == op and axis in (None, row.axis))

    def table(self, rank: int = 0) -> Table:
        """The collectives of one rank, those with the largest tensors first."""
        rows = sorted(self.ranks[rank], key=lambda row: -row.payload)
        return Table(
            ["collective", "axis", "calls", "payload", "by the book", "on the wire"],
            [
                [r.op, r.axis, str(r.calls), human(r.payload), human(r.algorithmic), human(r.wire)]
                for r in rows
            ],
            [
                "total",
                "",
                str(sum(r.calls for r in rows)),
                human(self.payload[rank]),
                human(self.counted[rank]),
                human(self.wire[rank]),
            ],
            title=f"rank {rank}: what it was asked to move, and what it sent",
        )

    def against(self, predicted: float | Sequence[float]) -> Table:
        """A table of each rank's bytes. predicted: one number for all ranks, or one for each."""
        n = len(self.ranks)
        of_rank = list(predicted) if isinstance(predicted, Sequence) else [predicted] * n
        if len(of_rank) != n:
            raise ValueError(f"{len(of_rank)} predictions for {n} ranks; give one number, or one per rank")
        rows = [self._three_ways(str(r), r, predicted) for r, predicted in enumerate(of_rank)]
        return Table(["rank", *THREE_WAYS], rows, title="bytes sent, per rank")

    def _three_ways(self, name: str, rank: int, predicted: float) -> list[str]:
        wire = self.wire[rank]
        ratio = "n/a" if wire is None or not predicted else f"{wire / predicted:.2f}"
        return [name, human(predicted), human(self.counted[rank]), human(wire), ratio]

    def __repr__(self) -> str:
        return repr(self.table()) if any(self.ranks) else "no bytes moved: the ranks called no collective"

    def _repr_html_(self) -> str | None:
        return self.table()._repr_html_() if any(self.ranks) else None


def side_by_side(runs: dict[str, tuple[Traffic, float]]) -> Table:
    """A table of the busiest rank's bytes in each run. runs: name -> (its traffic, the predicted bytes)."""
    rows = []
    for name, (traffic, predicted) in runs.items():
        busiest = max(range(len(traffic.ranks)), key=lambda r: traffic.wire[r] or traffic.counted[r])
        rows.append(traffic._three_ways(name, busiest, predicted))
    return Table(["run", *THREE_WAYS], rows, title="bytes sent by the busiest rank")
