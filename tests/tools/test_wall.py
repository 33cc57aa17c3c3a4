"""The formulas on the page for the wall (`tools.wall`) equal what the planner counts."""

import pytest

from three_axes.plan import MODELS, Job, Layout
from three_axes.plan.traffic import sent
from tools import wall


def test_figures_on_the_wall_are_those_of_8_gpus():
    by_name = {row[0]: row for row in wall.figures().rows}
    assert by_name["DP 8"][1] == "128 GB" and by_name["FSDP (ZeRO-3), DP 8"][1] == "16.1 GB"


def test_formulas_on_the_wall_are_what_theory_counts():
    sends = {name: text for name, _, text, *_ in wall.SENDS.rows}
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
