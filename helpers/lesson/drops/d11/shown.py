"""Drop 11, what its cells show: where a step's time goes, measured and by theory."""

from __future__ import annotations

import csv
from dataclasses import dataclass

import torch.distributed as dist

from .... import toy
from ....files import find
from ....runtime import current
from ....runtime.clock import Timeline, shortest, span
from ....runtime.world import World
from ....table import Table
from ....theory import CLUSTERS, Job, Layout, collectives, estimate
from ....theory.hardware import Network
from ....theory.models import find_model
from ....theory.schedules import one_f_one_b

# Emulated: nodes of four, with slow ports out of a node. Compute is emulated too.
NODES = Network(
    name="nodes of four",
    gpus_per_node=4,
    intra_node_bandwidth=20e6,
    inter_node_bandwidth=2.5e6,
    intra_node_latency=1e-4,
    inter_node_latency=1e-3,
)
WORK = 0.040  # seconds of one block's forward for one sequence on one device; backward takes two of them
BATCH, TOKENS = 8, 64
SIZES = dict(hidden=64, heads=8, seq_len=TOKENS)


@dataclass
class Measured:
    """One step on real ranks. seconds: its length. parts: what the mean rank did with it; they sum to the
    length.

    compute; tp, pp and dp: standing still for that axis (pp holds the bubble and the sends); rest: PyTorch
    and Python.
    """

    layout: tuple[int, int, int, int]  # d, t, p, m
    seconds: float
    parts: dict[str, float]
    timeline: Timeline
    waited: list[dict[str, float]]  # of each rank: seconds that it stood still for tp, pp and dp

    @property
    def sequences_per_second_per_rank(self) -> float:
        d, t, p, _ = self.layout
        return BATCH / self.seconds / (d * t * p)


def measure(
    d: int, t: int, p: int, m: int = 1, network: Network = NODES, slow: int | None = None
) -> Measured:
    """One step of the toy on d·t·p real ranks of the emulated cluster, tp innermost. The shortest of a few
    runs. The batch is always 8 sequences. slow: a rank that computes at half the speed.

    Raises ValueError where the sizes do not divide.
    """
    if BATCH % (d * m) or SIZES["heads"] % t or 4 % p:
        raise ValueError(
            f"d = {d}, t = {t}, p = {p}, m = {m}: d·m must divide the batch of {BATCH} sequences (it is"
            f" {d * m}), t the {SIZES['heads']} heads, p the 4 blocks"
        )

    def run():
        grid = toy.grid_groups(d, p, t)
        stage = toy.on_grid(toy.ToyTransformer(seed=0, **SIZES), grid)
        forward = WORK * BATCH / (d * m) / t * (2 if dist.get_rank() == slow else 1)
        for block in stage:
            if isinstance(block, toy.Block):
                toy.pace(block, forward, 2 * forward)
        ops = one_f_one_b(p, m).ops[grid["pp"].get_local_rank()]
        batch = toy.make_batch(BATCH, TOKENS)
        for group in ("dp", "pp", "tp"):
            dist.barrier(grid[group].get_group())  # connections are made before the clock runs
        current.rank.recorder.start()
        dist.barrier()
        with span("busy"):
            toy.grid_step(stage, *batch, ops, m, grid)

    with World(d * t * p, fabric=network, timeout=60) as world:

        def once():
            world.run(run)
            return _parts((d, t, p, m), world.timeline)

        return shortest(once, lambda step: step.seconds)


AXES = ("tp", "pp", "dp")


def _parts(layout: tuple, timeline: Timeline) -> Measured:
    d, t, p, _ = layout
    busy = [next(s for s in row if s.kind == "busy") for row in timeline.rows]
    seconds = max(s.end for s in busy) - min(s.start for s in busy)
    waited = [
        {
            axis: sum(
                s.end - s.start
                for s in row
                if s.kind == "wait" and s.label.split()[1] == axis and s.start >= step.start
            )
            for axis in AXES
        }
        for row, step in zip(timeline.rows, busy)
    ]
    mean = {axis: sum(rank[axis] for rank in waited) / len(waited) for axis in AXES}
    compute = 12 * WORK * BATCH / (d * t * p)  # four blocks, 1 + 2 each
    rest = seconds - compute - sum(mean.values())
    return Measured(layout, seconds, {"compute": compute, **mean, "rest": rest}, timeline, waited)


