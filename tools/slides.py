"""Makes slides of a drop, for a teacher: a page of HTML that needs no network. Arrow keys, space and a
clicker turn the slides. Each slide has a number, and an address: 07.html#5.

A slide begins at each heading, and after each output. The exercise has a slide with its task, and the
questions have one, both without answers. Hints, checks, the setup and the sections for another day are left
out. Pictures are the stored ones; but an explorer for which the site has frames can be moved and played on
its slide. An explorer that answers a prediction is placed after the answer.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from tqdm import tqdm

from helpers.practice import BUILD, answering, notebooks
from three_axes.files import find

from .pages import PLACE, explorer_of, lesson, not_started, questions, stub, task, unlinked
from .printables import rendered
from .site import frames

SHORT = 200  # characters; a shorter text gets no slide of its own
LINES = 24  # so many lines fit on a slide in readable letters


def slides_of(notebook: nbformat.NotebookNode) -> list[list[nbformat.NotebookNode]]:
    """The cells of each slide."""
    slides: list[list[nbformat.NotebookNode]] = [[]]
    for cell in _in_order(notebook):
        if cell.cell_type == "markdown":
            for part in _parts(cell.source):
                if part.startswith("#") and slides[-1] and not _short(slides[-1]):
                    slides.append([])
                slides[-1].append(nbformat.v4.new_markdown_cell(part))
        elif ".check(" in cell.source:
            if begun := stub(cell.source):
                cell = nbformat.v4.new_code_cell(begun)
                if _lines(slides[-1]) + _lines([cell]) > LINES:
                    slides.append([])
                slides[-1].append(cell)
        elif not _left_out(cell):
            if any("image/png" in o.get("data", {}) for o in cell.outputs):
                if sum(len(c.source) for c in slides[-1]) > SHORT:
                    slides.append([])  # a picture gets a slide of its own, with its heading
                alone = {"transient": {"remove_source": True}}
                outputs = _explorer(cell) if explorer_of(cell.source) else cell.outputs
                cell = nbformat.v4.new_code_cell("", outputs=outputs, metadata=alone)
            elif _lines(slides[-1]) + _lines([cell]) > LINES:
                slides.append([])
            slides[-1].append(cell)
            if cell.outputs:  # the cells that follow are about this output
                slides.append([])
    joined: list[list[nbformat.NotebookNode]] = [[]]
    for cells in filter(None, slides):
        ends = _short(cells) and not cells[0].source.startswith("#") and len(joined[-1]) < 3
        if not ends and not _short(joined[-1]):
            joined.append([])
        joined[-1] += cells
    return joined


def _in_order(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The lesson's cells. An explorer that answers a question, and the text above it, is put after
    the answer.
    """
    answers = answering(notebook)
    cells: list[nbformat.NotebookNode] = []
    waiting: list[nbformat.NotebookNode] = []
    for cell in lesson(notebook):
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not not_started(output)]
        if cell.get("id") in answers and re.search(r"^explore\.", cell.source, re.M):
            while cells and cells[-1].cell_type == "markdown" and not cells[-1].source.startswith("#"):
                waiting.insert(0, cells.pop())
            waiting.append(cell)
            continue
        cells.append(cell)
        if ".reveal(" in cell.source:
            cells += waiting
            waiting = []
    return cells + waiting


def _explorers(notebook: nbformat.NotebookNode) -> list[str]:
    """Names of the explorers of the lesson that work on a slide."""
    return [found[0] for cell in lesson(notebook) if (found := explorer_of(cell.source))]


def _explorer(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The output of an explorer's cell: a place for site.js to draw in, with the stored picture."""
    name, values = explorer_of(cell.source)
    stored = next(output for output in cell.outputs if "image/png" in output.get("data", {}))
    alt = escape(stored.metadata.get("image/png", {}).get("alt", name))
    picture = f'<img src="data:image/png;base64,{stored.data["image/png"].strip()}" alt="{alt}">'
    place = f'<div class="explorer" data-explorer="{name}" data-values="{escape(json.dumps(values))}">'
    return [nbformat.v4.new_output("display_data", {"text/html": f"{place}{picture}</div>"})]


def _scripts(names: list[str]) -> str:
    """The scripts that a deck with these explorers needs; '' if it has none."""
    draws = find("data/site/site.js").read_text(encoding="utf-8")
    return "".join([*map(frames.script, names), draws]) if names else ""


def _parts(markdown: str) -> list[str]:
    """A cell's text, cut at its headings. An exercise's title, which may contain the answer, its hints, and
    folded answers are left out.
    """
    parts = re.split(r"(?m)^(?=#{1,2} )", unlinked(PLACE.sub("", markdown)))
    return [text for part in parts if (text := _on_slide(part)).strip()]


def _on_slide(part: str) -> str:
    if part.startswith("## Check yourself"):
        return "\n\n".join(["## Check yourself", *questions(part)])
    if title := re.match(r"## Practice: .* · (.*)\n", part):
        return f"## Practice: {title[1]}\n{task(part[title.end() :])}"
    return re.sub(r"<details>.*?</details>", "", part, flags=re.S)


def _left_out(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell needs a kernel or asks the cards."""
    machinery = {"setup", "closing"} & set(cell.metadata.get("tags", []))
    return bool(machinery) or cell.source.startswith("cards.")


def _lines(cells: list[nbformat.NotebookNode]) -> float:
    """About how many lines of a slide these cells fill."""
    lines = 0.0
    for cell in cells:
        if cell.cell_type == "markdown":
            lines += sum(1 + len(line) / 75 for line in cell.source.splitlines() if line)
            continue
        outputs = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
        lines += sum(len(text.splitlines()) for text in (cell.source, *outputs))
    return lines


def _short(cells: list[nbformat.NotebookNode]) -> bool:
    """Whether the cells are only a heading or a sentence, or end in a colon and so belong to the
    next cell. Questions are not: the next cell may have the answers.
    """
    if (cells and cells[0].source.startswith("## Check yourself")) or any(
        cell.cell_type == "code" for cell in cells
    ):
        return False
    return sum(len(c.source) for c in cells) < SHORT or cells[-1].source.rstrip().endswith(":")


def deck(path: Path) -> str:
    """A notebook as a page of slides."""
    notebook = nbformat.read(path, as_version=4)
    plain = dict(exclude_input_prompt=True, exclude_output_prompt=True, exclude_anchor_links=True)
    exporter = HTMLExporter(template_name="basic", **plain)
    slides = [nbformat.v4.new_notebook(cells=c, metadata=notebook.metadata) for c in slides_of(notebook)]
    bodies = [exporter.from_notebook_node(slide)[0] for slide in slides]
    title = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    return rendered("deck", title=title, slides=bodies, scripts=_scripts(_explorers(notebook)))


def write(which: str, folder: Path) -> None:
    """Write the deck of drop `which`, '' for all. Raises ValueError for a drop that does not exist."""
    chosen = [p for p in notebooks() if not which or p.name[:2] == which.zfill(2)]
    if not chosen:
        known = ", ".join(path.name[:2] for path in notebooks())
        raise ValueError(f"there is no drop {which!r}; they are {known}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in tqdm(chosen, disable=None, leave=False):  # on a terminal
        (folder / f"{path.name[:2]}.html").write_text(deck(path), encoding="utf-8")
    print(f"{len(chosen)} deck{'s' * (len(chosen) > 1)} in {folder}")


if __name__ == "__main__":
    for which in sys.argv[1:] or [""]:
        write(which, BUILD / "slides")
