"""The estimate for one layout: seconds of a step and bytes on a GPU, by part, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..paper.axes import ALWAYS, NAMED
from ..paper.hardware import WITHOUT_BF16
from ..table import Table, human
from .certainty import Sure, sure
from .cost import FORMULAS, constants, step_terms
from .data_parallel import whole_until_last
from .job import Job
from .layout import Layout
from .memory import fullest, room, stages_memory
from .shape import ModelShape

WIDE = 28  # characters of a whole step's bar in a table
NODES = 8  # on more nodes the printed network speed is an assumption, unless `busbw` was measured
WORTH_SAYING = 0.05  # if a larger share of the step waits for the host, there is a warning
# Part of memory -> its formula for `--explain`, with the letters of memory.py.
HELD = {
    "weights": "2 bytes a parameter of the stage, 4 if weights are float32, /t; with ZeRO-3 also /d",
    "gradients": "2 or 4 bytes a parameter, twice that if buckets hold copies, /t; from ZeRO-2 on also /d,"
    " unless they stay whole until the last microbatch",
    "optimizer": "12 bytes a parameter, 8 beside a float32 parameter, /t; from ZeRO-1 on also /d",
    "activations": "layers of the stage · what a layer keeps · microbatches in flight",
    "logits": "4·s·b·(h + V)/t; without a fused loss 10 more for each logit, 14 if tp splits the vocabulary",
    "gathered weights": "2 bytes a parameter of two layers, /t; in a pipeline of all, and their gradients",
    "buckets": "2 bytes a number of nine flat buckets, of gradients and of weights; with ZeRO-3 of two",
    "live weights": "2 bytes a parameter that ZeRO-3 keeps gathered",
    "float32 gradients": "6 bytes a parameter, 4 with ZeRO-3, /t /d, in the optimizer's step",
    "narrow weights": "two copies of each matrix of a layer, a byte a number (FP4: half) and its scales, /t",
    "widened weights": "QLoRA: 2 bytes a number of the widest frozen matrix, /t",
    "overhead": "context and communicators: assumed",
}


@dataclass(frozen=True, repr=False)
class Estimate:
    """The estimate of a step with one layout. Seconds and bytes are computed when they are first used."""

    job: Job
    layout: Layout

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds of a step, by term."""
        return {name: float(s) for name, s in step_terms(self.job, self.layout).items()}

    @cached_property
    def stages(self) -> list[dict[str, float]]:
        """Bytes on a GPU of each pipeline stage, by part."""
        return stages_memory(self.job, self.layout)

    @cached_property
    def stage(self) -> int:
        """The fullest stage."""
        return fullest(self.stages)

    @property
    def memory(self) -> dict[str, float]:
        """Bytes on a GPU of the fullest stage, by part."""
        return {name: size for name, size in self.stages[self.stage].items() if size}

    @property
    def model(self) -> ModelShape:
        """The job's model."""
        return self.job.model

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the terms of `time` do not overlap."""
        return sum(self.time.values())

    @property
    def sure(self) -> Sure:
        """The interval around these figures."""
        return sure(self.job)

    @property
    def network_is_assumed(self) -> bool:
        """Whether the layout uses more nodes than `NODES`, and the cluster has no `busbw` of them."""
        cluster = self.job.cluster
        return self.layout.ranks > NODES * cluster.gpus_per_node and not cluster.busbw

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest GPU."""
        return sum(self.memory.values())

    @property
    def free(self) -> float:
        """Bytes that the fullest GPU has left; below 0, the bytes that it lacks."""
        return self.job.cluster.device.memory - self.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has room for what its allocator reserves: see `memory.room`."""
        return self.memory_bytes <= room(self.job)

    @property
    def tight(self) -> bool:
        """Whether the layout fits only if PyTorch's allocator reserves less than usual."""
        return room(self.job) < self.memory_bytes <= self.job.cluster.device.memory

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of a global batch, divided by a step's seconds and the number of ranks."""
        return self.job.global_batch * self.job.seq_len / self.step_seconds / self.layout.ranks

    def gpu_hours(self, tokens: float) -> float:
        """GPU-hours to train on so many tokens, without interruptions, evaluations and checkpoints."""
        return tokens / self.tokens_per_second_per_gpu / 3600

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's FLOPs, with attention whole, over the GPUs' printed FLOP/s."""
        needed = self.tokens_per_second_per_gpu * self.job.flops_per_token()
        return needed / self.job.cluster.device.flops

    @property
    def title(self) -> str:
        """A line with the model, the cluster, the framework and the layout."""
        job = self.job
        how = ", ".join([job.framework.name, *job.switches])
        return f"{self.model.name} on {self.layout.ranks} × {job.cluster.device.name} ({how}): {self.layout}"

    def __repr__(self) -> str:
        return self.text(explain=True)

    def text(self, explain: bool = False, more: Sequence[str] = ()) -> str:
        """Tables, `more` of them, and a summary; explain: with the formulas and the numbers in them."""
        return "\n\n".join(
            [
                self.title,
                repr(self.time_table(explain)),
                repr(self.memory_table(explain)),
                *more,
                *([self.inputs()] if explain else []),
                *self.warnings(),
                self.summary(),
                self.interval(),
            ]
        )

    def summary(self) -> str:
        """Time, speed, MFU and memory in one sentence."""
        return (
            f"{self.step_seconds:.2f} s a step, {self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU"
            f" {self.mfu:.1%} (attention whole); {human(self.memory_bytes)} on the fullest GPU,"
            f" {human(abs(self.free))} {'free' if self.free >= 0 else 'too much'}"
        )

    def interval(self) -> str:
        """A sentence with the 80 % interval, or with the reason why there is none."""
        seconds, size, sure = self.step_seconds, self.memory_bytes, self.sure
        if sure.low is None or sure.high is None:
            return f"no interval: no published runs of {sure.of} were at hand"
        held = f"{human(size / sure.held)} to {human(size * sure.held)}, from published runs of {sure.of}"
        return f"80% interval: {sure.low * seconds:.2f} to {sure.high * seconds:.2f} s, {held}"

    def warnings(self) -> list[str]:
        """Sentences on what makes the figures less certain, such as tight memory or an assumed speed."""
        sentences, device = [], self.job.cluster.device
        if self.tight:
            sentences.append(
                f"tight: {human(self.memory_bytes)} of {human(device.memory)} are allocated, and PyTorch's"
                f" allocator may reserve {self.job.framework.holds.reserves:.2f} times as much; try it before"
                " you count on it"
            )
        if whole_until_last(self.job, self.layout):
            sentences.append(
                f"{human(self.memory['gradients'])} of gradients are held whole on each GPU until the last"
                " microbatch; with Accelerate's sync_each_batch (--with sync-each-batch) they are reduced in"
                " each"
            )
        if device.assumed:
            sentences.append(
                f"assumed: products reach {device.achievable / device.flops:.0%} of the FLOP/s printed for"
                f" {device.name}; measure yours, and give it as `achievable`"
            )
        if self.network_is_assumed:
            nodes = -(-self.layout.ranks // self.job.cluster.gpus_per_node)
            sentences.append(
                f"assumed: the network between {nodes:,} nodes keeps its speed. Measure an all-reduce over"
                " all of them: `busbw` of a cluster's file"
            )
        if (waits := self.time.get("waiting for the host", 0.0) / self.step_seconds) > WORTH_SAYING:
            launch = 1e6 * self.job.framework.runs.launch_seconds
            sentences.append(
                f"{waits:.0%} of the step waits for the host, which is assumed to launch a kernel in"
                f" {launch:.0f} µs; a CUDA graph or a compiler would save most of that"
            )
        if self.model.sinks:
            sentences.append(
                "gpt-oss: published runs took 1.37 times as long in the mean as is predicted here"
            )
        if device.name in WITHOUT_BF16 and self.job.precision == "bf16":
            sentences.append(f"no bf16 on {device.name}: fp16 is assumed, which needs a scaled loss")
        return sentences

    def time_table(self, explain: bool = True) -> Table:
        """Seconds by term, drawn as a waterfall: each part begins where the one above it ends."""
        total = self.step_seconds
        shown = {name: s for name, s in self.time.items() if s}
        cells = {name: [f"{s:.3f}", f"{s / total:.1%}"] for name, s in shown.items()}
        last = ["step", f"{total:.3f}", "100 %"]
        return _drawn(["time", "seconds", "share"], shown, cells, last, FORMULAS if explain else {})

    def memory_table(self, explain: bool = True) -> Table:
        """The fullest stage's bytes by part, drawn in the same way."""
        cells = {name: [human(size)] for name, size in self.memory.items()}
        columns, last = [f"memory, stage {self.stage}", "a GPU"], ["total", human(self.memory_bytes)]
        return _drawn(columns, self.memory, cells, last, HELD if explain else {})

    def by_stage(self) -> Table:
        """The memory of all stages, a row for each."""
        names = [name for name in self.stages[0] if any(stage[name] for stage in self.stages)]
        sizes = lambda stage: [*(stage[name] for name in names), sum(stage.values())]
        rows = [[str(k), *map(human, sizes(stage))] for k, stage in enumerate(self.stages)]
        return Table(["stage", *names, "together"], rows)

    def inputs(self) -> str:
        """The numbers in the formulas."""
        job, at, gpu = self.job, self.layout, self.job.cluster.device
        sizes = at.axes._asdict().items()
        letters = dict(
            s=job.seq_len,
            b=at.microbatch,
            m=job.microbatches(at),
            h=self.model.hidden,
            L=self.model.layers,
            V=self.model.vocab,
            **{NAMED[axis].letter or axis: n for axis, n in sizes if axis in ALWAYS or n > 1},
            v=at.interleave,
        )
        speeds = {
            "achievable FLOP/s": gpu.achievable,
            "memory bytes/s": gpu.achievable_bandwidth or gpu.bandwidth,
            "link bytes/s": job.cluster.intra_node_bandwidth,
            "port bytes/s": job.cluster.inter_node_bandwidth,
            "launch seconds": job.framework.runs.launch_seconds,
        }
        given = [f"{letter} = {value:,}" for letter, value in letters.items()]
        given += [f"{self.model.params:,} parameters"]
        given += [f"{name} {value:.4g}" for name, value in speeds.items()]
        reached = ", ".join(f"{name} {value:g}" for name, value in constants()._asdict().items())
        return f"inputs: {', '.join(given)}; constants: {reached} (data/cost_constants.json)"


def _drawn(
    columns: list[str], parts: dict[str, float], cells: dict[str, list[str]], last: list[str], how: dict
) -> Table:
    """A table with a row for each part: its cells, its bar, and its formula if `how` has formulas."""
    explained = lambda text: [text] if how else []
    bars = zip(parts, _waterfall(parts))
    rows = [[name, *cells[name], bar, *explained(how.get(name, ""))] for name, bar in bars]
    return Table([*columns, "drawn", *explained("how")], rows, [*last, "█" * WIDE, *explained("")])


def _waterfall(parts: dict[str, float]) -> list[str]:
    """A bar of characters for each part, after spaces as wide as the bars of the parts before it."""
    ends = [round(WIDE * x / sum(parts.values())) for x in np.cumsum(list(parts.values()))]
    return [("\u2007" * a + "█" * (b - a)).ljust(WIDE, "\u2007") for a, b in zip([0, *ends], ends)]


def estimate(job: Job, layout: Layout) -> Estimate:
    """Time and memory of a step. Raises ValueError with a sentence if `possible.check` refuses the layout."""
    job.check(layout)
    return Estimate(job, layout)
