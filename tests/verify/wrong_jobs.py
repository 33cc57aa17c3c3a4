"""Wrong jobs that copies can show. JOBS: name -> (function, words that must be said); "a note" among them
where `verify` notes and does not accuse.
"""

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
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

JOBS = {}
wrong = kept_in(JOBS)
ALL = "of 8 tensors with copies 8 have parted"


@wrong(ALL, "(ranks 0 | 1 | 2 | 3)")
def nothing_is_summed():
    train(model := net(), adam(model))


@wrong("1.weight differs", "1.bias differs", "copies 2 have parted")
def a_norm_is_not_summed():
    train(model := net(), adam(model), reduce=lambda model: average(model, but="1."))


@wrong("1.weight differs", "1.bias differs", "copies 2 have parted")
def batch_norms_weight_is_not_summed():
    train(model := net(norm=nn.BatchNorm1d), adam(model), reduce=lambda model: average(model, but="1."))


@wrong("and gradients are summed over these ranks")
def seeded_apart_and_summed_one_by_one():
    train(model := net(dist.get_rank()), adam(model), reduce=average)


@wrong("and gradients are summed over these ranks")
def seeded_apart_and_summed_flat():
    def reduce(model):
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        for p in model.parameters():
            p.grad, flat = flat[: p.numel()].view_as(p).clone(), flat[p.numel() :]

    train(model := net(dist.get_rank()), adam(model), reduce=reduce)


@wrong("and 3 more differ", "and gradients are summed over these ranks")
def seeded_apart_and_summed_by_the_optimizer():
    model = net(dist.get_rank())
    train(model, Slices(model.parameters()))


@wrong("and gradients are summed over these ranks")
def made_anew_behind_ddp():
    model = DistributedDataParallel(net())
    model.module.load_state_dict(net(dist.get_rank()).state_dict())
    train(model, adam(model))


@wrong("4.weight differs", "and gradients are summed over these ranks")
def a_layer_loaded_on_rank_0_alone():
    model = DistributedDataParallel(net())
    if dist.get_rank() == 0:
        nn.init.normal_(model.module[4].weight)
    train(model, adam(model))


@wrong(ALL, "its exp_avg differed before")
def states_of_another_run():
    model = net()
    optimizer = adam(model)
    for p in model.parameters():
        first = torch.full_like(p, 0.01 * (1 + dist.get_rank()))
        optimizer.state[p] = dict(step=torch.tensor(5.0), exp_avg=first, exp_avg_sq=torch.full_like(p, 1e-4))
    train(model, optimizer, reduce=average)


@wrong(ALL, "the optimizers differ: lr 0.01 on rank 0, lr 0.02 on rank 1")
def another_rate_on_each_rank():
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01 * (1 + dist.get_rank())), reduce=average)


@wrong("weight_decay 0.1 on rank 3", ALL)
def weight_decay_on_one_rank():
    model = net()
    how = dict(lr=0.01, weight_decay=0.1 * (dist.get_rank() == 3))
    train(model, torch.optim.AdamW(model.parameters(), **how), reduce=average)


@wrong("after step 3: an average's", "8 have parted")
def an_average_that_rank_1_left_out_once():
    model = DistributedDataParallel(net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    update = lambda step: step == 2 and dist.get_rank() == 1 or ema.update_parameters(model.module)
    train(model, adam(model), after=update)


@wrong("after step 1: an average's")
def an_average_of_another_decay():
    model = DistributedDataParallel(net())
    shadow = {name: p.detach().clone() for name, p in model.module.named_parameters()}

    def update(step):
        for name, p in model.module.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1 * (1 + dist.get_rank()))

    train(model, adam(model), after=update)


def _split(reduce_norms: bool, clip: bool = False):
    torch.manual_seed(0)
    tp = mesh_of(tp=4).get_group()
    model = nn.Sequential(nn.Linear(WIDE, WIDE), *(Split(tp) for _ in range(2)))

    def reduce(model):
        if not reduce_norms:  # under sequence parallelism, say
            for name, p in model.named_parameters():
                if "norm" in name:
                    p.grad *= 1 + dist.get_rank()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, reduce=reduce, data=lambda step: rows(step, 0))


@wrong("norm.weight differs along", "norm.bias differs along", "6 have parted")
def norms_not_summed_over_tp():
    _split(reduce_norms=False)


@wrong("norm.weight differs along", "0.weight differs along")
def clipped_by_the_norm_of_a_shard():
    _split(reduce_norms=True, clip=True)


@wrong("words differs along", "(ranks 0, 1 | 2, 3)", "have parted")
def tied_words_not_summed_over_pp():
    mesh = mesh_of(pp=2, dp=2)
    torch.manual_seed(0)
    stage = Stage(number := mesh.get_local_rank("pp"), 2, own_numbers=True, tied=True)
    for layer in stage.layers.values():
        torch.manual_seed(5 + number)
        nn.init.normal_(layer.weight)
    reduce = lambda model: average(model, mesh.get_group("dp"))
    train_pipeline(stage, adam(stage), mesh.get_group("pp"), reduce=reduce)


