"""The lines of the cost model. The reader writes them, one or two a drop, and each is used from then on.

`from drops.lines import all_reduce` gives the reader's line if it is right, else the course's. A right line
is kept in cost_model.py beside the reader's progress: a file to open, to edit, and to take along. Units:
bytes, seconds, bytes and operations a second; shares from 0 to 1.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from helpers.practice import Answer, Exercise, beside, names_in, number, right, wrong
from three_axes.table import Table

from .formulas import FORMULAS, Formula

FILE = "cost_model.py"
FIRST = "from drops.lines import *  # the course's, in place of lines that are not here"
HEAD = f'''"""Your cost model, a line a drop.

Change what you like: the course takes each line from here while it is right.
"""

{FIRST}
'''
# Names of the course that a kept function may use, besides Python's own.
__all__ = ["Cost"]


class Cost(NamedTuple):
    """What a step costs: five terms in seconds, whose sum is the step; and bytes on the fullest GPU. work:
    what a GPU computes. tp: its TP's sending. idle: its bubble. dp: what shows of DP. sends: the pipeline's.
    """

    work: float
    tp: float
    idle: float
    dp: float
    sends: float
    memory: float

    @property
    def seconds(self) -> float:
        """The step: the sum of the five terms."""
        return sum(self[:5])


class _Judged(Exercise):
    """A line's check, without hints."""

    @property
    def _solution(self) -> str:
        source = super()._solution
        return source[source.index("def ") :]  # without the decorator


class Line:
    """A line of the cost model: a call is answered by the reader's function if it is right, else by the
    course's.
    """

    def __init__(self, formula: Formula):
        self.formula, self.ours, self.name = formula, formula.ours, formula.ours.__name__
        self.exercise = _Judged(self.name, self.ours, self._judge, hints=[], minutes=2, noted=False)
        self._signature = inspect.signature(self.ours)

    def __repr__(self) -> str:
        whose = "yours" if self.name in kept().right else "the course's"
        return f"{self.name}{self._signature}: {whose}"

    def __call__(self, *args, **options) -> float:
        if options or len(args) < len(self._signature.parameters):
            given = self._signature.bind(*args, **options)
            given.apply_defaults()
            args = given.args
        return self.whose(*args)

    @property
    def whose(self) -> Callable:
        """The reader's function if it is right, else the course's; always that while a line is judged."""
        return self.ours if _judging else kept().right.get(self.name, self.ours)

    def check(self, attempt: Callable) -> Answer:
        """Judge a reader's function. A right one is kept, and used from then on."""
        answer = self.exercise.check(attempt)
        _not_yet[self.name] = answer.kind not in ("right", "not started")
        if answer.kind == "right" and attempt is not self.ours:
            answer.text += f" {keep(attempt, self.name, f'Drop {self.formula.drop}. {self.formula.what}')}"
        return answer

    def solution(self):
        """The course's line."""
        return self.exercise.solution()

    def below(self, table: Table, *others: Line) -> Table:
        """A table whose column "predicted" is of this line, and of others; below it a sentence on whose lines
        they are, none if all are the course's.
        """
        mine, used = kept(), [line.name for line in (self, *others)]
        whose = [
            f"by the course's {name}, not by yours{mine.where}: {mine.broken[name]}"
            for name in used
            if name in mine.broken
        ]
        whose += [
            f"by the course's {name}: yours is not right yet"
            for name in used
            if _not_yet.get(name) and name not in (*mine.right, *mine.broken)
        ]
        if yours := [name for name in used if name in mine.right]:
            whose.insert(0, f"by your {', '.join(yours)}{mine.where}")
        if whose:
            table.note = f"predicted: {'; '.join(whose)}"
        return table

    def wrong(self, attempt: Callable) -> str:
        """'' if a function is right in all cases, else a sentence on the first case in which it is off by
        more than a tenth, or on the case in which it is off most.
        """
        return self._figures(attempt)[0]

    def _figures(self, attempt: Callable) -> tuple[str, list[tuple]]:
        """(a sentence as `wrong` has it, the arguments of the cases with another figure)."""
        off: list[tuple[float, str]] = []
        cases: list[tuple] = []
        for i, (where, given) in enumerate(self.formula.cases.items()):
            with _ours_alone():
                try:
                    if (value := attempt(*given)) is None:
                        return f"{where}: yours returns None. Is its `return` missing?", []
                    mine = number(value)
                except Exception as e:  # whatever the reader's line raises
                    return f"{where}: yours ends with {type(e).__name__}: {e}.", []
            truth = self.ours(*given)
            if abs(mine - truth) > 1e-6 * max(abs(truth), 1e-12):
                said, true = self.formula.shown(mine), self.formula.shown(truth)
                if said == true:
                    said, true = f"{mine:.6g}", f"{truth:.6g}"
                elif mine and not re.search("[1-9]", said):  # gigabytes, for instance
                    said = f"{mine:.6g}"
                found = "right is" if i else self.formula.found
                off.append(
                    (abs(mine / truth - 1) if truth else 1.0, f"{where}: yours says {said}, {found} {true}.")
                )
                cases.append(given)
        if not off:
            return "", []
        return next((sentence for share, sentence in off if share > 0.1), max(off)[1]), cases

    def _judge(self, attempt: Callable) -> Answer:
        if isinstance(attempt, Line):
            return wrong("the course's own line", f"Write `{self.name}` yourself, in this cell.")
        if getattr(attempt, "__name__", "") != self.name:
            return wrong("another name", f"Write it as a function: `def {self.name}{self._signature}:`.")
        text, off = self._figures(attempt)
        if not text:
            return right("Right.")
        if not off:
            return wrong("no figure", text)
        for name, (other, why) in self.formula.mistakes.items():
            if self._is(other, attempt, off):
                return wrong(name, f"{text} {why}")
        return wrong("another figure", text)

    def _is(self, mistake: Callable, attempt: Callable, off: list[tuple]) -> bool:
        """Whether an attempt has a mistake's figures, in all cases but perhaps one, which is off by a second
        mistake. off: the cases in which the attempt is wrong.
        """
        cases = list(self.formula.cases.values())
        unlike = [given for given in cases if not _alike(attempt, mistake, given)]
        tell = [given for given in cases if not _alike(self.ours, mistake, given)]
        if not all(given in off for given in unlike):
            return False
        return not unlike or len(unlike) == 1 and sum(given not in unlike for given in tell) > 1


