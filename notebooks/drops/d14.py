"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and the real 4-layer model trained on
whatever is there.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from helpers import toy, train
from helpers.practice.engine import Asked
from helpers.practice.runs import Run, number
from helpers.ranks import current, memory
from helpers.ranks.world import World
from helpers.train import Config
from three_axes import devices
from three_axes.paper.collectives import algorithmic_bytes
from three_axes.plan import CLUSTERS, Job, Layout, Plan, plan
from three_axes.plan.memory import stage_memory, stage_params, states
from three_axes.plan.models import find_model
from three_axes.plan.traced import beyond, microbatches, traced_job
from three_axes.plan.traffic import calls, sent
from three_axes.table import Table, human
from three_axes.trace.trace import Trace, trace

# -- practice: three of the reviewer's questions --------------------------------------------------


def meeting(n, d, t, p, m, node):
    """(bytes of states on a GPU with ZeRO-1, bubble as a share of wall time, the axes that cross nodes)."""
    held = n / (t * p)
    states_bytes = 4 * held + 12 * held / d
    bubble = (p - 1) / (m + p - 1)
    strides = {"tp": (t, 1), "dp": (d, t), "pp": (p, t * d)}
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
QUESTIONS = {
    "states on a GPU": human,
    "bubble": lambda percent: f"{percent / 100:.3f}",
    "axes that cross nodes": lambda axes: ", ".join(sorted(axes)) or "none",
}


def _three_answers(answer) -> tuple[float, float, set]:
    """Bytes, percent, axes."""
    states_bytes, bubble, axes = answer
    if not axes <= {"tp", "dp", "pp"}:
        raise ValueError(axes)
    return number(states_bytes), 100 * number(bubble), set(axes)


def _wrong(run: Run, truth: Run) -> tuple[int, int] | None:
    """(question, case) of the first wrong answer to the first question that has one."""
    places = ((i, k) for i in range(3) for k in range(len(CASES)))
    parts = lambda i, k: not defend.alike(run.values[k][i], truth.values[k][i])
    return next((place for place in places if parts(*place)), None)


class _OneByOne(Asked):
    """The first question with a wrong answer is judged, as if the others were answered right."""

    def _form(self, mine: Run, truth: Run):
        said = super()._form(mine, truth)
        if not said and (place := _wrong(mine, truth)):
            i = place[0]
            both = zip(mine.values, truth.values)
            mine.ranks[0]["values"] = [(*right[:i], got[i], *right[i + 1 :]) for got, right in both]
        return said


def _unnamed(run: Run, truth: Run) -> str:
    """The row of what no edit does."""
    question, case = _wrong(run, truth) or (None, None)
    if question != 2:
        return {0: "other bytes", 1: "another bubble"}.get(question, "")
    _, d, t, p, *_ = CASES[case]
    more = run.values[case][2] - truth.values[case][2]
    alone = more and all({"tp": t, "dp": d, "pp": p}[axis] == 1 for axis in more)
    return "an axis of size one" if alone else "groups misplaced"


