"""Predictions and exercises: the reader chooses or writes an answer, and learns why it is right or wrong.

An exercise runs the reader's function on real ranks. Its answer is of one of five kinds: not started; right;
wrong, with the reason; crashed, also for a hang; not counted, if the machine was too busy for the ranks to
end in time. The reason is found from what was measured (values, bytes, order, which rank waits for which),
and has the name of a misconception.
"""

from __future__ import annotations

import ast
import dis
import inspect
import io
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from html import escape
from types import CodeType
from typing import TYPE_CHECKING

from three_axes import lines

from ..live import live, question
from ..ranks import RankError, output
from . import onward, passed
from .books import Written, solutions_hidden
from .runs import Endless

if TYPE_CHECKING:  # ranks import this module, and do not need matplotlib
    from ..draw import Picture

# Kind of answer -> the mark before its text.
KINDS = {"not started": "○", "right": "✓", "wrong": "✗", "crashed": "!", "not counted": "○"}
COLOURS = {"right": "#007a5a", "wrong": "#b5482a", "crashed": "#b5482a"}  # else grey
PRINTS = 1000  # lines; if a call ends too late and a rank printed more, the answer says that printing is slow


@dataclass
class Answer:
    """The result of a check. `misconception` is the short name of the mistake, for wrong answers."""

    kind: str
    text: str
    misconception: str | None = None
    figures: list[tuple[str, str, str]] = field(default_factory=list)  # (what, reached, target or '')
    picture: Picture | None = None
    next: tuple[str, str] = "", ""  # after a right answer: (what comes next, a link to it or '')
    helped: str = ""  # the name of the course's own function that did the work

    def __repr__(self) -> str:
        text = self.text
        if "\n" not in text:
            text = textwrap.fill(text, 100, break_on_hyphens=False)
        figures = (
            f"  {what}: {reached}" + (f" (target {target})" if target else "")
            for what, reached, target in self.figures
        )
        return "\n".join([self._head, *filter(None, [text]), *figures, *filter(None, self.next[:1])])

    @property
    def _head(self) -> str:
        return f"{KINDS[self.kind]} {self.kind}" + (f": {self.misconception}" if self.misconception else "")

    def _repr_html_(self) -> str:
        body = _html(self.text)
        if "\n" in self.text:
            body = f'<pre style="margin:.4em 0;white-space:pre-wrap">{body}</pre>'
        figures = "".join(
            f"<li>{escape(w)}: <b>{escape(r)}</b>{f' (target {escape(t)})' if t else ''}</li>"
            for w, r, t in self.figures
        )
        sentence, link = map(escape, self.next)
        onward = f'<a href="{link}">{sentence}</a>' if link else sentence
        colour = COLOURS.get(self.kind, "#767676")
        return (
            f'<div style="border-left:4px solid {colour};padding:.3em .9em;margin:.3em 0">'
            f"<b>{escape(self._head)}</b><br>{body}{f'<ul>{figures}</ul>' if figures else ''}"
            f"{f'<p>{onward}</p>' if onward else ''}</div>"
            f"{self.picture.html() if self.picture else ''}"
        )


def _html(text: str) -> str:
    """Markdown's code, bold and links as HTML. All other text is unchanged: `2*b*s` outside code is not
    emphasis.
    """
    parts = re.split("`([^`]+)`", escape(text))
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"<code>{part}</code>"
        else:
            bold = re.sub(r"(?<!\w)\*\*(?=\S)([^*]+)(?<=\S)\*\*(?!\w)", r"<b>\1</b>", part)
            parts[i] = re.sub(r"\[([^\]]+)\]\((https?://[^\s)]+)\)", r'<a href="\2">\1</a>', bold)
    return "".join(parts)


def wrong(misconception: str, text: str, *figures) -> Answer:
    """A wrong answer. misconception: the mistake's short name. figures: (what, reached, target or ''), of
    which the answer keeps those that differ from their target.
    """
    missed = [(what, reached, target) for what, reached, target in figures if target not in ("", reached)]
    return Answer("wrong", text, misconception, missed)


def right(text: str, *figures) -> Answer:
    """A right answer. figures: (what, reached, target or '')."""
    return Answer("right", text, None, list(figures))


