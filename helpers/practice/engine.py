"""Judges a reader's function and names its mistake. A mistake is an edit of the solution.

A check runs the reader's function and the solution on the same ranks and inputs. If their results differ, it
also runs the solution with each known mistake in it. If one of these edited solutions does the same as the
reader's function, its name is the name of the reader's mistake. If none does, the attempt is still wrong, and
the reader learns where it differs from the solution. So no reader is accused of a mistake that was not
proven, and no attempt is praised that differs from the solution.

A drop's mistakes are in `mistakes.md` beside its exercises: Markdown that a teacher edits. `# name` begins
the mistakes of an exercise, or of several (`# one · two`). Each section under it is one mistake, called a
row: a name, advice, and proofs, of which one is enough:

    ## a sum where the mean was meant

    Every rank holds the sum of four gradients. One process's loss is a mean over examples.

    ```diff
    -    gradient = gradient * examples / total
    +    gradient = gradient
    ```

    a diff             the solution with this diff gives the same results as the attempt. Each block of '-'
                       lines, which are whole lines in the solution's order, becomes the '+' lines after it
    - error: `PATTERN` an error of a rank, 'IndexError: list…', matches this regular expression. `WrongForm`
                       matches if the answer has another form (type, shape or dtype) than the solution's

`- hint: 2` says which of the exercise's hints is about the mistake: a reader who asks gets it first.

A row without these has advice on a mistake that the exercise's function `finds` names. Rows are tried in
order. What `finds` names without a row comes after them.
"""

from __future__ import annotations

import inspect
import io
import itertools
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm

from three_axes.table import human

from ..ranks import RankError, World
from .exercise import Answer, Exercise, NotCounted, crashed, names_in, numbers_in, right, stopped, wrong
from .runs import Observer, Run, alike, differs, facts_so_far, limited, noting_help, observed, sendable
from .seen import describe_form, describe_numbers, describe_tries

if TYPE_CHECKING:  # ranks import the engine, and do not need matplotlib
    from ..draw import Picture

# -- rows -----------------------------------------------------------------------------------------

# Exceptions that reading an answer of another form may raise.
UNREADABLE = TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError
# Limit in seconds of wall time, for attempts and for the course's own functions. A hang ends earlier, and an
# endless computation reaches its limit of processor time earlier (`runs.limited`).
PATIENCE = 60
# An attempt on ranks can reach a solution in the course's code only by one of these names.
REACHES = {"reference", "getattr", "vars", "globals", "drops", "import_module", "__import__"}
# Name of the mistake if "values", "cut" or "gradients" differ, and neither a row nor a description fits.
UNNAMED = {
    "values": "another answer than the solution's",
    "cut": "an output cut off from x",
    "gradients": "another gradient of x",
}
CATCH_ALL = "another ", "other "  # how names begin of rows for all mistakes that have no other row
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.M | re.S)
PROOF = re.compile(r"^- (\w+): `(.+)`$", re.M)
HINT = re.compile(r"^- hint: (\d+)$", re.M)
HUNK = re.compile(r"((?:^-.*\n)*)((?:^\+.*\n)*)", re.M)


@dataclass
class Mistake:
    """One row: a name, the advice, its proofs, and the number of the hint that is about it (0: none is)."""

    name: str
    advice: str = ""
    hint: int = 0
    edits: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def mistakes_of(text: str, exercise: str) -> list[Mistake]:
    """The rows of an exercise in a text, in the format that the module's docstring describes. Raises
    ValueError for a proof of another kind.
    """
    rows = []
    for names, part in re.findall(r"^# ([^\n]+)\n(.*?)(?=^# |\Z)", text, re.M | re.S):
        if exercise in names.split(" · "):
            for name, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", part, re.M | re.S):
                proofs = PROOF.findall(body)
                if unknown := {kind for kind, _ in proofs} - {"error"}:
                    raise ValueError(f"{name!r} has a proof {unknown}; a proof is a diff or an error")
                advice = " ".join(HINT.sub("", PROOF.sub("", DIFF.sub("", body))).split())
                hint = int(next(iter(HINT.findall(body)), 0))
                errors = [pattern for _, pattern in proofs]
                rows.append(Mistake(name, advice, hint, DIFF.findall(body), errors))
    return rows


