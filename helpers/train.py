"""Train the 4-layer model for real, sharded by (dp, tp, pp), on whatever is there: CPUs over gloo, GPUs over NCCL.

    python -m helpers.train                                                          one process: the twin
    torchrun --nproc-per-node 8 -m helpers.train --dp 2 --tp 2 --pp 2                 eight on one machine
    accelerate launch --multi_gpu --num_processes 8 -m helpers.train --dp 2 --tp 2 --pp 2

On several machines, run the same on each of them (two of four ranks here), where HOST is the name of one of them:

    torchrun --nnodes 1:2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
             --max-restarts 3 -m helpers.train --tp 2 --pp 2 --out /shared/run

dp is left to what is there, so when the machine other than HOST is lost, torchrun starts again on one, and the run goes on
from its last checkpoint with half the data parallelism. HOST itself keeps the list of who is there: without it, start again.

What splits what:

    dp   FSDP2 (`fully_shard`): examples, weights, gradients and optimizer state. `--shard 2` of `--dp 8` keeps 4 replicas
         of 2 shards each; `--shard 1` is plain data parallelism
    tp   DTensor (`parallelize_module`): the matrices of every block; `--sp` also what lies between them
    pp   `torch.distributed.pipelining`: the blocks; `--schedule 1F1B` or `GPipe`

Every layout computes the twin's step: same text, same batch, same weights. The batch of step k depends on the seed
and on k alone, so a run may go on under another layout. Text is bytes, by default this course's own prose.

With `--out run` it writes run/metrics.jsonl, a line for each step, and every `--every` steps a checkpoint
(see `helpers.checkpoint`). Started again with the same `--out` it goes on from the last complete one, and says so.
`--sample "The "` afterwards lets the trained model write, in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from tqdm import tqdm

from . import checkpoint, toy
from .sharding import mesh_of, shard_model, stage_of
from .theory.layout import Layout, check
from .theory.models import ModelShape

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MOST = 10**9  # of any number of a run: steps, seconds, a seed
NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


@dataclass(frozen=True)
class Config:
    """A run. Sizes count sequences and tokens; `batch` is for one step over all ranks, `microbatch` for one rank at a time."""

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
            value, least = getattr(self, f.name), 0 if f.name in ("dp", "shard", "microbatch", "warmup", "seed", "weight_decay") else 1
            if value < least if f.type == "int" else not (value > 0 or value == 0 == least):
                raise ValueError(f"{f.name} must be {'at least ' + str(least) if f.type == 'int' else 'positive'}, not {value}")
            if value > MOST:
                raise ValueError(f"{f.name} must be at most {MOST:,}, not {value}")

    def checked(self, ranks: int) -> Config:
        """With the zeros filled in. Raises ValueError, a sentence with what to do, for what cannot be."""
        if not self.dp and ranks % (self.tp * self.pp) == 0:
            return replace(self, dp=ranks // (self.tp * self.pp)).checked(ranks)
        if (needed := max(1, self.dp) * self.tp * self.pp) != ranks:
            raise ValueError(f"dp·tp·pp = {self.dp or '?'}·{self.tp}·{self.pp}{f' = {needed}' if self.dp else ''}, but {ranks} "
                             f"process{'es were' if ranks > 1 else ' was'} started; start one for each, as torchrun --nproc-per-node {needed}")
        if self.schedule not in SCHEDULES or self.precision not in PRECISIONS:
            raise ValueError(f"schedule is one of {', '.join(SCHEDULES)} and precision one of {', '.join(PRECISIONS)}, not {self.schedule!r} and {self.precision!r}")
        shard = self.shard or self.dp
        if self.dp % shard:
            raise ValueError(f"shard {shard} does not divide dp {self.dp}; the weights are shared out among equal groups")
        share = self.batch // self.dp
        microbatch = self.microbatch or max(1, share if self.pp == 1 else share // (2 * self.pp))
        check(self.shape, Layout(self.dp, self.tp, self.pp, microbatch), self.batch)
        if self.layers % self.pp:
            raise ValueError(f"{self.layers} layers do not divide over {self.pp} stages")
        if self.schedule == "1F1B" and self.batch // (self.dp * microbatch) < self.pp:
            raise ValueError(f"1F1B needs at least as many microbatches as stages: {self.batch // (self.dp * microbatch)} of {microbatch} sequences are too few for "
                             f"{self.pp}; take a smaller microbatch, a larger batch, or --schedule GPipe")
        if self.sp and self.seq_len % self.tp:
            raise ValueError(f"with sequence parallelism tp {self.tp} must divide the sequence of {self.seq_len} tokens")
        return replace(self, shard=shard, microbatch=microbatch)

    @property
    def shape(self) -> ModelShape:
        """The model, for `helpers.theory`."""
        return ModelShape("toy", self.layers, self.hidden, self.heads, toy.VOCABULARY, positions=self.seq_len)

    @property
    def layout(self) -> str:
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}" + " · sp" * self.sp + (f" · shard {self.shard}" if self.shard not in (0, self.dp) else "")

    def model(self) -> toy.ToyTransformer:
        """The whole model, equal wherever it is made."""
        return toy.ToyTransformer(self.hidden, self.heads, self.layers, self.seq_len, self.seed).to(PRECISIONS["float64" if self.precision == "float64" else "float32"])


# -- text --------------------------------------------------------------------------------------

def read_text(file: str = "") -> torch.Tensor:
    """All bytes of a text file, or of the prose of drops 01 to 13: (length,), numbers 0 to 255. Raises ValueError."""
    try:
        if file:
            text = Path(file).read_bytes()
        else:
            books = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(NOTEBOOKS.glob("[01]*.ipynb")) if p.name < "14"]
            text = "\n\n".join("".join(c["source"]) for b in books for c in b["cells"] if c["cell_type"] == "markdown").encode()
    except OSError as e:
        raise ValueError(f"the text {file or NOTEBOOKS} cannot be read ({e.strerror}); give a file with --text") from None
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.zeros(0, dtype=torch.long)


def batch_of(text: torch.Tensor, step: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each (batch, seq_len): the whole batch of a step, the same for every layout."""
    if len(text) < config.seq_len + 2:
        raise ValueError(f"the text has {len(text)} bytes; sequences of {config.seq_len} need at least {config.seq_len + 2}")
    chance = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - config.seq_len, (config.batch, 1), generator=chance)
    at = starts + torch.arange(config.seq_len)
    return text[at], text[at + 1]


