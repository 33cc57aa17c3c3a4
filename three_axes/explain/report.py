"""The report on one or many traces, as text and for other programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..foreign import Unreadable, plain
from ..table import Table, human, ranks
from .advice import LEAST, Advice, advice, longer, slowest
from .collectives import NAMED, UNKNOWN, Collective
from .reading import read
from .skew import Skew, skews
from .split import UNSAID, Split, split

GROUPS = 4  # groups whose waiting is reported
KERNELS = 5  # unrecognised kernels that are named
ROWS = 12  # kinds of collective in the table
# The fields of each rank's `Split` that --json prints.
FIELDS = ("rank", "file", "seconds", "steps", "parts", "communication", "hidden", "working")


@dataclass
class Explained:
    """The report on one recording. splits: one for each rank. unknown: sentences on what these traces do not
    contain. skews: which rank waited for which.
    """

    splits: list[Split]
    advice: list[Advice]
    unknown: list[str]
    skews: list[Skew]

    def parts(self) -> Table:
        """A table of each rank's time in a step, by part. If there are more than four ranks, it has three:
        those that work longest, in the median and shortest.
        """
        names = dict.fromkeys(part for s in self.splits for part in s.parts)
        rows = [[name] for name in names if any(s.parts.get(name, 0) > 0 for s in self.splits)]
        chosen = self.splits if len(self.splits) <= 4 else self._extremes()
        what = "a step" if all(s.steps for s in chosen) else "what was recorded"
        columns, total = [what], ["together"]
        for s in chosen:
            columns += [f"rank {s.rank}", "share"]
            total += _in_a_step(s, s.seconds)
            for row in rows:
                row += _in_a_step(s, s.parts.get(row[0], 0.0))
        return Table(columns, rows, total, title=f"where the time of {what} went")

    def _extremes(self) -> list[Split]:
        """The ranks that work longest, in the median and shortest."""
        ranked = sorted(self.splits, key=lambda s: -s.working)
        return [ranked[0], ranked[len(ranked) // 2], ranked[-1]]

    def collectives(self) -> Table:
        """A table of the slowest rank's collectives, with a row for each of the `ROWS` kinds that take
        longest: calls, milliseconds of a step and of a call, and bandwidth.
        """
        slow = slowest(self.splits)
        kinds: dict[tuple, list[Collective]] = {}
        for c in slow.collectives:
            kinds.setdefault(c.kind, []).append(c)
        ranked = sorted(kinds.items(), key=lambda kind: -sum(c.end - c.start for c in kind[1]))
        rows = []
        steps = max(1, slow.steps)
        for (op, axis, payload), alike in ranked[:ROWS]:
            took = [c.end - c.start for c in alike]
            middle, sent = statistics.median(took), alike[0].sent
            whole = len(alike) % steps == 0
            calls = f"{len(alike) // steps}" if whole else f"{len(alike)} in {steps} steps"
            rates = [f"{sent / us / 1e3:.1f} GB/s" if sent and us > 0 else "" for us in (middle, min(took))]
            times = [sum(took) / steps / 1e3, 1e3 * slow.alone[op, axis, payload] / steps, middle / 1e3]
            rows.append([op, axis, human(payload), calls, *(f"{ms:.2f} ms" for ms in times), *rates])
        left = "" if len(ranked) <= ROWS else f"; {len(ranked) - ROWS} more kinds take less"
        return Table(
            [
                "collective",
                "axis",
                "size",
                "calls a step" if slow.steps else "calls",
                "together",
                "exposed",
                "median",
                "bandwidth",
                "best",
            ],
            rows,
            title=f"rank {slow.rank}'s collectives, by time (bandwidth: bytes a ring must send){left}",
        )

    def sentences(self) -> list[str]:
        """Sentences on the share that is hidden, the slowest rank, and which rank waits for which."""
        slow, sentences = slowest(self.splits), []
        if slow.communication:
            also = f", {slow.unsure:.1%} under kernels that are not recognised" * (slow.unsure >= LEAST)
            sentences.append(
                f"rank {slow.rank} communicates {slow.communication / slow.seconds:.1%} of the time, and"
                f" {slow.hidden:.1%} of that is hidden under computation{also}"
            )
        if len(self.splits) > 1:
            sentences.append(self._slowest())
        return sentences + [skew.sentence() for skew in self.skews[:GROUPS]]

    def _slowest(self) -> str:
        slow = slowest(self.splits)
        here = " here" * bool(self.missing())
        if longer(self.splits):
            others = statistics.median(s.working for s in self.splits if s is not slow)
            return (
                f"rank {slow.rank} is the slowest{here}: without waiting for others it works"
                f" {slow.working / max(1e-9, others):.2f} times as long as the median of the other ranks"
            )
        if any(s.may_wait > LEAST * s.seconds for s in self.splits):
            return "not known: which rank is the slowest; what is not recognised may be waiting for others"
        return f"no rank is the slowest{here}: without waiting for others they work equally long, within 1%"

    def _missing(self) -> str:
        if not (missing := self.missing()):
            return ""
        size = max(s.size or 0 for s in self.splits)
        return (
            f"traces of {len(missing)} of {size} ranks are missing ({ranks(missing)}): this report is on"
            f" {ranks([s.rank for s in self.splits])}, and another rank may be slower"
        )

    def missing(self) -> list[int]:
        """Ranks of the job for which no file was given."""
        size = max(s.size or 0 for s in self.splits)
        return sorted(set(range(size)) - {s.rank for s in self.splits})

    def __repr__(self) -> str:
        parts = [self._missing(), repr(self.parts())]
        if any(s.collectives for s in self.splits):
            parts.append(repr(self.collectives()))
        parts.append("\n".join(self.sentences()))
        advised = ["what to fix, the most costly first:"]
        for i, a in enumerate(self.advice, 1):
            share = a.seconds / slowest(self.splits).seconds
            advised.append(f"{i}. {share:.1%}: {a.text} (drop {a.drop:02d})")
        parts += ["\n".join(advised) if self.advice else self._nothing(), "\n".join(self.unknown)]
        return "\n\n".join(filter(None, parts))

    def _nothing(self) -> str:
        slow = slowest(self.splits)
        if slow.strange and not slow.on_gpu:
            return "nothing is advised: the trace has the host's part alone"
        beside = " and what is not known" * bool(slow.may_wait > LEAST * slow.seconds)
        return f"nothing takes more than one hundredth of the time beside computing{beside}"

    def json(self) -> dict:
        """The report as a dict, for --json. Seconds are those of the whole recording. slowest: None if no
        rank works longer than the others.
        """
        return {
            "ranks": [{name: getattr(s, name) for name in FIELDS} for s in self.splits],
            "slowest": slowest(self.splits).rank if longer(self.splits) else None,
            "missing": self.missing(),
            "advice": [a._asdict() for a in self.advice],
            "waiting": [vars(skew) for skew in self.skews],
            "unknown": self.unknown,
        }


def explain(files: Sequence[str]) -> Explained:
    """Read traces, one for each rank, and make the report. Raises Unreadable if a file is no trace, or if two
    are of the same rank. A trace that does not say of which rank it is gets its place among the files.
    """
    splits: list[Split] = []
    paths: dict[int | None, str] = {}
    for i, file in enumerate(files):
        trace = read(file)
        if trace.rank is not None and trace.rank in paths:
            raise Unreadable(
                f"{paths[trace.rank]} and {trace.file} are both of rank {trace.rank}: give one trace for each"
                " rank"
            )
        paths[trace.rank] = trace.file
        splits.append(split(trace, i))
    splits.sort(key=lambda s: s.rank)
    found, inconclusive = skews(splits)
    return Explained(splits, advice(splits, found), _unknown(splits) + inconclusive, found)


def _in_a_step(split: Split, seconds: float) -> list[str]:
    return [f"{1e3 * seconds / max(1, split.steps):.1f} ms", f"{seconds / split.seconds:.1%}"]


def _unknown(splits: list[Split]) -> list[str]:
    """Sentences on what the traces do not contain."""
    unknown, sent = [], [c for s in splits for c in s.collectives]
    if strange := sorted({device for s in splits for device in s.strange}):
        unknown.append(
            f"not known: what {' and '.join(strange)} devices did; the trace has no events of theirs that are"
            " read here, and this report has only the host's part"
        )
    slow = slowest(splits)
    if alike := _on_one_number(splits):
        more = f"; nor of {len(alike) - 1} more such groups" * (len(alike) > 1)
        unknown.append(
            f"not known: whether {ranks(alike[0])} shared a GPU: each has the same number for its own, and a"
            f" trace does not name it{more}. Ranks that share one take turns: then seconds mean nothing"
        )
    if len(slow.devices) > 1:
        unknown.append(
            f"not known: what each of the {len(slow.devices)} GPUs of rank {slow.rank} did; a moment counts"
            " as computing where one of them computes"
        )
    if slow.unrecognised:
        names = ", ".join(
            f"{plain(name, 60)} ({seconds / slow.seconds:.1%})"
            for name, seconds in list(slow.unrecognised.items())[:KERNELS]
        )
        more = f" and {len(slow.unrecognised) - KERNELS} more" * (len(slow.unrecognised) > KERNELS)
        unknown.append(f"not recognised: {names}{more}; these kernels may compute or communicate")
    if (idle := slow.parts.get(UNSAID, 0.0)) > LEAST * slow.seconds:
        unknown.append(
            f"not known: what the GPU waited for in {idle / slow.seconds:.1%} of the time; the trace does not"
            " have the launch of the kernel that came next"
        )
    if not sent:
        return unknown + [_no_collective(splits)] + _no_steps(splits)
    if any(c.axis == UNKNOWN for c in sent):
        unknown.append(
            "not known: the axis of some collectives. Newer PyTorch writes the group of each NCCL kernel into"
            " its traces; gloo's have none"
        )
    if any(c.payload is None and c.op != "barrier" for c in sent):
        unknown.append("not known: bytes and bandwidth where a collective's size is not in the trace")
    if any(c.op.startswith("send or") for c in sent):
        unknown.append("not known: whether a SendRecv kernel is a pipeline's send or an all_to_all")
    if strangers := sorted({c.op for c in sent if c.op not in NAMED}):
        unknown.append(
            f"not known: which collective {', '.join(strangers)} is; its kernel's name does not say"
        )
    return unknown + _no_steps(splits)


def _on_one_number(splits: list[Split]) -> list[list[int]]:
    """Groups of ranks that may have shared a GPU: on one machine, as far as that is known, with the same
    number for their GPU. (Ranks that see only their own GPU also have the same number.)
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for s in splits:
        for device in s.devices:
            groups.setdefault((s.host, device), []).append(s.rank)
    return [members for members in groups.values() if len(members) > 1]


def _no_collective(splits: list[Split]) -> str:
    size = max(s.size or 1 for s in splits)
    if size == 1 and not any(s.unrecognised or s.strange for s in splits):
        return "no collective was recorded: one rank alone, or a process that only computed"
    of = f", though the job has {size} ranks" * (size > 1)
    return f"not known: what the ranks send each other; no collective is recognised in the trace{of}"


def _no_steps(splits: list[Split]) -> list[str]:
    if all(s.steps for s in splits):
        return []
    return [
        "not known: where a step ends. Times and calls are of all that was recorded. profile() marks steps"
        " where it is given a schedule= and step() is called after each"
    ]