_numbers = itertools.count()


def patched(source: str, diff: str, name: str) -> str:
    """A source with a diff's lines changed in it.

    Raises ValueError if the source, that of `name`, does not have the lines that the diff removes, and for a
    diff that removes none.
    """
    lines, at = source.splitlines(), 0
    hunks = [[part.splitlines() for part in hunk] for hunk in HUNK.findall(diff) if any(hunk)]
    if not hunks:
        raise ValueError(f"{name}: {diff!r} is no diff; its lines begin with '-' and '+'")
    for old, new in hunks:
        removed, added = [line[1:] for line in old], [line[1:] for line in new]
        spots = [i for i in range(at, len(lines)) if removed and lines[i : i + len(removed)] == removed]
        if not spots:
            raise ValueError(
                f"{name} has no lines {removed!r}; a diff has whole lines, exactly as in the source"
            )
        lines[spots[0] : spots[0] + len(removed)] = added
        at = spots[0] + len(added)
    return "\n".join(lines) + "\n"


def edited(solution: Callable, diff: str) -> Callable:
    """The solution, `patched` by a diff."""
    source = textwrap.dedent(inspect.getsource(solution))
    return compiled(patched(source, diff, solution.__name__), solution)


def compiled(source: str, solution: Callable) -> Callable:
    """The function of the solution's name in a source, with access to all names that the solution can use."""
    names = dict(vars(sys.modules[solution.__module__]))
    names["__name__"] = f"edited {next(_numbers)}"  # no such module exists, so it is sent to ranks by value
    exec(compile(source, "<edited>", "exec"), names)
    return names[solution.__name__]


# -- exercises ------------------------------------------------------------------------------------


