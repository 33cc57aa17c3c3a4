"""Fifty questions on layouts, data/questions.csv, each with the command that answers it.

    python -m tools.questions   answers all of them anew, and says which answers are others now

They measure an assistant: a number is right within 1 %. A question without a key is impossible: its answer
is what the command says, and a right assistant refuses for that reason. `AGENTS.md` says how to work.
"""

from __future__ import annotations

import csv
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO

from three_axes.__main__ import main
from three_axes.files import find

FILE = find("data/questions.csv")
UNITS = {"GB": 1e9, "TB": 1e12, "billions": 1e9, "thousands": 1e3, "%": 0.01, "s": 1.0}


def rows() -> list[dict[str, str]]:
    with open(FILE, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def _run(command: str) -> tuple[str, str]:
    """(what it prints, what it says on stderr)."""
    printed, said = StringIO(), StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        main([*shlex.split(command), "--json"])
    return printed.getvalue(), said.getvalue().strip()


def answer(command: str, key: str, unit: str) -> str:
    """What a command of `three-axes` prints under a key of its JSON, `best.layout.tp`, in a unit; what it
    says where it refuses, for no key. Raises ValueError where it does the other of the two.
    """
    printed, said = _run(command)
    if bool(printed) != bool(key):
        raise ValueError(f"three-axes {command}: {said or 'no refusal'}")
    if not key:
        return said
    found = json.loads(printed)
    for part in key.split("."):
        found = found[int(part) if isinstance(found, list) else part]
    if isinstance(found, bool):
        return "yes" if found else "no"
    return (
        f"{found / UNITS[unit]:.3g}" if unit else f"{found:.3g}" if isinstance(found, float) else str(found)
    )


def write() -> None:
    answered = rows()
    for row in answered:
        before, row["answer"] = row["answer"], answer(row["command"], row["key"], row["unit"])
        if row["answer"] != before:
            print(f"{row['question']}\n    {before or 'no answer'} -> {row['answer']} {row['unit']}")
    with open(FILE, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(answered[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(answered)


if __name__ == "__main__":
    write()
