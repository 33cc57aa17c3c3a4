"""Each split of the toy model equals the whole model in one process (the twin): loss, gradients, weights."""

import pytest
import torch
import torch.distributed as dist

from helpers import World, count_from_here, toy
from helpers.toy.backward import late_weights
from three_axes.paper import schedules
from three_axes.plan import Job, Layout, ModelShape
from three_axes.plan.frameworks import TOY
from three_axes.plan.traffic import calls

STEPS, RATE = 3, 0.1
PLAIN, ODD = {}, {"tied": True, "frozen": True}  # kinds of models: arguments of `prepare`
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def prepare(seed, tied=False, frozen=False, **sizes):
    """A small model in float64. If `frozen`, one of its matrices is not trained."""
    model = toy.ToyTransformer(seed=seed, tied=tied, hidden=32, seq_len=16, **sizes).double()
    if frozen:
        model[2].mlp.up.weight.requires_grad_(False)
    return model


def named(model, held):
    """The parameters of `held`, which is `model` or a part of it, by their names in `model`."""
    here = {id(p) for p in held.parameters()}
    parts = [(path, part._parameters.items()) for path, part in model.named_modules()]
    return {f"{path}.{name}": p for path, its in parts for name, p in its if id(p) in here}


def train(model, held, step):
    """Train three steps by plain gradient descent. Returns the losses, the gradients and weights by name."""
    losses, gradients = [], []
    for i in range(STEPS):
        held.zero_grad()
        losses.append(step(*toy.make_batch(8, 16, seed=i)))
        mine = named(model, held).items()
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in mine})
        with torch.no_grad():
            for p in held.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
    return losses, gradients, {name: p.detach().clone() for name, p in named(model, held).items()}


def same(name, whole, mine, tp=(0, 1)):
    """Whether `mine` is the part that rank tp[0] of tp[1] should hold of the twin's `whole`."""
    if whole is None or mine is None:
        return whole is mine
    matrix = name.split(".")[-2]
    if matrix in ("q", "k", "v", "up"):
        whole = whole.chunk(tp[1], 0)[tp[0]]
    if matrix in ("out", "down"):
        whole = whole.chunk(tp[1], 1)[tp[0]]
    return torch.allclose(whole, mine, rtol=1e-12, atol=1e-14)


def equals_the_twin(got, reference, tp=(0, 1)):
    """Whether gradients and last weights equal the twin's, for each parameter that this rank holds."""
    pairs = zip([*reference[1], reference[2]], [*got[1], got[2]])
    return all(same(name, whole[name], t, tp) for whole, mine in pairs for name, t in mine.items())


def mean_losses(results):
    """The loss of each step: the mean over the ranks, each of which has the loss of its own share."""
    return [sum(shares) / len(shares) for shares in zip(*(got[0] for got in results))]


