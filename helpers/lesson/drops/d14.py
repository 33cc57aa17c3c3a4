"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and the real 4-layer model trained on
whatever is there.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from ... import devices, toy, train
from ...runtime import memory, worker
from ...runtime.trace import Trace, beyond, expected, layer_bytes, root_bytes, trace
from ...runtime.world import World
from ...table import Table, human
from ...theory import CLUSTERS, Layout, Plan, plan
from ...theory.collectives import book
from ...theory.memory import stage_memory, states
from ...theory.models import find_model
from ...train import Config
from ..practice import Answer, Exercise, right, wrong

MODEL, CLUSTER, GPUS, BATCH, SEQ = find_model("llama-3-70b"), CLUSTERS["dgx-h100"], 64, 128, 8192


@cache
def the_plan() -> Plan:
    """Llama-3-70B on 64 H100s in eight nodes, 128 sequences of 8192 tokens in a step."""
    return plan(MODEL, CLUSTER, gpus=GPUS, global_batch=BATCH, seq_len=SEQ)


def states_table() -> Table:
    """Weights, gradients and optimizer of the 70B on one GPU, under five layouts."""
    rows = [
        ("one GPU, if it could", 1, 1, 0),
        ("TP 8 · PP 2, no ZeRO", 16, 4, 0),
        ("DP 8 · TP 8, ZeRO-1", 8, 8, 1),
        ("DP 4 · TP 8 · PP 2, ZeRO-1", 16, 4, 1),
        ("DP 64, ZeRO-3", 1, 64, 3),
    ]
    return Table(
        ["layout", "states on a GPU"],
        [[name, human(sum(states(MODEL.params / cut, d, zero).values()))] for name, cut, d, zero in rows],
        title=f"{MODEL.name}: {MODEL.params:,} parameters, 16 bytes each",
    )


# -- the real model, traced ----------------------------------------------------------------------

TRACED = Layout(dp=8, tp=8, zero=3)


@cache
def _traces() -> dict[str, Trace]:
    """Both plans side by side, since each takes one core some ten seconds."""
    layouts = {"Megatron's": TRACED, "usual": replace(TRACED, sequence_parallel=False)}
    with ThreadPoolExecutor() as pool:
        return dict(
            zip(layouts, pool.map(lambda how: trace(MODEL, layouts[how], seq_len=SEQ, plan=how), layouts))
        )


def traced(how: str = "Megatron's") -> Trace:
    """The 70B under FSDP 8 × TP 8, one of 64 ranks: by Megatron's plan with sequence parallelism, or by the
    usual one without.
    """
    return _traces()[how]


def against_formula(found: Trace, how: str = "Megatron's") -> Table:
    """Collectives of one microbatch: counted from PyTorch, and by hand."""
    by_hand = expected(found.model, found.layout, found.seq_len, how)
    return Table(
        ["collective", "axis", "counted", "by hand", "bytes counted", "by hand"],
        [
            [c.op, c.axis, str(c.calls), str(e.calls), human(c.payload), human(e.payload)]
            for c, e in zip(found.calls, by_hand, strict=True)
        ],
        title=f"{found.model.name} on 64 fake ranks, one microbatch: collectives of rank 0, whole tensors",
    )


def memory_against_theory(found: Trace) -> Table:
    """The peak on a rank: the theory's terms, what plain PyTorch adds, and what was traced."""
    theory = {
        k: float(v) for k, v in stage_memory(found.model, found.layout, found.seq_len, 1, 0).items() if v
    }
    more = beyond(found.model, found.layout, found.seq_len)
    rows = [[name, human(size)] for name, size in theory.items()] + [
        [f"+ {name}", human(size)] for name, size in more.items()
    ]
    total = sum(theory.values()) + sum(more.values())
    return Table(
        ["on paper", "a GPU"],
        rows,
        [f"sum; traced: {human(found.peak)}", human(total)],
        title="the peak of one microbatch",
    )


