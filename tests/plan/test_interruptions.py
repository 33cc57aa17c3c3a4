"""What lost GPUs cost: goodput (the share of time that trains), and the layout that continues."""

import re
from dataclasses import replace

import pytest

from three_axes.plan import CLUSTERS, Job, Layout, estimate
from three_axes.plan.interruptions import Interruptions, going_on, interruptions, what_it_stops
from three_axes.plan.job import Lora
from three_axes.plan.models import find_model

JOB = Job(find_model("llama-3-70b"), CLUSTERS["dgx-h100"], 128, 8192)


def test_llama_3_trained_for_as_much_of_the_time_as_the_manual_says():
    job = Job(find_model("llama-3-405b"), CLUSTERS["dgx-h100"], 2048, 8192)
    seen = interruptions(estimate(job, Layout(dp=128, tp=8, pp=16)))
    assert seen.between == pytest.approx(54 * 86400 / 419) and f"{seen.goodput:.1%}" == "92.6%"


def test_the_layout_that_continues_without_a_node():
    goes_on = lambda **sizes: going_on(estimate(JOB, Layout(**sizes))).layout
    assert goes_on(dp=4, tp=8, pp=2).dp == 2  # three replicas are left, and 3 does not divide 128 sequences
    assert goes_on(dp=8, tp=4, pp=2).dp == 4  # a node has halves of two replicas: six are left
    assert goes_on(dp=64, zero=3).dp == 32
    alone = [Layout(tp=8, pp=8), Layout(dp=2, tp=4)]
    assert [going_on(estimate(JOB, layout)) for layout in alone] == [None, None]
    assert what_it_stops(estimate(JOB, Layout())).startswith("The only one")
    said = lambda **sizes: what_it_stops(estimate(JOB, Layout(zero=1, **sizes)))
    assert "DP 2 could go on, on 32 GPUs" in said(dp=4, tp=8, pp=2)
    assert re.search(r"nothing can go on: DP 4 would need \d\d\.\d GB", said(dp=8, tp=8))


def test_a_checkpoint_has_what_outlives_a_step():
    size = lambda job: interruptions(estimate(job, Layout(dp=8, tp=8))).size
    assert size(JOB) == 14 * JOB.model.params
    small = replace(JOB, lora=Lora(16))
    assert size(small) < size(JOB) / 100


def test_goodput_is_0_where_a_checkpoint_never_ends():
    assert Interruptions(60.0, 1e12, 1e6).goodput == 0.0
