"""The cost model beside llm-analysis, the one other tool that pip has: `python
tools/bench/cost_peers.py`, in the peers' environment.

llm-analysis wants a share of peak FLOP/s to be given. Each table gets the one that fits it best, which ours
does not: its constants are frozen. Only rows that print a microbatch are asked, since it must be told.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
from collections.abc import Iterator

import numpy as np
from llm_analysis import config
from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
from report import save

from three_axes.plan import Job, Layout, validation
from three_axes.plan.cost import step_terms

A100 = config.GPUConfig("a100", 80, 2039, 300, 8e-6, 312, inter_node_bandwidth_in_GB_per_sec=200)
EFFICIENCIES = np.arange(0.30, 0.80, 0.01)


def korthikanti() -> Iterator[tuple]:
    for r in validation.rows("korthikanti_2022_table5.csv"):
        yield (
            r,
            int(r["vocab"]),
            int(r["gpus"]),
            int(r["tp"]),
            int(r["pp"]),
            float(r["iter_s_full_recompute"]),
        )


def narayanan_2() -> Iterator[tuple]:
    for r, (_, real, *_) in zip(
        (r for r in validation.rows("narayanan_2021_table2.csv") if r["scheme"] == "PTD-P"),
        validation.narayanan_2("PTD-P"),
    ):
        shape = (
            dict(layers=96, hidden=12288, heads=96)
            if r["params_b"] == "174.6"
            else dict(layers=105, hidden=20480, heads=128)
        )
        yield {**r, **shape}, 51200, int(r["gpus"]), 8, int(r["model_parallel_size"]) // 8, real


def theirs(r: dict, vocab: int, n: int, t: int, p: int, efficiency: float) -> float:
    """Seconds of a step by llm-analysis."""
    layers, heads, hidden, b, batch = (
        int(r[k]) for k in ("layers", "heads", "hidden", "microbatch_seqs", "global_batch_seqs")
    )
    model = config.ModelConfig(
        "gpt",
        layers,
        heads,
        hidden,
        vocab,
        max_seq_len=2048,
        num_key_value_heads=heads,
        ffn_embed_dim=4 * hidden,
        expansion_ratio=4,
    )
    d = n // t // p
    tool = LLMAnalysis(
        model,
        A100,
        config.DtypeConfig(),
        config.ParallelismConfig(t, p, d, 1, t),
        flops_efficiency=efficiency,
        hbm_memory_efficiency=0.9,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return tool.training(
            batch_size_per_gpu=b,
            gradient_accumulation_steps=batch // (b * d),
            seq_len=2048,
            total_num_tokens=batch * 2048,
            activation_recomputation=ActivationRecomputation.FULL,
            flash_attn=False,
            softmax_dropout=True,
        )["latency_per_iter"]


def main() -> None:
    logging.disable(logging.CRITICAL)
    rows = []
    for name, table, ours in (
        ("Korthikanti 2022, T5, full recompute", korthikanti, "Korthikanti 2022, T5 (fitted)"),
        ("Narayanan 2021, T2 PTD-P", narayanan_2, "Narayanan 2021, T2 PTD-P"),
    ):
        runs = list(table())
        errors = {
            e: np.mean([abs(theirs(*run[:-1], efficiency=e) / run[-1] - 1) for run in runs])
            for e in EFFICIENCIES
        }
        best = min(errors, key=errors.get)
        mine, null = validation.errors(ours)
        rows.append(
            [
                name,
                str(len(runs)),
                f"{100 * np.abs(mine).mean():.1f} %",
                f"{100 * errors[best]:.1f} % (at {best:.0%} of peak)",
                f"{100 * np.abs(null).mean():.1f} %",
            ]
        )
    run = next(korthikanti())

    def seconds_of(what) -> float:
        took = []
        for _ in range(20):
            start = time.perf_counter()
            what()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    one = seconds_of(lambda: theirs(*run[:-1], efficiency=0.5))
    model = validation.gpt(run[0]["layers"], run[0]["hidden"], run[0]["heads"])
    sizes = dict(dp=1, tp=8, pp=1, microbatch=4, interleave=1)
    many = Layout(**{name: np.full(3000, size) for name, size in sizes.items()})
    job = Job(model, validation.A100, 4, 2048)
    all_at_once = seconds_of(lambda: step_terms(job, many)) / 3000
    save(
        "cost_peers",
        "The cost model beside llm-analysis, seconds per step",
        ["published table", "runs", "this course", "llm-analysis", "null model"],
        rows,
        "Ours and the null model are judged on all eight runs of T5, llm-analysis on the four with full"
        " recompute.",
        f"One layout takes llm-analysis {1e3 * one:.1f} ms; this course's planner looks at thousands at once,"
        f" {1e6 * all_at_once:.1f} µs each.",
        packages=("llm-analysis",),
    )


if __name__ == "__main__":
    main()
