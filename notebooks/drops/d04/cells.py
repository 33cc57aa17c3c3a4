"""Functions for the cells of drop 04's notebook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

from drops import lines, measured
from drops.measured import Step
from helpers import toy
from helpers.ranks import World, current
from three_axes.count import Timeline
from three_axes.paper import SCHEDULES, Schedule

line = lines.stage_sends  # the reader's, or the course's


def step_by(schedule: Schedule, chunks: dict[int, torch.nn.Module], batch: tuple, **options) -> float | None:
    """On a rank: run its part of a step by a schedule. chunks: stage -> its layers, for this rank's stages.
    options: of `toy.run_schedule`. Returns the loss on the rank of the last stage, None on others.
    """
    tokens, targets = (whole.chunk(schedule.m) for whole in batch)
    ops = schedule.ops[dist.get_rank()]
    return toy.run_schedule(chunks, ops, schedule.rank_of, tokens, targets, **options)


def timed_step(
    world: World,
    schedule: Schedule = SCHEDULES["GPipe"].make(4, 1),
    watch: Callable = lambda stage: nullcontext(),
) -> Timeline:
    """The timeline of one step of the toy by a schedule, by default with one microbatch. watch(stage): a
    context in which the step runs.
    """

    def run():
        stage = toy.split_depth(toy.ToyTransformer())
        for _ in range(2):  # the first is a warm-up
            current.count_from_here()
            dist.barrier()
            with watch(stage):
                step_by(schedule, {dist.get_rank(): stage}, toy.make_batch(16, 64), around=current.around)

    world.run(run)
    return world.timeline


def one_step(world: World) -> Step:
    """A step on four stages: the bytes that ranks sent, and the bytes that each keeps."""
    return measured.one_step(world, {"pp": 4}, toy.split_depth, toy.pipeline_step)


def answer(timeline: Timeline, shares: dict[str, float]) -> tuple[str]:
    """The arguments of `guess.reveal`: the share of the step in which a rank computed, in the mean."""
    worked = 1 - timeline.bubble
    nearest = min(shares, key=lambda option: abs(shares[option] - worked))
    fits = abs(shares[nearest] - worked) < 0.1
    return (nearest if fits else f"none of these: {worked:.0%} of it",)