# -- one run -----------------------------------------------------------------------------------

def loss_of(scores, targets):
    """Mean cross-entropy, in float32 at least."""
    return toy.loss_of(scores.float() if scores.dtype == torch.bfloat16 else scores, targets)


class Trainer:
    """This rank's share of a run: `step()` until `done`, `save()` and `resume()` in between. Needs a process group.

    `number` counts the steps done. Raises ValueError for a configuration that cannot be.
    """

    def __init__(self, config: Config):
        self.config = config = config.checked(dist.get_world_size())
        self.device = torch.device("cuda", torch.cuda.current_device()) if a_gpu_each() else torch.device("cpu")
        self.text = read_text(config.text)
        batch_of(self.text, 0, config)  # is there enough of it?
        self.mesh = mesh_of(config, self.device.type)
        self.stage_number, self.data_rank = self.mesh.get_local_rank("pp"), self.mesh.get_local_rank("replicate") * config.shard + self.mesh.get_local_rank("shard")
        self.model = shard_model(stage_of(config, self.stage_number).to(self.device), config, self.mesh)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
        self.microbatches = config.batch // config.dp // config.microbatch
        self.number = 0
        if config.pp > 1:
            stage = PipelineStage(self.model, self.stage_number, config.pp, self.device, group=self.mesh.get_group("pp"))
            self.pipeline = SCHEDULES[config.schedule](stage, self.microbatches, loss_fn=loss_of)

    def _groups(self) -> list[dict]:
        """Parameters that are split over the same axes together: AdamW takes each group in one go, and cannot mix meshes."""
        groups: dict[tuple, list] = {}
        for p in self.model.parameters():
            groups.setdefault(p.device_mesh.mesh_dim_names, []).append(p)
        return [{"params": group} for group in groups.values()]

    @property
    def done(self) -> bool:
        return self.number >= self.config.steps

    def step(self) -> dict:
        """One step. Returns its step number, loss, gradient norm before clipping, and learning rate, the same on every rank."""
        c = self.config
        whole = batch_of(self.text, self.number, c)
        tokens, targets = (each.chunk(c.dp)[self.data_rank].to(self.device) for each in whole)
        loss = self._forward_backward(tokens, targets)
        # What every rank must know goes in one all-reduce of two numbers.
        sums = torch.stack([loss / (c.dp * c.tp), self._my_squares()]).to(torch.float64 if self.device.type == "cpu" else torch.float32)
        dist.all_reduce(sums)
        loss, norm = sums[0].item(), sums[1].sqrt().item()
        for p in self.model.parameters():
            p.grad.to_local().mul_(min(1.0, c.clip / (norm + 1e-6)))
        rate = learning_rate(self.number, c)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return {"step": self.number, "loss": loss, "grad_norm": norm, "lr": rate}

    def _forward_backward(self, tokens, targets):
        """The mean loss of this rank's share, 0 where another stage knows it."""
        if self.config.pp == 1:
            total = 0.0
            for i, (x, y) in enumerate(zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches))):
                self.model.set_requires_gradient_sync(i == self.microbatches - 1)  # gradients add up here, and travel once
                loss = loss_of(self.model(x), y) / self.microbatches
                loss.backward()
                total = total + loss.detach()
            return total
        losses: list[torch.Tensor] = []
        last = self.stage_number == self.config.pp - 1
        self.pipeline.step(*([tokens] if self.stage_number == 0 else []), target=targets if last else None, losses=losses)
        return torch.stack(losses).detach().mean() if last else torch.zeros((), device=self.device)

    def _my_squares(self):
        """The squares of this rank's gradients, summed; what c ranks hold alike counts 1/c on each, so that all ranks' sum is the model's."""
        squares = 0.0
        for p in self.model.parameters():
            shards = math.prod(p.device_mesh.size(i) for i, place in enumerate(p.placements) if not place.is_replicate())
            copies = self.config.dp * self.config.tp / shards
            squares = squares + p.grad.to_local().square().sum() / copies
        return squares

    # -- checkpoints

    def save(self) -> Path:
        """Write a checkpoint. Raises `checkpoint.SaveFailed`."""
        return checkpoint.save(Path(self.config.out), self.number, self.model, self.optimizer, {"model": self.sizes, "layout": self.config.layout})

    def resume(self, folder: Path) -> str:
        """Go on from a checkpoint, of whatever layout. Returns which layout wrote it. Raises ValueError."""
        about = checkpoint.read_about(folder)
        if about["model"] != self.sizes:
            raise ValueError(f"{folder} holds a model of {about['model']}, this run wants {self.sizes}; give the same sizes, or another --out")
        checkpoint.load(folder, self.model, self.optimizer)
        self.number = about["step"]
        return about["layout"]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self.config, name) for name in ("hidden", "heads", "layers", "seq_len")}


