"""What is printed or projected: cards, the cheat sheet, worksheets and slides."""

import ast
import html
import inspect
import re

import nbformat
import pytest

from drops.lines import LINES
from helpers.practice import cards
from helpers.practice.books import drop_number, notebooks
from tools import pages, printables, slides

BOOKS = {drop_number(path): nbformat.read(path, as_version=4) for path in notebooks()}


def test_cards_are_printed_and_imported(tmp_path):
    printables.write_cards(tmp_path)
    deck = cards.load()
    lines = (tmp_path / "cards-anki.txt").read_text().splitlines()
    assert lines[:3] == ["#separator:tab", "#html:false", "#tags column:3"] and len(lines) == 3 + len(deck)
    assert all(line.count("\t") == 2 for line in lines[3:])
    assert (tmp_path / "cards.html").read_text().count('class="card"') == 2 * len(deck)
    sheets = (tmp_path / "cards-eight-to-a-sheet.html").read_text().split('<div class="face">')[1:]
    faces = [re.findall(r"<div class=\"card\">(?:.*?<b>(.*?)</b></p>)?</div>", sheet) for sheet in sheets]
    fronts = range(0, len(faces), 2)
    behind = [faces[k + 1][i + 1 - 2 * (i % 2)] for k in fronts for i in range(len(faces[k]))]
    assert [html.unescape(back) for back in behind] == [c.back for c in deck]
    assert [html.unescape(one) for face in faces[::2] for one in face] == [c.front for c in deck]


def test_every_drop_fills_the_cheat_sheet(tmp_path):
    _, rows = printables.rows()
    assert {row[0] for row in rows} == set(BOOKS)
    printables.write_cheatsheet(tmp_path)
    assert rows[0][1] in (tmp_path / "cheatsheet.html").read_text(encoding="utf-8")


def test_every_drop_has_a_worksheet(tmp_path):
    printables.write_worksheets(tmp_path)
    pages = (tmp_path / "worksheets.html").read_text().split('<section class="sheet">')[1:]
    assert len(pages) == len(BOOKS)
    for page, number in zip(pages, BOOKS):
        assert f"<h2>{number} · " in page and "<h3>Practice" in page
        assert "☐" in page and page.count("?</p>") >= 3 and "<details>" not in page
        (task,) = re.findall(r"<h3>Practice: \w+, \d+ minutes</h3>(<p>.*?</pre>)", page, re.S)
        assert len(task.split()) > 20 and "hint()" not in task and "<pre>def " in task, task


def test_the_sheet_of_13_has_what_its_exercise_needs():
    page = printables._worksheet(next(path for path in notebooks() if drop_number(path) == "13"))
    terms = ("work", "tp", "idle", "dp", "sends", "memory")
    assert all(f"<p>{term}: " in page for term in terms) and "<p>field: with T = b·s tokens" in page
    assert all(f"{name}{inspect.signature(line.ours)}" in page for name, line in LINES.items())


def test_a_worksheet_has_a_dotted_line_for_each_line_of_the_solution_that_fits():
    for path in notebooks():
        book = BOOKS[drop_number(path)]
        page = printables._worksheet(path)
        exercise, *_ = pages.exercises(book)
        # Without comments and the docstring; the first line is the function's head.
        lines = [line for line in ast.unparse(ast.parse(exercise.solution)).splitlines() if line.strip()]
        written = re.sub(r'(?s)^ +""".*?"""$', "", "\n".join(lines), count=1, flags=re.M).split("\n")[1:]
        under = re.search(r"(?s)<h3>Practice.*?</pre>((?:<p class=\"line\"></p>)*)", page)[1]
        assert under.count("<p ") == min(printables.MOST_ROOM, max(2, sum(map(bool, written)))), path.name


def test_all_that_is_printed_is_a4(tmp_path):
    printables.write_cards(tmp_path)
    printables.write_worksheets(tmp_path)
    printables.write_cheatsheet(tmp_path)
    for page in tmp_path.glob("*.html"):
        # Browsers know A4, and no A6: a size that they do not know is the printer's.
        assert re.findall(r"@page { size: (\w+)", page.read_text(encoding="utf-8")) == ["A4"], page.name


@pytest.mark.parametrize("number", BOOKS)
def test_practice_and_questions_have_a_slide_without_answers(number):
    made = slides.slides_of(BOOKS[number])
    (practice,) = [cells for cells in made if cells[0].source.startswith("## Practice: ")]
    begun = [cell.source for cell in practice if cell.cell_type == "code"]
    begun = begun or [cell.source for cell in made[made.index(practice) + 1]]
    assert begun[0].startswith("def ") and not any(
        "check(" in source or "hint(" in source for source in begun
    )
    ((asked,),) = [cells for cells in made if cells[0].source.startswith("## Check yourself")]
    assert asked.source.count("\n\n") >= 3 and "<details>" not in asked.source
    text = "\n".join(cell.source for cell in BOOKS[number].cells if cell.cell_type == "markdown")
    for answer in re.findall(r"</summary>(.*?)</details>", text.split("## Check yourself")[1], re.S):
        assert answer.strip() not in asked.source


@pytest.mark.parametrize("number", BOOKS)
def test_a_slide_that_asks_for_a_prediction_ends_there(number):
    """So a class sees no answer before it has voted."""
    for cells in slides.slides_of(BOOKS[number]):
        asking = [i for i, cell in enumerate(cells) if re.search(r"\w = predict\(", cell.source)]
        assert asking in ([], [len(cells) - 1])
        assert not any(".reveal(" in cells[i].source for i in asking)


@pytest.mark.slow
def test_every_drop_becomes_slides(tmp_path):
    slides.write("", tmp_path)
    for number, book in BOOKS.items():
        page = (tmp_path / f"{number}.html").read_text()
        fetched = re.sub(r"data:image[^\"]+|http://www\.w3\.org\S*|https://github\.com\S*", "", page)
        assert page.count("<section ") >= 6 and "http" not in fetched
        assert ".check(" not in page and ".hint(" not in page
        words = re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", page))
        if "data-explorer" not in page:
            assert not re.search(r"[Pp]ress play|\b[Mm]ove m\b|slider|click", words)
        if "explore.orders(" in page or number == "07":  # its picture has the peaks
            assert page.index("Peaks") > page.index("Computed: the memory")
    with pytest.raises(ValueError, match="there is no drop '15'"):
        slides.write("15", tmp_path)