def on_ranks(scheme, ranks, kinds):
    """Train on the first `ranks` ranks. Each begins with another seed; the scheme must make them equal."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return None
    model = prepare(dist.get_rank(), **kinds)
    toy.share_weights(model, group)
    if scheme == "data":
        return train(model, model, lambda *a: toy.data_parallel_step(model, *a, group=group))
    if scheme == "data, overlapped":
        finish = toy.overlap_gradients(model, bucket=1e4, group=group)
        return train(model, model, lambda *a: toy.data_parallel_step(model, *a, group=group, average=finish))
    if scheme == "tensor":
        toy.split_width(model, group)
        return train(model, model, lambda *a: toy.tensor_parallel_step(model, *a))
    if scheme == "tensor, sequence":
        toy.split_width(model, group, sequence=True)

        def step(*batch):
            loss = toy.tensor_parallel_step(model, *batch)
            toy.sum_norm_gradients(model, group)
            return loss

        return train(model, model, step)
    stage = toy.split_depth(model, group)
    return train(model, stage, lambda *a: toy.pipeline_step(stage, *a, group=group))


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
def test_a_split_vocabulary_is_the_twins_and_sends_what_the_list_says(world, tied):
    def step():
        new = lambda: toy.ToyTransformer(hidden=64, tied=tied).double()
        twin, batch, rank = new(), toy.make_batch(8, 32), dist.get_rank()
        whole = toy.twin_step(twin, *batch)
        model = toy.split_vocabulary(toy.split_width(new()))
        count_from_here()
        loss = toy.vocabulary_parallel_step(model, *batch)
        same = lambda mine, theirs: torch.allclose(mine.grad, theirs.grad, atol=1e-12)
        mine = lambda theirs: theirs.grad.chunk(4)[rank]
        return (
            abs(loss - whole) < 1e-12
            and torch.allclose(model[0].token.weight.grad, mine(twin[0].token.weight), atol=1e-12)
            and torch.allclose(model[-1].score.weight.grad, mine(twin[-1].score.weight), atol=1e-12)
            and same(model[0].position.weight, twin[0].position.weight)
            and same(model[-1].norm.weight, twin[-1].norm.weight)
        )

    assert all(world.run(step))
    framework = TOY.but(split_vocabulary=True, number_bytes=8)
    shape = ModelShape("toy", 4, 64, 4, toy.VOCABULARY, positions=64)
    job = Job(shape, global_batch=8, seq_len=32, framework=framework)
    (predicted,) = calls(job, Layout(tp=4, microbatch=8, sequence_parallel=False))
    (row,) = world.traffic.ranks[0]
    sums = 3 * 4 * 8 * 32  # in float64
    assert (row.calls, row.payload) == (predicted.calls, predicted.payload + sums)


@pytest.mark.parametrize(
    "ranks, kinds",
    [(4, ODD), slow(4, PLAIN), slow(4, {"tied": True}), slow(4, {"frozen": True}), slow(2, ODD)],
    ids=str,
)
@pytest.mark.parametrize("scheme", ["data", "data, overlapped", "tensor", "tensor, sequence", "pipeline"])
def test_a_split_equals_its_twin(world, scheme, kinds, ranks):
    model = prepare(0, **kinds)
    reference = train(model, model, lambda *a: toy.twin_step(model, *a))
    results = world.run(on_ranks, scheme, ranks, kinds)[:ranks]
    if scheme.startswith("data"):
        assert mean_losses(results) == pytest.approx(reference[0], rel=1e-12)
    held = set()
    for rank, got in enumerate(results):
        if scheme.startswith("tensor") or scheme == "pipeline" and rank == ranks - 1:
            assert got[0] == pytest.approx(reference[0], rel=1e-12)
        assert equals_the_twin(got, reference, (rank, ranks) if scheme.startswith("tensor") else (0, 1))
        held |= set(got[2])
    assert held == set(reference[2])


ORDERS = {
    "GPipe": (schedules.gpipe, (4, 8)),
    "1F1B": (schedules.one_f_one_b, (4, 8)),
    "two stages": (schedules.one_f_one_b, (2, 4)),
    "interleaved": (schedules.interleaved, (4, 8, 2)),
    "interleaved on 2": (schedules.interleaved, (2, 4, 2)),
    "ZB-H1": (schedules.zb_h1, (4, 8)),
    "ZB-H2": (schedules.zb_h2, (4, 8)),
    "ZB-V": (schedules.zb_v, (4, 8)),
}


def on_a_schedule(schedule, kinds):
    """On a rank: train the stages that the schedule gives to the rank."""
    group = dist.new_group(list(range(schedule.p)))
    rank, stages = dist.get_rank(), len(schedule.rank_of)
    if rank >= schedule.p:
        return None
    model = prepare(rank, layers=stages, **kinds)
    toy.share_weights(model, group)
    chunks = {k: toy.stage_of(model, k, stages) for k in range(stages) if schedule.rank_of[k] == rank}
    held = torch.nn.ModuleList(chunks.values())

    def step(tokens, targets):
        parts = tokens.chunk(schedule.m), targets.chunk(schedule.m)
        return toy.run_schedule(chunks, schedule.ops[rank], schedule.rank_of, *parts, group)

    return train(model, held, step)


@pytest.mark.parametrize(
    "name, kinds",
    [
        *((name, PLAIN) for name in ORDERS),
        *((name, ODD) if name in ("1F1B", "ZB-V") else slow(name, ODD) for name in ORDERS),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x) or "plain",
)
def test_every_schedule_on_real_ranks_equals_the_twin(world, name, kinds):
    order, sizes = ORDERS[name]
    schedule = order(*sizes)
    model = prepare(0, layers=len(schedule.rank_of), **kinds)
    reference = train(model, model, lambda *a: toy.twin_step(model, *a))
    results = world.run(on_a_schedule, schedule, kinds)[: schedule.p]
    assert results[schedule.rank_of[-1]][0] == pytest.approx(reference[0], rel=1e-12)
    assert all(equals_the_twin(got, reference) for got in results)


def on_a_grid(sizes, sequence, kinds):
    """On a rank: train its part on a grid of (d, p, t) ranks. Returns also its coordinates."""
    d, p, t = sizes
    grid = toy.grid_groups(d, p, t)
    model = prepare(dist.get_rank(), **kinds)
    stage = toy.on_grid(model, grid, sequence)
    ops = schedules.one_f_one_b(p, 2).ops[grid["pp"].get_local_rank()]

    def step(*batch):
        return toy.grid_step(stage, *batch, ops, 2, grid)

    return train(model, stage, step), tuple(grid[name].get_local_rank() for name in ("dp", "pp", "tp"))


@pytest.mark.parametrize(
    "sequence, kinds", [(True, ODD), slow(False, PLAIN), slow(True, PLAIN), slow(False, ODD)], ids=str
)
def test_all_three_axes_on_eight_ranks_equal_the_twin(sequence, kinds):
    model = prepare(0, **kinds)
    reference = train(model, model, lambda *a: toy.twin_step(model, *a))
    with World(8) as eight:
        results = eight.run(on_a_grid, (2, 2, 2), sequence, kinds)
        assert [at for _, at in results] == [(i, j, k) for j in range(2) for i in range(2) for k in range(2)]
        assert all(equals_the_twin(got, reference, (k, 2)) for got, (_, _, k) in results)
        losses = [(a + b) / 2 for a, b in zip(results[4][0][0], results[6][0][0])]
        assert losses == pytest.approx(reference[0], rel=1e-12)
        with pytest.raises(Exception, match=r"d·p·t = 2·2·3 = 12, but there are 8 ranks"):
            eight.run(toy.grid_groups, 2, 2, 3)


def adam(model, step, apply):
    """The losses of three steps. apply: changes the weights after each step."""
    losses = []
    for i in range(STEPS):
        losses.append(step(*toy.make_batch(8, 16, seed=i)))
        apply()
    return losses


def on_zero(stage, ranks, frozen):
    """On a rank: train with ZeRO. Returns losses, whole weights, and bytes held between steps."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return None
    model = prepare(dist.get_rank(), frozen=frozen)
    toy.share_weights(model, group)
    zero = {1: toy.Zero1, 2: toy.Zero2, 3: toy.Zero3}[stage](model, group=group)
    step = lambda *a: toy.data_parallel_step(model, *a, group=group, average=lambda *_: None)
    losses = adam(model, step, zero.step)
    storages = [p.untyped_storage() for p in model.parameters()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if stage == 3:
        for unit in zero.units:
            zero.fill(unit)
    return losses, [p.detach().clone() for p in model.parameters()], held


@pytest.mark.parametrize("ranks, frozen", [(4, True), slow(4, False), slow(2, True)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_equals_adam_on_the_twin(world, stage, ranks, frozen):
    model = prepare(0, frozen=frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    apply = lambda: (optimizer.step(), optimizer.zero_grad())
    losses = adam(model, lambda *a: toy.twin_step(model, *a), apply)
    results = world.run(on_zero, stage, ranks, frozen)[:ranks]
    assert mean_losses(results) == pytest.approx(losses, rel=1e-12)
    for _, weights, held in results:
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(weights, model.parameters()))
        # Between steps ZeRO-3 keeps no whole parameter except a frozen matrix.
        assert (held <= 8 * 32 * 128) == (stage == 3)


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
def test_mixed_precision_is_adam_on_a_master_copy(world, sums):
    """Two ranks with two microbatches each sum gradients in `sums`, and hold float32 master weights."""
    parts = [toy.make_batch(2, 16, seed=seed) for seed in range(4)]
    loss = lambda model, tokens, targets: toy.loss_of(model(tokens).float(), targets)

    def on_rank():
        group = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            return None
        model = prepare(0).bfloat16()
        zero = toy.Zero1(model, group=group, precise_sums=sums == torch.float32)
        for _ in range(STEPS):
            for part in parts[dist.get_rank() :: 2]:
                loss(model, *part).backward()
            zero.step()
        assert {unit.shard.dtype for unit in zero.units if unit} == {torch.float32}
        return [p.detach() for p in model.parameters()]

    torch.set_num_threads(1)  # as on a rank: in bfloat16 the order of a sum changes the result
    model = prepare(0).bfloat16()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=1e-3)
    for _ in range(STEPS):
        of_ranks = []
        for rank in range(2):
            both = [torch.autograd.grad(loss(model, *part), model.parameters()) for part in parts[rank::2]]
            of_ranks.append([first.to(sums) + second for first, second in zip(*both)])
        for copy, first, second in zip(master, *of_ranks):
            copy.grad = (first + second).float() / 2
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(model.parameters(), master):
                p.copy_(copy)
    for weights in world.run(on_rank)[:2]:
        assert all(map(torch.equal, weights, model.parameters()))


def test_a_twin_that_knows_nothing_scores_ln_256():
    assert toy.twin_step(toy.ToyTransformer(), *toy.make_batch(8, 32)) == pytest.approx(5.55, abs=0.4)


def test_equal_seeds_are_equal_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b, c = (toy.ToyTransformer(hidden=32, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(a[1].mlp.up.weight, b[1].mlp.up.weight)
    assert not torch.equal(a[1].mlp.up.weight, c[1].mlp.up.weight)


def test_stand_ins_for_computation_wait_the_given_seconds(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    x = torch.ones(1, 2, requires_grad=True)
    y = toy.pace(torch.nn.Linear(2, 2), 3.0, 5.0)(x)
    assert sum(slept) == 3
    y.sum().backward()
    assert sum(slept) == 3 + 5
    slept.clear()
    made = toy.StandIn(1.0, 2.0, 4.0)(torch.tensor([[0, 128]]))
    assert slept == [1] and made.shape == (1, 2, 256) and made.unique().tolist() == [0, 0.5]
    made.sum().backward()
    assert slept == [1, 2, 4]
    with late_weights(jobs := []):
        toy.StandIn(1.0, 2.0, 4.0)(torch.tensor([[0, 128]])).sum().backward()
    assert slept == [1, 2, 4, 1, 2]
    (of_weights,) = jobs
    of_weights()
    assert slept[5:] == [4]


@pytest.mark.parametrize("sizes", [dict(heads=3), dict(hidden=30), dict(heads=6, hidden=36)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="heads must be a multiple of 4"):
        toy.ToyTransformer(**sizes)


def test_splits_that_do_not_divide_are_refused(world):
    def refuse():
        three = dist.new_group([0, 1, 2])
        if dist.get_rank() == 3:
            return None
        model, tied, x = toy.ToyTransformer(hidden=32), prepare(0, tied=True), torch.zeros(1, 4, 4, 4)
        refusals = []
        for split in (
            lambda: toy.split_width(model, three),
            lambda: toy.split_depth(model, three),
            lambda: toy.data_parallel_step(model, *toy.make_batch(8, 8), group=three),
            lambda: toy.split_vocabulary(model, three),
            lambda: toy.split_experts(toy.Experts(8), three),
            lambda: toy.exchange_attention(x, x, x, toy.contiguous(12, 3), three),
            lambda: toy.Zero3(tied, group=three),
        ):
            try:
                split()
            except ValueError as e:
                refusals.append(str(e))
        return refusals

    assert world.run(refuse)[0] == [
        "4 heads do not divide by 3 ranks; use a number of ranks that divides 4, or more heads",
        "4 blocks do not divide by 3 stages; use a number of stages that divides 4",
        "a batch of 8 does not divide by 3 ranks; take a multiple of 3",
        "256 words do not divide by 3 ranks; use a number of ranks that divides 256",
        "4 experts do not divide by 3 ranks; take a number that divides 4",
        "4 heads do not divide by 3 ranks; gather, or go round",
        "two parts of the model share a parameter; ZeRO cuts each part alone, so give it an untied model",
    ]