def learning_rate(step: int, config: Config) -> float:
    """Up in a straight line for `warmup` steps, then down a half cosine to a tenth at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, share)))


def train(config: Config, say: Callable[[str], None] = lambda line: None) -> Trainer:
    """A whole run on this rank. `say` gets a line when something happens that one should know; call it on rank 0.

    Raises ValueError for a configuration, a text, a folder or a checkpoint that will not do, and where the loss is no number any more.
    """
    trainer = Trainer(config)
    config, chief = trainer.config, dist.get_rank() == 0
    run = Path(config.out) if config.out else None
    if run:  # on every rank, so that all of them end where it cannot be
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"{run} cannot be the run's folder: {e.strerror}") from None
    if run and (found := checkpoint.complete(run)):
        layout = trainer.resume(found[-1])
        say(f"going on from {found[-1].name}, the last complete checkpoint (written under {layout})")
    if chief and run:
        keep_metrics(run, trainer.number)
    bar = tqdm(total=config.steps, initial=trainer.number, unit="step", disable=None if chief else True)
    with bar, open(run / "metrics.jsonl", "a") if chief and run else open(os.devnull, "w") as metrics:
        unsaved = None
        while not trainer.done:
            start = time.perf_counter()
            line = trainer.step()
            if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
                raise ValueError(f"step {trainer.number} has a loss of {line['loss']} and a gradient norm of {line['grad_norm']}, so training has ended; "
                                 "nothing was saved after it. Take a smaller lr")
            line |= {"seconds": time.perf_counter() - start}
            line |= {"tokens_per_second": config.batch * config.seq_len / line["seconds"]}
            print(json.dumps(line), file=metrics, flush=True)
            bar.update()
            bar.set_postfix(loss=f"{line['loss']:.3f}")
            if run and (trainer.number % config.every == 0 or trainer.done):
                try:
                    trainer.save()
                    unsaved = None
                except checkpoint.SaveFailed as e:
                    unsaved = e
                    say(f"{e}; training goes on, and the checkpoints before it are untouched")
    if unsaved:
        raise ValueError(f"training has ended, but its last checkpoint is missing: {unsaved}")
    return trainer


def keep_metrics(run: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will do again, and one that was cut short."""
    file = run / "metrics.jsonl"
    kept = [line for line in read_metrics(run) if line["step"] <= step]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics, without one that is not yet whole."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else ():
        try:
            metrics = json.loads(line)
            metrics["step"]
        except (ValueError, TypeError, KeyError):
            break
        found.append(metrics)
    return found