def line(wanted: float, because: str, hint: str) -> Callable[[object], Answer]:
    """A function that checks the number which a reader writes into a drop's first code cell: it is right
    within 2 % of `wanted`. because: the text for a right number. hint: the text for a wrong one. Such a check
    is not noted as an attempt.
    """

    def first_line(yours: object) -> Answer:
        if yours is ...:
            return Answer("not started", "Write a number in place of the dots, and run this cell again.")
        if not isinstance(yours, int | float):
            return wrong("no number", f"{yours!r} is no number.")
        if abs(yours - wanted) <= abs(wanted) / 50:
            return right(because)
        return wrong("another number", f"{yours:,} is not the number. {hint}")

    return first_line


class NotCounted(Exception):
    """The attempt could not be judged, by no fault of the reader. The message says why."""


@dataclass
class Exercise:
    """One exercise. `verdict(attempt)` runs it on ranks and returns an Answer. `reference` is the solution.

    judge: gives the verdict, unless a subclass does. It need not catch a RankError, which becomes 'crashed',
    with the ranks' own report. without: names of the course's own functions that would do the work. minutes:
    the time for a reader who is new to torch.distributed, wrong attempts included. noted: whether attempts
    are noted in the reader's progress.
    """

    name: str
    reference: Callable
    judge: Callable[[Callable], Answer] | None = None
    hints: list[str] = field(kw_only=True)
    without: tuple[str, ...] = field(default=(), kw_only=True)
    minutes: int = field(kw_only=True)
    noted: bool = field(default=True, kw_only=True)
    # A number that grows: a drop's exercises are sorted by it.
    made: int = field(default_factory=itertools.count().__next__, init=False)
    _shown: list[int] = field(default_factory=list, init=False)  # places of the hints that were shown
    _mistake: str = field(default="", init=False)  # of the last attempt

    def check(self, attempt: Callable) -> Answer:
        """Run the reader's function on real ranks and return the result."""
        if not callable(attempt):
            raise TypeError(
                f"check() takes your function itself, without brackets after its name, not {attempt!r}"
            )
        wanted = list(inspect.signature(self.reference).parameters)
        try:
            inspect.signature(attempt).bind(*wanted)
        except (TypeError, ValueError):
            return wrong(
                "other arguments than asked for",
                f"The check calls your function with ({', '.join(wanted)}), and yours cannot take that. Keep"
                " the def line as it was given.",
            )
        if _is_empty(attempt):
            if _has_a_value(attempt):
                sentence = "Your function ends without `return`: the value in its body is lost."
                return wrong("nothing returned", sentence)
            text = f"Write the body of {attempt.__name__}, and run this cell again."
            if kept := getattr(passed.mine().exercises.get(self.name), "source", ""):
                text += f" You passed this exercise with:\n\n{kept}"
            return Answer("not started", text)
        if helped := names_in(attempt).intersection(self.without):
            sentence = f"`{min(helped)}` does this exercise for you. Write it without `{min(helped)}`."
            return wrong("the course's code does the work", sentence)
        try:
            with _few_lines():
                answer = self.verdict(attempt)
        except RankError as e:
            answer = crashed(e)
        except TypeError as e:  # it cannot be sent to the ranks
            answer = Answer("crashed", str(e))
        except NotCounted as e:
            answer = Answer("not counted", str(e))
        if answer.helped:
            sentence = (
                f"Your function calls the course's own `{answer.helped}`, so this attempt is not counted."
            )
            answer.text = f"{answer.text} {sentence}"
        if answer.kind == "not counted" or answer.helped or attempt is self.reference or not self.noted:
            return answer
        self._mistake = answer.misconception or ""
        failed = None if answer.kind == "right" else answer.misconception or answer.kind
        passed.note(self.name, failed, _source_of(attempt))
        if answer.kind == "right":
            answer.next = onward.after(self.name, self.reference.__module__, _asked_by_skip())
        return answer

    def advice(self, mistake: str) -> str:
        """The written advice on a mistake: none here; subclasses have it."""
        return ""

    def verdict(self, attempt: Callable) -> Answer:
        """The verdict of `judge`; subclasses run the attempt themselves. `check` catches a RankError."""
        return self.judge(attempt)

    @property
    def steps(self) -> list[str]:
        """The hints; for the hardest exercises the second has the solution's lines, to be put in order."""
        return Written(self.name, self.minutes, self.hints, self._solution).steps

    @property
    def _solution(self) -> str:
        return textwrap.dedent(inspect.getsource(self.reference))

    def about(self, mistake: str) -> str:
        """The hint that is about a mistake; '' if none is, as here; subclasses have them."""
        return ""

    def hint(self) -> _Text:
        """The next hint: the one that is about the last mistake, otherwise the first that was not shown.
        After the last one, where to find the solution.
        """
        steps, about = self.steps, self.about(self._mistake)
        if len(self._shown) == len(steps):
            return _Text("That was the last hint. solution() shows one way to do it.")
        left = [place for place in range(len(steps)) if place not in self._shown]
        place = steps.index(about) if about and steps.index(about) in left else left[0]
        self._shown.append(place)
        return _Text(f"Hint {place + 1} of {len(steps)}: {steps[place]}")

    def solution(self) -> _Text:
        """One way to do it, which passes the check.

        With THREE_AXES_SOLUTIONS=hidden in the environment it stays hidden: for a teacher's lessons.
        """
        if solutions_hidden():
            return _Text("Your teacher has put the solutions away. hint() still helps.")
        return _Text(self._solution, code=True)

    def __repr__(self) -> str:
        return f"Exercise {self.name!r}: check(your_function), hint(), solution()"


