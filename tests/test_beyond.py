"""The pieces of the toy beyond the three axes equal the twin: context parallelism."""

import pytest
import torch
import torch.distributed as dist

from helpers import toy
from helpers.toy import context


@pytest.mark.parametrize("way", ["gather", "ring", "exchange"])
@pytest.mark.parametrize("places", [toy.contiguous, toy.zigzag])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
def test_attention_to_other_ranks_keys_is_the_twins(world, way, places, heads):
    def run(ranks):
        members = list(range(ranks))
        group = dist.new_group(members)  # one smaller than the world, too
        if dist.get_rank() not in members:
            return True
        chance = torch.Generator().manual_seed(1)
        q, k, v, dy = (
            torch.randn(2, n, 16, 4, generator=chance, dtype=torch.float64)
            for n in (*heads, heads[1], heads[0])
        )
        at = places(16, ranks)
        mine = at[dist.get_rank(group)]
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        y, _ = context.attend(*whole, context.sees(torch.arange(16), torch.arange(16)))
        y.backward(dy)
        parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        got = getattr(context, f"{way}_attention")(*parts, at, group)
        got.backward(dy[:, :, mine])
        return torch.allclose(got, y[:, :, mine]) and all(
            torch.allclose(p.grad, w.grad[:, :, mine]) for p, w in zip(parts, whole)
        )

    for ranks in (4, 2):
        assert all(world.run(run, ranks))


def test_all_tokens_are_somewhere_and_zigzag_is_even():
    for c in (1, 2, 4, 8):
        for places in (toy.contiguous, toy.zigzag):
            assert sorted(torch.cat(places(64, c)).tolist()) == list(range(64))
        assert len({int((at + 1).sum()) for at in toy.zigzag(64, c)}) == 1


def test_heads_that_do_not_divide_are_refused(world):
    def run():
        x = torch.zeros(1, 6, 4, 4)
        try:
            toy.exchange_attention(x, x, x, toy.contiguous(16, 4))
        except ValueError as e:
            return str(e)

    assert world.run(run)[0] == "6 heads do not divide by 4 ranks; gather, or go round"


def test_a_rank_without_a_key_to_see_adds_nothing():
    q, k, v = (torch.randn(1, 1, n, 4) for n in (3, 5, 5))
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    y, lse = context.attend(q, k, v, mask)
    assert not y[0, 0, 1].any() and lse[0, 0, 1] == -torch.inf and torch.isfinite(y).all()
