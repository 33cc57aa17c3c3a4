"""When something goes wrong on the ranks: what the reader is told.

Each function takes what is known and gives the text. The order is always the same:
who failed and how, where in the reader's code, what the others were doing, and
what has become of the ranks' variables.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from three_axes import lines
from three_axes.count import Deadlock
from three_axes.table import human, ranks

from .messages import Error

KILLED = "If you did not do that, the machine ran out of memory: use a smaller model, batch or world"
RETURN = "Return numbers, strings, tensors, or lists and dicts of them.\n"

EVERYBODY = (
    "Every rank must call new_group and init_device_mesh in the same order, also one that will not be a"
    " member (with use_local_synchronization=True only members)."
)


ALIVE = "The ranks are alive and keep their variables."
KEPT = (
    f"{ALIVE} Their groups were formed anew: subgroups, meshes and models in DDP or FSDP must be made again."
)
FRESH = "All ranks were started afresh: the variables of earlier cells are gone, so run those cells again."


class RankError(RuntimeError):
    """A call on the ranks failed. `ranks` are those at fault, `kind` is one of 'raised', 'died', 'timeout',
    'deadlock', 'disagree' (the call came to its end, though ranks brought what does not fit), 'result';
    `seen` is what was known of each rank; `deadlock` is the proof that some could not go on. The message is
    written for the reader."""

    def __init__(
        self,
        message: str,
        kind: str,
        at_fault: Iterable[int],
        state_kept: bool,
        seen: list[RankStatus],
        deadlock: Deadlock | None = None,
    ):
        super().__init__(message)
        self.kind, self.ranks, self.state_kept, self.seen = kind, sorted(at_fault), state_kept, seen
        self.deadlock = deadlock

    @property
    def report(self) -> str:
        """The message without its last line, which tells what is left of the world, and without advice on
        timeouts: for a world that nobody will use again."""
        return "\n".join(str(self).split("\n")[:-1]).replace(", with timeout=… in seconds", "")

    def __reduce__(self):
        return RankError, (str(self), self.kind, self.ranks, self.state_kept, self.seen, self.deadlock)

    def _render_traceback_(self) -> list[str]:
        """IPython shows this and not a traceback through our own code."""
        return str(self).split("\n")


class RanksInterrupted(KeyboardInterrupt):
    """The reader pressed stop. The message says where each rank was."""

    def _render_traceback_(self) -> list[str]:
        return str(self).split("\n")


@dataclass
class RankStatus:
    """What is known of one rank when a call goes wrong."""

    error: Error | None = None  # it raised
    exit: int | None = None  # its process ended, with this status (negative: the signal)
    orphaned: bool = False  # the server that had forked it has ended, so nobody knows of its own end
    stopped: bool = False  # by SIGSTOP: it is silent, and may go on
    where: dict | None = None  # what it says it is doing (worker.Rank._where)
    box: dict | None = None  # the last collective it entered (meter.Recorder.box)
    finished: bool = False  # it had ended the call in good order
    said: str = ""  # what it had printed


def explain(
    seen: list[RankStatus], timeout: float | None, deadlock: Deadlock | None, mend: Callable[[], str]
) -> RankError:
    """What became of a call that failed.

    mend: frees the ranks, completes `seen` where one dies of it, and returns the sentence on their variables.
    """
    raising = [r for r, s in enumerate(seen) if s.error and not s.error.aborted]
    raising = [r for r in raising if not seen[r].error.follows] or raising
    had_died = any(s.exit is not None for s in seen)
    state = mend()
    kept = state != FRESH
    if had_died:
        dead = [r for r, s in enumerate(seen) if s.exit is not None]
        return RankError(died(seen, dead, state), "died", dead, False, seen)
    if not raising and deadlock:
        told = deadlocked(seen, deadlock, state)
        return RankError(told, "deadlock", deadlock.ranks, kept, seen, deadlock)
    if not raising:
        stuck = [r for r, s in enumerate(seen) if not s.finished]
        return RankError(timed_out(seen, timeout, state), "timeout", stuck, kept, seen)
    if all(seen[r].error.cause == "result" for r in raising):
        return RankError(result(seen, raising, state), "result", raising, kept, seen)
    raising = [r for r in raising if not seen[r].error.cause]
    return RankError(raised(seen, raising, state), "raised", raising, kept, seen)


def raised(seen: list[RankStatus], first: list[int], state: str) -> str:
    """`first` raised by themselves."""
    raising: dict[tuple, list[int]] = {}
    for r in first:
        e = seen[r].error
        raising.setdefault((e.type, e.message, tuple(e.lines)), []).append(r)
    parts = []
    for (kind, message, frames), members in raising.items():
        parts.append(f"{ranks(members, of=len(seen))} raised {kind}" + (f": {message}" if message else ""))
        parts += ["    " + line for line in _unrepeated([lines.show(f) for f in frames])]
    return "\n".join(parts + _others(seen, first) + [state])


def _unrepeated(shown: list[str]) -> list[str]:
    """A recursion's thousand equal lines, as one and how often."""
    out = []
    for line, group in itertools.groupby(shown):
        times = len(list(group))
        out.append(line + (f"   ({times} times)" if times > 1 else ""))
    return out if len(out) <= 12 else [*out[:6], f"… {len(out) - 12} lines …", *out[-6:]]


