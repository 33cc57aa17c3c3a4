"""Functions for the cells of drop 10's notebook."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from drops import lines
from drops.d10.runs import HIDDEN, LONG, RANKS, USUAL, out_of_memory
from helpers import toy
from helpers.ranks import RankError, World, current, saved_activations
from three_axes.plan import CLUSTERS, Estimate, Job, Layout, estimate, find_model
from three_axes.table import Table, human

line = lines.activations  # the reader's, or the course's
REMEDIES = (
    "nothing",
    "DP on 8 ranks, each with as many examples",
    "ZeRO-1",
    "ZeRO-3",
    "4 microbatches",
    "recompute 2 blocks",
    "recompute",
    "TP + SP",
    "offload",
)
LADDER_BUDGET = 8e6  # bytes that a rank may hold while a remedy is tried


class _Outside:
    """Keeps saved activations as NumPy arrays, which the budget does not count, as if in host memory."""

    def __init__(self):
        self.moved = 0  # bytes that were copied out and back

    def pack(self, t: torch.Tensor):
        if t.numel() <= 1000 or isinstance(t._base if t._is_view() else t, torch.nn.Parameter):
            return t
        self.moved += 2 * t.nbytes
        return t.detach().numpy().copy()

    def unpack(self, kept):
        return kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept)


def _try(remedy: str, tokens: int, b: int) -> dict:
    """On a rank: three steps with Adam on b sequences a rank, under a remedy.

    Returns the peak of bytes, the lower one of the second and the third step, and the costs of a step (see
    `attempt`). On a busy machine gloo's thread frees a buffer late, which raises a step's peak.
    """
    rank, d = dist.get_rank(), dist.get_world_size()
    model = toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG, seed=0)
    average, microbatches = toy.average_gradients, 4 if remedy in ("4 microbatches", "TP + SP") else 1
    if remedy == "TP + SP":
        toy.split_width(model, sequence=True)
        average = toy.sum_norm_gradients
    if remedy.startswith("recompute"):
        for block in model.blocks[: 2 if "2" in remedy else 4]:
            block.forward = lambda x, plain=block.forward: checkpoint(plain, x, use_reentrant=False)
    # Sequences that pass through the blocks' MLPs: a block that is recomputed runs its MLP again.
    forwards = collections.Counter()
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, args: forwards.update(sequences=len(args[0])))
    if remedy.startswith("ZeRO"):
        zero = (toy.Zero1 if remedy == "ZeRO-1" else toy.Zero3)(model)
        apply, average = zero.step, lambda model: None
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        apply = lambda: (optimizer.step(), optimizer.zero_grad())
    batch = toy.make_batch(b * d, tokens)
    mine = batch if remedy == "TP + SP" else [toy.my_share(t, rank, d) for t in batch]
    peaks = []
    for _ in range(3):
        dist.barrier()
        current.count_from_here()
        current.peak_memory(reset=True)
        forwards.clear()
        outside = _Outside()
        for x, y in zip(*(t.chunk(microbatches) for t in mine)):
            with saved_tensors_hooks(outside.pack, outside.unpack) if remedy == "offload" else nullcontext():
                loss = toy.loss_of(model(x), y) / microbatches
            loss.backward()
            del loss
        average(model)
        apply()
        peaks.append(current.peak_memory())
    return {
        "peak": min(peaks[1:]),
        "forwards": forwards["sequences"] / len(model.blocks) / (b * (d if remedy == "TP + SP" else 1)),
        "host": outside.moved,
    }


@cache
def attempt(remedy: str, budget: float = LADDER_BUDGET, tokens: int = LONG, b: int = 4) -> dict:
    """Try a remedy on the long batch, on real ranks under a budget. A kernel tries each remedy once.

    Returns fits; error: of the run that did not fit, else ""; peak: the most bytes of a rank, without the
    budget if the run did not fit; forwards: how often a sequence passes through a block; sent: bytes of the
    busiest rank; host: bytes to the host's memory and back.
    """
    ranks = 8 if remedy.startswith("DP on 8 ranks") else RANKS
    outcome = {"fits": True, "error": ""}
    for limit in (budget, 1e12):  # a run that does not fit is repeated without a limit
        with World(ranks, memory=limit, timeout=60) as world:
            try:
                results = world.run(_try, remedy, tokens, b)
                break
            except RankError as e:
                if limit > budget:
                    raise
                outcome = {"fits": False, "error": out_of_memory(e) or e.report}
    outcome["sent"] = max(world.traffic.counted)
    return outcome | {what: max(r[what] for r in results) for what in results[0]}


def predicted(remedy: str, tokens: int = LONG, b: int = 4) -> float:
    """Bytes at the start of backward, by hand, in float32. One unit is b·s·h numbers.

    A block keeps 16 units (drop 06 counted 7 of them for t = 4, and 5.5 with SP), the output layer 2, and
    scores, their softmax and its gradient 256/h each.
    """
    n = sum(p.numel() for p in toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG).parameters())
    unit = 4 * b * tokens * HIDDEN
    output = 2 + 3 * toy.VOCABULARY / HIDDEN
    keeps = partial(line, 4, HIDDEN, b * tokens, 1)  # the four blocks, of k bytes a number
    states, blocks = 12 * n, keeps(64)
    if remedy == "ZeRO-1":
        # Gradients do not exist yet; the shard of the weights is kept twice.
        states = (4 + 4 + 8 / RANKS) * n - 4 * n + 4 * n / RANKS
    elif remedy == "ZeRO-3":
        states = 12 * n / RANKS
    elif remedy == "4 microbatches":
        return 16 * n + (blocks + output * unit) / 4
    elif remedy == "recompute 2 blocks":
        blocks = (keeps(4) + keeps(64)) / 2
    elif remedy == "recompute":
        # Four inputs; then the output layer, or a whole block again and its first gradients.
        return states + keeps(4) + max(output, 16 + 5) * unit
    elif remedy == "TP + SP":
        ends = (2 * toy.VOCABULARY + LONG) * HIDDEN
        return 16 * ((n - ends) / RANKS + ends) + keeps(4 * 5.5) + output * unit
    elif remedy == "offload":
        return states + output * unit
    return states + blocks + output * unit


def kept_by_blocks(tokens: int = LONG, b: int = 4) -> Table:
    """Bytes that the toy's four blocks keep for the backward of the long batch, in float32, without and with
    recompute: by the line `activations`, and by what PyTorch saves.
    """
    rows = []
    for name, k, run in (
        ("nothing done", 64, lambda block, x: block(x)),
        ("recompute", 4, lambda block, x: checkpoint(block, x, use_reentrant=False)),
    ):
        model, x = toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG), torch.randn(b, tokens, HIDDEN)
        x.requires_grad_()
        with saved_activations(model) as held:
            for block in model.blocks:
                x = run(block, x)
            kept, predicted_ = held.now, line(4, HIDDEN, b * tokens, 1, k)
        rows.append([name, str(k), human(predicted_), human(kept)])
    return line.below(Table(["four blocks", "k", "predicted", "measured"], rows, title="kept for backward"))


def ladder(tried: dict[str, dict]) -> Table:
    """The remedies side by side.

    Peaks differ a little from run to run, because gloo frees its buffers at different moments.
    """
    rows = []
    for name, r in tried.items():
        paper, end = predicted(name), "fits" if r["fits"] else "out of memory"
        rows.append([name, human(paper), f"{r['peak'] / paper:.1f}", end])
    columns = ["remedy", "predicted peak", "measured ÷ predicted", f"under {human(LADDER_BUDGET)}"]
    return line.below(Table(columns, rows, title="the fullest rank, the batch with long sequences"))


def prices(tried: dict[str, dict]) -> Table:
    """The costs of a step with each remedy that fits, and without any."""
    rows = [
        [name, f"{r['forwards']:g}", human(r["sent"]), human(r["host"]) if r["host"] else ""]
        for name, r in tried.items()
        if r["fits"] or name == "nothing"
    ]
    columns = ["remedy", "forwards of a block", "sent by a rank", "to the host and back"]
    return Table(columns, rows, title="one step, counted on the ranks")


def by_microbatch(sequences: int = 16) -> dict[int, tuple[int, float]]:
    """One batch in microbatches of each size b, in this process: b -> (bytes kept for backward, processor
    seconds of the step, the least of five).
    """
    model = toy.ToyTransformer(hidden=HIDDEN, seq_len=USUAL)
    x, y = toy.make_batch(sequences, USUAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # `thread_time` counts the seconds of this thread only

    def step(b: int) -> float:
        start = time.thread_time()
        for ids, targets in zip(x.split(b), y.split(b)):
            (toy.loss_of(model(ids), targets) * b / sequences).backward()
        return time.thread_time() - start

    def kept(b: int) -> int:
        with saved_activations(model) as held:
            step(b)
        return held.peak

    try:
        return {
            b: (kept(b), min(step(b) for _ in range(5)))
            for b in (sequences // 2**k for k in range(sequences.bit_length()))
        }
    finally:
        torch.set_num_threads(threads)


def microbatches_table(measured: dict[int, tuple[int, float]]) -> Table:
    """The bytes that a smaller microbatch saves, and the time that it costs."""
    whole = measured[max(measured)][1]
    rows = [[str(b), human(kept), f"× {seconds / whole:.1f}"] for b, (kept, seconds) in measured.items()]
    columns = ["sequences at a time", "kept for backward", "time of the step"]
    return Table(columns, rows, title=f"one device, {max(measured)} sequences of {USUAL} tokens in a step")


MODEL, CLUSTER, BATCH = find_model("llama-2-13b"), CLUSTERS["dgx-a100"], 64
LAYOUT = Layout(dp=4, tp=2, zero=1, microbatch=4)  # eight A100s in one node
STATES = ("weights", "gradients", "optimizer")
PADDED, LONGEST = 1024, 5120  # tokens of the longest sequence of a batch, to which all are padded


def held(tokens: int, **changed) -> Estimate:
    """The planner's estimate of the run, with batches padded to `tokens`. changed: fields of its layout."""
    return estimate(Job(MODEL, CLUSTER, BATCH, tokens), replace(LAYOUT, **changed))


