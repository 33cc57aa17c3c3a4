"""Right jobs, of which `verify` must not accuse one. JOBS: name -> (function, words that must be said)."""

import engine
import torch
import torch.distributed as dist
from jobs import (
    STEPS,
    WIDE,
    Experts,
    Slices,
    Split,
    Stage,
    adam,
    average,
    kept_in,
    loss,
    mesh_of,
    net,
    rows,
    train,
    train_pipeline,
)  # fmt: skip
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)  # fmt: skip
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

JOBS = {}
right = kept_in(JOBS)


def ddp(**how):
    drop = how.pop("drop", 0.1)
    model = DistributedDataParallel(net(drop=drop, norm=how.pop("norm", nn.LayerNorm)), **how)
    torch.manual_seed(dist.get_rank())  # of dropout
    return model


@right("watched: 8 parameters, 16 optimizer states\n")
def plain_ddp():
    train(model := ddp(), adam(model))


@right("watched: 8 parameters, 16 optimizer states\n")
def ddp_whose_backward_runs_as_on_a_gpu():
    model = ddp()
    with engine.as_on_a_gpu():
        train(model, adam(model))


@right("3: statistics of BatchNorm")
def ddp_with_batch_norm():
    train(model := ddp(norm=nn.BatchNorm1d), adam(model))


@right()
def ddp_that_leaves_statistics_alone():
    train(model := ddp(norm=nn.BatchNorm1d, broadcast_buffers=False), adam(model))


@right()
def ddp_in_float16_with_views():
    model = ddp(gradient_as_bucket_view=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, adam(model))


@right()
def ddp_with_a_zero_redundancy_optimizer():
    model = ddp()
    train(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01))


@right()
def ddp_that_accumulates():
    model = ddp()
    optimizer = adam(model)
    for step in range(STEPS):
        with model.no_sync():
            loss(model, rows(step)).backward()
        loss(model, rows(step + 50)).backward()
        optimizer.step()
        optimizer.zero_grad()


@right()
def ddp_with_an_unused_parameter():
    model = net()
    model.extra = nn.Linear(3, 3)
    inner = list(model)[:6]
    model.forward = lambda x: nn.Sequential(*inner)(x)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    train(model, adam(model))


@right()
def an_evaluation_on_rank_0():
    model = ddp()

    def evaluate(step):
        if dist.get_rank() == 0:
            model.module.eval()
            model.module(rows(0, 0))
            model.module.train()

    train(model, adam(model), after=evaluate)


@right()
def the_best_weights_on_rank_0_at_the_end():
    model = ddp()
    train(model, adam(model), steps=3)
    if dist.get_rank() == 0:
        model.module.load_state_dict(net(5).state_dict())
    return model


@right()
def fully_sharded():
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    train(model, adam(model))


@right()
def fully_sharded_and_replicated():
    model = net()
    fully_shard(model, mesh=mesh_of(replicate=2, shard=2))
    train(model, adam(model))


@right()
def the_older_fsdp_with_its_own_parameters():
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    model.twin = nn.Linear(3, 3)  # something that is a copy
    train(model, adam(model), reduce=None)


@right("8 in averages of the weights")
def a_moving_average_as_a_module():
    model = ddp()
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, adam(model), after=lambda step: ema.update_parameters(model.module))


@right("8 in averages of the weights")
def a_moving_average_in_a_dict():
    model = ddp()
    shadow = {name: p.detach().clone() for name, p in model.module.named_parameters()}

    def update(step):
        for name, p in model.module.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)

    train(model, adam(model), after=update)


@right("a note, for an average may be kept by some ranks")
def a_moving_average_on_rank_0_alone():
    model = ddp()
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, adam(model), after=lambda step: dist.get_rank() or ema.update_parameters(model.module))


@right("a note, for copies may be averaged now and then")
def post_local_sgd():
    model = ddp()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    state = post_local.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=2)
    train(model, PostLocalSGDOptimizer(optim=adam(model), averager=averager), steps=7)


@right("a note, for copies may be averaged now and then")
def weights_averaged_every_third_step():
    model = net()

    def meet(step):
        if step % 3 == 2:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()

    train(model, torch.optim.SGD(model.parameters(), lr=0.01), after=meet, steps=9)


@right()
def frozen_layers():
    model = net()
    model[0].requires_grad_(False)
    train(model, adam(model), reduce=average)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@right()
def low_rank_adapters():
    model = net()
    model[0], model[4] = Lora(model[0]), Lora(model[4])
    train(model, adam(model), reduce=average)