@dataclass(kw_only=True, repr=False)
class Compared(Exercise):
    """An exercise whose attempts are compared with its solution, and with the solution's edits.

    In all functions below, `run` is the attempt's and `truth` the solution's. mistakes: rows, as Markdown;
    None: those of `mistakes.md` in the solution's folder. finds(run, truth): names what no diff can express:
    (name, a text that shows it or ''), or None. It is also called after a crash or hang on
    ranks. praise: the text for a right answer, or a function (Run) -> Answer. figures(run, truth): (what,
    reached, target) for the answer. picture(run, truth): a picture for a wrong answer, or None. reads(value):
    one case's value in the form in which it is compared; it raises for a value without such a form. compares:
    whether values and gradients must be the solution's; if not, a row decides. proves(values): the part of a
    rank's values that an edit must reproduce. must_wait: whether it is wrong to leave more operations without
    a wait than the solution does.
    """

    praise: str | Callable[[Run], Answer]
    mistakes: str | None = None
    finds: Callable[[Run, Run], tuple[str, str] | None] = lambda run, truth: None
    figures: Callable[[Run, Run], list[tuple[str, str, str]]] = lambda run, truth: []
    picture: Callable[[Run, Run], Picture | None] = lambda run, truth: None
    reads: Callable | None = None
    compares: bool = True
    must_wait: bool = True
    proves: Callable[[list], object] = lambda values: values
    tolerance: float | None = None

    def __post_init__(self):
        beside = Path(inspect.getfile(self.reference)).with_name("mistakes.md")
        text = beside.read_text(encoding="utf-8") if self.mistakes is None else self.mistakes
        self.rows = mistakes_of(text, self.name)

    def _rows_and(self, found: str) -> list[Mistake]:
        """All rows, and after them one without advice if `finds` has named a mistake that has no row."""
        return [*self.rows, *([Mistake(found)] if found else [])]

    def advice(self, mistake: str) -> str:
        """The advice of the row of this name, '' if there is none."""
        return self._row(mistake).advice

    def about(self, mistake: str) -> str:
        """The hint that the row of this name asks for; '' if it asks for none."""
        number = self._row(mistake).hint
        return self.hints[number - 1] if number else ""

    def _row(self, mistake: str) -> Mistake:
        """The row of this name; without advice and hint if there is none."""
        return next((row for row in self.rows if row.name == mistake), Mistake(mistake))

    @property
    def asks(self) -> list[str]:
        """What the numbers of a try are, after that of the ranks."""
        return []

    @property
    def edits(self) -> list[str]:
        """The edits of all rows, in order."""
        return [edit for row in self.rows for edit in row.edits]

    def alike(self, a, b) -> bool:
        """`runs.alike` with the tolerance of this exercise."""
        return alike(a, b, self.tolerance)

    def worlds(self) -> Iterator[tuple[Callable[[str], Run], Callable[[Callable], Run]]]:
        """For each try: (a function that runs an edit of the solution, a function that runs an attempt)."""
        raise NotImplementedError

    def told_apart(self) -> list[tuple[str, str, str | None]]:
        """For each edit of each row: (the row's name, the edit, the name that an equal attempt gets)."""
        edits = [(row.name, edit) for row in self.rows for edit in row.edits]
        named: dict[str, str] = {}
        for does, observe in self.worlds():
            for _, edit in edits:
                if edit not in named:
                    answer = self.judged(observe(edited(self.reference, edit)), does)
                    named |= {edit: answer.misconception} if answer else {}
        return [(name, edit, named.get(edit)) for name, edit in edits]

    def judged(self, mine: Run, does: Callable[[str], Run], passed: Sequence[tuple] = ()) -> Answer | None:
        """What is wrong with an attempt; None if nothing is. does(edit): runs the solution with this edit.
        passed: the tries in which nothing was wrong.
        """
        if mine.error:
            return self._crashed(mine, does(""), passed)
        where = f"On {mine.n} ranks: " if mine.n > 1 else ""
        truth = does("")
        if wrong_form := self._form(mine, truth):
            return wrong_form
        figures = self.figures(mine, truth)
        if self.must_wait and mine.traffic and mine.traffic.not_waited > truth.traffic.not_waited:
            return wrong("a message nobody waits for", f"{where}{UNWAITED}", *figures)
        parts = mine.off = mine.differs_in(truth, self.alike) if self.compares else None
        if parts is None and "messages" in truth.ranks[0] and (wasted := wasteful(mine, truth)):
            return wrong(wasted[0], f"{where}{wasted[1]}", *figures)
        found, seen = self.finds(mine, truth) or ("", "")
        for row in self._rows_and(found):
            if row.name == found or self._does_the_same(row, mine, truth, does):
                text = _text_of(row, seen if row.name == found else "")
                name, text = self._described(row, mine, truth, parts, text) or (row.name, text)
                answer = wrong(name, f"{where}{text}", *figures)
                answer.picture = self.picture(mine, truth)
                return answer
        if not parts:
            return None
        name, text = self._unnamed(mine, truth, parts, passed)
        return wrong(name, f"{where}{text}", *figures)

    def _described(
        self, row: Mistake, mine: Run, truth: Run, parts: str | None, text: str
    ) -> tuple[str, str] | None:
        """If the row is for all mistakes that have no other row: (name, a description of the numbers and then
        `text`), or None if no description fits. None for other rows.
        """
        if parts not in ("values", "gradients") or not row.name.startswith(CATCH_ALL):
            return None
        seen = describe_numbers(mine, truth, parts, self.alike)
        return seen and (seen[0], f"{seen[1]} {text}")

    def _unnamed(self, mine: Run, truth: Run, parts: str, passed: Sequence[tuple]) -> tuple[str, str]:
        """(name, description) of a mistake without a row."""
        first = self._where(mine, truth, parts)
        if seen := describe_tries(passed, mine, self.asks):
            return seen[0], f"{first} {seen[1]}"
        if parts != "cut" and (seen := describe_numbers(mine, truth, parts, self.alike)):
            return seen[0], f"{first} {seen[1]}"
        return UNNAMED[parts], first

    def _does_the_same(self, row: Mistake, mine: Run, truth: Run, does: Callable) -> bool:
        """Whether the solution with an edit of this row gives an attempt's results, which the solution does
        not give.
        """
        facets = ["values", "messages" if mine.off in ("values", None) else "gradients"]
        if not row.edits or mine.equals(truth, facets, self.alike, self.proves):
            return False
        others = (other for edit in row.edits if not (other := does(edit)).error)
        # If the edit removes a kind of collective that the attempt calls, equal values are a coincidence.
        return any(
            not (truth.kinds - other.kinds) & mine.kinds
            and mine.equals(other, facets, self.alike, self.proves)
            for other in others
        )

    def _where(self, mine: Run, truth: Run, parts: str) -> str:
        """A sentence on the first place where two runs differ, without the right value."""
        if parts == "cut":
            return (
                "The output is right, but autograd cannot get from it back to x. It follows neither a"
                " detach() nor a tensor that a bare collective has filled."
            )
        rank, case, got, wanted = next(
            (rank, i, a, b)
            for rank, facts in enumerate(mine.ranks)
            for i, (a, b) in enumerate(zip(facts[parts], truth.ranks[rank][parts]))
            if not self.alike(a, b)
        )
        if not isinstance(wanted, torch.Tensor):
            on = f"rank {rank} returns" if mine.n > 1 else "you return"
            return f"{mine.asked(case)}{on} {_cut_off(got, 300)}. {differs(got, wanted, self.alike)}."
        what = {"values": "the answer", "gradients": "the output is right, the gradient of x"}[parts]
        same = all(self.alike(facts[parts][case], got) for facts in mine.ranks)
        alike_ = ", and it is the same on all ranks" if same and mine.n > 1 else ""
        return f"{what} is not the solution's{alike_}. On rank {rank}: {differs(got, wanted, self.alike)}."

    def _form(self, mine: Run, truth: Run) -> Answer | None:
        """What is wrong with the form of an answer. Each value is converted to the form that is compared."""
        of_form = lambda row: any(re.search(pattern, WrongForm.__name__) for pattern in row.errors)
        row = next(filter(of_form, self.rows), Mistake("another form"))
        empty = [r for r, facts in enumerate(mine.ranks) if any(one is None for one in facts["values"])]
        for rank, (facts, wanted) in enumerate(zip(mine.ranks, truth.ranks)):
            for i, (got, right_) in enumerate(zip(facts["values"], wanted["values"])):
                if got is None and right_ is not None:
                    if 0 < len(empty) < mine.n:
                        text = f"Of {mine.n} ranks these return None: {', '.join(map(str, empty))}."
                        return wrong("returned on some ranks alone", f"{text} Every rank needs the result.")
                    return wrong("nothing returned", f"Your function returned None. {row.advice}")
                try:
                    facts["values"][i] = self.reads(got) if self.reads else _as(right_, got)
                except UNREADABLE as e:
                    if seen := describe_form(got, right_, mine.n, self.alike):
                        return wrong(seen[0], f"{seen[1]} {row.advice}")
                    text = f"{e}." if isinstance(e, WrongForm) else f"You return {_cut_off(got, 200)}."
                    at = f"On {mine.n} ranks, rank {rank}: " if mine.n > 1 else mine.asked(i)
                    return wrong(row.name, f"{at}{text} {row.advice}")
        return None

    def _crashed(self, mine: Run, truth: Run, passed: Sequence[tuple]) -> Answer:
        """The answer to a crash or a hang, with the mistake's name if the recorded facts prove one."""
        where = f"On {mine.n} ranks: " if mine.n > 1 else ""
        if answer := stopped(mine.error):
            return answer
        # An attempt that crashed on one rank alone has recorded nothing.
        found, seen = (mine.attempt and self.finds(mine, truth)) or ("", "")
        for row in self._rows_and(found):
            raised = any(re.search(pattern, error) for pattern in row.errors for error in mine.errors)
            if raised or row.name == found:
                text = f"{where}{_text_of(row, '' if raised else seen)}\n\n{mine.error.report}"
                return Answer("crashed", text, row.name)
        answer = _all_do_the_same(mine) or crashed(mine.error)
        # A number is written in the code; 2 is in many right attempts.
        written = any(n in numbers_in(mine.attempt) for n, *_ in passed if n > 2)
        if (written or not answer.misconception) and (seen := describe_tries(passed, mine, self.asks)):
            return Answer("crashed", f"{where}{seen[1]}\n\n{answer.text}", seen[0])
        return answer