def sample(run: Path, prompt: str = "The ", length: int = 200, seed: int = 0) -> str:
    """What the model of the last complete checkpoint writes after `prompt`, in one process. Raises ValueError."""
    if not (found := checkpoint.complete(run)):
        raise ValueError(f"{run} has no complete checkpoint yet")
    sizes = checkpoint.read_about(found[-1])["model"]
    return write(checkpoint.load_weights(found[-1], toy.ToyTransformer(**sizes)), prompt, length, seed)


@torch.no_grad()
def write(model: toy.ToyTransformer, prompt: str, length: int, seed: int = 0) -> str:
    """`prompt`, and `length` bytes that the model puts behind it."""
    said, chance = list(prompt.encode()) or [10], torch.Generator().manual_seed(seed)
    for _ in range(length):
        scores = model(torch.tensor([said[-model.seq_len:]]))[0, -1]
        said.append(torch.multinomial((scores / 0.7).softmax(-1), 1, generator=chance).item())
    return bytes(said).decode(errors="replace")


# -- processes ---------------------------------------------------------------------------------

def a_gpu_each(ranks: int = 0) -> bool:
    """Whether this machine has a GPU for each of its ranks (0: as many as were started here)."""
    ranks = ranks or int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


def join_group(timeout: float) -> None:
    """Join the group that torchrun or accelerate has started, or make one of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if a_gpu_each() else "gloo"
    if a_gpu_each():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        store, rank, n = next(dist.rendezvous("env://", timeout=timedelta(seconds=max(60.0, timeout))))
        store = dist.PrefixStore(agree_on_attempt(store, rank, n), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def agree_on_attempt(store: dist.Store, rank: int, n: int) -> str:
    """A name that the n ranks which are starting have in common, and none that was started before them.

    torchrun keeps one store for all its restarts, and gloo would look up the addresses of ranks that are dead. So every rank asks with
    a token of its own, and rank 0 answers each until it has come. Raises DistNetworkError when a rank does not within the store's timeout.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"asks/{rank}", token)
        name = store.get(f"answer/{token}").decode()
        store.set(f"{name}/came/{rank}", "")
        return name
    name, missing = uuid.uuid4().hex, set(range(1, n))
    deadline = time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in list(missing):
            if store.check([f"asks/{other}"]):  # perhaps of a dead rank; the answer is then read by nobody
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
            if store.check([f"{name}/came/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistNetworkError(f"timed out waiting for ranks {sorted(missing)} of {n}")
        time.sleep(0.01)
    return name


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m helpers.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Config):
        option = {"action": "store_true"} if f.type == "bool" else {"type": {"int": int, "float": float, "str": str}[f.type], "metavar": f.type}
        made.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, help=f"default {f.default!r}", **option)
    made.add_argument("--sample", metavar="TEXT", help="let the model of --out go on with this text, and end")
    return made


def main(argv: list[str] | None = None) -> int:
    args = vars(parser().parse_args(argv))
    prompt = args.pop("sample")
    chief = os.environ.get("RANK", "0") == "0"
    say = lambda line: print(line, file=sys.stderr, flush=True) if chief else None
    try:
        config = Config(**args)
        if prompt is not None:
            if not config.out:
                raise ValueError("--sample needs --out, the folder of a run")
            print(sample(Path(config.out), prompt))
            return 0
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        join_group(config.timeout)
        trainer = train(config, say)
        say(f"{trainer.number} steps under {trainer.config.layout}")
    except ValueError as e:
        say(str(e))
        return 2
    except RuntimeError as e:
        if not lost_contact(e):
            raise
        saved = checkpoint.complete(Path(config.out)) if config.out else []
        print(f"rank {os.environ.get('RANK', '0')} has lost the others ({str(e).strip().splitlines()[0]}). "
              + (f"{saved[-1].name} is complete: start the same command again to go on from it." if saved else "There is no checkpoint to go on from."),
              file=sys.stderr, flush=True)
        os._exit(1)  # a broken group cannot be left in good order
    dist.destroy_process_group()
    return 0


def lost_contact(e: RuntimeError) -> bool:
    """Whether an error says that another rank is gone, and not that something is wrong here."""
    gloo = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout", "no route to host", "unreachable")
    return isinstance(e, (dist.DistBackendError, dist.DistNetworkError)) or any(word in str(e).lower() for word in gloo)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a thread of gloo's that still holds a Python object would abort an interpreter on its way out
