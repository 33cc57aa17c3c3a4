"""Pictures and explorers: what is drawn is seen, what cannot be drawn is refused in words."""

from types import SimpleNamespace

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


def test_a_split_says_in_words_what_it_draws():
    kept = [{"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 0, "resident": 10**9}] * 2
    picture = lambda matrix: draw.splits({"tensor": ({"tp": 2}, SimpleNamespace(matrix=matrix), kept)})
    measured = picture([[0, 5_000_000], [5_000_000, 0]]).alt
    assert "sees 8 of 8 examples and holds 50% of the width of 4 of 4 blocks" in measured
    assert "rank 0 sent 5.00 MB to rank 1" in measured and "kept by rank: 8.00 MB, 8.00 MB" in measured
    assert "what was sent is not measured here" in picture(None).alt


def test_two_orders_grow_unit_by_unit_and_say_what_they_take_when_they_are_over():
    orders = explore.orders(p=4, m=8)
    whole = orders.picture.alt
    assert orders.values["until"] == 33 and whole.count("33 units") == 2
    orders.set(until=2)
    assert "rank 0 F0 F1, rank 1 F0" in orders.picture.alt and "B0" not in orders.picture.alt
    assert "33" not in orders.picture.alt
    for ax in orders.picture.figure.axes:
        strips = [strip.get_datalim(ax.transData).x1 for strip in ax.collections if strip.get_alpha() == 0.55]
        assert strips and max(strips) <= 2, "what is held is drawn as far as the time"
        assert ax.get_xticks()[-1] == 33
    orders.set(until=33)
    assert orders.picture.alt == whole
    orders.set(m=2)  # shorter, and over still
    assert orders.values["until"] == 15 and orders.picture.alt.count("15 units") == 2
    orders.set(until=4)
    orders.set(m=16)
    assert orders.values["until"] == 4
    with pytest.raises(ValueError, match="until=58: choose from 1, 2"):
        orders.set(until=58)


def test_the_buttons_of_a_picture_that_grows_begin_at_its_end_and_follow_it():
    orders = explore.orders(p=4, m=8)
    orders._repr_mimebundle_()
    slider = orders._widgets["until"]
    slider.value = 5
    assert orders.values["until"] == 5 and "B0" in orders.picture.alt
    slider.value = slider.max
    orders._widgets["m"].value = 16
    assert slider.value == slider.max == orders.values["until"] == 57
