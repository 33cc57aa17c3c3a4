"""Drop 09: every byte a GPU holds, on paper and on real ranks; what ZeRO divides, and what it sends."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ... import toy
from ...runtime import memory
from ...runtime.failure import RankError
from ...runtime.traffic import Traffic
from ...runtime.world import World
from ...table import Table, human
from ...theory import memory as theory
from ...theory.collectives import book, gloo
from ...toy.names import reduce_scatter
from ..practice import Answer, Exercise, right, wrong

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


def measured_states(world: World, kind: str) -> tuple[dict[str, int], Traffic]:
    """What rank 0 holds just before the optimizer's step, in float32 with Adam, and the bytes of one step.
    kind: one of KINDS.
    """

    def run():
        rank, d = dist.get_rank(), dist.get_world_size()
        model = toy.ToyTransformer(seed=0)
        if kind == "DP":
            wrapped = DistributedDataParallel(
                model, gradient_as_bucket_view=True
            )  # else its buckets are a second copy of the gradients
            optimizer = torch.optim.AdamW(wrapped.parameters())
            step = lambda: optimizer.step()
        elif kind == "FSDP":
            mesh = init_device_mesh("cpu", (d,), mesh_dim_names=("dp",))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            step = lambda: optimizer.step()
        else:
            wrapped, zero = model, {1: toy.Zero1, 2: toy.Zero2, 3: toy.Zero3}[KINDS[kind]](model)
            optimizer, step = zero.optimizer, zero.step
        tokens, targets = (toy.my_share(t, rank, d) for t in toy.make_batch(8, 32))
        held = {}
        for record in (False, True):  # the first step makes Adam's state, and DDP's buckets
            optimizer.zero_grad()
            toy.loss_of(wrapped(tokens), targets).backward()
            shards = [u.shard for u in zero.units if u] if kind.startswith("ZeRO") else []
            held = _by_kind([*model.parameters(), *shards], optimizer, shards)
            step()
            if record:
                break
            from ...runtime import worker

            dist.barrier()
            worker.here.recorder.start()  # the second step's bytes
        return held

    return world.run(run)[0], world.traffic


def _by_kind(parameters: list, optimizer, shards: list) -> dict[str, int]:
    """Bytes of weights, gradients and Adam's m and v.

    A shard of the hand-written ZeRO is the weights' own copy: counted where weights are not whole.
    """
    size = lambda tensors: sum(memory.storages(tensors).values())
    whole = [p for p in parameters if not any(p is s for s in shards)]
    weights = size(whole) or size(shards)
    return {
        "weights": weights,
        "gradients": size(p.grad for p in parameters),
        "optimizer": size(
            v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
        ),
    }


def states_table(world: World, found: dict[str, dict[str, int]]) -> Table:
    """Measured states beside the formulas for float32: 4 + 4 + 8 bytes a parameter."""
    n, d = sum(p.numel() for p in toy.ToyTransformer().parameters()), len(world)
    rows = []
    for kind, held in found.items():
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
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
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


# -- practice 1: bytes per GPU -----------------------------------------------------------------


def bytes_per_gpu(stages, d, t, zero):
    """Bytes of states on the fullest GPU: half-precision weights and gradients; float32 master copy, m and v.

    stages: the number of parameters of each pipeline stage. d, t: sizes of data and tensor parallelism; t
    cuts every parameter. zero: 0 to 3.
    """
    n = max(stages) / t
    return (
        2 * n / (d if zero >= 3 else 1) + 2 * n / (d if zero >= 2 else 1) + 12 * n / (d if zero >= 1 else 1)
    )


WIDTH, DEEP = 64, (3, 2)  # a stack of square matrices, unevenly over two stages


def _measured(zero: int) -> int:
    """One rank of 2 × 2 × 2: hold the states of its matrices in mixed precision, run a step, and count the
    bytes it holds.
    """
    grid = toy.grid_groups(2, 2, 2)
    dp, t, stage = grid["dp"].get_group(), 2, grid["pp"].get_local_rank()
    mine = nn.Sequential(*(nn.Linear(WIDTH, WIDTH // t, bias=False) for _ in range(DEEP[stage]))).bfloat16()
    weights = [p for p in mine.parameters()]
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    sum(layer(x).square().mean() for layer in mine).backward()
    rank, d = dist.get_rank(dp), dist.get_world_size(dp)
    flat = lambda tensors: torch.cat([v.reshape(-1) for v in tensors])
    part = lambda v: v.chunk(d)[rank].clone()
    gradient = flat([p.grad for p in weights])
    if zero >= 2:
        shard = torch.empty(gradient.numel() // d, dtype=gradient.dtype)
        reduce_scatter(shard, gradient, group=dp)
        gradient = shard
    else:
        dist.all_reduce(gradient, group=dp)
    gradient /= d
    for p in weights:
        p.grad = None
    whole = flat([p.detach() for p in weights])
    master = (part(whole) if zero else whole).float()
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    g = (gradient if zero in (0, 2, 3) else part(gradient)).float()
    m.lerp_(g, 0.1), v.lerp_(g.square(), 0.001)
    master -= 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8)
    del g, whole
    kept = [master.to(torch.bfloat16)] if zero == 3 else weights
    held = sum(memory.storages([*kept, gradient, master, m, v]).values())
    dist.barrier(dp)
    return held


def _judge_bytes(attempt) -> Answer:
    stages = [n * WIDTH * WIDTH for n in DEEP]
    with World(8, timeout=10) as world:
        measured = [max(world.run(_measured, zero)) for zero in range(4)]
        cases = (
            [(stages, 2, 2, zero) for zero in range(4)]
            + [([7e9], 64, 1, zero) for zero in range(4)]
            + [([1.75e10] * 2 + [2e10], 8, 8, 1)]
        )
        said = world.run(lambda: [attempt(list(s), d, t, z) for s, d, t, z in cases])[0]
    for i, (case, value) in enumerate(zip(cases, said)):
        try:
            said[i] = float(value) if not isinstance(value, (str, bool)) else None
        except (TypeError, ValueError):
            said[i] = None
        if said[i] is None:
            return wrong("no number", f"bytes_per_gpu{case} returned {value!r}.")
    every = lambda s, d, t, z, weights=2, gradients=2, optimizer=12: (
        weights / (d if z >= 3 else 1) + gradients / (d if z >= 2 else 1) + optimizer / (d if z >= 1 else 1)
    )
    others = {
        "gradients not divided by t": (
            lambda s, d, t, z: bytes_per_gpu(s, d, t, z) + (2 - 2 / t) * max(s) / (d if z >= 2 else 1)
        ),
        "ZeRO-1 divides everything": lambda s, d, t, z: 16 * max(s) / t / (d if z >= 1 else 1),
        "the master copy is forgotten": (
            lambda s, d, t, z: bytes_per_gpu(s, d, t, z) - 4 * max(s) / t / (d if z >= 1 else 1)
        ),
        "the average stage, not the largest": lambda s, d, t, z: bytes_per_gpu([sum(s) / len(s)], d, t, z),
        "all stages on one GPU": lambda s, d, t, z: bytes_per_gpu([sum(s)], d, t, z),
        "gradients divided by neither t nor p": (
            lambda s, d, t, z: bytes_per_gpu(s, d, t, z) + 2 * (sum(s) - max(s) / t) / (d if z >= 2 else 1)
        ),
        "ZeRO left out": lambda s, d, t, z: 16 * max(s) / t,
        "all float32, not mixed precision": lambda s, d, t, z: max(s) / t * every(s, d, t, z, 4, 4, 8),
        "the first stage, not the largest": lambda s, d, t, z: bytes_per_gpu(s[:1], d, t, z),
        "the last stage, not the largest": lambda s, d, t, z: bytes_per_gpu(s[-1:], d, t, z),
        "nothing divided by t": lambda s, d, t, z: bytes_per_gpu(s, d, 1, z),
        "ZeRO-2 leaves gradients whole": lambda s, d, t, z: bytes_per_gpu(s, d, t, 1 if z == 2 else z),
        "ZeRO-3 leaves weights whole": lambda s, d, t, z: bytes_per_gpu(s, d, t, min(z, 2)),
        "stages that do not add up": (
            lambda s, d, t, z: (
                max(s) / t * sum(part / (d if z == k else 1) for part, k in ((12, 1), (2, 2), (2, 3)))
            )
        ),
        "float32 gradients": lambda s, d, t, z: max(s) / t * every(s, d, t, z, 2, 4, 12),
    }
    why = {
        "gradients not divided by t": (
            "A rank has gradients only for the parameters it holds: the split over t divides them too."
        ),
        "gradients divided by neither t nor p": (
            "A rank has gradients only for the parameters it holds: its stage's, cut by t. Calculators that"
            " forget this answer ten times too much for a 70B."
        ),
        "ZeRO left out": (
            "16 bytes a parameter whatever `zero` says: stages 1, 2 and 3 divide more and more of it by d."
        ),
        "all float32, not mixed precision": (
            "4 + 4 + 8 is the other way to 16. ZeRO divides them differently: mixed precision has 2 + 2 + 12."
        ),
        "the first stage, not the largest": (
            "Here the first stage is often the largest, but not always. Take the maximum."
        ),
        "the last stage, not the largest": "The model fits when its fullest GPU does. Take the maximum.",
        "ZeRO-1 divides everything": (
            "ZeRO-1 divides the optimizer's state only: 4·N stays, 12·N/d is divided."
        ),
        "the master copy is forgotten": (
            "Mixed precision keeps a float32 copy of the weights beside m and v: 12 bytes, not 8."
        ),
        "the average stage, not the largest": (
            "The model fits when its fullest GPU does. Stages are not equal: take the largest."
        ),
        "all stages on one GPU": "A pipeline rank holds its own stage only.",
        "nothing divided by t": (
            "Tensor parallelism cuts every parameter: each of t ranks holds 1/t of the stage."
        ),
        "ZeRO-2 leaves gradients whole": (
            "ZeRO-2 divides the gradients as well: 2·N stays, 14·N/d is divided."
        ),
        "ZeRO-3 leaves weights whole": "ZeRO-3 divides the weights as well: 16·N/d.",
        "stages that do not add up": (
            "Each stage keeps what the one before divided: ZeRO-2 divides optimizer and gradients, ZeRO-3 all"
            " three."
        ),
        "float32 gradients": (
            "2 + 4 + 12 is mixed precision with float32 gradients. Here they are half precision: 2 + 2 + 12."
        ),
    }
    near = lambda a, b: abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    truth = [bytes_per_gpu(*case) for case in cases]
    figures = [
        (f"ZeRO-{z}, you, and the fullest of 2 × 2 × 2 real ranks", f"{value:,.0f} B", f"{real:,} B")
        for z, (value, real) in enumerate(zip(said, measured))
    ]
    if (off := next((i for i, (a, b) in enumerate(zip(said, truth)) if not near(a, b)), 0)) > 3:
        s, d, t, z = cases[off]
        figures.append(
            (
                f"ZeRO-{z}, stages of {', '.join(f'{n:.3g}' for n in s)}, d = {d}, t = {t}",
                f"{said[off]:,.0f} B",
                f"{truth[off]:,.0f} B",
            )
        )
    if all(map(near, said, truth)):
        if any(round(value) != real for value, real in zip(said, measured)):
            raise AssertionError(f"the formula says {said[:4]}, the ranks hold {measured}")
        return right(
            "Equal to the byte to what the fullest of eight real ranks holds, for every ZeRO stage.", *figures
        )
    for name, other in others.items():
        if all(near(a, other(*case)) for a, case in zip(said, cases)):
            return wrong(name, why[name], *figures)
    case, value, target = next((c, a, b) for c, a, b in zip(cases, said, truth) if not near(a, b))
    return wrong(
        "another number",
        f"For stages of {', '.join(f'{n:,.0f}' for n in case[0])} parameters, d = {case[1]}, t = {case[2]},"
        f" ZeRO-{case[3]} you return {value:,.0f}; the fullest GPU holds {target:,.0f} bytes.",
        *figures,
    )


states = Exercise(
    "bytes per GPU",
    bytes_per_gpu,
    _judge_bytes,
    hints=[
        (
            "Begin without ZeRO: N parameters of the largest stage, cut by t, 16 bytes each: 2 weights, 2"
            " gradients, 12 optimizer."
        ),
        "ZeRO-1 divides the 12 by d, ZeRO-2 the gradients' 2 as well, ZeRO-3 the weights' 2 as well.",
        "Which stage? A run fails when one GPU is full: max(stages).",
    ],
)


# -- practice 2: a reduce-scatter that beats gloo's ----------------------------------------------


def ring_reduce_scatter(x, rank, world_size):
    """Sum x over the ranks and return this rank's chunk of the sum: x.chunk(world_size)[rank]. x divides
    evenly.

    Use dist.isend and dist.recv around the ring.
    """
    chunks = list(x.clone().chunk(world_size))
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        give, take = (rank - step - 1) % world_size, (rank - step - 2) % world_size
        sending = dist.isend(chunks[give], after)
        received = torch.empty_like(chunks[take])
        dist.recv(received, before)
        sending.wait()
        chunks[take] += received
    return chunks[rank]


def _scatter_on_rank(attempt, length: int):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.arange(length, dtype=torch.float64) * (rank + 1)
    whole = torch.arange(length, dtype=torch.float64) * (n * (n + 1) / 2)
    got = attempt(x.clone(), rank, n)
    parts = whole.chunk(n)
    if not isinstance(got, torch.Tensor) or got.shape != parts[rank].shape or got.dtype != x.dtype:
        return {
            "shape": (
                f"{got.dtype} of {tuple(got.shape)}".removeprefix("torch.")
                if isinstance(got, torch.Tensor)
                else type(got).__name__
            )
        }
    return {
        "shape": None,
        "right": torch.equal(got, parts[rank]),
        "whose": next((i for i, part in enumerate(parts) if torch.equal(got, part)), None),
        "mean": torch.allclose(got, parts[rank] / n),
    }


def _judge_scatter(attempt) -> Answer:
    length = 24_000
    for n in (4, 3, 2):
        with World(n, timeout=4) as world:
            try:
                results = world.run(_scatter_on_rank, attempt, length)
            except RankError as e:
                if e.kind == "timeout" and all(
                    s.where and s.where["in"] and s.where["in"]["op"] == "send" for s in e.seen if s.where
                ):
                    return Answer(
                        "crashed",
                        f"On {n} ranks everybody sends before anybody receives, and a send may wait for its"
                        f" receiver. Begin the send with dist.isend, receive, then wait.\n\n{e.report}",
                        "everybody sends before anybody receives",
                    )
                return Answer("crashed", f"On {n} ranks:\n{e.report}")
            sent, counted, forgotten = world.traffic.wire, world.traffic.counted, world.traffic.not_waited
        for rank, r in enumerate(results):
            if r["shape"] is not None:
                return wrong(
                    "not one chunk",
                    f"On {n} ranks rank {rank} returns {r['shape']}; its chunk is float64 of"
                    f" ({length // n},).",
                )
            if not r["right"]:
                if r["mean"]:
                    return wrong(
                        "the mean, not the sum", f"On {n} ranks the values are the sum divided by {n}."
                    )
                if r["whose"] is not None:
                    return wrong(
                        "another rank's chunk",
                        f"On {n} ranks rank {rank} ends with chunk {r['whose']}. The sum is complete: begin"
                        " the ring one place earlier or later.",
                    )
                if forgotten:
                    return wrong(
                        "a message nobody waits for",
                        "An isend or irecv was begun and never waited for. Wait before you use what it"
                        " brings, and before you change what it sends.",
                    )
                return wrong(
                    "another sum",
                    f"On {n} ranks the chunk of rank {rank} is not the sum over all ranks. In each of {n - 1}"
                    " steps a rank adds what it receives to the chunk that it will pass on next.",
                )
        size, allowed = 8 * length, book("reduce_scatter", 8 * length, n)
        most = max(s if s is not None else c for s, c in zip(sent, counted))
        figures = [
            (
                f"bytes sent by the busiest of {n} ranks, in units of S",
                f"{most / size:.2f}",
                f"{allowed / size:.2f}",
            ),
            ("gloo's own", f"{gloo('reduce_scatter', size, n) / size:.2f}", ""),
        ]
        if most > 1.05 * allowed:
            least = min(s if s is not None else c for s, c in zip(sent, counted))
            name = (
                "everything through one rank"
                if most > 1.5 * least
                else (
                    "an all-reduce, of which most is thrown away"
                    if n == 4 and abs(most / (2 * allowed) - 1) < 0.1
                    else "more bytes than a ring"
                )
            )
            return wrong(
                name,
                f"The values are right, but the busiest rank sent {most / size:.2f} S. Each step needs one"
                f" chunk only, S/{n}, in {n - 1} steps.",
                *figures,
            )
    return right("The textbook's bytes, half of what gloo's own reduce-scatter sends.", *figures)


ring = Exercise(
    "a reduce-scatter by ring",
    ring_reduce_scatter,
    _judge_scatter,
    hints=[
        (
            "It is the first half of drop 02's ring: world_size - 1 steps, in each of which a rank sends one"
            " chunk on, receives one, and adds."
        ),
        (
            "You must end with chunk number `rank`. So the last chunk that you receive, and add to, is that"
            " one: in step k receive chunk rank - k - 2."
        ),
        "In step k send chunk (rank - k - 1) % world_size: it is the one you added to in the step before.",
    ],
)
