"""Writes the error messages for a call that fails on the ranks.

Every message has the same order: which ranks failed and how, the line of the user's code, what the other
ranks were doing, and whether the ranks keep their variables.
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

# Sentences of the messages.
KILLED = "If you did not do that, the machine ran out of memory: use a smaller model, batch or world"
RETURN = "Return numbers, strings, tensors, or lists and dicts of them.\n"

EVERYBODY = (
    "Every rank must call new_group and init_device_mesh with the same ranks in the same order, also one that"
    " will not be a member (with use_local_synchronization=True only members)."
)


ALIVE = "The ranks are alive and keep their variables."
KEPT = (
    f"{ALIVE} Their groups were formed anew: subgroups, meshes and models in DDP or FSDP must be made again."
)
FRESH = "All ranks were started afresh: the variables of earlier cells are gone, so run those cells again."


class RankError(RuntimeError):
    """A call on the ranks failed. ranks: the ranks at fault; after a timeout, those that had not ended. kind:
    'raised', 'died', 'timeout', 'deadlock', 'result' (it cannot be sent or read), or 'disagree' (the call
    ended, but ranks called a collective with arguments that do not match). state_kept: whether the ranks keep
    their variables. seen: the status of each rank. deadlock: who waited for whom when no rank moved any more,
    or None.
    """

    def __init__(
        self,
        message: str,
        kind: str,
        at_fault: Iterable[int],
        state_kept: bool,
        statuses: list[RankStatus],
        deadlock: Deadlock | None = None,
    ):
        super().__init__(message)
        self.kind, self.ranks, self.state_kept, self.seen = kind, sorted(at_fault), state_kept, statuses
        self.deadlock = deadlock

    @property
    def report(self) -> str:
        """The message without its last line, which is on the state of the world, and without advice on
        timeouts: for a world that nobody will use again."""
        return "\n".join(str(self).split("\n")[:-1]).replace(", with timeout=… in seconds", "")

    def __reduce__(self):
        return RankError, (str(self), self.kind, self.ranks, self.state_kept, self.seen, self.deadlock)

    def _render_traceback_(self) -> list[str]:
        """IPython prints these lines instead of a traceback through this package."""
        return str(self).split("\n")


class RanksInterrupted(KeyboardInterrupt):
    """The reader pressed stop. The message names the line of each rank, unless a message was half sent."""

    def _render_traceback_(self) -> list[str]:
        return str(self).split("\n")


@dataclass
class RankStatus:
    """What is known of one rank when a call goes wrong."""

    error: Error | None = None  # the rank raised
    exit: int | None = None  # the process ended with this status (negative: the signal)
    orphaned: bool = False  # the server that forked the process has ended: the exit status is unknown
    stopped: bool = False  # by SIGSTOP: it does not answer now, and may continue later
    where: dict | None = None  # the rank's answer to the question what it is doing (worker.Rank._where)
    box: dict | None = None  # the last collective that the rank entered (meter.Recorder.box)
    finished: bool = False  # the rank had ended the call without an error
    said: str = ""  # what the rank had printed


def explain(
    statuses: list[RankStatus],
    timeout: float | None,
    deadlock: Deadlock | None,
    mend: Callable[[], str],
    quiet: float,
) -> RankError:
    """The error for a call that failed. quiet: seconds without a movement after which `deadlock` was read.

    mend: a function that frees the ranks, completes `statuses` if a rank dies meanwhile, and returns the
    sentence on the ranks' variables.
    """
    raising = [r for r, s in enumerate(statuses) if s.error and not s.error.aborted]
    raising = [r for r in raising if not statuses[r].error.follows] or raising
    had_died = any(s.exit is not None for s in statuses)
    state = mend()
    kept = state != FRESH
    if had_died:
        dead = [r for r, s in enumerate(statuses) if s.exit is not None]
        return RankError(died(statuses, dead, state), "died", dead, False, statuses)
    if not raising and deadlock:
        text = deadlocked(statuses, deadlock, quiet, state)
        return RankError(text, "deadlock", deadlock.ranks, kept, statuses, deadlock)
    if not raising:
        stuck = [r for r, s in enumerate(statuses) if not s.finished]
        return RankError(timed_out(statuses, timeout, state), "timeout", stuck, kept, statuses)
    if all(statuses[r].error.cause == "result" for r in raising):
        return RankError(result(statuses, raising, state), "result", raising, kept, statuses)
    raising = [r for r in raising if not statuses[r].error.cause]
    return RankError(raised(statuses, raising, state), "raised", raising, kept, statuses)


def raised(statuses: list[RankStatus], first: list[int], state: str) -> str:
    """The message when the ranks `first` raised an error of their own, not because another rank failed."""
    raising: dict[tuple, list[int]] = {}
    for r in first:
        e = statuses[r].error
        raising.setdefault((e.type, e.message, tuple(e.lines)), []).append(r)
    parts = []
    for (kind, message, frames), members in raising.items():
        parts.append(
            f"{ranks(members, of=len(statuses))} raised {kind}" + (f": {message}" if message else "")
        )
        parts += ["    " + line for line in _unrepeated([lines.show(f) for f in frames])]
    return "\n".join(parts + _others(statuses, first) + [state])


def _unrepeated(texts: list[str]) -> list[str]:
    """The lines of a traceback. Equal lines in succession (a recursion) become one line with their number;
    of more than 12 lines the first and the last six are kept.
    """
    out = []
    for line, group in itertools.groupby(texts):
        times = len(list(group))
        out.append(line + (f"   ({times} times)" if times > 1 else ""))
    return out if len(out) <= 12 else [*out[:6], f"… {len(out) - 12} lines …", *out[-6:]]


def result(statuses: list[RankStatus], first: list[int], state: str) -> str:
    """The code ran on every rank, but a result could not be sent to the notebook."""
    return (
        f"{ranks(first, of=len(statuses))} ran to the end, but the result cannot be sent back: "
        f"{statuses[first[0]].error.message}\n" + RETURN + state
    )


def unreadable(r: int, error: Exception, state: str) -> str:
    """A result arrived, but the kernel cannot unpickle it."""
    return (
        f"rank {r} ran to the end, but its result cannot be read in the notebook: {type(error).__name__}:"
        f" {error}\n" + RETURN + state
    )


def not_taken(slow: list[int], n: int, size: int, seconds: float, state: str) -> str:
    """The ranks `slow` had not received the call's arguments, `size` bytes, within `seconds`."""
    return (
        f"{ranks(slow, of=n)} had not taken the {human(size)} of the call's arguments after {seconds:g} s,"
        " and had to be ended. Give it more time with timeout=… in seconds, or make the data on the ranks.\n"
        + state
    )


