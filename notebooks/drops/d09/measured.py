"""Functions for the cells of drop 09: states, messages and activations, by formula and measured on ranks."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drops import lines
from helpers import toy
from helpers.ranks import World, current, memory
from three_axes.count import Traffic
from three_axes.paper import by_hand
from three_axes.plan import BYTES_PER_PARAMETER, FRAMEWORKS, Job, Layout, find_model, sent
from three_axes.table import Table, human

line = lines.states  # the reader's, or the course's
PARTS = ("weights", "gradients", "optimizer")


def bytes_per_parameter() -> Table:
    """The usual ways to count the bytes of a parameter's states, side by side."""
    kinds = BYTES_PER_PARAMETER.items()
    rows = [[name, *map(str, (*parts.values(), sum(parts.values())))] for name, parts in kinds]
    return Table(["bytes for one parameter", *PARTS, "in all"], rows)


def zero_stages(params: float, d: int) -> Table:
    """States of `params` parameters on each of d ranks, by ZeRO stage, in mixed precision."""
    rows = []
    for zero, formula in enumerate(("16·N", "4·N + 12·N/d", "2·N + 14·N/d", "16·N/d")):
        parts = by_hand.states_bytes(params, d, zero=zero)
        rows.append([f"ZeRO-{zero}" if zero else "no ZeRO", formula, *map(human, parts), human(sum(parts))])
    return Table(
        ["", "formula", *PARTS, "in all"], rows, title=f"N = {params / 1e9:g}·10⁹ parameters, d = {d}"
    )


