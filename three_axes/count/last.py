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
    with suppress(OSError):
        return os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600) if (folder := _folder()) else None
    return None


def forget() -> None:
    """Remove this rank's box: all went well."""
    with suppress(OSError):
        if folder := _folder():
            os.remove(folder / NAME)


def tell(begun: Mapping[Channel, Begun], me: int, say: Callable[[str], None]) -> None:
    """Say where ranks of this host began what does not meet, unless another rank has said so. The others wait
    here until it is said, so that it stands above their tracebacks. begun: what this rank, `me`, has begun.
    """
    if not (folder := _folder()):
        return
    with suppress(OSError), open(folder.parent / NAME, "a+") as said:
        fcntl.flock(said, fcntl.LOCK_EX)
        said.seek(0)
        if not said.read() and (words := disagreement(begun, me, list(_notes(folder.parent)))):
            said.write(words)
            say(words)


def _folder() -> Path | None:
    """The folder of this rank in this start of the job, where torchrun made one. Those of the host's other
    ranks lie beside it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def _notes(folders: Path) -> Iterator[dict]:
    for file in folders.glob(f"*/{NAME}"):
        with suppress(ValueError):  # it has begun nothing, or what it has begun did not fit into the box
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
    """sides: what was brought -> the ranks that brought it, each with its line, None where it is unknown."""
    by_size = sorted(sides.values(), key=lambda side: (len(side), min(side)))
    head = f"{ranks([rank for side in by_size for rank in side])} do not agree on a collective:"
    few, many = by_size[0], by_size[-1]
    here, there = {*few.values()}, {*many.values()}
    is_known = len(by_size) == 2 and len(few) < len(many) and None not in here | there
    if is_known and not here & there:
        others = ranks(list(many))
        head = f"{ranks(list(few))} did not come to the collective that {others} began, but to another:"
    places = [
        f"    {ranks([rank for rank, at in side.items() if at == line])}: {show(line)}"
        for side in by_size
        for line in dict.fromkeys(side.values())
        if line
    ]
    brought = "; ".join(f"{ranks(list(side))} brought {what}" for what, side in sides.items())
    return "\n".join(
        [
            f"\nin this job {head}",
            *places,
            f"To collective number {nth} of their group {brought}. All ranks of a group must call the same"
            " collectives in the same order, with tensors alike.",
        ]
    )
