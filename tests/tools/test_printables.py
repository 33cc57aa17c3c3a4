"""What is printed or projected: cards, the cheat sheet, worksheets and slides."""

import html
import re

import nbformat
import pytest

from helpers.practice import cards
from helpers.practice.books import drop_number, notebooks
from tools import printables, slides

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


@pytest.mark.slow
def test_every_drop_becomes_slides(tmp_path):
    slides.write("", tmp_path)
    for number, book in BOOKS.items():
        page = (tmp_path / f"{number}.html").read_text()
        fetched = re.sub(r"data:image[^\"]+|http://www\.w3\.org\S*|https://github\.com\S*", "", page)
        assert page.count("<section ") >= 6 and "http" not in fetched
        assert ".check(" not in page and "Check yourself" not in page
        words = re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", page))
        if "data-explorer" not in page:
            assert not re.search(r"[Pp]ress play|\b[Mm]ove m\b|slider|click", words)
        if "explore.orders(" in page or number == "07":  # its picture has the peaks
            assert page.index("Peaks") > page.index("Computed: the memory")
    with pytest.raises(ValueError, match="there is no drop '15'"):
        slides.write("15", tmp_path)
