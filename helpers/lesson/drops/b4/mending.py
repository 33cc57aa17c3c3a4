"""b4's third practice: a loop over batches of unequal number that all ranks leave together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong


def train(batches, step):
    """Call step(batch), which sums gradients over all ranks, until any rank has no batch left.

    batches: an iterator, with no length. It is not known before the end how many each rank has.
    """
    while True:
        batch = next(batches, None)
        left = torch.tensor(float(batch is not None))
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if not left:
            return
        step(batch)


CASES = [(6, 6, 4, 6), (3, 3, 3, 3), (2, 5, 5, 4), (3, 0, 1, 3)]
SECONDS = 2
MANY = 10 * max(map(max, CASES))  # collectives: more than any way needs that ends


def _on_rank(attempt, numbers) -> list[int]:
    """The batches that this rank has trained on, in order."""
    done = []

    def step(batch):
        if batch is None:
            raise ValueError("step() was called with None, which is no batch")
        done.append(batch)
        dist.all_reduce(torch.ones(8))

    attempt(iter(range(numbers[dist.get_rank()])), step)
    return done


def _judge(attempt) -> Answer:
    figures = []
    with World(4, timeout=SECONDS) as world:
        for numbers in CASES:
            where = f"With {', '.join(map(str, numbers))} batches on ranks 0 to 3"
            try:
                done = world.run(_on_rank, attempt, numbers)
            except RankError as e:
                if e.kind != "timeout":
                    raise
                return _hung(attempt, e, where)
            figures.append(
                (f"steps on {numbers} batches", str([len(mine) for mine in done]), f"{min(numbers)}")
            )
            if any(len(set(mine)) < len(mine) for mine in done):
                return wrong("a batch trained on twice", f"{where}: a rank repeats one to keep up.", *figures)
            if all(mine == list(range(n)) for mine, n in zip(done, numbers)):
                continue  # the others answered while one had none, as DDP's join() does
            if any(mine != list(range(min(numbers))) for mine in done):
                return wrong(
                    "batches left out",
                    f"{where}: they can do {min(numbers)} steps together, each with its next batch.",
                    *figures,
                )
    return right(
        "Every rank learns before each step whether all have a batch, and all leave together.", *figures
    )


def _hung(attempt, error: RankError, where: str) -> Answer:
    standing = [s.where["in"] for s in error.seen if s.where and s.where["in"]]
    if "timeout" in " ".join(_words(attempt.__code__)):
        return wrong(
            "raising the timeout",
            f"{where} it stands still again. The rank that has no batch left has gone; it will not come later"
            f" either.\n\n{error.report}",
        )
    if any(at["op"] == "barrier" for at in standing):
        return wrong(
            "a barrier more",
            f"{where} it stands still, now in the barrier. A barrier waits for ranks; it does not tell them"
            f" anything.\n\n{error.report}",
        )
    if any(s.finished for s in error.seen):
        return wrong(
            "a rank that stops alone",
            f"{where} it stands still. Before a step, every rank must know whether all have a batch."
            f"\n\n{error.report}",
        )
    if len({(at["op"], str(at["shape"])) for at in standing}) > 1:
        return wrong(
            "two collectives that meet",
            f"{where} it stands still: some ranks are in a step, others ask who has a batch. All must call"
            f" the same, in the same order: ask, then step.\n\n{error.report}",
        )
    if all(s.box and s.box["number"] > MANY for s in error.seen):
        return wrong(
            "a loop without an end",
            f"{where} no rank leaves the loop: each has called more than {MANY} collectives, and still calls"
            f" them.\n\n{error.report}",
        )
    return wrong("another end", f"{where} it does not come to an end.\n\n{error.report}")


def _words(code) -> list[str]:
    """All names and texts in a function's code."""
    words = [*code.co_names]
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            words += _words(constant)
        else:
            words.append(str(constant))
    return words


mended = Exercise(
    "a loop that all leave together",
    train,
    _judge,
    minutes=6,
    hints=[
        "A rank that has no batch left must say so, in a collective that all ranks call, before each step.",
        "next(batches, None) is None at the end. Send 1.0 or 0.0 around: what is the least of them?",
        "dist.all_reduce(left, op=dist.ReduceOp.MIN), and return where it is 0.",
    ],
)
