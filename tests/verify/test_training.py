"""`verify` on `helpers.train`: layouts equal the model, and checkpoints can be loaded in other layouts."""

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worlds
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from helpers.train import BY_NAME, Config, Trainer, batch_of, checkpoints, loss_of, read_text
from three_axes.verify import verify

# helpers.train's own text is the drops' prose, which changes.
TEXT = str(Path(__file__).parents[2] / "LICENSE")
# With so many steps the learning rate hardly falls during the test.
BASE = Config(
    text=TEXT, hidden=32, heads=4, seq_len=16, batch=8, clip=0.5, warmup=0, steps=10**5, precision="float64"
)
LAYOUTS = [
    dict(), dict(tp=2), dict(tp=4), dict(tp=2, sp=True), dict(tp=4, sp=True), dict(pp=2), dict(pp=4),
    dict(pp=2, schedule="GPipe"), dict(pp=2, schedule="interleaved"), dict(pp=2, tp=2, sp=True),
    dict(microbatch=1), dict(pp=2, microbatch=1), dict(tp=2, sp=True, microbatch=2),
    dict(pp=2, tp=2, sp=True, schedule="interleaved"),
]  # fmt: skip


class Later:
    """Replaces the trainer's optimizer, because `verify` calls the optimizer's step itself."""

    def __init__(self, optimizer):
        self.param_groups = optimizer.param_groups

    def step(self): ...
    def zero_grad(self): ...


def checked(layout: dict, folder=None, seed: int = 0, **choice):
    """Run `verify` on ranks. folder: a checkpoint to load. seed: if not 0, `misplace` damages the model."""
    config, trainers = replace(BASE, **choice), {}

    def build(mesh):
        if mesh is None:
            model = config.model()
            how = dict(lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
            optimizer = torch.optim.AdamW(model.parameters(), **how)
        else:
            trainer = Trainer(replace(config, **layout))
            model, optimizer, trainer.optimizer = trainer.model, trainer.optimizer, Later(trainer.optimizer)
            trainers[id(model)] = trainer
        if folder is not None:
            load(folder, model, optimizer, no_dist=mesh is None)
        if mesh is not None and seed:
            misplace(model, seed)
        return model, optimizer

    def step(model, batch, mesh):
        if mesh is not None:
            return torch.tensor(trainers[id(model)].step()["loss"])
        number = model.number = getattr(model, "number", -1) + 1
        tokens, targets = batch_of(batch, number, config)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, config.clip / (float(norm) + 1e-6))
        return loss.detach()

    asked = replace(config, **layout).checked(dist.get_world_size())
    return verify(build, step, read_text(TEXT), [f"pp {asked.pp} dp {asked.dp} tp {asked.tp}"])


def load(folder, model, optimizer, no_dist: bool) -> None:
    """Load a checkpoint as `helpers.train` does, also on a single rank (`no_dist`)."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=BY_NAME)))
    dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    states = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    set_state_dict(model, optimizer, **states, options=BY_NAME)


def saved(layout: dict, folder) -> None:
    trainer = Trainer(replace(BASE, **layout, out=str(folder)))
    trainer.step()
    trainer.save()


def misplace(model, seed: int) -> None:
    """Exchange two tensors, the rows of a tensor, or the shards of the ranks, as a wrong loader would."""
    chance = random.Random(seed)
    local = lambda p: (p.to_local() if isinstance(p, DTensor) else p).detach()
    parameters = [local(p) for p in model.parameters() if p.dim() == 2]
    one = chance.choice(parameters)
    others = [p for p in parameters if p.shape == one.shape and not torch.equal(p, one)]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, one.clone())
    differ = [tensor for tensor in ranks if tensor.shape == one.shape and not torch.equal(tensor, ranks[0])]
    if seed % 3 == 0 and others:
        other = chance.choice(others)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    elif seed % 3 == 1 and len(differ) == len(ranks) - 1:
        one.copy_(ranks[dist.get_rank() - 1])
    else:
        one.copy_(one.roll(1, 0))


shared = worlds.shared(4, many=30, timeout=120)


@pytest.mark.parametrize(
    "count", [pytest.param(5, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.exhaustive)]
)
def test_layouts_are_the_model(shared, count):
    """Layouts equal the model, for random axes, schedules, microbatches, batches and types (fixed seed)."""
    for layout, job in drawn(count):
        _is_the_model(layout, shared, **job)


def drawn(count: int) -> list[tuple[dict, dict]]:
    """Random pairs of a layout for four ranks and settings of a job; three of four are in float64."""
    chance, layouts = random.Random(0), {}
    while len(layouts) < count:
        tp, pp = (chance.choice([1, 2, 4]) for _ in range(2))
        layout = dict(tp=tp, pp=pp, microbatch=chance.choice(range(3)))
        layout |= dict(sp=tp > 1 and chance.random() < 0.7)
        layout |= dict(schedule=chance.choice(["1F1B", "GPipe", "interleaved"])) if pp > 1 else {}
        job = dict(batch=chance.choice([8, 16]), precision=chance.choice(["float64"] * 3 + ["float32"]))
        with suppress(ValueError):  # some sizes do not match four ranks, or each other
            replace(BASE, **layout, **job).checked(4)
            layouts[repr((layout, job))] = layout, job
    return list(layouts.values())


def _is_the_model(layout, shared, **choice):
    """Check that a layout equals the model. Returns the report."""
    with shared.lent() as world:
        report = world.run(checked, layout, **choice)[0]
    assert report.ok, f"{layout} {choice}\n{report}"
    return report


@pytest.mark.slow
def test_types_other_than_float64(shared):
    for precision, layout in (("float32", dict(pp=2)), ("bfloat16", dict(tp=2, sp=True))):
        assert "may be rounding" in repr(_is_the_model(layout, shared, precision=precision))


@pytest.mark.slow
def test_a_checkpoint_arrives_under_another_layout(shared, tmp_path):
    others = [dict(tp=4, sp=True), dict(pp=2, schedule="interleaved")]
    _arrives(shared, tmp_path, dict(pp=2, tp=2, sp=True), others)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_arrives_under_every_layout(layout, shared, tmp_path):
    _arrives(shared, tmp_path, layout, LAYOUTS)


def _arrives(shared, out, layout: dict, others: list[dict]) -> None:
    """Check that every saved element is loaded once, and that the next step equals the twin's."""
    folder = _save(shared, out, layout)
    for other in others:
        with shared.lent() as world:
            report = world.run(checked, other, folder)[0]
        assert report.ok, f"from {layout} to {other}\n{report}"


def _save(shared, out, layout: dict):
    """Save a checkpoint under a layout. Returns its folder."""
    with shared.lent() as world:
        world.run(saved, layout, out)
    (folder,) = checkpoints(out)
    return folder


FEW, MANY = (
    pytest.param(range(1, 4), marks=pytest.mark.slow),
    pytest.param(range(4, 24), marks=pytest.mark.exhaustive),
)


@pytest.mark.parametrize("seeds", [FEW, MANY], ids=str)
def test_a_tensor_that_is_loaded_into_a_wrong_place_is_found(shared, tmp_path, seeds):
    folder = _save(shared, tmp_path, {})
    for seed in seeds:
        layout = LAYOUTS[seed % len(LAYOUTS)]
        with shared.lent() as world:
            report = world.run(checked, layout, folder, seed)[0]
        assert report.found and report.found[0].what == "weights", f"{seed}, {layout}\n{report}"
