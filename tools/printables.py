"""Pages to print, as HTML: flashcards, the cheat sheet with its page for the wall, worksheets."""

from __future__ import annotations

import ast
import csv
import re
import sys
from html import escape
from pathlib import Path

import nbformat
from jinja2 import Environment, FileSystemLoader

from helpers.practice import BUILD, Card, load, notebooks
from three_axes.files import find

from . import wall
from .pages import exercises, questions, stub, task, unlinked
from .site import lines

# The CSS of each kind of page.
ONE_TO_A_PAGE = """@page { size: A4 landscape; margin: 12mm }
.card { height: 180mm; border: 0; break-after: page; font-size: 28pt }"""
WORKSHEET = """@page { size: A4; margin: 12mm } .sheet { break-after: page; font-size: 10pt }
.sheet pre { white-space: pre-wrap; font: inherit } .sheet h3, .sheet p { margin: .4em 0 }
.line { border-bottom: 1px dotted #777; height: 5.5mm; margin: 0 !important }"""
ON_THE_WALL = """@page { size: A4 landscape; margin: 8mm }
table { font-size: 8.2pt; line-height: 1.2 } td, th { padding: .6mm 1mm !important }
.wall { break-after: page; font-size: 9pt } .wall h1, .wall p { margin: 1mm 0 } .wall img { height: 50mm }
.wall > table :is(td, th) { text-align: left !important; white-space: normal !important }
.pair { display: grid; grid-template-columns: 3fr 2fr; gap: 6mm; margin-top: 3mm }"""
EIGHT_TO_A_SHEET = """@page { size: A4; margin: 8mm }
main, .face { margin: 0; padding: 0; max-width: none } h1 { display: none }
.face { display: grid; grid-template-columns: 1fr 1fr; break-after: page }
.card { height: 69mm; box-sizing: border-box; margin: 0 }"""
SHEET = 8  # cards on a sheet


def rendered(name: str, **values: object) -> str:
    """A template of data/site, filled in with these values."""
    templates = Environment(loader=FileSystemLoader(find("data/site")), autoescape=True)
    return templates.get_template(f"{name}.html.j2").render(**values)


# -- cards -------------------------------------------------------------------------------------


def write_cards(folder: Path) -> None:
    """Write three files. cards.html has a card on each page, and its answer on the next page. A page of
    cards-eight-to-a-sheet.html has eight questions, and the next page their answers: if a sheet is printed on
    both sides and turned over its long edge, each answer is behind its question. cards-anki.txt is for Anki.
    A browser makes a PDF of the first two.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cards = load()
    pages = "".join(_face(c, c.front) + _face(c, c.back) for c in cards)
    sheets = "".join(_sheet(cards[i : i + SHEET]) for i in range(0, len(cards), SHEET))
    for name, paper, body in (
        ("cards", ONE_TO_A_PAGE, pages),
        ("cards-eight-to-a-sheet", EIGHT_TO_A_SHEET, sheets),
    ):
        page = rendered("printed", title="cards", paper=paper, body=body)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    with open(folder / "cards-anki.txt", "w", newline="", encoding="utf-8") as f:
        f.write("#separator:tab\n#html:false\n#tags column:3\n")
        notes = ([c.front, c.back, f"drop{c.drop}"] for c in cards)
        csv.writer(f, delimiter="\t", lineterminator="\n").writerows(notes)
    print(
        f"{len(cards)} cards in {folder}: cards.html and cards-eight-to-a-sheet.html to print,"
        " cards-anki.txt (Anki: File, Import)"
    )


def _sheet(cards: list[Card]) -> str:
    """A page of questions and a page of answers, with left and right exchanged."""
    fronts, backs = ([_face(c, text(c)) for c in cards] for text in (lambda c: c.front, lambda c: c.back))
    backs += ['<div class="card"></div>'] * (len(cards) % 2)
    pairs = [backs[i + 1 - 2 * (i % 2)] for i in range(len(backs))]
    return "".join(f'<div class="face">{"".join(face)}</div>' for face in (fronts, pairs))


def _face(card: Card, text: str) -> str:
    """A card with its question or its answer."""
    return f'<div class="card"><small>drop {card.drop}</small><p><b>{escape(text)}</b></p></div>'


# -- cheat sheet -------------------------------------------------------------------------------


def rows() -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of all drops' cheat-sheet tables, with the drop's number before each row. If a drop has
    no such column, the cell is empty.
    """
    listed: list[dict[str, str]] = []
    for path in notebooks():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and "## Cheat sheet" in cell.source:
                table = re.findall(r"(?m)^\|(.*)\|\s*$", cell.source.split("## Cheat sheet")[1])
                head, _, *rest = [[_plain(part) for part in line.split("|")] for line in table]
                listed += [{"drop": path.name[:2]} | dict(zip(head, row)) for row in rest]
    columns = list(dict.fromkeys(name for row in listed for name in row))
    return columns, [[row.get(name, "") for name in columns] for row in listed]


