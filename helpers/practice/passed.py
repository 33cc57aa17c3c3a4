"""What the reader has tried: for each exercise the checks made, the mistakes named, and whether it is passed.

A small file on this machine, and nothing leaves it: `progress.json` beside the notebook, or where
THREE_AXES_PROGRESS says; "" for none at all. It may be deleted at any time.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from three_axes.foreign import plain, read_json


@dataclass
class Attempts:
    """At one exercise. tries: checks until it was passed. mistakes: name -> how often it was made."""

    tries: int = 0
    passed: bool = False
    mistakes: dict[str, int] = field(default_factory=dict)


def file() -> Path | None:
    named = os.environ.get("THREE_AXES_PROGRESS")
    return None if named == "" else Path(named or "progress.json")


def read(path: Path) -> dict[str, Attempts]:
    """Exercise -> attempts, of a progress file; names are fit for a terminal. Raises OSError, and ValueError
    for a file of another kind.
    """
    given = read_json(path)
    try:
        known = {plain(name): Attempts(**fields) for name, fields in given.items()}
        for one in known.values():
            one.mistakes = {plain(name): n for name, n in one.mistakes.items()}
            numbers = one.tries, *one.mistakes.values()
            if not (type(one.passed) is bool and all(type(n) is int and n >= 0 for n in numbers)):
                raise TypeError
    except (TypeError, AttributeError):
        raise ValueError(f"{plain(path)} is no progress file of this course") from None
    return known


def attempts() -> dict[str, Attempts]:
    """The reader's own. A file that cannot be read counts as none."""
    try:
        return read(path) if (path := file()) else {}
    except (OSError, ValueError):
        return {}


def passed() -> set[str]:
    """Names of the exercises passed so far."""
    return {name for name, one in attempts().items() if one.passed}


def note(exercise: str, mistake: str | None) -> None:
    """Remember a check: None where it was passed. What comes after that is not counted.

    Where the file cannot be written, nothing happens.
    """
    known = attempts()
    one = known.setdefault(exercise, Attempts())
    if one.passed:
        return
    one.tries += 1
    one.passed = mistake is None
    if mistake is not None:
        one.mistakes[mistake] = one.mistakes.get(mistake, 0) + 1
    try:
        if path := file():
            given = {name: asdict(known[name]) for name in sorted(known)}
            path.write_text(json.dumps(given, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError:
        pass
