"""Drop 11: throughput lost on a larger cluster: where a step's time goes, axis by axis, measured and by
theory.
"""

from __future__ import annotations

import csv
import os
import time
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from helpers import toy
from helpers.emulate import networks
from helpers.emulate.uplink import Oversubscribed
from helpers.practice.engine import Asked
from helpers.practice.runs import Run, alike, number
from helpers.ranks import current
from helpers.ranks.current import span
from helpers.ranks.world import World
from three_axes.count.clock import Timeline, shortest
from three_axes.explain import Explained
from three_axes.files import find
from three_axes.paper import collectives
from three_axes.paper.schedules import one_f_one_b
from three_axes.plan import CLUSTERS, Job, Layout, estimate
from three_axes.plan.models import find_model
from three_axes.table import Table

AXES = ("tp", "pp", "dp")

# -- practice: split a loss into its causes -------------------------------------------------------


def causes(before, after):
    """Split the loss of a larger cluster into its causes: {"tp": share, "pp": share, "dp": share, "rest":
    share}, which sum to 1.

    before, after: {"ranks": n, "batch": sequences in a step, "parts": {"compute": seconds, "tp": ..., "pp":
    ..., "dp": ..., "rest": ...}}. Perfect scaling would make each part batch/ranks times what it was; what is
    beyond that is lost. A part that is shorter than that has gained: its share is negative.
    """
    ratio = (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"])
    beyond = {
        axis: after["parts"][axis] - ratio * before["parts"][axis] for axis in ("tp", "pp", "dp", "rest")
    }
    return {axis: seconds / sum(beyond.values()) for axis, seconds in beyond.items()}


def _case(ranks, batch, *seconds):
    return {"ranks": ranks, "batch": batch, "parts": dict(zip(("compute", *AXES, "rest"), seconds))}


EXAMPLES = [
    (_case(4, 8, 0.96, 0.2, 0.0, 0.0, 0.08), _case(8, 8, 0.48, 0.5, 0.0, 0.0, 0.1)),
    (_case(8, 64, 1.0, 0.1, 0.2, 0.0, 0.0), _case(64, 512, 1.0, 0.1, 0.2, 0.6, 0.0)),
    (_case(8, 64, 1.0, 0.0, 0.3, 0.0, 0.1), _case(16, 64, 0.5, 0.0, 0.4, 0.1, 0.1)),
    (_case(8, 64, 1.0, 0.3, 0.0, 0.0, 0.1), _case(16, 64, 0.5, 0.1, 0.0, 0.2, 0.1)),  # TP gains
]


def _totals(run: Run) -> list[float]:
    """What the shares of each case sum to."""
    return [] if run.error else [sum(shares.values()) for shares in run.values]


def _sums(run: Run, _) -> bool | str:
    yours = ", ".join(f"{total:.2f}" for total in _totals(run))
    return any(abs(total - 1) > 0.01 for total in _totals(run)) and f"In the four cases yours sum to {yours}."


def _first_that_parts(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    pairs = list(zip(EXAMPLES, run.values, truth.values))
    at, *shares = next((pair for pair in pairs if not alike(*pair[1:], split.tolerance)), pairs[0])
    ranks, batch = (f"{at[0][what]} to {at[1][what]}" for what in ("ranks", "batch"))
    shown = [", ".join(f"{x} {share:.2f}" for x, share in case.items()) for case in shares]
    return [(f"{ranks} ranks, batch {batch}", *shown)]


split = Asked(
    "split the loss",
    causes,
    minutes=7,
    hints=[
        "What would perfect scaling make of a part? Work for one rank is batch / ranks. Everything should"
        " change in that ratio.",
        "ratio = (after batch / after ranks) / (before batch / before ranks). Beyond perfect is after -"
        " ratio · before, for each of tp, pp, dp, rest.",
        "Divide each by the sum of the four.",
    ],
    cases=EXAMPLES,
    reads=lambda shares: {axis: round(number(shares[axis]), 3) for axis in (*AXES, "rest")},
    tolerance=0.006,  # two digits are enough
    praise="The shares of all four cases sum to one, and name the axis.",
    figures=_first_that_parts,
    shows={
        "percent where shares are asked for": lambda run, _: any(abs(t - 100) < 1 for t in _totals(run)),
        "shares that do not sum to one": _sums,
        "all of it blamed on one cause": lambda run, _: (
            not run.error and all(sum(abs(x) > 0.005 for x in mine.values()) == 1 for mine in run.values)
        ),
    },
    mistakes="""
        no shares
            Return a dictionary in which each of tp, pp, dp and rest has a number.
            ~ form
        percent where shares are asked for
            Yours sum to 100; shares sum to 1.
        seconds compared as they are
            Each rank now has a smaller share of the work, so a part that stayed as long has lost. Compare
            with what perfect scaling would make of it.
            - ratio * before => before
        throughput compared at different batches
            One of the cases has a larger batch afterwards. Its steps may be longer without any loss:
            compare per sequence.
            - ratio * before => before["ranks"] / after["ranks"] * before
        the ratio upside down
            Twice the ranks halve a rank's work. The ratio is that work after, over that work before.
            - ratio * before => 1 / ratio * before
            - ratio * before => after["ranks"] / before["ranks"] * before
        the ratio of the batches alone
            You compare by the batch. A rank's work is batch / ranks.
            - ratio * before => after["batch"] / before["batch"] * before
            - ratio * before => before["batch"] / after["batch"] * before
        always half
            You scale each part by 1/2. That is right where the ranks double and the batch stays; one case
            is another.
            - ratio * before => 0.5 * before
            - ratio * before => 0.5 * before & ("tp", => ("compute", "tp",
        what is large is not what was lost
            You look at the second run only. Some of it was there before, and scaled as it should.
            - ratio * before => 0 * before
            - ratio * before => 0 * before & ("tp", => ("compute", "tp",
        a gain taken for no loss
            In one case a part became shorter than perfect scaling would make it. max(0, …) hides that gain:
            its share is negative.
            - return { => beyond = {x: max(0.0, s) for x, s in beyond.items()}⏎    return {
        a gain taken for a loss
            In one case a part became shorter than perfect scaling would make it. abs() makes a loss of that
            gain: its share is negative.
            - return { => beyond = {x: abs(s) for x, s in beyond.items()}⏎    return {
        the first run, not what was lost
            You divide up the first run. What was lost is in the second, beyond what perfect scaling makes
            of the first.
            - after["parts"][axis] - ratio * before => before
        shares that do not sum to one
            Shares sum to 1.
        all of it blamed on one cause
            In each case you give everything to one of the four. Which axes lost, and how much of the loss
            is each?
        other shares
            Lost is what is beyond perfect scaling: after - ratio · before. The ratio is the work of a rank
            after, over the work of a rank before.
            ~ values
    """,
)


# -- practice: place the axes ---------------------------------------------------------------------


def place():
    """(d, t, p, m) for eight ranks in two nodes of four.

    A rank holds a quarter of the model at most, so t·p is at least 4.
    """
    return 2, 4, 1, 1


MARGIN = 1.25  # times the best known's seconds: what a slow machine adds is less


@cache
def _best() -> Measured:
    """The best known, measured once for all tries."""
    return measure(*place())


def _against_best(*layout: int) -> tuple[Measured, Measured]:
    """A layout and the best known, measured. One that seems slower is measured again beside it: the machine
    may have been busier now than it was then.
    """
    if layout == place():
        return _best(), _best()
    mine, best = measure(*layout), _best()
    if mine.seconds > MARGIN * best.seconds:
        best = measure(*place())
        mine = min(mine, measure(*layout), key=lambda one: one.seconds)
    return mine, best


def _four(answer) -> tuple[int, ...]:
    d, t, p, m = map(int, answer)
    if m < 1:
        raise ValueError(m)
    return d, t, p, m


def _steps(run: Run) -> tuple[Measured, Measured] | None:
    """The answer's layout and the best known, measured once for an answer; None for what cannot be."""
    (d, t, p, m), facts = run.values[0], run.ranks[0]
    if min(d, t, p) < 1 or d * t * p != 8 or t * p < 4 or undivided(d, t, p, m):
        return None
    if "steps" not in facts:
        facts["steps"] = _against_best(d, t, p, m)
    return facts["steps"]


def _placed(run: Run, _) -> str | tuple[str, str] | None:
    d, t, p, m = run.values[0]
    if min(d, t, p) < 1 or d * t * p != 8:
        return "d·t·p is not 8", f"{d}·{t}·{p} = {d * t * p}."
    if t * p < 4:
        return "it does not fit", f"Each rank would hold 1/{t * p} of the model."
    if said := undivided(d, t, p, m):
        return "sizes that do not divide", said
    mine, best = _steps(run)
    if t > 4:
        return "TP scaled with the cluster"
    if mine.seconds <= MARGIN * best.seconds:
        return None
    if (d, t, p) == (2, 4, 1):
        return "microbatches without a pipeline"
    if p > 1 and m < 2 * p:
        bubble = (p - 1) / (m + p - 1)
        return "a starved pipeline", f"{p} stages and {m} microbatches: the bubble alone is {bubble:.0%}."
    if m > 2 * p and t > 1:
        return "more microbatches than the pipeline needs"
    return "slower than it could be"


def _seconds(run: Run, _) -> list[tuple[str, str, str]]:
    if not (steps := _steps(run)):
        return []
    mine, best = (f"{one.seconds:.2f}" for one in steps)
    still = ", ".join(f"{steps[0].parts[axis]:.2f}" for axis in AXES)
    return [
        ("seconds of a step, measured just now", mine, f"{best}, the best known"),
        ("standing still for tp, pp, dp", still, ""),
    ]


placing = Asked(
    "win it back",
    place,
    minutes=8,
    hints=[
        "Which axis waits most, and why? tp in every layer: keep it inside a node of four.",
        "t·p must be at least 4, and t at most 4. What is left of 8?",
        "With t = 4 the rest is 2: two stages, or two copies. Which of them has a bubble?",
    ],
    reads=_four,
    compares=False,
    praise="As good as the best known, within what such a measurement can tell.",
    figures=_seconds,
    finds=_placed,
    mistakes="""
        no layout
            Return four whole numbers d, t, p, m, with at least one microbatch.
            ~ form
        d·t·p is not 8
            Each size is at least 1, and the three must multiply to the number of ranks.
        it does not fit
            A quarter of the model is the most that fits a rank: t·p must be at least 4.
        sizes that do not divide
        TP scaled with the cluster
            A node has four ranks. A tp group of eight leaves it, and every layer waits for the slow ports.
            More ranks are no reason for a larger t.
        microbatches without a pipeline
            The axes are right. But with p = 1 there is no bubble to fill, and each microbatch more starts
            every all-reduce once more.
        a starved pipeline
            Take more microbatches, or fewer stages.
        more microbatches than the pipeline needs
            Each microbatch starts every all-reduce of a layer, and each time the ranks wait for the last of
            them. The bubble alone does not ask for so many.
        slower than it could be
            It fits, but its step takes longer than the best known's. Which axis may cross the nodes most
            cheaply?
    """,
)


# -- what the cells show: a step, measured --------------------------------------------------------

# Emulated: nodes of four, with slow ports out of a node. Compute is emulated too.
NODES = networks.nodes("nodes of four", 4, 20e6, 2.5e6, 1e-3)
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


def undivided(d: int, t: int, p: int, m: int) -> str:
    """What the sizes do not divide, in words; '' where they divide everything."""
    if not (BATCH % (d * m) or SIZES["heads"] % t or 4 % p):
        return ""
    return (
        f"d = {d}, t = {t}, p = {p}, m = {m}: d·m must divide the batch of {BATCH} sequences (it is"
        f" {d * m}), t the {SIZES['heads']} heads, p the 4 blocks"
    )


def measure(
    d: int, t: int, p: int, m: int = 1, network: networks.Network = NODES, slow: int | None = None
) -> Measured:
    """One step of the toy on d·t·p real ranks of the emulated cluster, tp innermost. The shortest of a few
    runs. The batch is always 8 sequences. slow: a rank that computes at half the speed.

    Raises ValueError where the sizes do not divide.
    """
    if said := undivided(d, t, p, m):
        raise ValueError(said)

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


# -- what the cells show: the right layout, and slow all the same: three clusters that are ill --------

SLOW_RANK = 5  # computes at half the speed
TCP = replace(
    NODES, name="through TCP", inter_node_bandwidth=NODES.inter_node_bandwidth / 4, inter_node_latency=1e-2
)
FOUR_TO_ONE = Oversubscribed(
    **{**vars(NODES), "name": "four ports to one", "uplink_bandwidth": NODES.inter_node_bandwidth}
)
NETWORKS = {"healthy": NODES, "TCP": TCP, "switch": FOUR_TO_ONE}


def ill() -> dict[str, Measured]:
    """A step of DP 2 · TP 4 on a healthy cluster and on three that are not."""
    return {
        "healthy": measure(2, 4, 1),
        "slow rank": measure(2, 4, 1, slow=SLOW_RANK),
        **{name: measure(2, 4, 1, network=NETWORKS[name]) for name in ("TCP", "switch")},
    }


def beyond_healthy(steps: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """For each ill cluster: the healthy step, and what each part has beyond it. They sum to its step."""
    healthy = steps["healthy"]
    return {
        name: {"healthy": healthy.seconds}
        | {part: step.parts[part] - healthy.parts[part] for part in ("tp", "dp", "rest")}
        for name, step in steps.items()
        if step is not healthy
    }


def stood_still(steps: dict[str, Measured]) -> Table:
    """Milliseconds that each rank waited for others or for the network, in one step."""
    rows = [
        [name, *(f"{1e3 * sum(rank.values()):.0f}" for rank in step.waited)] for name, step in steps.items()
    ]
    return Table(
        ["cluster", *(f"rank {r}" for r in range(8))], rows, title="ms that each rank stood still in a step"
    )


LARGE = 50_000  # float32 numbers: 200 kB


def alone_and_together() -> dict[str, tuple[float, float, float]]:
    """Seconds of an all-reduce between two nodes, on each network: 8 bytes; 200 kB by one pair of ranks while
    the others are silent; 200 kB by all four pairs at once.
    """

    def sends():
        pairs = [dist.new_group([r, r + 4]) for r in range(4)]
        mine = dist.get_rank() % 4

        def takes(elements: int, everybody: bool) -> float:
            x = torch.ones(elements)
            dist.barrier()
            start = time.monotonic()
            if everybody or mine == 0:
                dist.all_reduce(x, group=pairs[mine])
            return time.monotonic() - start

        takes(2, True)  # connections are made
        return [min(takes(*how) for _ in range(3)) for how in ((2, False), (LARGE, False), (LARGE, True))]

    seconds = {}
    for name, network in NETWORKS.items():
        with World(8, fabric=network, timeout=60) as world:
            seconds[name] = tuple(max(column) for column in zip(*world.run(sends)))
    return seconds


def bandwidths(seconds: dict[str, tuple[float, float, float]]) -> Table:
    """What `alone_and_together` found, as a table."""
    rows = [[name, *(f"{1e3 * s:.0f} ms" for s in row)] for name, row in seconds.items()]
    return Table(["network", "8 bytes", "200 kB, one pair alone", "200 kB, four pairs at once"], rows)


# -- the reader's own ----------------------------------------------------------------------------

STEPS, SLOW_READER = 3, 2


def record(folder: str) -> str:
    """On a rank: write a trace of three steps of DDP to the folder, and return its file. One rank is slow to
    prepare its examples.
    """
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # without, the profiler prints a line at each start and stop
    rank = dist.get_rank()
    model = DistributedDataParallel(toy.ToyTransformer(seed=0, hidden=64, heads=8, seq_len=TOKENS))
    optimizer = torch.optim.AdamW(model.parameters())
    file = os.path.join(folder, f"rank{rank}.json.gz")
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(file),
    ) as recorded:
        for step in range(1 + STEPS):
            if rank == SLOW_READER:
                time.sleep(0.2)
            ids, targets = toy.make_batch(BATCH, TOKENS, seed=step)
            toy.loss_of(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.step()
    return file


def own_waterfall(explained: Explained, *ranks: int) -> dict[str, dict[str, float]]:
    """A step of each of these ranks, part by part, from its trace."""
    return {
        f"rank {split.rank}": {part: seconds / split.steps for part, seconds in split.parts.items()}
        for split in explained.splits
        if split.rank in ranks
    }
