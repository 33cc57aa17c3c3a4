"""Ultra-Scale Playbook's runs of nanotron (Hugging Face, 2025) beside the planner: seconds, memory, and how
good its picks are. `published.py` calls this where its folder has the tables.

The record `nanotron` is what the framework's source says. Its launch_seconds were read from these runs on
one node, and from their memory how most of them had set its switch `tp_recompute_allgather`; nothing else
was. The benchmark's own table has a column for runs after a repair of the pipeline (`after_pp_fix`); the one
that is gathered does not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from tables import rows_of, show

from three_axes.plan import CLUSTERS, FRAMEWORKS, Cluster, Job, ModelShape
from three_axes.plan.memory import OVERHEAD, stage_memory
from three_axes.plan.validation import errors_of, row_of, seconds

RUNS, SPEEDS = "ultrascale_nanotron_bench_visible.csv", "ultrascale_comm_bandwidth_256mb.csv"
NANOTRON = FRAMEWORKS["nanotron"]
ERRORS = ["runs", "error (MAPE)", "median", "p90", "bias", "null model"]
USUAL = 15  # percent of MFU that a run must reach where we say "usual"


def _cluster(folder: Path) -> Cluster:
    """A DGX H100 with the all-reduces, and all-gathers, that the same authors measured between nodes."""
    speeds: dict[str, list[tuple[int, float]]] = {"AllReduce": [], "AllGather": []}
    for r in rows_of(folder / SPEEDS):
        if r["collective"] in speeds and int(r["nodes"]) > 1:
            pair = int(r["nodes"]), 1e9 * float(r["busbw_median_gbytes_per_s"])
            speeds[r["collective"]].append(pair)
    busbw, gather = map(tuple, speeds.values())
    return replace(CLUSTERS["dgx-h100"], name="ultra-scale", busbw=busbw, busbw_gather=gather)


class Run:
    """A row: its job and layout; printed, where it did not crash: seconds of a step, GiB of rank 0, MFU."""

    def __init__(self, row: dict[str, str], cluster: Cluster):
        layers, hidden, heads, vocab, ffn = (
            int(row[f"{name}_inferred"]) for name in ("layers", "hidden", "heads", "vocab", "ffn")
        )
        tied = row["embedding_inferred"] == "tied"
        model = ModelShape(row["model"], layers, hidden, heads, vocab, ffn=ffn, gated=True, tied=tied)
        names = dict(dp="dp", tp="tp", pp="pp", microbatch="microbatch_seqs", zero="zero_stage")
        self.layout = NANOTRON.layout(**{size: int(row[name]) for size, name in names.items()})
        self.job = Job(model, cluster, int(row["global_batch_seqs"]), int(row["seq_len"]), NANOTRON)
        self.nodes, self.crashed = int(row["nodes"]), row["status"] != "ok"
        if not self.crashed:
            self.seconds = self.job.global_batch * self.job.seq_len / float(row["tok_per_s"])
            self.gib, self.mfu = float(row["mem_gb_per_gpu"]), float(row["mfu_pct"])

    def guess(self) -> float:
        return seconds(self.job, self.layout)

    @property
    def turns(self) -> int:
        """Microbatches that its pipeline has time for in a step."""
        return self.job.microbatches(self.layout) + self.layout.pp - 1

    def held(self, overhead: float = OVERHEAD) -> float:
        """GiB of rank 0, which is the one that writes."""
        return float(sum(stage_memory(self.job, self.layout, 0, overhead).values())) / 2**30


def runs(folder: Path) -> list[Run]:
    """All that the planner can lay out: a pipeline of more stages than layers it cannot."""
    cluster, admitted = _cluster(folder), []
    for row in rows_of(folder / RUNS):
        run = Run(row, cluster)
        try:
            run.job.check(run.layout)
        except ValueError:
            continue
        admitted.append(run)
    return admitted


def _seconds(name: str, chosen: list[Run]) -> list[str]:
    pairs = [(run.guess(), run.seconds, run.job, run.layout.ranks) for run in chosen]
    return row_of(name, *errors_of(pairs))[:-1]


def _memory(name: str, chosen: list[Run], overhead: float) -> list[str]:
    off = 100 * np.array([run.held(overhead) / run.gib - 1 for run in chosen])
    parts = np.abs(off).mean(), np.median(np.abs(off)), np.percentile(np.abs(off), 90)
    return [name, str(len(off)), *(f"{part:.1f} %" for part in parts), f"{off.mean():+.1f} %", ""]


def picks(every: list[Run]) -> list[list[str]]:
    """For each model and number of nodes, the fastest by our own count of those that fit with a tenth to
    spare, and the share of the best one's throughput that it reached; 0 where it crashed.
    """
    shares: dict[str, list[float]] = {}
    for model, nodes in sorted({(run.job.model.name, run.nodes) for run in every}):
        rivals = [run for run in every if run.job.model.name == model and run.nodes == nodes]
        fit = [r for r in rivals if r.held() * 2**30 <= 0.9 * r.job.cluster.device.memory]
        pick = min(fit, key=Run.guess)
        best = min(run.seconds for run in rivals if not run.crashed)
        shares.setdefault(model, []).append(0.0 if pick.crashed else best / pick.seconds)
    together = sum(shares.values(), [])
    mean = ["mean, median", f"{np.mean(together):.2f}", f"{np.median(together):.2f}", "", ""]
    return [[model, *(f"{share:.2f}" for share in row)] for model, row in shares.items()] + [mean]


def tables(folder: Path) -> list[tuple]:
    """Two: seconds and memory; picks. Returns the usual runs: seconds here and printed, job, GPUs, how far
    memory is off.
    """
    every = runs(folder)
    done = [run for run in every if not run.crashed]
    usual = [run for run in done if run.mfu > USUAL]
    rest = [run for run in done if run.layout.pp == 1 or run.seconds - run.guess() <= 0.45 * run.turns]
    rows = [
        _seconds(f"MFU above {USUAL} %, up to 8 nodes", [run for run in usual if run.nodes <= 8]),
        _seconds(f"MFU above {USUAL} %", usual),
        _seconds("all", done),
        _seconds("all but pipelines that take 0.45 s a microbatch longer", rest),
        _memory(f"memory, MFU above {USUAL} %", usual, OVERHEAD),
        _memory("memory, without what is assumed for context and slack", usual, 0.0),
        _memory("memory, all", done, OVERHEAD),
    ]
    columns = ["Ultra-Scale Playbook, nanotron", *ERRORS]
    show("nanotron's runs", columns, rows)
    nodes = [str(n) for n in sorted({run.nodes for run in every})]
    show("The pick's share of the best throughput, by nodes", ["model", *nodes], picks(every))
    return [(run.guess(), run.seconds, run.job, run.layout.ranks, run.held() / run.gib - 1) for run in usual]