SKIPS = "# progress.skip asks: a right answer passes the drop, but the drop is not noted as read.\n"


def _asked_by_skip() -> bool:
    """Whether `progress.skip` made the cell that runs."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = [] if shell is None else shell.history_manager.input_hist_raw  # not `In`: it is the reader's
    return bool(cells) and cells[-1].startswith(SKIPS)


INSIDE = (
    "No line of your code is in this error: PyTorch worked with what your function returned, or ran backward."
    " Compare the shape and the type of each tensor that you return with what the exercise asks for."
)
# Pattern of a rank's error ("type: message"), the name of the mistake, what to do.
CRASHES = (
    (
        r"name '(rank|world_size)' is not defined",
        "a name that only cells have",
        "`rank` and `world_size` are there in `%%ranks` cells. A function asks: `dist.get_rank()`,"
        " `dist.get_world_size()`.",
    ),
    (
        r"name 'world' is not defined",
        "the notebook's world",
        "`world` is the notebook's. Your function runs on a rank already: there `dist` sends and receives.",
    ),
    (
        r"which does not exist: ranks go from",
        "a rank that does not exist",
        "Your function sends to, or receives from, a rank that is not there.",
    ),
    (
        r"^EOFError",
        "input on a rank",
        "`input()` reads the keyboard, and a rank has none. Your function gets what it needs as arguments.",
    ),
    (
        r"^BdbQuit",
        "a breakpoint on a rank",
        "`breakpoint()` reads the keyboard, and the input of a rank is empty. `print()` shows a value in the"
        " notebook.",
    ),
    (
        r"^SystemExit",
        "an exit on a rank",
        "`exit()` ends a rank in the middle, and the others wait for it. A function ends with `return`.",
    ),
    (
        r"NoneType",
        "None where a tensor is needed",
        "A value in your code is None. A function that changes what it is given, such as dist.all_reduce or"
        " append, returns None: go on with what you gave it.",
    ),
    (
        r"<class 'generator'>|'generator' object",
        "a generator where a list is needed",
        "Round brackets around `… for … in …` make a generator, which has no indices and no length. Square"
        " brackets make a list.",
    ),
    (
        r"outputShape.0. \* worldSize",
        "an output that does not fit",
        "dist.reduce_scatter_tensor(output, input): the output is one rank's part, 1/n of the input.",
    ),
    (
        r"Expected parameter .tensor. of type torch.Tensor",
        "a number where a tensor is needed",
        "A collective takes tensors only: `torch.tensor(number)` makes one of a number.",
    ),
    (
        r"all_to_all_single.*incompatible function arguments",
        "sizes that are no list of numbers",
        "How many rows go to each rank, and come from it, are lists of Python's numbers: `.tolist()`.",
    ),
    (
        r"incompatible function arguments",
        "arguments in another order",
        "The call takes other arguments, or in another order: write `op=…` and `group=…` before them.",
    ),
    (
        r"invalid output tensor list",
        "a list of another length",
        "dist.all_gather fills a list with a tensor a rank: `[torch.empty_like(x) for _ in range(n)]`.",
    ),
    (
        r"'list' object has no attribute '(max|min|sum|mean|std)'",
        "a list taken for a tensor",
        "A list has no such method: `max(x)`, `min(x)` and `sum(x)` take lists.",
    ),
)


def stopped(error: RankError) -> Answer | None:
    """The answer if a call took too long and no rank waited in a collective or message, or if a rank reached
    its limit of processor time; else None.
    """
    any_is_in = lambda what: any(s.where and s.where[what] for s in error.seen)
    if error.kind == "timeout" and not any_is_in("line") and not any_is_in("in"):
        answered = all(s.finished or s.where for s in error.seen)
        why = "none was in your code" if answered else "one is in a single long operation, or is not running"
        busy = f"The machine is busy: no rank got through, and {why}. Check again in a moment."
        return Answer("not counted", f"{busy}\n\n{error.report}")
    endless = any(s.error and s.error.type == Endless.__name__ for s in error.seen)
    if not endless and (error.kind != "timeout" or any_is_in("in")):
        return None
    printed = max(_lines(s.said) for s in error.seen)
    if printed > PRINTS:
        text = f"A rank printed {printed:,} lines, and printing takes time. Print less, or on one rank only."
    else:
        text = "Does every loop of yours end?"
    return Answer("crashed", f"{text}\n\n{error.report}")


def _too_small(error: RankError) -> Answer | None:
    """The answer if gloo ended a rank because a message was longer than its receive buffer."""
    for status in error.seen:
        sizes = re.search(r"preamble\.length <= op\.nbytes\. (\d+) vs (\d+)", status.said)
        if sizes and status.exit is not None and status.box and status.box["op"] == "recv":
            came, had = (int(size) for size in sizes.groups())
            sentence = (
                f"A message of {came:,} bytes arrived for a buffer of {had:,}. The buffer needs the size and"
                " the type of the message; torch.empty makes float32."
            )
            return Answer("crashed", f"{sentence}\n\n{error.report}", "a buffer too small")
    return None


def _lines(printed: str) -> int:
    """How many lines a rank has printed, with those that were left out."""
    left_out = output.LEFT_OUT.search(printed)
    return printed.count("\n") + (int(left_out[1].replace(",", "")) if left_out else 0)


def crashed(error: RankError) -> Answer:
    """The ranks' own report, and what to do, if that is known."""
    if answer := stopped(error) or _too_small(error):
        return answer
    raised = [seen.error for seen in error.seen if seen.error and not seen.error.aborted]
    for pattern, name, advice in CRASHES:
        if any(re.search(pattern, f"{one.type}: {one.message}") for one in raised):
            return Answer("crashed", f"{advice}\n\n{error.report}", name)
    waits = [s.where["in"] for s in error.seen if s.where and s.where["in"]]
    if error.kind == "deadlock" and any(s.finished for s in error.seen):
        message = all(at["op"] in ("send", "recv") for at in waits)
        name = "a message with one end" if message else "a collective that not all ranks call"
        return Answer("crashed", error.report, name)
    waits_in_theirs = any(s.where and s.where["line"] for s in error.seen)
    inside = raised and not waits_in_theirs and not any(lines.are_readers(one.lines) for one in raised)
    return Answer("crashed", (f"{INSIDE}\n\n" if inside else "") + error.report)


