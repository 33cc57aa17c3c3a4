"""Drop 02's second practice: a ring all-reduce by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....table import human
from ...practice import Answer, Exercise, right, waits, wrong
from .. import rings
from ..rings import Half


def ring_all_reduce(x, rank, world_size):
    """Make x, a 1-D tensor, the sum of all ranks' x: in place, with sends and receives only."""
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
CASES = [(4, 400_000), (2, 100_001), (3, 100_001), (5, 99_999), (4, 6)]


def _ring_on_rank(attempt, elements):
    """One rank's part: run the attempt. Returns what it left in x, and what the answer is."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numbers = [torch.arange(elements, dtype=torch.float32) % 97 * (r + 1) for r in range(n)]
    x = numbers[rank].clone()
    attempt(x, rank, n)
    return x, numbers[rank], sum(numbers)


def _watched_on_rank(attempt) -> tuple[list, list]:
    """What the attempt makes of numbers that tell their rank or chunk: chunks at the end, and messages."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def run(x):
        attempt(x, rank, n)
        return [rings.number(chunk) for chunk in torch.tensor_split(x, n)]

    return rings.watched(run, n, torch.empty(8 * n))


def judge_ring(attempt) -> Answer:
    reached = 0.0
    for n, elements in CASES:
        case = f"{n} ranks and {elements:,} elements"
        with World(n, timeout=4) as world:
            try:
                results = world.run(_ring_on_rank, attempt, elements)
                if world.traffic.not_waited:
                    return wrong(
                        "a message nobody waits for",
                        f"With {case}, {world.traffic.not_waited} isend or irecv were never waited for: keep"
                        " what they return and call .wait() on it, or the data may come after you have used"
                        " it.",
                    )
                traffic, sent = world.traffic, max(world.traffic.counted) / (4 * elements)
                if mistake := _wrong_sum(results, case):
                    return mistake
                if not all(torch.equal(x, total) for x, _, total in results):
                    return _named(world.run(_watched_on_rank, attempt), n, case)
            except RankError as e:
                return _stuck(e, case) or _named_crash(e, case, n, elements)
            if mistake := _wasteful(traffic, 4 * elements, case):
                return mistake
            reached = reached or sent
    return right(
        "The sum on 2, 3, 4 and 5 ranks, also where the length does not divide, and no rank sent more than it"
        " must.",
        ("bytes sent by each of 4 ranks, for a tensor of S bytes", f"{reached:.2f}·S", "2·(4−1)/4 = 1.50·S"),
    )


def _wrong_sum(results, case: str) -> Answer | None:
    """What is wrong with the values, as far as they alone tell. results: (x, what it was before, the sum) for
    each rank.
    """
    n = len(results)
    if all(torch.equal(x, total) for x, _, total in results):
        return None
    if all(torch.allclose(x, total / n) for x, _, total in results):
        return wrong(
            "the mean where the sum was meant",
            f"With {case}, every rank holds the mean. "
            "An all-reduce sums; whoever wants the mean divides afterwards.",
        )
    if all(torch.equal(x, before) for x, before, _ in results):
        return wrong(
            "x was not changed",
            f"With {case}, x is as it was on every rank. "
            "Work in place: write into x[...], or into views of x.",
        )
    whole = len(results[0][0]) // n * n
    if whole < len(results[0][0]) and all(torch.equal(x[:whole], total[:whole]) for x, _, total in results):
        return wrong(
            "the remainder is left out",
            f"With {case}, all is right but the last {len(results[0][0]) - whole}: {n} equally long chunks "
            "do not cover x. torch.tensor_split makes some chunks one longer.",
        )
    return None


