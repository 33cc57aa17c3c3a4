"""A whole run: from the last checkpoint to the last step, and what the trained model writes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from three_axes import devices

from .. import toy
from . import checkpoint
from .config import Config
from .metrics import metrics_of, read_metrics
from .owner import Owner, owning
from .stop import Stop
from .trainer import Trainer

EVERY = 10.0  # seconds from one line of a log to the next
tqdm.set_lock(threading.RLock())  # its own is for several processes, and outlives a rank that is killed


def train(
    config: Config,
    device: torch.device = devices.CPU,
    say: Callable[[str], None] = lambda line: None,
    watched: Callable[[], AbstractContextManager] = nullcontext,
    stop: Stop | None = None,
) -> Trainer:
    """A whole run on this rank, or as much of it as is done when a rank is asked to stop.

    device: see `Trainer`. say: gets a line when something happens that one should know. watched: makes the
    block in which each step runs. stop: when it is asked, all ranks end after the same step, with a
    checkpoint. Raises ValueError for a configuration, a text, a folder or a checkpoint that will
    not do, and where the loss is no number any more.
    """
    trainer = Trainer(config, device)
    config, chief = trainer.config, dist.get_rank() == 0
    run = Path(config.out) if config.out else None
    if run:  # on every rank, so that all of them end where it cannot be
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"{run} cannot be the run's folder: {e.strerror}") from None
    with _alone_in(run, chief) as owner:
        return _train(trainer, run, chief, owner, say, watched, stop or Stop())


@contextmanager
def _alone_in(run: Path | None, chief: bool) -> Iterator[Owner | None]:
    """The chief owns the folder; where it cannot, every rank raises what it was told."""
    with ExitStack() as stack:
        owner, refused = None, [None]
        if chief and run:
            try:
                steps = [line["step"] for line in read_metrics(run)]
                owner = stack.enter_context(owning(run, steps[-1] if steps else 0))
            except ValueError as e:
                refused = [str(e)]
        if run:
            dist.broadcast_object_list(refused, 0)
        if refused[0]:
            raise ValueError(refused[0])
        yield owner


def _train(
    trainer: Trainer, run: Path | None, chief: bool, owner: Owner | None, say, watched, stop
) -> Trainer:
    config = trainer.config
    if run:
        _go_on(trainer, run, chief, say)
    bar = tqdm(total=config.steps, initial=trainer.number, unit="step", disable=None if chief else True)
    told, first, begun = time.monotonic(), trainer.number, time.monotonic()
    with bar, metrics_of(run, trainer.number, say) if chief and run else nullcontext() as metrics:
        unsaved = None
        while not (trainer.done or trainer.stopping):
            start = time.perf_counter()
            with watched():
                line = trainer.step(stop.signal != 0)
            if trainer.stopping:
                stop.agreed()
            if owner:
                owner.check()
            if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
                _told(trainer.saved, say, last=True)
                raise ValueError(
                    f"step {trainer.number} has a loss of {line['loss']} and a gradient norm of"
                    f" {line['grad_norm']}, so training has ended; nothing was saved after it. Take a"
                    " smaller lr"
                )
            line |= {"seconds": time.perf_counter() - start}
            line |= {"tokens_per_second": config.batch * config.seq_len / line["seconds"]}
            if metrics:
                metrics.write(line)
            bar.update()
            bar.set_postfix(loss=f"{line['loss']:.3f}")
            now = time.monotonic()
            if chief and bar.disable and now - told >= EVERY:  # a log has no bar
                told, left = now, (config.steps - trainer.number) * (now - begun) / (trainer.number - first)
                say(
                    f"step {trainer.number} of {config.steps}: loss {line['loss']:.3f},"
                    f" {line['tokens_per_second']:,.0f} tokens/s, {left:.0f} s left"
                )
            if run and (trainer.number % config.every == 0 or trainer.done or trainer.stopping):
                last = trainer.done or trainer.stopping
                _told(trainer.saved, say, last)  # the one before, where they are written in the background
                unsaved = _told(trainer.save, say, last)
                if last and not unsaved:
                    unsaved = _told(trainer.saved, say, last)
    if unsaved:
        raise ValueError(f"training has ended, but its last checkpoint is missing: {unsaved}")
    return trainer


def _go_on(trainer: Trainer, run: Path, chief: bool, say) -> None:
    """From the last checkpoint that is what was saved; those after it lose their names. Raises ValueError
    where there are some, and none is.
    """
    damaged: dict[Path, checkpoint.Damaged] = {}
    for folder in reversed(checkpoint.complete(run)):
        try:
            written = trainer.resume(folder)
        except checkpoint.Damaged as e:
            damaged[folder] = e
            continue
        for other, e in damaged.items():
            if chief:
                with suppress(OSError):  # nobody may rename here; the next start finds it damaged again
                    checkpoint.set_aside(other)
            say(f"{e}; it is put aside as {other.name}{checkpoint.DAMAGED}")
        say(f"going on from {folder.name}, the last complete checkpoint ({written})")
        return
    if damaged:
        raise ValueError(
            f"{next(iter(damaged.values()))}; no other complete one is there. To begin anew, give another"
            " --out"
        )


def _told(save: Callable[[], None], say, last: bool) -> checkpoint.SaveFailed | None:
    """What `save` failed with, said to the user."""
    try:
        save()
    except checkpoint.SaveFailed as e:
        say(f"{e}; the checkpoints before it are untouched{'' if last else ', and training goes on'}")
        return e


def sample(
    run: Path,
    prompt: str = "The ",
    length: int = 200,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """What the model of the last complete checkpoint writes after `prompt`, in one process: see `last_model`.
    Raises ValueError for one whose tokens are no bytes.
    """
    model = last_model(run, say)
    if model[-1].score.out_features != toy.VOCABULARY:
        raise ValueError("its tokens are no bytes, so it can write nothing here; --export it")
    return write(model, prompt, length, seed)


def last_model(run: Path, say: Callable[[str], None] = lambda line: None) -> toy.ToyTransformer:
    """The model of the last complete checkpoint, whole.

    say: gets a line for each checkpoint that is damaged. Raises ValueError where none is whole.
    """
    for folder in reversed(checkpoint.complete(run)):
        try:
            sizes = checkpoint.read_about(folder)["model"]
        except checkpoint.Damaged as e:
            say(f"{e}; the one before it is taken")
        else:
            return checkpoint.load_weights(folder, toy.ToyTransformer(**sizes))
    raise ValueError(f"{run} has no complete checkpoint")


@torch.no_grad()
def write(model: toy.ToyTransformer, prompt: str, length: int, seed: int = 0) -> str:
    """`prompt`, and `length` bytes that the model puts behind it."""
    written, chance = list(prompt.encode()) or [10], torch.Generator().manual_seed(seed)
    for _ in range(length):
        scores = model(torch.tensor([written[-model.seq_len :]]))[0, -1]
        written.append(torch.multinomial((scores / 0.7).softmax(-1), 1, generator=chance).item())
    return bytes(written).decode(errors="replace")
