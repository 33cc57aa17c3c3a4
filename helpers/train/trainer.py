"""One rank's share of a run: the split model, its optimizer, and a step."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from three_axes import devices, pytorch_private

from .. import toy
from . import checkpoint
from .checkpoint import Background
from .config import Config
from .context import places_of, split_sequence
from .data import SAMPLE, batch_of, read_text, read_tokens
from .sharding import local, mesh_of, shard_model, shards_of, splits_of, stage_of, synchronizes

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
CHANGES_LOSSES = ("batch", "precision", "seed", "lr", "warmup", "schedule_steps", "weight_decay", "clip")


def loss_of(scores, targets):
    """Mean cross-entropy, in float32 at least."""
    return toy.loss_of(scores.float() if scores.dtype == torch.bfloat16 else scores, targets)


class Trainer:
    """This rank's share of a run: `step()` until `done`, `save()`, `saved()` and `resume()` in between. Needs
    a process group.

    device: this rank's own; the group must carry its tensors. `number` counts the steps done. `stopping`: a
    rank asked in the last step to stop, and all know it.
    Raises ValueError for a configuration that cannot be.
    """

    def __init__(self, config: Config, device: torch.device = devices.CPU):
        self.config = config = config.checked(dist.get_world_size())
        self.device = device
        torch.backends.cuda.matmul.allow_tf32 = False  # its ten bits would part a layout from the twin
        self.text = read_tokens(config.tokens, config.vocabulary) if config.tokens else read_text(config.text)
        batch_of(self.text, 0, config)  # is there enough of it?
        self.mesh = mesh_of(config, self.device.type)
        self.stage_number = self.mesh.get_local_rank("pp")
        replica = self.mesh.get_local_rank("replicate") * config.shard + self.mesh.get_local_rank("shard")
        self.data_rank, context_rank = divmod(replica, config.cp)
        self.places = places_of(config)[context_rank]
        stage = stage_of(config, self.stage_number).to(self.device)
        split_sequence(stage, config)
        for part in stage if config.compile else ():
            if isinstance(part, toy.Block):
                part.compile()
        self.model = shard_model(stage, config, self.mesh)
        self.optimizer = torch.optim.AdamW(
            self._groups(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.microbatches = config.batch // config.dp // config.microbatch
        self.number, self.stopping = 0, False
        self.background = Background(config.timeout) if config.async_save else None
        if config.pp > 1:
            stage = PipelineStage(
                self.model, self.stage_number, config.pp, self.device, group=self.mesh.get_group("pp")
            )
            self.pipeline = SCHEDULES[config.schedule](stage, self.microbatches, loss_fn=loss_of)

    def _groups(self) -> list[dict]:
        """Parameters that are split over the same axes together: AdamW takes each group in one go, and cannot
        mix meshes.
        """
        groups: dict[tuple, list] = {}
        for p in self.model.parameters():
            groups.setdefault(splits_of(p), []).append(p)
        return [{"params": group} for group in groups.values()]

    @property
    def done(self) -> bool:
        """Whether `steps` steps are done, with those before `resume`."""
        return self.number >= self.config.steps

    def step(self, stop: bool = False) -> dict:
        """One step.

        stop: this rank was asked to stop. Returns its step number, loss, gradient norm before clipping, and
        learning rate, the same on every rank.
        """
        c = self.config
        whole = batch_of(self.text, self.number, c)
        tokens, targets = (rows.chunk(c.dp)[self.data_rank][:, self.places].to(self.device) for rows in whole)
        loss = self._forward_backward(tokens, targets)
        # What every rank must know goes in one all-reduce of three numbers.
        asked = torch.tensor(float(stop), device=self.device)
        sums = torch.stack([loss / (c.replicas * c.tp), self._my_squares(), asked]).double()
        dist.all_reduce(sums)
        loss, norm, self.stopping = sums[0].item(), sums[1].sqrt().item(), sums[2].item() > 0
        pytorch_private.scale(self._my_gradients(), min(1.0, c.clip / (norm + 1e-6)))
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
            for i, (x, y) in enumerate(
                zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches))
            ):
                with synchronizes(self.model, last=i == self.microbatches - 1):
                    loss = loss_of(self.model(x), y) / self.microbatches
                    loss.backward()
                total = total + loss.detach()
            return total
        losses: list[torch.Tensor] = []
        last = self.stage_number == self.config.pp - 1
        self.pipeline.step(
            *([tokens] if self.stage_number == 0 else []), target=targets if last else None, losses=losses
        )
        return torch.stack(losses).detach().mean() if last else torch.zeros((), device=self.device)

    def _my_gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self.model.parameters()]

    def _my_squares(self):
        """The squares of this rank's gradients, summed; what c ranks hold alike counts 1/c on each, so that
        all ranks' sum is the model's.
        """
        norms = torch.stack(pytorch_private.norms(self._my_gradients()))
        shards = [shards_of(p) for p in self.model.parameters()]
        return (norms.square() * norms.new_tensor(shards)).sum() / (self.config.replicas * self.config.tp)

    # -- checkpoints

    def save(self) -> None:
        """Write a checkpoint. Raises `checkpoint.SaveFailed`: of this one, or, where checkpoints are written
        in the background, not before `saved()`.
        """
        run, number, config = Path(self.config.out), self.number, self.config
        about = {"model": config.sizes, "layout": config.layout, "text": self._text(), "with": self._with()}

        def write(state: dict, group: dist.ProcessGroup | None = None) -> None:
            checkpoint.write(run, number, state, about, group)
            if config.keep and dist.get_rank() == 0:
                checkpoint.prune(run, config.keep)

        state = checkpoint.state_of(self.model, self.optimizer)
        self.background.begin(write, state) if self.background else write(state)

    def saved(self) -> None:
        """Wait for a checkpoint that is written in the background. Raises `checkpoint.SaveFailed`."""
        if self.background:
            self.background.finish()

    def _text(self) -> dict:
        """What this run learns from."""
        some = self.text[:: 1 + len(self.text) // SAMPLE].to(torch.int32)
        digest = hashlib.sha256(some.numpy().tobytes()).hexdigest()
        return {"file": self.config.text or self.config.tokens, "tokens": len(self.text), "sha256": digest}

    def _with(self) -> dict:
        """What a run may change when it goes on, and what then changes its losses."""
        return {name: getattr(self.config, name) for name in CHANGES_LOSSES}

    def resume(self, folder: Path) -> str:
        """Go on from a checkpoint, of whatever layout. Returns how it was written: its layout, and what this
        run has otherwise.

        Raises `checkpoint.Damaged`, and ValueError for one of another model or text.
        """
        about = checkpoint.read_about_together(folder)
        if about["model"] != self.config.sizes:
            raise ValueError(
                f"{folder} holds a model of {about['model']}, this run wants {self.config.sizes}; give the"
                " same sizes, or another --out"
            )
        # The course's own prose may have grown since: that is no other text.
        there, here = about.get("text"), self._text()
        if there and there["sha256"] != here["sha256"] and (there["file"] or here["file"]):
            name = lambda text: f"{text['file'] or 'the course'} ({text['tokens']:,} tokens)"
            raise ValueError(
                f"{folder} learned from {name(there)}, this run would go on with {name(here)}; give the same"
                " --text, or another --out"
            )
        checkpoint.load(folder, self.model, self.optimizer)
        self.number = about["step"]
        now = self._with()
        changed = [
            f"{name} {was}, now {now[name]}" for name, was in about["with"].items() if was != now[name]
        ]
        return "; ".join([f"written under {about['layout']}", *changed])


def learning_rate(step: int, config: Config) -> float:
    """Up in a straight line for `warmup` steps, then down a half cosine to a tenth at `schedule_steps`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    last = config.schedule_steps or config.steps
    share = (step - config.warmup) / max(1, last - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, share)))
