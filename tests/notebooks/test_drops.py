"""What the functions of notebooks, above all of drops 10 to 13, measure, record and compute."""

import importlib
import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import nbformat
import pytest
from sampled import sampled
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from drops import b1, d02, d04, d06, d08, d10, d11, d12, d13
from helpers import World, predict
from helpers.practice import notebooks


@pytest.mark.parametrize(
    "number, cause",
    sampled(enumerate(("long batch", "gather on rank 0", "optimizer state", "leak"), 1), every=4),
)
def test_the_recorded_incidents_can_be_recorded_again(number, cause):
    recorded, again = d10.load(number), d10.crash(cause)
    assert recorded.tokens == again.tokens and recorded.log == again.log
    most = [[max(p) for p in run.peaks[:-1]] for run in (recorded, again)]
    assert most[0] == pytest.approx(most[1], rel=0.02)
    # How far the failing step got is not quite the same twice.
    assert max(recorded.peaks[-1]) == pytest.approx(max(again.peaks[-1]), rel=0.1)
    assert json.loads(json.dumps(asdict(again)))["budget"] == d10.BUDGET


@pytest.mark.slow
def test_a_run_that_survives_is_no_incident():
    with pytest.raises(ValueError, match="survived 2 steps"):
        d10.crash("leak", steps=2)


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


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="d·m must divide the batch of 8 sequences"):
        d11.measure(3, 1, 1)


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


@pytest.mark.slow
def test_every_cure_is_run_on_real_ranks_in_the_order_on_paper():
    with World(8, timeout=60) as world:
        timelines = d12.run_all(world, unit=0.01)
    assert list(timelines)[:-2] == list(d12.REMEDIES)
    assert len(d12.side_by_side(timelines).rows) == len(timelines)
    for name, (on_paper, measured) in timelines.items():
        ran = [[(s.kind, s.label) for s in row if s.kind != "wait"] for row in measured.rows]
        assert ran == [[(op.kind, str(op.microbatch)) for op in ops] for ops in on_paper.schedule.ops], name
        assert measured.bubble > on_paper.bubble - 0.02, name


def waiting(seconds: float, bubble: float = 0.0) -> SimpleNamespace:
    """A timeline on which rank 0 waits so long."""
    return SimpleNamespace(seconds=lambda rank, kind: seconds, bubble=bubble)


def sent(times: float) -> SimpleNamespace:
    """The traffic of a rank that sent the gradients of drop 02 so many times, on a system without a wire."""
    return SimpleNamespace(wire=[None], counted=[times * d02.GRADIENTS])


@pytest.mark.parametrize(
    "answer, told",
    [
        (lambda: d02.answer(sent(1.75), ["1.75·S, a little more"]), "1.75·S, a little more"),
        (lambda: d02.answer(sent(1.5), ["1.75·S, a little more"]), "none of these: 1.50·S"),
        (lambda: d04.answer(waiting(0, 0.74), {"half": 0.5, "a quarter": 0.25}), "a quarter"),
        (lambda: d04.answer(waiting(0, 0.62), {"half": 0.5, "a quarter": 0.25}), "none of these: 38% of it"),
        (lambda: d06.answer(waiting(1), waiting(4.4)), "four to five times as long"),
        (lambda: d06.answer(waiting(1), waiting(7)), "none of these: 7.0 times as long"),
        (lambda: d08.answer(0.3, 1.7), "more than three times as long"),
        (lambda: d08.answer(1, 2.4), "none of these: 2.4 times as long"),
        (lambda: d10.answer({"a": {"fits": True}, "b": {"fits": False}}, tuple("abcd")), "a"),
        (lambda: d10.answer(dict.fromkeys("ab", {"fits": True}), tuple("abcd")), "c"),
        (lambda: d10.answer(dict.fromkeys("ab", {"fits": False}), tuple("abcd")), "d"),
        (lambda: d11.answer({"tp": 0.3, "dp": 0.1, "rest": 0.1}), "waiting inside every layer"),
        (lambda: d11.answer({"tp": 0.1, "dp": 0.1, "rest": 0.4}), "none of these: most is rest"),
        (lambda: b1.answer(SimpleNamespace(peak=lambda rank: 3 * b1.BLOCK)), "none of these: 3"),
    ],
)
def test_a_guess_is_answered_by_an_option_or_by_what_was_measured(answer, told):
    option, *why = answer()
    assert option == told
    guess = predict("How much?", "a", "b", *([] if told.startswith("none of these: ") else [told]))
    assert f"Measured: {told}." in guess.reveal(option, *why[:1]).text


# drop -> the number that its first cell asks for, computed by hand
FIRST = {
    "01": 3_297_792 * 4 / 1e6,
    "06": 2 * (4 - 1) / 4 * 4 * 8 * 32 * 256 / 1e3,
    "11": (1 - (150 / 16) / (100 / 8)) * 100,
    "12": (8 - 1) / (26 + 8 - 1),
}


@pytest.mark.parametrize("drop, answer", FIRST.items())
def test_a_readers_first_line_is_answered_in_a_sentence(drop, answer):
    asked = importlib.import_module(f"drops.d{drop}").first_line
    (path,) = (path for path in notebooks() if path.name.startswith(drop))
    first = [cell.source for cell in nbformat.read(path, 4).cells[:5] if cell.cell_type == "code"]
    assert any(f"d{drop}.first_line(...)" in source for source in first)
    assert asked(...).kind == "not started" and asked("many").kind == "wrong"
    assert asked(answer).kind == "right", asked(answer)
    for wrong in (3 * answer, answer / 4):
        assert asked(wrong).kind == "wrong" and f"{wrong:,} is not the number. " in asked(wrong).text


def test_the_first_layout_of_drop_13_is_right_or_refused_with_a_reason():
    right = d13.first_line(d=8, t=2, p=2)
    assert right.kind == "right" and "`plan.why(dp=8, tp=2, pp=2)`" in right.text
    assert d13.first_line(d=..., t=2, p=2).kind == "not started"
    for sizes, said in {
        (8, 2, 4): "8 · 2 · 4 is 64, and there are 32.",
        (2, 16, 1): "tp 16 does not divide 56 attention heads",
        (1, 1, 32): "48 layers do not divide over 32 stages",
        (0.5, 64, 1): "a whole number",
    }.items():
        told = d13.first_line(**dict(zip("dtp", sizes)))
        assert told.kind == "wrong" and said in told.text


def test_no_answer_is_revealed_that_is_no_option():
    with pytest.raises(ValueError, match="not among the options"):
        predict("How much?", "a", "b").reveal("about twice")


def test_a_plan_for_pytorch_may_name_parts_by_patterns(world):
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = lambda: {"*.[qkgu]*": columns(), "*.v": columns(), "*.out": rows(), "mlp.down": rows()}
    assert d06.all_reduces(world, plan) == d06.all_reduces(world, d06.usual_plan)
    for key in ("mlp.d?", 3):
        with pytest.raises(ValueError, match=re.escape(f"The block has no part called {key!r}")):
            d06.all_reduces(world, lambda: {key: columns(), "mlp.up": columns()})