@contextmanager
def _few_lines(first: int = 10, last: int = 20):
    """In this block, what ranks print is kept and printed at the end, and only the first and last lines if
    there are many: PyTorch logs a hundred lines for some errors, and the verdict must stay visible.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        lines = _without_cpp(printed.getvalue().splitlines())
        if (left_out := len(lines) - first - last) > 1:
            lines[first:-last] = [f"… {left_out} lines …"]
        if lines:
            print("\n".join(lines))


def _without_cpp(printed: list[str]) -> list[str]:
    """What ranks printed, as formatted by `output.fold`, without the message with which C++ ends a process
    (the verdict has it already), and without headings of ranks that then have no line left.
    """
    kept = [line for line in printed if not re.search(r"│ +(terminate called after|what\(\):)", line)]
    follows = [*kept[1:], ""]
    names = [re.fullmatch(r"ranks? [\d, –and]+", line) for line in kept]
    return [line for line, name, next_ in zip(kept, names, follows) if not name or next_.startswith("  │")]


class _Text:
    """Text that a notebook displays without quotes."""

    def __init__(self, text: str, code: bool = False):
        self.text, self.code = text, code

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```" if self.code else self.text


def names_in(function: Callable | CodeType) -> set[str]:
    """All names that a function uses, and that the functions defined in it use."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*map(names_in, code.co_consts))


