"""Drop 10's run at true size, by theory: what a 13B holds in a usual batch and in the one at step 4,000."""

from __future__ import annotations

from dataclasses import replace

from ....table import Table, human
from ....theory import CLUSTERS, Estimate, Job, Layout, estimate
from ....theory.models import find_model

MODEL, CLUSTER, BATCH = find_model("llama-2-13b"), CLUSTERS["dgx-a100"], 64
LAYOUT = Layout(dp=4, tp=2, zero=1, microbatch=4)  # eight A100s in one node
USUAL, LONGEST = 1024, 5120  # tokens of the longest sequence of a batch, to which all are padded


def held(tokens: int, **changed) -> Estimate:
    """The run with batches padded to `tokens`; changed: fields of its layout."""
    return estimate(Job(MODEL, CLUSTER, BATCH, tokens), replace(LAYOUT, **changed))


def the_13b() -> Table:
    """One GPU's bytes in the usual batch, in the long one, and in the long one with each remedy."""
    cases = {
        "usual": held(USUAL),
        "long": held(LONGEST),
        "long, DP 8 on 16 GPUs": held(LONGEST, dp=8),
        "long, ZeRO-3": held(LONGEST, zero=3),
        "long, microbatches of 1": held(LONGEST, microbatch=1),
        "long, recompute": held(LONGEST, recompute="full"),
    }
    rows = []
    for name, e in cases.items():
        states = sum(e.memory[kind] for kind in ("weights", "gradients", "optimizer"))
        activations = e.memory["activations"]
        rest = e.memory_bytes - states - activations
        rows.append(
            [name, *map(human, (states, activations, rest, e.memory_bytes)), "fits" if e.fits else "too much"]
        )
    return Table(
        ["batch", "states", "activations", "rest", "a GPU", f"of {human(CLUSTER.device.memory)}"],
        rows,
        title=(
            f"{MODEL.name} on eight A100s: DP 4 · TP 2 with ZeRO-1, 4 sequences a rank, padded to"
            f" {USUAL:,} or {LONGEST:,} tokens"
        ),
    )


def last_lines() -> str:
    """The end of such a run's log, with the memory that theory gives for each batch."""
    lines = [
        f"step {step}  longest sequence {tokens:>5,}  peak {held(tokens).memory_bytes / 1e9:.1f} GB"
        for step, tokens in ((3997, 960), (3998, 1024), (3999, 896))
    ]
    e, room = held(LONGEST), CLUSTER.device.memory
    lines.append(
        f"step 4000  longest sequence {LONGEST:,}  OutOfMemoryError: needs {human(e.memory_bytes)} of"
        f" {human(room)}"
    )
    return "\n".join(lines)
