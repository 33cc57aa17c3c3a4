"""Any drop as a deck for the back of the room: one page of HTML that needs no network. Arrow keys, space and
a clicker turn it. Each slide has its number, and an address: 07.html#5.

A slide begins at each heading and at each code cell that shows something; the reader's checks, folded answers
and the setup are left out. The figures are the stored ones.
"""

from __future__ import annotations

import argparse
import re
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from tqdm import tqdm

from helpers.practice.books import BUILD, notebooks
from three_axes.terminal import Manual

from .pages import PLACE, unlinked

STYLE = """body { margin: 0; font: 2.1vw/1.4 sans-serif; color: #222; background: #fff }
html { scroll-snap-type: y proximity }
section { box-sizing: border-box; min-height: 100vh; padding: 3.5vh 5vw;
  scroll-snap-align: start; overflow: hidden; border-bottom: 1px solid #ddd;
  --fit: 1; font-size: calc(2.1vw * var(--fit)) }
h1 { font-size: 1.6em }
h2 { font-size: 1.35em }
h1, h2, p { margin: .35em 0 }
img { display: block; max-width: 90vw; max-height: calc(72vh * var(--fit));
  width: auto; height: calc(72vh * var(--fit)); object-fit: contain; object-position: left top }
pre { font-size: .76em; line-height: 1.35; white-space: pre-wrap; margin: .35em 0 }
.input_area, .jp-InputArea { background: #f5f5f5; padding: .2em .8em; margin-top: .5em }
table { border-collapse: collapse; font-size: .83em }
td, th { padding: .15em .8em; text-align: left }
.jp-InputPrompt, .jp-OutputPrompt, .anchor-link { display: none }
.highlight .k, .highlight .kn, .highlight .ow { font-weight: bold }
.highlight .s1, .highlight .s2, .highlight .sd { color: #8a3b12 }
.highlight .c1 { color: #555 }
section { position: relative; counter-increment: slide }
section::after { content: counter(slide) " / " attr(data-of); position: absolute; right: 2vw; bottom: 1.2vh;
  font-size: 1.1vw; color: #666 }"""
# What is higher than the screen is set smaller, down to six tenths; what still is, turns by half screens.
TURN = """const all = [...document.querySelectorAll("section")];
function fit() {
  for (const s of all) for (let k = 1; k > .59; k -= .05) {
    s.style.setProperty("--fit", k); if (s.scrollHeight <= innerHeight + 1) break
  }
}
addEventListener("load", fit); addEventListener("resize", fit);
const by = {ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1};
addEventListener("keydown", e => {
  const step = by[e.key]; if (!step) return; e.preventDefault();
  const now = all.findIndex(s => s.getBoundingClientRect().bottom > innerHeight / 2);
  const box = all[now].getBoundingClientRect();
  if (step > 0 && box.bottom > innerHeight + 9 || step < 0 && box.top < -9)
    scrollBy(0, step * innerHeight / 2);
  else {
    const next = Math.max(0, Math.min(all.length - 1, now + step));
    all[next].scrollIntoView(); history.replaceState(null, "", `#${next + 1}`)
  }
})"""
SHORT = 200  # characters of text that do not deserve a slide to themselves
LINES = 24  # that fit a slide in readable letters


def slides_of(notebook: nbformat.NotebookNode) -> list[list[nbformat.NotebookNode]]:
    """The cells of each slide."""
    slides: list[list] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if (
                {"setup", "closing"} & set(cell.metadata.get("tags", []))
                or ".check(" in cell.source
                or cell.source.startswith("cards.")
            ):
                continue
            if any("image/png" in o.get("data", {}) for o in cell.outputs):
                if sum(len(c.source) for c in slides[-1]) > SHORT:
                    slides.append([])  # a picture has a slide to itself, but for a heading
                cell = nbformat.v4.new_code_cell(
                    "", outputs=cell.outputs, metadata={"transient": {"remove_source": True}}
                )
            elif _lines(slides[-1]) + _lines([cell]) > LINES:
                slides.append([])
            slides[-1].append(cell)
            if cell.outputs:  # what follows is about what was shown
                slides.append([])
            continue
        told = re.sub(r"<details>.*?</details>", "", unlinked(PLACE.sub("", cell.source)), flags=re.S)
        told = re.sub(r"(?m)^.*\.hint\(\).*$", "", told)  # of an exercise, which is left out
        for part in re.split(r"(?m)^(?=#{1,2} )", told):
            if part.strip() and not re.match(r"## (Practice|Check yourself)", part):
                if not slides or part.startswith("#") and (slides[-1] and not _short(slides[-1])):
                    slides.append([])
                slides[-1].append(nbformat.v4.new_markdown_cell(part))
    joined: list[list] = []
    for cells in filter(None, slides):
        if joined and (
            _short(joined[-1])
            or _short(cells)
            and not cells[0].source.startswith("#")
            and len(joined[-1]) < 3
        ):
            joined[-1] = joined[-1] + cells
        else:
            joined.append(cells)
    return joined


def _lines(cells: list) -> float:
    """About how many lines of a slide these cells take."""
    told = sum(
        1 + len(line) / 75
        for c in cells
        if c.cell_type == "markdown"
        for line in filter(None, c.source.splitlines())
    )
    code = sum(len(c.source.splitlines()) for c in cells if c.cell_type == "code")
    shown = sum(
        len((o.get("text") or o.get("data", {}).get("text/plain", "")).splitlines())
        for c in cells
        if c.cell_type == "code"
        for o in c.outputs
    )
    return told + code + shown


def _short(cells: list) -> bool:
    """A heading or a sentence, or what ends in a colon, and so belongs to what follows."""
    return all(c.cell_type == "markdown" for c in cells) and (
        sum(len(c.source) for c in cells) < SHORT or cells[-1].source.rstrip().endswith(":")
    )


def deck(path: Path) -> str:
    """A notebook as a page of slides."""
    notebook = nbformat.read(path, as_version=4)
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    sections = []
    slides = slides_of(notebook)
    for k, cells in enumerate(slides, start=1):
        body, _ = exporter.from_notebook_node(
            nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)
        )
        sections.append(f'<section id="{k}" data-of="{len(slides)}">{body}</section>')
    title = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{''.join(sections)}<script>{TURN}</script></html>"
    )


def write(which: str, folder: Path) -> None:
    """Write the deck of drop `which` ('07', or '' for all).

    Raises ValueError for a drop that does not exist.
    """
    chosen = [p for p in notebooks() if not which or p.name[:2] == which.zfill(2)]
    if not chosen:
        known = ", ".join(path.name[:2] for path in notebooks())
        raise ValueError(f"there is no drop {which!r}; they are {known}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in tqdm(chosen, disable=None, leave=False):  # on a terminal
        (folder / f"{path.name[:2]}.html").write_text(deck(path), encoding="utf-8")
    print(f"{len(chosen)} deck{'s' * (len(chosen) > 1)} in {folder}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="three-axes slides", description=__doc__, formatter_class=Manual)
    parser.add_argument("drop", nargs="?", default="", help="its number; all drops without one")
    write(parser.parse_args(argv).drop, BUILD / "slides")
    return 0
