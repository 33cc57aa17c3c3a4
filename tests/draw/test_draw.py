"""Pictures and explorers: what is drawn is seen, what cannot be drawn is refused in words."""

import pytest

from helpers import draw
from helpers.draw import explore
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, plan


def test_no_point_of_a_scaling_picture_lies_below_its_axis():
    for lowest in (5.0, 70.5, 76.0, 81.0, 99.0):
        ax = draw.scaling({"strong": [(8, 100.0), (64, lowest)]}, "", "").figure.axes[0]
        assert ax.get_ylim()[0] <= lowest and ax.get_ylim()[1] >= 100


@pytest.mark.slow
@pytest.mark.parametrize("make", [explore.memory, explore.plans])
def test_every_setting_of_an_explorer_is_drawn_or_refused_in_words(make):
    e = make()
    for name, (_, options, first) in e.controls.items():
        for option in options:
            e.set(**{name: option})
            assert e.picture.png()[:4] == b"\x89PNG" and (not e.refusal or len(e.refusal) > 20)
        e.set(**{name: first})


def test_a_ranking_draws_all_seconds_of_models_with_experts():
    job = Job(MODELS["mixtral-8x7b"], CLUSTERS["dgx-h100"], 128, 4096, FRAMEWORKS["megatron-lm"])
    made = plan(job, gpus=32)
    figure = draw.ranking(made, rows=3).figure
    drawn = [text.get_text() for text in figure.axes[0].texts]
    for said, row in zip(drawn, made.by_axes):
        assert said.startswith(f" {row.seconds:.2f} s")
