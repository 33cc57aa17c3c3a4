"""Functions for the cells of drop 11's notebook."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from drops import lines
from drops.d11.cluster import BATCH, NODES, SIZES, TOKENS
from drops.measured import BUSY
from helpers import toy
from helpers.practice import line
from three_axes.explain import Explained
from three_axes.files import rows_of
from three_axes.paper import collectives
from three_axes.plan import CLUSTERS, Estimate, Job, Layout, estimate, find_model
from three_axes.table import Table

MODEL, SEQ, GLOBAL = find_model("llama-3-8b"), 8192, 64
# Layouts of MODEL, with GLOBAL sequences of SEQ tokens in a step.
CASES = {
    "8 GPUs: TP 8": Layout(dp=1, tp=8, zero=1),
    "64: TP 16 · DP 4": Layout(dp=4, tp=16, zero=1),
    "64: TP 8 · PP 8": Layout(dp=1, tp=8, pp=8, zero=1),
    "64: TP 8 · DP 8": Layout(dp=8, tp=8, zero=1),
    "8 GPUs: DP 8, ZeRO-2": Layout(dp=8, zero=2),
    "64: DP 64, ZeRO-3": Layout(dp=64, zero=3),
}
GROWN = {  # a 70B with 256 sequences of 4,096 tokens in a step
    "64 GPUs: TP 8 · PP 4 · DP 2": Layout(dp=2, tp=8, pp=4, zero=1),
    "128: TP 16 · PP 4 · DP 2": Layout(dp=2, tp=16, pp=4, zero=1),
    "128: TP 8 · PP 8 · DP 2": Layout(dp=2, tp=8, pp=8, zero=1),
    "128: TP 8 · PP 4 · DP 4": Layout(dp=4, tp=8, pp=4, zero=1),
    "128: TP 4 · PP 2 · DP 16, v 5": Layout(dp=16, tp=4, pp=2, schedule="interleaved", interleave=5, zero=1),
}


def grown() -> Table:
    """Llama-3-70B on 64 A100s and in four ways on 128, by the planner: speed, waits for TP, and bubble."""
    rows = []
    for name, layout in GROWN.items():
        e = estimate(Job(find_model("llama-3-70b"), CLUSTERS["dgx-a100"], 256, 4096), layout)
        shares = [
            f"{float(e.time.get(term, 0)) / e.step_seconds:.0%}" for term in ("tensor parallel", "bubble")
        ]
        rows.append([name, f"{e.tokens_per_second_per_gpu:,.0f}", f"{e.mfu:.0%}", *shares])
    columns = ["Llama-3-70B on A100s", "tokens/s/GPU", "MFU", "waits for TP", "bubble"]
    return Table(columns, rows, title=f"256 sequences of 4,096 tokens in a step; {how_sure(e)}")


def how_sure(estimated: Estimate) -> str:
    """The framework of an estimate, and the interval of its speed: one over that of its seconds."""
    slowest, fastest = 1 / estimated.sure.high, 1 / estimated.sure.low
    return (
        f"framework: {estimated.job.framework.name}; 8 of 10 published runs reach {slowest:.2f} to"
        f" {fastest:.2f} times these speeds"
    )


def _on_paper(layout: Layout, batch: int = GLOBAL) -> Estimate:
    return estimate(Job(MODEL, CLUSTERS["dgx-a100"], batch, SEQ), layout)


def estimates() -> dict[str, Estimate]:
    """Llama-3-8B with a batch of 64 sequences of 8192 tokens on 8 GPUs and on 64."""
    return {name: _on_paper(layout) for name, layout in CASES.items()}


def beyond_ideal(on_paper: dict) -> dict[str, dict[str, float]]:
    """For each layout of 64 GPUs: the step of 8 GPUs divided by 8, and each term's seconds beyond an eighth
    of that term on 8 GPUs. They sum to the step.
    """
    first = on_paper["8 GPUs: TP 8"]
    smaller = ("matrices", "attention", "elementwise", "waiting for the host", "optimizer")
    names = dict.fromkeys(smaller, "smaller matrices") | {"head": "waiting for the output layer's stage"}
    panels = {}
    for name, e in on_paper.items():
        if not name.startswith("8 GPUs"):
            parts = panels[name] = {"ideal": first.step_seconds / 8}
            for term, seconds in e.time.items():
                part = names.get(term, term)
                parts[part] = parts.get(part, 0.0) + seconds - first.time[term] / 8
    return panels


def by_hand() -> Table:
    """The toy's tensor parallel all-reduce of b·s·h float32 numbers on 4 and on 8 ranks, hop by hop. On equal
    links each hop waits for the hop before it. If one hop is slow, it is always busy, and the others wait for
    it. Predicted: the bytes of a step's all-reduces over the bandwidth, by the lines of drops 03 and 08.
    """
    payload, rows = 4 * BATCH * TOKENS * SIZES["hidden"], []
    for t, bandwidth, latency in (
        (4, NODES.intra_node_bandwidth, 6 * NODES.intra_node_latency),
        (8, NODES.gpus_per_node * NODES.inter_node_bandwidth, NODES.inter_node_latency),
    ):
        hops, piece = 2 * (t - 1), payload / t
        whole = collectives.seconds("all_reduce", payload, range(t), NODES)
        assert abs(hops * piece / bandwidth + latency - whole) < 1e-9
        slowest = f"{piece / 1e3:.1f} kB over {bandwidth / 1e6:.0f} MB/s: {1e3 * piece / bandwidth:.1f} ms"
        times = f"{1e3 * latency:.1f} ms", f"{1e3 * whole:.1f} ms", f"{16e3 * whole:.0f} ms"
        sent = lines.tp_sends(4, SIZES["hidden"], BATCH * TOKENS, t, 4)
        reached = lines.bandwidth(
            t, 1, NODES.gpus_per_node, NODES.intra_node_bandwidth, NODES.inter_node_bandwidth
        )
        rows.append([f"TP {t}", str(hops), slowest, *times, f"{1e3 * sent / reached:.0f} ms"])
    columns = ["all-reduce", "hops", "a piece over the slowest", "latencies that show", "together"]
    return lines.tp_sends.below(Table([*columns, "16 of them", "predicted"], rows), lines.bandwidth)


def strong_and_weak(gpus=(8, 16, 32, 64)) -> dict[str, list[tuple[int, float]]]:
    """(GPUs, tokens/s of a GPU) by the planner for TP 8 and more data parallelism: with a fixed batch (strong
    scaling), and with a batch that grows with the GPUs (weak scaling).
    """
    run = lambda n, batch: _on_paper(Layout(dp=n // 8, tp=8, zero=1), batch).tokens_per_second_per_gpu
    return {
        "weak: batch grows": [(n, run(n, n)) for n in gpus],
        "strong: batch of 8": [(n, run(n, 8)) for n in gpus],
    }


def published() -> dict[str, list[tuple[int, float]]]:
    """(GPUs, TFLOP/s of a GPU), 174.6·10⁹ parameters, batch 1536: Narayanan et al. 2021, Table 2."""
    rows = [r for r in rows_of("narayanan_2021_table2.csv") if r["params_b"] == "174.6"]
    return {
        scheme: [(int(r["gpus"]), float(r["hw_tflops_per_gpu"])) for r in rows if r["scheme"] == scheme]
        for scheme in ("PTD-P", "ZeRO-3")
    }


STEPS, SLOW_READER = 3, 2


def record(folder: str) -> str:
    """On a rank: write a trace of three steps of DDP to the folder, and return its file. One rank is slow to
    prepare its examples.
    """
    # By default the profiler prints a line at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
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
    """Rank -> the seconds of a step by part, from its trace, for each of `ranks`."""
    return {
        f"rank {split.rank}": {part: seconds / split.steps for part, seconds in split.parts.items()}
        for split in explained.splits
        if split.rank in ranks
    }


def answer(lost: dict[str, float]) -> tuple[str, str]:
    """The arguments of `guess.reveal`. lost: seconds of a step beyond perfect scaling, by what took them."""
    most = max(("tp", "pp", "dp", "rest"), key=lambda part: lost.get(part, 0.0))
    options = {"tp": "waiting inside every layer", "dp": "waiting for the gradients"}
    why = (
        '"The network is slow" is no answer: **tp** is what waits, because it left its node. In each of its'
        " sixteen all-reduces a step, fourteen pieces wait for the ports."
        if most == "tp"
        else BUSY
    )
    return options.get(most, f"none of these: most is {most}"), why


# Checks the number in the notebook's first code cell: per cent of its speed that a GPU lost.
first_line = line(
    25,
    "12.5 sequences a second became 9.375: 25 % less, on a cluster that is faster as a whole.",
    "Divide by the GPUs: 100/8 before, 150/16 after. Which share of the first is missing, in per cent?",
)