def result(seen: list[RankStatus], first: list[int], state: str) -> str:
    """The code ran on every rank, but a result could not be sent to the notebook."""
    return (
        f"{ranks(first, of=len(seen))} ran to the end, but the result cannot be sent back: "
        f"{seen[first[0]].error.message}\n" + RETURN + state
    )


def unreadable(r: int, error: Exception, state: str) -> str:
    """A result came, and the kernel cannot make it an object again."""
    return (
        f"rank {r} ran to the end, but its result cannot be read in the notebook: {type(error).__name__}:"
        f" {error}\n" + RETURN + state
    )


def not_taken(slow: list[int], n: int, size: int, seconds: float, state: str) -> str:
    """`slow` ranks had not received the call when its time was over."""
    return (
        f"{ranks(slow, of=n)} had not taken the {human(size)} of the call's arguments after {seconds:g} s,"
        " and had to be ended. Give it more time with timeout=… in seconds, or make the data on the ranks.\n"
        + state
    )


def no_message(rank: int, n: int, state: str) -> str:
    """The rank has written into the pipe through which it answers."""
    return (
        f"{ranks([rank], of=n)} has sent the notebook something that is no answer: the call's code, or a"
        " library of it, has written to a file descriptor that is not its own.\n" + state
    )


def not_shared(error: RankError, n: int, gpus: int) -> str:
    """The first all-reduce of ranks that were to share GPUs has failed."""
    those = f"{n} ranks could not share {gpus} GPU{'s' * (gpus > 1)}"
    return f"{those}: {error.report}\nWorld({n}) runs on the CPU"


def died(seen: list[RankStatus], dead: list[int], state: str) -> str:
    """The processes of `dead` are gone."""
    aborted = [r for r in dead if seen[r].exit == -signal.SIGABRT]
    if aborted and (text := _mismatch(seen, aborted)):
        return "\n".join([text, state])
    if all(seen[r].orphaned for r in dead):
        return f"the process that forks all ranks is gone, and they with it. {KILLED}.\n{state}"
    parts = []
    for r in dead:
        parts.append(f"rank {r} is gone: {_manner(seen[r].exit)}")
        if box := seen[r].box:
            parts.append(f"    its last collective: {_collective(box)}")
        if seen[r].exit == -signal.SIGABRT and seen[r].said:
            parts += ["    " + line for line in seen[r].said.strip().split("\n")[-3:]]
    return "\n".join(parts + _others(seen, dead) + [state])


