"""Every figure in the prose is printed by a cell of its notebook, or computed here."""

import re

import nbformat
import pytest

from helpers import toy
from helpers.runtime.table import human
from helpers.theory.collectives import book
from test_notebooks import NOTEBOOKS, text

N = sum(p.numel() for p in toy.ToyTransformer(hidden=256).parameters())
SENT_DATA = human(book("all_reduce", 4 * N, 4))
SENT_TENSOR_4B = human(16 * book("all_reduce", 4 * (4 * 8) * 32 * 256, 4))

# For each drop, sentences whose figures no cell prints, with the figures put in by computing them.
COMPUTED = {
    "01": [f"each sends 2·(4−1)/4 = {book('all_reduce', 1, 4)} times that",
           "and tensor parallelism overtakes it: "
           f"{SENT_TENSOR_4B} against {SENT_DATA}",
           f"4·*L* = {4 * 4} in all",
           "each rank has 2 of the 8 examples"],
    "02": [f"each of four ranks sent {SENT_DATA}, {book('all_reduce', 1, 4)} times the gradients",
           f"The gradients here are {human(4 * N)} on each rank",
           f"Six steps, a quarter of the tensor each: 6/4 = {6 / 4}.",
           f"{book('all_reduce', 1, 2):.0f} for two ranks, {book('all_reduce', 1, 4)} for four, {book('all_reduce', 1, 8)} for eight",
           f"The loop above made {len(list(toy.ToyTransformer(hidden=256).parameters()))} all-reduces",
           f"{human(4 * N)} of parameters, as much of gradients, twice as much for Adam",
           f"From {book('all_reduce', 1, 8)}·S to {book('all_reduce', 1, 64):.2f}·S: one eighth more"],
}
FIGURE = r"\d[\d.,]* ?(?:[kMGT]i?B|%|ms|µs)(?!\w)"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name[:2])
def test_figures_in_the_prose_are_true(path):
    notebook = nbformat.read(path, as_version=4)
    prose = text(notebook)
    computed = COMPUTED[path.name[:2]]
    for sentence in computed:
        assert sentence in prose, sentence
    printed = "\n".join(str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", ""))
                        for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    for figure in re.findall(FIGURE, prose):
        assert figure in printed or any(figure in sentence for sentence in computed), f"{figure} comes from nowhere"
