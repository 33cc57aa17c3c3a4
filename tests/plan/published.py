"""Compares the planner with published runs whose tables this project may not copy.

`make planner-tables PUBLISHED=FOLDER` runs this script. It writes data/planner_errors.json, and prints the
tables of docs/accuracy.md and docs/planner.md.

FOLDER holds the published tables as CSV files, which were typed by hand; a set whose file is missing is left
out. Nothing is fitted to these runs. The docstring of each set says what its table does not print, and what
is assumed instead. Where recompute is not printed, it is the least with which the run fits.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import validation_axes as folded

from three_axes.files import find
from three_axes.paper.hardware import DEVICES
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, ModelShape, certainty, validation
from three_axes.plan.cost import constants
from three_axes.plan.frameworks import ATTENTION, Framework, Reached
from three_axes.plan.job import Lora
from three_axes.plan.memory import largest_stage, stage_memory
from three_axes.plan.models import gpt
from three_axes.plan.shape import Experts, Latent
from three_axes.plan.stages import layers_on_rank
from three_axes.plan.validation import chunked, errors_of, fastest

MEGATRON = FRAMEWORKS["megatron-lm"]
BRIDGE = FRAMEWORKS["megatron-bridge"]  # of NVIDIA's recipes, also for NeMo and MLPerf
OVERLAPPED = BRIDGE.but(hides=(*BRIDGE.hides, "dispatch"))
# Automodel's recipes use Transformer Engine's layers and attention under FSDP2, a loss of PyTorch's own
# operations, no sequence parallelism, and LoRA of rank 16 on all linear layers.
AUTOMODEL = FRAMEWORKS["torchtitan"].but(fused=True, attention="cudnn")
H100 = CLUSTERS["dgx-h100"]
TITAN = replace(H100, device=DEVICES["h100-96gb"])  # where torchtitan's runs were measured
# The node of SimuMax' runs, as its authors measured it (configs/system/b200_bf16_ceperm.json): products
# reach 0.488 of 2,250 TFLOP/s, attention 0.35; gathers and scatters 0.673 of 900 GB/s, with 8.6 µs for each
# hop and 24 for the call; all-to-alls 0.597. The planner multiplies a link's speed by the share that it
# reaches, so the measured speed is divided by it. SimuMax' scripts (simu_tools/megatron_scripts) hide neither
# gradients nor weights, and split sequences by all-to-alls (docs/b200).
_B200, _C = CLUSTERS["dgx-b200"], constants()
SIMUMAX = replace(
    _B200,
    device=replace(_B200.device, achievable=0.488 * 2250e12),
    intra_node_bandwidth=0.673 / _C.intra_node_efficiency * 900e9,
    intra_node_latency=8.6e-6 + 24e-6 / 7,
    all_to_all=(0.597 * 900e9, 43e9),
)
# cuDNN's own figures for DeepSeek-V3's heads in MXFP8 on a GB200 (fp8_dot_product_attention of its recipe).
ATTENTION["mxfp8"] = {"": Reached(1.13, 1060)}
ATTENTION["measured there"] = {"": Reached(0.35 / 0.488 / _C.gemm_efficiency, 0)}
SIMUMAX_FRAMEWORK = MEGATRON.but(attention="measured there", hides=("input gradients",), context="heads")

SYSTEMS = {"DGX-GB200": "gb200-nvl72", "DGX-GB300": "gb300-nvl72"}  # the others have their own names
PRECISIONS = {"FP8-MX": "mxfp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "BF16": "bf16"}  # others: FP8, current


def _qwen(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, 152064, kv_heads, ffn, gated=True, qkv_biases=True)


# Name of a model in the published tables -> its shape.
SHAPES: dict[str, ModelShape] = {
    "GPT3-5B": gpt("gpt3-5b", 24, 4096, 32),
    "GPT3-20B": gpt("gpt3-20b", 44, 6144, 48),
    "GPT3-175B": MODELS["gpt3-175b"],
    "Nemotron-8B": ModelShape("nemotron-8b", 32, 4096, 32, 256000),
    "Nemotron-22B": ModelShape("nemotron-22b", 40, 6144, 48, 256000),
    "Nemotron-15B": ModelShape("nemotron-15b", 32, 6144, 48, 256000, 8, 24576),
    "Nemotron-340B": ModelShape("nemotron-340b", 96, 18432, 96, 256000, 8, 73728),
    "Qwen2.5 7B": _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18944),
    "Qwen2.5 32B": _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27648),
    "Qwen3_30B_a3B": MODELS["qwen3-30b-a3b"],
    # Its layouts end in "tmL": a layer, the module for a further token, the loss.
    "DeepSeekV3": replace(MODELS["deepseek-v3"], mtp=1),
    **{f"LLAMA{n.upper()}": MODELS[f"llama-{n}"] for n in ("2-7b", "2-13b", "2-70b", "3-8b", "3-70b")},
    **{f"{name}{n}B": MODELS[f"llama-3-{n}b"] for name in ("LLAMA3_", "Llama3 ") for n in (8, 70)},
    "LLAMA3.1_405B": MODELS["llama-3-405b"],
}
V2_EXPERTS = Experts(160, 6, 1536, shared=3072, dense_layers=1)
V2_LATENT = dict(gated=True, latent=Latent(512, 1536))
DEEPSEEK_V2 = ModelShape("deepseek-v2", 60, 5120, 128, 102400, 0, 12288, experts=V2_EXPERTS, **V2_LATENT)
MLPERF_RUNS = "mlperf_training_visible.csv"
BRIDGE_RUNS = "megatron_bridge_performance_visible.csv"
GRAPHS = "26.06"  # from this release of Megatron Bridge on, steps with experts are CUDA graphs (not on H100)
MOST = 200  # pairs of a kind whose differences are kept


class Run(NamedTuple):
    """A published run. seconds: predicted. printed: published. memory: the relative error of the predicted
    bytes, None if no bytes are published.
    """

    seconds: float
    printed: float
    job: Job
    gpus: int
    memory: float | None = None


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, whose comment lines are skipped."""
    with open(path, encoding="utf-8") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def show(title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown, under its title."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    print(f"### {title}\n", line(columns), "|" + "---|" * len(columns), *map(line, rows), "", sep="\n")


def _first(text: str) -> str:
    """The number at the start of a cell: '8' for '8 (note)'."""
    return text.split(" ")[0]


def _int(text: str, otherwise: int = 1) -> int:
    return int(_first(text)) if _first(text).isdigit() else otherwise


def least(job: Job, layout: Layout, gpus: int) -> Layout:
    """The layout with the least recompute with which the run fits. With experts or latent attention, modules
    are recomputed before whole layers.
    """
    job.check(layout, gpus)
    layers, room = int(layers_on_rank(job.model, layout, min(1, layout.pp - 1))), job.cluster.device.memory
    modules = [replace(layout, recompute="modules")] * bool(job.model.experts or job.model.latent)
    some = (replace(layout, recompute="full", recomputed=k) for k in range(1, layers + 1))
    for tried in (layout, *modules, *some):
        if sum(largest_stage(job, tried)[1].values()) <= room:
            break
    return tried


def seconds(job: Job, layout: Layout, gpus: int) -> float:
    """Seconds of a step with the least recompute."""
    return validation.seconds(job, least(job, layout, gpus))


def _of_recipe(release: str, name: str, system: str, v: int) -> Framework:
    """Megatron Bridge as its recipes configure it for a model with experts, a system and a release
    (scripts/performance/configs, src/megatron/bridge/perf_recipes).

    Tokens are sent to a node once, except on Blackwell in the releases of 2025. From 26.06 on, except on
    H100, steps are CUDA graphs, experts' kernels are fused, DeepSeek-V3's attention is narrow, and
    all-to-alls run under another microbatch's layers. DeepSeek-V3's do so in all releases on H100 and B200,
    and never without chunks.
    """
    graphs, deepseek = "H100" not in system and release >= GRAPHS, name == "DeepSeekV3"
    apart = deepseek and v == 1 or not graphs and (not deepseek or system in SYSTEMS)
    hides = BRIDGE.hides if apart else OVERLAPPED.hides
    once = release >= "26" or "H100" in system
    seconds = 0.0 if graphs else BRIDGE.runs.launch_seconds
    kernel = "mxfp8" if graphs and deepseek else BRIDGE.runs.attention
    changed = dict(once_a_node=once, launch_seconds=seconds, fused_experts=graphs, attention=kernel)
    return BRIDGE.but(hides=hides, **changed)


def _bridge(folder: Path, experts: bool) -> Iterator[tuple[str, Job, Layout, float]]:
    """(release, job, layout, seconds printed) of Megatron Bridge's own runs."""
    for r in rows_of(folder / BRIDGE_RUNS):
        name, system = _first(r["model"]), r["system"]
        model, cluster, n = SHAPES[name], CLUSTERS[SYSTEMS.get(system, system.lower())], int(r["gpus"])
        if r["task"] == "LoRA" or bool(model.experts) != experts:
            continue
        if "w/o MTP" in r["model"]:
            model = MODELS["deepseek-v3"]
        t, p, cp, b, s, batch = (
            _int(r[k]) for k in ("tp", "pp", "cp", "microbatch_seqs", "seq_len", "global_batch_seqs")
        )
        v = _int(r["vp"]) if p > 1 else 1
        precision = PRECISIONS.get(r["precision"], "fp8-current")
        if model.experts and r["precision"] in ("", "FP8", "FP8-CS"):
            hopper = "fp8-blockwise" if name == "DeepSeekV3" else "fp8-current"
            precision = hopper if "H100" in system else "mxfp8"
        zero = 1 if _first(r["fsdp"] or "0") in ("0", "") else 3
        sizes = dict(dp=n // (t * p * cp), tp=t, pp=p, cp=cp, ep=_int(r["ep"]) if model.experts else 1)
        layout = Layout(**sizes, microbatch=b, zero=zero, **chunked(v))
        framework = _of_recipe(r["release"], name, system, v) if experts else BRIDGE
        if precision == "nvfp4":  # its recipes do not cut TP's products in pieces
            framework = framework.but(hides=MEGATRON.hides)
        job = Job(model, cluster, batch, s, framework, precision)
        yield r["release"], job, layout, batch * s / n / float(_first(r["tokens_per_s_per_gpu"]))


def bridge(folder: Path, experts: bool) -> Iterator[Run]:
    """Megatron Bridge's own runs. Not printed: recompute, and how tokens are sent; see `_of_recipe`. Under
    FSDP on Blackwell the 70B keeps activations of 5 to 40 layers on the host (cpu_offloading_num_layers), and
    recomputes nothing.
    """
    for _, job, layout, printed in _bridge(folder, experts):
        on_host = layout.zero == 3 and job.model.name == "llama-3-70b" and job.cluster is not H100
        guess = validation.seconds(job, layout) if on_host else seconds(job, layout, layout.ranks)
        yield Run(guess, printed, job, layout.ranks)


def nemo(folder: Path) -> Iterator[Run]:
    """NeMo 24.07 on H100 in FP8, pre-training and fine-tuning. Where chunks are not printed, the fastest."""
    for r in rows_of(folder / "nemo_2407_h100_fp8.csv"):
        if r["task"] == "LoRA":
            continue
        model, n = SHAPES[r["model"]], int(r["gpus"])
        t, p, cp, b = (_int(r[k]) for k in ("tp", "pp", "cp", "microbatch_seqs"))
        s, batch, d = int(r["seq_len"]), int(r["global_batch_seqs"]), n // (t * p * cp)
        possible = [1]
        if p > 1:
            whole = [v for v in range(1, 21) if model.layers % (p * v) == 0 and batch // d // b % p == 0]
            possible = [_int(r["vp"])] if r["vp"] else sorted({1, *whole})
        job, found = Job(model, H100, batch, s, BRIDGE, "fp8"), []
        for v in possible:
            layout = Layout(dp=d, tp=t, pp=p, cp=cp, microbatch=b, zero=1, **chunked(v))
            try:
                found.append(seconds(job, layout, n))
            except ValueError:  # these chunks cannot be
                continue
        if found:
            yield Run(min(found), batch * s / n / float(r["tokens_per_s_per_gpu"]), job, n)


MLPERF_DEVICES = {"H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "GB200": "gb200-nvl72"}
MLPERF_MODELS = {"gpt3": "gpt3-175b", "llama31_405b": "llama-3-405b", "llama31_8b": "llama-3-8b"}


def mlperf(folder: Path, benchmark: str) -> Iterator[Run]:
    """Audited logs of MLPerf Training, of runs with one possible layout and one precision. Where chunks are
    not printed (gpt3, v3.1), they are the six of v4.1. "cg": steps are CUDA graphs.
    """
    for r in rows_of(folder / MLPERF_RUNS):
        precision, _, graphs = r["precision_in_config_names"].partition("+")
        device = next((name for name in ("GB200", "B200", "H200", "H100") if name in r["accelerator"]), "")
        if r["benchmark"] != benchmark or r["layouts_possible"] != "1" or "/" in graphs or not device:
            continue
        model, cluster, n = MODELS[MLPERF_MODELS[benchmark]], CLUSTERS[MLPERF_DEVICES[device]], int(r["gpus"])
        sizes = {axis: int(r[axis]) for axis in ("tp", "pp", "cp", "dp")}
        v = _int(r["vp"], 6) if sizes["pp"] > 1 else 1
        layout = Layout(**sizes, microbatch=int(r["mbs"]), zero=1, **chunked(v))
        framework = BRIDGE.but(launch_seconds=0.0) if graphs else BRIDGE
        batch, s = int(r["gbs"]), int(r["seq"])
        job = Job(model, cluster, batch, s, framework, {"fp4": "nvfp4"}.get(precision, precision))
        yield Run(seconds(job, layout, n), float(r["step_s"]), job, n)


def weak_scaling(folder: Path) -> Iterator[Run]:
    """Megatron-Core's GPTs on H100, with its distributed optimizer. Microbatch and chunks: the fastest."""
    for r in rows_of(folder / "megatron_core_h100_weak_scaling.csv"):
        layers, h, heads, vocab, s, batch, n = (
            int(r[k]) for k in ("layers", "hidden", "heads", "vocab", "seq_len", "global_batch_seqs", "gpus")
        )
        model = gpt("gpt", layers, h, heads, vocab, s)
        job = Job(model, H100, batch, s, MEGATRON)
        guess = fastest(job, *(int(r[axis]) for axis in ("dp", "tp", "pp")), zero=1)
        needed = batch * s * model.flops_per_token(s)
        yield Run(guess, needed / (float(r["tflops_per_gpu"]) * 1e12 * n), job, n)


def torchtitan(folder: Path) -> Iterator[Run]:
    """Runs in bfloat16. Compiled layers are fused; async TP hides the sums of input gradients."""
    for r in rows_of(folder / "torchtitan_benchmarks.csv"):
        if r["precision"] != "bf16":
            continue
        plain = validation.TORCHTITAN_2024
        compiled = "compile" in r["technique"] or r["table"] == "async2025"
        hides = (*plain.hides, *["input gradients"] * r["technique"].startswith("async"))
        framework = plain.but(fused=compiled, hides=hides)
        d, t, n, b = (int(r[k]) for k in ("dp_fsdp", "tp", "gpus", "local_batch_seqs"))
        recompute = "full" if r["act_ckpt"] == "full" else "per-op"
        layout = framework.layout(dp=d, tp=t, microbatch=b, zero=3, recompute=recompute)
        model = MODELS["llama-3-8b" if "8B" in r["model"] else "llama-3-70b"]
        job = Job(model, TITAN, d * b, int(r["seq_len"]), framework)
        printed = d * b * job.seq_len / n / float(r["tok_per_s_per_gpu"])
        held = float(sum(stage_memory(job, layout, 0).values())) / 2**30
        off = held / float(r["mem_gib"]) - 1 if r["mem_gib"] else None
        yield Run(validation.seconds(job, layout), printed, job, n, memory=off)


def lora(folder: Path) -> Iterator[Run]:
    """Automodel's LoRA runs: FSDP2 with tensor parallelism. Recompute is not printed: the least that fits."""
    for r in rows_of(folder / "automodel_h100_bf16_visible.csv"):
        if not r["task"].startswith("Fine-Tuning (LoRA)"):
            continue
        n, t = int(r["gpus"]), int(r["tp"])
        model, batch = SHAPES[r["model"].removesuffix(" 2-node")], int(r["global_batch_seqs"])
        job = Job(model, H100, batch, int(r["seq_len"]), AUTOMODEL, lora=Lora(16))
        sizes = dict(dp=n // t, tp=t, microbatch=int(r["microbatch_seqs"]), zero=3 if n > 1 else 0)
        layout = Layout(**sizes, sequence_parallel=False)
        if least(job, layout, n) != layout:  # its switch recomputes all layers
            layout = replace(layout, recompute="full")
        yield Run(validation.seconds(job, layout), float(r["step_s"]), job, n)


def simumax(folder: Path) -> Iterator[Run]:
    """SimuMax' runs on one node of B200s: Megatron, ZeRO-1, nothing recomputed, one sequence of 4,096 where
    no length is printed. Memory is what was allocated, without context.
    """
    for r in rows_of(folder / "simumax_b200_single_node_visible.csv"):
        base = MODELS["llama-3-70b"] if r["model"] == "llama3_70b" else DEEPSEEK_V2
        model, s = replace(base, layers=int(r["layers"])), _int(r["seq_len"], 4096)
        sizes = {axis: int(r[axis]) for axis in ("tp", "pp", "dp", "ep", "cp")}
        layout = Layout(**sizes, zero=1)
        job = Job(model, SIMUMAX, layout.dp * int(r["microbatches"]), s, SIMUMAX_FRAMEWORK)
        job.check(layout, 8)
        held = sum(largest_stage(job, layout, 0)[1].values())
        off = held / 2**30 / float(r["real_alloc_gib"]) - 1
        yield Run(validation.seconds(job, layout), float(r["real_ms"]) / 1e3, job, 8, memory=off)


SETS = {
    "Megatron-Core, weak scaling": ("megatron_core_h100_weak_scaling.csv", weak_scaling),
    "torchtitan, H100": ("torchtitan_benchmarks.csv", torchtitan),
    "Megatron Bridge, dense": (BRIDGE_RUNS, lambda folder: bridge(folder, False)),
    "Megatron Bridge, experts": (BRIDGE_RUNS, lambda folder: bridge(folder, True)),
    "NeMo 24.07, FP8": ("nemo_2407_h100_fp8.csv", nemo),
    "MLPerf, GPT-3 175B": (MLPERF_RUNS, lambda folder: mlperf(folder, "gpt3")),
    "MLPerf, Llama 3.1 405B": (MLPERF_RUNS, lambda folder: mlperf(folder, "llama31_405b")),
    "MLPerf, Llama 3.1 8B": (MLPERF_RUNS, lambda folder: mlperf(folder, "llama31_8b")),
    "Automodel, LoRA": ("automodel_h100_bf16_visible.csv", lora),
    "SimuMax, B200": ("simumax_b200_single_node_visible.csv", simumax),
}


def alike(runs: list[Run]) -> Iterator[tuple[Run, Run]]:
    """Pairs of runs of one job on the same number of GPUs with different layouts."""
    same: dict[tuple, list[Run]] = {}
    for run in runs:
        job = run.job
        sizes = job.global_batch, job.seq_len, run.gpus
        work = job.model, job.cluster.name, job.precision, job.lora, *sizes
        same.setdefault(work, []).append(run)
    for a, b in (pair for one in same.values() for pair in itertools.combinations(one, 2)):
        # The same prediction is the same layout, measured twice.
        if abs(a.seconds / b.seconds - 1) > 0.005:
            yield a, b


def kinds(name: str, runs: list[Run]) -> Iterator[dict]:
    """For each kind of run in a set, the errors that data/planner_errors.json keeps."""
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        kind = run.job.cluster.device.generation, bool(run.job.model.experts)
        found.setdefault(kind, []).append(run)
    constant = float(np.abs(errors_of(runs)[1]).mean())
    off = lambda printed, guess: round(math.log(printed / guess), 3)
    for (generation, experts), mine in found.items():
        pairs = list(alike(mine))
        yield dict(
            set=name,
            generation=generation,
            experts=experts,
            constant=round(constant, 4),
            peer=validation.BEST_TOOL.get(name, ""),
            seconds=[off(run.printed, run.seconds) for run in mine],
            memory=[off(1, 1 + run.memory) for run in mine if run.memory is not None],
            differences=[
                off(a.printed / b.printed, a.seconds / b.seconds) for a, b in pairs[:: 1 + len(pairs) // MOST]
            ],
        )


def stored() -> list[dict]:
    """The records of `kinds` in data/planner_errors.json: the errors of each set, by kind of run. An error is
    the natural logarithm of measured over predicted.
    """
    return json.loads(find("data/planner_errors.json").read_text(encoding="utf-8"))


def source(name: str) -> str:
    """The source of a set: 'Narayanan 2021, T1 (fitted)' -> 'Narayanan 2021'. NVIDIA's are one source."""
    first = name.partition(",")[0]
    return "NVIDIA" if first in ("Megatron Bridge", "NeMo 24.07", "Automodel", "Megatron-Core") else first


def inside(record: dict) -> int:
    """How many runs of a record lie in the interval of their kind."""
    low, high, _ = certainty.INTERVALS[record["generation"], record["experts"]]
    return sum(low <= math.exp(error) <= high for error in record["seconds"])


def covered() -> list[list[str]]:
    """A row for each kind: its interval, its runs at hand, the share of them inside, and how many sources
    have eight of ten runs inside.
    """
    rows = []
    for (generation, experts), (low, high, runs) in certainty.INTERVALS.items():
        mine = [one for one in stored() if (one["generation"], one["experts"]) == (generation, experts)]
        held, many = Counter(), Counter()
        for one in mine:
            held[source(one["set"])] += inside(one)
            many[source(one["set"])] += len(one["seconds"])
        good = sum(held[name] >= 0.8 * many[name] for name in many)
        kind = f"{'experts' if experts else 'dense'}, {generation}"
        share = f"{sum(held.values()) / sum(many.values()):.0%}"
        rows.append([kind, f"{low:.2f} to {high:.2f}", str(runs), share, f"{good} of {len(many)}"])
    return rows


COLUMNS = (
    "published set",
    "runs",
    "error",
    "median",
    "bias",
    "a constant",
    "best other tool",
    "inside",
    "memory",
)


def of_sets() -> list[list[str]]:
    """A row for each set: the error of our seconds, of the best constant share of peak, and of the best other
    tool; the share of runs in the intervals of their kinds; the error of our bytes.
    """
    rows = []
    for name in dict.fromkeys(one["set"] for one in stored()):
        sets = [one for one in stored() if one["set"] == name]
        off, held = (
            np.expm1([-error for one in sets for error in one[what]]) for what in ("seconds", "memory")
        )
        size = lambda errors: f"{100 * np.abs(errors).mean():.1f} %" if len(errors) else ""
        middle, bias = f"{100 * np.median(np.abs(off)):.1f} %", f"{100 * off.mean():+.1f} %"
        of_constant, share = f"{100 * sets[0]['constant']:.1f} %", f"{sum(map(inside, sets)) / len(off):.0%}"
        errors = size(off), middle, bias, of_constant, sets[0]["peer"]
        rows.append([name, str(len(off)), *errors, share, size(held)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, required=True, help="the folder with the tables")
    folder = parser.parse_args().published
    done = {name: list(make(folder)) for name, (file, make) in SETS.items() if (folder / file).is_file()}
    papers = {name: make() for name, make in (validation.SETS | folded.SETS).items()}
    every = {name: [Run(*run) for run in runs] for name, runs in (papers | done).items()}
    kept = [one for name, runs in every.items() for one in kinds(name, runs)]
    text = json.dumps(kept, separators=(",", ":")).replace("{", "\n{")
    find("data/planner_errors.json").write_text(text + "\n")
    show("The planner against published runs, seconds per step", COLUMNS, of_sets())
    columns = ["kind", "interval", "runs", "inside", "sources with 8 of 10 inside"]
    show("Runs inside the interval of their kind", columns, covered())


if __name__ == "__main__":
    main()