def timed_out(seen: list[RankStatus], seconds: float, state: str) -> str:
    """The call did not end in time."""
    parts = [f"no end after {seconds:g} s, so the call was stopped"]
    parts += _others(seen, [], heading="When it was stopped:")
    stuck = {r: s.where["in"] for r, s in enumerate(seen) if s.where and s.where["in"]}
    never = sorted({other for inside in stuck.values() for other in inside["needs"]} - set(stuck))
    whats = {_collective(inside, peer=False) for inside in stuck.values()}
    ops = {inside["op"] for inside in stuck.values()}
    if "new_group" in ops and never:
        parts.append(EVERYBODY)
    if never:
        waiting = [r for r, inside in stuck.items() if set(never) & set(inside["needs"])]
        parts.append(
            f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(never)}, which never"
            " came."
        )
        if running := [r for r in never if not seen[r].finished]:
            parts[-1] += (
                f" But {ranks(running)} had not ended: it may only need longer, with timeout=… in seconds."
            )
    elif len(whats) > 1:
        parts.append(
            "The ranks are in different collectives: each waits for the others to enter its own. "
            "All ranks of a group must call the same collectives in the same order."
        )
    elif stuck and not ops & {"send", "recv"}:
        parts.append(
            "All are in the same collective: its data may only need longer, with timeout=… in seconds."
        )
    elif not stuck:
        parts.append("No rank is in a collective: it may only need longer, with timeout=… in seconds.")
    helped = {r: s.where["help"] for r, s in enumerate(seen) if s.where and s.where["help"]}
    parts += [f"That is no proof of a hang: rank {r} {what}." for r, what in list(helped.items())[:3]]
    return "\n".join(parts + [state])


def deadlocked(seen: list[RankStatus], deadlock: Deadlock, state: str) -> str:
    """The call can never end, which is known before its time is over."""
    what = "the ranks do not agree" if deadlock.kind == "disagree" else "no rank can ever go on"
    others = _others(seen, [], heading="When it was stopped:")
    deadlock.lines = {r: s.where["line"].number for r, s in enumerate(seen) if s.where and s.where["line"]}
    return "\n".join([f"{what}, so the call was stopped", *others, str(deadlock), state])


def standing(seen: list[RankStatus]) -> str:
    """Where each rank is now, in one line, and why that is no proof of a hang where all only wait."""
    groups: dict[str, list[int]] = {}
    for r, s in enumerate(seen):
        groups.setdefault(_is_at(s), []).append(r)
    told = "; ".join(f"{ranks(who)}: {where}" for where, who in groups.items())
    waits = all(s.finished or s.where and s.where["waits"] for s in seen)
    why = [f"rank {r} {s.where['help']}" for r, s in enumerate(seen) if s.where and s.where["help"]]
    return told + (f". That is no proof of a hang: {why[0]}" if waits and why else "")


def _is_at(s: RankStatus) -> str:
    if s.finished:
        return "finished"
    if s.where is None:
        return "no answer"
    inside = s.where["in"]
    if inside and s.where["waits"]:
        at = f", {lines.place(lines.Line(*inside['line']))}" if inside["line"] else ""
        return f"in {_collective(inside)}{at}"
    return lines.place(s.where["line"]) if s.where["line"] else "in code that is not yours"


def left_behind(seen: list[RankStatus], members: list[int], state: str) -> str:
    """All ranks' code has ended, and `members` had begun what nobody waits for and cannot end."""
    began: dict[str, list[int]] = {}
    for r in members:
        if (where := seen[r].where) and (inside := where["in"]):
            began.setdefault(_collective(inside) + _at(inside), []).append(r)
    told = [f"    {ranks(who)} began {what}" for what, who in began.items()]
    return "\n".join(["note: nobody waits for this, and it cannot end, so it was given up:", *told, state])