def _plain(markdown: str) -> str:
    return re.sub(r"[*`]", "", markdown).strip()


def write_cheatsheet(folder: Path) -> None:
    """Write cheatsheet.html: the page for the wall, then the rows of each drop."""
    folder.mkdir(parents=True, exist_ok=True)
    html = rendered("printed", title="cheat sheet", paper=ON_THE_WALL, body=cheatsheet_body())
    (folder / "cheatsheet.html").write_text(html, encoding="utf-8")
    print(f"To print from a browser, the first page for the wall: {folder / 'cheatsheet.html'}")


def cheatsheet_body() -> str:
    """The page for the wall and the rows, as HTML."""
    columns, listed = rows()
    return rendered("cheatsheet", **wall.parts(), columns=columns, rows=listed)


# -- worksheets --------------------------------------------------------------------------------


def write_worksheets(folder: Path) -> None:
    """Write worksheets.html: for each drop its questions and room for answers, on a page of A4; where the
    exercise has a table (13), on two. An exercise is printed without its title, which may contain the
    answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages = "".join(map(_worksheet, notebooks()))
    html = rendered("printed", title="worksheets", paper=WORKSHEET, body=pages)
    (folder / "worksheets.html").write_text(html, encoding="utf-8")
    print(f"{len(notebooks())} worksheets to print: {folder / 'worksheets.html'}")


def _worksheet(path: Path) -> str:
    """A drop's predictions, exercises, questions and cheat-sheet columns, with lines for the answers."""
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    markdown = unlinked("\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))
    outputs = (o.get("data", {}).get("text/plain", "") for c in cells for o in c.get("outputs", ()))
    predicted = [text.replace("○", "☐") for text in outputs if "\n  ○ " in text]
    practice = re.findall(r"(?m)^## Practice: .* · (.*)\n\n((?:(?!#).*\n?)*)", markdown)
    stubs = [stub(c.source) for c in cells if ".check(" in c.source and "return ..." not in c.source]
    solutions = [exercise.solution for exercise in exercises(notebook)]
    columns = re.findall(r"(?m)^\|(.*)\|\s*$", markdown.split("## Cheat sheet")[1])[0].split("|")
    line = '<p class="line"></p>'
    parts = [f"<h2>{escape(markdown.splitlines()[0].lstrip('# '))}</h2>", "<p>Name:</p>"]
    parts += [f"<pre>{escape(text)}</pre><p>because</p>{line}" for text in predicted]
    for (time, text), begun, solution in zip(practice, stubs, solutions):
        table = [row for row in re.findall(r"(?m)^\|(.*)\|\s*$", text) if not row.startswith("-")]
        text = re.sub(r"(?m)^\|.*$", "", task(text))
        parts += [f"<h3>Practice: {escape(time)}</h3><p>{escape(_plain(text))}</p>"]
        parts += [f"<p>{escape(_plain(row).replace(' | ', ': ', 1))}</p>" for row in table]
        if table:  # it names lines of the cost model
            parts += [f"<p>Your lines: {escape(', '.join(lines.signatures()))}</p>"]
        parts += [f"<pre>{escape(begun)}</pre>" if begun else "", _room(solution) * line]
    parts += [f"<p>{escape(question)}</p>{line}" for question in questions(markdown)]
    parts += ["<p>What would you add to the cheat sheet?</p>"]
    parts += [f"<p>{escape(_plain(column))}: </p>" for column in columns]
    return f'<section class="sheet">{"".join(parts)}</section>'


MOST_ROOM = 10


def _room(solution: str) -> int:
    """Number of dotted lines for an answer: as many as the solution has lines of code, at least two, and at
    most as many as leave the sheet on one page.
    """
    (function,) = ast.parse(solution).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[ast.get_docstring(function) is not None :]
    return min(MOST_ROOM, max(2, sum(len(ast.unparse(statement).splitlines()) for statement in body)))


def main() -> None:
    """Write what the arguments name into build/: cards, cheatsheet, worksheets."""
    writers = {"cards": write_cards, "cheatsheet": write_cheatsheet, "worksheets": write_worksheets}
    if not sys.argv[1:] or set(sys.argv[1:]) - set(writers):
        sys.exit(f"python -m tools.printables takes one or more of {', '.join(writers)}")
    for name in sys.argv[1:]:
        writers[name](BUILD)


if __name__ == "__main__":
    main()
