"""What is printed: flashcards, and the cheat sheet: one page for the wall, and the rows of all drops.

HTML to read, PDF to print.
"""

from __future__ import annotations

import argparse
import csv
import re
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path

import matplotlib as mpl
import nbformat
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from tqdm import tqdm

from helpers.practice.books import BUILD, notebooks
from helpers.practice.cards import Card, load
from three_axes.terminal import Manual

from . import wall

A6 = (5.83, 4.13)  # inches, lying
STYLE = """<meta charset="utf-8"><style>
body { font: 11pt/1.4 sans-serif; color: #222; background: #fff; margin: 0 }
table { border-collapse: collapse; width: 100% }
td, th { border: 1px solid #bbb; padding: 1mm 2mm; text-align: left; vertical-align: top }
.card { border: 1px solid #999; padding: 6mm; box-sizing: border-box; break-inside: avoid }
.card small { color: #555 }
h1 { font-size: 14pt }"""


# -- cards -------------------------------------------------------------------------------------


def write_cards(folder: Path) -> None:
    """cards.html and cards.pdf with a card to a page, answers behind; cards-eight-to-a-sheet.html;
    cards-anki.txt for Anki's import.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cards = load()
    one = (
        "@page { size: A6 landscape; margin: 6mm } .card { height: 90mm; border: 0; break-after: page;"
        " font-size: 15pt }"
    )
    eight = (
        "@page { size: A4; margin: 8mm } main { display: grid; grid-template-columns: 1fr 1fr } .card {"
        " height: 69mm }"
    )
    pages = "".join(_face(c, c.front) + _face(c, c.back) for c in cards)
    (folder / "cards.html").write_text(
        f"<!doctype html><title>Three Axes: cards</title>{STYLE}{one}</style>{pages}", encoding="utf-8"
    )
    sheets = "".join(_face(c, f"{c.front}|{c.back}") for c in cards)
    (folder / "cards-eight-to-a-sheet.html").write_text(
        f"<!doctype html><title>Three Axes: cards</title>{STYLE}{eight}</style><main>{sheets}</main>",
        encoding="utf-8",
    )
    with open(folder / "cards-anki.txt", "w", newline="", encoding="utf-8") as f:
        f.write("#separator:tab\n#html:false\n#tags column:3\n")
        csv.writer(f, delimiter="\t", lineterminator="\n").writerows(
            [c.front, c.back, f"drop{c.drop}"] for c in cards
        )
    with PdfPages(folder / "cards.pdf") as pdf:
        for card in tqdm(cards, disable=None, leave=False):  # on a terminal
            for text, weight in ((card.front, "bold"), (card.back, "normal")):
                figure = Figure(figsize=A6)
                figure.text(0.07, 0.9, f"drop {card.drop}", fontsize=8, color="#555555")
                figure.text(
                    0.07, 0.78, textwrap.fill(text, 46), fontsize=13, weight=weight, va="top", linespacing=1.4
                )
                pdf.savefig(figure)
    print(
        f"{len(cards)} cards in {folder}: cards.pdf, cards.html, cards-eight-to-a-sheet.html, cards-anki.txt"
        " (Anki: File, Import)"
    )


def _face(card: Card, text: str) -> str:
    question, _, answer = text.partition("|")
    behind = f"<p>{escape(answer)}</p>" if answer else ""
    return f'<div class="card"><small>drop {card.drop}</small><p><b>{escape(question)}</b></p>{behind}</div>'


# -- cheat sheet -------------------------------------------------------------------------------


def rows() -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of all drops' cheat-sheet tables, the drop's number before each row."""
    columns, listed = [], []
    for path in notebooks():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and "## Cheat sheet" in cell.source:
                table = [
                    [_plain(part) for part in line.strip().strip("|").split("|")]
                    for line in cell.source.split("## Cheat sheet")[1].splitlines()
                    if line.startswith("|")
                ]
                columns = ["drop", *table[0]]
                listed += [[path.name[:2], *row] for row in table[2:]]
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
    (folder / "cheatsheet.html").write_text(
        f'<!doctype html><html lang="en"><title>Three Axes: cheat sheet</title>{STYLE}</style>'
        f"{cheatsheet_body()}</html>",
        encoding="utf-8",
    )
    print(f"A page for the wall: {folder / 'cheatsheet.pdf'} and .svg; with the drops' rows: .html")


def cheatsheet_body() -> str:
    """What the HTML shows of the page and of the rows; cheatsheet.svg and cheatsheet.pdf lie beside it."""
    columns, listed = rows()
    cells = lambda kind, row: "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
    return (
        '<h1>Cheat sheet</h1><p>One page for the wall: <a href="cheatsheet.pdf">PDF, A4 to A3</a> or <a'
        ' href="cheatsheet.svg">SVG</a>.</p><div class="poster"><a href="cheatsheet.svg"><img'
        f' src="cheatsheet.svg" alt="{escape(wall.alt())}" style="width:100%"></a></div><h2>What each drop'
        f" adds</h2><table><tr>{cells('th', columns)}</tr>"
        + "".join(f"<tr>{cells('td', row)}</tr>" for row in listed)
        + "</table>"
    )


# -- the commands ------------------------------------------------------------------------------


def _main(name: str, write: Callable[[Path], None], argv: list[str] | None) -> int:
    """A command that takes nothing."""
    argparse.ArgumentParser(
        prog=f"three-axes {name}", description=write.__doc__, formatter_class=Manual
    ).parse_args(argv)
    write(BUILD)
    return 0


def main_cards(argv: list[str] | None = None) -> int:
    return _main("cards", write_cards, argv)


def main_cheatsheet(argv: list[str] | None = None) -> int:
    return _main("cheatsheet", write_cheatsheet, argv)
