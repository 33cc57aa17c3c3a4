"""Finds changes with which a job fits in the GPUs' memory. It plans the job with each, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .candidates import passed_over
from .job import Job, Lora
from .layout import Axes

MORE_GPUS = (2, 4, 8, 16, 32, 64)  # the number of GPUs is multiplied by each of these in turn


def remedies(job: Job, gpus: int, fits: Callable[..., bool], **only) -> list[str]:
    """At most three phrases: the first helpful change that leaves the training as it is, the first helpful
    number of GPUs, and the first helpful change of what is trained. fits: whether (job, gpus, **only) has a
    layout that fits. only: fixed sizes of axes.
    """
    kinds = (_same(job, gpus, only), _more(job, gpus, only), _less(job, gpus, only))
    helping = (next((words for words, *changed in kind if _tried(fits, *changed)), None) for kind in kinds)
    return [words for words in helping if words]


def _tried(fits: Callable[..., bool], job: Job, gpus: int, only: dict) -> bool:
    """Whether a changed job fits; impossible sizes do not."""
    try:
        return fits(job, gpus=gpus, **only)
    except ValueError:
        return False


def _same(job: Job, gpus: int, only: dict) -> Iterator[tuple]:
    """Changes that leave the training as it is, the cheapest in seconds first: (phrase, job, gpus, only)."""
    f = job.framework
    other = lambda **changed: replace(job, framework=f.but(**changed))
    if "full" not in f.offers.recomputes:
        yield "with recompute full", other(recomputes=(*f.offers.recomputes, "full")), gpus, only
    if f.sends.fsdp and not f.sends.reduces_each:
        reduced = "with gradients reduced in each microbatch (--with sync-each-batch)"
        yield reduced, other(reduces_each=True), gpus, only
    for axis, size in passed_over(job, gpus, only):
        yield f"with {axis} {size}", job, gpus, {**only, axis: size}
    for axis in (axis for axis in Axes._fields if axis in only):
        free = {name: size for name, size in only.items() if name != axis}
        yield f"with another {axis} than {only[axis]}", job, gpus, free
    if not f.holds.offload:
        yield "with the optimizer on the host (--with offload)", other(offload=True), gpus, only


def _more(job: Job, gpus: int, only: dict) -> Iterator[tuple]:
    """More GPUs, with the same batch."""
    for times in MORE_GPUS:
        yield f"from {gpus * times} GPUs on", job, gpus * times, only


def _less(job: Job, gpus: int, only: dict) -> Iterator[tuple]:
    """Changes to what is trained, or how."""
    if not job.framework.holds.eight_bit and not job.lora:
        eight = replace(job, framework=job.framework.but(eight_bit=True))
        yield "with 8-bit Adam (--with 8-bit-adam)", eight, gpus, only
    if not job.lora:
        yield "with LoRA (--lora 16)", replace(job, lora=Lora(16)), gpus, only
    if not (job.lora and job.lora.four_bit):
        lora = replace(job.lora or Lora(16), four_bit=True)
        yield "with QLoRA (--lora 16 --with 4-bit)", replace(job, lora=lora), gpus, only
