"""Training that is started in a notebook, as in drop 14, on the ranks of this machine."""

import itertools
import math
from dataclasses import replace

import pytest

from drops import d14
from helpers import World
from helpers.train import Config
from three_axes.plan import Layout


@pytest.mark.slow
def test_accelerate_shards_over_gpus():
    """Accelerate's state is changed to say that these CPU ranks are GPUs, so its code for GPUs runs here."""

    def on_gpus(config, steps):
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        d14.as_launched()
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return d14.with_accelerate(config, steps)

    # Clipped from the first step on.
    config = Config(hidden=32, seq_len=16, batch=16, steps=5, warmup=2, clip=0.5)
    with World(4, timeout=60) as world:
        losses = world.run(on_gpus, config, 5)
        ops = {row.op for row in world.traffic.ranks[0]}
    assert losses[0] == losses[3] == pytest.approx(d14.twin(config, 5), rel=1e-5)
    assert {"all_gather", "reduce_scatter"} <= ops, "FSDP did not shard"


def test_a_world_for_every_machine():
    here = lambda n, dp, tp, pp: tuple(d14.layout_here(n, Layout(dp=dp, tp=tp, pp=pp)).values())
    assert [here(n, 4, 8, 2) for n in (8, 4, 2, 1)] == [(2, 2, 2), (1, 2, 2), (1, 2, 1), (1, 1, 1)]
    assert here(8, 64, 1, 1) == (8, 1, 1) and here(8, 16, 4, 1) == here(8, 8, 8, 1) == (4, 2, 1)
    for layout in itertools.product((1, 2, 4, 8, 16, 64), repeat=3):
        for n in (1, 2, 4, 8):
            sizes = here(n, *layout)
            assert math.prod(sizes) == n and sizes[2] <= 4
            Config(**d14.layout_here(n, Layout(dp=layout[0], tp=layout[1], pp=layout[2]))).checked(n)


def test_a_notebook_that_is_interrupted_goes_on(tmp_path):
    config = Config(dp=2, hidden=32, seq_len=16, batch=16, steps=4, every=2, out=str(tmp_path))
    with World(2, timeout=60) as world:
        assert d14.train_on(world, config) == "4 steps are done."
        assert d14.train_on(world, replace(config, steps=6)).startswith("going on from step-000004")
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [f"step-00000{k}" for k in (2, 4, 6)]