def not_shared(error: RankError, n: int, gpus: int) -> str:
    """The first all-reduce of ranks that were to share GPUs has failed."""
    those = f"{n} ranks could not share {gpus} GPU{'s' * (gpus > 1)}"
    return f"{those}: {error.report}\nWorld({n}) runs on the CPU"


def died(statuses: list[RankStatus], dead: list[int], state: str) -> str:
    """The processes of the ranks `dead` have ended."""
    aborted = [r for r in dead if statuses[r].exit == -signal.SIGABRT]
    if aborted and (text := _mismatch(statuses, aborted)):
        return "\n".join([text, state])
    if all(statuses[r].orphaned for r in dead):
        return f"the process that forks all ranks is gone, and they with it. {KILLED}.\n{state}"
    parts = []
    for r in dead:
        parts.append(f"rank {r} is gone: {_manner(statuses[r].exit)}")
        if box := statuses[r].box:
            parts.append(f"    its last collective: {_collective(box)}")
        if statuses[r].exit == -signal.SIGABRT and statuses[r].said:
            parts += ["    " + line for line in statuses[r].said.strip().split("\n")[-3:]]
    return "\n".join(parts + _others(statuses, dead) + [state])


def timed_out(statuses: list[RankStatus], seconds: float, state: str) -> str:
    """The call did not end in time."""
    parts = [f"no end after {seconds:g} s, so the call was stopped"]
    parts += _others(statuses, [], heading="When it was stopped:")
    stuck = {r: s.where["in"] for r, s in enumerate(statuses) if s.where and s.where["in"]}
    never = sorted({other for inside in stuck.values() for other in inside["needs"]} - set(stuck))
    whats = {_collective(inside, peer=False) for inside in stuck.values()}
    ops = {inside["op"] for inside in stuck.values()}
    in_new_group = any(op.startswith("new_group") for op in ops)
    if in_new_group and (never or len(whats) > 1):
        parts.append(EVERYBODY)
    if never:
        waiting = [r for r, inside in stuck.items() if set(never) & set(inside["needs"])]
        parts.append(
            f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(never)}, which did not"
            " come."
        )
        stopped = [r for r in never if statuses[r].stopped]
        if running := [r for r in never if not statuses[r].finished and r not in stopped]:
            parts[-1] += (
                f" But {ranks(running)} had not ended: it may only need longer, with timeout=… in seconds."
            )
    elif len(whats) > 1:
        parts.append(
            "The ranks are in different collectives: each waits for the others to enter its own. "
            "Let all ranks of a group call the same collectives in the same order."
        )
    elif stuck and not ops & {"send", "recv"}:
        parts.append(
            "All are in the same collective: its data may only need longer, with timeout=… in seconds."
        )
    elif not stuck:
        parts.append(
            "No rank is in a counted collective: it may only need longer, with timeout=… in seconds."
        )
    return "\n".join(parts + [f"{what}." for what in _may_act(statuses)[:3]] + [state])


def deadlocked(statuses: list[RankStatus], deadlock: Deadlock, quiet: float, state: str) -> str:
    """No rank has moved for `quiet` seconds, and the call was ended before its timeout."""
    others = _others(statuses, [], heading="When it was stopped:")
    deadlock.lines = {
        r: s.where["line"].number for r, s in enumerate(statuses) if s.where and s.where["line"]
    }
    head = f"no rank has moved for {quiet:g} s, so the call was stopped"
    return "\n".join([head, *others, str(deadlock), state])


