"""Drop 01: tell the three schemes apart by the bytes alone."""

from __future__ import annotations

from functools import cache

from helpers import toy
from helpers.practice import Asked, Run
from helpers.ranks import World

from .cells import SCHEMES

# With these sizes the amount alone does not name the scheme: data parallelism sends most with one of them,
# and least with the other.
SIZES = ({"hidden": 32, "b": 32, "s": 64}, {"hidden": 256, "b": 4, "s": 16})


def step(scheme: str, hidden: int, b: int, s: int) -> None:
    """On a rank: one forward and backward of the toy, split by `scheme`."""
    split, run = SCHEMES[scheme]
    run(split(toy.ToyTransformer(hidden)), *toy.make_batch(b, s))


def bytes_sent(world: World, scheme: str, hidden: int, b: int, s: int) -> list[tuple]:
    """[on the wire, counted]. Each is a pair: the bytes of all ranks in one step with b sequences, and with
    2b.

    Where the system does not count the wire, the counted bytes replace its bytes.
    """
    sent = []
    for batch in (b, 2 * b):
        world.run(step, scheme, hidden, batch, s)
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
    """(small, large) of each run in four versions: the bytes on the wire; a thousand times these; the counted
    bytes; and those on the wire with more headers in the larger batch. Measured once.
    """
    with World(4, timeout=20) as world:
        runs = [bytes_sent(world, scheme, **sizes) for sizes in SIZES for scheme in SCHEMES]
    wire, book = ([tuple(map(list, counted)) for counted in of_all] for of_all in zip(*runs))
    thousandfold = [tuple([1000 * x for x in sent] for sent in case) for case in wire]
    headers = [(small, [x + 40 * (r + 1) for r, x in enumerate(large)]) for small, large in wire]
    return [*wire, *thousandfold, *book, *headers]


def _found(mine: Run, truth: Run) -> tuple[str, str] | None:
    """The mistake in the first run that gets a wrong name, and a text that shows it."""
    wire, thousandfold, book, headers = (mine.values[i * RUNS : (i + 1) * RUNS] for i in range(4))
    if wire != thousandfold:
        return "judged by the amount", ""
    off = [i for i, answer in enumerate(wire) if answer != truth.values[i]]
    if not off:
        return ("a few bytes are no difference", "") if headers != wire else None
    if book == truth.values[2 * RUNS : 3 * RUNS]:
        return "the wire is never exactly double", ""
    was, answer = truth.values[off[0]], wire[off[0]]
    small, large = (", ".join(f"{x / 1e3:,.0f}" for x in sent) for sent in _cases()[off[0]])
    name = {
        ("tensor", "data"): "gradients do not grow with the batch",
        ("data", "tensor"): "activations grow with the batch",
    }.get((was, answer), "the ends of a pipeline have one neighbour")
    return name, (
        f"A run sent {small} kB by its four ranks, and {large} kB with twice the batch. You said {answer!r};"
        f" it was {was!r}."
    )


def _figures(mine: Run, truth: Run) -> list[tuple[str, str, str]]:
    named = sum(answer == was for answer, was in zip(mine.values[:RUNS], truth.values))
    return [("runs named", f"{named} of {RUNS}", f"{RUNS} of {RUNS}")]


fingerprints = Asked(
    "traffic fingerprints",
    fingerprint,
    minutes=6,
    hints=[
        "Look at the picture of the three cuts: under which do the ranks send different amounts?",
        "One scheme sends gradients, one number for each weight. What happens to their number when the batch"
        " doubles?",
        "First test whether max(small) is well above min(small). Then test whether large is well above"
        " small.",
    ],
    cases=_cases,
    reads=lambda name: SCHEMES[name] and name,
    praise="You can tell data, tensor and pipeline parallelism from outside, by their bytes alone.",
    figures=_figures,
    finds=_found,
)
