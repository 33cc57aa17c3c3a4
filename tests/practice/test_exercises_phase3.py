"""Every exercise of drops 10-13: its solution passes, an empty one is not started, each listed mistake is
caught and named.
"""

import json
from dataclasses import asdict

import pytest
from exercise_tests import *  # noqa: F403

from drops import d10, d11, d12, d13
from helpers import World, draw
from helpers.draw import explore
from three_axes.explain import explain

# -- drop 10 ---------------------------------------------------------------------------------


def growth_is_a_leak(tokens, peaks):
    last = peaks[-1]
    if max(last) > 1.1 * min(last):
        return "gather on rank 0"
    return "optimizer state" if len(peaks) <= 2 else "leak"


def never_looks_at_ranks(tokens, peaks):
    if tokens[-1] > tokens[0]:
        return "long batch"
    return "optimizer state" if len(peaks) <= 2 else "leak"


def all_is_a_long_batch(tokens, peaks):
    return d10.diagnose(tokens, peaks) if max(peaks[-1]) > 1.1 * min(peaks[-1]) else "long batch"


def a_step_is_a_slope(tokens, peaks):
    cause = d10.diagnose(tokens, peaks)
    return "leak" if cause == "optimizer state" else cause


def words(tokens, peaks):
    return "out of memory"


def a_bug(tokens, peaks):
    return peaks[99]


# -- drop 11 ---------------------------------------------------------------------------------

AXES = ("tp", "pp", "dp", "rest")


def the_network_is_slow(before, after):
    worst = max(AXES, key=after["parts"].get)
    return {x: float(x == worst) for x in AXES}


def seconds_not_shares(before, after):
    ratio = after["batch"] / after["ranks"] * before["ranks"] / before["batch"]
    return {x: after["parts"][x] - ratio * before["parts"][x] for x in AXES}


# -- drop 12 ---------------------------------------------------------------------------------