def the_13b() -> Table:
    """One GPU's bytes in the usual batch, in the long one, and in the long one with each remedy: by the lines
    `states` and `activations`, and the rest by the planner.
    """
    cases = {
        "usual": (PADDED, {}),
        "long": (LONGEST, {}),
        "long, DP 8 on 16 GPUs": (LONGEST, {"dp": 8}),
        "long, ZeRO-3": (LONGEST, {"zero": 3}),
        "long, microbatches of 1": (LONGEST, {"microbatch": 1}),
        "long, recompute 26 of 40": (LONGEST, {"recompute": "full", "recomputed": 26}),
        "long, recompute": (LONGEST, {"recompute": "full", "recomputed": MODEL.layers}),
    }
    rows, k = [], 16 + 6 * MODEL.ffn / MODEL.hidden
    for name, (tokens, changed) in cases.items():
        layout, e = replace(LAYOUT, **changed), held(tokens, **changed)
        kept = lambda layers, k, at=(MODEL.hidden, layout.microbatch * tokens, layout.tp): line(
            layers, *at, k
        )
        again = layout.recomputed if layout.recompute == "full" else 0
        parts = {
            "states": lines.states(MODEL.params / layout.tp, layout.dp, layout.zero),
            "activations": kept(MODEL.layers - again, k) + kept(again, 2),
            "rest": e.memory_bytes - sum(e.memory[kind] for kind in (*STATES, "activations")),
        }
        sizes = *parts.values(), sum(parts.values())
        rows.append([name, *map(human, sizes), "fits" if e.fits else "tight" if e.tight else "too much"])
    made = Table(
        ["batch", *parts, "a GPU", f"of {human(CLUSTER.device.memory)}"],
        rows,
        title=(
            f"{MODEL.name} on eight A100s: DP 4 · TP 2 with ZeRO-1, microbatches of 4, padded to"
            f" {PADDED:,} or {LONGEST:,} tokens"
        ),
    )
    return line.below(made, lines.states)


