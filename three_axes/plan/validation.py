"""Compares the planner's seconds per step with published runs, and prints the errors of each set (`table`).

The errors are the mean absolute one, its median and 90th percentile, and the mean signed one (bias). Beside
them is the error of a null model: one share of the printed FLOP/s for all runs, the best for that set. Four
sets have the error of the best other tool too. Five of `cost`'s constants were fitted to the first
two sets, with an earlier form of the model; `exposed` was set when the ZeRO-3 runs were known. The runs and
their sources are in data/.

If a paper does not print the microbatch or the interleaving, the fastest prediction is taken, as its authors
would have chosen. Megatron-DeepSpeed runs (BLOOM, MT-NLG) are slower than Megatron-LM's of the same shape. So
MT-NLG's predictions are multiplied by measured over predicted seconds of BLOOM's run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..files import rows_of
from ..paper.hardware import CLUSTERS
from ..paper.schedules import one_f_one_b, zb_h1, zb_h2
from ..paper.simulation import Times, simulate
from ..table import Table
from . import models
from .cost import step_terms
from .frameworks import FRAMEWORKS
from .job import Job
from .layout import Layout
from .models import MODELS

A100, H100, ROCE = CLUSTERS["dgx-a100"], CLUSTERS["dgx-h100"], CLUSTERS["a100-roce"]
# Frameworks as they were when these runs were made, by year.
MEGATRON = FRAMEWORKS["megatron-lm"]
MEGATRON_2022 = MEGATRON.but(fused_attention=False, hides=("input gradients",))
MEGATRON_2021 = MEGATRON_2022.but(hides=(), fused_sums=False)
# Llama 3's paper does not say that anything else, such as TP's collectives, runs under computation.
META = MEGATRON.but(hides=("gradients", "updated weights"), context="gather")
# Until August 2025 torchtitan's recompute stopped before a layer's last product (its pull request 1580).
TORCHTITAN_2024 = FRAMEWORKS["torchtitan"].but(whole_recompute=False)
DEEPSPEED_2021 = FRAMEWORKS["deepspeed"].but(fused_attention=False, fused_sums=False)
# Fields that the layouts of Narayanan 2021, BLOOM and MT-NLG share.
PLAIN: dict[str, Any] = dict(recompute="full", sequence_parallel=False)
# Set of runs -> mean error in % of the best other tool, and its name. In-sample: it was fitted to these runs.
BEST_TOOL = {
    "Korthikanti 2022, T5 (fitted)": "3.65 Calculon, in-sample",
    "Narayanan 2021, T1 (fitted)": "10.4 Calculon",
    "Narayanan 2021, T2 PTD-P": "10.7 Calculon",
    "MT-NLG 530B": "29.7 Calculon",
}


def gpt(layers, hidden, heads, vocab=51200, positions=2048):
    """A GPT with the sizes that a table prints; a size may be a number or its text."""
    return models.gpt("gpt", int(layers), int(hidden), int(heads), int(vocab), positions)


def chunked(v: int) -> dict:
    """The fields of a layout with `v` chunks on each pipeline rank: their number, and the schedule."""
    return dict(interleave=v, schedule="interleaved" if v > 1 else "1F1B")


def seconds(job: Job, layout: Layout) -> float:
    """Predicted seconds of a step. The layout is not checked."""
    return float(sum(step_terms(job, layout).values()))


def fastest(job: Job, d: int, t: int, p: int, microbatches=(1, 2, 4, 8), **choices) -> float:
    """Predicted seconds of a step on d · t · p GPUs with the fastest of these microbatches and of all
    interleavings. choices: other fields of the layout.
    """
    guesses, layers = [], job.model.layers
    for b in microbatches:
        if job.global_batch % (d * b):
            continue
        depth = (layers + (0 if layers % p == 0 else 2)) // p
        for v in range(1, depth + 1):
            if depth % v == 0 and (v == 1 or (p > 1 and job.global_batch // (d * b) % p == 0)):
                sizes: dict[str, Any] = dict(dp=d, tp=t, pp=p, microbatch=b)
                guesses.append(seconds(job, Layout(**sizes, **chunked(v), **choices)))
    return min(guesses)


def _hardware_flops(batch, s, layers, h, vocab):
    """FLOPs of a step with the recomputed forward (Narayanan et al. 2021, equation 3)."""
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))


# Each private function below yields the runs of a set: (predicted seconds, printed seconds, job, GPUs).


def _korthikanti():
    for r in rows_of("korthikanti_2022_table5.csv"):
        model, v = gpt(r["layers"], r["hidden"], r["heads"], r["vocab"]), int(r["interleave_v"])
        job = Job(model, A100, int(r["global_batch_seqs"]), 2048, MEGATRON_2022)
        sizes: dict[str, Any] = dict(tp=int(r["tp"]), pp=int(r["pp"]), microbatch=int(r["microbatch_seqs"]))
        for column, recompute, sp in (
            ("iter_s_full_recompute", "full", False),
            ("iter_s_sp_selective", "selective", True),
        ):
            layout = Layout(**sizes, **chunked(v), recompute=recompute, sequence_parallel=sp)
            yield seconds(job, layout), float(r[column]), job, int(r["gpus"])


def _narayanan_1():
    for r in rows_of("narayanan_2021_table1.csv"):
        n, batch = int(r["gpus"]), int(r["global_batch_seqs"])
        model = gpt(r["layers"], r["hidden"], r["heads"], r["vocab"])
        job = Job(model, A100, batch, 2048, MEGATRON_2021)
        flops = _hardware_flops(batch, 2048, model.layers, model.hidden, model.vocab)
        real = flops / (float(r["hw_tflops_per_gpu"]) * 1e12 * n)
        yield fastest(job, int(r["dp_derived"]), int(r["tp"]), int(r["pp"]), **PLAIN), real, job, n


def _narayanan_2(scheme):
    for r in rows_of("narayanan_2021_table2.csv"):
        if r["scheme"] != scheme:
            continue
        model = gpt(96, 12288, 96) if r["params_b"] == "174.6" else gpt(105, 20480, 128)
        n, batch, b, parts = (
            int(r[k]) for k in ("gpus", "global_batch_seqs", "microbatch_seqs", "model_parallel_size")
        )
        flops = _hardware_flops(batch, 2048, model.layers, model.hidden, 51200)
        real = flops / (float(r["hw_tflops_per_gpu"]) * 1e12 * n)
        if scheme == "PTD-P":
            job = Job(model, A100, batch, 2048, MEGATRON_2021)
            guess = fastest(job, n // parts, 8, parts // 8, (b,), **PLAIN)
        else:
            # DeepSpeed's group uses one port of each node.
            job = Job(model, replace(A100, rails=1), batch, 2048, DEEPSPEED_2021)
            guess = seconds(job, Layout(dp=n, microbatch=b, zero=3, **PLAIN))
        yield guess, real, job, n


def _megatron_deepspeed(name):
    """Assumed for these runs: half-precision gradients, ZeRO-1, no interleaving, and no communication that
    runs under computation.
    """
    framework = MEGATRON_2021.but(gradient_bytes=2)
    for r in rows_of("large_runs.csv"):
        if r["model"].startswith(name) and r["iter_s"] and not r["note"].startswith("tuning"):
            model = gpt(r["layers"], r["hidden"], r["heads"], 250880 if name == "BLOOM" else 51200)
            job = Job(model, A100, int(r["global_batch_seqs"]), 2048, framework)
            sizes: dict[str, Any] = {axis: int(r[axis]) for axis in ("dp", "tp", "pp")}
            layout = Layout(**sizes, microbatch=int(r["microbatch_seqs"]), zero=1, **PLAIN)
            yield seconds(job, layout), float(r["iter_s"]), job, int(r["gpus"])


def _mt_nlg():
    ((guess, real, *_),) = _megatron_deepspeed("BLOOM")
    for predicted, *rest in _megatron_deepspeed("MT-NLG"):
        yield predicted * real / guess, *rest


def _zero_bubble(*schedules):
    """ZB-1p is the schedule that the authors' program finds within 1F1B's memory. It is predicted as ZB-H1,
    because the paper prints the same bubble rates for both. Their script (examples/pretrain_zero_bubble.sh)
    does not tie the head to the embedding.
    """
    for r in rows_of("zero_bubble_2023.csv"):
        if r["schedule"] in schedules:
            p, b, m = (int(r[k]) for k in ("pp_gpus", "microbatch_seqs", "num_microbatches"))
            model = replace(gpt(r["layers"], r["hidden"], r["heads"], positions=1024), tied=False)
            job = Job(model, ROCE, m * b, 1024, MEGATRON_2022)
            v = (model.layers + 2) // p if r["schedule"] == "1F1B-I" else 1
            name = {"1F1B-I": "interleaved", "ZB-1p": "ZB-H1"}.get(r["schedule"], r["schedule"])
            layout = Layout(pp=p, microbatch=b, interleave=v, schedule=name, sequence_parallel=False)
            real = m * b / (p * float(r["measured_samples_per_gpu_per_s"]))
            yield seconds(job, layout), real, job, p


def bubble_rates():
    """Yield (row of Zero Bubble's Table 5, bubble rate simulated from the times of its Table 9). The cost
    model is not used.
    """
    make = {"1F1B": one_f_one_b, "ZB-H1": zb_h1, "ZB-H2": zb_h2}
    for r in rows_of("zero_bubble_2023.csv"):
        if r["schedule"] in make:
            f, b, w, send = (float(r[k]) for k in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms"))
            m = int(r["num_microbatches"])
            cost = simulate(make[r["schedule"]](int(r["pp_gpus"]), m), Times(f, b, w, send)).longest_rank
            yield r, (cost - m * (f + b + w)) / cost


def _llama_405b():
    """Not printed: chunks; the fastest are taken. As in the paper dp is the outermost axis, and ranks that
    share a sequence gather its keys and values.
    """
    model = MODELS["llama-3-405b"]
    for r in rows_of("llama_3_405b_table4.csv"):
        axes: dict[str, Any] = {axis: int(r[axis]) for axis in ("dp", "tp", "pp", "cp")}
        n, s, batch = int(r["gpus"]), int(r["seq_len"]), int(r["batch_seqs_per_dp"]) * axes["dp"]
        real = batch * s * model.flops_per_token(s, causal=True) / (float(r["tflops_per_gpu"]) * 1e12 * n)
        job = Job(model, H100, batch, s, META)
        layouts = (Layout(**axes, **chunked(v), zero=1, order=("dp", "pp", "tp")) for v in (1, 2, 4, 8))
        yield min(seconds(job, layout) for layout in layouts), real, job, n


def _torchtitan():
    """These runs use FSDP2, which gathers half-precision weights and reduces float32 gradients, and no
    compiler.
    """
    for r in rows_of("torchtitan_2024_a100.csv"):
        n, b = int(r["gpus"]), int(r["microbatch_seqs"])
        job = Job(MODELS[r["model"]], A100, n * b, int(r["seq_len"]), TORCHTITAN_2024)
        layout = Layout(dp=n, microbatch=b, zero=3, recompute=r["recompute"])
        yield seconds(job, layout), b * job.seq_len / float(r["tokens_per_gpu_per_s"]), job, n


SETS = {
    "Korthikanti 2022, T5 (fitted)": _korthikanti,
    "Narayanan 2021, T1 (fitted)": _narayanan_1,
    "Narayanan 2021, T2 PTD-P": lambda: _narayanan_2("PTD-P"),
    "Narayanan 2021, T2 ZeRO-3": lambda: _narayanan_2("ZeRO-3"),
    "MT-NLG 530B": _mt_nlg,
    "Zero Bubble, 1F1B and interleaved": lambda: _zero_bubble("1F1B", "1F1B-I"),
    "Zero Bubble, ZB-1p": lambda: _zero_bubble("ZB-1p"),
    "Llama 3 405B, T4": _llama_405b,
    "torchtitan, FSDP on 64 A100": _torchtitan,
}


def errors_of(runs) -> tuple[np.ndarray, np.ndarray]:
    """The relative errors of the planner and of the null model on these runs."""
    runs = list(runs)
    ours = np.array([guess / real - 1 for guess, real, *_ in runs])
    needed = lambda job: job.global_batch * job.seq_len * job.flops_per_token()
    reached = np.array([needed(job) / (real * n * job.cluster.device.flops) for _, real, job, n, *_ in runs])
    null = min((reached / share - 1 for share in reached), key=lambda e: np.abs(e).mean())
    return ours, null


def table() -> Table:
    """A row for each set: the errors of the planner, of the null model and of the best known tool."""
    columns = "published table", "runs", "error (MAPE)", "median", "p90", "bias", "null model"
    rows = []
    for name, make in SETS.items():
        ours, null = (100 * one for one in errors_of(make()))
        a = np.abs(ours)
        absolute = [f"{x:.1f} %" for x in (a.mean(), np.median(a), np.percentile(a, 90))]
        bias, of_null = f"{ours.mean():+.1f} %", f"{np.abs(null).mean():.1f} %"
        rows.append([name, str(len(a)), *absolute, bias, of_null, BEST_TOOL.get(name, "")])
    return Table([*columns, "best known tool"], rows)
