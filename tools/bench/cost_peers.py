"""The cost model beside llm-analysis, the one other tool that pip has: `python
tools/bench/cost_peers.py`, in the peers' environment.

llm-analysis wants a share of peak FLOP/s to be given. Each table gets the one that fits it best, which ours
does not: its constants are frozen. Only rows that print a microbatch are asked, since it must be told.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

import numpy as np
from llm_analysis import config
from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
from report import median_seconds, save

from three_axes.plan import Job, Layout, validation
from three_axes.plan.cost import step_terms

A100 = config.GPUConfig("a100", 80, 2039, 300, 8e-6, 312, inter_node_bandwidth_in_GB_per_sec=200)
EFFICIENCIES = np.arange(0.30, 0.80, 0.01)


def korthikanti() -> Iterator[tuple]:
    """(row, vocabulary, GPUs, tp, pp, seconds printed) of each run."""
    for r in validation.rows("korthikanti_2022_table5.csv"):
        sizes = (int(r[name]) for name in ("vocab", "gpus", "tp", "pp"))
        yield r, *sizes, float(r["iter_s_full_recompute"])


def narayanan_2() -> Iterator[tuple]:
    """The same of the other table, which does not print the models' shapes."""
    runs = [r for r in validation.rows("narayanan_2021_table2.csv") if r["scheme"] == "PTD-P"]
    for r, (_, real, job, n) in zip(runs, validation.narayanan_2("PTD-P")):
        shape = {name: getattr(job.model, name) for name in ("layers", "hidden", "heads")}
        yield r | shape, 51200, n, 8, int(r["model_parallel_size"]) // 8, real


def theirs(r: dict, vocab: int, n: int, t: int, p: int, efficiency: float) -> float:
    """Seconds of a step by llm-analysis."""
    layers, heads, hidden, b, batch = (
        int(r[k]) for k in ("layers", "heads", "hidden", "microbatch_seqs", "global_batch_seqs")
    )
    shape = dict(max_seq_len=2048, num_key_value_heads=heads, ffn_embed_dim=4 * hidden, expansion_ratio=4)
    model = config.ModelConfig("gpt", layers, heads, hidden, vocab, **shape)
    d = n // t // p
    of_peak = dict(flops_efficiency=efficiency, hbm_memory_efficiency=0.9)
    tool = LLMAnalysis(model, A100, config.DtypeConfig(), config.ParallelismConfig(t, p, d, 1, t), **of_peak)
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
        off = lambda e: np.mean([abs(theirs(*run[:-1], efficiency=e) / run[-1] - 1) for run in runs])
        error, best = min((off(e), e) for e in EFFICIENCIES)
        mine, null = (f"{100 * np.abs(errors).mean():.1f} %" for errors in validation.errors(ours))
        other = f"{100 * error:.1f} % (at {best:.0%} of peak)"
        rows.append([name, str(len(runs)), mine, other, null])
    run = next(korthikanti())
    one = median_seconds(lambda: theirs(*run[:-1], efficiency=0.5), 20)
    model = validation.gpt(run[0]["layers"], run[0]["hidden"], run[0]["heads"])
    sizes = dict(dp=1, tp=8, pp=1, microbatch=4, interleave=1)
    many = Layout(**{name: np.full(3000, size) for name, size in sizes.items()})
    job = Job(model, validation.A100, 4, 2048)
    all_at_once = median_seconds(lambda: step_terms(job, many), 20) / 3000
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
