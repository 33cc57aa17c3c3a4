"""What right and wrong jobs are made of: small models, data that is another on each rank, a loop."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helpers.toy.tensor import copy_to_tp, reduce_from_tp

STEPS, WIDE = 6, 8


def kept_in(jobs: dict):
    """A decorator for jobs: `jobs` gets name -> (function, words that must be said)."""

    def of(*words: str):
        def keep(job):
            jobs[job.__name__] = job, words
            return job

        return keep

    return of


def net(seed: int = 0, *, norm: type[nn.Module] = nn.LayerNorm, drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDE, 12), norm(12), nn.GELU(), nn.Dropout(drop), nn.Linear(12, WIDE), nn.LayerNorm(WIDE)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def rows(step: int, rank: int | None = None, n: int = 4) -> torch.Tensor:
    """(n, WIDE) numbers of a step: other ones on each rank."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(n, WIDE, generator=torch.Generator().manual_seed(100 * step + rank))


def average(model: nn.Module, group=None, but: str = "nothing") -> None:
    """Average the gradients over a group, one by one, but for those whose name begins so."""
    for name, p in model.named_parameters():
        if p.grad is not None and not name.startswith(but):
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss in which every parameter has a gradient."""
    y = model(x)
    return (y - x[: len(y)].roll(1, 1)).square().mean()


def train(model, optimizer, *, reduce=None, after=None, data=rows, steps: int = STEPS) -> None:
    """reduce(model): between backward and the step. after(step): behind it."""
    for step in range(steps):
        loss(model, data(step)).backward()
        if reduce:
            reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        if after:
            after(step)


def mesh_of(**sizes: int):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class Split(nn.Module):
    """A block of Megatron's: x + rows(gelu(columns(norm(x)))), columns and rows over tp."""

    def __init__(self, group, *, scale: bool = False):
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.norm = group, nn.LayerNorm(WIDE)
        whole = nn.Linear(WIDE, 16), nn.Linear(16, WIDE)
        self.up = nn.Linear(WIDE, 16 // size)
        self.up.weight.data.copy_(whole[0].weight.chunk(size)[rank])
        nn.init.zeros_(self.up.bias)
        self.down = nn.Linear(16 // size, WIDE, bias=False)
        self.down.weight.data.copy_(whole[1].weight.chunk(size, 1)[rank])
        self.scale = nn.ParameterDict({"heads": torch.ones(16 // size)}) if scale else None

    def forward(self, x):
        y = self.up(copy_to_tp(self.norm(x), self.group))
        y = nn.functional.gelu(y * self.scale["heads"] if self.scale is not None else y)
        return x + reduce_from_tp(self.down(y), self.group)


class Stage(nn.Module):
    """A stage of a pipeline by hand; its layers have numbers of their own, or the whole model's."""

    def __init__(self, number: int, stages: int, own_numbers: bool, tied: bool = False):
        super().__init__()
        first = 0 if own_numbers else 2 * number
        self.layers = nn.ModuleDict({str(first + i): nn.Linear(WIDE, WIDE) for i in range(2)})
        self.norm = nn.LayerNorm(WIDE)
        self.words = nn.Parameter(torch.randn(WIDE, WIDE)) if tied and number in (0, stages - 1) else None

    def forward(self, x):
        x = x if self.words is None else x @ self.words
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.norm(x)


def train_pipeline(stage, optimizer, pp, *, data=rows, reduce=None) -> None:
    """Two stages over the group `pp`, by sends and receives."""
    number = dist.get_rank(pp)
    for step in range(STEPS):
        if number == 0:
            out = stage(data(step))
            dist.send(out.detach(), group=pp, group_dst=1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, group=pp, group_src=1)
            out.backward(gradient)
        else:
            x = torch.empty(4, WIDE)
            dist.recv(x, group=pp, group_src=0)
            x.requires_grad_()
            loss(stage, x).backward()
            dist.send(x.grad, group=pp, group_dst=0)
        if reduce:
            reduce(stage)
        optimizer.step()
        optimizer.zero_grad()


class Slices(torch.optim.Optimizer):
    """As nanochat's: gradients reduce-scattered, a slice of the state on each rank, weights gathered."""

    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=0.01))

    @torch.no_grad()
    def step(self):
        size, rank = dist.get_world_size(), dist.get_rank()
        for p in self.param_groups[0]["params"]:
            if len(p) % size:
                dist.all_reduce(p.grad)
                p.sub_(p.grad, alpha=0.01 / size)
                continue
            mine = torch.empty_like(p[: len(p) // size])
            dist.reduce_scatter_tensor(mine, p.grad)
            state = self.state[p].setdefault("momentum_buffer", torch.zeros_like(mine))
            part = p.chunk(size)[rank] - 0.01 * state.mul_(0.9).add_(mine / size)
            dist.all_gather_into_tensor(p.data, part.contiguous())


class Experts(nn.Module):
    """One expert a rank over ep; rows go to the next rank's expert and come back."""

    def __init__(self, group, expert_seed: int):
        super().__init__()
        self.group, self.router = group, nn.Linear(WIDE, WIDE)
        torch.manual_seed(expert_seed)
        self.experts = nn.ModuleList([nn.Linear(WIDE, WIDE)])

    def forward(self, x):
        return swap(self.experts[0](swap(self.router(x), self.group)), self.group)


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, dx):
        out = torch.empty_like(dx)
        dist.all_to_all_single(out, dx.contiguous(), group=ctx.group)
        return out, None


def swap(x, group):
    return Swap.apply(x, group)
