"""The reader's progress: checks and mistakes of each exercise, drops read, cards asked and known.

It is kept in a small file on this machine, and nothing is sent anywhere: `progress.json` in the folder of the
fourteen notebooks, or the file that THREE_AXES_PROGRESS names. If that variable is "", no progress is kept.
The file may be deleted at any time.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from three_axes.foreign import plain, read_json


@dataclass
class Attempts:
    """Attempts at one exercise. tries: checks until it was passed. mistakes: name -> how often it was made,
    the latest last. source: the function that passed. Raises TypeError for values of other types, which a
    file may have.
    """

    tries: int = 0
    passed: bool = False
    mistakes: dict[str, int] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self):
        self.mistakes = {plain(name): n for name, n in self.mistakes.items()}
        numbers = self.tries, *self.mistakes.values()
        if not (
            type(self.passed) is bool
            and type(self.source) is str
            and all(type(n) is int and n >= 0 for n in numbers)
        ):
            raise TypeError


@dataclass
class Done:
    """The content of a progress file. exercises: name -> attempts. left: drops whose lesson was practised, or
    whose last cell has run, the latest last. cards: front -> (how often it was known in a row, the day on
    which it is asked again). asked: front -> the last day on which a drop began with this card. quiz:
    "before" or "after" -> whether the first answer to each question was right.
    """

    exercises: dict[str, Attempts] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    cards: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    quiz: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def passed(self) -> set[str]:
        """Names of the exercises passed so far."""
        return {name for name, attempts in self.exercises.items() if attempts.passed}


def file(folder: Path) -> Path | None:
    """The progress file of a reader who works in this folder, or in beyond/ under it; None if no progress is
    kept.
    """
    named = os.environ.get("THREE_AXES_PROGRESS")
    folder = folder.parent if folder.name == "beyond" else folder
    return Path(named or folder / "progress.json") if is_kept() else None


def beside(name: str) -> Path | None:
    """A file of the reader's in the folder of the progress file; None if no progress is kept."""
    path = file(Path.cwd())
    return path and path.with_name(name)


def is_kept() -> bool:
    """Whether progress is kept: unless THREE_AXES_PROGRESS is "", as in tests and when outputs are stored."""
    return os.environ.get("THREE_AXES_PROGRESS") != ""


def read_progress(path: Path) -> Done:
    """Read a progress file; its names are made safe to print. Raises OSError; ValueError for another file."""
    given = read_json(path)
    try:
        done = Done(**given)
        done.exercises = {plain(name): Attempts(**fields) for name, fields in done.exercises.items()}
        done.left = [plain(drop) for drop in done.left]
        known = done.cards.items()
        done.cards = {front: (int(n), str(date.fromisoformat(day))) for front, (n, day) in known}
        done.asked = {front: str(date.fromisoformat(day)) for front, day in done.asked.items()}
        done.quiz = {plain(story): [bool(right) for right in answers] for story, answers in done.quiz.items()}
    except (TypeError, AttributeError, ValueError):
        raise ValueError(f"{plain(path, 1000)} is no progress file of this course") from None
    return done


def mine(folder: Path | None = None) -> Done:
    """The progress of a reader who works in this folder (None: the current one). If there is no readable
    file, the progress is empty.
    """
    try:
        return read_progress(path) if (path := file(folder or Path.cwd())) else Done()
    except (OSError, ValueError):
        return Done()


_CHANGING = threading.RLock()  # JupyterLab calls a button's function in another thread than the cells


@contextmanager
def changing() -> Iterator[Done]:
    """The progress, to be changed in a `with` block. If it was changed, the file is written at the end; if
    that fails, nothing happens. Threads change it one after the other, and nobody ever reads half a file.
    """
    with _CHANGING:
        done = mine()
        before = asdict(done)
        yield done
        after = asdict(done)
        with suppress(OSError):
            if (path := file(Path.cwd())) and after != before:
                path = path.resolve()  # a link stays a link
                new = path.with_name(f".{path.name}.{os.getpid()}")
                try:
                    new.write_text(json.dumps(after, indent=1, ensure_ascii=False), encoding="utf-8")
                    new.replace(path)
                finally:
                    new.unlink(missing_ok=True)


def note_read(drop: str) -> None:
    """Note that a drop was read."""
    with changing() as done:
        done.left = [other for other in done.left if other != drop] + [drop]


def note(exercise: str, mistake: str | None, source: str = "") -> None:
    """Note a check. mistake: its name; None if the exercise was passed, by a function with this source. Later
    checks of a passed exercise do not count, but the last source that passed is kept.
    """
    with changing() as done:
        attempts = done.exercises.setdefault(exercise, Attempts())
        if mistake is None and source:
            attempts.source = source
        if attempts.passed:
            return
        attempts.tries += 1
        attempts.passed = mistake is None
        if mistake is not None:
            attempts.mistakes[mistake] = attempts.mistakes.pop(mistake, 0) + 1  # the latest is the last
