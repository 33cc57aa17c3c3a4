"""Drop 01: tell the three schemes apart by the bytes alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from helpers import toy
from helpers.practice.engine import Asked
from helpers.practice.runs import Run
from helpers.ranks.world import World

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
    world.cell(f"from drops.d01 import split, step\nmodel = split({scheme!r}, {hidden})")
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


RUNS = len(SIZES) * len(SCHEMES)


@cache
def _cases() -> list[tuple]:
    """(small, large) of each run: on the wire, a thousand times that, and by the book. Measured once."""
    with World(4, timeout=20) as world:
        runs = [bytes_sent(world, scheme, **sizes) for sizes in SIZES for scheme in SCHEMES]
    wire, book = ([tuple(map(list, counted)) for counted in of_all] for of_all in zip(*runs))
    return [*wire, *(tuple([1000 * x for x in sent] for sent in case) for case in wire), *book]


def _named(run: Run) -> tuple[list[str], list[str], list[str]]:
    """The names given to the runs by their wire, by a thousand times that, and by the book."""
    names = run.ranks[0].get("values", [])
    return names[:RUNS], names[RUNS : 2 * RUNS], names[2 * RUNS :]


def _by_the_amount(mine: Run, _) -> bool:
    wire, thousandfold, _ = _named(mine)
    return wire != thousandfold


def _exactly(mine: Run, truth: Run) -> bool:
    """Whether all is right by the book, and something is wrong on the wire."""
    return _named(mine)[2] == _named(truth)[2] and _named(mine)[0] != _named(truth)[0]


def _took(holds: Callable[[str, str], bool]) -> Callable[[Run, Run], str]:
    """Shows the first run of which holds(what it was, what it was called)."""

    def shown(mine: Run, truth: Run) -> str:
        for was, said, (small, large) in zip(truth.values, _named(mine)[0], _cases()):
            if was != said and holds(was, said):
                small, large = (", ".join(f"{x / 1e3:,.0f}" for x in sent) for sent in (small, large))
                return (
                    f"A run sent {small} kB by its four ranks, and {large} kB with twice the batch. You said"
                    f" {said!r}; it was {was!r}."
                )
        return ""

    return shown


def _figures(mine: Run, truth: Run) -> list[tuple[str, str, str]]:
    named = sum(said == was for said, was in zip(_named(mine)[0], truth.values))
    return [("runs named", f"{named} of {RUNS}", f"{RUNS} of {RUNS}")]


fingerprints = Asked(
    "traffic fingerprints",
    fingerprint,
    minutes=6,
    hints=[
        "Look at the pictures of who sends to whom: under which scheme do the ranks send different amounts?",
        "One scheme sends gradients, one number for each weight. What happens to their number when the batch"
        " doubles?",
        "First test whether max(small) is well above min(small). Then test whether large is well above"
        " small.",
    ],
    cases=_cases,
    reads=lambda name: SCHEMES[SCHEMES.index(name)],
    praise="You can tell data, tensor and pipeline parallelism from outside, by their bytes alone.",
    figures=_figures,
    shows={
        "judged by the amount": _by_the_amount,
        "the wire is never exactly double": _exactly,
        "gradients do not grow with the batch": _took(lambda was, said: (was, said) == ("tensor", "data")),
        "activations grow with the batch": _took(lambda was, said: (was, said) == ("data", "tensor")),
        "the ends of a pipeline have one neighbour": _took(lambda was, said: "pipeline" in (was, said)),
    },
    mistakes="""
        lists taken for numbers
            small and large are lists of four numbers, one for each rank. Compare numbers: max(small),
            min(small), max(large).
            ! sequence by non-int|between instances of .*'list'|unsupported operand.*'list'
        not one of the three answers
            Return "data", "tensor" or "pipeline".
            ~ form
        judged by the amount
            With a thousand times the bytes in every number your function gives other answers. A larger
            model sends more under each scheme. Compare the ranks with each other, and the two batches with
            each other.
        the wire is never exactly double
            Right idea. But headers do not grow with the batch, so the larger run sends a little less than
            twice as much. Ask for clearly more, such as 1.5 times.
        gradients do not grow with the batch
            The bytes of this run doubled with the batch. Data parallelism sends gradients, one number for
            each weight, however large the batch.
        activations grow with the batch
            The bytes of this run did not change when the batch doubled: they are as many as the weights.
            Tensor parallelism never sends weights. It sends activations, and those grow with the batch.
        the ends of a pipeline have one neighbour
            In a pipeline each rank speaks to its neighbours only. The first and the last rank have one, so
            they send half. After an all-reduce all four ranks have sent the same.
    """,
)