@dataclass(kw_only=True, repr=False)
class Asked(Compared):
    """A function of plain values. One rank runs it, because it may crash or hang. cases: its arguments."""

    cases: Sequence[tuple] | Callable[[], Sequence[tuple]] = ((),)

    def _cases(self) -> Sequence[tuple]:
        return self.cases() if callable(self.cases) else self.cases

    def verdict(self, attempt: Callable) -> Answer:
        """Run all cases on one rank."""
        cases = self._cases()
        does = self._does(cases)
        with World(1, timeout=PATIENCE) as world:
            try:
                ask = partial(_asked, attempt, cases, self.reference, bool(self.without))
                mine = Run(cases, world.run(limited(ask, does("").seconds)))
            except RankError as e:
                mine = Run(cases, [{}], error=e)
        return self.judged(mine, does) or praised(self, mine, does(""))

    def worlds(self):
        """One pair, whose functions run in this process: a crash or hang of an attempt ends it."""
        cases = self._cases()
        answers = lambda attempt: Run((), [{"values": [attempt(*case) for case in cases]}])
        yield self._does(cases), answers

    def _does(self, cases: Sequence[tuple]) -> Callable[[str], Run]:
        """A function of an edit, that returns the results of the edited solution. They need no rank."""

        @cache
        def of(edit: str) -> Run:
            other = edited(self.reference, edit) if edit else self.reference
            before = time.process_time()
            values = [other(*case) for case in cases]
            facts = {"seconds": time.process_time() - before}
            return Run((), [facts | {"values": [self.reads(v) if self.reads else v for v in values]}])

        return of


