"""What a run is: its sizes, its layout, and which of them cannot be. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from three_axes.paper.checks import divisors
from three_axes.plan.frameworks import TOY
from three_axes.plan.job import Job
from three_axes.plan.layout import Layout
from three_axes.plan.models import ModelShape
from three_axes.plan.possible import check

if TYPE_CHECKING:
    from ..toy import ToyTransformer

SCHEDULES = "1F1B", "GPipe"
PRECISIONS = "float32", "bfloat16", "float64"
MAY_BE_ZERO = ("dp", "shard", "microbatch", "warmup", "seed", "weight_decay", "keep", "schedule_steps")
MOST = 10**9  # of any number of a run: steps, seconds, a seed


def _option(default, meaning: str):
    """A field, and what --help says of it."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Config:
    """A run.

    Sizes count sequences and tokens; `batch` is for one step over all ranks, `microbatch` for one rank at a
    time.
    """

    dp: int = _option(0, "data-parallel ranks; 0: what tp, pp and cp leave of the ranks")
    tp: int = _option(1, "tensor-parallel ranks")
    pp: int = _option(1, "pipeline stages; they must divide --layers")
    cp: int = _option(1, "context-parallel ranks, which share each sequence; 2·cp must divide --seq-len")
    shard: int = _option(0, "of the dp·cp ranks, how many share out the weights: 0 all (FSDP2), 1 none (DDP)")
    sp: bool = _option(False, "sequence parallelism: split over tp also what lies between the matrices")
    schedule: str = _option("1F1B", "of the pipeline: 1F1B or GPipe")
    hidden: int = _option(128, "width of the model")
    heads: int = _option(8, "attention heads; tp must divide them")
    layers: int = _option(4, "blocks of the model")
    vocabulary: int = _option(256, "how many tokens there are; 256: the bytes of a text")
    seq_len: int = _option(64, "tokens (bytes of text) in a sequence")
    batch: int = _option(32, "sequences in a step, over all ranks")
    microbatch: int = _option(
        0,
        "sequences that a rank takes at a time; 0: its share at once, with a pipeline in 2·pp parts or more",
    )
    steps: int = _option(100, "steps of the optimizer, counted from the first start")
    schedule_steps: int = _option(0, "steps in which the learning rate rises and falls; 0: those of --steps")
    lr: float = _option(3e-3, "highest learning rate")
    warmup: int = _option(10, "steps in which the learning rate rises")
    weight_decay: float = _option(0.1, "of AdamW")
    clip: float = _option(1.0, "gradient norm above which gradients are scaled down")
    precision: str = _option("float32", "float32, bfloat16 (weights stay float32) or float64")
    seed: int = _option(0, "of the first weights and of the batches")
    text: str = _option("", "file to learn from; none: the course's own prose")
    tokens: str = _option(
        "", "instead a folder of *.bin: tokens of 2 bytes each, 4 above a vocabulary of 65,536"
    )
    compile: bool = _option(False, "torch.compile each block, where tp and cp are 1")
    out: str = _option("", "folder for metrics and checkpoints; none: nothing is written")
    every: int = _option(50, "steps from one checkpoint to the next")
    keep: int = _option(0, "complete checkpoints to keep, the last ones; 0: all")
    async_save: bool = _option(False, "write checkpoints while training goes on, from a copy on the host")
    timeout: float = _option(60.0, "seconds without an answer after which another rank counts as lost")

    def __post_init__(self):
        """Raises ValueError for numbers that no run can have."""
        for f in (f for f in fields(self) if f.type in ("int", "float")):
            value, least = (getattr(self, f.name), (0 if f.name in MAY_BE_ZERO else 1))
            if value < least if f.type == "int" else not (value > 0 or value == 0 == least):
                raise ValueError(
                    f"{f.name} must be {'at least ' + str(least) if f.type == 'int' else 'positive'}, not"
                    f" {value}"
                )
            if value > MOST:
                raise ValueError(f"{f.name} must be at most {MOST:,}, not {value}")

    def checked(self, ranks: int) -> Config:
        """With the zeros filled in. Raises ValueError, a sentence with what to do, for what cannot be."""
        inside = self.tp * self.pp * self.cp
        if not self.dp and ranks % inside == 0:
            return replace(self, dp=ranks // inside).checked(ranks)
        if (needed := max(1, self.dp) * inside) != ranks:
            sizes = {"dp": self.dp or "?", "tp": self.tp, "pp": self.pp}
            if self.cp > 1:
                sizes["cp"] = self.cp
            product = f"{'·'.join(sizes)} = {'·'.join(map(str, sizes.values()))}" + f" = {needed}" * bool(
                self.dp
            )
            raise ValueError(
                f"{product}, but {ranks} process{'es were' if ranks > 1 else ' was'} started; start one for"
                f" each, as torchrun --nproc-per-node {needed}"
            )
        if self.schedule not in SCHEDULES or self.precision not in PRECISIONS:
            raise ValueError(
                f"schedule is one of {', '.join(SCHEDULES)} and precision one of {', '.join(PRECISIONS)}, not"
                f" {self.schedule!r} and {self.precision!r}"
            )
        if self.compile and self.tp * self.cp > 1:
            raise ValueError("--compile is for tp 1 and cp 1: it does not follow a block's own messages")
        if self.tokens and self.text or self.vocabulary > 256 and not self.tokens:
            raise ValueError(
                f"give --text for bytes, or --tokens for a vocabulary of others; it is {self.vocabulary} here"
            )
        shard = self.shard or self.replicas
        if self.replicas % shard:
            alike = f"dp {self.dp}" if self.cp == 1 else f"dp·cp {self.dp}·{self.cp}"
            raise ValueError(
                f"shard {shard} does not divide {alike}; the weights are shared out among equal groups"
            )
        if self.layers % self.pp:
            allowed = ", ".join(str(n) for n in divisors(self.layers))
            raise ValueError(f"{self.layers} layers do not divide over pp {self.pp}; take pp {allowed}")
        if self.batch % self.dp:
            below = max(1, self.batch // self.dp) * self.dp
            raise ValueError(
                f"a batch of {self.batch} sequences does not divide by dp {self.dp}; take a batch of {below}"
            )
        share = self.batch // self.dp
        most = max(1, share if self.pp == 1 else share // (2 * self.pp))
        microbatch = self.microbatch or max(n for n in divisors(share) if n <= most)
        layout = Layout(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, microbatch=microbatch)
        check(self.shape, layout, self.batch, seq_len=self.seq_len)
        if self.schedule == "1F1B" and self.batch // (self.dp * microbatch) < self.pp:
            raise ValueError(
                f"1F1B needs at least as many microbatches as stages: {self.batch // (self.dp * microbatch)}"
                f" of {microbatch} sequences are too few for {self.pp}; take a smaller microbatch, a larger"
                " batch, or --schedule GPipe"
            )
        if self.sp and self.seq_len // self.cp % self.tp:
            whose = "the sequence of" if self.cp == 1 else "a rank's part of the sequence,"
            raise ValueError(
                f"with sequence parallelism tp {self.tp} must divide {whose} {self.seq_len // self.cp} tokens"
            )
        falls = self.schedule_steps or self.steps
        return replace(self, shard=shard, microbatch=microbatch, schedule_steps=falls)

    @property
    def replicas(self) -> int:
        """Ranks that work with the same weights, on other tokens: dp · cp."""
        return self.dp * self.cp

    @property
    def shape(self) -> ModelShape:
        """The model, for `three_axes.plan`."""
        sizes = self.layers, self.hidden, self.heads, self.vocabulary
        return ModelShape("toy", *sizes, positions=self.seq_len)

    @property
    def on_paper(self) -> tuple[Job, Layout]:
        """The run as `three_axes.plan` sees it."""
        sizes = dict(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, microbatch=self.microbatch)
        job = Job(self.shape, global_batch=self.batch, seq_len=self.seq_len, framework=TOY)
        shard = self.shard if self.shard < self.replicas else 0
        return job, Layout(**sizes, zero=3, shard=shard, sequence_parallel=self.sp)

    @property
    def layout(self) -> str:
        """'dp 4 · tp 2 · pp 1'; cp, sp and shard follow where they are used."""
        return (
            f"dp {self.dp} · tp {self.tp} · pp {self.pp}"
            + f" · cp {self.cp}" * (self.cp > 1)
            + " · sp" * self.sp
            + f" · shard {self.shard}" * (self.shard not in (0, self.replicas))
        )

    def model(self) -> ToyTransformer:
        """The whole model, equal wherever it is made."""
        from ..toy import ToyTransformer

        model = ToyTransformer(**self.sizes, seed=self.seed)
        return model.double() if self.precision == "float64" else model.float()

    @property
    def sizes(self) -> dict[str, int]:
        """Of the model."""
        return {name: getattr(self, name) for name in ("hidden", "heads", "layers", "seq_len", "vocabulary")}


def add_options(parser) -> None:
    """The fields of a Config, and what else the command takes."""
    for f in fields(Config):
        option = (
            {"action": "store_true"}
            if f.type == "bool"
            else {"type": {"int": int, "float": float, "str": str}[f.type], "metavar": f.type}
        )
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            default=f.default,
            help=f.metadata["help"] + (f" (default {f.default})" if f.default else ""),
            **option,
        )
    sizes = "a config.json, whose hidden, heads, layers and vocabulary are taken"
    parser.add_argument("--model", metavar="FILE", help=sizes)
    parser.add_argument(
        "--sample", metavar="TEXT", help="let the model of --out go on with this text, and end"
    )
    parser.add_argument(
        "--export", metavar="FOLDER", help="write the model of --out for transformers, and end"
    )
