"""Drop 09's second practice: a reduce-scatter around a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.world import World
from ....theory.collectives import book, gloo
from ...practice import Answer, Exercise, right, wrong

# -- states ------------------------------------------------------------------------------------


def ring_reduce_scatter(x, rank, world_size):
    """Sum x over the ranks and return this rank's chunk of the sum: x.chunk(world_size)[rank]. x divides
    evenly.

    Use dist.isend and dist.recv around the ring.
    """
    chunks = list(x.clone().chunk(world_size))
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        give, take = (rank - step - 1) % world_size, (rank - step - 2) % world_size
        sending = dist.isend(chunks[give], after)
        received = torch.empty_like(chunks[take])
        dist.recv(received, before)
        sending.wait()
        chunks[take] += received
    return chunks[rank]


def _scatter_on_rank(attempt, length: int):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.arange(length, dtype=torch.float64) * (rank + 1)
    whole = torch.arange(length, dtype=torch.float64) * (n * (n + 1) / 2)
    got = attempt(x.clone(), rank, n)
    parts = whole.chunk(n)
    if not isinstance(got, torch.Tensor) or got.shape != parts[rank].shape or got.dtype != x.dtype:
        return {
            "shape": (
                f"{got.dtype} of {tuple(got.shape)}".removeprefix("torch.")
                if isinstance(got, torch.Tensor)
                else type(got).__name__
            )
        }
    return {
        "shape": None,
        "right": torch.equal(got, parts[rank]),
        "whose": next((i for i, part in enumerate(parts) if torch.equal(got, part)), None),
        "mean": torch.allclose(got, parts[rank] / n),
    }


def _judge_scatter(attempt) -> Answer:
    length = 24_000
    for n in (4, 3, 2):
        with World(n, timeout=4) as world:
            try:
                results = world.run(_scatter_on_rank, attempt, length)
            except RankError as e:
                if e.kind == "timeout" and all(
                    s.where and s.where["in"] and s.where["in"]["op"] == "send" for s in e.seen if s.where
                ):
                    return Answer(
                        "crashed",
                        f"On {n} ranks everybody sends before anybody receives, and a send may wait for its"
                        f" receiver. Begin the send with dist.isend, receive, then wait.\n\n{e.report}",
                        "everybody sends before anybody receives",
                    )
                return Answer("crashed", f"On {n} ranks:\n{e.report}")
            sent, counted, forgotten = world.traffic.wire, world.traffic.counted, world.traffic.not_waited
        for rank, r in enumerate(results):
            if r["shape"] is not None:
                return wrong(
                    "not one chunk",
                    f"On {n} ranks rank {rank} returns {r['shape']}; its chunk is float64 of"
                    f" ({length // n},).",
                )
            if not r["right"]:
                if r["mean"]:
                    return wrong(
                        "the mean, not the sum", f"On {n} ranks the values are the sum divided by {n}."
                    )
                if r["whose"] is not None:
                    return wrong(
                        "another rank's chunk",
                        f"On {n} ranks rank {rank} ends with chunk {r['whose']}. The sum is complete: begin"
                        " the ring one place earlier or later.",
                    )
                if forgotten:
                    return wrong(
                        "a message nobody waits for",
                        "An isend or irecv was begun and never waited for. Wait before you use what it"
                        " brings, and before you change what it sends.",
                    )
                return wrong(
                    "another sum",
                    f"On {n} ranks the chunk of rank {rank} is not the sum over all ranks. In each of {n - 1}"
                    " steps a rank adds what it receives to the chunk that it will pass on next.",
                )
        size, allowed = 8 * length, book("reduce_scatter", 8 * length, n)
        most = max(s if s is not None else c for s, c in zip(sent, counted))
        figures = [
            (
                f"bytes sent by the busiest of {n} ranks, in units of S",
                f"{most / size:.2f}",
                f"{allowed / size:.2f}",
            ),
            ("gloo's own", f"{gloo('reduce_scatter', size, n) / size:.2f}", ""),
        ]
        if most > 1.05 * allowed:
            least = min(s if s is not None else c for s, c in zip(sent, counted))
            name = (
                "everything through one rank"
                if most > 1.5 * least
                else (
                    "an all-reduce, of which most is thrown away"
                    if n == 4 and abs(most / (2 * allowed) - 1) < 0.1
                    else "more bytes than a ring"
                )
            )
            return wrong(
                name,
                f"The values are right, but the busiest rank sent {most / size:.2f} S. Each step needs one"
                f" chunk only, S/{n}, in {n - 1} steps.",
                *figures,
            )
    return right("The textbook's bytes, half of what gloo's own reduce-scatter sends.", *figures)


ring = Exercise(
    "a reduce-scatter by ring",
    ring_reduce_scatter,
    _judge_scatter,
    hints=[
        (
            "It is the first half of drop 02's ring: world_size - 1 steps, in each of which a rank sends one"
            " chunk on, receives one, and adds."
        ),
        (
            "You must end with chunk number `rank`. So the last chunk that you receive, and add to, is that"
            " one: in step k receive chunk rank - k - 2."
        ),
        "In step k send chunk (rank - k - 1) % world_size: it is the one you added to in the step before.",
    ],
)