def _asked(attempt: Callable, cases: Sequence[tuple], solution: Callable, course: bool) -> dict:
    """On a rank: the facts of an attempt. course: also record calls of the course's other functions."""
    helped: list[str] = []
    ask = lambda: [sendable(attempt(*case)) for case in cases]
    values = noting_help(ask, solution, course, helped)() if attempt is not solution else ask()
    return {"values": values, "helped": helped}


@dataclass(kw_only=True, repr=False)
class OnRanks(Compared):
    """A function that every rank runs. tries: (number of ranks, further arguments of `inputs`) for each try,
    in order.

    inputs, sees, gradient: see `Observer`. watch(attempt, facts): replaces `Observer`. messages: whether the
    work must be done by sends and receives only. flops: whether to count floating-point operations. world:
    arguments of the World, except its size.
    """

    tries: tuple[tuple, ...] = ((4,), (2,))
    inputs: Callable | None = None
    sees: Callable = lambda arguments, answer: answer
    gradient: Callable | None = None
    messages: bool = False
    watch: Callable | None = None
    flops: bool = False
    world: dict = field(default_factory=dict)
    _known: dict[tuple, Run] = field(default_factory=dict, init=False, repr=False)

    @property
    def asks(self) -> list[str]:
        """The names of the arguments of `inputs`, after the rank and the number of ranks."""
        return list(inspect.signature(self.inputs).parameters)[2:] if self.inputs else []

    def verdict(self, attempt: Callable) -> Answer:
        """Stop at the first try in which something is wrong. Praise is for the try with the most ranks."""
        runs, worlds = [], self.worlds()
        for _ in _with_progress(self.tries):
            does, observe = next(worlds)
            passed = [run.tried for run, _ in runs]
            runs.append((observe(attempt), does("")))
            if answer := self.judged(runs[-1][0], does, passed):
                return answer
        return praised(self, *max(runs, key=lambda pair: pair[0].n))

    def worlds(self):
        """Consecutive tries with the same number of ranks share a World."""
        for n, tries in itertools.groupby(self.tries, lambda tried: tried[0]):
            with World(n, **{"timeout": PATIENCE} | self.world) as world:
                for tried in tries:
                    if (tried, "") not in self._known:
                        self._known[tried, ""] = self._observe(world, tried, self.reference)
                    yield partial(self._does, world, tried), partial(self._observe, world, tried)

    def _watch(self, tried: tuple, flops: bool = False) -> Callable:
        return self.watch or Observer(tried, self.inputs, self.sees, self.gradient, flops, self.messages)

    def _observe(self, world: World, tried: tuple, attempt: Callable) -> Run:
        """What an attempt does in a world. Raises NotCounted if the solution itself does not end."""
        watch = self._watch(tried, self.flops)
        truth = self._known.get((tried, ""))
        try:
            limit = truth and truth.seconds
            may_call = attempt is not self.reference and names_in(attempt) & REACHES
            own = self.reference if may_call else None  # recording its calls takes time
            seen = [facts for (facts,) in world.run(observed, watch, attempt, solution=limit, reference=own)]
            return Run(tried, seen, world.traffic, attempt=attempt)
        except RankError as e:
            if attempt is self.reference:
                raise NotCounted(f"The solution itself did not get through here:\n{e.report}") from None
            known = world.run(facts_so_far) if e.state_kept else [{} for _ in range(world.n)]
            return Run(tried, known, error=e, attempt=attempt)

    def _does(self, world: World, tried: tuple, edit: str) -> Run:
        """What an edit of the solution does. When the first is needed, all are run at once."""
        if (tried, edit) not in self._known:
            mutants = [edited(self.reference, edit) for edit in self.edits]
            with redirect_stdout(io.StringIO()), _soon(world):
                try:
                    of_ranks = world.run(observed, self._watch(tried), *mutants)
                    runs = [Run(tried, list(facts)) for facts in zip(*of_ranks)]
                except RankError:  # one of the edits crashes in this try
                    runs = [self._observe(world, tried, mutant) for mutant in mutants]
            self._known |= {(tried, edit): run for edit, run in zip(self.edits, runs)}
        return self._known[tried, edit]


