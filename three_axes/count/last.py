"""`count --watch`: the last collective of each rank, in a file that outlives its process.

gloo ends a process at once when more bytes arrive than its tensor holds, and then nobody can ask that rank
what it had begun. So each rank's recorder writes to its box (`meter`), a file in the folder that torchrun has
made for it. The first rank that ends with an exception reads the boxes of all ranks on its host.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..lines import Line, show
from ..table import ranks
from .moves import Begun, Channel

NAME = "last-collective"


def box() -> int | None:
    """A descriptor of this rank's new box, which its recorder takes; None without torchrun."""
    try:
        return os.open(_folder() / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except (KeyError, OSError):
        return None


def forget() -> None:
    """Remove this rank's box: all went well."""
    with suppress(KeyError, OSError):
        os.remove(_folder() / NAME)


def tell(begun: Mapping[Channel, Begun], me: int, say: Callable[[str], None]) -> None:
    """Say where ranks of this host began what does not meet, unless another rank has said so. The others wait
    here until it is said, so that it stands above their tracebacks. begun: what this rank, `me`, has begun.
    """
    with suppress(KeyError, OSError), open(_folder().parent / NAME, "a+") as said:
        fcntl.flock(said, fcntl.LOCK_EX)
        said.seek(0)
        if not said.read() and (words := disagreement(begun, me, list(_notes()))):
            said.write(words)
            say(words)


def _folder() -> Path:
    """Of this rank, in this start of the job; those of the host's other ranks lie beside it."""
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent


def _notes() -> Iterator[dict]:
    for file in _folder().parent.glob(f"*/{NAME}"):
        with suppress(ValueError):  # it has begun nothing, or its line is in a file of a very long name
            yield json.loads(file.read_bytes().rstrip(b"\0"))


def disagreement(begun: Mapping[Channel, Begun], me: int, notes: list[dict]) -> str:
    """The first collective to which ranks brought what does not fit, in words; "" where none is known. The
    fewer come first. notes: of all ranks' boxes.
    """
    for note in sorted(notes, key=lambda note: note["nth"]):
        channel = Channel(*note["channel"])._replace(members=tuple(note["channel"][2]))
        mine = begun[channel].brought(note["nth"]) if channel in begun else None
        if channel.kind != "collective" or mine is None or mine == note["brought"]:
            continue
        sides: dict[str, dict[int, Line | None]] = {mine: {me: None}}
        for other in notes:
            if (other["channel"], other["nth"]) == (note["channel"], note["nth"]):
                line = Line(*other["line"]) if other["line"] else None
                sides.setdefault(other["brought"], {})[other["rank"]] = line
        return _in_words(note["nth"], sides)
    return ""


def _in_words(nth: int, sides: dict[str, dict[int, Line | None]]) -> str:
    few, *rest = sorted(sides.values(), key=lambda side: (len(side), min(side)))
    others = {rank: line for side in rest for rank, line in side.items()}
    head = f"{ranks(sorted({*few, *others}))} do not agree on a collective:"
    begun_at, elsewhere = {*few.values()}, {*others.values()}
    if len(few) < len(others) and None not in begun_at | elsewhere and not begun_at & elsewhere:
        head = (
            f"{ranks(sorted(few))} did not come to the collective that {ranks(sorted(others))} began, but to"
            " another:"
        )
    places = [
        f"    {ranks(sorted(rank for rank, at in side.items() if at == line))}: {show(line)}"
        for side in (few, *rest)
        for line in dict.fromkeys(side.values())
        if line
    ]
    brought = "; ".join(f"{ranks(sorted(side))} brought {what}" for what, side in sides.items())
    return "\n".join(
        [
            f"\nin this job {head}",
            *places,
            f"To collective number {nth} of their group {brought}. All ranks of a group must call the same"
            " collectives in the same order, with tensors alike.",
        ]
    )
