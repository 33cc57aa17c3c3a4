"""Records on a rank what an attempt does, and compares what two attempts did."""

from __future__ import annotations

import math
import pickle
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from three_axes import lines
from three_axes.count import Traffic

from ..ranks import RankError, current


@dataclass
class Run:
    """What an attempt did in one try.

    tried: (number of ranks, further arguments of the function that made the inputs); in an exercise for one
    rank the arguments of each case, () for the solution. ranks[r]: facts of rank r, among them "values" (one
    a case), and "gradients" if backward is compared. After an error they are the facts recorded before it.
    """

    tried: tuple
    ranks: list[dict]
    traffic: Traffic | None = None
    error: RankError | None = None
    attempt: Callable | None = None  # set if ranks ran it
    off: str | None = None  # what `differs_in` says of this run, for `finds`

    @property
    def n(self) -> int:
        """Number of ranks that ran the attempt."""
        return len(self.ranks)

    @property
    def errors(self) -> list[str]:
        """'IndexError: list index out of range', for each rank that raised an error by itself."""
        statuses = self.error.seen if self.error else []
        return [f"{s.error.type}: {s.error.message}" for s in statuses if s.error and not s.error.aborted]

    @property
    def seconds(self) -> float:
        """Processor time in seconds of the busiest rank; 0 if it was not recorded."""
        return max(facts.get("seconds", 0.0) for facts in self.ranks)

    @property
    def standing(self) -> dict[int, dict]:
        """Rank -> the send or receive that it waits in, if no rank moved any more. {} if one did, or if a
        rank waited in another operation.
        """
        if not (self.error and self.error.kind == "deadlock"):
            return {}
        stuck = {r: s.where["in"] for r, s in enumerate(self.error.seen) if not s.finished and s.where}
        return stuck if all(at and at["op"] in ("send", "recv") for at in stuck.values()) else {}

    @property
    def values(self) -> list:
        """The answers to all cases, if a single rank runs them."""
        return self.ranks[0]["values"]

    @property
    def calls(self) -> list[list[tuple[str, str, tuple[int, ...], int]]]:
        """For each rank its collectives in order: (name, how it reduces or '', ranks, number of elements)."""
        return [facts.get("calls", []) for facts in self.ranks]

    @property
    def helped(self) -> str:
        """The name of the course's own function that did the work; '' if none did."""
        return next((name for facts in self.ranks for name in facts.get("helped", ())), "")

    @property
    def kinds(self) -> set[tuple[str, str, tuple[int, ...]]]:
        """The kinds of collectives that any rank called: (name, how it reduces or '', ranks)."""
        return {call[:3] for mine in self.calls for call in mine}

    def asked(self, case: int) -> str:
        """'Asked for 8, 2: ' for a case with short arguments; '' for others, and on several ranks."""
        arguments = repr(self.tried[case])[1:-1].rstrip(",") if self.n == 1 and self.tried else ""
        return f"Asked for {arguments}: " if 0 < len(arguments) <= 40 else ""

    def differs_in(self, truth: Run, alike: Callable) -> str | None:
        """The first of "values", "cut", "gradients" in which this run differs from the solution's; None if in
        none. "cut": a gradient is missing.
        """
        pairs = list(zip(self.ranks, truth.ranks))
        if not all(alike(a["values"], b["values"]) for a, b in pairs):
            return "values"
        if any(None in a.get("gradients", ()) and None not in b["gradients"] for a, b in pairs):
            return "cut"
        if not all(alike(a.get("gradients"), b.get("gradients")) for a, b in pairs):
            return "gradients"
        return None

    def equals(self, other: Run, facets: Sequence[str], alike: Callable, of: Callable) -> bool:
        """Whether each rank has equal facts in both runs. facets: the keys of these facts. of(values): the
        part of the values to compare.
        """
        fact = lambda facts, key: of(facts[key]) if key == "values" else facts.get(key)
        pairs = list(zip(self.ranks, other.ranks))
        return all(alike(fact(a, key), fact(b, key)) for a, b in pairs for key in facets)

    def needs_more(self, truth: Run, what: str) -> bool:
        """Whether the busiest rank needed more than the solution's, by more than 1 %. what: as for `most`.
        Each message may be one number longer, because chunks may be padded to one length.
        """
        padding = 8 * truth.most("calls") if what == "bytes" else 0
        return self.most(what) > 1.01 * truth.most(what) + padding

    def most(self, what: str) -> float:
        """The largest need of any rank. what: 'bytes', 'numbers' (elements) or 'calls' of its collectives, or
        'flops', floating-point operations.
        """
        if what == "numbers":
            return max(sum(numbers for *_, numbers in mine) for mine in self.calls)
        if what == "bytes":
            return max(self.traffic.counted)
        if what == "calls":
            return max(sum(row.calls for row in rows) for rows in self.traffic.ranks)
        return max(facts[what] for facts in self.ranks)


