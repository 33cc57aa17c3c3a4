"""The cheat sheet's page for the wall: its formulas, and that nothing on it is cut or covered."""

import itertools

import pytest

from three_axes.plan import MODELS, Job, Layout
from three_axes.plan.traffic import sent
from tools import wall


def test_formulas_on_the_wall_are_what_theory_counts():
    sends = {name: text for name, _, text, *_ in wall.SENDS}
    model = MODELS["llama-3-8b"]
    job, n, m = Job(model, global_batch=32, seq_len=4096), 8, 32
    bsh, two_n, layers = 4096 * model.hidden, 2 * model.params, model.layers
    counted = {
        "DP": ("2·(d−1)/d · 2N", Layout(dp=n), "dp", 2 * 7 / 8 * two_n),
        "FSDP, ZeRO-3": ("3·(d−1)/d · 2N", Layout(dp=n, zero=3), "dp", m / n * 3 * 7 / 8 * two_n),
        "TP": ("8·(t−1)/t · 2bsh", Layout(tp=n, sequence_parallel=False), "tp", m * layers * 7 * 2 * bsh),
        "TP with SP": ("10·(t−1)/t · 2bsh", Layout(tp=n), "tp", m * layers * 10 * 7 / 8 * 2 * bsh),
        "PP": ("2bsh to the next stage, 2bsh", Layout(pp=n), "pp", m * 4 * bsh),
    }
    for name, (formula, layout, axis, expected) in counted.items():
        assert formula in sends[name]
        # A table of embeddings and the head are no layer.
        assert sent(job, layout, layout.pp // 2)[axis] == pytest.approx(expected, rel=0.05), name
    assert sent(job, Layout(dp=n, zero=1))["dp"] == sent(job, Layout(dp=n))["dp"]


def test_nothing_on_the_wall_lies_outside_the_page_or_on_a_neighbour():
    figure = wall.page()
    figure.canvas.draw()
    box = figure.bbox
    texts = [text for ax in figure.axes for text in ax.texts if text.get_text().strip()]
    extents = [text.get_window_extent() for text in texts]
    for text, extent in zip(texts, extents):
        assert box.x0 <= extent.x0 and extent.x1 <= box.x1, text.get_text()
        assert box.y0 <= extent.y0 and extent.y1 <= box.y1, text.get_text()
        assert text.get_fontsize() >= 6, text.get_text()
    for (one, a), (other, b) in itertools.combinations(zip(texts, extents), 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        apart = one.axes is not other.axes
        assert apart or across < 1 or down < 3, f"{one.get_text()!r} touches {other.get_text()!r}"
