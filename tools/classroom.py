"""For teachers: ten questions before the course and ten after it, and tables of the students' progress files.

Each student runs `three-axes class quiz before` in the folder of the notebooks, and `quiz after` at the end,
and hands in the progress.json of that folder. Put these files into FOLDER as NAME.json or as
NAME/progress.json. `three-axes class collect FOLDER` prints the exercises that the fewest students have
passed, the mistakes in them with the course's advice, the results of the quiz, and a line for each student.
Nothing is sent anywhere.
"""

from __future__ import annotations

import csv
import re
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

from helpers.practice import NAMES, STORIES, Done, Quiz, advice_to, exercises, read_progress
from three_axes.foreign import plain
from three_axes.table import Table
from three_axes.terminal import fitted, put

Class = list[tuple[str, Done]]  # (a student's name, the exercises and quizzes that the student has done)


def collect(folder: Path) -> tuple[Class, list[tuple[str, str]]]:
    """(the students, sorted by name; (a student's name, a message) for each file that cannot be read). Raises
    ValueError if there is no file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {plain(folder)}")
    files = sorted(folder.rglob("*.json"))
    if not files:
        what_to_do = "put them there as NAME.json or NAME/progress.json"
        raise ValueError(f"there is no progress file in {folder}; {what_to_do}")
    students, unread = [], []
    for path in files:
        in_a_folder = path.name == "progress.json" and path.parent != folder
        who = plain((path.parent if in_a_folder else path.with_suffix("")).relative_to(folder))
        try:
            students.append((who, read_progress(path)))
        except (OSError, ValueError) as e:
            unread.append((who, plain(e, 2000)))
    return students, unread


def _mistakes(counted: Counter) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counted.most_common())


def _drops() -> dict[str, str]:
    """Exercise -> its drop, in the order of the course."""
    return {name: drop for drop, names in exercises().items() for name in names}


def to_discuss(students: Class) -> Table:
    """A row for each exercise that was tried: how many students passed, their mean tries, and mistakes with
    the number of students. The exercise that the fewest passed is first; among equals, the one with more
    tries.
    """
    drops, rows = _drops(), []
    for name in {name: None for name in [*drops, *(n for _, done in students for n in done.exercises)]}:
        tried = [done.exercises[name] for _, done in students if name in done.exercises]
        if tried:
            passed, tries = sum(each.passed for each in tried), sum(each.tries for each in tried) / len(tried)
            mistakes = Counter(mistake for each in tried for mistake in each.mistakes)
            cells = [drops.get(name, "?"), name, f"{passed} of {len(students)}", f"{tries:.1f}"]
            rows.append((passed, -tries, [*cells, _mistakes(mistakes)]))
    columns = ["drop", "exercise", "passed", "tries each", "mistakes (students)"]
    title = f"To discuss: {len(students)} students"
    return Table(columns, [cells for *_, cells in sorted(rows)], title=title)


def advice(students: Class) -> Table:
    """The course's advice on each mistake, beginning with the one that most students made."""
    drops, counted = _drops(), Counter()
    for _, done in students:
        counted.update((name, mistake) for name, each in done.exercises.items() for mistake in each.mistakes)
    rows = []
    for (name, mistake), n in counted.most_common():
        if name in drops and (words := advice_to(drops[name], name, mistake)):
            rows.append([drops[name], mistake, str(n), words])
    return Table(["drop", "mistake", "students", "advice"], rows, title="What to say to it")


def gain(students: Class) -> Table:
    """How many students answered each question of the quiz correctly, before the course and after it. Only
    students with both quizzes count; without any, the table has no rows.
    """
    whole = lambda done: all(len(done.quiz.get(story, ())) == len(NAMES) for story in STORIES)
    both = [done.quiz for _, done in students if whole(done)]
    rows = []
    for i, name in enumerate(NAMES if both else ()):
        before, after = (sum(quiz[story][i] for quiz in both) for story in STORIES)
        points = f"{100 * (after - before) / len(both):+.0f} points"
        rows.append([name, f"{before} of {len(both)}", f"{after} of {len(both)}", points])
    title = f"The quiz: students with before and after {len(both)}"
    return Table(["question", *STORIES, "gain"], rows, title=title)


def by_student(students: Class) -> Table:
    """A row for each student: exercises passed and tried, all tries, the drop left last, right answers."""
    rows = []
    for who, done in students:
        numbers = len(done.passed), len(done.exercises), sum(each.tries for each in done.exercises.values())
        marks = [f"{sum(done.quiz[story])}" if story in done.quiz else "" for story in STORIES]
        rows.append([who, *map(str, numbers), done.left[-1] if done.left else "", *marks])
    return Table(["who", "passed", "tried", "tries", "drop left last", "quiz before", "after"], rows)


def everything(students: Class) -> list[list[str]]:
    """For a spreadsheet: a header, and a row for each student and exercise that was tried."""
    drops = _drops()
    order = {name: i for i, name in enumerate(drops)}
    rows = [
        [who, drops.get(name, "?"), name, "yes" if each.passed else "no", str(each.tries)]
        + [_mistakes(Counter(each.mistakes))]
        for who, done in students
        for name, each in sorted(done.exercises.items(), key=lambda item: order.get(item[0], len(order)))
    ]
    return [["who", "drop", "exercise", "passed", "tries", "mistakes (times)"], *rows]


def ask(story: str) -> None:
    """Ask the questions of a quiz on a terminal, and store the answers. Raises EOFError if the input ends."""
    quiz = Quiz(story)
    for number, asked in enumerate(quiz.questions, 1):
        letters = dict(zip("abcd", asked.options))
        print(f"\n{number}. {asked.text}", *(f"   {k}  {option}" for k, option in letters.items()), sep="\n")
        while (reply := input(f"   {', '.join(letters)}: ").strip().lower()) not in letters:
            pass
        print(quiz.answer(number, letters[reply]))


def _cell(text: str) -> str:
    """Make a cell safe for a spreadsheet, which would compute a text that looks like a formula, even after a
    semicolon, because some spreadsheets begin a cell there.
    """
    return re.sub(r"(^|;)(?=\s*[=+\-@＝＋－＠])", r"\1'", text)


def run(args: Namespace) -> int:
    """Ask a quiz, or print the tables. Returns the exit status: 1 if a file cannot be read."""
    if args.what == "quiz":
        try:
            ask(args.story)
        except EOFError:
            raise ValueError("the quiz was left: nothing of it is kept") from None
        return 0
    students, unread = collect(args.folder)
    some = [table for table in (advice(students), gain(students)) if table.rows]
    tables = [to_discuss(students), *some, by_student(students)]
    with fitted(sys.stdout):
        status = put("\n\n".join([*map(repr, tables), *(said for _, said in unread)]))
    if args.csv:
        try:
            with open(args.csv, "w", newline="", encoding="utf-8") as f:
                csv.writer(f).writerows(map(_cell, row) for row in everything(students))
        except OSError as e:
            raise ValueError(f"cannot write {args.csv}: {e.strerror}") from None
    return status or bool(unread)