@wrong("differs along")
def a_pipelines_stages_not_summed_over_dp():
    mesh = mesh_of(pp=2, dp=2)
    torch.manual_seed(mesh.get_local_rank("pp"))
    stage = Stage(mesh.get_local_rank("pp"), 2, own_numbers=False)
    train_pipeline(stage, adam(stage), mesh.get_group("pp"))


def _experts(but: str):
    mesh = mesh_of(edp=2, ep=2)
    torch.manual_seed(0)
    seed = mesh.get_local_rank("ep")
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Experts(mesh.get_group("ep"), seed), nn.LayerNorm(WIDE))

    def reduce(model):
        average(model, mesh.get_group("edp"), but="1.experts")
        average(model, mesh.get_group("ep"), but=but)

    train(model, adam(model), reduce=reduce)


@wrong("1.experts.0.weight differs along")
def experts_not_summed_over_edp():
    _experts(but="1.experts")


@wrong("bias differs along")
def a_routers_bias_of_its_own_counts():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()
            self.register_buffer("bias", torch.zeros(WIDE))

        def forward(self, x):
            self.counts = (x > 0).sum(0)
            return self.inner(x + self.bias)

    model = Routed()
    train(
        model,
        adam(model),
        reduce=average,
        after=lambda step: model.bias.add_((2 - model.counts).sign(), alpha=0.1),
    )


@wrong(ALL)
def ddp_is_passed_by():
    model = DistributedDataParallel(net())
    train(model.module, adam(model))


@wrong(ALL)
def gradients_summed_over_the_wrong_half():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    train(model := net(), adam(model), reduce=lambda model: average(model, halves[dist.get_rank() // 2]))


@wrong("0.weight differs")
def frozen_on_one_rank():
    model = net()
    model[0].requires_grad_(dist.get_rank() != 2)

    def reduce(model):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        average(model)
        if dist.get_rank() == 2:
            model[0].weight.grad = None

    train(model, torch.optim.Adam(model.parameters(), lr=0.01), reduce=reduce)


@wrong("momentum_buffer of", "8 have parted")
def nothing_is_summed_at_a_rate_of_0():
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))


@wrong("4.weight differs")
def one_rank_rounds_its_weights():
    model = net()

    def rounds(step):
        if dist.get_rank() == 1:
            model[4].weight.data = model[4].weight.data.bfloat16().float()

    train(model, adam(model), reduce=average, after=rounds)


@wrong("0.weight differs")
def weights_that_one_rank_does_not_gather():
    model = net()

    def gather(step):
        for i, p in enumerate(model.parameters()):
            other = p.data.clone()
            dist.broadcast(other, i % 4)
            if i or dist.get_rank() != 3:
                p.data.copy_(other)

    def only_mine(model):
        average(model)
        for i, p in enumerate(model.parameters()):
            p.grad = p.grad if i % 4 == dist.get_rank() else None

    train(model, adam(model), reduce=only_mine, after=gather)


@wrong("ranks 0–3 saw equal inputs in each of 5 steps: a note")
def the_same_rows_on_all_ranks():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(net())
    train(model, adam(model), data=lambda step: rows(step, 0))


@wrong("ranks 0–3 saw equal inputs in each of 5 steps: a note")
def the_same_rows_by_keyword_with_other_dropout():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net(drop=0.3)

        def forward(self, *, rows):
            return self.net(rows)

    model = DistributedDataParallel(Named())
    torch.manual_seed(dist.get_rank())
    optimizer = adam(model)
    for step in range(STEPS):
        model(rows=rows(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@wrong("ranks 0–3 saw equal inputs in each of 5 steps: a note")
def the_same_rows_behind_a_forward_that_fails():
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for step in range(STEPS):
        try:
            model.module(torch.ones(1, WIDE + 1))
        except RuntimeError:
            loss(model, rows(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


@wrong("ranks 0 and 1 saw equal inputs", "ranks 2 and 3 saw equal inputs", "a note")
def the_same_rows_on_two_ranks():
    train(model := net(), adam(model), reduce=average, data=lambda step: rows(step, dist.get_rank() // 2))


@wrong("ranks 0–3 drew the same random numbers in forward in each of 5 steps", "a note")
def the_same_dropout_on_all_ranks():
    model = DistributedDataParallel(net(drop=0.3))
    train(model, adam(model))


@wrong("DistributedSampler: seed 0, epoch 0 on rank 0; seed 1, epoch 0 on rank 1", "a note")
def samplers_of_other_seeds():
    model = DistributedDataParallel(net())
    data = TensorDataset(torch.randn(48, WIDE, generator=torch.Generator().manual_seed(0)))
    batches = iter(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=dist.get_rank())))
    train(model, adam(model), data=lambda step: next(batches)[0])


@wrong("it may be a shard or a copy", "a note")
def a_norm_of_heads_not_summed_over_tp():
    torch.manual_seed(0)
    tp = mesh_of(tp=4).get_group()
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Split(tp, scale=True))
    train(model, adam(model), data=lambda step: rows(step, 0))


@wrong("differs along")
def the_last_microbatch_is_not_summed():
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss(model, rows(step)).backward()
        with model.no_sync():
            loss(model, rows(step + 50)).backward()
        optimizer.step()
        optimizer.zero_grad()