@contextmanager
def _soon(world: World) -> Iterator[None]:
    """In this block a hang ends sooner: nothing beside the main threads runs in an edit of the solution."""
    before, world.quiet = world.quiet, 0.4
    try:
        yield
    finally:
        world.quiet = before


def _with_progress(tries: Sequence[tuple]) -> Iterator[tuple]:
    """The tries in turn; if they take long, a line names the one that is running, and is removed
    afterwards.
    """
    with tqdm(total=len(tries), leave=False, delay=1, bar_format="{desc} … ({n_fmt} of {total_fmt})") as line:
        for tried in tries:
            line.set_description_str(f"on {tried[0]} rank{'s' * (tried[0] > 1)}", refresh=False)
            line.update()
            yield tried


def _text_of(row: Mistake, seen: str) -> str:
    """What shows a mistake, '' if nothing does, and the row's advice."""
    return " ".join(filter(None, (seen, row.advice)))


def _cut_off(value, most: int) -> str:
    """The value's repr, cut off after `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def praised(exercise: Compared, mine: Run, truth: Run) -> Answer:
    """The answer to a right attempt: `praise`, with the figures if it is a text."""
    praise = exercise.praise
    answer = praise(mine) if callable(praise) else right(praise, *exercise.figures(mine, truth))
    answer.helped = mine.helped
    return answer


class WrongForm(TypeError):
    """An answer has another form than the solution's; the message has both."""


