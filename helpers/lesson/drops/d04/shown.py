"""Drop 04, what its cells show: one step on the clock, and how little of it each stage works."""

from __future__ import annotations

import torch.distributed as dist

from .... import toy
from ....runtime import clock
from ....runtime.clock import Timeline
from ....runtime.world import World
from ....theory.schedules import gpipe


def timed_step(world: World, hidden: int = 256, b: int = 16, s: int = 64) -> Timeline:
    """One step of the pipeline with one batch, on the clock."""

    def run():
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = toy.split_depth(toy.ToyTransformer(hidden, seed=0))
        tokens, targets = toy.make_batch(b, s)
        for record in (False, True):  # once to warm up
            dist.barrier()
            toy.run_schedule(
                {rank: stage},
                gpipe(p, 1).ops[rank],
                list(range(p)),
                [tokens],
                [targets],
                **{"around": clock.around} if record else {},
            )

    world.run(run)
    return world.timeline


def together(timeline: Timeline) -> float:
    """Share of the working time in which more than one rank worked."""
    spans = [s for row in timeline.rows for s in row if s.kind in clock.COMPUTE]
    edges = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
    working = several = 0.0
    busy = 0
    for (at, change), (then, _) in zip(edges, edges[1:]):
        busy += change
        working += (then - at) * (busy > 0)
        several += (then - at) * (busy > 1)
    return several / working


def working(timeline: Timeline) -> float:
    """Share of the step in which a rank computed, from the first forward to the last backward; the mean of
    the ranks.
    """
    spans = [s for row in timeline.rows for s in row if s.kind in clock.COMPUTE]
    step = max(s.end for s in spans) - min(s.start for s in spans)
    return sum(s.end - s.start for s in spans) / step / len(timeline.rows)
