"""What is printed, as HTML and PDF: flashcards, the cheat sheet for the wall, and the rows of all drops."""

from __future__ import annotations

import argparse
import csv
import re
import textwrap
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

import matplotlib as mpl
import nbformat
from jinja2 import Environment, FileSystemLoader
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from tqdm import tqdm

from helpers.practice.books import BUILD, notebooks
from helpers.practice.cards import Card, load
from three_axes.files import find
from three_axes.terminal import Manual

from . import wall

A6 = (5.83, 4.13)  # inches, lying
ONE_TO_A_PAGE = """@page { size: A6 landscape; margin: 6mm }
.card { height: 90mm; border: 0; break-after: page; font-size: 15pt }"""
EIGHT_TO_A_SHEET = """@page { size: A4; margin: 8mm }
main { display: grid; grid-template-columns: 1fr 1fr }
.card { height: 69mm }"""


def rendered(name: str, **values: object) -> str:
    """A page of data/site, filled in."""
    there = Environment(loader=FileSystemLoader(find("data/site")), autoescape=True)
    return there.get_template(f"{name}.html.j2").render(**values)


# -- cards -------------------------------------------------------------------------------------


def write_cards(folder: Path) -> None:
    """cards.html and cards.pdf with a card to a page, answers behind; cards-eight-to-a-sheet.html;
    cards-anki.txt for Anki's import.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cards = load()
    pages = "".join(_face(c, c.front) + _face(c, c.back) for c in cards)
    sheets = "".join(_face(c, c.front, c.back) for c in cards)
    for name, paper, body in (
        ("cards", ONE_TO_A_PAGE, pages),
        ("cards-eight-to-a-sheet", EIGHT_TO_A_SHEET, f"<main>{sheets}</main>"),
    ):
        page = rendered("printed", title="cards", paper=paper, body=body)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    with open(folder / "cards-anki.txt", "w", newline="", encoding="utf-8") as f:
        f.write("#separator:tab\n#html:false\n#tags column:3\n")
        told = ([c.front, c.back, f"drop{c.drop}"] for c in cards)
        csv.writer(f, delimiter="\t", lineterminator="\n").writerows(told)
    with PdfPages(folder / "cards.pdf") as pdf:
        for card in tqdm(cards, disable=None, leave=False):  # on a terminal
            for text, weight in ((card.front, "bold"), (card.back, "normal")):
                figure = Figure(figsize=A6)
                figure.text(0.07, 0.9, f"drop {card.drop}", fontsize=8, color="#555555")
                look = dict(fontsize=13, weight=weight, va="top", linespacing=1.4)
                figure.text(0.07, 0.78, textwrap.fill(text, 46), **look)
                pdf.savefig(figure)
    print(
        f"{len(cards)} cards in {folder}: cards.pdf, cards.html, cards-eight-to-a-sheet.html, cards-anki.txt"
        " (Anki: File, Import)"
    )


def _face(card: Card, text: str, behind: str = "") -> str:
    """A card with its question or its answer, or with both."""
    below = f"<p>{escape(behind)}</p>" if behind else ""
    return f'<div class="card"><small>drop {card.drop}</small><p><b>{escape(text)}</b></p>{below}</div>'


# -- cheat sheet -------------------------------------------------------------------------------


def rows() -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of all drops' cheat-sheet tables, the drop's number before each row."""
    columns, listed = [], []
    for path in notebooks():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and "## Cheat sheet" in cell.source:
                lines = re.findall(r"(?m)^\|(.*)\|\s*$", cell.source.split("## Cheat sheet")[1])
                head, _, *rest = [[_plain(part) for part in line.split("|")] for line in lines]
                columns = ["drop", *head]
                listed += [[path.name[:2], *row] for row in rest]
    return columns, listed


def _plain(markdown: str) -> str:
    return re.sub(r"[*`]", "", markdown).strip()


def write_cheatsheet(folder: Path) -> None:
    """cheatsheet.pdf and cheatsheet.svg: the page for the wall. cheatsheet.html: the page, and the rows that
    each drop has added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = wall.page()
    with mpl.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "three axes"}):
        page.savefig(folder / "cheatsheet.pdf", metadata={"Title": "Three Axes", "CreationDate": None})
        page.savefig(folder / "cheatsheet.svg", metadata={"Title": "Three Axes", "Date": None})
    html = rendered("printed", title="cheat sheet", body=cheatsheet_body())
    (folder / "cheatsheet.html").write_text(html, encoding="utf-8")
    print(f"A page for the wall: {folder / 'cheatsheet.pdf'} and .svg; with the drops' rows: .html")


def cheatsheet_body() -> str:
    """What the HTML shows of the page and of the rows; cheatsheet.svg and cheatsheet.pdf lie beside it."""
    columns, listed = rows()
    return rendered("cheatsheet", alt=wall.alt(), columns=columns, rows=listed)


# -- the commands ------------------------------------------------------------------------------


def _main(name: str, write: Callable[[Path], None], argv: list[str]) -> int:
    """A command that takes nothing."""
    takes = argparse.ArgumentParser(f"three-axes {name}", description=write.__doc__, formatter_class=Manual)
    takes.parse_args(argv)
    write(BUILD)
    return 0


main_cards = partial(_main, "cards", write_cards)
main_cheatsheet = partial(_main, "cheatsheet", write_cheatsheet)
