"""Runs a real model as one rank of many, under PyTorch's own FSDP2 and tensor parallelism, without the other
ranks and without the memory.

`trace(find_model("llama-3-70b"), Layout(dp=8, tp=8, zero=3), seq_len=8192)` builds all 80 layers, splits them
with `parallelize_module` and `fully_shard` as a training script would, and runs one forward and backward.
Tensors are fake: they have a shape and a type, but no numbers. The process group is fake too: it claims that
all 64 ranks exist, and every collective ends at once. PyTorch's code is real, so its requests can be counted:
each collective, and each tensor that is made and freed.

A trace runs in a process of its own, since a process can have only one default group. One rank is enough,
because all ranks do the same under FSDP and tensor parallelism.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version

from ..paper.collectives import algorithmic_bytes
from ..paper.schedules import one_f_one_b
from ..plan.layout import Layout
from ..plan.models import ModelShape
from ..plan.possible import check
from ..plan.stages import layers_on_rank
from ..plan.traced import PLANS, microbatches
from ..plan.traffic import Calls
from ..table import Table, human


@dataclass
class Trace:
    """What one of `layout.ranks` ranks requested in a step. params: of the model; in a pipeline, of the first
    stage. memory: use -> bytes, at the peak.
    """

    model: ModelShape
    layout: Layout
    seq_len: int
    params: int
    calls: list[Calls]
    memory: dict[str, float]
    seconds: float = field(compare=False)  # duration of the tracing
    resident: int = field(compare=False)  # largest memory of the tracing process, in bytes

    @property
    def peak(self) -> float:
        """Bytes at the peak, of all kinds together."""
        return sum(self.memory.values())

    def count(self, op: str, axis: str) -> int:
        """Calls of a collective along an axis."""
        return sum(c.calls for c in self.calls if (c.op, c.axis) == (op, axis))

    def _sent(self, call: Calls) -> float:
        return algorithmic_bytes(call.op, call.payload, self.layout.members(call.axis))

    def table(self) -> Table:
        """A row for each collective and axis."""
        return Table(
            ["collective", "axis", "calls", "whole tensors", "sent by this rank"],
            [[c.op, c.axis, str(c.calls), human(c.payload), human(self._sent(c))] for c in self.calls],
            title=(
                f"{self.model.name}, one of {self.layout.ranks} ranks, one step of {self.layout.microbatch} ×"
                f" {self.seq_len} tokens"
            ),
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def trace(
    model: ModelShape, layout: Layout, *, seq_len: int, plan: str = "Megatron's", gradient_bytes: int = 4
) -> Trace:
    """Trace a step with one microbatch of `model` under FSDP (zero 3) over dp and tensor parallelism over tp.

    With pp above 1 the first stage is traced, with pp + 1 microbatches by 1F1B: it sends activations to the
    next stage, and receives gradients from it. Each weight is gathered once and each gradient reduced once,
    as torchtitan does in a pipeline.

    plan: "Megatron's" communicates once at each end of a pair of matrices, and splits vocabulary and loss;
    "usual" is the plan of PyTorch's tutorials, for each matrix by itself, with embedding and head whole.
    gradient_bytes: of a number in a gradient that is sent, 4 as in torchtitan, or 2. Raises ValueError for
    what cannot be traced, such as stages in chunks, ZeRO below 3, sizes that do not divide, and PyTorch
    before 2.11; RuntimeError if the process of the trace fails.
    """
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 11):
        raise ValueError(
            "a trace needs PyTorch 2.11 or newer, whose collectives take fake tensors; this is"
            f" {version('torch')}"
        )
    check(model, layout)
    if model.experts and (layout.ranks > layout.dp or layout.etp > 1 or layout.edp < 2):
        raise ValueError(
            "a trace with experts is of FSDP and ep: tp, pp, cp and etp 1, and ep below dp, so that experts"
            f" have replicas; not {layout.axes}"
        )
    if layout.chunks != 1 or layout.zero != 3:
        raise ValueError(
            "a trace is of FSDP, tensor parallelism and a first stage in one piece: zero 3 and interleave 1,"
            f" not zero {layout.zero} and {layout.chunks} chunks"
        )
    if layout.recompute not in ("none", "full") or layout.recomputed:
        raise ValueError(
            f"a trace recomputes all of a layer ('full') or nothing ('none'), not {layout.recompute!r}"
        )
    if model.kv_heads % layout.tp or model.vocab % layout.tp:
        raise ValueError(
            f"tp {layout.tp} must divide {model.kv_heads} key/value heads and a vocabulary of {model.vocab}"
        )
    if plan not in PLANS or plan == "usual" and layout.sequence_parallel:
        raise ValueError(
            f"plan {plan!r}: plans are {' and '.join(map(repr, PLANS))}, and the usual one goes without"
            " sequence parallelism"
        )
    if layout.sequence_parallel and seq_len % layout.tp:
        raise ValueError(
            f"with sequence parallelism tp {layout.tp} must divide the sequence of {seq_len} tokens"
        )
    done = subprocess.run(
        [sys.executable, "-c", "from three_axes.trace.run import answer; answer()"],
        input=pickle.dumps((model, layout, seq_len, plan, gradient_bytes)),
        capture_output=True,
        timeout=300,
        # The process uses this process's import path, so it also works where the first cell fetched the
        # course.
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    if done.returncode:
        raise RuntimeError(f"the trace failed: {done.stderr.decode(errors='replace').strip()}")
    return pickle.loads(done.stdout)


# -- the other process -------------------------------------------------------------------------


def answer() -> None:
    """Run the trace that `trace` pickled into standard input, and print the pickled Trace."""
    with redirect_stdout(sys.stderr):
        traced = trace_here(*pickle.load(sys.stdin.buffer))
    pickle.dump(traced, sys.stdout.buffer)


def trace_here(model: ModelShape, layout: Layout, seq_len: int, plan: str, gradient_bytes: int = 4) -> Trace:
    """Run the trace without checks, in this process, which must have no process group."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    from ..pytorch_private import join_fake_ranks
    from .traced_experts import shard_experts, with_experts
    from .traced_model import Transformer, parallelize
    from .watch import Recording

    start = time.perf_counter()
    join_fake_ranks(layout.ranks)
    axes, piped = ("pp", "dp", "tp"), layout.pp > 1
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=axes)
    axis_of: dict[str, str] = {mesh.get_group(axis).group_name: axis for axis in axes}
    if model.experts:
        folded = init_device_mesh("cpu", (layout.edp, layout.ep), mesh_dim_names=("edp", "ep"))
        axis_of |= {folded.get_group(axis).group_name: axis for axis in ("edp", "ep")}
    with torch.device("meta"):
        first = int(layers_on_rank(model, layout, 0)) if piped else None
        net = Transformer(model, layout.recompute == "full", first)
        if model.experts:
            with_experts(net, model, folded.get_group("ep"))
    params = sum(p.numel() for p in net.parameters())
    if model.experts:
        params += (layout.ep - 1) * sum(p.numel() for p in net.parameters() if p.dim() == 3)  # on others
    if layout.tp > 1:
        parallelize(net, mesh["tp"], layout.sequence_parallel, plan)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16 if gradient_bytes == 2 else torch.float32
    )
    if model.experts:
        shard_experts(net, folded["edp"], policy)
    for part in (*net.layers, net):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False if piped else None)
    with FakeTensorMode(allow_non_fake_inputs=True), Recording(axis_of) as watch:
        net.to_empty(device="cpu")
        watch.set_kind(net.parameters(), "weights")
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        watch.set_kind((p.grad for p in net.parameters()), "gradients")
        watch.set_kind((s for state in optimizer.state.values() for s in state.values()), "optimizer")
        watch.start()
        tokens = torch.zeros(layout.microbatch, seq_len, dtype=torch.long)
        split_loss = layout.tp > 1 and plan != "usual"
        with loss_parallel() if split_loss else torch.enable_grad():
            if piped:
                _first_stage(net, tokens, layout.pp, layout.dp * layout.tp, mesh.get_group("pp"))
            else:
                scores = net(tokens)
                F.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten()).backward()
    dist.destroy_process_group()
    recorded = watch.calls(), watch.memory()
    return Trace(model, layout, seq_len, params, *recorded, time.perf_counter() - start, _most_resident())


def _first_stage(net, tokens, pp: int, following: int, group) -> None:
    """Run the first stage's operations of 1F1B. following: the next stage's rank. Before each backward FSDP
    gets the same calls as from `torch.distributed.pipelining`.
    """
    import torch
    import torch.distributed as dist

    ops = one_f_one_b(pp, microbatches(pp)).ops[0]
    sent, backwards = {}, [op for op in ops if op.kind == "B"]
    for op in ops:
        if op.kind == "F":
            sent[op.microbatch] = net(tokens)
            dist.send(sent[op.microbatch].detach(), dst=following, group=group)
            continue
        y, last = sent.pop(op.microbatch), op == backwards[-1]
        gradient = torch.empty_like(y)
        dist.recv(gradient, src=following, group=group)
        net.set_is_last_backward(last)
        net.set_reshard_after_backward(last)
        net.set_requires_gradient_sync(last)
        y.backward(gradient)
        del y, gradient


def _most_resident() -> int:
    """The largest memory of this process in bytes. On Linux ru_maxrss may be inherited from the parent."""
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