def first(faults: dict[str, bool | str]) -> tuple[str, str] | None:
    """(name, text or '') of the first fault that holds; None if none does. faults: name -> whether a run has
    it, or a text that shows it.
    """
    name, held = next((fault for fault in faults.items() if fault[1]), ("", False))
    return (name, held if isinstance(held, str) else "") if held else None


def needs_more(**names: str) -> Callable[[Run, Run], tuple[str, str] | None]:
    """A function for `finds`: names a right attempt of which a rank needed more than with the solution.
    names: what is compared, as for `Run.most` -> the name of the mistake.
    """

    def found(run: Run, truth: Run) -> tuple[str, str] | None:
        if run.error or run.off:
            return None
        return first({name: run.needs_more(truth, what) for what, name in names.items()})

    return found


def alike(a, b, tolerance: float | None = None) -> bool:
    """Whether two answers are equal except for rounding. tolerance: for a number, relative to the larger of
    it and 1; for a tensor, relative to its largest number. None: 1e-7 for float64 and numbers, 1e-4 for other
    tensors.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape:
            return False
        rtol = tolerance or (1e-7 if torch.float64 in (a.dtype, b.dtype) else 1e-4)
        a, b = a.detach().double(), b.detach().double()
        scale = float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
        return torch.allclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key], tolerance) for key in b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
        tolerance = tolerance or 1e-7
        return numbers and (a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance))
    return type(a) is not torch.Tensor and type(b) is not torch.Tensor and a == b


def differs(got, wanted, alike: Callable = alike) -> str:
    """A sentence without its full stop: what is wrong with `got`, without the right answer."""
    if isinstance(wanted, torch.Tensor):
        wrong = ~torch.isclose(got.detach().double(), wanted.detach().double(), rtol=1e-4, equal_nan=True)
        places = wrong.nonzero().tolist()
        many = f"{len(places):,} of {wanted.numel():,} numbers are not right" if places else "It is not right"
        return f"{many}, the first at {places[0]}" if places and len(places) < wanted.numel() else many
    if isinstance(wanted, dict) and isinstance(got, dict):
        of = [key for key in wanted if key not in got or not alike(got[key], wanted[key])]
        return f"The value of {of[0]!r} is not right" if of else "It has a name too many"
    if isinstance(wanted, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(got) != len(wanted):
            what = "names" if all(isinstance(one, str) for one in (*got, *wanted)) else "numbers"
            return f"It has {_pick(len(got), len(wanted), 'too few', 'too many')} {what}"
        place = next(i for i, (a, b) in enumerate(zip(got, wanted)) if not alike(a, b))
        return f"At place {place} it is not right" if len(got) > 1 else "That is not right"
    if isinstance(wanted, (int, float)) and isinstance(got, (int, float)):
        return f"That is {_pick(got, wanted, 'too small', 'too large')}"
    return "That is not right"


def _pick(got: float, wanted: float, below: str, above: str) -> str:
    return below if got < wanted else above


def number(value) -> float:
    """The number that a reader returned, as a float. Raises TypeError for a value of another kind, ValueError
    for NaN.
    """
    if isinstance(value, (str, bytes, bool)):
        raise TypeError(f"{value!r} is no number")
    if math.isnan(result := float(value)):
        raise ValueError("nan is no number")
    return result


# -- on a rank ------------------------------------------------------------------------------------

# Limit of processor time: TIMES times the solution's, and at least LEAST seconds.
LEAST, TIMES = 10, 10


class Endless(BaseException):
    """The reader's code has reached its limit of processor time. `except Exception` does not catch it."""