def _where(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    if not (place := _wrong(run, truth)):
        return [("layouts", str(len(run.values)), str(len(CASES)))]
    (i, k), (n, d, t, p, m, node) = place, CASES[place[1]]
    what, show = list(QUESTIONS.items())[i]
    at = f"N = {n / 1e9:.3g}·10⁹, DP {d}, TP {t}, PP {p}, m = {m}, nodes of {node}"
    return [(f"{what}, {at}", show(run.values[k][i]), show(truth.values[k][i]))]


defend = _OneByOne(
    "three of the reviewer's questions, for any layout",
    meeting,
    minutes=8,
    hints=[
        "N/(t·p) parameters are on a GPU before ZeRO. Weights and gradients take 2 bytes each and stay"
        " whole; ZeRO-1 cuts the other 12 over d.",
        "A pipeline of p stages and m microbatches has m + p − 1 slots, and each stage idles in p − 1 of"
        " them.",
        "TP is innermost: stride 1. DP: stride t. PP: stride t·d. A group of k ranks with stride s stays"
        " inside a node when k·s is at most the node's size. An axis of size 1 crosses nothing.",
    ],
    cases=CASES,
    reads=_three_answers,
    tolerance=0.005,
    praise="Three answers for nine layouts. You can say them in a meeting, and the reviewer can redo them.",
    figures=_where,
    finds=_unnamed,
    mistakes="""
        not three answers
            Return bytes, a share, and a set of 'tp', 'dp' and 'pp', such as {'dp'}.
            ~ form
        Megatron-LM's bytes, not 16
            6 + 12/d are Megatron-LM's, which sums gradients in float32. Here they take 2 bytes: 4 + 12/d.
            - 4 * held => 6 * held
        gigabytes, not bytes
            Your numbers are 10⁹ times too small: the check asks for bytes.
            - held = n => held = n / 1e9
        ZeRO-1 divides everything
            ZeRO-1 divides only the 12 bytes of master copy, m and v by d. Weights and gradients stay whole.
            - 4 * held + 12 => 16
        gradients not divided by t·p
            A GPU has the gradients of its own N/(t·p) parameters alone.
            - 4 * held => 2 * n + 2 * held
        nothing divided by d
            ZeRO-1 divides the 12 bytes of master copy, m and v by d.
            - 12 * held / d => 12 * held
        the model is not divided by t·p
            TP and PP cut the model: on a GPU lie N/(t·p) parameters.
            - n / (t * p) => n
        the optimizer is not divided by t·p
            A GPU has the optimizer's states of its own N/(t·p) parameters alone, and of those 1/d.
            - 12 * held => 12 * n
        the master copy is forgotten
            The optimizer has 12 bytes a parameter: the master copy, m and v.
            - 12 * held => 8 * held
        ZeRO-2, not ZeRO-1
            ZeRO-2 divides gradients as well. With ZeRO-1 they stay whole.
            - 4 * held + 12 => 2 * held + 14
        the gradients are forgotten
            Weights take 2 bytes a parameter, and gradients 2 more.
            - 4 * held => 2 * held
        weights and gradients divided by d, the optimizer not
            It is the other way round: ZeRO-1 divides the 12 bytes of master copy, m and v by d.
            - 4 * held + 12 * held / d => 4 * held / d + 12 * held
        nothing divided
            On a GPU lie N/(t·p) parameters, and ZeRO-1 divides the optimizer's 12 bytes by d.
            - 4 * held + 12 * held / d => 16 * n
        other bytes
            On a GPU lie N/(t·p) parameters with 2 bytes of weight and 2 of gradient each; only the 12 of
            master copy, m and v are divided by d.
        idle over ideal time
            That is idle time over busy time. The share is of the whole: of m + p − 1 slots p − 1 are idle.
            - / (m + p - 1) => / m
        p where p − 1 was meant
            Of m + p − 1 slots p − 1 are idle.
            - (p - 1) / (m + p - 1) => p / (m + p)
            - (p - 1) / (m => p / (m
            - (m + p - 1) => (m + p)
        the busy share
            Of m + p − 1 slots p − 1 are idle, and m are busy.
            - (p - 1) / (m => m / (m
        percent instead of a share
            Divide by 100.
            - (p - 1) / (m => 100 * (p - 1) / (m
        nothing but 0
            Of m + p − 1 slots p − 1 are idle. (`//` leaves the whole part of a share, which is 0.)
            - (p - 1) / (m => (p - 1) // (m
        another bubble
            Of m + p − 1 slots p − 1 are idle.
        the whole job, not each group
            All ranks of the job do not fit a node, but a group of one axis may. Ask it for each axis: how
            many ranks, how far apart? An axis of size 1 crosses nothing.
            - size * stride > node => d * t * p > node
            - size > 1 and size * stride > node => d * t * p > node
        TP outermost
            TP is innermost: ranks 0 to t − 1 are a group, neighbours on one node while it holds them.
            - "tp": (t, 1), "dp": (d, t), "pp": (p, t * d) => "pp": (p, 1), "dp": (d, p), "tp": (t, p * d)
        DP and PP changed places
            You count as if PP's stages were t ranks apart and DP's replicas t·p. Here PP is outermost: DP's
            replicas are t apart, PP's stages t·d.
            - "dp": (d, t), "pp": (p, t * d) => "dp": (d, t * p), "pp": (p, t)
        size where reach was meant
            You compare a group's size with the node. Its ranks stand apart: the reach is size times stride.
            - size * stride > node => size > node
        a full node is not left
            A group that reaches over as many ranks as a node has fills it, and stays inside.
            - size * stride > node => size * stride >= node
        neighbours only
            You ask whether neighbours are on two nodes. They may share one while the ends of the group do
            not.
            - size * stride > node => stride >= node
        a replica smaller than a node keeps PP inside
            A replica's t·p ranks fit a node, but they are not neighbours: PP is outermost, its stages t·d
            ranks apart.
            - "pp": (p, t * d) => "pp": (p, t)
        the axes that stay, not those that cross
            You name the axes whose groups stay inside a node. Asked are those that leave it.
            - size * stride > node => size * stride <= node
            - size > 1 and size * stride > node => size * stride <= node
            - if size > 1 and size * stride > node => if not (size > 1 and size * stride > node)
        an axis of size one
            A group of one rank sends nothing.
        groups misplaced
            Neighbours along tp are 1 apart, along dp t, along pp t·d. A group of size k with stride s
            reaches over k·s ranks.
    """,
)


# -- what the cells show: the 70B sized -----------------------------------------------------------

MODEL, CLUSTER, GPUS, BATCH, SEQ = find_model("llama-3-70b"), CLUSTERS["dgx-h100"], 64, 128, 8192


@cache
def the_plan() -> Plan:
    """Llama-3-70B on 64 H100s in eight nodes, 128 sequences of 8192 tokens in a step; on the three axes of
    the course.
    """
    return plan(Job(MODEL, CLUSTER, BATCH, SEQ), gpus=GPUS, cp=1)


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
        title=f"{MODEL.params:,} parameters, 16 bytes each",
    )


