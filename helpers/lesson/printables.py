"""What is printed: flashcards, and the cheat sheet of one page that the drops fill row by row.

HTML to read, PDF to print.
"""

from __future__ import annotations

import argparse
import csv
import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
import nbformat
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from tqdm import tqdm

from ..table import Table, human
from ..terminal import Manual
from ..theory import MODELS, Job, Layout, estimate
from ..theory.memory import states
from ..theory.traffic import sent
from .books import BUILD, notebooks
from .cards import Card, load

A4, A6 = (11.69, 8.27), (5.83, 4.13)  # inches, lying
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
    columns, found = [], []
    for path in notebooks():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and "## Cheat sheet" in cell.source:
                table = [
                    [_plain(part) for part in line.strip().strip("|").split("|")]
                    for line in cell.source.split("## Cheat sheet")[1].splitlines()
                    if line.startswith("|")
                ]
                columns = ["drop", *table[0]]
                found += [[path.name[:2], *row] for row in table[2:]]
    return columns, found


def _plain(markdown: str) -> str:
    return re.sub(r"[*`]", "", markdown).strip()


def figures() -> Table:
    """What the schemes cost one GPU: Llama-3-8B on 8 H100s, 32 sequences of 4096 tokens, by
    `helpers.theory`.
    """
    job = Job(MODELS["llama-3-8b"], global_batch=32, seq_len=4096)
    schemes = {
        "DP 8": Layout(dp=8),
        "ZeRO-1, DP 8": Layout(dp=8, zero=1),
        "FSDP (ZeRO-3), DP 8": Layout(dp=8, zero=3),
        "TP 8 with SP": Layout(tp=8),
        "PP 8, 1F1B": Layout(pp=8),
        "DP 2 · TP 2 · PP 2": Layout(dp=2, tp=2, pp=2),
    }
    table = []
    for name, l in schemes.items():
        part = job.model.params / (l.tp * l.pp)
        e = estimate(job, l)
        table.append(
            [
                name,
                human(sum(states(part, l.dp, l.zero).values())),
                human(e.memory_bytes),
                human(sum(sent(job, l).values())),
                f"{e.time['bubble'] / e.step_seconds:.0%}",
                f"{e.step_seconds:.2f} s",
            ]
        )
    return Table(
        ["Llama-3-8B on 8 H100s", "states", "memory, fullest", "sent in a step", "bubble", "step"],
        table,
        title=f"batch {job.global_batch} × {job.seq_len} tokens, microbatch 1, by helpers.theory",
    )


def write_cheatsheet(folder: Path) -> None:
    """cheatsheet.html and cheatsheet.pdf, one page each."""
    folder.mkdir(parents=True, exist_ok=True)
    columns, found = rows()
    numbers = figures()
    html = lambda c, r: (
        "<table><tr>"
        + "".join(f"<th>{escape(x)}</th>" for x in c)
        + "</tr>"
        + "".join("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>" for row in r)
        + "</table>"
    )
    page = (
        "@page { size: A4 landscape; margin: 7mm } table { font-size: 7.2pt; line-height: 1.2 } td, th {"
        " padding: 0.3mm 1.5mm }"
    )
    (folder / "cheatsheet.html").write_text(
        f"<!doctype html><title>Three Axes: cheat sheet</title>{STYLE}{page}</style><h1>Three"
        f" Axes</h1>{html(columns, found)}<h1>In figures:"
        f" {escape(numbers.title)}</h1>{html(numbers.columns, numbers.rows)}",
        encoding="utf-8",
    )
    figure = Figure(figsize=A4)
    y = _grid(figure, 0.965, "Three Axes", columns, found, (0.035, 0.15, 0.18, 0.21, 0.22, 0.17))
    y = _grid(
        figure,
        y - 0.02,
        f"In figures: {numbers.title}",
        numbers.columns,
        numbers.rows,
        (0.2, 0.12, 0.14, 0.14, 0.1, 0.1),
    )
    if y < 0:
        raise RuntimeError("the cheat sheet is longer than a page")
    with mpl.rc_context({"pdf.fonttype": 42}), PdfPages(folder / "cheatsheet.pdf") as pdf:
        pdf.savefig(figure)
    print(f"{len(found)} rows on one page: {folder / 'cheatsheet.pdf'} and cheatsheet.html")


def _grid(
    figure: Figure,
    y: float,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[float],
) -> float:
    """Draw a table from height y down, cells wrapped. Returns where it ends, in shares of the page."""
    line, size = 0.0135, 6.4
    figure.text(0.02, y, title, fontsize=10, weight="bold", va="top")
    y -= 0.026
    for i, row in enumerate([columns, *rows]):
        wrapped = [textwrap.wrap(cell, max(4, int(width * 225))) or [""] for cell, width in zip(row, widths)]
        x = 0.02
        for cell, width in zip(wrapped, widths):
            figure.text(
                x,
                y,
                "\n".join(cell),
                fontsize=size,
                weight="bold" if i == 0 else "normal",
                va="top",
                linespacing=1.1,
            )
            x += width
        y -= line * max(map(len, wrapped)) + 0.0035
        figure.add_artist(mpl.lines.Line2D([0.02, 0.98], [y + 0.002] * 2, color="#BBBBBB", linewidth=0.4))
    return y


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
