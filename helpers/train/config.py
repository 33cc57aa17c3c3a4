"""What a run is: its sizes, its layout, and which of them cannot be."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from .. import toy
from ..theory.frameworks import TOY
from ..theory.job import Job
from ..theory.layout import Layout
from ..theory.models import ModelShape
from ..theory.possible import check

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MOST = 10**9  # of any number of a run: steps, seconds, a seed


@dataclass(frozen=True)
class Config:
    """A run.

    Sizes count sequences and tokens; `batch` is for one step over all ranks, `microbatch` for one rank at a
    time.
    """

    dp: int = 0  # 0: what the ranks leave when tp and pp are taken
    tp: int = 1
    pp: int = 1
    shard: int = 0  # of the dp ranks, how many share out the weights; 0: all
    sp: bool = False
    schedule: str = "1F1B"
    hidden: int = 128
    heads: int = 8
    layers: int = 4
    seq_len: int = 64
    batch: int = 32
    microbatch: int = 0  # 0: as many as make 2·pp microbatches, or the whole share without a pipeline
    steps: int = 100
    lr: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "float32"
    seed: int = 0
    text: str = ""  # a file; empty: the course's own prose
    out: str = ""  # a folder for metrics and checkpoints; empty: none are written
    every: int = 50
    timeout: float = 60.0  # seconds without an answer after which another rank counts as lost

    def __post_init__(self):
        """Raises ValueError for numbers that no run can have."""
        for f in (f for f in fields(self) if f.type in ("int", "float")):
            value, least = (
                getattr(self, f.name),
                (0 if f.name in ("dp", "shard", "microbatch", "warmup", "seed", "weight_decay") else 1),
            )
            if value < least if f.type == "int" else not (value > 0 or value == 0 == least):
                raise ValueError(
                    f"{f.name} must be {'at least ' + str(least) if f.type == 'int' else 'positive'}, not"
                    f" {value}"
                )
            if value > MOST:
                raise ValueError(f"{f.name} must be at most {MOST:,}, not {value}")

    def checked(self, ranks: int) -> Config:
        """With the zeros filled in. Raises ValueError, a sentence with what to do, for what cannot be."""
        if not self.dp and ranks % (self.tp * self.pp) == 0:
            return replace(self, dp=ranks // (self.tp * self.pp)).checked(ranks)
        if (needed := max(1, self.dp) * self.tp * self.pp) != ranks:
            raise ValueError(
                f"dp·tp·pp = {self.dp or '?'}·{self.tp}·{self.pp}{f' = {needed}' if self.dp else ''}, but"
                f" {ranks} process{'es were' if ranks > 1 else ' was'} started; start one for each, as"
                f" torchrun --nproc-per-node {needed}"
            )
        if self.schedule not in SCHEDULES or self.precision not in PRECISIONS:
            raise ValueError(
                f"schedule is one of {', '.join(SCHEDULES)} and precision one of {', '.join(PRECISIONS)}, not"
                f" {self.schedule!r} and {self.precision!r}"
            )
        shard = self.shard or self.dp
        if self.dp % shard:
            raise ValueError(
                f"shard {shard} does not divide dp {self.dp}; the weights are shared out among equal groups"
            )
        share = self.batch // self.dp
        microbatch = self.microbatch or max(1, share if self.pp == 1 else share // (2 * self.pp))
        check(self.shape, Layout(dp=self.dp, tp=self.tp, pp=self.pp, microbatch=microbatch), self.batch)
        if self.layers % self.pp:
            raise ValueError(f"{self.layers} layers do not divide over {self.pp} stages")
        if self.schedule == "1F1B" and self.batch // (self.dp * microbatch) < self.pp:
            raise ValueError(
                f"1F1B needs at least as many microbatches as stages: {self.batch // (self.dp * microbatch)}"
                f" of {microbatch} sequences are too few for {self.pp}; take a smaller microbatch, a larger"
                " batch, or --schedule GPipe"
            )
        if self.sp and self.seq_len % self.tp:
            raise ValueError(
                f"with sequence parallelism tp {self.tp} must divide the sequence of {self.seq_len} tokens"
            )
        return replace(self, shard=shard, microbatch=microbatch)

    @property
    def shape(self) -> ModelShape:
        """The model, for `helpers.theory`."""
        return ModelShape("toy", self.layers, self.hidden, self.heads, toy.VOCABULARY, positions=self.seq_len)

    @property
    def on_paper(self) -> tuple[Job, Layout]:
        """The run as `helpers.theory` sees it."""
        sizes = dict(dp=self.dp, tp=self.tp, pp=self.pp, microbatch=self.microbatch)
        job = Job(self.shape, global_batch=self.batch, seq_len=self.seq_len, framework=TOY)
        shard = self.shard if self.shard < self.dp else 0
        return job, Layout(**sizes, zero=3, shard=shard, sequence_parallel=self.sp)

    @property
    def layout(self) -> str:
        return (
            f"dp {self.dp} · tp {self.tp} · pp {self.pp}"
            + " · sp" * self.sp
            + (f" · shard {self.shard}" if self.shard not in (0, self.dp) else "")
        )

    def model(self) -> toy.ToyTransformer:
        """The whole model, equal wherever it is made."""
        return toy.ToyTransformer(self.hidden, self.heads, self.layers, self.seq_len, self.seed).to(
            PRECISIONS["float64" if self.precision == "float64" else "float32"]
        )