def numbers_in(function: Callable | CodeType) -> set[int]:
    """All whole numbers in a function, and in functions defined in it."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType):
        return set()
    return {one for one in code.co_consts if type(one) is int}.union(*map(numbers_in, code.co_consts))


def _is_empty(function: Callable) -> bool:
    """Whether the body is only `...`, `pass` or a docstring."""
    nothing = {"RESUME", "NOP", "LOAD_CONST", "POP_TOP", "RETURN_VALUE", "RETURN_CONST"}
    return inspect.isfunction(function) and all(
        step.opname in nothing
        and (step.opname in ("RESUME", "NOP") or step.argval in (None, ..., function.__doc__))
        for step in dis.get_instructions(function)
    )


def _source_of(function: Callable) -> str:
    """The source of a reader's function; '' if it is not known."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def _has_a_value(function: Callable) -> bool:
    """Whether a body that `_is_empty` has a value in it, such as (16, 2, 1), without `return` before it."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body
    except (OSError, SyntaxError, IndexError, AttributeError):
        return False
    values = [line.value for line in body[function.__doc__ is not None :] if isinstance(line, ast.Expr)]
    return any(not isinstance(value, ast.Constant) or value.value is not ... for value in values)


NONE_OF_THESE = "none of these: "


class Prediction:
    """A question with a few possible answers, of which the reader chooses one before the cell with the
    answer: `guess = predict("How many?", "one", "two")`, later `guess.reveal("two")`.
    """

    def __init__(self, question: str, *options: str):
        if len(options) < 2:
            raise ValueError("a prediction needs at least two options to choose from")
        self.question, self.options, self.chosen = question, options, None
        self.revealed = False
        self._shown: list = []  # the buttons of each place where it is displayed
        self._listed = ", ".join(map(repr, options))

    def choose(self, option: str) -> None:
        """Choose an option. The choice can change until the reveal. Raises ValueError for another option."""
        if option not in self.options:
            raise ValueError(f"{option!r} is not an option; choose one of {self._listed}")
        if not self.revealed:
            self.chosen = option

    def ask(self, choose: Callable[[str], None]) -> list:
        """Widgets: the question, its options as buttons, and the current choice."""
        asked = question(self.question, self.options, self.chosen, choose)
        self._shown.append(asked[-1])
        self._close()
        return asked

    def _close(self) -> None:
        """After the reveal all buttons show the choice, and accept no other."""
        for buttons in self._shown if self.revealed else ():
            buttons.value, buttons.disabled = self.chosen, True

    def reveal(self, answer: str, because: str = "", found: str = "Measured") -> _Text | _Unchosen:
        """Compare the reader's choice with `answer`, one of the options; without a choice, ask again. If no
        option fits what was measured, `answer` is 'none of these: ' and the result. found: how the answer was
        found, 'Measured' or 'Computed'.
        """
        if answer not in self.options and not answer.startswith(NONE_OF_THESE):
            raise ValueError(f"the answer {answer!r} is not among the options {self._listed}")
        if self.chosen is None and passed.is_kept():  # in a test, nobody can choose
            return _Unchosen(self, lambda: self.reveal(answer, because, found))
        self.revealed = self.chosen is not None
        self._close()
        yours = {None: "", answer: "You predicted that."}.get(self.chosen, f"You predicted: {self.chosen}.")
        return _Text(" ".join(filter(None, (f"{found}: {answer}.", yours, because))))

    def __repr__(self) -> str:
        question = textwrap.fill(self.question, 100, break_on_hyphens=False)
        return "\n".join([question, *(f"  ○ {option}" for option in self.options)])

    def _repr_mimebundle_(self, **_):
        """Buttons if a kernel runs; the same question as text if none does."""
        import ipywidgets as widgets

        box = widgets.VBox(self.ask(self.choose))
        return {"text/plain": repr(self), **live(box)}


class _Unchosen:
    """`reveal` returns this if the reader has not chosen yet: the question again, and below it the answer
    after a click.
    """

    sentence = "You have not predicted yet. Choose an answer, then see what was found."

    def __init__(self, prediction: Prediction, answer: Callable[[], _Text]):
        self.prediction, self.answer = prediction, answer

    def __repr__(self) -> str:
        return f"{self.sentence}\n{self.prediction}"

    def _repr_mimebundle_(self, **_):
        import ipywidgets as widgets

        under = widgets.HTML(escape(self.sentence))

        def chosen(option: str) -> None:
            self.prediction.choose(option)
            under.value = escape(self.answer().text)

        return {"text/plain": repr(self), **live(widgets.VBox([*self.prediction.ask(chosen), under]))}


_predicted: dict[tuple[str, ...], Prediction] = {}


def predict(question: str, *options: str) -> Prediction:
    """A Prediction. The same question with the same options is the same object until the kernel ends, and
    keeps its choice: a click on an option selects the question's cell, so Run runs that cell again.
    """
    return _predicted.setdefault((question, *options), Prediction(question, *options))
