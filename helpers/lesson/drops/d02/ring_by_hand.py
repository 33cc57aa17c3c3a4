"""Drop 02's second practice: a ring all-reduce by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....table import human
from ...practice import Answer, Exercise, right, wrong

# -- what data parallelism does not save ----------------------------------------------------------


def ring_all_reduce(x, rank, world_size):
    """Make x, a 1-D tensor, the sum of all ranks' x: in place, with dist.send and dist.recv only."""
    chunks = list(torch.tensor_split(x, world_size))  # views: what is written to a chunk is written to x
    right_of, left_of = (rank + 1) % world_size, (rank - 1) % world_size

    def pass_on(outgoing, incoming):
        if rank % 2 == 0:  # even ranks speak first, odd ranks listen first, so that somebody always listens
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


# Ranks, elements; some do not divide.
CASES = [(4, 400_000), (2, 100_001), (3, 100_001), (5, 99_999), (4, 1_003)]


def _ring_on_rank(attempt, elements):
    """One rank's part: run the attempt. Returns what it left in x, and what the answer is."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numbers = [torch.arange(elements, dtype=torch.float32) % 97 * (r + 1) for r in range(n)]
    x = numbers[rank].clone()
    attempt(x, rank, n)
    return x, numbers[rank], sum(numbers)


def judge_ring(attempt) -> Answer:
    reached = 0.0
    for n, elements in CASES:
        case = f"{n} ranks, {elements:,} elements"
        with World(n, timeout=4) as world:
            try:
                results = world.run(_ring_on_rank, attempt, elements)
            except RankError as e:
                return _stuck(e, case) or Answer("crashed", f"With {case}:\n{e.report}")
            if world.traffic.not_waited:
                return wrong(
                    "a message nobody waits for",
                    f"With {case} {world.traffic.not_waited} isend or irecv were never waited for: keep what"
                    " they return and call .wait() on it, or the data may come after you have used it.",
                )
            sent = max(world.traffic.counted) / (4 * elements)
            if mistake := _wrong_sum(results, case, sent) or _wasteful(world.traffic, 4 * elements, case):
                return mistake
            reached = reached or sent
    return right(
        "The sum on 2, 3, 4 and 5 ranks, also where the length does not divide, and no rank sent more than it"
        " must.",
        ("bytes sent by each of 4 ranks, for a tensor of S bytes", f"{reached:.2f}·S", "2·(4−1)/4 = 1.50·S"),
    )


def _wrong_sum(results, case: str, sent: float) -> Answer | None:
    """Name what is wrong with the values. results: (x, what it was before, the sum) for each rank. sent:
    tensors sent by the busiest.
    """
    n = len(results)
    if all(torch.equal(x, total) for x, _, total in results):
        return None
    if all(torch.allclose(x, total / n) for x, _, total in results):
        return wrong(
            "the mean where the sum was meant",
            f"With {case} every rank holds the mean. "
            "An all-reduce sums; whoever wants the mean divides afterwards.",
        )
    if all(torch.equal(x, before) for x, before, _ in results):
        return wrong(
            "x was not changed",
            f"With {case} x is as it was on every rank. "
            "Work in place: write into x[...], or into views of x.",
        )
    whole = len(results[0][0]) // n * n
    if whole < len(results[0][0]) and all(torch.equal(x[:whole], total[:whole]) for x, _, total in results):
        return wrong(
            "the remainder is left out",
            f"With {case} all is right but the last {len(results[0][0]) - whole}: {n} chunks of equal length "
            "do not cover x. torch.tensor_split makes some chunks one longer.",
        )
    good = [
        [
            i
            for i, (a, b) in enumerate(zip(torch.tensor_split(x, n), torch.tensor_split(total, n)))
            if torch.equal(a, b)
        ]
        for x, _, total in results
    ]
    chunks = "; ".join(f"rank {r}: {', '.join(map(str, chunks)) or 'none'}" for r, chunks in enumerate(good))
    if all(len(chunks) == 1 for chunks in good):
        if sent > 1.01 * (n - 1) / n:
            return wrong(
                "finished sums added once more",
                f"With {case} each rank has one finished chunk ({chunks}), and the chunks did go round. "
                "What arrives in the second half is a finished sum: write it over yours, do not add it.",
            )
        return wrong(
            "half of the way",
            f"With {case} each rank has one finished chunk ({chunks}). That is the reduce-scatter, "
            "the first half of the job. Now the finished chunks must go round.",
        )
    return wrong(
        "another value than the sum",
        f"With {case} these of the {n} chunks hold the sum: {chunks}. In step k, which chunk does a rank"
        " send, and which one does it receive? Is what it receives added, or written over?",
    )


def _stuck(error: RankError, case: str) -> Answer | None:
    """A hang in which every rank does the same thing has a name."""
    doing = [seen.where["in"]["op"] if seen.where and seen.where["in"] else None for seen in error.seen]
    if error.kind != "timeout" or len(set(doing)) > 1 or doing[0] not in ("send", "recv"):
        return None
    first, other = ("sends", "receives") if doing[0] == "send" else ("receives", "sends")
    return Answer(
        "crashed",
        f"With {case} every rank {first} and waits; nobody {other}. On gloo a send ends when its receiver"
        " takes the data, so on a ring somebody must do it the other way round: even ranks send first, odd"
        f" ranks receive first.\n\n{error.report}",
        f"everybody {first} before anybody {other}",
    )


def _wasteful(traffic: Traffic, size: int, case: str) -> Answer | None:
    """Name what moves more than 2(n−1) chunks a rank. `size`: bytes of the tensor."""
    if helped := {row.op for rows in traffic.ranks for row in rows} - {"send", "recv"}:
        return wrong(
            "another collective does the work",
            f"You called {', '.join(sorted(helped))}. Use dist.send and dist.recv only: they are what it is"
            " made of.",
        )
    sent, n = traffic.counted, len(traffic.ranks)
    # The chunks of a length that n does not divide are rounded up.
    allowed = 2 * (n - 1) * -(-size // 4 // n) * 4
    figures = [("bytes sent by the busiest rank", f"{max(sent) / size:.2f}·S", f"{2 * (n - 1) / n:.2f}·S")]
    if max(sent) < size:
        return wrong(
            "nothing was sent",
            f"With {case} the busiest rank sent {human(max(sent))}, less than the tensor. The check's numbers"
            " can be guessed; real gradients cannot.",
            *figures,
        )
    if max(sent) <= allowed:
        return None
    hub = sent.index(max(sent))
    others = [s for r, s in enumerate(sent) if r != hub]
    if sent[hub] >= (n - 1) * size and n > 2 and max(others) <= 1.01 * size:
        return wrong(
            "everything through one rank",
            f"With {case} rank {hub} sent {human(sent[hub])} and the others at most {human(max(others))}. "
            "The sum is right, but one link carries n−1 times the load, and it grows with every rank you"
            " add.",
            *figures,
        )
    if min(sent) >= (n - 1) * size:
        return wrong(
            "the whole tensor, not a chunk",
            f"With {case} every rank sent {human(sent[0])}: the tensor, n−1 times over. "
            "Cut it into n chunks and pass one chunk a step.",
            *figures,
        )
    return wrong(
        "more bytes than needed",
        f"With {case} the busiest rank sent {human(max(sent))}, where {human(allowed)} are enough: "
        "n−1 chunks to sum, n−1 to spread.",
        *figures,
    )


ring = Exercise(
    "a ring all-reduce",
    ring_all_reduce,
    judge_ring,
    hints=[
        (
            "Cut x into n chunks with torch.tensor_split: they are views of x. In each step a rank sends one"
            " chunk to the right and receives one from the left."
        ),
        (
            "First n−1 steps: in step k rank r sends chunk (r−k) % n and adds what it receives to chunk"
            " (r−k−1) % n. Then which chunk is finished, and where?"
        ),
        (
            "Then n−1 more steps: in step k rank r sends chunk (r+1−k) % n and overwrites chunk (r−k) % n"
            " with what it receives."
        ),
        "If it hangs: even ranks send first and then receive, odd ranks receive first and then send.",
    ],
)
