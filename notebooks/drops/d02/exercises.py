"""Drop 02: average gradients over unequal shares, and write the ring all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drops import rings
from helpers.practice import OnRanks, Run, first, needs_more

# -- practice: the mean of unequal shares ---------------------------------------------------------

SHARES = ([2, 2, 2, 2], [5, 1, 1, 1], [3, 1, 1, 2])  # examples on each rank


def weighted_average(gradient, examples):
    """Return the gradient of the mean loss over all examples of all ranks.

    gradient: this rank's, of the mean loss over its own examples; a 1-D tensor.
    examples: how many examples this rank had. Ranks may have different numbers.
    """
    # A mean over all examples is the sum over examples, divided by how many there are on all ranks.
    total = torch.tensor([float(examples)])
    dist.all_reduce(total)
    gradient = gradient * examples / total
    dist.all_reduce(gradient)
    return gradient


def _gradients(rank: int, n: int) -> list[tuple]:
    """A rank's mean gradient over its examples, (1000,), and their number, for each of the shares."""
    chance = lambda: torch.Generator().manual_seed(3)
    return [
        (torch.randn(sum(shares), 1000, generator=chance()).split(shares)[rank].mean(0), shares[rank])
        for shares in SHARES
    ]


average = OnRanks(
    "the mean of unequal shares",
    weighted_average,
    minutes=6,
    hints=[
        "A mean over all examples = the sum over examples, divided by their number. What must each rank"
        " add to the sum?",
        "gradient * examples is the sum over this rank's examples. Both that and the number of examples"
        " need an all_reduce.",
        "all_reduce works in place on a tensor: total = torch.tensor([float(examples)]);"
        " dist.all_reduce(total).",
    ],
    tries=((4,),),
    inputs=_gradients,
    praise="Equal to the twin on every rank, with equal and with unequal shares.",
)


# -- practice: one step of a ring -----------------------------------------------------------------


def pass_on(outgoing, incoming, rank, world_size):
    """Send `outgoing` to the next rank, and receive into `incoming` what the previous rank sends."""
    right_of, left_of = (rank + 1) % world_size, (rank - 1) % world_size
    if rank % 2 == 0:  # even ranks send first, odd ranks receive first: a send always meets a recv
        dist.send(outgoing, right_of)
        dist.recv(incoming, left_of)
    else:
        dist.recv(incoming, left_of)
        dist.send(outgoing, right_of)


def _in_the_step(run: Run, truth: Run) -> tuple[str, str] | None:
    more = needs_more(bytes="more bytes than one message")
    return first(rings.step_faults(run)) or more(run, truth)


step = OnRanks(
    "one step of a ring",
    pass_on,
    minutes=6,
    hints=[
        "The next rank is (rank + 1) % world_size, so that behind the last one comes rank 0. Where does a"
        " rank receive from?",
        "If all send first, nobody receives. Let even ranks send first and odd ranks receive first, or take"
        " dist.isend and wait for it at the end.",
    ],
    tries=((4,), (3,), (2,)),
    inputs=lambda rank, n: [(*rings.to_pass_on(rank, n, length), rank, n) for length in (1000, 10)],
    sees=lambda arguments, answer: (arguments[1].clone(), arguments[0].clone()),
    messages=True,
    praise="On 2, 3 and 4 ranks. A ring is this step, 2(n−1) times.",
    finds=_in_the_step,
)


# -- practice: a ring all-reduce ------------------------------------------------------------------


def ring_all_reduce(x, rank, world_size):
    """Make x, a 1-D tensor, the sum of all ranks' x: in place, with sends and receives only."""
    chunks = list(torch.tensor_split(x, world_size))  # views: what is written to a chunk is written to x
    right_of, left_of = (rank + 1) % world_size, (rank - 1) % world_size

    def pass_on(outgoing, incoming):
        if rank % 2 == 0:  # even ranks send first, odd ranks receive first: a send always meets a recv
            dist.send(chunks[outgoing].contiguous(), right_of)
            dist.recv(incoming, left_of)
        else:
            dist.recv(incoming, left_of)
            dist.send(chunks[outgoing].contiguous(), right_of)

    for step in range(world_size - 1):  # reduce-scatter: sums grow as they go round
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        buffer = torch.empty_like(chunks[incoming])
        pass_on(outgoing, buffer)
        chunks[incoming] += buffer
    for step in range(world_size - 1):  # all-gather: finished sums go round
        outgoing, incoming = (rank + 1 - step) % world_size, (rank - step) % world_size
        pass_on(outgoing, chunks[incoming])


def _to_sum(rank: int, n: int, length: int) -> list[tuple]:
    """The arguments of each case: two tensors whose numbers name the rank and the chunk that they are from,
    and one of this length.
    """
    plain = torch.arange(length, dtype=torch.float64 if n == 5 else torch.float32) % 97 * (rank + 1)
    return [(x, rank, n) for x in (*rings.marked(rank, n, torch.empty(8 * n)), plain)]


def _in_the_ring(run: Run, truth: Run) -> tuple[str, str] | None:
    few = run.tried == (4, 6) and any("index out of range" in said for said in run.errors)
    return first({"fewer chunks than ranks": few} | rings.faults(run, truth)) or needs_more(
        bytes="more bytes than needed"
    )(run, truth)


ring = OnRanks(
    "a ring all-reduce",
    ring_all_reduce,
    minutes=14,
    hints=[
        "Cut x into n chunks with torch.tensor_split: they are views of x. In each step a rank sends one"
        " chunk to the right and receives one from the left.",
        "First n−1 steps: in step k rank r sends chunk (r−k) % n and adds what it receives to chunk"
        " (r−k−1) % n. Then which chunk is finished, and where?",
        "Then n−1 more steps: in step k rank r sends chunk (r+1−k) % n and overwrites chunk (r−k) % n"
        " with what it receives.",
        "If it hangs: even ranks send first and then receive, odd ranks receive first and then send.",
    ],
    # In some of these the ranks do not divide the length.
    tries=((4, 40_000), (2, 10_001), (3, 10_001), (5, 9_999), (4, 6)),
    inputs=_to_sum,
    sees=lambda arguments, answer: arguments[0],
    messages=True,
    praise="The sum on 2, 3, 4 and 5 ranks, also where the length does not divide. No rank sent too much.",
    figures=lambda run, truth: [
        (
            "bytes sent by the busiest rank, for tensors of S bytes",
            *(f"{max(one.traffic.counted) / one.ranks[0]['size']:.2f}·S" for one in (run, truth)),
        )
    ],
    finds=_in_the_ring,
)
