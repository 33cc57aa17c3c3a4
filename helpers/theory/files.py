"""Reading a user's JSON file, with refusals of one sentence."""

from __future__ import annotations

import json
from pathlib import Path


def is_file(name: str) -> bool:
    """Whether a name on the command line means a JSON file."""
    return name.lower().endswith(".json")


def read_object(path: Path, what: str) -> dict:
    """The JSON object in `path`, which should hold a `what`. Raises ValueError where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not a JSON file") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object, so no {what}")
    return found
