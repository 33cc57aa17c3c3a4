"""Drop 09's second practice: a reduce-scatter around a ring."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.world import World
from ....theory.collectives import book, gloo
from ...practice import Answer, Exercise, right, waits, wrong
from .. import rings
from ..rings import Half


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


def _watched_on_rank(attempt) -> tuple[list, list]:
    """What the attempt returns of numbers that tell their rank or chunk, and the messages it sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    run = lambda x: [rings.number(attempt(x, rank, n))]
    return rings.watched(run, n, torch.empty(8 * n, dtype=torch.float64))


WAY = Half(lambda r, k: r - k - 1, lambda r, k: r - k - 2, "add")
EARLY = Half(lambda r, k: r - k, lambda r, k: r - k - 1, "add")
LATE = Half(lambda r, k: r - k - 2, lambda r, k: r - k - 3, "add")
RISE = Half(lambda r, k: r + k + 1, lambda r, k: r + k + 2, "add")
STEPS = "There are n−1 steps: a chunk visits n ranks, and is on the first of them already."
START = "After n−1 steps the finished chunk must be number `rank`: receive that one last."
MISTAKES = (
    (
        "the numbers of drop 02's ring",
        f"Rank r ends with chunk r+1 finished, and returns chunk r. {START}",
        EARLY,
    ),
    (
        "the ring begins one chunk late",
        f"Rank r ends with chunk r−1 finished, and returns chunk r. {START}",
        LATE,
    ),
    ("one step too few", STEPS, WAY._replace(steps=lambda n: n - 2)),
    ("one step too many", STEPS, WAY._replace(steps=lambda n: n)),
    ("parts written over, not added", "Add what you receive to your own part.", WAY._replace(how="write")),
    (
        "added to the chunk just sent",
        "What you receive belongs to the chunk after the one you send, which you send in the next step.",
        WAY._replace(take=WAY.send),
    ),
    (
        "the chunks' numbers rise",
        "What rank r−1 sends in step k is the chunk that rank r adds to in step k, and sends in step k+1: its"
        " number falls by one for each rank. Yours rises.",
        RISE,
    ),
)


def _named(watched: list, n: int) -> Answer:
    """The mistake that on paper sends and returns just what this ring did; else where it parts from the sum.

    watched: for each rank, what `_watched_on_rank` read.
    """
    got, sent = [rank[0] for rank in watched], [rank[1] for rank in watched]

    def is_on_paper(half: Half, to: int = 1) -> bool:
        paper = rings.around(n, [half], to)
        own = np.stack([paper.chunks[r, r] for r in range(n)])[:, None]
        return rings.same(got, own) and rings.same(sent, paper.sent)

    for name, text, half in MISTAKES:
        if is_on_paper(half):
            return wrong(name, f"On {n} ranks: {text}")
    if is_on_paper(WAY, to=-1):
        return wrong(
            "the ring turned round",
            f"On {n} ranks you send to the previous rank and receive from the next one, with the numbers of a"
            " ring that goes the other way. Turn either the neighbours or the numbers.",
        )
    return wrong("another sum", f"On {n} ranks {rings.where_it_parts(got, n, own=True)}")


def _judge_scatter(attempt) -> Answer:
    length = 24_000
    for n in (4, 3, 2):
        with World(n, timeout=4) as world:
            try:
                results = world.run(_scatter_on_rank, attempt, length)
                traffic = world.traffic
                watched = None
                if not all(r["shape"] or r["right"] for r in results):
                    watched = world.run(_watched_on_rank, attempt)
            except RankError as e:
                standing = waits(e)
                if len(standing) == n and all(at["op"] == "send" for at in standing.values()):
                    return Answer(
                        "crashed",
                        f"On {n} ranks everybody sends before anybody receives, and a send may wait for its"
                        f" receiver. Begin the send with dist.isend, receive, then wait.\n\n{e.report}",
                        "everybody sends before anybody receives",
                    )
                return Answer("crashed", f"On {n} ranks:\n{e.report}")
        sent, counted, forgotten = traffic.wire, traffic.counted, traffic.not_waited
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
                if not forgotten:
                    return _named(watched, n)
        if forgotten:
            return wrong(
                "a message nobody waits for",
                f"On {n} ranks {forgotten} isend or irecv were begun and never waited for. Wait before you"
                " use what they bring, and before you change what they send: it may still be under way.",
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
