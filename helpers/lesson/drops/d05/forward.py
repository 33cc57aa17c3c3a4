"""One forward pass on every rank, followed from layer to layer."""

from __future__ import annotations

import torch.distributed as dist

from .... import toy
from ....runtime import current
from ....runtime.memory import saved_activations
from ....runtime.world import World
from ....table import Table, human

NAMES = ("embedding", "block 0", "block 1", "block 2", "block 3", "head")


def _follow() -> list[tuple[str, str, int, int]]:
    model = toy.ToyTransformer(hidden=64, seed=0)
    rank, size = dist.get_rank(), dist.get_world_size()
    x, targets = (toy.my_share(t, rank, size) for t in toy.make_batch(16, 16))
    current.count_from_here()
    sent = lambda: int(sum(row.payload for row in current.counted_so_far()))
    lines = [("tokens", " × ".join(map(str, x.shape)), 0, sent())]
    with saved_activations(model) as held:
        for name, layer in zip(NAMES, model):
            x = layer(x)
            lines.append((name, " × ".join(map(str, x.shape)), held.now, sent()))
        loss = toy.loss_of(x, targets)
        lines.append(("loss", f"{loss.item():.2f}", held.now, sent()))
    return lines


def forward(world: World) -> Table:
    """What each layer of one forward pass gives, how much is kept for backward by then, and what was sent.

    Every rank takes its share of 16 sequences of 16 tokens. Ranks must agree on all but the loss, which is
    shown for each.
    """
    ranks = world.run(_follow)
    if any(lines[:-1] != ranks[0][:-1] for lines in ranks):
        raise RuntimeError(
            "the ranks' forward passes differ in shape, in what they keep or in what they send"
        )
    losses = " | ".join(lines[-1][1] for lines in ranks)
    rows = [*ranks[0][:-1], ("loss", losses, *ranks[0][-1][2:])]
    return Table(
        ["after", "a rank has", "kept for backward", "sent so far"],
        [[name, has, human(kept), human(sent)] for name, has, kept, sent in rows],
        title=f"one forward on {len(ranks)} ranks, {16 // len(ranks)} sequences each",
    )
