"""Train the 4-layer model for real, split by (dp, tp, pp): one file, to be read from top to bottom.

    python -m helpers.train
    torchrun --nproc-per-node 8 \\
        -m helpers.train --dp 2 --tp 2 --pp 2 --out run
    python -m helpers.train --out run --sample "The "

The first command runs one process, in which nothing is split: the twin, whose losses every layout must
reproduce. The second runs eight on one machine. The third lets the trained model write. docs/train.md has the
commands for several machines. The axes and what does the split:

    dp   FSDP2 (`fully_shard`): examples, weights, gradients and
         optimizer state. By default dp is the number of ranks / (tp · pp)
    tp   DTensor (`parallelize_module`): the matrices of every block;
         `--sp` also splits the activations between them, by tokens
    pp   `torch.distributed.pipelining`: the blocks;
         `--schedule 1F1B`, `GPipe` or `interleaved`

The batch of step k depends only on the seed and on k. With `--out run` a run writes a line of JSON for each
step into run/metrics.jsonl, and a checkpoint every `--every` steps. Each start with this `--out` continues
from the last complete checkpoint, if there is one, also with other ranks and another layout.

    run/step-000040/               complete: at the end of a save the folder gets this name
        __0_0.distcp, .metadata    PyTorch's distributed checkpoint (DCP)
        about.json                 step, layout, model
        SHA256SUMS                 `sha256sum -c` checks these files; so does each start
    run/step-000060.unfinished/    a save cut short; .damaged: files that do not match SHA256SUMS
    run/owner, run/owner.lock      the process that trains here; a second run is refused

All ranks train on GPUs over NCCL where there are GPUs, else on the CPU over gloo. For options that cannot
work, the program prints a sentence and exits with status 2. A rank ends after `--timeout` seconds of waiting.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends a run without a traceback: started again, it continues
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, parallelize_module
from tqdm import tqdm

from three_axes import devices, pytorch_private
from three_axes.files import find
from three_axes.foreign import open_file
from three_axes.table import human
from three_axes.terminal import Parser
from three_axes.trace import merged_plan

from . import toy
from .ranks import join, owning, together

tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared by processes, and stays locked if one is killed
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # `sample` runs in one process

# -- what a run is ---------------------------------------------------------------------------------

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}
Say = Callable[[str], None]  # called with a line when something happens that the user should know
PRECISIONS = "float32", "bfloat16", "float64"
MAY_BE_ZERO = "dp", "microbatch", "warmup", "seed", "weight_decay", "keep", "schedule_steps"


def _option(default, meaning: str):
    """A field, with its text for --help."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Config:
    """The settings of a run."""

    dp: int = _option(0, "data-parallel ranks; 0: the number of ranks / (tp · pp)")
    tp: int = _option(1, "tensor-parallel ranks; they must divide --heads")
    pp: int = _option(1, "pipeline ranks; they must divide --layers")
    sp: bool = _option(False, "sequence parallelism: tp also splits the activations between the matrices")
    schedule: str = _option("1F1B", "of the pipeline: 1F1B, GPipe, or interleaved, two stages on each rank")
    hidden: int = _option(128, "width of the model")
    heads: int = _option(8, "attention heads")
    layers: int = _option(4, "blocks of the model")
    seq_len: int = _option(64, "tokens (bytes of text) in a sequence")
    batch: int = _option(32, "sequences in a step, over all ranks")
    microbatch: int = _option(0, "sequences that a rank takes at a time; 0: as many as fit its share")
    steps: int = _option(100, "steps of the optimizer, counted from the first start")
    schedule_steps: int = _option(0, "steps in which the learning rate rises and falls; 0: those of --steps")
    lr: float = _option(3e-3, "highest learning rate")
    warmup: int = _option(10, "steps in which the learning rate rises")
    weight_decay: float = _option(0.1, "of AdamW")
    clip: float = _option(1.0, "gradient norm above which gradients are scaled down")
    precision: str = _option("float32", "float32, bfloat16 (weights stay float32) or float64")
    seed: int = _option(0, "seed of the first weights and of the batches")
    text: str = _option("", "file to learn from; none: the course's own prose")
    out: str = _option("", "folder for metrics and checkpoints; none: nothing is written")
    every: int = _option(50, "steps from one checkpoint to the next")
    keep: int = _option(0, "complete checkpoints to keep, the last ones; 0: all")
    async_save: bool = _option(False, "write checkpoints while training goes on, from a copy on the host")
    timeout: float = _option(60.0, "seconds without an answer after which another rank counts as lost")

    def checked(self, ranks: int) -> Config:
        """A copy in which dp, microbatch and schedule_steps have their values where they were 0. Raises
        ValueError if it cannot run on this number of ranks.
        """
        for f in (f for f in fields(self) if f.type in ("int", "float")):
            if not ((value := getattr(self, f.name)) > 0 or value == 0 and f.name in MAY_BE_ZERO):
                raise ValueError(f"{f.name} cannot be {value}")
        tp, pp, batch, interleaved = self.tp, self.pp, self.batch, self.schedule == "interleaved"
        dp = self.dp or max(1, ranks // (tp * pp))
        # By default a pipeline has the fewest microbatches, from 2·pp on, into which the batch divides.
        counts = range(2 * pp, batch + 1, pp if interleaved else 1) if pp > 1 else [1]
        count = next((count for count in counts if batch % (dp * count) == 0), batch)
        b = self.microbatch or max(1, batch // (dp * count))
        m = batch // (dp * b)  # microbatches
        for fits, sentence in (
            (self.schedule in SCHEDULES, f"schedule {self.schedule!r} is none of {', '.join(SCHEDULES)}"),
            (self.precision in PRECISIONS, f"precision {self.precision!r} is none of {PRECISIONS}"),
            (dp * tp * pp == ranks, f"dp {dp} · tp {tp} · pp {pp} is {dp * tp * pp} ranks, not {ranks}"),
            (self.heads % tp == 0, f"tp {tp} does not divide {self.heads} attention heads"),
            (self.seq_len % tp == 0 or not self.sp, f"under sp tp {tp} must divide {self.seq_len} tokens"),
            (self.layers % self.stages == 0, f"{self.layers} layers do not divide over {self.stages} stages"),
            (batch % (dp * b) == 0, f"a batch of {batch} does not divide by dp·microbatch = {dp}·{b}"),
            (pp > 1 or not interleaved, "interleaved needs a pipeline: pp 2 or more"),
            (m % pp == 0 or not interleaved, f"interleaved needs a multiple of {pp} microbatches, not {m}"),
            (m >= pp or self.schedule == "GPipe", f"pp {pp} needs {pp} microbatches or more, not {m}"),
        ):
            if not fits:
                raise ValueError(sentence)
        return replace(self, dp=dp, microbatch=b, schedule_steps=self.schedule_steps or self.steps)

    @property
    def stages(self) -> int:
        """Parts into which the blocks are cut: one for each pipeline rank, two with interleaving."""
        return self.pp * (2 if self.schedule == "interleaved" else 1)

    @property
    def layout(self) -> str:
        """'dp 4 · tp 2 · pp 1', with sp and interleaved if they are used."""
        extra = " · sp" * self.sp + " · interleaved" * (self.schedule == "interleaved")
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}{extra}"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the model; a checkpoint must have the same."""
        return {name: getattr(self, name) for name in ("hidden", "heads", "layers", "seq_len")}

    def model(self) -> toy.ToyTransformer:
        """The whole model, with the same weights on every rank."""
        model = toy.ToyTransformer(**self.sizes, seed=self.seed)
        return model.double() if self.precision == "float64" else model.float()


# -- what it learns from ---------------------------------------------------------------------------


def read_text(file: str = "") -> torch.Tensor:
    """All bytes of a text file, or of the prose of drops 01 to 13: (length,), uint8. Raises OSError."""
    if file:
        return torch.from_numpy(np.fromfile(file, np.uint8))
    books = [json.loads(p.read_text("utf-8")) for p in sorted(find("notebooks").glob("[01]*.ipynb"))[:13]]
    cells = [c["source"] for book in books for c in book["cells"] if c["cell_type"] == "markdown"]
    return torch.from_numpy(np.frombuffer("\n\n".join(map("".join, cells)).encode(), np.uint8).copy())


def batch_of(text: torch.Tensor, step: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each (batch, seq_len): the whole batch of a step, the same for every layout."""
    if (have := len(text)) < (need := config.seq_len + 2):
        raise ValueError(f"the text has {have} tokens; sequences of {config.seq_len} need at least {need}")
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(have - config.seq_len, (config.batch, 1), generator=generator)
    at = starts + torch.arange(config.seq_len)
    return text[at].long(), text[at + 1].long()


def learning_rate(step: int, config: Config) -> float:
    """Up in a straight line for `warmup` steps, then down a half cosine to a tenth at `schedule_steps`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    last = config.schedule_steps or config.steps
    share = (step - config.warmup) / max(1, last - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, share)))


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in float32 at least."""
    return toy.loss_of(scores.float() if scores.dtype == torch.bfloat16 else scores, targets)


# -- how it is split -------------------------------------------------------------------------------


def stage_of(config: Config, stage: int) -> nn.Sequential:
    """The parts of one pipeline stage under their names in the whole model (0: the embedding, layers + 1: the
    head), so that a checkpoint fits any layout.
    """
    blocks = config.layers // config.stages
    first, last = stage * blocks + (stage > 0), (stage + 1) * blocks + (stage == config.stages - 1)
    parts = config.model().named_children()
    return nn.Sequential(OrderedDict((name, part) for name, part in parts if first <= int(name) <= last))


def split(stage: nn.Sequential, config: Config, mesh: DeviceMesh) -> nn.Sequential:
    """Split the blocks of a stage over tp; then shard each block, and the rest of the stage, over dp."""
    whole, cut = Replicate(), Shard(1)  # under sp the embedding shards the tokens, and the head gathers them
    enter = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=cut)
    leave = PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole, use_local_output=True)
    half = torch.bfloat16 if config.precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for part in stage:
        block = isinstance(part, toy.Block)
        if config.tp > 1 and block:
            for name, how in merged_plan(part, config.sp).items():
                parallelize_module(part.get_submodule(name), mesh["tp"], how)
        elif config.tp > 1 and config.sp:
            parallelize_module(part, mesh["tp"], enter if isinstance(part, toy.Embedding) else leave)
        if block:  # in a pipeline, weights gathered for one microbatch are kept for the others
            fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=config.pp == 1)
    return fully_shard(stage, mesh=mesh["dp"], mp_policy=policy)


# -- a checkpoint on the disk ----------------------------------------------------------------------

UNFINISHED, DAMAGED, ABOUT, SUMS = ".unfinished", ".damaged", "about.json", "SHA256SUMS"
PARTS = "model", "optimizer"  # optimizer state by parameter name: AdamW's groups differ between layouts
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    known = [p for p in run.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(known, key=lambda p: int(p.name[5:]))


def digest(file: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` prints it. Raises ValueError if it is no regular file."""
    with open_file(file) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, as a sentence; "" if its files are unchanged."""
    name = SUMS
    try:
        with open_file(folder / SUMS) as f:
            sums = [line.split("  ", 1) for line in f.read().decode().splitlines()]
        if not sums or sums[-1][1:] != [ABOUT]:  # the last line
            raise ValueError("it is cut short")
        for saved, name in sums:
            if digest(folder / name) != saved:
                raise ValueError("it has other bytes than were saved")
    except (OSError, ValueError) as e:
        return f"{folder} is damaged. {name}: {e}"
    return ""


def last_intact(run: Path, say: Say) -> Path | None:
    """The last checkpoint whose files are unchanged; None if the run has no checkpoint. Damaged ones after it
    are renamed. Raises ValueError if all are damaged.
    """
    for folder in reversed(known := checkpoints(run)):
        if not (what := damage(folder)):
            return folder
        if folder == known[0]:
            raise ValueError(f"{what}; no other checkpoint is left. To start anew, give another --out")
        away = folder.with_name(folder.name + DAMAGED)
        say(f"{what}; it is renamed to {away.name}")
        shutil.rmtree(away, ignore_errors=True)
        folder.rename(away)
    return None


def complete(write_files: Callable, unfinished: Path, about: dict, keep: int, needed: int) -> None:
    """Every rank writes its files. Then rank 0 writes their digests, and at last renames the folder, so a run
    that is killed leaves its last complete checkpoint. needed: bytes, for the message. Raises OSError.
    """
    try:
        write_files()
        if dist.get_rank() == 0:
            (unfinished / ABOUT).write_text(json.dumps(about, indent=1))
            index = dcp.FileSystemReader(unfinished).read_metadata()  # `dcp.save` returns no file names
            names = sorted({stored.relative_path for stored in index.storage_data.values()})
            sums = [f"{digest(unfinished / name)}  {name}\n" for name in [*names, ".metadata", ABOUT]]
            (unfinished / SUMS).write_text("".join(sums))
            unfinished.rename(unfinished.with_suffix(""))
            for old in checkpoints(unfinished.parent)[:-keep] if keep else []:
                with suppress(OSError):  # the next save tries again
                    shutil.rmtree(old.rename(f"{old}{UNFINISHED}"))  # half removed, it must not look complete
    except (OSError, RuntimeError, dcp.CheckpointException) as e:
        failures = getattr(e, "failures", None)  # DCP's: rank -> (exception, traceback)
        reason = str(next(iter(failures.values()))[0] if failures else e).strip().partition("\n")[0]
        if "inline_container" in reason:  # PyTorch's writer does not pass on the system's error
            reason = "the disk accepted no more data"
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            free = shutil.disk_usage(unfinished.parent).free
            lacks = f", {human(needed - free)} are missing" * (free < needed)
            reason += f". It needs about {human(needed)}, {human(free)} are free{lacks}"
        raise OSError(f"{unfinished.stem} could not be written: {reason}") from None


# -- a rank's share of a run -----------------------------------------------------------------------


class Trainer:
    """This rank's share of a run: `step()`, with `save()`, `saved()` and `resume()` in between. Needs a
    process group whose backend fits the device; every rank makes the same calls. `number` counts the finished
    steps. Raises ValueError, on every rank, for a configuration or a text that cannot be used.
    """

    def __init__(self, config: Config, device: torch.device = devices.CPU):
        self.config = c = config.checked(dist.get_world_size())
        self.device, self.number, self.pending_save = device, 0, None
        self.microbatches = c.batch // c.dp // c.microbatch
        self.text = together(lambda: read_text(c.text))
        batch_of(self.text, 0, c)  # raises if the text is too short
        torch.backends.cuda.matmul.allow_tf32 = False  # its 10 bits would make layouts differ from the twin
        # tp is innermost, where links are fastest. A mesh's groups do not inherit `join`'s timeout.
        self.mesh = init_device_mesh(device.type, (c.pp, c.dp, c.tp), mesh_dim_names=("pp", "dp", "tp"))
        limit = timedelta(seconds=c.timeout)
        for group in self.mesh.get_all_groups():
            group.set_timeout(limit)
        self.dp_rank, self.pp_rank = self.mesh.get_local_rank("dp"), self.mesh.get_local_rank("pp")
        mine = range(self.pp_rank, c.stages, c.pp)  # this rank's stages: two with interleaving
        stages = [split(stage_of(c, i).to(device), c, self.mesh) for i in mine]
        named = OrderedDict(part for stage in stages for part in stage.named_children())
        self.model = stages[0] if len(stages) == 1 else nn.Sequential(named)
        over: dict[tuple, list] = {}  # AdamW updates a group of parameters at once, and cannot mix meshes
        for p in self.model.parameters():
            over.setdefault(p.device_mesh.mesh_dim_names, []).append(p)
        groups = [{"params": group} for group in over.values()]
        how = dict(lr=c.lr, betas=(0.9, 0.95), weight_decay=c.weight_decay, fused=True)
        self.optimizer = torch.optim.AdamW(groups, **how)
        if c.pp > 1:
            group = self.mesh.get_group("pp")
            pipe = [PipelineStage(s, i, c.stages, device, group=group) for s, i in zip(stages, mine)]
            given = pipe if len(pipe) > 1 else pipe[0]
            self.pipeline = SCHEDULES[c.schedule](given, self.microbatches, loss_fn=loss_of)
        if c.async_save:  # ranks coordinate a save over a group of their own, beside training
            self.saving = dist.new_group(backend="gloo", timeout=limit)
            self.saver = ThreadPoolExecutor(1, "checkpoint")

    def step(self) -> dict:
        """Take one step. Returns its line of metrics, the same on every rank; grad_norm is unclipped."""
        c = self.config
        whole = batch_of(self.text, self.number, c)
        tokens, targets = (rows.chunk(c.dp)[self.dp_rank].to(self.device) for rows in whole)
        loss = self._forward_backward(tokens, targets)
        parameters = list(self.model.parameters())
        grads = [p.grad.to_local() for p in parameters]
        # The sum over all ranks is divided by dp·tp. Each squared norm is first multiplied by the number of
        # ranks that its gradient is cut over, so each element counts once. The loss becomes the mean over dp.
        splits = [zip(p.device_mesh.shape, p.placements) for p in parameters]
        cuts = [math.prod(n for n, place in split if not place.is_replicate()) for split in splits]
        norms = torch.stack(pytorch_private.norms(grads)).double()
        squares = (norms.square() * norms.new_tensor(cuts)).sum()
        sums = torch.stack([loss.double(), squares]) / (c.dp * c.tp)
        dist.all_reduce(sums)
        loss, norm = sums[0].item(), sums[1].sqrt().item()
        pytorch_private.scale(grads, min(1.0, c.clip / (norm + 1e-6)))
        rate = learning_rate(self.number, c)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return {"step": self.number, "loss": loss, "grad_norm": norm, "lr": rate}

    def _forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of this rank's share; 0 if another stage has it. Adds to the gradients."""
        c, total = self.config, torch.zeros((), dtype=torch.float64, device=self.device)
        if c.pp > 1:
            losses: list[torch.Tensor] = []
            last = self.pp_rank == c.pp - 1
            given = [tokens] if self.pp_rank == 0 else []
            self.pipeline.step(*given, target=targets if last else None, losses=losses)
            return torch.stack(losses).detach().mean() if last else total
        m = self.microbatches
        for i, (x, y) in enumerate(zip(tokens.chunk(m), targets.chunk(m))):
            self.model.set_requires_gradient_sync(i == m - 1)
            loss = loss_of(self.model(x), y) / m
            loss.backward()
            total += loss.detach()
        return total

    def save(self) -> None:
        """Write a checkpoint; under `async_save` begin one. Raises OSError, on every rank."""
        self.saved()
        c, unfinished = self.config, Path(self.config.out, f"step-{self.number:06d}{UNFINISHED}")
        about = {"step": self.number, "layout": c.layout, "model": c.sizes, "config": asdict(c)}
        state = dict(zip(PARTS, get_state_dict(self.model, self.optimizer, options=BY_NAME)))
        entries = [entry for part in state.values() for entry in part.values()]
        # DCP's files have 1600 bytes for each entry besides its numbers. All stages have about equal sizes.
        needed = c.pp * sum(1600 + getattr(entry, "nbytes", 0) for entry in entries)
        if c.async_save:
            write_files = dcp.async_save(state, checkpoint_id=unfinished, process_group=self.saving).result
        else:
            write_files = partial(dcp.save, state, checkpoint_id=unfinished)
        finish = partial(complete, write_files, unfinished, about, c.keep, needed)
        self.pending_save = self.saver.submit(finish).result if c.async_save else finish
        if not c.async_save:
            self.saved()

    def saved(self) -> None:
        """Wait until the checkpoint that was begun is complete. Raises OSError, on every rank."""
        finish, self.pending_save = self.pending_save, None
        if finish:
            together(finish, OSError)

    def resume(self, say: Say = lambda line: None) -> None:
        """Continue from the last whole checkpoint in `config.out`, of any layout, if there is one. Raises
        ValueError, on every rank, if all checkpoints are damaged, or if the last one is of another model.
        """
        found = [together(lambda: None if dist.get_rank() else last_intact(Path(self.config.out), say))]
        dist.broadcast_object_list(found)
        if (folder := found[0]) is None:
            return
        about = json.loads((folder / ABOUT).read_text())
        if about["model"] != self.config.sizes:
            raise ValueError(f"{folder} holds model {about['model']}, not {self.config.sizes}; change --out")
        state = dict(zip(PARTS, get_state_dict(self.model, self.optimizer, options=BY_NAME)))
        dcp.load(state, checkpoint_id=folder)
        states = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_state_dict(self.model, self.optimizer, **states, options=BY_NAME)
        self.number = about["step"]
        say(f"going on from {folder.name}, the last complete checkpoint (written under {about['layout']})")