def _alike(mine: Callable, other: Callable, given: tuple) -> bool:
    with _ours_alone():
        try:
            a, b = number(mine(*given)), number(other(*given))
        except Exception:  # whatever the reader's line raises
            return False
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


_judging = False
_not_yet: dict[str, bool] = {}  # name -> whether the last attempt in this kernel was wrong


@contextmanager
def by_the_course() -> Iterator[None]:
    """In this block each line is the course's: what calls it is judged, and the line has its own check."""
    global _judging
    before, _judging = _judging, True
    try:
        yield
    finally:
        _judging = before


@contextmanager
def _ours_alone() -> Iterator[None]:
    """While a line is judged, the lines that it calls are the course's, and no profiler sees the judge: an
    attempt that calls a kept line must not be taken for one that calls the course's solution.
    """
    profiler = sys.getprofile()
    sys.setprofile(None)
    try:
        with by_the_course(), _in_time():
            yield
    finally:
        sys.setprofile(profiler)


PATIENCE = 2  # seconds of processor time; a line needs microseconds


@contextmanager
def _in_time() -> Iterator[None]:
    """Raises TimeoutError in the reader's code if it computes for more than `PATIENCE`. Python delivers
    signals to the main thread alone; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_):
        raise TimeoutError(f"it computes for more than {PATIENCE} s")

    before = signal.signal(signal.SIGVTALRM, over)
    outer = signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *outer)
        signal.signal(signal.SIGVTALRM, before)


# -- the reader's file


class Kept(NamedTuple):
    """What the reader's lines are. right: name -> function. broken: name -> why it is not used. where: ' of
    cost_model.py', or '' if they are not in a file.
    """

    right: dict[str, Callable]
    broken: dict[str, str]
    where: str


JUDGES: dict[str, Callable[[Callable], str]] = {}  # name -> a function that returns '' for a right one
_in_kernel = [""]  # the source of right lines where no file is written


def kept() -> Kept:
    """The reader's lines: those of the file, or those of this kernel where no progress is kept."""
    path = beside(FILE)
    if path is None:
        return _read(_in_kernel[0], "", tuple(JUDGES)) if _in_kernel[0] else Kept({}, {}, "")
    return _of_file(path, _stamp(path), tuple(JUDGES))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@cache
def _of_file(path: Path, stamp: tuple[int, int] | None, judged: tuple[str, ...]) -> Kept:
    if stamp is None:
        return Kept({}, {}, "")
    try:
        return _read(path.read_text(encoding="utf-8"), f" in {path.name}", judged)
    except (OSError, UnicodeDecodeError) as e:
        return Kept({}, dict.fromkeys(judged, f"it cannot be read ({e})"), f" in {path.name}")


@cache
def _read(source: str, where: str, judged: tuple[str, ...]) -> Kept:
    """The right functions of a source, each judged with the course's in place of the others. They call each
    other as LINES, which are the reader's where these are right.
    """
    names: dict = {}
    try:
        with _in_time():
            exec(compile(source, FILE, "exec"), names)
    except Exception as e:  # the reader may have changed the file
        return Kept({}, dict.fromkeys(judged, f"it does not run ({type(e).__name__}: {e})"), where)
    theirs = {name: names[name] for name in judged if isinstance(names.get(name), FunctionType)}
    names.update(LINES)
    with _ours_alone():
        broken = {name: why for name, function in theirs.items() if (why := JUDGES[name](function))}
    return Kept({name: one for name, one in theirs.items() if name not in broken}, broken, where)


