"""The names of the exercises that the reader has passed, in a small file on this machine. Nothing leaves it.

It is `progress.json` beside the notebook, or where THREE_AXES_PROGRESS says; "" for none at all. It may
be deleted at any time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def file() -> Path | None:
    said = os.environ.get("THREE_AXES_PROGRESS")
    return None if said == "" else Path(said or "progress.json")


def passed() -> set[str]:
    """Names of the exercises passed so far. A file that cannot be read counts as none."""
    try:
        return set(json.loads(file().read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return set()


def note(exercise: str) -> None:
    """Remember that an exercise was passed. Where the file cannot be written, nothing happens."""
    names = passed() | {exercise}
    try:
        if path := file():
            path.write_text(json.dumps(sorted(names), indent=1, ensure_ascii=False))
    except OSError:
        pass
