"""What a reader sees under an open question, and who reads it: beside.csv has a row for each question.

cells: so many cells under the question's own cell are on a screen of 1366 by 768, with the question at its
top, as test_browser_stored.py counts them. read: a digest of their sources, when somebody last read them and
found nothing that answers the question. After a change of a source, `python tests/beside.py` prints the
questions with a new text beside them; read these, and then run `python tests/beside.py --read`.
"""

import csv
import hashlib
import re
import sys
from pathlib import Path

import nbformat

FOLDER, KEPT = Path(__file__).resolve().parents[1] / "notebooks", Path(__file__).with_suffix(".csv")
# A prediction, a number or layout for the first cell, a line of the cost model, an exercise.
ASKED = re.compile(r"\b(predict)\(|\b(first_line)\(|\b(\w+)\.check\(")


def questions(notebook: nbformat.NotebookNode) -> dict[str, int]:
    """The name of each open question of a notebook, and the index of its cell."""
    cells = [(i, cell.source) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    return {asked[asked.lastindex]: i for i, source in cells for asked in ASKED.finditer(source)}


def digest(notebook: nbformat.NotebookNode, question: int, cells: int) -> str:
    """A digest of the sources of so many cells under a question's cell, and of its own."""
    sources = [cell.source for cell in notebook.cells[question : question + cells + 1]]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:8]


def kept() -> dict[tuple[str, str], tuple[int, str]]:
    """The rows of beside.csv: (notebook, question) -> (cells, read)."""
    with KEPT.open(encoding="utf-8", newline="") as file:
        return {(number, name): (int(cells), read) for number, name, cells, read in [*csv.reader(file)][1:]}


def main(keep: bool) -> None:
    """Print each question beside which a text is new, and the text. keep: write the new digests."""
    books = {path.name[:2]: nbformat.read(path, as_version=4) for path in FOLDER.rglob("??_*.ipynb")}
    table = kept()
    for (number, name), (cells, read) in table.items():
        at = questions(books[number])[name]
        table[number, name] = cells, digest(books[number], at, cells)
        if table[number, name] != (cells, read):
            under = (cell.source for cell in books[number].cells[at : at + cells + 1])
            print(f"\n======== {number}, {name}:", *under, sep="\n--------\n")
    if keep:
        lines = [f"{number},{name},{cells},{read}\n" for (number, name), (cells, read) in table.items()]
        KEPT.write_text("notebook,question,cells,read\n" + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main("--read" in sys.argv)