def standing(statuses: list[RankStatus]) -> str:
    """Where each rank was when it was asked, in one line; if all of them only waited, also what may still
    act.
    """
    places = "; ".join(": ".join(filter(None, group)) for group in _groups(statuses, []))
    waits = all(s.finished or s.where and s.where["waits"] for s in statuses)
    return ". ".join([places, *_may_act(statuses)[: int(waits)]])


def _may_act(statuses: list[RankStatus]) -> list[str]:
    """'rank 0 has a thread 'heartbeat' in Cell In[7], line 3, which may still act', for each such rank."""
    may = {r: s.where["may"] for r, s in enumerate(statuses) if s.where and s.where["may"]}
    return [f"rank {r} {what}, so it may still go on" for r, what in may.items()]


def left_behind(statuses: list[RankStatus], members: list[int], state: str) -> str:
    """The reader's code has returned on all ranks; `members` had started operations that nobody waits for and
    that cannot end.
    """
    began: dict[str, list[int]] = {}
    for r in members:
        if (where := statuses[r].where) and (inside := where["in"]):
            began.setdefault(_with_line(_collective(inside), _at(inside)), []).append(r)
    started = [f"    {ranks(who)} began {what}" for what, who in began.items()]
    return "\n".join(["note: nobody waits for this, and it cannot end, so it was given up:", *started, state])


def interrupted(statuses: list[RankStatus], state: str) -> str:
    """The reader has pressed stop. The message says what each rank was doing."""
    return "\n".join(
        ["stopped, as you asked."] + _others(statuses, [], heading="When it was stopped:") + [state]
    )


def _others(statuses: list[RankStatus], but: list[int], heading: str = "Meanwhile:") -> list[str]:
    """What the ranks outside `but` were doing, below the heading; [] if `but` has all ranks."""
    groups = [f"    {_with_line(*group)}" for group in _groups(statuses, but)]
    return [heading, *groups] if groups else []


def _groups(statuses: list[RankStatus], but: list[int]) -> list[tuple[str, str]]:
    """For the ranks outside `but`, one pair for all that did the same: (what they did, with the longest of
    their waits; the line of their code in which they waited, or '').
    """
    doing: dict[tuple[str, str], dict[int, float | None]] = {}
    for r, s in enumerate(statuses):
        if r not in but:
            what, since, where = _doing(s)
            doing.setdefault((what, where), {})[r] = since
    groups = []
    for (what, where), members in doing.items():
        longest = "" if None in members.values() else f", {time.monotonic() - min(members.values()):.1f} s"
        if what.startswith("was ") and len(members) > 1:
            what = "were" + what[3:]
        groups.append((f"{ranks(list(members))} {what}{longest}", where))
    return groups


def _doing(s: RankStatus) -> tuple[str, float | None, str]:
    """(what the rank was doing; if it was waiting: since when, and the line of its code, or '')."""
    if s.finished:
        return "had finished", None, ""
    if s.error and s.error.follows:
        at = f" at {lines.show(s.error.lines[-1])}" if s.error.lines else ""
        return f"lost the connection{at}", None, ""
    if s.error and not s.error.aborted:
        return f"raised {s.error.type}", None, ""
    if s.where is None:
        return "was stopped, by SIGSTOP or a debugger" if s.stopped else "did not answer", None, ""
    inside = s.where["in"]
    if inside and s.where["waits"]:
        return f"waited in {_collective(inside)}", inside["at"], _at(inside)
    begun = f", with {_collective(inside)} begun" if inside else ""
    if s.where["line"]:
        return f"was at {lines.show(s.where['line'])}{begun}", None, ""
    if s.where["running"] is not None:
        return f"was in code that is not yours{begun}", None, ""
    return "had left its code, and was preparing its answer", None, ""


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
    """The line of the reader's code that called the collective; "" if it is not known."""
    return lines.show(lines.Line(*box["line"])) if box["line"] else ""


def _with_line(what: str, line: str) -> str:
    """What a rank did, with the line of its code beside it if that is known."""
    return f"{what}   {line}" if line else what


def _mismatch(statuses: list[RankStatus], aborted: list[int]) -> str | None:
    """The message for the commonest reason why gloo aborts a process: two ranks passed tensors of different
    size to a collective. None if the ranks' output or their last collectives do not show that reason.
    """
    printed = "\n".join(statuses[r].said for r in aborted)
    if not re.search(r"enforce fail|EnforceNotMet|op\.preamble|nbytes|gloo::", printed):
        return None
    brought: dict[str, list[int]] = {}
    for r, s in enumerate(statuses):
        if s.box:
            brought.setdefault(_collective(s.box, peer=False), []).append(r)
    if len(brought) < 2:
        return None
    parts = ["the ranks met in one collective with tensors that do not match:"]
    for what, members in brought.items():
        parts.append(_with_line(f"    {ranks(members)} called {what}", _at(statuses[members[0]].box)))
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