def interrupted(seen: list[RankStatus], state: str) -> str:
    """The reader has pressed stop. Says what each rank was doing."""
    return "\n".join(["stopped, as you asked."] + _others(seen, [], heading="When it was stopped:") + [state])


def _others(seen: list[RankStatus], but: list[int], heading: str = "Meanwhile:") -> list[str]:
    """A line for each thing that the ranks not in `but` were doing, equal ones together, with the longest of
    their waits.
    """
    doing: dict[tuple[str, str], dict[int, float | None]] = {}
    for r, s in enumerate(seen):
        if r not in but:
            what, since, where = _doing(s)
            doing.setdefault((what, where), {})[r] = since
    told = []
    for (what, where), members in doing.items():
        longest = "" if None in members.values() else f", {time.monotonic() - min(members.values()):.1f} s"
        if what.startswith("was ") and len(members) > 1:
            what = "were" + what[3:]
        told.append(f"    {ranks(list(members))} {what}{longest}{where}")
    return [heading, *told] if doing else []


def _doing(s: RankStatus) -> tuple[str, float | None, str]:
    """(what a rank was doing, since when it waited if it did, where in its code)."""
    if s.finished:
        return "had finished", None, ""
    if s.error and s.error.follows:
        return "lost the connection", None, f" at {lines.show(s.error.lines[-1])}" if s.error.lines else ""
    if s.error and not s.error.aborted:
        return f"raised {s.error.type}", None, ""
    if s.where is None:
        return "was stopped, by SIGSTOP or a debugger" if s.stopped else "did not answer", None, ""
    if inside := s.where["in"]:
        return f"waited in {_collective(inside)}", inside["at"], _at(inside)
    if s.where["line"]:
        return "was at", None, f" {lines.show(s.where['line'])}"
    if s.where["running"] is not None:
        return "was in code that is not yours", None, ""
    return "had finished", None, ""


def _collective(box: dict, peer: bool = True) -> str:
    """'all_reduce of float32[100]', 'recv of float32[100] from rank 2'."""
    text = box["op"]
    if box["shape"] is not None:
        text += f" of {box['dtype']}{box['shape']}"
    if peer and box["op"] in ("send", "recv") and len(box["needs"]) == 1:
        text += f" {'to' if box['op'] == 'send' else 'from'} rank {box['needs'][0]}"
    if box["peer"] is not None and box["op"] not in ("send", "recv"):
        text += f", root {box['peer']}"
    return text + ("" if box["axis"] == "world" else f" in group {box['axis']}")


def _at(box: dict) -> str:
    """Where a collective was begun in the reader's code, to be put behind its name; "" where nobody knows."""
    return f"   {lines.show(lines.Line(*box['line']))}" if box["line"] else ""


def _mismatch(seen: list[RankStatus], aborted: list[int]) -> str | None:
    """The commonest reason for gloo to abort a process: two ranks brought tensors of different size."""
    printed = "\n".join(seen[r].said for r in aborted)
    if not re.search(r"enforce fail|EnforceNotMet|op\.preamble|nbytes|gloo::", printed):
        return None
    brought: dict[str, list[int]] = {}
    for r, s in enumerate(seen):
        if s.box:
            brought.setdefault(_collective(s.box, peer=False), []).append(r)
    if len(brought) < 2:
        return None
    parts = ["the ranks met in one collective with tensors that do not match:"]
    for what, members in brought.items():
        parts.append(f"    {ranks(members)} called {what}{_at(seen[members[0]].box)}")
    parts.append(
        "Every rank must bring the same shape and dtype. PyTorch does not check this; "
        f"gloo ended the process of {ranks(aborted)} when the bytes did not fit."
    )
    return "\n".join(parts)


def _manner(status: int | None) -> str:
    if status == -signal.SIGKILL:
        return f"its process was killed (SIGKILL). {KILLED}"
    if status is not None and status < 0:
        return f"its process died of {signal.Signals(-status).name}"
    return f"its process ended by itself (exit status {status})"
