"""The exercise and the defence of drop 14, and its training on the ranks of this machine."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from exercise_tests import *  # noqa: F403

from drops import d14
from helpers import World
from helpers.practice.defence import QUESTIONS, Defence
from helpers.train import Config
from three_axes.plan import CLUSTERS, FRAMEWORKS, Job, Layout, meeting, plan
from three_axes.plan.models import find_model


def with_bubble(bubble):
    return lambda n, d, t, p, m, node: (
        d14.meeting(n, d, t, p, m, node)[0],
        bubble(p, m),
        d14.meeting(n, d, t, p, m, node)[2],
    )


def with_crossing(crossing):
    return lambda n, d, t, p, m, node: (*d14.meeting(n, d, t, p, m, node)[:2], crossing(d, t, p, node))


MISTAKES = [
    (d14.defend, lambda n, d, t, p, m, node: n, "wrong", "not three answers"),
    (d14.defend, lambda n, d, t, p, m, node: (1.0, 0.1, ["dp"]), "wrong", "not three answers"),
    (d14.defend, with_bubble(lambda p, m: 0.5), "wrong", "another bubble"),
    (
        d14.defend,
        with_crossing(lambda d, t, p, node: {"dp"} if d * t * p > node else set()),
        "wrong",
        "groups misplaced",
    ),
    (
        d14.defend,
        with_crossing(
            lambda d, t, p, node: {axis for axis, k, s in (("dp", d, t), ("pp", p, t * d)) if k * s > node}
        ),
        "wrong",
        "an axis of size one",
    ),
    (
        d14.defend,
        with_crossing(lambda d, t, p, node: {"tp"} if t > 1 and d * t * p > node else set()),
        "wrong",
        "groups misplaced",
    ),
    (d14.defend, lambda n, d, t, p, m, node: 1 / 0, "crashed", None),
]


@pytest.fixture(scope="module")
def page():
    return Defence(d14.the_plan(), Layout(dp=4, tp=4, pp=4, zero=1))


def test_every_question_is_answered_with_figures(page):
    assert list(page.answers) == list(QUESTIONS)
    assert all(re.search(r"\d", answer) for answer in page.answers.values())
    assert (
        "78.8 GB on a GPU of stage 0" in page.answers[QUESTIONS[0]]
        and "3/35 = 8.6%" in page.answers[QUESTIONS[2]]
    )


def test_layouts_of_every_kind_can_be_defended():
    for row in d14.the_plan().by_axes:
        defended = Defence(d14.the_plan(), row.layout)
        assert len(defended.answers) == 6 and defended.estimate.step_seconds == pytest.approx(row.seconds)
    with pytest.raises(ValueError, match="takes 32 GPUs, and there are 64"):
        Defence(d14.the_plan(), Layout(dp=4, tp=4, pp=2))
    with pytest.raises(ValueError, match="a batch of 128 does not divide"):
        Defence(d14.the_plan(), Layout(dp=64, microbatch=3))


JOBS = [
    ("llama-3.2-1b", 1, 8, 2048, "textbook"),
    ("llama-3-8b", 8, 32, 4096, "textbook"),
    pytest.param("llama-3-8b", 8, 32, 4096, "torchtitan", marks=pytest.mark.slow),
    ("mixtral-8x7b", 64, 256, 4096, "megatron-lm"),
    pytest.param("llama-2-13b", 16, 64, 4096, "megatron-lm", marks=pytest.mark.slow),
    pytest.param("llama-3-70b", 64, 128, 8192, "deepspeed", marks=pytest.mark.slow),
    pytest.param("gpt3-175b", 1024, 1536, 2048, "textbook", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, gpus, batch, seq_len, framework", JOBS)
def test_no_sentence_is_false_of_any_job(name, gpus, batch, seq_len, framework):
    """The best of each (dp, tp, pp), those that are tight and those that do not fit, from 1 GPU to 1,024."""
    of = plan(Job(find_model(name), CLUSTERS["dgx-h100"], batch, seq_len, FRAMEWORKS[framework]), gpus=gpus)
    several = gpus > 8
    for row in [*of.by_axes[:4], *of.tight[:1], *of.too_large[:1]]:
        mine = Defence(of, row.layout)
        answers = mine.answers
        for question, answer in answers.items():
            assert re.match(r"[A-Z0-9(]", answer) and answer.endswith("."), (question, answer)
            assert " -" not in answer.split(" ahead")[0][-8:], answer  # nothing is ahead by less than nothing
        assert ("does not run" in answers[QUESTIONS[0]]) == (not mine.estimate.fits)
        assert ("within the error" in answers[QUESTIONS[0]]) == (row in [*of.tight[:1]])
        assert ("between nodes" in answers[QUESTIONS[1]]) <= several
        piped = row.layout.pp > 1
        assert ("None" in answers[QUESTIONS[2]]) != piped and ("the bubble" in answers[QUESTIONS[3]]) <= piped
        assert ("of stage" in answers[QUESTIONS[0]]) == piped
        assert ("Nothing changes" in answers[QUESTIONS[4]]) >= (not several)
        assert ("over all nodes" in answers[QUESTIONS[5]]) <= several
        if row.layout.dp == gpus > 1 and row.layout.zero == 3:
            assert answers[QUESTIONS[5]] == "This is pure FSDP."
        judged = meeting.verdict(mine.estimate, of)
        assert (
            judged.endswith(".") and " -" not in judged and judged.count("Take it") <= (row is of.by_axes[0])
        )
        assert judged.startswith("Do not take it") == (not mine.estimate.fits)
        hours = float(
            re.search(r"take ([\d,]+) GPU-hours", meeting.cost(mine.estimate, of, 1e9))[1].replace(",", "")
        )
        assert hours == pytest.approx(1e9 / mine.estimate.tokens_per_second_per_gpu / 3600, abs=1)
        assert len(meeting.alternatives(mine.estimate, of, mine.pure).rows) >= (2 if gpus > 1 else 1)
        assert meeting.changes(mine.estimate, of).rows and meeting.assumptions(mine.estimate)
        if not mine.estimate.fits:  # with half the batch it may
            assert "ahead of this one" not in answers[QUESTIONS[4]]


def test_the_page_is_whole_in_itself(page, tmp_path, capsys):
    page.report(tmp_path / "defence.html", tokens=1e12)
    printed, text = capsys.readouterr().out, (tmp_path / "defence.html").read_text()
    assert str(tmp_path / "defence.html") in printed and "1e+12 tokens take" in printed
    assert (
        text.startswith("<!doctype html>")
        and "http" not in text.replace("http://www.w3.org", "")
        and text.count("<img") == 2
    )
    assert all(question in text for question in QUESTIONS) and "would change this choice" in text
    headings = [part.split("<")[0] for part in text.split("<h2>")[1:]]
    assert headings[:2] == ["Recommendation", "Alternatives"] and headings[-1] == "Assumptions"
    with pytest.raises(ValueError, match="ends in .html"):
        page.report(tmp_path / "defence.pdf")


@pytest.mark.parametrize(
    "choice",
    [
        dict(dp=2, tp=2, pp=2),
        *(
            pytest.param(choice, marks=pytest.mark.slow)
            for choice in (
                dict(dp=4, pp=2),
                dict(dp=4, tp=2),
                dict(dp=8),
                dict(dp=2, tp=4),
                dict(dp=2, tp=2, cp=2),
            )
        ),
    ],
    ids=str,
)
def test_every_byte_of_a_training_step_is_predicted(choice):
    with World(8, timeout=120) as world:
        table = d14.three_ways(
            world, Config(hidden=64, seq_len=32, batch=32, microbatch=4, steps=2, **choice)
        )
    assert len(table.rows) == sum(size > 1 for size in choice.values()) + 1
    for what, predicted, counted in table.rows:
        assert predicted == counted, what


def test_accelerate_trains_the_same_model_to_the_same_loss():
    config = Config(hidden=32, seq_len=16, batch=16, steps=5, warmup=2)
    with World(4, timeout=60) as world:
        losses = world.run(d14.with_accelerate, config, 5)
    assert losses[0] == losses[3] == pytest.approx(d14.twin(config, 5), rel=1e-5)


def test_accelerate_shards_over_gpus():
    """Its state is told that these CPU ranks are GPUs, so that what it would do there runs here."""

    def on_gpus(config, steps):
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        d14.as_launched()
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return d14.with_accelerate(config, steps)

    config = Config(hidden=32, seq_len=16, batch=16, steps=5, warmup=2)
    with World(4, timeout=60) as world:
        losses = world.run(on_gpus, config, 5)
        ops = {row.op for row in world.traffic.ranks[0]}
    assert losses[0] == losses[3] == pytest.approx(d14.twin(config, 5), rel=1e-5)
    assert {"all_gather", "reduce_scatter"} <= ops, "FSDP did not shard"


def test_a_world_for_every_machine():
    of = lambda n, *sizes: tuple(d14.layout_here(n, Layout(**dict(zip(("dp", "tp", "pp"), sizes)))).values())
    assert [of(n, 4, 8, 2) for n in (8, 4, 2, 1)] == [(2, 2, 2), (1, 2, 2), (1, 2, 1), (1, 1, 1)]
    assert of(8, 64, 1, 1) == (8, 1, 1) and of(8, 16, 4, 1) == (4, 2, 1) and of(8, 8, 8, 1) == (4, 2, 1)
    for layout in itertools.product((1, 2, 4, 8, 16, 64), repeat=3):
        for n in (1, 2, 4, 8):
            sizes = of(n, *layout)
            assert math.prod(sizes) == n and sizes[2] <= 4
            Config(**d14.layout_here(n, Layout(dp=layout[0], tp=layout[1], pp=layout[2]))).checked(n)


def test_a_notebook_that_is_interrupted_goes_on(tmp_path):
    config = Config(dp=2, hidden=32, seq_len=16, batch=16, steps=4, every=2, out=str(tmp_path))
    with World(2, timeout=60) as world:
        assert d14.train_on(world, config) == "4 steps are done."
        assert d14.train_on(world, replace(config, steps=6)).startswith("going on from step-000004")
    assert [p.name for p in sorted(Path(tmp_path).glob("step-*"))] == [
        "step-000002",
        "step-000004",
        "step-000006",
    ]