def lost(before: Measured, after: Measured) -> dict[str, float]:
    """Seconds of a step beyond perfect scaling, by cause.

    With the batch unchanged, perfect scaling divides every part by the ratio of ranks.
    """
    ratio = len(before.timeline.rows) / len(after.timeline.rows)
    return {
        "ideal": ratio * before.seconds,
        **{name: after.parts[name] - ratio * before.parts[name] for name in ("tp", "pp", "dp", "rest")},
    }


# -- by theory: 8 to 64 GPUs ---------------------------------------------------------------------

MODEL, SEQ, GLOBAL = find_model("llama-3-8b"), 8192, 64
CASES = {
    "8 GPUs: TP 8": Layout(dp=1, tp=8, zero=1),
    "64: TP 16 · DP 4": Layout(dp=4, tp=16, zero=1),
    "64: TP 8 · PP 8": Layout(dp=1, tp=8, pp=8, zero=1),
    "64: TP 8 · DP 8": Layout(dp=8, tp=8, zero=1),
}


def estimates() -> dict:
    """Llama-3-8B with a batch of 64 sequences of 8192 tokens on 8 GPUs, and in three ways on 64."""
    return {
        name: estimate(Job(MODEL, CLUSTERS["dgx-a100"], GLOBAL, SEQ), layout)
        for name, layout in CASES.items()
    }


def beyond_ideal(on_paper: dict) -> dict[str, dict[str, float]]:
    """For each layout of 64 GPUs: the step of 8 GPUs divided by 8, and what each term has beyond its share of
    that. They sum to the step.
    """
    first = on_paper["8 GPUs: TP 8"]
    names = {
        "matrices": "smaller matrices",
        "attention": "smaller matrices",
        "elementwise": "smaller matrices",
        "waiting for the host": "smaller matrices",
        "optimizer": "smaller matrices",
        "head": "waiting for the head's stage",
    }
    panels = {}
    for name, e in on_paper.items():
        if e is not first:
            parts = panels[name] = {"ideal": first.step_seconds / 8}
            for term, seconds in e.time.items():
                part = names.get(term, term)
                parts[part] = parts.get(part, 0.0) + seconds - first.time[term] / 8
    return panels


def by_hand() -> Table:
    """The toy's tensor parallel all-reduce of b·s·h float32 numbers on 4 and on 8 ranks, hop by hop: on equal
    links each hop waits for the one before; where one hop is slow it never rests, and the rest waits for it.
    """
    payload, rows = 4 * BATCH * TOKENS * SIZES["hidden"], []
    for t, bandwidth, latency in (
        (4, NODES.intra_node_bandwidth, 6 * NODES.intra_node_latency),
        (8, NODES.gpus_per_node * NODES.inter_node_bandwidth, NODES.inter_node_latency),
    ):
        hops, piece = 2 * (t - 1), payload / t
        whole = collectives.seconds("all_reduce", payload, range(t), NODES)
        rows.append(
            [
                f"TP {t}",
                str(hops),
                f"{piece / 1e3:.1f} kB over {bandwidth / 1e6:.0f} MB/s: {1e3 * piece / bandwidth:.1f} ms",
                f"{1e3 * latency:.1f} ms",
                f"{1e3 * whole:.1f} ms",
                f"{16e3 * whole:.0f} ms",
            ]
        )
        assert abs(hops * piece / bandwidth + latency - whole) < 1e-9
    return Table(
        ["all-reduce", "hops", "a piece over the slowest", "latency", "together", "16 of them"], rows
    )


def strong_and_weak(gpus=(8, 16, 32, 64)) -> dict[str, list[tuple[int, float]]]:
    """(GPUs, tokens/s of one) by theory for TP 8 and more data parallelism: the batch fixed (strong), and
    growing with the GPUs (weak).
    """
    run = lambda n, batch: (
        estimate(
            Job(MODEL, CLUSTERS["dgx-a100"], batch, SEQ), Layout(dp=n // 8, tp=8, zero=1)
        ).tokens_per_second_per_gpu
    )
    return {
        "weak: batch grows": [(n, run(n, 8 * n // 8)) for n in gpus],
        "strong: batch of 8": [(n, run(n, 8)) for n in gpus],
    }


def published() -> dict[str, list[tuple[int, float]]]:
    """TFLOP/s of one GPU, 174.6·10⁹ parameters, the batch fixed at 1536: Narayanan et al. 2021, Table 2."""
    with open(find("data/narayanan_2021_table2.csv"), encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if r["params_b"] == "174.6"]
    return {
        scheme: [(int(r["gpus"]), float(r["hw_tflops_per_gpu"])) for r in rows if r["scheme"] == scheme]
        for scheme in ("PTD-P", "ZeRO-3")
    }
