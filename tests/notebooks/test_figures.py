"""Every figure in the prose is printed by a cell of its notebook, or computed in `prose.py`."""

import re
from pathlib import Path

import nbformat
import pytest
from test_notebooks import NOTEBOOKS

from tools import pages

ROOT = Path(__file__).resolve().parents[2]
FIGURE = r"\d[\d.,]* ?(?:[kMGT]i?B|%|ms|µs)(?!\w)"


@pytest.fixture(scope="module")
def prose():
    import prose

    return prose


def test_what_drop_14_says_of_its_layouts(prose):
    prose.what_drop_14_says_of_its_layouts()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name[:2])
def test_figures_in_the_prose_are_true(path, prose):
    notebook = nbformat.read(path, as_version=4)
    text = pages.prose(notebook.cells)
    computed = [*prose.COMPUTED[path.name[:2]], *prose.PUBLISHED.get(path.name[:2], ())]
    for sentence in computed:
        assert sentence in text, sentence
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    shown = lambda o: str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", ""))
    printed = "\n".join(map(shown, outputs))
    for number in prose.BOXES[path.name[:2]]:
        assert number in printed, f"no cell prints {number}, which the box's formula gives"
    for figure in re.findall(FIGURE, text):
        assert figure in printed or any(figure in one for one in computed), f"{figure}: no source"


def test_the_box_of_drop_13_is_near_the_planner(prose):
    assert 0.9 < prose.OWN / prose.d13.the_plan().best.seconds < 1.1


@pytest.mark.parametrize(
    "file", ["data/flashcards.csv", "docs/teaching.md", "docs/lessons.md", "docs/install.md"]
)
def test_figures_of_cards_and_notes_are_true(file, prose):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert set(re.findall(FIGURE, text)) <= set(prose.OUTSIDE)
    assert all(figure == true for figure, true in prose.OUTSIDE.items() if true)
    assert 'how many GB before the first token?" (112)' in text or file != "docs/lessons.md"
    assert sum(prose.states(7e9).values()) == 112e9
