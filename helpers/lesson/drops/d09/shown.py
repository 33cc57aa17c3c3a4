"""Drop 09, what its cells show: states and activations, on paper and on real ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .... import toy
from ....runtime import memory
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....table import Table, human
from ....theory import memory as theory
from ....theory.frameworks import FRAMEWORKS

# -- states ------------------------------------------------------------------------------------


def bytes_per_parameter() -> Table:
    """The ways people count, side by side."""
    rows = [
        [name, *(str(parts[k]) for k in ("weights", "gradients", "optimizer")), str(sum(parts.values()))]
        for name, parts in theory.BYTES_PER_PARAMETER.items()
    ]
    return Table(["bytes for one parameter", "weights", "gradients", "optimizer", "in all"], rows)


def zero_stages(params: float, d: int) -> Table:
    """States of `params` parameters on each of d ranks, by ZeRO stage, in mixed precision."""
    formulas = ("16·N", "4·N + 12·N/d", "2·N + 14·N/d", "16·N/d")
    rows = []
    for zero, formula in enumerate(formulas):
        parts = theory.states(params, d, zero)
        rows.append(
            [
                f"ZeRO-{zero}" if zero else "no ZeRO",
                formula,
                *(human(parts[k]) for k in parts),
                human(sum(parts.values())),
            ]
        )
    return Table(
        ["", "formula", "weights", "gradients", "optimizer", "in all"],
        rows,
        title=f"N = {params:.3g} parameters, d = {d}",
    )


KINDS = {"DP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "FSDP": 3}  # how it is called here -> ZeRO stage


class _Training:
    """The toy on this rank as one of KINDS trains it, over the ranks of `mesh`: weights, optimizer, a step.

    half: in mixed precision. options: of the hand-written ZeRO.
    """

    def __init__(self, kind: str, mesh: DeviceMesh, half: bool = False, **options):
        self.model = self.wrapped = toy.ToyTransformer(seed=0)
        self.shards, precision = [], torch.bfloat16 if half else None
        if kind == "FSDP":
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32 if half else None)
            for part in (*self.model.blocks, self.model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        elif kind == "DP":
            # Else its buckets are a second copy of the gradients.
            self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            self.model.to(precision)
            zero = {1: toy.Zero1, 2: toy.Zero2, 3: toy.Zero3}[KINDS[kind]](
                self.model, group=mesh.get_group(), **options
            )
            self.optimizer, self.step = zero.optimizer, zero.step
            self.shards = [unit.shard for unit in zero.units if unit]
            return
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters())
        self.step = self.optimizer.step

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        toy.loss_of(self.wrapped(tokens).float(), targets).backward()

    def held(self) -> dict[str, int]:
        """Bytes of weights, of gradients, and of the optimizer: Adam's m and v, and the master copy.

        The shard of the hand-written ZeRO is the master copy of half-precision weights. Of float32 weights it
        is a copy: counted where weights are not whole.
        """
        size = lambda tensors: sum(memory.storages(tensors).values())
        parameters = list(self.model.parameters())
        master = self.shards if self.shards and self.shards[0].dtype != parameters[0].dtype else []
        adam = [v for state in self.optimizer.state.values() for v in state.values()]
        return {
            "weights": size(parameters) or size(self.shards),
            "gradients": size(
                g for p in (*parameters, *self.shards) for g in (p.grad, getattr(p, "main_grad", None))
            ),
            "optimizer": size(master) + size(v for v in adam if isinstance(v, torch.Tensor) and v.dim()),
        }


def measured_states(world: World, kind: str) -> tuple[dict[str, int], Traffic]:
    """What rank 0 holds just before the optimizer's step, in float32 with Adam, and the bytes of one step.
    kind: one of KINDS.
    """

    def run():
        rank, d = dist.get_rank(), dist.get_world_size()
        training = _Training(kind, init_device_mesh("cpu", (d,), mesh_dim_names=("dp",)))
        tokens, targets = (toy.my_share(t, rank, d) for t in toy.make_batch(8, 32))
        training.backward(tokens, targets)
        training.step()  # the first step makes Adam's state, and DDP's buckets
        from ....runtime import current

        dist.barrier()
        current.count_from_here()  # the second step's bytes
        training.backward(tokens, targets)
        held = training.held()
        training.step()
        return held

    return world.run(run)[0], world.traffic


def states_table(world: World, by_kind: dict[str, dict[str, int]]) -> Table:
    """Measured states beside the formulas for float32: 4 + 4 + 8 bytes a parameter."""
    n, d = sum(p.numel() for p in toy.ToyTransformer().parameters()), len(world)
    rows = []
    for kind, held in by_kind.items():
        predicted = sum(theory.states(n, d, KINDS[kind], weights=4, gradients=4, optimizer=8).values())
        total = sum(held.values())
        rows.append(
            [
                kind,
                *(human(held[k]) for k in ("weights", "gradients", "optimizer")),
                human(total),
                human(predicted),
                f"{total / predicted:.2f}",
            ]
        )
    return Table(
        ["", "weights", "gradients", "optimizer", "measured", "predicted", "measured ÷ predicted"],
        rows,
        title=f"one of {d} ranks, {n:,} parameters, float32",
    )


# -> as which kind it trains here, with which options; whose record says its bytes; and those as a formula
BY_FRAMEWORK = {
    "textbook, DeepSpeed": ("ZeRO-1", {}, "deepspeed", "4 + 12/d"),
    "Megatron-LM": ("ZeRO-1", {"precise_sums": True}, "megatron-lm", "6 + 12/d"),
    "torchtitan": ("FSDP", {}, "torchtitan", "16/d"),
}


def by_framework(world: World) -> Table:
    """Bytes for a parameter in mixed precision, as three frameworks keep it: on a rank alone and on one of
    all d, by formula and measured just before the optimizer's step.
    """

    def run(kind: str, options: dict, d: int) -> int:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // d, d), mesh_dim_names=("apart", "dp"))["dp"]
        training, batch = _Training(kind, mesh, half=True, **options), toy.make_batch(2, 32)
        training.backward(*batch)
        training.step()  # makes Adam's state
        training.backward(*batch)
        return sum(training.held().values())

    n, rows = sum(p.numel() for p in toy.ToyTransformer().parameters()), []
    for name, (kind, options, whose, formula) in BY_FRAMEWORK.items():
        record = FRAMEWORKS[whose]
        parts = (record.weight_bytes, record.gradient_bytes, record.optimizer_bytes)
        rows.append([name, kind, formula])
        for d in (1, len(world)):
            predicted = sum(theory.states(1, d, KINDS[kind], *parts).values())
            rows[-1] += [f"{predicted:.0f}", f"{world.run(run, kind, options, d)[0] / n:.2f}"]
    return Table(
        ["mixed precision", "", "formula", "d = 1", "measured", f"d = {len(world)}", "measured"],
        rows,
        title="bytes for a parameter on one rank",
    )


def step_bytes(world: World, moved: dict[str, Traffic]) -> Table:
    """Bytes of one step in units of P·(d-1)/d, P the bytes of the gradients: by the book, and on the wire."""
    d, p = len(world), 4 * sum(q.numel() for q in toy.ToyTransformer().parameters())
    unit = p * (d - 1) / d
    rows = [
        [
            kind,
            "3" if KINDS[kind] == 3 else "2",
            f"{traffic.counted[0] / unit:.2f}",
            "n/a" if traffic.wire[0] is None else f"{traffic.wire[0] / unit:.2f}",
        ]
        for kind, traffic in moved.items()
    ]
    return Table(
        ["", "predicted", "counted", "on the wire"],
        rows,
        title="sent by one rank in a step, in units of P·(d−1)/d",
    )


# -- activations -------------------------------------------------------------------------------

_drop = lambda x: torch.native_dropout(x, 0.1, True)[0]  # keeps a mask of one byte a number, as a GPU's does


class MegatronBlock(nn.Module):
    """A layer as Korthikanti et al. 2022 count it: biases, dropout, scores kept. Half precision."""

    def __init__(self, hidden: int, heads: int, fused: bool = False):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.bfloat16()

    def attend(self, q, k, v):  # each (b, a, s, h/a)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return _drop((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)) @ v

    def forward(self, x):  # (b, s, h)
        y = self.norm1(x)
        q, k, v = (
            matrix(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        x = x + _drop(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        return x + _drop(self.down(F.gelu(self.up(self.norm2(x)))))


def activations(b: int = 2, s: int = 128, h: int = 256, a: int = 4) -> dict[str, tuple[float, float]]:
    """Bytes that a block keeps for backward, in units of s·b·h: (by formula, measured by
    saved-tensor hooks).
    """

    def kept(fused: bool, recompute: str) -> float:
        block = MegatronBlock(h, a, fused)
        x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
        if recompute == "selective":
            plain = block.attend
            block.attend = lambda *qkv: checkpoint(plain, *qkv, use_reentrant=False)
        with memory.saved_activations(block) as held:
            y = checkpoint(block, x, use_reentrant=False) if recompute == "full" else block(x)
            return held.now / (s * b * h) if y.requires_grad else 0.0

    return {
        "all of it": (34 + 5 * a * s / h, kept(False, "none")),
        "fused attention": (34, kept(True, "none")),
        "selective recompute": (34, kept(False, "selective")),
        "full recompute": (2, kept(False, "full")),
    }


def activations_table(**sizes) -> Table:
    rows = [
        [name, formula, f"{predicted:.1f}", f"{measured:.1f}"]
        for (name, (predicted, measured)), formula in zip(
            activations(**sizes).items(), ("34 + 5·a·s/h", "34", "34", "2")
        )
    ]
    return Table(
        ["kept for backward", "formula", "predicted", "measured"],
        rows,
        title="one layer, in units of s·b·h bytes",
    )
