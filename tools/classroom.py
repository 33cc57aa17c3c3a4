"""For teachers: `three-axes class collect FOLDER` makes one table of the students' progress files.

Each student hands in the progress.json of their folder. Put them into FOLDER as NAME.json or as
NAME/progress.json. What is printed first is what to discuss: the exercises that fewest have passed, and the
mistakes made there. Then comes who tried what. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

from helpers.practice.passed import Attempts, read
from helpers.practice.progress import exercises
from three_axes.foreign import plain
from three_axes.table import Table
from three_axes.terminal import Manual, fitted, put

Class = list[tuple[str, dict[str, Attempts]]]  # a student's name and attempts


def collect(folder: Path) -> tuple[Class, list[str]]:
    """(the students, in the order of their names; what could not be read). Raises ValueError for no file."""
    files = sorted(folder.rglob("*.json"))
    if not files:
        what_to_do = "put them there as NAME.json or NAME/progress.json"
        raise ValueError(f"there is no progress file in {folder}; {what_to_do}")
    students, unread = [], []
    for path in files:
        of_folder = path.name == "progress.json" and path.parent != folder
        who = path.parent if of_folder else path.with_suffix("")
        try:
            students.append((plain(who.relative_to(folder)), read(path).exercises))
        except (OSError, ValueError) as e:
            unread.append(plain(e, 2000))
    return students, unread


def _mistakes(counted: Counter) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counted.most_common())


def _drops() -> dict[str, str]:
    """Exercise -> its drop, in the order of the course."""
    return {name: drop for drop, names in exercises().items() for name in names}


def to_discuss(students: Class) -> Table:
    """The exercises that were tried: how many passed, tries, and mistakes with the number of students. First
    comes the one that most have not passed; among equals, the one of most tries.
    """
    drops, rows = _drops(), []
    for name in {name: None for name in [*drops, *(n for _, known in students for n in known)]}:
        tried = [known[name] for _, known in students if name in known]
        if tried:
            open_, tries = sum(not one.passed for one in tried), sum(one.tries for one in tried) / len(tried)
            mistakes = Counter(mistake for one in tried for mistake in one.mistakes)
            cells = [drops.get(name, "?"), name, f"{len(tried) - open_} of {len(tried)}", f"{tries:.1f}"]
            rows.append((-open_, -tries, [*cells, _mistakes(mistakes)]))
    columns = ["drop", "exercise", "passed", "tries each", "mistakes (students)"]
    title = f"To discuss: {len(students)} students"
    return Table(columns, [cells for *_, cells in sorted(rows)], title=title)


def by_student(students: Class) -> Table:
    """Who tried which exercise, how often, with which mistakes; a row for each."""
    drops = _drops()
    order = {name: i for i, name in enumerate(drops)}
    rows = [
        [who, drops.get(name, "?"), name, "yes" if one.passed else "no", str(one.tries)]
        + [_mistakes(Counter(one.mistakes))]
        for who, known in students
        for name, one in sorted(known.items(), key=lambda item: order.get(item[0], len(order)))
    ]
    return Table(["who", "drop", "exercise", "passed", "tries", "mistakes (times)"], rows)


def _cell(text: str) -> str:
    """For a spreadsheet, which would compute what looks like a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="three-axes class", description=__doc__, formatter_class=Manual)
    parser.add_argument("what", choices=["collect"])
    parser.add_argument("folder", type=Path, help="where the progress files are")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="keep the second table, for a spreadsheet")
    args = parser.parse_args(argv)
    students, unread = collect(args.folder)
    everything = by_student(students)
    with fitted(sys.stdout):
        text = "\n\n".join([repr(to_discuss(students)), repr(everything), *unread])
    status = put(text)
    if args.csv:
        try:
            with open(args.csv, "w", newline="", encoding="utf-8") as f:
                csv.writer(f).writerows([map(_cell, row) for row in (everything.columns, *everything.rows)])
        except OSError as e:
            raise ValueError(f"cannot write {args.csv}: {e.strerror}") from None
    return status or bool(unread)