class Owned(torch.optim.Optimizer):
    """Each parameter is one rank's to update; all hold a momentum, the owner's alone is used."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, dict(lr=lr))
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.param_groups[0]["params"]):
            owner = i % dist.get_world_size()
            if owner == dist.get_rank():
                p.sub_(self.state[p]["momentum_buffer"].mul_(0.9).add_(p.grad), alpha=0.01)
            dist.broadcast(p.data, owner)


@right("sharded")
def momentum_that_only_its_owner_keeps():
    model = net()
    train(model, Owned(model.parameters()), reduce=average)


@right("sharded")
def a_slice_of_the_momentum_on_each_rank():
    model = net()
    train(model, Slices(model.parameters()))


@right()
def zero_1_with_a_flat_piece():
    model = net()
    size, rank = dist.get_world_size(), dist.get_rank()
    flat = lambda ts: torch.cat([t.flatten() for t in ts])
    pad = -len(flat(model.parameters())) % size
    cut = lambda ts: nn.functional.pad(flat(ts), (0, pad)).chunk(size)[rank].clone()
    piece = cut([p.data for p in model.parameters()])
    optimizer = torch.optim.Adam([piece], lr=0.01)
    for step in range(STEPS):
        loss(model, rows(step)).backward()
        average(model)
        piece.grad = cut([p.grad for p in model.parameters()])
        optimizer.step()
        line = torch.empty(len(piece) * size)
        dist.all_gather_into_tensor(line, piece)
        for p in model.parameters():
            p.data.copy_(line[: p.numel()].view_as(p))
            line, p.grad = line[p.numel() :], None


@right()
def zero_1_that_gathers_behind_the_step():
    model = net()
    size, rank = dist.get_world_size(), dist.get_rank()

    def only_my_gradients(model):
        average(model)
        for i, p in enumerate(model.parameters()):
            p.grad = p.grad if i % size == rank else None

    def gather(step):
        for i, p in enumerate(model.parameters()):
            dist.broadcast(p.data, i % size)

    train(model, adam(model), reduce=only_my_gradients, after=gather)


@right()
def tensor_parallel_by_pytorch():
    model, tp = net(), mesh_of(tp=4)
    plan = {"0": ColwiseParallel(), "4": RowwiseParallel(), "5": SequenceParallel()}
    model = parallelize_module(
        nn.Sequential(model[0], model[2], model[4]), tp, {"0": plan["0"], "2": plan["4"]}
    )
    train(model, adam(model), data=lambda step: rows(step, 0))


@right()
def tensor_parallel_by_hand():
    torch.manual_seed(0)
    mesh = mesh_of(dp=2, tp=2)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), *(Split(mesh.get_group("tp")) for _ in range(2)))
    data = lambda step: rows(step, mesh.get_local_rank("dp"))
    train(model, adam(model), reduce=lambda m: average(m, mesh.get_group("dp")), data=data)


@right("it may be a shard or a copy", "a note")
def a_scale_for_each_head_cut_by_tp():
    torch.manual_seed(0)
    tp = mesh_of(tp=4).get_group()
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Split(tp, scale=True))
    train(model, adam(model), data=lambda step: rows(step, 0))


def pipelined(own_numbers: bool, seeded_alike: bool):
    mesh = mesh_of(pp=2, dp=2)
    number = mesh.get_local_rank("pp")
    torch.manual_seed(0 if seeded_alike else number)
    stage = Stage(number, 2, own_numbers=own_numbers)
    reduce = lambda model: average(model, mesh.get_group("dp"))
    train_pipeline(stage, adam(stage), mesh.get_group("pp"), reduce=reduce)


@right()
def a_pipeline_whose_layers_have_the_models_numbers():
    pipelined(own_numbers=False, seeded_alike=False)


@right()
def a_pipeline_whose_stages_are_seeded_alike():
    pipelined(own_numbers=True, seeded_alike=True)


@right()
def a_pipeline_with_tied_words():
    mesh = mesh_of(pp=2, dp=2)
    torch.manual_seed(0)
    stage = Stage(number := mesh.get_local_rank("pp"), 2, own_numbers=True, tied=True)
    for layer in stage.layers.values():
        torch.manual_seed(5 + number)
        nn.init.normal_(layer.weight)

    def reduce(model):
        average(model, mesh.get_group("dp"))
        dist.all_reduce(model.words.grad, group=mesh.get_group("pp"))

    train_pipeline(stage, adam(stage), mesh.get_group("pp"), reduce=reduce)


def _experts(seed):
    mesh = mesh_of(edp=2, ep=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDE, WIDE), Experts(mesh.get_group("ep"), seed(mesh)), nn.LayerNorm(WIDE)
    )

    def reduce(model):
        average(model, mesh.get_group("edp"))
        average(model, mesh.get_group("ep"), but="1.experts")

    train(model, adam(model), reduce=reduce)


@right()
def experts_over_ranks():
    _experts(lambda mesh: mesh.get_local_rank("ep"))


@right()
def experts_that_are_seeded_alike():
    _experts(lambda mesh: 7)


@right()
def gradients_summed_as_they_come():
    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size())))
    train(model, adam(model))


@right()
def two_models_with_two_optimizers():
    one, other = net(0), net(1)
    optimizers = torch.optim.AdamW(one.parameters(), lr=0.01), adam(other)
    for step in range(STEPS):
        for model, optimizer in zip((one, other), optimizers):
            loss(model, rows(step)).backward()
            average(model)
            optimizer.step()
            optimizer.zero_grad()


@right()
def an_optimizer_for_each_parameter_in_backward():
    model, optimizers = net(), {}

    def step(p):
        dist.all_reduce(p.grad.div_(dist.get_world_size()))
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        optimizers[p] = torch.optim.Adam([p], lr=0.01)
        p.register_post_accumulate_grad_hook(step)
    try:
        for number in range(STEPS):
            loss(model, rows(number)).backward()
    finally:
        optimizers.clear()  # hooks and what they hold are not collected


@right()
def a_first_step_with_a_rate_of_0():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    train(model, optimizer, after=lambda step: schedule.step())


@right()
def a_sequence_cut_inside_the_model():
    class Context(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            mine = self.inner(x.chunk(dist.get_world_size())[dist.get_rank()])
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine.detach())
            return mine * torch.cat(every).mean()

    train(model := Context(), adam(model), reduce=average, data=lambda step: rows(step, 0, 8))


@right(
    "no tensor is known to have copies; 8 are equal on several ranks", "equal numbers, a copy's or a shard's"
)
def weights_of_one_number():
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    train(model, adam(model), data=lambda step: rows(step, 0))


@right("not watched: *.running_mean", "SyncBatchNorm); not seen: what all ranks do wrong alike (verify(")
def one_sentence_for_what_is_not_seen():
    train(model := net(norm=nn.BatchNorm1d), adam(model), reduce=average)


class Positions(nn.Module):
    """Looks up positions before it reads its rows, so that its first layer gets the same on all ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.places, self.first = nn.Embedding(4, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x, *, within: bool = False):
        at = self.places(torch.arange(4 // (dist.get_world_size() if within else 1)))
        if within:  # each rank takes its rows of the whole batch
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        return self.first(x) + at


@right("3 tensors have copies on several ranks, equal after")
def positions_before_rows():
    train(model := DistributedDataParallel(Positions()), adam(model))


@right("3 tensors have copies on several ranks, equal after")
def positions_before_rows_that_the_model_cuts():
    model = Positions()
    cut = lambda x: model(x=x, within=True)
    optimizer = adam(model)
    for step in range(STEPS):
        x = rows(step, 0)
        (cut(x) - 1).square().mean().backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()


@right()
def a_batch_cut_inside_the_model():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return self.inner(x.chunk(dist.get_world_size())[dist.get_rank()])

    train(model := Cut(), adam(model), reduce=average, data=lambda step: rows(step, 0, 8))


@right()
def a_sampler_that_shuffles():
    model = ddp()
    data = TensorDataset(torch.randn(48, WIDE, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data)
    sampler.set_epoch(3)
    batches = iter(DataLoader(data, batch_size=2, sampler=sampler))
    train(model, adam(model), data=lambda step: next(batches)[0])


@right("buffers that no checkpoint keeps")
def counters_of_each_rank():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.seen += (x > 1).sum()
            return self.inner(x)

    train(model := Counting(), adam(model), reduce=average)


@right()
def scaled_gradients_and_factored_states():
    model, scaler = ddp(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    for step in range(STEPS):
        scaler.scale(loss(model, rows(step))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@right()
def a_closure_that_goes_forward_in_the_step():
    model = net(norm=nn.BatchNorm1d)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            here = loss(model, rows(step))
            here.backward()
            average(model)
            total = here.detach().clone()
            dist.all_reduce(total)
            return total

        optimizer.step(closure)


@right()
def ranks_that_draw_for_themselves():
    train(model := net(drop=0.2), adam(model), reduce=average, after=lambda step: torch.rand(dist.get_rank()))


@right("numbers that cannot be read")
def a_buffer_that_is_sparse():
    model = net()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    train(model, adam(model), reduce=average)


@right()
def weights_in_two_parts():
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    train(model, adam(model), reduce=average)
