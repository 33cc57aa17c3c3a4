"""Predictions of published runs with experts, context parallelism and narrow numbers, in the form of
`three_axes.plan.validation`. Nothing was fitted to these runs.

The docstring of each set says what its table does not print, and what is assumed instead.
"""

from __future__ import annotations

from dataclasses import replace

from three_axes.files import rows_of
from three_axes.paper.hardware import CLUSTERS
from three_axes.plan.job import Job
from three_axes.plan.layout import Layout
from three_axes.plan.memory import largest_stage, stage_memory
from three_axes.plan.models import MODELS, llama
from three_axes.plan.shape import Experts
from three_axes.plan.validation import MEGATRON, chunked, seconds

H100 = CLUSTERS["dgx-h100"]
_QWEN2 = Experts(64, 8, 2560, shared=20480, shared_gate=True)
FOLDED = {
    "Mixtral-8x22B": MODELS["mixtral-8x22b"],
    "Qwen2-57B-A14B": llama("57b", 28, 3584, 28, 18944, 151936, 4, qkv_biases=True, experts=_QWEN2),
    "Mixtral-8x22B-G8T8": llama("g8t8", 56, 6144, 48, 16384, 32000, 8, experts=Experts(64, 8, 2048)),
    "Llama3-8x70B": llama("8x70b", 80, 8192, 64, 28672, 128256, 8, experts=Experts(8, 2, 28672)),
}


def folding() -> list[tuple[dict, Job, Layout | None, float]]:
    """(row, job, layout, seconds of a step) of MoE Parallel Folding's Table 3.

    The table does not print microbatches; all have one sequence. It does not print chunks and recompute; the
    fastest choice that fits with a tenth of the memory free is taken, or None if no choice fits. Without
    folding an expert is split over as many ranks as tp.
    """
    chosen = []
    for r in rows_of("moe_folding_2025_table3.csv"):
        n, cp, t, ep, p = (int(r[k] or 1) for k in ("gpus", "cp", "tp", "ep", "pp"))
        etp = 1 if r["method"].endswith("Folding") else t
        job = Job(FOLDED[r["model"]], H100, 256, 4096, MEGATRON)
        zero = 3 if "FSDP" in r["method"] else 1
        sizes = dict(dp=n // (cp * t * p), cp=cp, tp=t, pp=p, ep=ep, etp=etp, zero=zero)
        chosen.append((r, job, *least(job, sizes)))
    return chosen


def least(job: Job, sizes: dict) -> tuple[Layout | None, float]:
    """(layout, seconds) of the fastest chunks and recompute that fit with a tenth of the memory free."""
    best: tuple[Layout | None, float] = None, float("inf")
    for v in range(1, 17):
        for recompute in ("none", "full"):
            layout = Layout(**sizes, **chunked(v), recompute=recompute)
            try:
                job.check(layout)
            except ValueError:
                continue
            if sum(largest_stage(job, layout)[1].values()) <= 0.9 * job.cluster.device.memory:
                best = min(best, (layout, seconds(job, layout)), key=lambda pair: round(pair[1], 9))
    return best


def _folding():
    for r, job, layout, guess in folding():
        if r["mfu_pct"] != "OOM":
            share, n = float(r["mfu_pct"]) / 100, int(r["gpus"])
            needed = job.global_batch * job.seq_len * job.model.flops_per_token(job.seq_len)
            yield guess, needed / (n * 989.5e12 * share), job, n


def folding_in_fp8() -> dict[str, tuple[float, float]]:
    """Method -> (predicted, printed) ratio of bfloat16's seconds to FP8's (MoE Parallel Folding, Table 2)."""
    gains = {}
    for r, job, layout, seconds_ in folding():
        if layout and r["model"] == "Mixtral-8x22B" and r["method"] in FP8_GAIN:
            narrow = seconds(replace(job, precision="fp8"), layout)
            gains[r["method"]] = seconds_ / narrow, FP8_GAIN[r["method"]]
    return gains


# Model TFLOP/s per GPU, delayed scaling.
FP8_GAIN = {"MCore": 575.1 / 458.3, "MCore w/ Folding": 631.7 / 487.7}
SETS = {"MoE Parallel Folding 2025, T3": _folding}


def memory_of_deepseek_v3() -> dict[str, tuple[float, float]]:
    """Component -> (GiB here, GB printed) of NVIDIA 2026, Tables 3 and 4: the figures are those of a stage
    of 16 expert layers whose activations are for 15 chunks of 4 layers, the third of the four.
    """
    job = Job(MODELS["deepseek-v3"], H100, 8192, 4096, MEGATRON.but(weighs_early=False))
    layout = Layout(dp=64, pp=4, ep=64, interleave=4, schedule="interleaved", zero=1)
    held, early = (stage_memory(j, layout, 2, 0) for j in (job, replace(job, framework=MEGATRON)))
    ours = {
        "Weights & gradients": held["weights"] + held["gradients"],
        "Main weights & optimizer states": held["optimizer"],
        "Activations": held["activations"],
        "Total": sum(held.values()),
        "Memory-efficient permutation": held["activations"] - early["activations"],
    }
    printed = {r["item"]: float(r["gb_per_gpu"]) for r in rows_of("megatron_core_moe_2026_memory.csv")}
    return {item: (float(size) / 2**30, printed[item]) for item, size in ours.items()}