def limited(run: Callable, solution: float | None) -> Callable:
    """A function that calls `run`, and raises Endless on its rank if the reader's code computes for too long.

    solution: the seconds of processor time that the solution needs; None: no limit, because `run` is the
    course's own code. Waiting for other ranks, or for a busy machine, uses no processor time.
    """

    def _limited_run():
        def over(_, frame):
            if lines.innermost(frame):  # otherwise only the code that records the attempt is running
                raise Endless(f"{limit:.0f} s of processor time; the solution needs {solution:.2g} s")

        before = signal.signal(signal.SIGVTALRM, over)
        signal.setitimer(signal.ITIMER_VIRTUAL, limit, 1)
        try:
            return run()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    if solution is None:
        return run
    limit = max(LEAST, TIMES * solution)
    return _limited_run


# Files of the course with functions that solve exercises.
COURSE = re.compile(r"[/\\\\](three_axes[/\\\\]paper|helpers[/\\\\]toy)[/\\\\]")


def noting_help(run: Callable, solution: Callable, also: bool, helped: list[str]) -> Callable:
    """A function that calls `run`, and adds to `helped` the names of the course's functions that `run` calls:
    the solution and, if `also` is true, functions of the files that match COURSE.
    """

    def noted():
        def profile(frame, event, _):
            code = frame.f_code
            if event == "call" and (code is solution.__code__ or also and COURSE.search(code.co_filename)):
                helped.append(code.co_name)

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            return run()
        finally:
            sys.setprofile(before)

    return noted


_facts: dict = {}  # of this rank's last attempt; kept here so that they can be read after a crash


def facts_so_far() -> dict:
    """On a rank: the facts recorded so far about its last attempt."""
    return _facts


def observed(
    watch: Callable, *attempts: Callable, solution: float | None = None, reference: Callable | None = None
) -> list[dict]:
    """On a rank: run the attempts in turn. Returns the facts of each. watch(attempt, facts) calls the
    attempt, and adds facts while it runs. solution: as for `limited`. reference: the solution; None: its
    calls are not recorded.
    """
    global _facts
    of_all = []
    # Two warnings of PyTorch are hidden: the verdict explains a plain all_reduce in autograd better, and a
    # function's older name is no mistake.
    warnings.filterwarnings("ignore", ".*an autograd kernel was not registered")
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    for attempt in attempts:
        _facts, before = {"calls": []}, time.process_time()
        hear(partial(_note, _facts["calls"]))
        run = partial(watch, attempt, _facts)
        if reference:
            _facts["helped"] = []
            run = noting_help(run, reference, False, _facts["helped"])
        limited(run, solution)()
        current.rank.recorder.watch = None
        _facts["seconds"] = time.process_time() - before
        of_all.append(_facts)
    return of_all


def _note(calls: list, call) -> None:
    """Record a collective in the form of `Run.calls`."""
    numbers = round(call.payload / call.first.element_size()) if call.first is not None else 0
    calls.append((call.op, call.reduces, tuple(call.members), numbers))


def hear(listen: Callable) -> None:
    """On a rank: until the attempt has ended, call listen(call) for each collective before it begins."""
    earlier = current.rank.recorder.watch

    def both(call):
        if earlier:
            earlier(call)
        listen(call)

    current.rank.recorder.watch = both