def last_lines() -> str:
    """The end of the run's log, with the planner's memory for each batch."""
    lines = [
        f"step {step}  longest sequence {tokens:>5,}  peak {held(tokens).memory_bytes / 1e9:.1f} GB"
        for step, tokens in ((3997, 960), (3998, 1024), (3999, 896))
    ]
    needs, room = human(held(LONGEST).memory_bytes), human(CLUSTER.device.memory)
    lines.append(f"step 4000  longest sequence {LONGEST:,}  OutOfMemoryError: needs {needs} of {room}")
    return "\n".join(lines)


WHY = """More DP leaves a rank's activations as they are: each new rank brings examples of its own. (If the
batch does not grow, each has fewer: a smaller microbatch, paid for in GPUs.) ZeRO cuts states, and these
were not the problem. What helps cuts activations:

- **Smaller microbatches**, gradients added up: nearly free. No help once *b* is 1.
- **Recompute**: forward runs twice, a third more compute.
- **TP with SP**: each rank keeps a part of a block's activations, and sends in every layer.
"""


def answer(tried: dict[str, dict], options: Sequence[str]) -> tuple[str, str]:
    """The arguments of `guess.reveal`. options: two remedies, 'both' and 'neither', of which one is true."""
    fit = [name for name in options[:2] if tried[name]["fits"]]
    option = fit[0] if len(fit) == 1 else options[2] if fit else options[3]
    return option, WHY