# -- the small model, trained --------------------------------------------------------------------


def world_here() -> World:
    """A rank on each of 8, 4, 2 or 1 GPUs, as many as there are, else eight ranks on the CPU."""
    n = next((n for n in (8, 4, 2, 1) if n <= devices.gpus()), None)
    return World(n, gpus=True, timeout=300) if n else World(8, timeout=300)


def layout_here(ranks: int) -> dict[str, int]:
    """(dp, tp, pp) for the 4-layer model: every axis gets a factor of two as long as there are ranks."""
    return {
        8: dict(dp=2, tp=2, pp=2),
        4: dict(dp=1, tp=2, pp=2),
        2: dict(dp=2, tp=1, pp=1),
        1: dict(dp=1, tp=1, pp=1),
    }[ranks]


def twin(config: Config, steps: int) -> list[float]:
    """The losses of the same steps in one process, with nothing but torch."""
    model, text = config.model(), train.read_text(config.text)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay)
    losses = []
    for step in range(steps):
        losses.append(toy.twin_step(model, *train.batch_of(text, step, config)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.param_groups[0]["lr"] = train.learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextmanager
def losses_live(run: Path):
    """Draw the losses of a run while it goes on, from the lines that it writes, and once more at its end."""
    from IPython.display import display

    from .. import draw

    ended = threading.Event()

    def picture():
        return draw.loss_curves(
            {"training": {"loss": [line["loss"] for line in train.read_metrics(run)] or [5.6]}},
            "Loss, step by step",
        )

    shown = display(picture(), display_id=True)
    if shown is None:  # not in a notebook
        yield
        return

    def follow() -> None:
        while not ended.wait(1.0):
            shown.update(picture())

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        shown.update(picture())


def train_on(world: World, config: Config) -> str:
    """Train on the ranks of a world until `config.steps`, from the last checkpoint in `config.out` if there
    is one. Returns what was said.
    """

    def run(config):
        said: list[str] = []
        done = train.train(config, worker.here.device, said.append).number
        return " ".join([*said, f"{done} steps are done."])

    with losses_live(Path(config.out)):
        return world.run(run, config)[0]


def three_ways(world: World, config: Config) -> Table:
    """One step: bytes that rank 0 sends for each axis, predicted, counted and, as a sum, on the wire; and the
    states it holds.
    """
    ranks = world.run(_second_step, config)
    config, held = ranks[0]
    traffic = world.traffic
    op_of = {"all_reduce": "tp", "all_gather": "shard", "reduce_scatter": "shard", "send": "pp"}
    counted = dict.fromkeys(("tp", "shard", "pp"), 0.0)
    for row in traffic.ranks[0]:
        if row.op in op_of:
            counted[op_of[row.op]] += row.book
    counted["tp"] -= book(
        "all_reduce", 16, world.n
    )  # the loss and the gradients' norm, two numbers that all ranks share
    rows = [
        [{"shard": "dp (FSDP)"}.get(axis, axis), human(size), human(counted[axis])]
        for axis, size in sent_by_first(config).items()
        if size
    ]
    rows.append(["weights and Adam's state", human(states_of_first(config)), human(held)])
    wire = traffic.wire[0]
    return Table(
        ["rank 0, one step", "predicted", "counted"],
        rows,
        ["all axes, on the wire", "", "n/a" if wire is None else human(round(wire, -4))],
        title=config.layout,
    )


def speeds(world: World, config: Config) -> Table:
    """Tokens per second of the run in `config.out`, beside what this machine could do if matrix products were
    all there is.
    """
    seconds = statistics.median(line["seconds"] for line in train.read_metrics(Path(config.out))[5:])
    count = world.n if world.gpus else min(world.n, os.cpu_count() or 1)
    flops = world.run(_product_speed)[0] * count
    tokens = config.batch * config.seq_len
    bound = flops / config.shape.flops_per_token(config.seq_len)
    return Table(
        ["tokens/s", "", "share"],
        [
            ["predicted from FLOPs alone", f"{bound:,.0f}", "100%"],
            ["measured", f"{tokens / seconds:,.0f}", f"{tokens / seconds / bound:.1%}"],
        ],
        title=(
            f"{config.layout}: {flops / 1e9:,.0f} GFLOP/s of {count} device{'s' * (count > 1)},"
            f" {config.shape.flops_per_token(config.seq_len) / 1e6:.1f} MFLOP a token"
        ),
    )


def _product_speed() -> float:
    """FLOP/s of a float32 matrix product on rank 0, while the others wait.

    It is made large enough to take 10 ms.
    """
    device, n, seconds = worker.here.device, 512, 0.0
    while dist.get_rank() == 0 and seconds < 0.01:
        n *= 2
        a = torch.randn(n, n, device=device)
        seconds = min(_seconds_of(lambda: a @ a, device) for _ in range(5))
    dist.barrier()
    return 2 * n**3 / seconds if seconds else 0.0


def _seconds_of(work, device) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    work()
    devices.synchronize(device)
    return time.perf_counter() - start


def _second_step(config: Config) -> tuple[Config, int]:
    """On a rank: two steps, of which the second is counted.

    The configuration with its zeros filled in, and bytes of weights and Adam's state.
    """
    trainer = train.Trainer(config, worker.here.device)
    trainer.step()
    dist.barrier()
    worker.here.recorder.start()
    trainer.step()
    held = memory.by_kind(trainer.model, trainer.optimizer)
    return trainer.config, held["parameters"] + held["optimizer"]


def _first_stage(config: Config) -> tuple[float, float]:
    """Numbers that a rank of the first stage holds before dp: (in a layer, in the rest)."""
    shape, t = config.shape, config.tp
    rest = shape.embedding_params if config.pp > 1 else root_bytes(shape, 1)  # the ends are not split over tp
    return layer_bytes(shape, t), rest


def sent_by_first(config: Config) -> dict[str, float]:
    """Bytes that rank 0 sends in a step, by axis, float32.

    tp: 4 all-reduces a layer and microbatch. pp: one send a microbatch. dp: FSDP gathers each layer for every
    forward and every backward, and
    the rest once for both; with a pipeline what was gathered for a backward stays until the end of the step.
    It reduces all of it once.
    """
    layer, rest = _first_stage(config)
    layers, m = config.layers // config.pp, config.batch // config.dp // config.microbatch
    activation = 4 * config.microbatch * config.seq_len * config.hidden
    gathers = rest + layers * layer * (m + 1) if config.pp > 1 else m * (rest + 2 * layers * layer)
    return {
        "tp": m * layers * 4 * book("all_reduce", activation, config.tp),
        "shard": (
            book("all_gather", 4 * gathers, config.shard)
            + book("reduce_scatter", 4 * (rest + layers * layer), config.shard)
        ),
        "pp": (config.pp > 1) * m * activation,
    }


def states_of_first(config: Config) -> float:
    """Bytes of float32 weights and Adam's two on rank 0 between steps."""
    layer, rest = _first_stage(config)
    return 12 * (rest + config.layers // config.pp * layer) / config.shard


def as_launched() -> None:
    """Set what a launcher sets and accelerate asks for. The address is not used: the group is there."""
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }


def _accelerator():
    """FSDP2 over all ranks, block by block; on CPU ranks, which accelerate does not shard over, data
    parallelism.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig

    here = PartialState(cpu=worker.here.device.type == "cpu")
    if here.distributed_type != DistributedType.MULTI_GPU or here.num_processes == 1:
        return Accelerator()
    by_block = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return Accelerator(
        fsdp_plugin=by_block, parallelism_config=ParallelismConfig(dp_shard_size=dist.get_world_size())
    )


class ByAccelerate:
    """The same training by accelerate's own API, on the ranks of a group that has been started."""

    def __init__(self, config: Config):
        as_launched()
        self.config, self.text, self.number = config, train.read_text(config.text), 0
        self.accelerator = _accelerator()
        model = config.model()
        self.model, self.optimizer = self.accelerator.prepare(
            model,
            torch.optim.AdamW(
                model.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
            ),
        )

    def step(self) -> float:
        """One step. Returns the mean loss of all ranks."""
        here = self.accelerator
        tokens, targets = (
            each.chunk(here.num_processes)[here.process_index].to(here.device)
            for each in train.batch_of(self.text, self.number, self.config)
        )
        loss = train.loss_of(self.model(tokens), targets)
        here.backward(loss)
        here.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.param_groups[0]["lr"] = train.learning_rate(self.number, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return here.reduce(loss.detach(), "mean").item()


def with_accelerate(config: Config, steps: int) -> list[float]:
    """The losses of accelerate's first steps."""
    training = ByAccelerate(config)
    return [training.step() for _ in range(steps)]


def hello() -> None:
    """On a process of either launcher: join the group if nobody has, and say so together with the others.

    On Colab accelerate starts no processes for fewer than two GPUs: it calls this in the kernel, where there
    is no group.
    """
    torch.set_num_threads(1)  # a process forked from a kernel that has multiplied matrices hangs with more
    if not dist.is_initialized():
        os.environ |= {"OMP_NUM_THREADS": "1"}
        from accelerate import PartialState

        PartialState(cpu=True)
    if not dist.is_initialized():
        print(f"called in the kernel itself, process {os.getpid()}: no ranks were started")
        return
    one = torch.ones(1)
    dist.all_reduce(one)
    print(f"rank {dist.get_rank()} of {one.item():.0f}, process {os.getpid()}")


@contextmanager
def signals_kept():
    """Put the kernel's signal handlers back afterwards: accelerate's launcher replaces them, and with them
    the stop button.
    """
    kept = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


# -- practice --------------------------------------------------------------------------------------


def meeting(n, d, t, p, m, node):
    """(bytes of states on a GPU with ZeRO-1, bubble as a share of wall time, the axes that cross nodes)."""
    held = n / (t * p)
    states_bytes = 4 * held + 12 * held / d
    bubble = (p - 1) / (m + p - 1)
    strides = {"tp": (t, 1), "pp": (p, t), "dp": (d, t * p)}
    crossing = {axis for axis, (size, stride) in strides.items() if size > 1 and size * stride > node}
    return states_bytes, bubble, crossing


CASES = (
    (70_553_706_496, 4, 8, 2, 32, 8),
    (70_553_706_496, 4, 4, 4, 32, 8),
    (30e9, 2, 2, 2, 16, 8),
    (70_553_706_496, 1, 8, 8, 128, 8),
    (70_553_706_496, 8, 8, 1, 16, 8),
    (1e9, 8, 1, 1, 4, 8),
    (175e9, 2, 16, 2, 16, 8),
    (30e9, 4, 2, 2, 16, 8),
    (8e9, 16, 4, 1, 16, 8),
)


def _judge_meeting(attempted) -> Answer:
    with World(1, timeout=5) as world:
        said = world.run(lambda: [attempted(*case) for case in CASES])[0]
    for case, mine in zip(CASES, said):
        n, d, t, p, m, node = case
        where = f"N = {n:.3g}, DP {d}, TP {t}, PP {p}, m = {m}"
        if (
            not isinstance(mine, tuple)
            or len(mine) != 3
            or not isinstance(mine[2], (set, frozenset))
            or not all(isinstance(x, (int, float)) for x in mine[:2])
        ):
            return wrong(
                "not three answers",
                f"{where}: you return {mine!r}; return bytes, a share, and a set of names such as {{'dp'}}.",
            )
        held, bubble, crossing = meeting(*case)
        close = lambda a, b: abs(a - b) <= 0.005 * max(abs(a), abs(b), 1e-9)
        figure = ("states on a GPU", human(mine[0]), human(held))
        if not close(mine[0], held):
            part, state = (
                n / (t * p),
                {
                    "ZeRO-1 divides everything": 16 * n / (t * p * d),
                    "gradients not divided by t·p": 2 * n + 2 * n / (t * p) + 12 * n / (t * p * d),
                    "nothing divided by d": 16 * n / (t * p),
                    "the model is not divided by t·p": 4 * n + 12 * n / d,
                    "the master copy is forgotten": 4 * n / (t * p) + 8 * n / (t * p * d),
                },
            )
            state["ZeRO-2, not ZeRO-1"] = 2 * part + 14 * part / d
            name = next((name for name, value in state.items() if close(mine[0], value)), "other bytes")
            return wrong(
                name,
                f"{where}: on a GPU lie N/(t·p) parameters with 2 bytes of weight and 2 of gradient each;"
                " only the 12 of master copy, m and v are divided by d.",
                figure,
            )
        if not close(mine[1], bubble) and not (mine[1] == bubble == 0):
            name = (
                "idle over ideal time"
                if p > 1 and close(mine[1], (p - 1) / m)
                else "p − 1 slots forgotten"
                if p > 1 and close(mine[1], p / (m + p))
                else "another bubble"
            )
            return wrong(
                name,
                f"{where}: of m + p − 1 slots p − 1 are idle.",
                ("bubble", f"{mine[1]:.3f}", f"{bubble:.3f}"),
            )
        if mine[2] != crossing:
            sizes = {"tp": t, "pp": p, "dp": d}
            alone = [axis for axis in mine[2] - crossing if sizes.get(axis) == 1]
            if alone:
                return wrong(
                    "an axis of size one", f"{where}: {alone[0]} has one rank to a group and sends nothing."
                )
            if mine[2] - crossing and mine[2] == {axis for axis, size in sizes.items() if size > 1}:
                return wrong(
                    "the whole job, not each group",
                    f"{where}: {d * t * p} ranks do not fit a node of {node}, but a group of one axis may."
                    " Ask it for each: how many ranks, how far apart?",
                )
            if crossing - mine[2] == {"dp"} and t * p < node:
                return wrong(
                    "a replica smaller than a node keeps DP inside",
                    f"{where}: a replica takes {t * p} ranks of a node of {node}. But the dp group has one"
                    f" rank of each replica, {t * p} apart: {d} of them reach over {d * t * p} ranks.",
                )
            if "tp" in mine[2] - crossing:
                return wrong(
                    "TP outermost",
                    f"{where}: TP is innermost. Ranks 0 to {t - 1} are a group, on one node of {node}.",
                )
            return wrong(
                "groups misplaced",
                f"{where}: neighbours along tp are 1 apart, along pp t = {t}, along dp t·p = {t * p}. A group"
                f" of size k with stride s reaches over k·s ranks, and a node has {node}.",
                ("crossing", ", ".join(sorted(mine[2])) or "none", ", ".join(sorted(crossing)) or "none"),
            )
    return right(
        "Three answers for nine layouts. You can say them in a meeting, and the reviewer can redo them.",
        ("layouts", "9", "9"),
    )


defend = Exercise(
    "three of the reviewer's questions, for any layout",
    meeting,
    _judge_meeting,
    hints=[
        (
            "N/(t·p) parameters are on a GPU before ZeRO. Weights and gradients take 2 bytes each and stay"
            " whole; ZeRO-1 cuts the other 12 over d."
        ),
        (
            "A pipeline of p stages and m microbatches has m + p − 1 slots, and each stage idles in p − 1 of"
            " them."
        ),
        (
            "TP is innermost: stride 1. PP: stride t. DP: stride t·p. A group of k ranks with stride s stays"
            " inside a node when k·s is at most the node's size. An axis of size 1 crosses nothing."
        ),
    ],
)
