"""Compares NVIDIA's recommended layouts, and its measured gain by context parallelism, with the planner's.

`make planner-tables PUBLISHED=FOLDER` runs this script. The folder, shapes and framework are those of
`published.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from published import BRIDGE, H100, SHAPES, _int, folder_of_tables, rows_of, seconds, show

from three_axes.plan import MODELS, Job, Layout, ModelShape, plan, validation
from three_axes.plan.job import Lora
from three_axes.plan.memory import largest_stage, room

LONG = "nemo_long_sequence_cp_visible.csv"
RECOMMENDED = {"gpt3": "GPT3", "nemotron3": "Nemotron", "nemotron4": "Nemotron"}


def _recommended(folder: Path) -> Iterator[tuple[ModelShape, dict[str, str], int]]:
    """(model, row, sequences of a step)."""
    for r in rows_of(folder / "nemo_recommended_configs_h100.csv"):
        family = RECOMMENDED.get(r["model"])
        model = SHAPES[f"{family}-{r['size'].upper()}"] if family else MODELS[f"llama-3-{r['size']}"]
        yield model, r, int(r["global_batch_seqs"])
    for r in rows_of(folder / "recommended_tuples_dgxc_h100.csv"):
        r["gpus"], rule = r["gpus"].split("-")[0], r["global_batch_rule"]
        batch = int(r["gpus"]) * int(rule[5:]) if rule.startswith("GPUs*") else _int(rule)
        yield MODELS[r["model"].replace("llama", "llama-")], r | {"task": "pre_train"}, batch


def recommended(folder: Path) -> list[list[str]]:
    """NVIDIA's recommended layouts beside the planner's own: rows of a table. LoRA has NeMo's rank, 32."""
    rows = []
    for model, r, batch in _recommended(folder):
        n, s = int(r["gpus"]), int(r["seq_len"])
        t, p, cp, v, b = (_int(r[k] or "1") for k in ("tp", "pp", "cp", "vp", "microbatch_seqs"))
        precision = "fp8" if r["dtype"].lower() == "fp8" else "bf16"
        job = Job(model, H100, batch, s, BRIDGE, precision, Lora(32) if r["task"] == "lora" else None)
        head = [f"{model.name}, {r['task']}, {precision}, {n} GPUs"]
        sizes = dict(dp=max(1, n // (t * p * cp)), tp=t, pp=p, cp=cp, microbatch=b, zero=1)
        layout = Layout(**sizes, **validation.chunked(v if p > 1 else 1))
        try:
            job.check(layout, n)
        except ValueError as e:
            rows.append([*head, f"cannot be: {e}", "", "", ""])
            continue
        held = sum(largest_stage(job, layout)[1].values()) / job.cluster.device.memory
        mine = validation.seconds(job, layout)
        if held > room(job) / job.cluster.device.memory:  # NVIDIA's layout is tight, so ours may be tight too
            job = replace(job, framework=job.framework.but(reserves=1.0))
        ours = plan(job, gpus=n)
        behind = mine / ours.best.seconds - 1
        place = 1 + sum(row.seconds < mine for row in ours.by_axes if row.axes != layout.axes)
        said = f"{100 * behind:+.1f} %" + ", a tie" * (behind <= ours.sure.apart)
        rows.append([*head, str(layout), f"{held:.0%}", said, str(place)])
    return rows


def context(folder: Path) -> list[list[str]]:
    """What cp gains at each length of a sequence, Llama 2 7B in FP8 on H100: rows of a table. With cp the
    layout is printed; without it, it is not: our own fastest.
    """
    rows, framework = [], BRIDGE.but(recomputes=("none", "full"))
    for r in rows_of(folder / LONG):
        if not r["model_precision_system"].startswith("LLAMA2-7B (FP8) - H100"):
            continue
        thousands, n, batch = int(r["seq_len_k"]), int(r["gpus"]), int(r["batch_seqs"])
        job = Job(MODELS["llama-2-7b"], H100, batch, 1024 * thousands, framework, "fp8")
        t, p, cp = (int(r[axis]) for axis in ("tp", "pp", "cp"))
        took, _ = seconds(job, Layout(dp=n // (t * p * cp), tp=t, pp=p, cp=cp, zero=1), n)
        alone = plan(job, gpus=n, cp=1).best
        gain = f"{alone.seconds / took:.2f}"
        rows.append([f"{thousands} K", str(cp), r["speedup"], gain, str(alone.layout)])
    return rows


def main() -> None:
    folder = folder_of_tables(__doc__)
    columns = ["job", "recommended", "of a GPU's memory", "slower than the planner's own", "place"]
    show("NVIDIA's recommended layouts", columns, recommended(folder))
    columns = ["sequence", "cp", "gain, printed", "ours", "without cp"]
    show("What context parallelism gains", columns, context(folder))


if __name__ == "__main__":
    main()