# The two halves as they should be, and as they are when a step, a chunk or a view is missed.
SUM = Half(lambda r, k: r - k, lambda r, k: r - k - 1, "add")
SPREAD = Half(lambda r, k: r + 1 - k, lambda r, k: r - k, "write")
_FEW, _MANY = {"steps": lambda n: n - 2}, {"steps": lambda n: n}
ONE_OFF = "Each half has n−1 steps: a chunk visits n ranks, and is on the first of them already."
LOST = (
    "`chunks[j] = …` puts a new tensor into your list, and x keeps its old numbers. Write into the view:"
    " `chunks[j] += buffer`, `chunks[j].copy_(buffer)`, or receive into it."
)
PARTS = "In the first half a rank adds what it receives to its own part; only finished sums are written over."
HALF = "That is the reduce-scatter, the first half of the job. Now the finished chunks must go round."
ADDED = "What arrives in the second half is a finished sum: write it over yours, do not add it."
SECOND = "After the first half rank r has finished chunk r+1, so that is the first one to send."
OTHER = "What a rank receives belongs to the chunk after the one it sends: (r−k−1) % n in step k."
TURNED = (
    "You send to the previous rank and receive from the next one, with the numbers of a ring that goes the"
    " other way. Turn either the neighbours or the numbers."
)
RISING = (
    "What rank r−1 sends in step k is the chunk that rank r adds to in step k, and sends in step k+1: its"
    " number falls by one for each rank. Yours rises."
)
NOT_YET = "(What irecv fills may be used only after .wait().)"
RISE = Half(lambda r, k: r + k, lambda r, k: r + k + 1, "add")
LATE = Half(lambda r, k: r - k, lambda r, k: r - k - 1, "write")
EARLY = Half(lambda r, k: r + 2 - k, lambda r, k: r + 1 - k, "write")
# What it is called, what to do, what is done on paper.
MISTAKES = (
    ("half of the way", HALF, [SUM]),
    ("a view that is lost", LOST, [SUM._replace(how="add anew"), SPREAD]),
    ("a view that is lost", LOST, [SUM, SPREAD._replace(how="write anew")]),
    ("a view that is lost", LOST, [SUM._replace(how="add anew"), SPREAD._replace(how="write anew")]),
    ("finished sums added once more", ADDED, [SUM, SPREAD._replace(how="add")]),
    ("finished sums added once more", ADDED, [SUM._replace(steps=lambda n: 2 * n - 2)]),
    ("parts written over, not added", PARTS, [SUM._replace(how="write"), SPREAD]),
    ("parts written over, not added", PARTS, [SUM._replace(how="write anew"), SPREAD]),
    ("one step too few in the first half", ONE_OFF, [SUM._replace(**_FEW), SPREAD]),
    ("one step too many in the first half", ONE_OFF, [SUM._replace(**_MANY), SPREAD]),
    ("one step too few in the second half", ONE_OFF, [SUM, SPREAD._replace(**_FEW)]),
    ("one step too few in each half", ONE_OFF, [SUM._replace(**_FEW), SPREAD._replace(**_FEW)]),
    ("the second half begins with another chunk", SECOND, [SUM, LATE]),
    ("the second half begins with another chunk", SECOND, [SUM, EARLY]),
    ("the chunks' numbers rise", RISING, [RISE, Half(lambda r, k: r + 1 + k, lambda r, k: r + k, "write")]),
    ("the chunks' numbers rise", RISING, [RISE, SPREAD]),
    ("added to the chunk just sent", OTHER, [SUM._replace(take=SUM.send), SPREAD]),
    ("written over the chunk just sent", OTHER, [SUM, SPREAD._replace(take=SPREAD.send)]),
)


def _named(watched: list, n: int, case: str) -> Answer:
    """The mistake that on paper sends and leaves just what this ring did; else where it parts from the sum.

    watched: for each rank, what `_watched_on_rank` read.
    """
    left, sent = [rank[0] for rank in watched], [rank[1] for rank in watched]

    def is_on_paper(halves: list[Half], to: int = 1) -> bool:
        paper = rings.around(n, halves, to)
        return rings.same(left, paper.x) and rings.same(sent, paper.sent)

    for name, text, halves in MISTAKES:
        if is_on_paper(halves):
            return wrong(name, f"With {case}: {text}")
    if is_on_paper([SUM, SPREAD], to=-1):
        return wrong("the ring turned round", f"With {case}: {TURNED}")
    return wrong("another value than the sum", f"With {case}: {rings.where_it_parts(left, n)} {NOT_YET}")


