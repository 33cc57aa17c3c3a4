"""The defence of a plan in drop 14: its answers and its page."""

import re

import pytest

from drops import d14
from helpers.practice.defence import QUESTIONS, Defence
from three_axes.plan import CLUSTERS, FRAMEWORKS, Job, Layout, estimate, plan
from three_axes.plan.models import find_model


@pytest.fixture(scope="module")
def page():
    return Defence(d14.the_plan(), Layout(dp=4, tp=4, pp=4, zero=1))


def test_every_question_is_answered_with_figures(page):
    assert list(page.answers) == list(QUESTIONS)
    assert all(re.search(r"\d", answer) for answer in page.answers.values())
    assert "87.8 GB on a GPU of stage 0" in page.answers[QUESTIONS[0]]
    assert "3/35 = 8.6%" in page.answers[QUESTIONS[2]]


def test_with_a_third_of_the_memory_free_training_continues_without_a_node():
    the_plan = d14.the_plan()
    on_a_lost_gpu = lambda layout: Defence(the_plan, layout).answers[QUESTIONS[6]]
    assert "DP 2 could go on" in on_a_lost_gpu(Layout(dp=4, tp=8, pp=2, zero=1))
    assert "nothing can go on" in on_a_lost_gpu(the_plan.best.layout)  # 11 % of the memory is free
    assert "nothing can go on" in on_a_lost_gpu(Layout(dp=4, tp=4, pp=4, zero=1))


def test_layouts_of_every_kind_can_be_defended():
    for row in d14.the_plan().by_axes:
        defended = Defence(d14.the_plan(), row.layout)
        assert len(defended.answers) == 7 and defended.estimate.step_seconds == pytest.approx(row.seconds)
    with pytest.raises(ValueError, match="takes 32 GPUs, and there are 64"):
        Defence(d14.the_plan(), Layout(dp=4, tp=4, pp=2))
    with pytest.raises(ValueError, match="a batch of 128 does not divide"):
        Defence(d14.the_plan(), Layout(dp=64, microbatch=3))


def test_another_job_is_compared_where_nothing_fitted_the_first():
    large, small = (Job(find_model(name), CLUSTERS["dgx-h100"], 64, 64) for name in ("llama-3-405b", "toy"))
    layout = plan(small, gpus=8).best.layout
    defended = Defence(plan(large, gpus=8), layout)
    assert not defended.of.ranked
    assert defended._best(estimate(small, layout)) == "It is then the fastest."


JOBS = [  # model, GPUs, batch, tokens of a sequence, framework
    ("llama-3.2-1b", 1, 8, 2048, "textbook"),
    ("llama-3-8b", 8, 32, 4096, "textbook"),
    ("mixtral-8x7b", 64, 256, 4096, "megatron-lm"),
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
        assert ("does not run" in answers[QUESTIONS[0]]) == (not (mine.estimate.fits or mine.estimate.tight))
        assert ("may reserve more" in answers[QUESTIONS[0]]) == mine.estimate.tight
        assert ("between nodes" in answers[QUESTIONS[1]]) <= several
        piped = row.layout.pp > 1
        assert ("None" in answers[QUESTIONS[2]]) != piped and ("the bubble" in answers[QUESTIONS[3]]) <= piped
        assert ("of stage" in answers[QUESTIONS[0]]) == piped
        assert ("Nothing changes" in answers[QUESTIONS[4]]) >= (not several)
        assert ("over all nodes" in answers[QUESTIONS[5]]) <= several
        if row.layout.dp == gpus > 1 and row.layout.zero == 3:
            assert answers[QUESTIONS[5]] == "This is pure FSDP."
        judged = mine.proposal.verdict()
        assert judged.endswith(".") and " -" not in judged
        assert judged.count("Take it") <= (row is of.by_axes[0])
        assert judged.startswith("Do not take it") == (not (mine.estimate.fits or mine.estimate.tight))
        price = mine.proposal.cost(1e9)
        hours = float(re.search(r"take ([\d,]+) GPU-hours", price)[1].replace(",", ""))
        assert hours == pytest.approx(1e9 / mine.estimate.tokens_per_second_per_gpu / 3600, abs=1)
        if not (mine.estimate.fits or mine.estimate.tight):  # with half the batch it may
            assert "ahead of this one" not in answers[QUESTIONS[4]]


def test_the_page_is_whole_in_itself(page, tmp_path, capsys):
    page.report(tmp_path / "defence.html", tokens=1e12)
    printed, text = capsys.readouterr().out, (tmp_path / "defence.html").read_text()
    assert str(tmp_path / "defence.html") in printed and "1e+12 tokens take" in printed
    assert text.startswith("<!doctype html>") and "http" not in text.replace("http://www.w3.org", "")
    assert text.count("<img") == 2
    assert all(question in text for question in QUESTIONS) and "would change this choice" in text
    headings = [part.split("<")[0] for part in text.split("<h2>")[1:]]
    assert headings[:2] == ["Recommendation", "Alternatives"] and headings[-1] == "Assumptions"
    with pytest.raises(ValueError, match="ends in .html"):
        page.report(tmp_path / "defence.pdf")
