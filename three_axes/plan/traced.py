"""Makes the planner's job for a step that `three_axes.trace` runs with a real model on fake ranks, so that
formulas and trace can be compared.
"""

from __future__ import annotations

from .frameworks import FRAMEWORKS, Framework
from .job import Job
from .layout import Layout
from .memory import stage_memory
from .shape import ModelShape

# A trace uses PyTorch's FSDP and tensor parallelism, as torchtitan does, but a recompute that stops when
# nothing more is needed.
PYTORCH = FRAMEWORKS["torchtitan"].but(name="pytorch", whole_recompute=False)
# Name of a plan for tensor parallelism in `three_axes.trace` -> its framework.
PLANS: dict[str, Framework] = {
    "Megatron's": PYTORCH,
    # Input gradients are summed for each matrix by itself, and embedding and head are not split.
    "usual": PYTORCH.but(merged=False, split_vocabulary=False),
}


def microbatches(pp: int) -> int:
    """Microbatches of a traced step; in a pipeline one more than are in flight, so that sums of gradients
    exist at the peak.
    """
    return 1 if pp == 1 else pp + 1


def traced_job(model: ModelShape, seq_len: int, layout: Layout, plan: str = "Megatron's", **changed) -> Job:
    """The job of the step that `trace` runs. plan: of `PLANS`. changed: fields of the framework."""
    batch = layout.dp * layout.microbatch * microbatches(layout.pp)
    return Job(model, global_batch=batch, seq_len=seq_len, framework=PLANS[plan].but(**changed))


# What plain PyTorch holds and Megatron-LM's fused kernels do not: name -> (part of memory, the change of the
# framework with which it is not held).
_BEYOND = {
    "gathered inputs, kept whole by DTensor": ("activations", {"regathers": True}),
    "SiLU's output, kept beside its input": ("activations", {"fused": True}),
    "scores: more float32 copies, and one in bfloat16": ("logits", {"fused_loss": True}),
    "embedding and head, gathered until the end": ("gathered weights", {"fused_loss": True}),
}


def beyond(model: ModelShape, layout: Layout, seq_len: int) -> dict[str, float]:
    """Name -> bytes that plain PyTorch holds at a trace's peak and Megatron-LM's fused kernels do not."""
    held = lambda **changed: stage_memory(traced_job(model, seq_len, layout, **changed), layout, 0, 0)
    plain = held()
    return {name: float(plain[part] - held(**changed)[part]) for name, (part, changed) in _BEYOND.items()}