# -- a whole run -----------------------------------------------------------------------------------

METRICS, LOG_SECONDS = "metrics.jsonl", 10.0  # seconds from one line of a log to the next


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics, without those that are damaged or not yet whole."""
    lines, file = [], run / METRICS
    for line in file.read_bytes().splitlines() if file.exists() else []:
        with suppress(ValueError, RecursionError):
            read = json.loads(line)
            if isinstance(read, dict) and isinstance(read.get("step"), int):
                lines.append(read)
    return lines


def tidy(run: Path, step: int) -> None:
    """Remove what an earlier start left: unfinished saves, and metrics of steps that will be done again."""
    for left in run.glob(f"*{UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)
    kept = [json.dumps(line) + "\n" for line in read_metrics(run) if line["step"] <= step]
    made = run / f"{METRICS}.made"
    made.write_text("".join(kept))
    made.rename(run / METRICS)


def train(config: Config, device: torch.device = devices.CPU, say: Say = lambda line: None) -> Trainer:
    """A whole run on this rank, from the last checkpoint to the last step. Raises ValueError, on every rank,
    for a configuration, a text, a folder or a checkpoint that cannot be used, when the loss is not finite,
    and when the last checkpoint could not be written.
    """
    trainer = Trainer(config, device)
    c, run, is_first = trainer.config, Path(config.out), dist.get_rank() == 0
    waiting, failed = b"", None

    def reported(save: Callable[[], None]) -> OSError | None:
        try:
            return save()
        except OSError as e:
            say(f"{e}; the checkpoints before it are untouched" + ", and training goes on" * (c.steps > step))
            return e

    with ExitStack() as stack:
        if c.out:
            together(lambda: stack.enter_context(owning(run, say)) if is_first else None)
            trainer.resume(say)
            together(lambda: tidy(run, trainer.number) if is_first else None)
        first, begun, logged = trainer.number, time.monotonic(), time.monotonic()
        bar = stack.enter_context(tqdm(total=c.steps, initial=first, disable=None if is_first else True))
        for step in range(first + 1, c.steps + 1):
            start = time.perf_counter()
            line = trainer.step()
            line["seconds"] = time.perf_counter() - start
            line["tokens_per_second"] = c.batch * c.seq_len / line["seconds"]
            if not math.isfinite(line["loss"] + line["grad_norm"]):
                reported(trainer.saved)
                sizes = f"loss {line['loss']} and gradient norm {line['grad_norm']}"
                raise ValueError(f"step {step} has {sizes}: it is not saved. Take a smaller lr")
            if c.out and is_first:
                waiting += json.dumps(line).encode() + b"\n"
                with suppress(OSError), (run / METRICS).open("ab", buffering=0) as file:
                    while waiting:  # an almost full disk takes only a part; the rest waits
                        waiting = waiting[file.write(waiting) :]
            bar.update()
            bar.set_postfix(loss=f"{line['loss']:.3f}")
            if bar.disable and (now := time.monotonic()) - logged >= LOG_SECONDS:
                logged, left = now, (c.steps - step) * (now - begun) / (step - first)
                speed = f"{line['tokens_per_second']:,.0f} tokens/s, {left:.0f} s left"
                say(f"step {step} of {c.steps}: loss {line['loss']:.3f}, {speed}")
            if c.out and (step % c.every == 0 or step == c.steps):
                reported(trainer.saved)  # with async_save: the checkpoint before this one
                failed = reported(trainer.save) or (reported(trainer.saved) if step == c.steps else None)
        if failed:
            raise ValueError(f"training has ended, but its last checkpoint is missing: {failed}")
    return trainer


# -- what it has learned ---------------------------------------------------------------------------


def sample(run: Path, prompt: str = "The ", length: int = 200, say: Say = lambda line: None) -> str:
    """What the model of the last whole checkpoint writes after `prompt`, in one process. Raises ValueError if
    there is none.
    """
    if (folder := last_intact(run, say)) is None:
        raise ValueError(f"{run} has no complete checkpoint")
    model = toy.ToyTransformer(**json.loads((folder / ABOUT).read_text())["model"])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)  # into the model's own tensors
    return write(model, prompt, length)


@torch.no_grad()
def write(model: toy.ToyTransformer, prompt: str, length: int, seed: int = 0) -> str:
    """`prompt`, followed by `length` bytes that the model generates."""
    written, generator = list(prompt.encode()) or [10], torch.Generator().manual_seed(seed)
    for _ in range(length):
        scores = model(torch.tensor([written[-model.seq_len :]]))[0, -1]
        written.append(torch.multinomial((scores / 0.7).softmax(-1), 1, generator=generator).item())
    return bytes(written).decode(errors="replace")


# -- the command -----------------------------------------------------------------------------------


def add_options(parser: Parser) -> None:
    """Add the fields of a Config, and --sample."""
    kinds = {"int": int, "float": float, "str": str}
    for f in fields(Config):
        how = {"action": "store_true"} if f.type == "bool" else {"type": kinds[f.type], "metavar": f.type}
        meaning = f.metadata["help"] + f" (default {f.default})" * bool(f.default)
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, help=meaning, **how)
    parser.add_argument("--sample", metavar="TEXT", help="print this text, continued by the model in --out")


def main(argv: list[str] | None = None) -> int:
    """`python -m helpers.train`: train, or let the trained model write. argv None: use sys.argv. Returns the
    exit status.
    """
    parser = Parser(prog="python -m helpers.train", description=__doc__)
    add_options(parser)
    args = parser.parse_args(argv)
    say = lambda line: None if int(os.environ.get("RANK", 0)) else print(line, file=sys.stderr, flush=True)
    try:
        config = Config(**{f.name: getattr(args, f.name) for f in fields(Config)})
        if args.sample is not None:
            print(sample(Path(config.out), args.sample, say=say), flush=True)
            return 0
        device, where = join(config.timeout)
        say(where)
        trainer = train(config, device, say)
        dist.destroy_process_group()
    except ValueError as e:
        say(str(e))
        return 2
    say(f"{trainer.number} steps under {trainer.config.layout}")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException as e:  # most often another rank is dead
        code = e.code if isinstance(e, SystemExit) else traceback.print_exc() or 1
    os._exit(code or 0)  # at once: remaining threads of a group could abort the interpreter, or block it
