"""Drop 01: tell the three schemes apart by the bytes alone."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from ... import toy
from ...runtime.failure import RankError
from ...runtime.world import World
from ..practice import Answer, Exercise, ask, crashed, right, wrong

SCHEMES = ("data", "tensor", "pipeline")
# Sizes chosen so that the amount alone gives nothing away: data parallelism sends most in one, least in the
# other.
SIZES = ({"hidden": 32, "b": 32, "s": 64}, {"hidden": 256, "b": 4, "s": 16})


def split(scheme: str, hidden: int = 256) -> torch.nn.Module:
    """On a rank: the toy model with rank 0's weights, split by `scheme`. A rank keeps what this returns."""
    model = toy.ToyTransformer(hidden, seed=dist.get_rank())
    toy.share_weights(model)
    if scheme == "tensor":
        return toy.split_width(model)
    return toy.split_depth(model) if scheme == "pipeline" else model


def step(model: torch.nn.Module, scheme: str, b: int, s: int) -> float | None:
    """On a rank: one forward and backward of a model that `split` made."""
    run = {"data": toy.data_parallel_step, "tensor": toy.tensor_parallel_step, "pipeline": toy.pipeline_step}[
        scheme
    ]
    return run(model, *toy.make_batch(b, s))


def bytes_sent(
    world: World, scheme: str, hidden: int, b: int, s: int
) -> list[tuple[list[float], list[float]]]:
    """(on the wire, by the book): what each rank sends in one step, with b sequences and with 2b.

    Where the system does not count the wire, the book stands in for it.
    """
    world.cell(f"from helpers.lesson.drops.d01 import split, step\nmodel = split({scheme!r}, {hidden})")
    sent = []
    for batch in (b, 2 * b):
        world.cell(f"step(model, {scheme!r}, {batch}, {s}); None")
        traffic = world.traffic
        sent.append((traffic.counted if None in traffic.wire else traffic.wire, traffic.counted))
    return list(zip(*sent))


def fingerprint(small, large):
    """Name the scheme of a run: "data", "tensor" or "pipeline".

    small: bytes sent in one step, a list with one number for each rank.
    large: the same with twice as many examples in the batch.
    """
    if max(small) > 1.5 * min(small):
        return "pipeline"  # the ends have one neighbour, the ranks between have two
    if max(large) > 1.5 * max(small):
        return "tensor"  # activations grow with the batch
    return "data"  # gradients do not: one for each weight


MISTAKES = {
    ("tensor", "data"): (
        "gradients do not grow with the batch",
        (
            "You call this run data parallel, yet its bytes doubled when the batch doubled. "
            "Data parallelism sends gradients, one number for each weight, however large the batch."
        ),
    ),
    ("data", "tensor"): (
        "activations grow with the batch",
        (
            "You call this run tensor parallel, yet its bytes did not change when the batch doubled: they are"
            " as many as the weights. Tensor parallelism never sends weights. It sends activations, and those"
            " grow with the batch."
        ),
    ),
    ("pipeline", None): (
        "the ends of a pipeline have one neighbour",
        (
            "You took this run for one in which every rank talks alike. Look at the first and last rank: "
            "they sent half. In a pipeline each rank only speaks to its neighbours, and the ends have one."
        ),
    ),
    (None, "pipeline"): (
        "the ends of a pipeline have one neighbour",
        (
            "You call this run a pipeline, yet all four ranks sent the same. That is what an all-reduce looks"
            " like. A pipeline has none: each rank speaks to its neighbours, and the ends have only one."
        ),
    ),
}


@cache
def _runs() -> list[tuple]:
    """(scheme, wire of the small batch, of the large, and what the book says of both) for each scheme and
    size. Measured once, for all checks.
    """
    runs = []
    with World(4, timeout=20) as world:
        for sizes in SIZES:
            for scheme in SCHEMES:
                (small, large), by_the_book = bytes_sent(world, scheme, **sizes)
                runs.append((scheme, small, large, by_the_book))
    return runs


def judge(attempt) -> Answer:
    runs = _runs()
    measured = [(list(small), list(large)) for _, small, large, _ in runs]
    thousandfold = [tuple([x * 1000 for x in sent] for sent in case) for case in measured]
    try:
        answers = ask(attempt, [*measured, *thousandfold, *(tuple(map(list, book)) for *_, book in runs)])
    except RankError as e:
        answer = crashed(e)
        answer.text += f"\nIt was given lists of four numbers each, such as {runs[0][1]} and {runs[0][2]}."
        return answer
    named, scaled, if_exact = (answers[i : i + len(runs)] for i in range(0, len(answers), len(runs)))
    if odd := [answer for answer in named if not isinstance(answer, str) or answer not in SCHEMES]:
        return wrong(
            "not one of the three answers",
            f'Your function returned {odd[0]!r}. Return "data", "tensor" or "pipeline".',
        )
    missed = [
        (scheme, answer, small, large)
        for (scheme, small, large, _), answer in zip(runs, named)
        if answer != scheme
    ]
    figures = [("runs named", f"{len(runs) - len(missed)} of {len(runs)}", f"{len(runs)} of {len(runs)}")]
    if list(map(str, scaled)) != named:
        return wrong(
            "judged by the amount",
            "With a thousand times the bytes in every number your function gives other answers. A larger"
            " model sends more under each scheme: compare the ranks with each other, and the two batches with"
            " each other.",
            *figures,
        )
    if not missed:
        return right(
            "You can tell data, tensor and pipeline parallelism from outside, by their bytes alone.", *figures
        )
    if if_exact == [scheme for scheme, *_ in runs]:
        return wrong(
            "the wire is never exactly double",
            "Right idea. But headers do not grow with the batch, so the larger run sends a "
            "little less than twice as much: ask for clearly more, such as 1.5 times.",
            *figures,
        )
    for (ran, said_it_was), (name, why) in MISTAKES.items():
        fits = [m for m in missed if ran in (None, m[0]) and said_it_was in (None, m[1])]
        if fits:
            scheme, answer, small, large = fits[0]
            break
    kb = lambda sent: ", ".join(f"{x / 1e3:,.0f}" for x in sent)
    return wrong(
        name,
        f"A run sent {kb(small)} kB by its four ranks, and {kb(large)} kB with twice the batch. "
        f"You said {answer!r}; it was {scheme!r}. {why}",
        *figures,
    )


fingerprints = Exercise(
    "traffic fingerprints",
    fingerprint,
    judge,
    minutes=6,
    hints=[
        "Look at the pictures of who sends to whom: under which scheme do the ranks send different amounts?",
        (
            "One scheme sends gradients, one number for each weight. What happens to their number when the"
            " batch doubles?"
        ),
        (
            "First test whether max(small) is well above min(small). Then test whether large is well above"
            " small."
        ),
    ],
)
