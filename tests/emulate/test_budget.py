"""`World(memory=...)` gives each rank a budget of bytes: which tensors count, which rank gets the error, and
that the world can be used afterwards.
"""

import pytest
import torch
import torch.distributed as dist
import worlds

from helpers import World, toy
from helpers.ranks.failure import RankError

shared_world = worlds.shared(2, timeout=20, memory=10e6)


def test_a_tensor_too_many_is_an_error_of_its_rank(world):
    def greedy():
        kept = [torch.zeros(1_000_000)]
        if dist.get_rank() == 1:
            kept.append(torch.zeros(2_000_000))
        dist.barrier()

    told = "rank 1 is out of memory: zeros made it 12.0 MB, and the budget is 10.0 MB"
    with pytest.raises(RankError, match=f"rank 1 raised OutOfMemoryError: {told}") as e:
        world.run(greedy)
    assert e.value.state_kept
    # The memory of the failed call is free again.
    assert world.run(lambda: torch.zeros(2_000_000).numel()) == [2_000_000] * 2


def test_the_error_says_what_held_the_memory(world):
    def train():
        model = torch.nn.Linear(500, 1000, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 500)).sum().backward()
        optimizer.step()
        torch.zeros(1_000_000)

    with pytest.raises(RankError, match=r"Held: parameters 2.00 MB, gradients 2.00 MB, optimizer 4.00 MB"):
        world.run(train)


def test_freed_memory_counts_no_more(world):
    def many():
        for _ in range(20):
            x = torch.zeros(2_000_000)
            del x

    world.run(many)


def test_views_count_once_and_resized_storage_as_it_is(world):
    def views():
        x = torch.zeros(2_000_000)
        parts = [x[i:] for i in range(50)]
        x.untyped_storage().resize_(0)
        y = torch.zeros(2_000_000)
        return len(parts) + y.numel()

    world.run(views)


def test_backward_is_counted_too(world):
    def deep():
        x = torch.zeros(900_000, requires_grad=True)
        y = x.exp().exp()
        y.sum().backward()

    with pytest.raises(RankError, match="out of memory"):
        world.run(deep)


def test_the_timeline_has_every_tensor(world):
    def rise():
        x = torch.zeros(1_000_000)
        y = torch.zeros(1_000_000)
        del x
        return y.sum().item()

    world.run(rise)
    assert world.timeline.peak(0) == pytest.approx(8e6, rel=0.01)


def test_a_step_fits_where_its_parts_fit():
    def step(b):
        model = toy.ToyTransformer(hidden=64)
        toy.twin_step(model, *toy.make_batch(b, 64))

    with World(1, memory=12e6) as small:
        small.run(step, 2)
        with pytest.raises(RankError, match="out of memory"):
            small.run(step, 16)


@pytest.mark.parametrize("memory", [0, -1, "1 GB", True])
def test_an_invalid_budget_is_refused(memory):
    with pytest.raises(ValueError, match="bytes of tensors that each rank may hold"):
        World(2, memory=memory)
