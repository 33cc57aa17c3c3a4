"""The jobs of test_copies.py: PROGRAMS and edits of them, and the classes and functions that they use."""

# ruff: noqa: F401  rows of jobs.csv use what is imported

import csv
from pathlib import Path
from typing import NamedTuple

import engine
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drops import b5
from helpers.toy.tensor import copy_to_tp, reduce_from_tp

WIDE = 8  # columns of a model's input

PROGRAMS = {
    "sum": """
model = net()
# before
optimizer = adam(model)
for step in range(6):
    x = rows(step)
    loss(model, x).backward()
    average(model)
    optimizer.step()
    optimizer.zero_grad()
    # after
""",
    "tensor": """
mesh = mesh_of(dp=2, tp=2)
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDE, WIDE), Split(tp), Split(tp))
optimizer = adam(model)
for step in range(6):
    x = rows(step, dist.get_rank(dp))
    loss(model, x).backward()
    average(model, dp)
    optimizer.step()
    optimizer.zero_grad()
""",
    "pipeline": """
mesh = mesh_of(pp=2, dp=2)
pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
torch.manual_seed(dist.get_rank(pp))
stage = Stage(dist.get_rank(pp), own_numbers=False)
optimizer = adam(stage)
for step in range(6):
    forward_and_backward(stage, rows(step), pp)
    average(stage, dp)
    optimizer.step()
    optimizer.zero_grad()
""",
    "experts": """
mesh = mesh_of(edp=2, ep=2)
edp, ep = mesh.get_group("edp"), mesh.get_group("ep")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDE, WIDE), Experts(ep, seed=dist.get_rank(ep)), nn.LayerNorm(WIDE))
optimizer = adam(model)
for step in range(6):
    x = rows(step)
    loss(model, x).backward()
    average(model, edp)
    average(model, ep, but="1.experts")
    optimizer.step()
    optimizer.zero_grad()
""",
}
DDP_EDIT = "net() => DDP(net(drop=0.1)) & # before => # before⏎torch.manual_seed(rank)  # of dropout"
PROGRAMS["ddp"] = b5.changed(PROGRAMS["sum"], f"{DDP_EDIT} &     average(model)⏎ => ", "sum")


class Job(NamedTuple):
    """A training job. verdict: right, noted or wrong. says: words that `verify` must print."""

    verdict: str
    says: list[str]
    text: str

    def run(self, names: dict) -> None:
        """Run the job on a rank. `names` gets the job's variables and keeps them alive."""
        names |= globals() | dict(rank=dist.get_rank(), size=dist.get_world_size())
        exec(compile(self.text, "job.py", "exec"), names)


def jobs() -> dict[str, Job]:
    """Name -> job, for each row of jobs.csv. A row is an edit of a program or of an earlier row."""
    made, texts = {}, dict(PROGRAMS)
    for row in csv.DictReader(Path(__file__).with_name("jobs.csv").open(encoding="utf-8")):
        text = texts[row["of"]]
        texts[row["name"]] = text = b5.changed(text, row["edit"], row["of"]) if row["edit"] else text
        made[row["name"]] = Job(row["verdict"], row["says"].split(" & "), text)
    return made


def mesh_of(**sizes: int):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def net(seed: int = 0, *, norm: type[nn.Module] = nn.LayerNorm, drop: float = 0.0) -> nn.Sequential:
    """A small model, whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDE, 12), norm(12), nn.GELU(), nn.Dropout(drop), nn.Linear(12, WIDE), nn.LayerNorm(WIDE)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def rows(step: int, rank: int | None = None, n: int = 4) -> torch.Tensor:
    """Random numbers (n, WIDE) that depend on the step and on the rank."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(n, WIDE, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss in which every parameter has a gradient."""
    y = model(x)
    return (y - x[: len(y)].roll(1, 1)).square().mean()


def mean(tensor: torch.Tensor, group=None) -> None:
    """Replace a tensor by its mean over the ranks of a group."""
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def average(model: nn.Module, group=None, but: str = "nothing") -> None:
    """Average the gradients over a group, one by one, except those whose name begins with `but`."""
    for name, p in model.named_parameters():
        if p.grad is not None and not name.startswith(but):
            mean(p.grad, group)


def moving_average(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class Cut(nn.Module):
    """Each rank computes its rows of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return self.inner(x.chunk(dist.get_world_size())[dist.get_rank()])


class Positions(nn.Module):
    """The first layer embeds positions, equal on all ranks. The second layer reads the rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.places, self.first = nn.Embedding(4, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x, *, within: bool = False):
        at = self.places(torch.arange(4 // (dist.get_world_size() if within else 1)))
        if within:  # each rank takes its rows of the whole batch
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        return self.first(x) + at


class Owned(torch.optim.Optimizer):
    """One rank owns each parameter and updates it. All ranks hold a momentum; only the owner's is used."""

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


class Split(nn.Module):
    """A Megatron block, x + rows(gelu(columns(norm(x)))). tp splits the columns and the rows."""

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
    """One of two pipeline stages. If `own_numbers`, both stages number their layers from 0; otherwise the
    numbers are those of the whole model. If `tied`, both stages hold equal words, and their layers differ.
    """

    def __init__(self, number: int, own_numbers: bool, tied: bool = False):
        super().__init__()
        first = 0 if own_numbers else 2 * number
        self.words = nn.Parameter(torch.randn(WIDE, WIDE)) if tied else None
        if tied:
            torch.manual_seed(5 + number)
        self.layers = nn.ModuleDict({str(first + i): nn.Linear(WIDE, WIDE) for i in range(2)})
        self.norm = nn.LayerNorm(WIDE)

    def forward(self, x):
        x = x if self.words is None else x @ self.words
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.norm(x)


def forward_and_backward(stage: Stage, x: torch.Tensor, pp) -> None:
    """Run one batch through two stages by sends and receives."""
    if dist.get_rank(pp) == 0:
        out = stage(x)
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


class Experts(nn.Module):
    """Each rank of ep holds one expert, and sends its rows to the next rank's expert and back."""

    def __init__(self, group, seed: int):
        super().__init__()
        self.group, self.router = group, nn.Linear(WIDE, WIDE)
        torch.manual_seed(seed)
        self.experts = nn.ModuleList([nn.Linear(WIDE, WIDE)])

    def forward(self, x):
        return swap(self.experts[0](swap(self.router(x), self.group)), self.group)


class Swap(torch.autograd.Function):
    """An all-to-all whose gradients go back by an all-to-all."""

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
