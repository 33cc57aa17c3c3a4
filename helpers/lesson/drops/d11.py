"""Drop 11: throughput lost on a larger cluster: where a step's time goes, axis by axis, measured and by
theory.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ... import toy
from ...runtime import worker
from ...runtime.clock import Timeline, span
from ...runtime.world import World
from ...table import Table
from ...theory import CLUSTERS, Layout, collectives, estimate
from ...theory.hardware import DEVICES, Cluster
from ...theory.models import find_model
from ...theory.schedules import one_f_one_b
from ..practice import Answer, Exercise, right, wrong

# Emulated: nodes of four, with slow ports out of a node. Compute is emulated too.
NODES = Cluster(
    "nodes of four", DEVICES["h100-80gb"], node=4, link=20e6, nic=5e6, link_latency=1e-4, nic_latency=1e-3
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

    @property
    def sequences_per_second_per_rank(self) -> float:
        d, t, p, _ = self.layout
        return BATCH / self.seconds / (d * t * p)


def measure(d: int, t: int, p: int, m: int = 1, cluster: Cluster = NODES, tries: int = 2) -> Measured:
    """One step of the toy on d·t·p real ranks of the emulated cluster, tp innermost; the shorter of two. The
    batch is always 8 sequences.

    Raises ValueError where the sizes do not divide.
    """
    if BATCH % (d * m) or SIZES["heads"] % t or 4 % p:
        raise ValueError(
            f"d = {d}, t = {t}, p = {p}, m = {m}: d·m must divide the batch of {BATCH}, t the"
            f" {SIZES['heads']} heads, p the 4 blocks"
        )

    def run():
        grid = toy.grid_groups(d, p, t)
        stage = toy.on_grid(toy.ToyTransformer(seed=0, **SIZES), grid)
        each = WORK * BATCH / (d * m) / t
        for block in stage:
            if isinstance(block, toy.Block):
                toy.pace(block, each, 2 * each)
        ops = one_f_one_b(p, m).ops[grid["pp"].get_local_rank()]
        batch = toy.make_batch(BATCH, TOKENS)
        for group in ("dp", "pp", "tp"):
            dist.barrier(grid[group].get_group())  # connections are made before the clock runs
        worker.here.recorder.start()
        dist.barrier()
        with span("busy"):
            toy.grid_step(stage, *batch, ops, m, grid)

    found = []
    with World(d * t * p, fabric=cluster, timeout=60) as world:
        for _ in range(tries):
            world.run(run)
            found.append(_parts((d, t, p, m), world.timeline))
    return min(found, key=lambda f: f.seconds)


def _parts(layout: tuple, timeline: Timeline) -> Measured:
    d, t, p, m = layout
    n = len(timeline.rows)
    steps = [next(s for s in row if s.kind == "busy") for row in timeline.rows]
    seconds = max(s.end for s in steps) - min(s.start for s in steps)
    only = {t: "tp", p: "pp", d: "dp"}[n] if n in (t, p, d) else None  # a group of all ranks is the world
    axis = lambda s: s.label.split()[1].replace("world", only or "world")
    waited = {
        name: (
            sum(
                s.end - s.start
                for row, step in zip(timeline.rows, steps)
                for s in row
                if s.kind == "wait" and axis(s) == name and s.start >= step.start
            )
            / n
        )
        for name in ("tp", "pp", "dp")
    }
    compute = 12 * WORK * BATCH / (d * t * p)  # four blocks, 1 + 2 each
    rest = seconds - compute - sum(waited.values())
    return Measured(layout, seconds, {"compute": compute, **waited, "rest": rest}, timeline)


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
        name: estimate(MODEL, layout, CLUSTERS["dgx-a100"], global_batch=GLOBAL, seq_len=SEQ)
        for name, layout in CASES.items()
    }


def beyond_ideal(found: dict) -> dict[str, dict[str, float]]:
    """For each layout of 64 GPUs: the step of 8 GPUs divided by 8, and what each term has beyond its share of
    that. They sum to the step.
    """
    first = found["8 GPUs: TP 8"]
    names = {
        "matrices": "smaller matrices",
        "attention": "smaller matrices",
        "elementwise": "smaller matrices",
        "optimizer": "smaller matrices",
        "head": "waiting for the head's stage",
    }
    panels = {}
    for name, e in found.items():
        if e is not first:
            parts = panels[name] = {"ideal": first.step_seconds / 8}
            for term, seconds in e.time.items():
                part = names.get(term, term)
                parts[part] = parts.get(part, 0.0) + seconds - first.time[term] / 8
    return panels


def by_hand() -> Table:
    """The toy's tensor parallel all-reduce of b·s·h float32 numbers on 4 and on 8 ranks, as
    `theory.collectives.seconds` has it.
    """
    payload, rows = 4 * BATCH * TOKENS * SIZES["hidden"], []
    for t, latency in ((4, NODES.link_latency), (8, NODES.nic_latency)):
        whole = collectives.seconds("all_reduce", payload, range(t), NODES)
        start = 2 * (t - 1) * latency
        rows.append(
            [
                f"TP {t}",
                f"{2 * (t - 1)} × {1e3 * latency:.1f} ms",
                f"{1e3 * start:.1f} ms",
                f"{1e3 * (whole - start):.1f} ms",
                f"{1e3 * whole:.1f} ms",
                f"{16e3 * whole:.0f} ms",
            ]
        )
    return Table(["all-reduce", "messages", "latency", "bytes", "together", "16 of them"], rows)


def strong_and_weak(gpus=(8, 16, 32, 64)) -> dict[str, list[tuple[int, float]]]:
    """(GPUs, tokens/s of one) by theory for TP 8 and more data parallelism: the batch fixed (strong), and
    growing with the GPUs (weak).
    """
    run = lambda n, batch: (
        estimate(
            MODEL, Layout(dp=n // 8, tp=8, zero=1), CLUSTERS["dgx-a100"], global_batch=batch, seq_len=SEQ
        ).tokens_per_second_per_gpu
    )
    return {
        "weak: batch grows": [(n, run(n, 8 * n // 8)) for n in gpus],
        "strong: batch of 8": [(n, run(n, 8)) for n in gpus],
    }


def published() -> dict[str, list[tuple[int, float]]]:
    """TFLOP/s of one GPU, 174.6·10⁹ parameters, the batch fixed at 1536: Narayanan et al. 2021, Table 2."""
    with open(Path(__file__).resolve().parents[3] / "data" / "narayanan_2021_table2.csv") as f:
        rows = [r for r in csv.DictReader(f) if r["params_b"] == "174.6"]
    return {
        scheme: [(int(r["gpus"]), float(r["hw_tflops_per_gpu"])) for r in rows if r["scheme"] == scheme]
        for scheme in ("PTD-P", "ZeRO-3")
    }


# -- practice ----------------------------------------------------------------------------------


def causes(before, after):
    """Split the loss of a larger cluster into its causes: {"tp": share, "pp": share, "dp": share, "rest":
    share}, which sum to 1.

    before, after: {"ranks": n, "batch": sequences in a step, "parts": {"compute": seconds, "tp": ..., "pp":
    ..., "dp": ..., "rest": ...}}.
    Perfect scaling would make each part batch/ranks times what it was; what is beyond that is lost.
    """
    ratio = (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"])
    beyond = {
        axis: after["parts"][axis] - ratio * before["parts"][axis] for axis in ("tp", "pp", "dp", "rest")
    }
    return {axis: seconds / sum(beyond.values()) for axis, seconds in beyond.items()}


def _case(ranks, batch, compute, tp, pp, dp, rest):
    return {
        "ranks": ranks,
        "batch": batch,
        "parts": {"compute": compute, "tp": tp, "pp": pp, "dp": dp, "rest": rest},
    }


EXAMPLES = [
    (_case(4, 8, 0.96, 0.2, 0.0, 0.0, 0.08), _case(8, 8, 0.48, 0.5, 0.0, 0.0, 0.1)),
    (_case(8, 64, 1.0, 0.1, 0.2, 0.0, 0.0), _case(64, 512, 1.0, 0.1, 0.2, 0.6, 0.0)),
    (_case(8, 64, 1.0, 0.0, 0.3, 0.0, 0.1), _case(16, 64, 0.5, 0.0, 0.4, 0.1, 0.1)),
]


def _judge_causes(attempted) -> Answer:
    with World(1, timeout=5) as world:
        said = world.run(lambda: [attempted(*example) for example in EXAMPLES])[0]
    axes = ("tp", "pp", "dp", "rest")
    near = lambda a, b: all(abs(a[x] - b[x]) < 0.005 for x in axes)
    for mine in said:
        if not isinstance(mine, dict) or not set(axes) <= set(mine):
            return wrong("no shares", f"You return {mine!r}; return a dictionary with tp, pp, dp and rest.")
        if not all(isinstance(mine[x], (int, float)) for x in axes):
            return wrong("no shares", f"You return {mine!r}; each of tp, pp, dp and rest is a number.")
        if abs(sum(mine[x] for x in axes) - 100) < 1:
            return wrong("percent where shares are asked for", "Yours sum to 100; shares sum to 1.")

    def by(scale):
        found = []
        for before, after in EXAMPLES:
            beyond = {x: after["parts"][x] - scale(before, after) * before["parts"][x] for x in axes}
            found.append({x: s / (sum(beyond.values()) or 1) for x, s in beyond.items()})
        return found

    truth = [causes(*example) for example in EXAMPLES]
    show = lambda shares: ", ".join(f"{x} {shares[x]:.2f}" for x in axes)
    off = next((i for i, (a, b) in enumerate(zip(said, truth)) if not near(a, b)), None)
    if off is None:
        return right(
            "The shares of all three cases sum to one, and name the axis.",
            ("the case of this drop", show(said[0]), show(truth[0])),
        )
    figures = [
        (
            (
                f"{EXAMPLES[off][0]['ranks']} to {EXAMPLES[off][1]['ranks']} ranks, batch"
                f" {EXAMPLES[off][0]['batch']} to {EXAMPLES[off][1]['batch']}"
            ),
            show(said[off]),
            show(truth[off]),
        )
    ]
    if all(near(a, b) for a, b in zip(said, by(lambda b, a: 1.0))):
        return wrong(
            "seconds compared as they are",
            "Each rank now has a smaller share of the work, so a part that stayed as long has lost: compare"
            " with what perfect scaling would make of it.",
            *figures,
        )
    if all(near(a, b) for a, b in zip(said, by(lambda b, a: b["ranks"] / a["ranks"]))):
        return wrong(
            "throughput compared at different batches",
            "One of the cases has a larger batch afterwards. Its steps may be longer without anything being"
            " lost: compare per sequence.",
            *figures,
        )
    after_only = [{x: a["parts"][x] / sum(a["parts"][y] for y in axes) for x in axes} for _, a in EXAMPLES]
    if all(near(a, b) for a, b in zip(said, after_only)):
        return wrong(
            "what is large is not what was lost",
            "You look at the second run only. Some of it was there before, and scaled as it should.",
            *figures,
        )
    if any(abs(sum(m[x] for x in axes) - 1) > 0.01 for m in said):
        return wrong(
            "shares that do not sum to one",
            f"Yours sum to {sum(said[off][x] for x in axes):.2f}. Divide by the sum of what was lost.",
            *figures,
        )
    if any(sum(abs(m[x]) > 0.005 for x in axes) == 1 and not near(m, t) for m, t in zip(said, truth)):
        return wrong(
            "all of it blamed on one cause",
            '"The network" is no answer: which axis, and how much of the loss is it?',
            *figures,
        )
    return wrong(
        "other shares",
        "Lost is what is beyond perfect scaling: after - ratio · before, where ratio is the work of a rank"
        " after over the work of a rank before.",
        *figures,
    )


split = Exercise(
    "split the loss",
    causes,
    _judge_causes,
    hints=[
        (
            "What would perfect scaling make of a part? Work for one rank is batch / ranks. Everything should"
            " change in that ratio."
        ),
        (
            "ratio = (after batch / after ranks) / (before batch / before ranks). Beyond perfect is after -"
            " ratio · before, for each of tp, pp, dp, rest."
        ),
        "Divide each by the sum of the four.",
    ],
)


def place():
    """(d, t, p, m) for eight ranks in two nodes of four.

    A rank holds a quarter of the model at most, so t·p is at least 4.
    """
    return 2, 4, 1, 1


def _judge_place(attempted) -> Answer:
    with World(1, timeout=5) as world:
        said = world.run(attempted)[0]
    try:
        d, t, p, m = (int(x) for x in said)
    except (TypeError, ValueError):
        return wrong("no layout", f"You return {said!r}; return four whole numbers d, t, p, m.")
    if min(d, t, p, m) < 1 or d * t * p != 8:
        return wrong(
            "d·t·p is not 8",
            f"{d}·{t}·{p} = {d * t * p}. The three sizes must multiply to the number of ranks.",
        )
    if t * p < 4:
        return wrong(
            "it does not fit",
            f"Each rank would hold 1/{t * p} of the model, and a quarter is the most that fits: t·p must be"
            " at least 4.",
        )
    try:
        mine = measure(d, t, p, m)
    except ValueError as e:
        return wrong("sizes that do not divide", str(e))
    best = measure(*place()) if (d, t, p, m) != place() else mine
    figures = [
        (
            "seconds of a step, measured just now",
            f"{mine.seconds:.2f}",
            f"{best.seconds:.2f}, the best known",
        ),
        ("standing still for tp, pp, dp", ", ".join(f"{mine.parts[a]:.2f}" for a in ("tp", "pp", "dp")), ""),
    ]
    if t > 4:
        return wrong(
            "TP scaled with the cluster",
            "A node has four ranks, so a tp group of eight leaves it, and every layer waits for the slow"
            " ports. More ranks are no reason for a larger t.",
            *figures,
        )
    if mine.seconds <= 1.15 * best.seconds:
        return right("As good as the best known, within what such a measurement can tell.", *figures)
    if p == 1 and m > 1 and (d, t, p) == place()[:3]:
        return wrong(
            "microbatches without a pipeline",
            f"The axes are right. But with p = 1 there is no bubble to fill, and {m} microbatches start every"
            f" all-reduce {m} times.",
            *figures,
        )
    if p > 1 and m < 2 * p:
        return wrong(
            "a starved pipeline",
            f"{p} stages and {m} microbatches: the bubble alone is {(p - 1) / (m + p - 1):.0%}. More"
            " microbatches, or fewer stages.",
            *figures,
        )
    worst = max(("tp", "pp", "dp"), key=lambda a: mine.parts[a])
    if m > 2 * p and worst == "tp":
        return wrong(
            "more microbatches than the pipeline needs",
            f"{m} microbatches start every all-reduce of a layer {m} times, and each time the ranks wait for"
            " the last of them. The bubble alone does not ask for so many.",
            *figures,
        )
    return wrong(
        "slower than it could be",
        f"It fits. But a rank still stands still for {worst} {mine.parts[worst]:.2f} s a step. Which axis may"
        " cross the nodes most cheaply?",
        *figures,
    )


placing = Exercise(
    "win it back",
    place,
    _judge_place,
    hints=[
        "Which axis waits most, and why? tp in every layer: keep it inside a node of four.",
        "t·p must be at least 4, and t at most 4. What is left of 8?",
        "With t = 4 the rest is 2: two stages, or two copies. Which of them has a bubble?",
    ],
)
