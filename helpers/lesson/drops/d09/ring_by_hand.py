"""Drop 09's second practice: a reduce-scatter around a ring."""

from __future__ import annotations

import re

import numpy as np
import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.traffic import Traffic
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


LENGTH = 24_000  # of x, in the check: 2, 3 and 4 ranks divide it


def _judge_scatter(attempt) -> Answer:
    for n in (4, 3, 2):
        with World(n, timeout=4) as world:
            try:
                results = world.run(_scatter_on_rank, attempt, LENGTH)
                traffic = world.traffic
                watched = None
                if not all(r["shape"] or r["right"] for r in results):
                    watched = world.run(_watched_on_rank, attempt)
            except RankError as e:
                return _named_crash(e, n)
        if mistake := _wrong_chunk(results, watched, traffic.not_waited, n):
            return mistake
        sent, size, allowed = max(traffic.counted), 8 * LENGTH, book("reduce_scatter", 8 * LENGTH, n)
        figures = [
            (
                f"bytes sent by the busiest of {n} ranks, in units of S",
                f"{sent / size:.2f}",
                f"{allowed / size:.2f}",
            ),
            ("gloo's own", f"{gloo('reduce_scatter', size, n) / size:.2f}", ""),
        ]
        if mistake := _wasteful(traffic, size, allowed, n, figures):
            return mistake
    return right("The textbook's bytes, half of what gloo's own reduce-scatter sends.", *figures)


def _wrong_chunk(results: list[dict], watched: list | None, forgotten: int, n: int) -> Answer | None:
    """What is wrong with what the ranks return, if anything is. forgotten: messages nobody waited for."""
    for rank, r in enumerate(results):
        if r["shape"] is not None:
            return wrong(
                "not one chunk",
                f"On {n} ranks rank {rank} returns {r['shape']}; its chunk is float64 of ({LENGTH // n},).",
            )
        if not r["right"]:
            if r["mean"]:
                return wrong("the mean, not the sum", f"On {n} ranks the values are the sum divided by {n}.")
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
    return None


def _wasteful(traffic: Traffic, size: int, allowed: float, n: int, figures: list) -> Answer | None:
    """What sums rightly, and is no ring of chunks. size: bytes of x; allowed: that a rank may send."""
    if helped := {row.op for rows in traffic.ranks for row in rows} - {"send", "recv"}:
        return wrong(
            "another collective does the work",
            f"You called {', '.join(sorted(helped))}. Use sends and receives only: they are what it is made"
            " of.",
            *figures,
        )
    if max(traffic.counted) <= 1.05 * allowed:
        return None
    came = [sum(row.payload for row in rows if row.op == "recv") for rows in traffic.ranks]
    hub = max(range(n), key=lambda r: max(came[r], traffic.counted[r]))
    others = [max(came[r], traffic.counted[r]) for r in range(n) if r != hub]
    if n > 2 and max(came[hub], traffic.counted[hub]) >= 0.99 * (n - 1) * size and max(others) <= 1.01 * size:
        return wrong(
            "everything through one rank",
            f"The sum is right. But rank {hub} sends or receives {n - 1} times S, and no other rank more than"
            f" S: that grows with every rank you add. In a ring each rank sends S/{n} in each of {n - 1}"
            " steps.",
            *figures,
        )
    if min(traffic.counted) >= 0.99 * (n - 1) * size and n > 2:
        return wrong(
            "the whole tensor, not a chunk",
            f"The sum is right. But every rank sent the whole tensor, {n - 1} times. Cut it into {n} chunks"
            " and send one in each step.",
            *figures,
        )
    return wrong(
        "more bytes than a ring",
        f"The values are right, but the busiest rank sent {max(traffic.counted) / size:.2f} S. Each step"
        f" needs one chunk only, S/{n}, in {n - 1} steps.",
        *figures,
    )


def _named_crash(error: RankError, n: int) -> Answer:
    """A crash or a hang, with what is known of it."""
    standing = waits(error)
    doing = {at["op"] for at in standing.values()} if len(standing) == n else set()
    raised = [s.error.message for s in error.seen if s.error and not s.error.aborted]
    larger = re.search(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)", error.report)
    name = advice = None
    if doing == {"send"}:
        name = "everybody sends before anybody receives"
        advice = (
            "everybody sends before anybody receives, and a send may wait for its receiver. Begin the send"
            " with dist.isend, receive, then wait."
        )
    elif doing == {"recv"}:
        name = "everybody waits to receive"
        advice = (
            "everybody waits to receive, and what it waits for was not sent. Does a rank begin its send"
            " before it receives? Does it send to the next rank, and receive from the previous one?"
        )
    elif any("'tuple' object does not support item assignment" in message for message in raised):
        name = "a place of a tuple"
        advice = (
            "x.chunk gives a tuple, and you write to a place of it: `chunks = list(x.chunk(world_size))`."
        )
    elif larger and int(larger[1]) == 2 * int(larger[2]):
        name = "a buffer too small"
        advice = (
            f"a message of {int(larger[1]):,} bytes came for a buffer of {int(larger[2]):,}. The check's x is"
            " float64, and torch.empty makes float32: `torch.empty_like(chunk)` makes what fits."
        )
    return Answer("crashed", f"On {n} ranks{f' {advice}' if advice else ':'}\n\n{error.report}", name)


ring = Exercise(
    "a reduce-scatter by ring",
    ring_reduce_scatter,
    _judge_scatter,
    minutes=10,
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
