"""b2's third practice: a step of the toy on a grid of data and context parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector

from .... import toy
from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong


def cut_step(model, tokens, targets, at, everywhere, dp, cp):
    """Forward and backward with the batch over the group dp and the sequence over the group cp. Return the
    loss of this rank's tokens; leave the gradients of the whole batch in the model.

    tokens, targets: (b/d, s/c), mine. at: (s/c,), their positions. everywhere: (s,), the positions of all
    tokens in the order in which the ranks of cp bring them.
    """
    x = model[0].token(tokens) + model[0].position.weight[at]
    mask = at[:, None] >= everywhere
    for block in model.blocks:
        x = toy.context_block(block, x, mask, cp)
    loss = toy.loss_of(model[-1](x), targets)
    loss.backward()
    toy.average_gradients(model)
    return loss.item()


def _variant(
    embed=lambda part, tokens, at: part.token(tokens) + part.position.weight[at],
    mask=lambda at, everywhere: at[:, None] >= everywhere,
    run=lambda block, x, mask, dp, cp: toy.context_block(block, x, mask, cp),
    average=lambda model, dp, cp: toy.average_gradients(model),
):
    """cut_step with one thing done otherwise."""

    def attempt(model, tokens, targets, at, everywhere, dp, cp):
        x, allowed = embed(model[0], tokens, at), mask(at, everywhere)
        for block in model.blocks:
            x = run(block, x, allowed, dp, cp)
        loss = toy.loss_of(model[-1](x), targets)
        loss.backward()
        average(model, dp, cp)
        return loss.item()

    return attempt


_here = lambda at: torch.arange(len(at))
_embed_here = lambda part, tokens, at: part.token(tokens) + part.position.weight[: len(at)]
_mask_here = lambda at, everywhere: _here(at)[:, None] >= _here(everywhere)
OTHERS = {
    "mask by local positions": (
        _variant(mask=_mask_here),
        "The mask compares places in this rank's part with places among all tokens. Where a token stands in"
        " the text is in `at`, for mine, and in `everywhere`, for all.",
    ),
    "positions that start at 0 on every rank": (
        _variant(_embed_here),
        "Each rank embeds its tokens as 0 to s/c − 1. Learned positions, and rotary ones too, need the place"
        " in the whole text: `at`.",
    ),
    "positions and mask that start at 0 on every rank": (
        _variant(_embed_here, _mask_here),
        "Both the embedding and the mask take a token's place in this rank's part. `at` and `everywhere` hold"
        " the places in the whole text.",
    ),
    "tokens without positions": (
        _variant(lambda part, tokens, at: part.token(tokens)),
        "The embedding has two parts: the token, and its place. model[0].position.weight[at] is missing.",
    ),
    "keys taken in the text's order": (
        _variant(mask=lambda at, everywhere: at[:, None] >= _here(everywhere)),
        "The ranks of cp bring their tokens zig-zag. `everywhere` says where in the text each one stands.",
    ),
    "a token that does not see itself": (
        _variant(mask=lambda at, everywhere: at[:, None] > everywhere),
        "A token looks at itself too, and the first one at nothing else: at[:, None] >= everywhere.",
    ),
    "a mask turned round": (
        _variant(mask=lambda at, everywhere: at[:, None] <= everywhere),
        "Your tokens look at what comes after them. The mask says which keys stand no later.",
    ),
    "no mask": (
        _variant(mask=lambda at, everywhere: at[:, None] >= torch.zeros_like(everywhere)),
        "Every token looks at all others, at those that come after it too. at[:, None] >= everywhere says who"
        " may be looked at.",
    ),
    "attention to this rank's tokens alone": (
        _variant(run=lambda block, x, mask, dp, cp: block(x)),
        "A block that is called as it is knows the tokens of this rank. toy.context_block(block, x, mask, cp)"
        " gathers the keys and values of all.",
    ),
    "keys gathered over dp": (
        _variant(run=lambda block, x, mask, dp, cp: toy.context_block(block, x, mask, dp)),
        "The ranks of dp have other sequences. The rest of this one is on the ranks of cp.",
    ),
    "gradients summed over dp alone": (
        _variant(average=lambda model, dp, cp: toy.average_gradients(model, dp)),
        "The ranks of cp hold the same weights and saw other tokens: their gradients are shares too. The"
        " gradients' group is dp·cp.",
    ),
    "gradients summed over cp alone": (
        _variant(average=lambda model, dp, cp: toy.average_gradients(model, cp)),
        "The ranks of dp saw other sequences. The gradients' group is dp·cp.",
    ),
    "gradients of this rank alone": (
        _variant(average=lambda model, dp, cp: None),
        "Every rank saw some tokens of the batch. Average the gradients over all of dp·cp, as in data"
        " parallelism.",
    ),
    "the sum where the mean was meant": (
        _variant(average=lambda model, dp, cp: _times(model, dist.get_world_size())),
        "The twin's loss is the mean over all tokens. Each rank's is the mean over its own: the gradients"
        " are averaged over dp·cp, not summed.",
    ),
    "averaged twice": (
        _variant(average=lambda model, dp, cp: _times(model, 1 / dist.get_world_size())),
        "The gradients are the twin's, divided by the number of ranks once more.",
    ),
}


def _times(model, factor: float) -> None:
    toy.average_gradients(model)
    for p in model.parameters():
        p.grad *= factor


def _on_rank(attempt) -> dict:
    """What came of the attempt on this rank, and with which of the known mistakes it agrees."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = grid["dp"].get_group(), grid["cp"].get_group()
    places = toy.zigzag(16, 2)
    at, everywhere = places[dist.get_rank(cp)], torch.cat(places)
    new = lambda: toy.ToyTransformer(hidden=32, layers=2, seq_len=16).double()
    batch = toy.make_batch(4, 16)
    twin = new()
    whole = toy.twin_step(twin, *batch)
    mine = [toy.my_share(x, dist.get_rank(dp), 2)[:, at] for x in batch]
    flat = lambda model: parameters_to_vector(
        [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    )

    def run(step):
        model = new()
        loss = step(model, *mine, at.clone(), everywhere.clone(), dp, cp)
        return (loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss), flat(model)

    loss, gradients = run(attempt)
    near = lambda a, b: torch.allclose(a, b, rtol=1e-7, atol=1e-10)
    facts = {"loss": loss, "whole": whole, "right": near(gradients, flat(twin)), "like": []}
    facts["none"] = not gradients.any()
    somewhere_wrong = torch.tensor(float(not facts["right"]))
    dist.all_reduce(somewhere_wrong, op=dist.ReduceOp.MAX)
    if somewhere_wrong:  # on all ranks, since they meet in these
        facts["like"] = [name for name, (other, _) in OTHERS.items() if near(gradients, run(other)[1])]
    return facts


def _judge(attempt) -> Answer:
    with World(4, timeout=10) as world:
        results = world.run(_on_rank, attempt)
    if any(not isinstance(r["loss"], float) for r in results):
        return wrong("no loss", f"Rank 0 returned {results[0]['loss']!r}; return the loss of its tokens.")
    mean = sum(r["loss"] for r in results) / 4
    figures = [("mean of the ranks' losses", f"{mean:.6f}", f"{results[0]['whole']:.6f}, the twin's")]
    if any(r["none"] for r in results):
        return wrong("no gradients", "Run loss.backward() and leave the gradients in the model.", *figures)
    if not all(r["right"] for r in results):
        for name, (_, why) in OTHERS.items():
            if all(name in r["like"] or r["right"] for r in results):
                return wrong(name, why, *figures)
        return wrong(
            "other gradients than the twin's",
            "Four places to look at: the positions that are embedded, the mask, the group that K and V are"
            " gathered over, and the group that gradients are averaged over.",
            *figures,
        )
    if abs(mean - results[0]["whole"]) > 1e-7:
        return wrong(
            "another loss than the twin's",
            "The gradients are right. Return the loss of this rank's tokens, whose mean over the ranks is the"
            " twin's.",
            *figures,
        )
    return right("On a grid of dp 2 × cp 2 every rank's gradients are the twin's.", *figures)


step = Exercise(
    "a step with the sequence cut",
    cut_step,
    _judge,
    minutes=12,
    hints=[
        "Write the step of one process first: embed, blocks, head, loss, backward. Then ask of each part:"
        " does it need to know where a token stands, or what other ranks hold?",
        "The embedding is model[0].token(tokens) + model[0].position.weight[…]: the places in the text. The"
        " mask says for each of my tokens which of all tokens stand no later.",
        "toy.context_block(block, x, mask, cp) runs a block. toy.average_gradients(model, group) averages"
        " over a group; without one, over all ranks.",
    ],
)
