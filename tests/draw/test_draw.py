"""Pictures and explorers (pictures with sliders) show their data, or say why they cannot be drawn."""

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ipywidgets as widgets
import matplotlib as mpl
import pytest

from helpers import draw
from helpers.draw import explore, gantt
from three_axes.paper import SCHEDULES, Placement, simulation
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, plan


def test_no_point_of_a_scaling_picture_is_below_its_axis():
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


def test_a_slider_moved_while_a_cell_draws_changes_neither_picture_nor_settings():
    """JupyterLab calls the slider's callback in a thread of its own."""
    settings = dict(mpl.rcParams)
    alone = [explore.draw_schedule("1F1B", p, 4, 1).png() for p in (2, 4)]
    with ThreadPoolExecutor(4) as threads:
        drawn = threads.map(lambda p: explore.draw_schedule("1F1B", p, 4, 1).png(), 6 * (2, 4))
        assert list(drawn) == 6 * alone
    assert dict(mpl.rcParams) == settings


def test_a_ranking_draws_all_seconds_of_models_with_experts():
    job = Job(MODELS["mixtral-8x7b"], CLUSTERS["dgx-h100"], 128, 4096, FRAMEWORKS["megatron-lm"])
    made = plan(job, gpus=32)
    figure = draw.ranking(made, rows=3).figure
    drawn = [text.get_text() for text in figure.axes[0].texts]
    for said, row in zip(drawn, made.by_axes):
        assert said.startswith(f"{row.seconds:.2f} s")


def split(sizes: dict[str, int], matrix: list[list[int]] | None):
    """The picture of a step. `matrix` has the bytes that each rank sent to each other rank."""
    kept = [{"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 0, "resident": 10**9}]
    step = sizes, SimpleNamespace(matrix=matrix), kept * math.prod(sizes.values())
    return draw.splits({"tensor": step})


def written(picture) -> list[str]:
    return [text.get_text() for text in picture.figure.axes[0].texts]


def test_a_split_says_in_words_what_it_draws():
    measured = split({"tp": 2}, [[0, 5_000_000], [5_000_000, 0]])
    assert "sees 8 of 8 examples and holds 50% of the width of 4 of 4 blocks" in measured.alt
    assert "rank 0 sent 5.00 MB to rank 1" in measured.alt and "5.00 MB each way" in written(measured)
    assert "kept by rank: 8.00 MB, 8.00 MB" in measured.alt


def test_a_split_tells_nothing_sent_from_not_measured():
    for sizes, matrix, said in (
        ({"tp": 2}, None, "not measured on this system"),
        ({"tp": 2}, [[0, 0], [0, 0]], "nothing"),
        ({"tp": 1}, [[0]], "nothing"),
    ):
        picture = split(sizes, matrix)
        assert said in written(picture) and f"sent: {said};" in picture.alt


def test_arrows_sum_to_what_the_table_has_on_the_wire():
    """A rank that gets only headers and acknowledgements from another rank has no arrow from it."""
    picture = split({"dp": 3}, [[0, 6_290_000, 30_000], [0, 0, 6_320_000], [6_320_000, 0, 0]])
    assert "rank 0 sent 6.32 MB to rank 1, rank 1 sent 6.32 MB to rank 2" in picture.alt


def test_several_axes_have_a_lane_each_with_its_name_and_bytes():
    grid = Placement({"pp": 2, "dp": 2, "tp": 2})
    sizes = {"tp": 1_060_000, "dp": 3_480_000, "pp": 131_000, None: 0}
    matrix = [[sizes[grid.axis_between(a, b)] if a != b else 0 for b in range(8)] for a in range(8)]
    matrix[4][6] -= 60_000
    picture = split({"pp": 2, "dp": 2, "tp": 2}, matrix)
    assert {"tp: 1.06 MB", "dp: up to 3.48 MB", "pp: 131 kB"} <= set(written(picture))


def test_states_are_drawn_as_they_are_measured():
    whole = {"weights": 4e6, "gradients": 4e6, "optimizer": 8e6}
    cut = whole | {"optimizer": 2e6}
    picture = draw.states({"DP": [whole] * 4, "ZeRO-1": [cut] * 4})
    assert "ZeRO-1: weights 4.00 MB, gradients 4.00 MB, optimizer 2.00 MB" in picture.alt
    filled = [p for p in picture.figure.axes[1].patches if p.get_facecolor()[:3] != (1, 1, 1)]
    assert sum(p.get_height() for p in filled) == pytest.approx(4 * 10)
    own = sorted(p.get_y() for p in filled if p.get_height() == pytest.approx(2))
    assert own == pytest.approx([8, 10, 12, 14]), "each rank's piece is its own"


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_timelines_are_seen_at_once_on_a_projector(ranks, memory):
    line = simulation.paper(SCHEDULES["1F1B"].make(ranks, 8))
    one, two = (gantt.timeline(dict.fromkeys(names, line), memory=memory) for names in ("a", "ab"))
    assert max(one.figure.get_figheight(), two.figure.get_figheight()) <= gantt.SCREEN + 0.01
    assert one.figure.get_figheight() <= two.figure.get_figheight()


def test_two_orders_grow_unit_by_unit_and_say_what_they_take_when_they_are_over():
    orders = explore.orders(p=4, m=8)
    whole = orders.picture.alt
    assert orders.values["until"] == 33 and whole.count("33 units") == 2
    orders.set(until=2)
    assert "rank 0 F0 F1, rank 1 F0" in orders.picture.alt and "B0" not in orders.picture.alt
    assert "33" not in orders.picture.alt
    for ax in orders.picture.figure.axes:
        strips = [strip.get_datalim(ax.transData).x1 for strip in ax.collections if strip.get_alpha() == 0.55]
        assert strips and max(strips) <= 2, "held microbatches are drawn up to the time `until`"
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


def test_the_buttons_of_a_picture_that_grows_begin_at_its_end_and_follow_it(monkeypatch):
    made = {}
    for kind in (widgets.Image, widgets.Play):
        make = lambda kind=kind, **how: made.setdefault(kind, kind(**how))
        monkeypatch.setattr(widgets, kind.__name__, make)
    orders = explore.orders(p=4, m=8)
    orders._repr_mimebundle_()
    slider, image, play = orders._widgets["until"], *made.values()
    slider.value = 5
    assert orders.values["until"] == 5 and "B0" in orders.picture.alt
    slider.value = slider.max
    ends = []
    image.observe(lambda _: ends.append((slider.max, slider.value, play.max)), names="value")
    orders._widgets["m"].value = 16
    assert ends == [(57, 57, 57)], "slider and button end where the new picture ends, before it is shown"
    assert orders.values["until"] == 57