# -- the real model, traced ----------------------------------------------------------------------

USUAL = Layout(dp=8, tp=8, zero=3, sequence_parallel=False)
FEW = 8  # layers, where all layers are alike and one count for each is asked for


@cache
def traced(layout: Layout) -> Trace:
    """The 70B's first stage on one rank of a layout, by Megatron's plan, with FSDP over dp: ZeRO-1 and 2 are
    none of FSDP2's, and a schedule's chunks are left out.

    Raises ValueError for what PyTorch's pieces cannot run.
    """
    return trace(MODEL, replace(layout, zero=3, schedule="1F1B", interleave=1), seq_len=SEQ)


@cache
def usual_plan() -> Trace:
    """Its first `FEW` layers by the tutorials' plan, without sequence parallelism."""
    return trace(replace(MODEL, layers=FEW), USUAL, seq_len=SEQ, plan="usual")


def against_formula(run: Trace) -> Table:
    """Collectives of the traced step: counted from PyTorch, and by hand."""
    by_hand = calls(traced_job(run.model, run.seq_len, run.layout), run.layout)
    many = microbatches(run.layout.pp)
    return Table(
        ["collective", "axis", "counted", "by hand", "bytes counted", "by hand"],
        [
            [c.op, c.axis, str(c.calls), str(e.calls), human(c.payload), human(e.payload)]
            for c, e in zip(run.calls, by_hand, strict=True)
        ],
        title=(
            f"{run.model.name} on {run.layout.ranks} fake ranks, {run.layout}: collectives of rank 0 in"
            f" {many} microbatch{'es' * (many > 1)}, whole tensors"
        ),
    )


def memory_against_theory(run: Trace) -> Table:
    """The peak on a rank, on paper and traced; and what of it fused kernels would not hold."""
    job = traced_job(run.model, run.seq_len, run.layout)
    paper = {k: float(v) for k, v in stage_memory(job, run.layout, 0, 0).items()}
    states = ("weights", "gradients", "optimizer")
    rest = sum(paper.values()) - sum(paper[kind] for kind in states)
    rows = [[kind, human(paper[kind]), human(run.memory[kind])] for kind in states]
    rows.append(["all else", human(rest), human(run.peak - sum(run.memory[kind] for kind in states))])
    parts = beyond(run.model, run.layout, run.seq_len)
    if run.layout.pp > 1:
        parts = {"weights and sums of gradients, gathered": paper["gathered weights"]} | parts
    rows += [[f"of that: {name}", human(size), ""] for name, size in parts.items() if size]
    return Table(
        ["a GPU", "on paper", "traced"], rows, ["the peak", human(sum(paper.values())), human(run.peak)]
    )