def keep(function: Callable, name: str, comment: str) -> str:
    """Write a right function, and the functions of the notebook that it calls, into the reader's file, each
    in place of an earlier one. Returns a sentence that says so, or why it was not written.
    """
    try:
        functions = {one.__name__: textwrap.dedent(inspect.getsource(one)) for one in _called(function)}
    except (OSError, TypeError):
        return "Its source cannot be read, so it is not kept."
    path, source, sentence = beside(FILE), _in_kernel[0] or HEAD, ""
    if path is not None:
        try:
            source, sentence = _before(path)
        except SyntaxError as e:
            return (
                f"{path.name} has an error in line {e.lineno}, so this is not kept. Mend it, and check again."
            )
    source = _with_imports(source, _imports(_called(function)))
    for one, text in functions.items():
        note = f"# {comment}\n" if one == name else ""
        source = f"{_without(source, one).rstrip()}\n\n\n{note}{text.strip()}\n"
    if name not in _read(source, "", tuple(JUDGES)).right:
        names = names_in(function) & set(function.__globals__) - set(JUDGES)
        used = ", ".join(f"`{one}`" for one in sorted(names)) or "names"
        return (
            f"It uses {used} from outside of it, so it is not kept, and the course's line is used. Put what"
            " it needs into it, and check again."
        )
    if path is None:
        _in_kernel[0] = source
        return f'From here on the column "predicted" is yours, until the kernel ends.{_to_copy(functions)}'
    try:
        path.write_text(source, encoding="utf-8")
    except OSError as e:
        return f"{path.name} could not be written ({e.strerror}), so the course's line is used."
    return f"It is kept in {path.name}, and used from here on.{sentence}{_to_copy(functions)}"


def _imports(functions: list[Callable]) -> list[str]:
    """The imports of modules and classes that these functions of a notebook use."""
    lines = []
    for one in functions:
        for name in sorted(names_in(one) & set(one.__globals__)):
            value = one.__globals__[name]
            if inspect.ismodule(value):
                lines.append(f"import {value.__name__}" + f" as {name}" * (name != value.__name__))
            elif inspect.isclass(value) and value.__module__ not in (
                "__main__",
                one.__module__,
                "builtins",
                __name__,
            ):
                as_name = f" as {name}" * (name != value.__name__)
                lines.append(f"from {value.__module__} import {value.__name__}{as_name}")
    return lines


def _with_imports(source: str, imports: list[str]) -> str:
    """The source with these imports below the course's own, which is put back where it is missing."""
    lines = source.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith("from drops.lines import")), None)
    if at is None:
        tree = ast.parse(source)
        at = tree.body[0].end_lineno if ast.get_docstring(tree) is not None else 0
        lines.insert(at, FIRST)
    lines[at + 1 : at + 1] = [line for line in imports if line not in lines]
    return "\n".join(lines) + "\n"


def _to_copy(functions: dict[str, str]) -> str:
    """On Colab each drop is a new machine, without the reader's file: the lines to copy."""
    if "google.colab" not in sys.modules:
        return ""
    copied = "\n\n".join(text.strip() for text in functions.values())
    return (
        f" On Colab the next drop runs on a new machine. Copy this to a cell there, and check it:\n\n{copied}"
    )


def _before(path: Path) -> tuple[str, str]:
    """(the text of the reader's file, a sentence if another file was in its place and is renamed).

    Raises SyntaxError if the reader's file cannot be read by Python: it is left as it is.
    """
    if not path.is_file():
        return HEAD, ""
    source = path.read_text(encoding="utf-8", errors="replace")
    if "from drops.lines import" in source or re.search(rf"^def ({'|'.join(LINES)})\(", source, re.M):
        ast.parse(source)
        return source, ""
    free = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(1))
    other = next(name for name in free if not name.exists())
    path.rename(other)
    return HEAD, f" ({path.name} was another file: it is now {other.name}.)"


def _without(source: str, name: str) -> str:
    """The source without its function of this name, and without the comment above it."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = node.lineno - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            return "\n".join([*lines[:first], *lines[node.end_lineno :]])
    return source


def _called(function: Callable) -> list[Callable]:
    """A function, behind the functions of its notebook that it calls, and those that they call. Other lines
    are not among them: they have checks of their own.
    """
    found = [function]
    for one in found:
        others = (one.__globals__.get(name) for name in sorted(names_in(one) - set(JUDGES)))
        alike = (f for f in others if inspect.isfunction(f) and f.__module__ == function.__module__)
        found += [f for f in alike if f not in found]
    return found[::-1]


# -- the lines

LINES = {name: Line(formula) for name, formula in FORMULAS.items()}
JUDGES |= {name: line.wrong for name, line in LINES.items()}
__all__ += LINES


def __getattr__(name: str) -> Line:
    """`from drops.lines import all_reduce` gives the line of this name."""
    if name in LINES:
        return LINES[name]
    raise AttributeError(f"drops.lines has no {name!r}; its lines are {', '.join(LINES)}")