KINDS = {"DP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "FSDP": 3}  # name of a training here -> ZeRO stage


class _Training:
    """The toy on this rank as one of KINDS trains it, over the ranks of `mesh`: weights, optimizer, a step.

    half: whether to train in mixed precision. options: arguments of the hand-written ZeRO.
    """

    def __init__(self, kind: str, mesh: DeviceMesh, half: bool = False, **options):
        self.model = self.wrapped = toy.ToyTransformer(seed=0)
        self.shards, precision = [], torch.bfloat16 if half else None
        if kind == "FSDP":
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32 if half else None)
            for part in (*self.model.blocks, self.model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        elif kind == "DP":
            # Without this option DDP's buckets are a second copy of the gradients.
            self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            self.model.to(precision)
            split = (toy.Zero1, toy.Zero2, toy.Zero3)[KINDS[kind] - 1]
            zero = split(self.model, group=mesh.get_group(), **options)
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

        Under the hand-written ZeRO the shard is the master copy of half-precision weights. Of float32 weights
        it is a second copy, which counts only if the weights are not whole.
        """
        size = lambda tensors: sum(memory.storages(tensors).values())
        parameters, held = list(self.model.parameters()), memory.by_kind(self.model, self.optimizer)
        master = self.shards if self.shards and self.shards[0].dtype != parameters[0].dtype else []
        gradients = (g for p in (*parameters, *self.shards) for g in (p.grad, getattr(p, "main_grad", None)))
        return {
            "weights": held["parameters"] or size(self.shards),
            "gradients": size(gradients),
            "optimizer": size(master) + held["optimizer"],
        }


def measured_states(world: World, kind: str) -> tuple[list[dict[str, int]], Traffic]:
    """The bytes that each rank holds just before the optimizer's step, in float32 with Adam, and the traffic
    of one step. kind: one of KINDS.
    """

    def run():
        rank, d = dist.get_rank(), dist.get_world_size()
        training = _Training(kind, init_device_mesh("cpu", (d,), mesh_dim_names=("dp",)))
        tokens, targets = (toy.my_share(t, rank, d) for t in toy.make_batch(8, 32))
        training.backward(tokens, targets)
        training.step()  # the first step makes Adam's state, and DDP's buckets
        dist.barrier()
        current.count_from_here()  # the second step's bytes
        training.backward(tokens, targets)
        held = training.held()
        training.step()
        return held

    held = world.run(run)
    return held, world.traffic


def states_table(world: World, by_kind: dict[str, list[dict[str, int]]]) -> Table:
    """Measured states beside the line `states` for float32: 4 + 4 + 8 bytes a parameter."""
    n, d = sum(p.numel() for p in toy.ToyTransformer().parameters()), len(world)
    rows = []
    for kind, (held, *_) in by_kind.items():
        predicted = line(n, d, KINDS[kind], w=4, g=4, o=8)
        total = sum(held.values())
        sizes = [human(size) for size in (*(held[part] for part in PARTS), total, predicted)]
        rows.append([kind, *sizes, f"{total / predicted:.2f}"])
    columns = ["", *PARTS, "measured", "predicted", "measured ÷ predicted"]
    return line.below(Table(columns, rows, title=f"one of {d} ranks, {n:,} parameters, float32"))


# Framework -> (the kind of KINDS that trains as it does, options of that, the name of the record with its
# bytes, a formula for them)
BY_FRAMEWORK = {
    "textbook": ("ZeRO-1", {}, "textbook", "4 + 12/d"),
    "DeepSpeed": ("ZeRO-1", {}, "deepspeed", "4 + 12/d"),
    "Megatron-LM": ("ZeRO-1", {"precise_sums": True}, "megatron-lm", "6 + 12/d"),
    "torchtitan": ("FSDP", {}, "torchtitan", "16/d"),
}


def by_framework(world: World) -> Table:
    """Bytes that a parameter takes in mixed precision, in the textbook and in three frameworks: with d = 1
    and with all d ranks, by formula and measured just before the optimizer's step. The last column has the
    bytes that a rank of a 7B sends for it in a step, by the planner.
    """

    def run(kind: str, options: dict, d: int) -> int:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // d, d), mesh_dim_names=("apart", "dp"))["dp"]
        training, batch = _Training(kind, mesh, half=True, **options), toy.make_batch(2, 32)
        training.backward(*batch)
        training.step()  # makes Adam's state
        training.backward(*batch)
        return sum(training.held().values())

    seven, d = find_model("llama-2-7b"), len(world)
    n, rows = sum(p.numel() for p in toy.ToyTransformer().parameters()), []
    for name, (kind, options, whose, formula) in BY_FRAMEWORK.items():
        framework = FRAMEWORKS[whose]
        holds = framework.holds
        parts = (holds.weight_bytes, holds.gradient_bytes, holds.optimizer_bytes)
        rows.append([name, kind, formula])
        for ranks in (1, d):
            predicted = sum(by_hand.states_bytes(1, ranks, zero=KINDS[kind], of_each=parts))
            rows[-1] += [f"{predicted:.0f}", f"{world.run(run, kind, options, ranks)[0] / n:.2f}"]
        moved = sent(Job(seven, global_batch=d, framework=framework), Layout(dp=d, zero=KINDS[kind]))["dp"]
        rows[-1].append(f"{moved / seven.params * d / (d - 1):.1f}")
    return Table(
        ["mixed precision", "", "formula", "d = 1", "measured", f"d = {d}", "measured", "sent, · (d−1)/d"],
        rows,
        title="bytes for a parameter on one rank, and sent by it in a step",
    )


def step_bytes(world: World, moved: dict[str, Traffic]) -> Table:
    """Bytes of one step in units of S·(d-1)/d, where S is the bytes of the gradients: by the line
    `all_reduce`, which has two halves, and three under ZeRO-3; counted; and on the wire.
    """
    d, p = len(world), 4 * sum(q.numel() for q in toy.ToyTransformer().parameters())
    unit, half = p * (d - 1) / d, lines.all_reduce(p, d) / 2
    in_units = lambda size: "n/a" if size is None else f"{size / unit:.2f}"
    rows = [
        [
            kind,
            f"{(3 if KINDS[kind] == 3 else 2) * half / unit:g}",
            in_units(sent.counted[0]),
            in_units(sent.wire[0]),
        ]
        for kind, sent in moved.items()
    ]
    columns = ["", "predicted", "counted", "on the wire"]
    made = Table(columns, rows, title="sent by one rank in a step, in units of S·(d−1)/d")
    return lines.all_reduce.below(made)


# -- activations -------------------------------------------------------------------------------

_drop = lambda x: torch.native_dropout(x, 0.1, True)[0]  # keeps a mask of one byte a number, as a GPU's does


def _attend(q, k, v):
    """Attention whose scores are kept, with dropout. Each is (b, a, s, h/a)."""
    return _drop((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)) @ v


def activations_table(b: int = 2, s: int = 128, h: int = 256, a: int = 4) -> Table:
    """Bytes that a layer keeps for backward, in half precision, as Korthikanti et al. 2022 count them: by
    formula, and measured by saved-tensor hooks.
    """

    def kept(fused: bool, recompute: str) -> float:
        block = toy.Block(h, a).bfloat16()
        for part in (block.attention, block.mlp):
            part.register_forward_hook(lambda _, args, y: _drop(y))
        if not fused:
            block.attention.attend = _attend
        if recompute == "selective":
            block.attention.attend = partial(checkpoint, _attend, use_reentrant=False)
        x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
        with memory.saved_activations(block) as held:
            y = checkpoint(block, x, use_reentrant=False) if recompute == "full" else block(x)
            return held.now / (s * b * h) if y.requires_grad else 0.0

    rows = [
        [
            name,
            formula,
            # A fused kernel recomputes the scores, as "selective" does.
            f"{by_hand.layer_activation_bytes(b, s, h, a, recompute=again) / (s * b * h):.1f}",
            f"{kept(fused, 'none' if fused else again):.1f}",
        ]
        for name, formula, fused, again in (
            ("all of it", "34 + 5·a·s/h", False, "none"),
            ("fused attention", "34", True, "selective"),
            ("selective recompute", "34", False, "selective"),
            ("full recompute", "2", False, "full"),
        )
    ]
    columns = ["kept for backward", "formula", "predicted", "measured"]
    return Table(columns, rows, title="one layer, in units of s·b·h bytes")


def answer(held: dict[str, list[dict[str, int]]]) -> tuple[str, str]:
    """The arguments of `guess.reveal`: bytes for a parameter on a rank, under ZeRO-1."""
    a_parameter = sum(held["ZeRO-1"][0].values()) / sum(p.numel() for p in toy.ToyTransformer().parameters())
    why = "Weights and gradients stay whole: 4 + 4. The optimizer's 8 become 8/4 = 2."
    return f"{a_parameter:.0f} bytes", why