@dataclass
class Observer:
    """On a rank: run the attempt on each case, and record its answers and its use of collectives.

    inputs(rank, *tried): the arguments of each case. sees(arguments, answer): the value to compare; before
    the attempt runs it is called with None for the answer, for arguments that the attempt must write into.
    gradient(arguments): the gradient with respect to the answer; backward computes the first argument's from
    it. flops: whether to count floating-point operations. messages: whether to record each send, as (peer,
    sum of its numbers). Two of the facts are "size", the bytes of the cases' first arguments, and "forward",
    the kinds of the collectives that this call had begun before the last case's backward.
    """

    tried: tuple
    inputs: Callable
    sees: Callable
    gradient: Callable | None
    flops: bool
    messages: bool

    def __call__(self, attempt: Callable, facts: dict) -> None:
        """Fill `facts` case by case, so that after a crash they hold what was recorded before it."""
        facts |= {"values": [], "given": [], "flops": 0, "size": 0}
        facts |= {"gradients": []} if self.gradient else {}
        if self.messages:
            facts["messages"] = sent = []
            hear(
                lambda call: (
                    sent.append((call.root, float(call.first.double().sum()))) if call.op == "send" else None
                )
            )
        for facts["case"], arguments in enumerate(self.inputs(dist.get_rank(), *self.tried)):
            facts["size"] += arguments[0].nbytes if isinstance(arguments[0], torch.Tensor) else 0
            dy = self.gradient(arguments) if self.gradient else None
            before = self.sees(arguments, None)
            facts["given"].append(before.detach().clone() if isinstance(before, torch.Tensor) else None)
            got = self._counted(facts, lambda: self.sees(arguments, attempt(*arguments)))
            facts["forward"] = [row.op for row in current.counted_so_far() for _ in range(row.calls)]
            facts["values"].append(sendable(got))
            if dy is not None:
                has_backward = isinstance(got, torch.Tensor) and got.requires_grad and got.shape == dy.shape
                if has_backward:
                    self._counted(facts, lambda: got.backward(dy.to(got.dtype)))
                facts["gradients"].append(arguments[0].grad if has_backward else None)

    def _counted(self, facts: dict, run: Callable):
        if not self.flops:
            return run()
        with FlopCounterMode(display=False) as counter:
            got = run()
        facts["flops"] += counter.get_total_flops()
        return got


@dataclass(frozen=True)
class NoValue:
    """Replaces an answer that cannot be sent from its rank. kind: the name of the answer's type."""

    kind: str

    @property
    def name(self) -> str:
        """The name of the mistake."""
        return f"a {self.kind} where a value is asked for"

    @property
    def advice(self) -> str:
        """What the answer is, and what to return instead."""
        if self.kind in ("function", "method", "builtin_function_or_method"):
            return "You return a function. Call it, with brackets behind its name."
        if self.kind in ("generator", "map", "zip", "filter", "dict_keys", "dict_values", "dict_items"):
            return f"You return a {self.kind}, which holds no values yet. list(…) makes a list of it."
        return f"You return a {self.kind}, which is no value."

    def __repr__(self) -> str:
        return f"a {self.kind}"


def sendable(answer):
    """An answer in a form that can be sent from its rank: the answer itself, a copy of a tensor without its
    graph, a plain tuple, list or dict in place of one of the reader's own class, or NoValue in place of any
    other object that cannot be pickled.
    """
    if isinstance(answer, torch.Tensor):
        return answer.detach().clone()
    if _can_be_sent(answer):
        return answer
    plain = _plain(answer)
    return plain if _can_be_sent(plain) else NoValue(type(answer).__name__)


def _can_be_sent(answer) -> bool:
    try:
        pickle.dumps(answer)
        return True
    except Exception:
        return False


def _plain(value):
    """A tuple, list or dict of a subclass, such as a namedtuple, as Python's own, with all that is in it."""
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value