def _as(wanted, got):
    """`got`, in the form in which it is compared with `wanted`. A single number may have any shape. Raises
    WrongForm if `wanted` is a tensor and `got` has another type, shape or dtype.
    """
    if isinstance(wanted, torch.Tensor):
        if wanted.numel() == 1 and isinstance(got, (int, float)):
            got = torch.tensor(float(got), dtype=wanted.dtype)
        if wanted.numel() == 1 and isinstance(got, torch.Tensor) and got.numel() == 1:
            got = got.reshape(wanted.shape)
        if not isinstance(got, torch.Tensor):
            raise WrongForm(
                f"you return a {type(got).__module__}.{type(got).__name__}, and a tensor is wanted"
            )
        if got.shape != wanted.shape or torch.promote_types(got.dtype, wanted.dtype) != got.dtype:
            given, right_ = (f"{t.dtype} of {tuple(t.shape)}".removeprefix("torch.") for t in (got, wanted))
            raise WrongForm(f"you return {given}, and {right_} is wanted")
    return got


# -- answers for every exercise ---------------------------------------------------------------------

UNWAITED = (
    "some collective, isend or irecv was begun, and nobody waited for it. Keep the Work that it returns. Call"
    " its .wait() before you read the tensor that it receives, or change the tensor that it sends."
)


def _all_do_the_same(run: Run) -> Answer | None:
    """The answer to a hang in which every rank sends, or every rank receives."""
    doing = {at["op"] for at in run.standing.values()}
    if len(doing) != 1 or len(run.standing) < run.n:
        return None
    if doing == {"recv"}:
        name, advice = (
            "everybody waits to receive",
            "every rank waits to receive, and what it waits for was not sent. Does a rank begin its send"
            " before it receives? Does it send to the next rank, and receive from the previous one?",
        )
    elif all(calls and calls[-1][0] == "recv" for calls in run.calls):  # each rank has begun a receive too
        name, advice = (
            "messages that do not meet",
            "every rank has begun a send and a receive, and none of them meet: each message goes to a"
            " rank that waits for another. On a ring send to the next rank, receive from the previous one.",
        )
    else:
        name, advice = (
            "everybody sends before anybody receives",
            "every rank sends and waits; nobody receives. On gloo a send ends when its receiver takes the"
            " data, so on a ring somebody must do it the other way round: even ranks send first, odd ranks"
            " receive first. Or begin the send with dist.isend, receive, then wait.",
        )
    return Answer("crashed", f"On {run.n} ranks {advice}\n\n{run.error.report}", name)


def wasteful(run: Run, truth: Run) -> tuple[str, str] | None:
    """(name, advice) for right values without messages, or with more data sent than chunks need."""
    if called := {row.op for rows in run.traffic.ranks for row in rows} - {"send", "recv"}:
        return (
            "a ready collective does the work",
            f"you called {', '.join(sorted(called))}. Use sends and receives only: a collective is made of"
            " these.",
        )
    n, size, sent, needed = run.n, truth.ranks[0]["size"], run.traffic.counted, max(truth.traffic.counted)
    came = [sum(row.payload for row in rows if row.op == "recv") for rows in run.traffic.ranks]
    if max(sent) < 0.5 * needed:
        return (
            "nothing was sent",
            f"the busiest rank sent {human(max(sent))}, where {human(needed)} must be sent. The check's"
            " numbers can be guessed; real gradients cannot.",
        )
    if not run.needs_more(truth, "bytes"):
        if n > 2 and any(len({peer for peer, _ in facts["messages"]}) > 1 for facts in run.ranks):
            return (
                "straight to every rank, no ring",
                "the sum is right, and no byte too many was sent. But a rank sends to several others, over"
                " all links of the network. In a ring it sends to its neighbour alone.",
            )
        return None
    if n > 2 and min(sent) >= 0.99 * (n - 1) * size:
        return (
            "the whole tensor, not a chunk",
            f"every rank sent {human(min(sent))}: the tensor, n−1 times over. Cut it into n chunks and"
            " pass one chunk a step.",
        )
    busy = [max(pair) for pair in zip(sent, came)]
    most = max(busy)
    if n > 2 and most >= 0.99 * (n - 1) * size and sum(b > 1.01 * size for b in busy) == 1:
        return (
            "everything through one rank",
            f"rank {busy.index(most)} sends or receives {human(most)}, and no other rank more than"
            f" {human(size)}. The sum is right, but one link carries n−1 times the load, and it grows with"
            " every rank you add.",
        )
    return None
