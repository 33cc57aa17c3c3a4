"""Drop 10, what its cells show: crashes, and the ladder of remedies."""

from __future__ import annotations

import collections
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from .... import toy
from ....files import find
from ....runtime import current
from ....runtime.failure import RankError
from ....runtime.memory import saved_activations
from ....runtime.world import World
from ....table import Table, human

CAUSES = ("optimizer state", "leak", "long batch", "gather on rank 0")
HIDDEN, RANKS, USUAL, LONG = 64, 4, 32, 160  # of the incidents: sequences of 32 tokens, and one of 160
BUDGET = 6.5e6  # bytes for each rank


@dataclass
class Run:
    """What is left of a run that ended out of memory. peaks[step][rank]: the most bytes of tensors that the
    rank held in that step.

    tokens[step]: the length of its longest sequence. log: what was printed. error: the last words of the rank
    that failed.
    """

    tokens: list[int]
    peaks: list[list[int]]
    log: list[str]
    error: str
    budget: float

    def __repr__(self) -> str:
        return "\n".join([*self.log, self.error])


def load(number: int) -> Run:
    """Incident 1 to 4, recorded from real ranks by data/incidents/make.py."""
    return Run(**json.loads(find(f"data/incidents/run_{number}.json").read_text(encoding="utf-8")))


def crash(cause: str, budget: float = BUDGET, steps: int = 12, at: int = 8, hidden: int = HIDDEN) -> Run:
    """Train the toy on four real ranks under a memory budget, with one thing wrong, until a rank is out of
    memory.

    cause: one of CAUSES. at: the step at which the long batch or the checkpoint comes. Raises ValueError if
    the run survives.
    """

    def train(first: bool, step: int, tokens: int) -> tuple[int, float]:
        here = current.rank_state()
        rank, d = dist.get_rank(), dist.get_world_size()
        if first:
            here["model"] = toy.ToyTransformer(hidden=hidden, seq_len=LONG, seed=0)
            here["optimizer"] = (torch.optim.AdamW if cause in CAUSES[:1] else torch.optim.SGD)(
                here["model"].parameters(), lr=1e-3
            )
            # A share of a larger model's states.
            here["kept"], here["shards"] = ([], torch.zeros(1_500_000 // 4))
        model, budget_ = here["model"], current.rank.budget
        budget_.peak = budget_.now
        x, y = (toy.my_share(t, rank, d) for t in toy.make_batch(4 * d, tokens, seed=step))
        scores = model(x)
        loss = toy.loss_of(scores, y)
        if cause == "leak":
            here["kept"].append(scores)  # "for the metrics"
        loss.backward()
        held = budget_.now
        toy.average_gradients(model)
        # On a busy machine gloo's thread frees the sum's buffer late, and Adam's first step has no room.
        until = time.monotonic() + 2
        while budget_.now > held and time.monotonic() < until:
            time.sleep(1e-3)
        here["optimizer"].step(), here["optimizer"].zero_grad()
        if cause == "gather on rank 0" and step == at:
            parts = [torch.empty_like(here["shards"]) for _ in range(d)] if rank == 0 else None
            dist.gather(here["shards"], parts)
        return budget_.peak, loss.item()

    run = Run([], [], [], "", budget)
    with World(RANKS, memory=budget, timeout=30) as world:
        for step in range(steps):
            tokens = LONG if cause == "long batch" and step == at else USUAL
            run.tokens.append(tokens)
            try:
                results = world.run(train, step == 0, step, tokens)
            except RankError as e:
                run.peaks.append(world.run(current.peak_memory))
                run.error = next(
                    str(s.error.message) for s in e.seen if s.error and s.error.type == "OutOfMemoryError"
                )
                return run
            run.peaks.append([peak for peak, _ in results])
            run.log.append(
                f"step {step:2}  loss {sum(loss for _, loss in results) / RANKS:.3f}  {16 * tokens:5} tokens"
            )
    raise ValueError(f"{cause} survived {steps} steps under a budget of {human(budget)}: {run.peaks}")


# -- the ladder --------------------------------------------------------------------------------

REMEDIES = (
    "nothing",
    "DP on 8 ranks",
    "ZeRO-1",
    "ZeRO-3",
    "4 microbatches",
    "recompute",
    "TP + SP",
    "offload",
)
LADDER_BUDGET = 8e6


class _Outside:
    """Saved activations as plain bytes, outside of what the budget counts: as if in the host's memory."""

    def __init__(self):
        self.moved = 0  # bytes, out and back

    def pack(self, t: torch.Tensor):
        if t.numel() <= 1000 or isinstance(t._base if t._is_view() else t, torch.nn.Parameter):
            return t
        self.moved += 2 * t.nbytes
        return t.detach().numpy().copy()

    def unpack(self, kept):
        return kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept)


def _try(remedy: str, tokens: int, b: int) -> dict:
    """One rank's part: three steps with Adam on b sequences a rank.

    Returns the peak of bytes after the first, and what a step cost. On a busy machine gloo's thread frees a
    buffer late, which raises a step's peak: the lower of the two counts.
    """
    rank, d = dist.get_rank(), dist.get_world_size()
    model = toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG, seed=0)
    average, microbatches = toy.average_gradients, 4 if remedy in ("4 microbatches", "TP + SP") else 1
    if remedy == "TP + SP":
        toy.split_width(model, sequence=True)
        average = toy.sum_norm_gradients
    if remedy == "recompute":
        for block in model.blocks:
            block.forward = lambda x, plain=block.forward: checkpoint(plain, x, use_reentrant=False)
    # Sequences that go through a block's MLP, which runs again where the block does.
    forwards = collections.Counter()
    model.blocks[0].mlp.register_forward_pre_hook(lambda _, args: forwards.update(sequences=len(args[0])))
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
            with (
                torch.autograd.graph.saved_tensors_hooks(outside.pack, outside.unpack)
                if remedy == "offload"
                else nullcontext()
            ):
                loss = toy.loss_of(model(x), y) / microbatches
            loss.backward()
            del loss
        average(model)
        apply()
        peaks.append(current.peak_memory())
    return {
        "peak": min(peaks[1:]),
        "forwards": forwards["sequences"] / (b * (d if remedy == "TP + SP" else 1)),
        "host": outside.moved,
    }