# -- the 4-layer model trained on what is here, by our script and by accelerate ------------------


def world_here() -> World:
    """A rank on each of 8, 4, 2 or 1 GPUs, as many as there are, else eight ranks on the CPU."""
    n = next((n for n in (8, 4, 2, 1) if n <= devices.gpus()), None)
    return World(n, gpus=True, timeout=300) if n else World(8, timeout=300)


def layout_here(ranks: int, layout: Layout) -> dict[str, int]:
    """(dp, tp, pp) for the 4-layer model on so many ranks, a power of two up to 8: the axes that `layout`
    has, in two as long as there are ranks, tp and pp first. What is left goes to the largest of them; the
    model has 8 heads and 4 layers.
    """
    sizes, most = dict(dp=1, tp=1, pp=1), dict(dp=8, tp=8, pp=4)
    largest = sorted(sizes, key=layout.members, reverse=True)
    for axis in ("tp", "pp", "dp"):
        if layout.members(axis) > 1 and math.prod(sizes.values()) < ranks:
            sizes[axis] = 2
    while (left := ranks // math.prod(sizes.values())) > 1:
        axis = next(axis for axis in [*largest, "dp"] if sizes[axis] < most[axis])
        sizes[axis] *= min(left, 2)
    return sizes


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

    from helpers import draw

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
        lines: list[str] = []
        done = train.train(config, current.rank.device, lines.append).number
        return " ".join([*lines, f"{done} steps are done."])

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
    apart = config.tp * config.shard  # neighbours that hold the same part of the weights
    for row in traffic.ranks[0]:
        if row.op in op_of:
            same = row.op == "all_reduce" and apart > 1 and row.members[:2] == (0, apart)
            axis = "cp" if row.axis == "cp" else "replicate" if same else op_of[row.op]
            counted[axis] = counted.get(axis, 0.0) + row.algorithmic
    # The loss, the gradients' norm and whether to stop: three numbers that all ranks share.
    counted["tp"] -= algorithmic_bytes("all_reduce", 24, world.n)
    rows = [
        [{"shard": "dp (FSDP)"}.get(axis, axis), human(size), human(counted.get(axis, 0.0))]
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
    device, n, seconds = current.rank.device, 512, 0.0
    while dist.get_rank() == 0 and seconds < 0.01:
        n *= 2
        a = torch.randn(n, n, device=device)
        seconds = min(devices.seconds_of(lambda: a @ a, device) for _ in range(5))
    dist.barrier()
    return 2 * n**3 / seconds if seconds else 0.0


def _second_step(config: Config) -> tuple[Config, int]:
    """On a rank: two steps, of which the second is counted.

    The configuration with its zeros filled in, and bytes of weights and Adam's state.
    """
    trainer = train.Trainer(config, current.rank.device)
    trainer.step()
    dist.barrier()
    current.count_from_here()
    trainer.step()
    held = memory.by_kind(trainer.model, trainer.optimizer)
    return trainer.config, held["parameters"] + held["optimizer"]


def sent_by_first(config: Config) -> dict[str, float]:
    """Bytes that rank 0 sends in a step, by axis, float32: the theory's list of operations, where FSDP shares
    out the weights among `config.shard` ranks.
    """
    job, layout = config.on_paper
    by_axis = dict.fromkeys(("tp", "shard", "pp"), 0.0)
    for axis, size in sent(job, layout, 0).items():
        name = "shard" if axis == "dp" else axis
        by_axis[name] = by_axis.get(name, 0.0) + size
    return by_axis


def states_of_first(config: Config) -> float:
    """Bytes of float32 weights and Adam's two on rank 0 between steps."""
    job, layout = config.on_paper
    held = states(stage_params(job.model, layout, 0, split_vocabulary=False), layout.shards, 3, 4, 4, 8)
    return float(held["weights"] + held["optimizer"])


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

    here = PartialState(cpu=current.rank.device.type == "cpu")
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
            whole.chunk(here.num_processes)[here.process_index].to(here.device)
            for whole in train.batch_of(self.text, self.number, self.config)
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