def equal_stages(layers, p, head):
    return [layers // p + (k < layers % p) for k in range(p)]


def loses_the_remainder(layers, p, head):
    return [layers // p] * p


def one_layer_less(layers, p, head):
    last = max(1, layers // p - 1)
    even, more = divmod(layers - last, p - 1)
    return [even + (k >= p - 1 - more) for k in range(p - 1)] + [last]


def long_stages_first(layers, p, head):
    *others, last = d12.balance(layers, p, head)
    return [*sorted(others, reverse=True), last]


def all_on_the_first(layers, p, head):
    return [layers - p + 1] + [1] * (p - 1)


# -- drop 13 ---------------------------------------------------------------------------------


def always_fsdp(case):
    return d13.ANSWERS[3], d13.REASONS[1]


def more_than_needed(case):
    return (d13.ANSWERS[1], d13.REASONS[3]) if case.startswith("1B") else d13.quick(case)


def right_for_another_reason(case):
    answer, reason = d13.quick(case)
    return answer, d13.REASONS[0] if case.startswith("30B") else reason


def fsdp_for_the_node(case):  # a fair alternative
    return (d13.ANSWERS[3], d13.REASONS[1]) if case.startswith("30B") else d13.quick(case)


MISTAKES = [
    (d13.tuple_, lambda: (2, 16, 1), "wrong", "it cannot be"),
    (d13.tuple_, lambda: (8, 2, 1), "wrong", "d·t·p is not 32"),
    (d13.tuple_, lambda: (1, 8, 4), "wrong", "more model parallelism than needed"),
    (d13.tuple_, lambda: (4, 8, 1), "wrong", "more than five percent behind"),
    (d13.tuple_, lambda: "TP 8", "wrong", "no layout"),
    (d13.cases, always_fsdp, "wrong", "more than needed"),
    (d13.cases, more_than_needed, "wrong", "more than needed"),
    (d13.cases, right_for_another_reason, "wrong", "right for another reason"),
    (d13.cases, lambda case: "DP", "wrong", "no answer with a reason"),
    (d12.choice, lambda: ("interleaved", 16, 2), "wrong", "interleaving is free"),
    (d12.choice, lambda: ("1F1B", 64, 1), "wrong", "m is given"),
    (d12.choice, lambda: ("1F1B", 16, 1), "wrong", "the bubble is still there"),
    (d12.choice, lambda: ("ZB-V", 16, 2), "wrong", "messages are free"),
    (d12.choice, lambda: ("interleaved", 16, 4), "wrong", "messages are free"),
    (d12.choice, lambda: ("ZB-H1", 13, 1), "wrong", "m is given"),
    (d12.choice, lambda: ("ZB-H2", 16, 1), "wrong", "more memory than there is"),
    (d12.choice, lambda: ("GPipe", 16, 1), "wrong", "more memory than there is"),
    (d12.choice, lambda: "ZB-V", "wrong", "no choice"),
    (d12.choice, lambda: ("ZB-V", 16, 99), "wrong", "no such schedule"),
    (d12.choice, lambda: ("interleaved", 16, 1), "wrong", "no such schedule"),
    (d12.choice, lambda: (["ZB-V"], 16, 2), "wrong", "no choice"),
    (
        d12.balanced,
        lambda layers, p, head: [-(-layers // p)] * (p - 1) + [layers + (p - 1) * (-layers // p)],
        "wrong",
        "the head is forgotten",
    ),
    (
        d12.balanced,
        lambda layers, p, head: [layers // p + 2] * (p - 1) + [layers - (p - 1) * (layers // p + 2)],
        "wrong",
        "the last stage takes what is left",
    ),
    (d11.split, lambda before, after: dict.fromkeys(("tp", "pp", "dp", "rest")), "wrong", "no shares"),
    (
        d11.split,
        lambda before, after: {k: 100 * v for k, v in d11.causes(before, after).items()},
        "wrong",
        "percent where shares are asked for",
    ),
    (
        d13.cases,
        lambda case: ("FSDP", d13.REASONS[0]) if case.startswith("30B") else d13.quick(case),
        "wrong",
        "right for another reason",
    ),
    (d12.balanced, long_stages_first, "wrong", "a long stage before a shorter one"),
    (d12.balanced, one_layer_less, "wrong", "a stage that is too long"),
    (d13.tuple_, lambda: (16.0, 2, 1), "wrong", "no layout"),
    (d12.choice, lambda: ("a faster network", 13, 1), "wrong", "no choice"),
    (d12.balanced, equal_stages, "wrong", "the head is forgotten"),
    (d12.balanced, loses_the_remainder, "wrong", "the head is forgotten"),
    (d12.balanced, all_on_the_first, "wrong", "a stage that is too long"),
    (d12.balanced, lambda layers, p, head: [4] * p, "wrong", "the head is forgotten"),
    (d12.balanced, lambda layers, p, head: [layers] * p, "wrong", "layers lost or doubled"),
    (d12.balanced, lambda layers, p, head: layers // p, "wrong", "no layers for each stage"),
    (d11.split, the_network_is_slow, "wrong", "all of it blamed on one cause"),
    (d11.split, seconds_not_shares, "wrong", "shares that do not sum to one"),
    (d11.split, lambda before, after: "tp", "wrong", "no shares"),
    (d11.placing, lambda: (1, 8, 1, 1), "wrong", "TP scaled with the cluster"),
    (d11.placing, lambda: (8, 1, 1, 1), "wrong", "it does not fit"),
    (d11.placing, lambda: (2, 2, 1, 1), "wrong", "d·t·p is not 8"),
    pytest.param(d11.placing, lambda: (2, 1, 4, 1), "wrong", "a starved pipeline", marks=pytest.mark.slow),
    (d11.placing, lambda: (1, 4, 2, 3), "wrong", "sizes that do not divide"),
    pytest.param(
        d11.placing,
        lambda: (1, 4, 2, 8),
        "wrong",
        "more microbatches than the pipeline needs",
        marks=pytest.mark.slow,
    ),
    (d11.placing, lambda: "TP 4", "wrong", "no layout"),
    (d10.signature, growth_is_a_leak, "wrong", "a spike is not a slope"),
    (d10.signature, never_looks_at_ranks, "wrong", "one rank is not all ranks"),
    (d10.signature, all_is_a_long_batch, "wrong", "long batch where it was optimizer state"),
    (d10.signature, a_step_is_a_slope, "wrong", "a step up is not a slope"),
    (d10.signature, words, "wrong", "no diagnosis"),
    (d10.signature, a_bug, "crashed", None),
    (d10.cheapest, lambda: "DP on 8 ranks", "wrong", "more DP fixes OOM"),
    (d10.cheapest, lambda: "ZeRO-1", "wrong", "ZeRO shrinks activations"),
    (d10.cheapest, lambda: "ZeRO-3", "wrong", "ZeRO shrinks activations"),
    (d10.cheapest, lambda: "nothing", "wrong", "nothing changed"),
    (d10.cheapest, lambda: "offload", "wrong", "it fits, but costs more than it must"),
    (d10.cheapest, lambda: "recompute", "wrong", "it fits, but costs more than it must"),
    (d10.cheapest, lambda: "buy more", "wrong", "no remedy"),
]


@pytest.mark.parametrize(
    "number, cause", list(enumerate(("long batch", "gather on rank 0", "optimizer state", "leak"), 1))
)
def test_the_recorded_incidents_can_be_recorded_again(number, cause):
    recorded, again = d10.load(number), d10.crash(cause)
    assert recorded.tokens == again.tokens and recorded.log == again.log
    assert [max(p) for p in recorded.peaks[:-1]] == pytest.approx(
        [max(p) for p in again.peaks[:-1]], rel=0.02
    )
    # How far the failing step got is not quite the same twice.
    assert max(recorded.peaks[-1]) == pytest.approx(max(again.peaks[-1]), rel=0.1)
    assert json.loads(json.dumps(asdict(again)))["budget"] == d10.BUDGET


@pytest.mark.slow
@pytest.mark.parametrize("remedy", d10.REMEDIES)
def test_the_ladder_is_predicted(remedy):
    tried = d10.attempt(remedy)
    assert tried["peak"] == pytest.approx(d10.predicted(remedy), rel=0.15 if remedy == "offload" else 0.07)
    assert tried["fits"] == (tried["peak"] <= d10.LADDER_BUDGET)
    assert tried["forwards"] == (2 if remedy == "recompute" else 1)
    assert (tried["host"] > 0) == (remedy == "offload") and (tried["sent"] > 10e6) == (remedy == "TP + SP")


def test_a_run_that_survives_is_no_incident():
    with pytest.raises(ValueError, match="survived 2 steps"):
        d10.crash("leak", steps=2)


@pytest.mark.slow
def test_a_step_on_the_fabric_is_the_sum_of_its_parts():
    before, after = d11.measure(1, 4, 1), d11.measure(1, 8, 1)
    for run in (before, after):
        assert sum(run.parts.values()) == pytest.approx(run.seconds)
    lost = d11.lost(before, after)
    assert sum(lost.values()) == pytest.approx(after.seconds) and lost["tp"] == max(
        lost["tp"], lost["pp"], lost["dp"]
    )


@pytest.mark.slow
def test_each_illness_shows_its_sign():
    ill = d11.ill()
    for name, step in ill.items():
        assert sum(step.parts.values()) == pytest.approx(step.seconds), name
    waited = {name: [sum(rank.values()) for rank in step.waited] for name, step in ill.items()}
    assert min(range(8), key=waited["slow rank"].__getitem__) == d11.SLOW_RANK
    for name in ("TCP", "switch"):
        assert ill[name].parts["dp"] > 2 * ill["healthy"].parts["dp"]
        assert min(waited[name]) > 0.7 * max(waited[name])
    parts = d11.beyond_healthy(ill)["TCP"]
    assert max(parts, key=lambda part: parts[part] if part != "healthy" else 0) == "dp"


def test_a_rank_that_is_slow_in_python_is_named(tmp_path):
    with World(4) as world:
        explained = explain(world.run(d11.record, str(tmp_path)))
    assert [one.steps for one in explained.splits] == [d11.STEPS] * 4
    slow = d11.SLOW_READER
    assert explained.advice[0].text.startswith(f"rank {slow} waits for its own Python")
    drawn = d11.own_waterfall(explained, 0, slow)
    assert list(drawn) == ["rank 0", f"rank {slow}"]
    for one, parts in zip((explained.splits[0], explained.splits[slow]), drawn.values()):
        assert sum(parts.values()) == pytest.approx(one.seconds / one.steps)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="d·m must divide the batch of 8 sequences"):
        d11.measure(3, 1, 1)


def test_no_point_of_a_scaling_picture_lies_below_its_axis():
    for lowest in (5.0, 70.5, 76.0, 81.0, 99.0):
        ax = draw.scaling({"strong": [(8, 100.0), (64, lowest)]}, "", "").figure.axes[0]
        assert ax.get_ylim()[0] <= lowest and ax.get_ylim()[1] >= 100


def test_a_schedule_is_computed_or_refused_in_words():
    ((_, bubble, held, messages),) = d12.on_paper("ZB-H1", 16).rows
    assert (float(bubble.rstrip("%")) < 15, held, messages) == (True, "8.0", "1")
    for asked, words in {
        ("zero bubble", 16, 1): "there are 'GPipe', '1F1B'",
        ("ZB-V", 16, 1): "it has 2",
        ("interleaved", 16, 1): "begins with 2",
    }.items():
        with pytest.raises(ValueError, match=words):
            d12.on_paper(*asked)


def test_a_fair_alternative_passes():
    assert d13.cases.check(fsdp_for_the_node).kind == "right"
    assert (
        d13.cases.check(
            lambda case: ("FSDP", d13.REASONS[3]) if case.startswith("30B") else d13.quick(case)
        ).kind
        == "right"
    )
    assert (
        d12.balanced.check(
            lambda layers, p, head: __import__("numpy").array(d12.balance(layers, p, head))
        ).kind
        == "right"
    )


def test_the_tree_is_held_against_the_planner():
    table = d13.tree_against_planner()
    assert [row[-1] for row in table.rows[:2]] == ["0%", "0%"] and all(
        row[-1] != "does not fit" for row in table.rows
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [explore.memory, explore.plans])
def test_every_setting_of_an_explorer_is_drawn_or_refused_in_words(make):
    e = make()
    for name, (_, options, first) in e.controls.items():
        for option in options:
            e.set(**{name: option})
            assert e.picture.png()[:4] == b"\x89PNG" and (not e.refusal or len(e.refusal) > 20)
        e.set(**{name: first})


@pytest.mark.slow
def test_every_cure_is_run_on_real_ranks_in_the_order_on_paper():
    with World(8, timeout=60) as world:
        timelines = d12.run_all(world, unit=0.01)
    assert list(timelines)[:-2] == list(d12.REMEDIES) and len(d12.side_by_side(timelines).rows) == len(
        timelines
    )
    for name, (on_paper, measured) in timelines.items():
        ran = [[(s.kind, s.label) for s in row if s.kind != "wait"] for row in measured.rows]
        assert ran == [[(op.kind, str(op.microbatch)) for op in ops] for ops in on_paper.schedule.ops], name
        assert measured.bubble > on_paper.bubble - 0.02, name  # tools/bench/schedules.py measures how near
