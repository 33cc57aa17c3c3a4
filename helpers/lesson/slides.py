"""Any drop as a deck for the back of the room: one page of HTML that needs no network. Arrow keys, space and a clicker turn it.

A slide begins at each heading and at each code cell that shows something; the reader's checks, folded answers and the
setup are left out. The figures are the stored ones.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

from .make import notebooks

STYLE = """body { margin: 0; font: 2.1vw/1.4 sans-serif; color: #222; background: #fff }
section { box-sizing: border-box; min-height: 100vh; padding: 4vh 5vw; scroll-snap-align: start; overflow: hidden; border-bottom: 1px solid #ddd }
html { scroll-snap-type: y mandatory } pre { font-size: 1.7vw; line-height: 1.35; white-space: pre-wrap; margin: .4em 0 } img { max-width: 88vw; max-height: 60vh; min-height: 40vh; width: auto; height: auto }
table { border-collapse: collapse; font-size: 1.75vw } td, th { padding: .2em .8em; text-align: left } h1 { font-size: 3.4vw } h2 { font-size: 2.8vw } .jp-InputPrompt, .jp-OutputPrompt, .anchor-link { display: none }
.jp-CodeCell .jp-InputArea { background: #f5f5f5; padding: .3em .8em } .highlight .k, .highlight .kn, .highlight .ow { font-weight: bold } .highlight .s1, .highlight .s2, .highlight .sd { color: #8a3b12 } .highlight .c1 { color: #555 }"""
TURN = """document.addEventListener("keydown", e => { const step = {ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1}[e.key];
 if (step) { e.preventDefault(); const all = [...document.querySelectorAll("section")]; const now = all.findIndex(s => s.getBoundingClientRect().bottom > innerHeight / 2);
 all[Math.max(0, Math.min(all.length - 1, now + step))].scrollIntoView() } })"""


def slides_of(notebook: nbformat.NotebookNode) -> list[list[nbformat.NotebookNode]]:
    """The cells of each slide."""
    slides: list[list] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if "setup" in cell.metadata.get("tags", []) or ".check(" in cell.source:
                continue
            if slides[-1] and any("image/png" in o.get("data", {}) for o in cell.outputs):
                slides.append([])  # a picture has a slide to itself
            slides[-1].append(cell)
            if cell.outputs:  # what follows is about what was shown
                slides.append([])
            continue
        for part in re.split(r"(?m)^(?=#{1,2} )", re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S)):
            if part.strip() and not re.match(r"## (Practice|Check yourself)", part):
                if part.startswith("#") or not slides:
                    slides.append([])
                slides[-1].append(nbformat.v4.new_markdown_cell(part))
    return [cells for cells in slides if cells]


def deck(path: Path) -> str:
    """A notebook as a page of slides."""
    notebook = nbformat.read(path, as_version=4)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    sections = []
    for cells in slides_of(notebook):
        body, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata))
        sections.append(f"<section>{body}</section>")
    title = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>{"".join(sections)}<script>{TURN}</script></html>'


def write(which: str, folder: Path) -> None:
    """Write the deck of drop `which` ('07', or '' for all). Raises ValueError for a drop that does not exist."""
    chosen = [p for p in notebooks() if not which or p.name[:2] == which.zfill(2)]
    if not chosen:
        raise ValueError(f"there is no drop {which!r}; they are 01 to 14")
    folder.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        (folder / f"{path.name[:2]}.html").write_text(deck(path), encoding="utf-8")
    print(f"{len(chosen)} deck{'s' * (len(chosen) > 1)} in {folder}")