def _named_crash(error: RankError, case: str, n: int, elements: int) -> Answer:
    """A crash, with what is known of it."""
    errors = [(s.error.type, s.error.message) for s in error.seen if s.error and not s.error.aborted]
    name = advice = None
    if any("'tuple' object does not support item assignment" in text for _, text in errors):
        name = "a place of a tuple"
        advice = (
            "torch.tensor_split gives a tuple, and you write to a place of it. A new tensor in that place"
            " would not be in x anyway. Write into the view: `chunks[j] += buffer`, or receive into it."
        )
    elif (n, elements) == CASES[-1] and all(kind == "IndexError" for kind, _ in errors):
        name = "fewer chunks than ranks"
        advice = (
            "All longer tensors came out right. Of few numbers x.chunk(n) may make fewer than n chunks;"
            " torch.tensor_split always makes n."
        )
    return Answer("crashed", f"With {case}:{f' {advice}' if advice else ''}\n\n{error.report}", name)


def _stuck(error: RankError, case: str) -> Answer | None:
    """A hang in which every rank does the same thing has a name."""
    doing = {at["op"] for at in waits(error).values()}
    if len(doing) != 1 or any(seen.finished for seen in error.seen):
        return None
    first, other = ("sends", "receives") if doing == {"send"} else ("receives", "sends")
    return Answer(
        "crashed",
        f"With {case}, every rank {first} and waits; nobody {other}. On gloo a send ends when its receiver"
        " takes the data, so on a ring somebody must do it the other way round: even ranks send first, odd"
        f" ranks receive first.\n\n{error.report}",
        f"everybody {first} before anybody {other}",
    )


def _wasteful(traffic: Traffic, size: int, case: str) -> Answer | None:
    """Name what moves more than 2(n−1) chunks a rank. `size`: bytes of the tensor."""
    if helped := {row.op for rows in traffic.ranks for row in rows} - {"send", "recv"}:
        return wrong(
            "another collective does the work",
            f"You called {', '.join(sorted(helped))}. Use sends and receives only: they are what it is"
            " made of.",
        )
    sent, n = traffic.counted, len(traffic.ranks)
    # The chunks of a length that n does not divide are rounded up.
    allowed = 2 * (n - 1) * -(-size // 4 // n) * 4
    figures = [("bytes sent by the busiest rank", f"{max(sent) / size:.2f}·S", f"{2 * (n - 1) / n:.2f}·S")]
    if max(sent) < size:
        return wrong(
            "nothing was sent",
            f"With {case}, the busiest rank sent {human(max(sent))}, less than the tensor. The check's"
            " numbers can be guessed; real gradients cannot.",
            *figures,
        )
    if max(sent) <= allowed:
        return None
    hub = sent.index(max(sent))
    others = [s for r, s in enumerate(sent) if r != hub]
    if sent[hub] >= (n - 1) * size and n > 2 and max(others) <= 1.01 * size:
        return wrong(
            "everything through one rank",
            f"With {case}, rank {hub} sent {human(sent[hub])} and the others at most {human(max(others))}. "
            "The sum is right, but one link carries n−1 times the load, and it grows with every rank you"
            " add.",
            *figures,
        )
    if min(sent) >= (n - 1) * size:
        return wrong(
            "the whole tensor, not a chunk",
            f"With {case}, every rank sent {human(sent[0])}: the tensor, n−1 times over. "
            "Cut it into n chunks and pass one chunk a step.",
            *figures,
        )
    return wrong(
        "more bytes than needed",
        f"With {case}, the busiest rank sent {human(max(sent))}, where {human(allowed)} are enough: "
        "n−1 chunks to sum, n−1 to spread.",
        *figures,
    )


ring = Exercise(
    "a ring all-reduce",
    ring_all_reduce,
    judge_ring,
    minutes=18,
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
