"""Functions for the cells of b2: attention over ranks in three ways, its bytes and its time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from helpers.emulate import networks
from helpers.ranks import World, current
from helpers.toy import context
from three_axes.count import Timeline, Traffic, clock

WAYS = {
    "gather": context.gather_attention,
    "ring": context.ring_attention,
    "all-to-all": context.exchange_attention,
}
CHUNKS = {"in order": context.contiguous, "zig-zag": context.zigzag}
# Emulated: a rank sends 7 MB/s inside its node, and a tenth of that out of it.
TWO_NODES = networks.four_ranks(7e6)[1]
PAIR = 3e-6  # emulated seconds for a query and a key in one head


def inputs(a: int, g: int, s: int, head: int = 32) -> list[torch.Tensor]:
    """q, k, v and dy, (1, heads, s, head), of all tokens, the same on every rank. a: number of query heads,
    g: of key/value heads.
    """
    chance = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, s, head, generator=chance) for n in (a, g, g, a)]


def traffic_of(world: World, way: str, g: int, a: int = 8, s: int = 512) -> Traffic:
    """Bytes of an attention, forward and backward. Raises RankError if its result is not one process's."""

    def run():
        *whole, dy = inputs(a, g, s)
        at = torch.arange(s)
        places = context.zigzag(s, dist.get_world_size())
        mine = places[dist.get_rank()]
        twin = [x.requires_grad_() for x in whole]
        y, _ = context.attend(*twin, context.sees(at, at))
        y.backward(dy)
        parts = [x.detach()[:, :, mine].requires_grad_() for x in whole]
        got = WAYS[way](*parts, places)
        got.backward(dy[:, :, mine])
        for part, all_ in [(got, y)] + [(p.grad, t.grad) for p, t in zip(parts, twin)]:
            assert torch.allclose(part, all_[:, :, mine], atol=1e-4), f"{way} is not the twin's"

    world.run(run)
    return world.traffic


def kept_per_rank(world: World, way: str, g: int, a: int = 8, s: int = 512) -> int:
    """Bytes of keys and values that a rank holds at once while it computes."""

    def run():
        *whole, _ = inputs(a, g, s)
        places = context.zigzag(s, dist.get_world_size())
        parts = [x[:, :, places[dist.get_rank()]] for x in whole]
        most = 0

        def watched(q, k, v, mask):
            nonlocal most
            most = max(most, k.nbytes + v.nbytes)
            return context.attend(q, k, v, mask)

        with torch.no_grad():
            WAYS[way](*parts, places, attend=watched)
        return most

    return max(world.run(run))


def _paced(q, k, v, mask):
    """`attend`, with a pause for its pairs and a span in the timeline."""
    with current.span("F"):
        time.sleep(PAIR * int(mask.sum()) * q.shape[1])
        return context.attend(q, k, v, mask)


def _forward(way: str, chunks: str, a: int, g: int, s: int) -> float:
    *whole, _ = inputs(a, g, s)
    places = CHUNKS[chunks](s, dist.get_world_size())
    parts = [x[:, :, places[dist.get_rank()]] for x in whole]
    with torch.no_grad():
        WAYS[way](*parts, places)  # a warm-up
        current.count_from_here()
        dist.barrier()
        start = time.monotonic()
        WAYS[way](*parts, places, attend=_paced)
    return time.monotonic() - start


def ring_timeline(world: World, chunks: str) -> Timeline:
    """The timeline of one forward of the ring, with emulated compute. chunks: 'in order' or 'zig-zag'."""
    world.run(_forward, "ring", chunks, 8, 8, 256)
    return world.timeline


def work(chunks: str, c: int = 4, s: int = 512) -> list[float]:
    """Pairs of a query and a key that each rank computes, in units of the mean."""
    places, mean = CHUNKS[chunks](s, c), s * (s + 1) / 2 / c
    return [int(context.sees(mine, torch.arange(s)).sum()) / mean for mine in places]


def ring_or_exchange(network: networks.Network) -> dict[str, float]:
    """Seconds of one forward of the ring and of the exchange on an emulated network, with emulated compute:
    the shortest of a few.
    """
    with World(4, fabric=network) as world:
        return {
            way: clock.shortest(lambda way=way: max(world.run(_forward, way, "zig-zag", 8, 2, 256)), float)
            for way in ("ring", "all-to-all")
        }


def answer() -> tuple[str, str, str]:
    """The arguments of `guess.reveal`: how long the busiest rank computes, the mean being 1."""
    return (
        f"{max(work('in order')):.2f}",
        "The last quarter looks at itself and at all before it.",
        "Computed",
    )