def attempt(remedy: str, budget: float = LADDER_BUDGET, tokens: int = LONG, b: int = 4) -> dict:
    """Try a remedy on the long batch, on real ranks under a budget: did it fit, its peak without a limit, and
    what a step cost.

    forwards: how often a sequence goes through a block. sent: bytes by the busiest rank. host: bytes to the
    host's memory and back.
    """
    ranks = 8 if remedy == "DP on 8 ranks" else RANKS
    outcome = {"fits": True, "error": ""}
    for limit in (budget, 1e12):  # what fits is the same run without a limit
        with World(ranks, memory=limit, timeout=60) as world:
            try:
                results = world.run(_try, remedy, tokens, b)
                outcome["sent"] = max(world.traffic.counted)
                break
            except RankError as e:
                if limit > budget:
                    raise
                outcome = {
                    "fits": False,
                    "error": next(
                        (s.error.message for s in e.seen if s.error and s.error.type == "OutOfMemoryError"),
                        e.report,
                    ),
                }
    outcome |= {what: max(r[what] for r in results) for what in results[0]}
    return outcome


def predicted(remedy: str, tokens: int = LONG, b: int = 4) -> float:
    """Bytes at the start of backward, by hand, in float32. One unit is b·s·h numbers.

    A block keeps 16 units (drop 06 counted 7 of them for t = 4, and 5.5 with SP), the head 2, and scores,
    their softmax and its gradient 256/h each.
    """
    n = sum(p.numel() for p in toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG).parameters())
    unit = 4 * b * tokens * HIDDEN
    head = 2 + 3 * toy.VOCABULARY / HIDDEN
    states, blocks = 12 * n, 4 * 16 * unit
    if remedy == "ZeRO-1":
        # Gradients are not there yet; the shard of the weights is kept twice.
        states = (4 + 4 + 8 / RANKS) * n - 4 * n + 4 * n / RANKS
    elif remedy == "ZeRO-3":
        states = 12 * n / RANKS
    elif remedy == "4 microbatches":
        return 16 * n + (4 * 16 + head) * unit / 4
    elif remedy == "recompute":
        # Four inputs; then the head, or a whole block again and its first gradients.
        return states + max(4 + head, 4 + 16 + 5) * unit
    elif remedy == "TP + SP":
        ends = (2 * toy.VOCABULARY + LONG) * HIDDEN
        return 16 * ((n - ends) / RANKS + ends) + (4 * 5.5 + head) * unit
    elif remedy == "offload":
        return states + head * unit
    return states + blocks + head * unit


def ladder(tried: dict[str, dict]) -> Table:
    """The remedies side by side.

    Peaks differ a little from run to run, as gloo lets go of its buffers; seconds are left out altogether.
    """
    rows = [
        [
            name,
            human(predicted(name)),
            f"{r['peak'] / predicted(name):.1f}",
            "fits" if r["fits"] else "out of memory",
        ]
        for name, r in tried.items()
    ]
    return Table(
        ["remedy", "predicted peak", "measured ÷ predicted", f"under {human(LADDER_BUDGET)}"],
        rows,
        title="one rank, the batch with long sequences",
    )


def prices(tried: dict[str, dict]) -> Table:
    """What a step costs with each remedy that fits, and with none."""
    rows = [
        [name, f"{r['forwards']:g}", human(r["sent"]), human(r["host"]) if r["host"] else ""]
        for name, r in tried.items()
        if r["fits"] or name == "nothing"
    ]
    return Table(
        ["remedy", "forwards of a block", "sent by a rank", "to the host and back"],
        rows,
        title="one step, counted on the ranks",
    )


def by_microbatch(sequences: int = 16) -> dict[int, tuple[int, float]]:
    """The same batch in microbatches of each size b, in this process: b -> (bytes kept for backward, seconds
    of the processor that the step takes, the least of five).
    """
    model = toy.ToyTransformer(hidden=HIDDEN, seq_len=USUAL)
    x, y = toy.make_batch(sequences, USUAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of which `thread_time` is the clock

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
    """What a smaller microbatch saves, and what it costs."""
    whole = measured[max(measured)][1]
    return Table(
        ["sequences at a time", "kept for backward", "time of the step"],
        [[str(b), human(kept), f"× {seconds / whole:.1f}"] for b, (kept, seconds) in measured.items()],
        title=f"one device, {max(measured)} sequences of {USUAL} tokens in a step",
    )
