"""`verify` on models with other names, splits and types, and on models that cannot be compared."""

import math

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers.ranks.failure import RankError
from three_axes.verify import verify

shared_world = worlds.shared(2, many=30, timeout=60)


def small(**layers) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *layers.values(), nn.Linear(6, 2))


def share(batch, mesh):
    return batch if mesh is None else batch.chunk(mesh.size())[mesh.get_local_rank()]


def squares(model, batch, mesh, reduces=True):
    """A step whose loss is a mean of squares. If `reduces`, gradients are averaged over the ranks."""
    loss = model(share(batch, mesh)).square().mean()
    loss.backward()
    if mesh is not None and reduces:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group())
            p.grad /= mesh.size()
    return loss


def checked(build, step=squares, layouts=("dp 2",), **how):
    return verify(build, step, torch.linspace(-1, 1, 32).view(8, 4), layouts, **how)


def test_the_reports_of_a_right_step_and_of_a_wrong_step(world):
    report = world.run(lambda: checked(lambda mesh: small()))[1]  # every rank has it
    assert report.ok and str(report).splitlines()[2].split() == ["dp", "2", "equal", "equal", "-", "-"]
    report = world.run(lambda: checked(lambda mesh: small(), lambda *a: squares(*a, reduces=False)))[0]
    (found,) = report.found
    assert (found.what, found.cause.kind, found.cause.axes) == ("gradients", "not averaged", ("dp",))
    assert "step 1, gradients of 0.weight, 0.bias and 2 more: never averaged over dp" in str(report)


def test_wrappers_and_other_names(world):
    def wrapped(mesh):
        model = small()
        return DistributedDataParallel(model, process_group=mesh.get_group()) if mesh is not None else model

    def renamed(mesh):
        return nn.ModuleDict({"part": small()}) if mesh is not None else small()

    def step(model, batch, mesh):
        return squares(model if mesh is None else model["part"], batch, mesh)

    assert world.run(lambda: checked(wrapped, lambda *a: squares(*a, reduces=False)))[0].ok
    assert world.run(lambda: checked(renamed, step, names=lambda name, at: name.removeprefix("part.")))[0].ok
    with pytest.raises(RankError, match="the whole model has no part.0.bias, part.0.weight, .*names="):
        world.run(lambda: checked(renamed, step))


def test_splits_that_are_found_and_splits_that_must_be_given(world):
    class Rows(nn.Module):
        """A matrix whose rows tp splits. If `odd`, the whole matrix has an odd number of rows."""

        def __init__(self, mesh, odd):
            super().__init__()
            torch.manual_seed(0)
            weight = torch.randn(5 if odd else 4, 3)
            self.group = mesh.get_group() if mesh else None
            self.weight = nn.Parameter(weight.tensor_split(2)[mesh.get_local_rank()] if mesh else weight)

        def forward(self, x):
            return x @ self.weight.T

    def step(model, batch, mesh):
        loss = model(batch[:, :3]).square().sum()
        loss.backward()
        total = loss.detach()
        if mesh is not None:
            dist.all_reduce(total, group=model.group)
        return total

    run = lambda odd, **how: world.run(lambda: checked(lambda m: Rows(m, odd), step, ["tp 2"], **how))[0]
    assert run(False).ok
    assert run(True, splits={"weight": ("tp", 0)}).ok
    why = r"weight is \(5, 3\) in the whole model and \(3, 3\) on rank 0.*splits="
    with pytest.raises(RankError, match=why):
        run(True)


def test_copies_that_begin_with_other_weights(world):
    def build(mesh):
        torch.manual_seed(0 if mesh is None else dist.get_rank())
        return nn.Linear(4, 2)

    (found,) = world.run(lambda: checked(build))[0].found
    assert (found.step, found.what, found.cause.axes) == (0, "weights", ("dp",))
    assert found.names == ("weight", "bias") and "(ranks 0 | 1)" in found.cause.text


def test_a_nan_is_found_in_the_module_that_makes_it(world):
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt() if dist.get_rank() and self.split else x

    def build(mesh):
        model = small(root=Root())
        model[2].split = mesh is not None
        return model

    found = world.run(lambda: checked(build))[0].found
    assert found[0].what == "loss" and found[0].names == ("2",) and found[0].cause.kind == "not finite"
    assert math.isinf(found[0].off) and "rank 1" in found[0].cause.text


def test_a_right_module_that_runs_later_clears_none_that_it_does_not_hold(world):
    """The first of three layers is wrong. The third reads its result, the second does not."""

    class First(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0.1 * self.split * x.sin()

    class Beside(nn.Module):
        def __init__(self, split):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = First(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.first.split = split

        def forward(self, x):
            return self.third(self.first(x) * self.second(x))

    found = world.run(lambda: checked(lambda mesh: Beside(mesh is not None)))[0].found
    assert found[0].what == "loss" and found[0].names == ("first",)


def test_models_that_cannot_be_compared_are_refused_with_a_reason(world):
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    def too_large(mesh):
        if mesh is None:
            raise MemoryError("80 layers")
        return small()

    run = lambda build, step=squares: world.run(lambda: checked(build, step))
    with pytest.raises(RankError, match="from the same weights and batch: first in 2. Does it draw random"):
        run(lambda mesh: small(noise=Noise()))
    with pytest.raises(RankError, match="build.None. failed: MemoryError: 80 layers. .*Take fewer layers"):
        run(too_large)
    with pytest.raises(RankError, match=r"build\(None\) returned a list; return a module"):
        run(lambda mesh: small() if mesh else [small()])
    with pytest.raises(RankError, match="the whole model's own loss is nan"):
        run(lambda mesh: small(), lambda *a: squares(*a) * math.nan)
    with pytest.raises(RankError, match="'dp 4' takes 4 ranks, and there are 2"):
        world.run(lambda: checked(lambda mesh: small(), layouts=["dp 4"]))
    with pytest.raises(RankError, match="0 layouts and 2 steps: give 1 or more of both"):
        world.run(lambda: checked(lambda mesh: small(), layouts=[]))
    for layout in ("dp", "dp two", "2 dp", "dp 2 dp 2", "", "dp 0"):
        with pytest.raises(RankError, match="is no layout: give axes and sizes"):
            world.run(lambda layout: checked(lambda mesh: small(), layouts=[layout]), layout)


def test_a_step_need_not_return_a_loss(world):
    own = lambda model, batch, mesh: None if squares(model, batch, mesh) is None else None
    assert world.run(lambda: checked(lambda mesh: small(), own))[0].ok


def test_a_model_that_float64_cannot_run_is_nudged(world):
    class Only(nn.Module):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("no kernel for Double")
            return x

    report = world.run(lambda: checked(lambda mesh: small(only=Only()), dtype=torch.float32))[0]
    assert report.ok and "may be rounding" in str(report)


def test_a_gradient_that_is_only_rounding_moves_a_weight_anywhere(world):
    class Shifted(nn.Module):
        """Adds one number to all scores: its gradient is only rounding, but Adam changes it."""

        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return (x + self.shift).log_softmax(-1)

    def build(mesh):
        model = small(shifted=Shifted())
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    report = world.run(lambda: checked(build, layouts="dp 2"))[0]
    assert report.ok and report.verdicts[0].cells["update"] == "equal", report
