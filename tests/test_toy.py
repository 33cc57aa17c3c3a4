"""Each split of the toy model equals its twin: loss, gradients and weights, over three steps."""

import pytest
import torch
import torch.distributed as dist

from helpers import toy

STEPS, RATE = 3, 0.1


def twin(tied=False, frozen=False, **sizes):
    return prepare(toy.ToyTransformer(seed=0, **sizes), tied, frozen)


def prepare(model, tied, frozen):
    model.double()
    if tied:
        model[-1].score.weight = model[0].token.weight
    if frozen:
        model[2].mlp.up.weight.requires_grad_(False)
    return model


def train(model, step):
    losses, gradients = [], []
    for i in range(STEPS):
        model.zero_grad()
        losses.append(step(model, *toy.make_batch(8, 16, seed=i)))
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
    return losses, gradients, [p.detach().clone() for p in model.parameters()]


def on_ranks(scheme, tied, frozen, sizes):
    """Train split; return, on each rank, what its parameters should be compared with, and how."""
    group = dist.new_group(list(range(sizes.pop("ranks"))))
    if dist.get_rank() >= dist.get_world_size(group) or dist.get_rank(group) < 0:
        return None
    model = prepare(toy.ToyTransformer(seed=dist.get_rank(), **sizes), tied, frozen)  # agreement has to be earned
    toy.share_weights(model, group)
    if scheme == "data":
        return train(model, lambda *a: toy.data_parallel_step(*a, group=group))
    if scheme == "tensor":
        return train(toy.split_width(model, group), toy.tensor_parallel_step)
    return train(toy.split_depth(model, group), lambda *a: toy.pipeline_step(*a, group=group))


def same(a, b):
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def cut(tensors, names, scheme, rank, size):
    """The twin's tensors as `rank` holds them after the split."""
    kept = []
    for name, t in zip(names, tensors):
        stage, matrix = int(name.split(".")[0]), name.split(".")[-2]
        if scheme == "pipeline":
            each = 4 // size
            owner = 0 if stage == 0 else size - 1 if stage == 5 else (stage - 1) // each
            if owner != rank:
                continue
        if scheme == "tensor" and t is not None and matrix in ("q", "k", "v", "up"):
            t = t.chunk(size, 0)[rank]
        if scheme == "tensor" and t is not None and matrix in ("out", "down"):
            t = t.chunk(size, 1)[rank]
        kept.append(t)
    return kept


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme, tied, frozen", [("data", False, False), ("data", True, True), ("tensor", False, False),
                                                  ("tensor", True, True), ("pipeline", False, False), ("pipeline", False, True)])
def test_a_split_equals_its_twin(world, scheme, tied, frozen, ranks):
    sizes = dict(hidden=32, seq_len=16)
    reference = twin(tied, frozen, **sizes)
    names = [n for n, _ in reference.named_parameters()]
    losses, gradients, weights = train(reference, toy.twin_step)
    all_got = world.run(on_ranks, scheme, tied, frozen, dict(sizes, ranks=ranks))[:ranks]
    if scheme == "data":  # each rank knows the loss of its share
        assert [sum(each) / ranks for each in zip(*(got[0] for got in all_got))] == pytest.approx(losses, rel=1e-12)
    for rank, got in enumerate(all_got):
        if scheme == "tensor" or scheme == "pipeline" and rank == ranks - 1:
            assert got[0] == pytest.approx(losses, rel=1e-12)
        for step in range(STEPS):
            mine = cut(gradients[step], names, scheme, rank, ranks)
            assert len(mine) == len(got[1][step]) and all(map(same, mine, got[1][step]))
        assert all(map(same, cut(weights, names, scheme, rank, ranks), got[2]))


def test_a_twin_that_knows_nothing_scores_ln_256():
    assert toy.twin_step(toy.ToyTransformer(), *toy.make_batch(8, 32)) == pytest.approx(5.55, abs=0.4)


def test_equal_seeds_are_equal_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b, c = (toy.ToyTransformer(hidden=32, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(a[1].mlp.up.weight, b[1].mlp.up.weight) and not torch.equal(a[1].mlp.up.weight, c[1].mlp.up.weight)


def test_twelve_h_squared_per_block():
    h = 64
    block = toy.ToyTransformer(hidden=h).blocks[0]
    assert sum(p.numel() for p in block.parameters() if p.dim() == 2) == 12 * h * h


@pytest.mark.parametrize("sizes", [dict(heads=3), dict(hidden=30), dict(heads=6, hidden=36)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="heads must be a multiple of 4"):
        toy.ToyTransformer(**sizes)


def test_splits_that_do_not_divide_are_refused(world):
    def refuse():
        three = dist.new_group([0, 1, 2])
        said = []
        if dist.get_rank() < 3:
            model = toy.ToyTransformer(hidden=32)
            for split in (lambda: toy.split_width(model, three), lambda: toy.split_depth(model, three),
                          lambda: toy.data_parallel_step(model, *toy.make_batch(8, 8), group=three)):
                try:
                    split()
                except ValueError as e:
                    said.append(str(e))
        return said
    said = world.run(refuse)[0]
    assert said == ["4 heads do not divide by 3 ranks; use a number of ranks that divides 4, or more heads",
                    "4 blocks do not divide by 3 stages; use a number of stages that divides 4",
                    "a batch of 8 does not divide by 3 ranks; take a multiple of 3"]
