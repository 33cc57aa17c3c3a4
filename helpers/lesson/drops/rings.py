"""What a ring sends, and leaves in every chunk: on paper for any way round, and read from the reader's.

Every number that enters tells its rank and its chunk, so what is sent, and what comes out, tells whose parts
it is made of. A mistake is proven when every message, and every chunk at the end, is as on paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...runtime import current

BASE = 16  # a digit for each rank or chunk; float32 is exact for five of them
MARKS = ("rank", "chunk")


class Half(NamedTuple):
    """One way round: in step k rank r sends chunk send(r, k) and puts what comes into chunk take(r, k).

    how: "add" to it or "write" over it; "anew" makes a new tensor of it, which is no view of x.
    """

    send: Callable[[int, int], int]
    take: Callable[[int, int], int]
    how: str
    steps: Callable[[int], int] = lambda n: n - 1


class Round(NamedTuple):
    """What went on: parts[..., s, d] says how often chunk d of rank s is in it."""

    x: np.ndarray  # (rank, chunk, s, d): what x holds at the end
    chunks: np.ndarray  # the same of the list of chunks, which may be no views of x any more
    sent: np.ndarray  # (rank, step, s, d)


def around(n: int, halves: list[Half], to: int = 1) -> Round:
    """The halves one after the other. to: 1 sends to the next rank, -1 to the previous one."""
    chunks = np.einsum("rs,cd->rcsd", *[np.eye(n, dtype=int)] * 2)
    x, view, log = chunks.copy(), np.ones((n, n), bool), []
    for send, take, how, steps in halves:
        for k in range(steps(n)):
            sent = np.array([chunks[r, send(r, k) % n] for r in range(n)])
            log.append(sent)
            for r in range(n):
                c = take(r, k) % n
                chunks[r, c] = sent[(r - to) % n] + (chunks[r, c] if how.startswith("add") else 0)
                view[r, c] &= not how.endswith("anew")
                if view[r, c]:
                    x[r, c] = chunks[r, c]
    return Round(x, chunks, np.stack(log, axis=1))


def marked(n: int, mark: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor for this rank whose numbers tell its rank, or the chunk that they are in."""
    digits = [torch.full_like(c, i) for i, c in enumerate(torch.tensor_split(like, n))]
    return BASE ** (torch.full_like(like, dist.get_rank()) if mark == "rank" else torch.cat(digits))


def numbers(parts: np.ndarray) -> np.ndarray:
    """What `marked` tensors hold where `parts` came together: for each mark, the number in every chunk."""
    digits = BASE ** np.arange(parts.shape[-1])
    return np.stack([parts.sum(-1) @ digits, parts.sum(-2) @ digits])


def number(chunk: torch.Tensor) -> float:
    """The one number in a chunk; nan where it holds several."""
    same = chunk.numel() and bool((chunk == chunk.flatten()[0]).all())
    return float(chunk.flatten()[0]) if same else float("nan")


def watched(attempt: Callable, n: int, like: torch.Tensor) -> tuple[list, list]:
    """On a rank: run `attempt(x)` on numbers that tell their rank, then their chunk. For both: (what it
    returns, the number in each message that this rank sent).
    """
    returned, sent = [], []
    for mark in MARKS:
        log: list[float] = []
        current.rank.recorder.watch = lambda op, peer, tensor, log=log: (
            log.append(number(tensor)) if op == "send" else None
        )
        returned.append(attempt(marked(n, mark, like)))
        sent.append(log)
    current.rank.recorder.watch = None
    return returned, sent


def same(seen: list, parts: np.ndarray) -> bool:
    """Whether the numbers read on every rank, [rank][mark][...], are those of `parts`."""
    return [[list(map(float, by_mark)) for by_mark in rank] for rank in seen] == np.swapaxes(
        numbers(parts), 0, 1
    ).tolist()


def where_it_parts(left: list, n: int, own: bool = False) -> str:
    """The first place where chunks that were read, [rank][mark][chunk], part from the sum. own: each rank has
    one chunk, of its own number.
    """
    whole = [[sum(BASE**i for i in range(n))] * n, [n * BASE**c for c in range(n)]]
    off = [
        (c, r, mark, read, whole[mark][c])
        for r in range(n)
        for mark in range(len(MARKS))
        for c, read in zip([r] if own else range(n), left[r][mark])
        if read != whole[mark][c]
    ]
    c, r, mark, read, right = min(off)
    good = sum(map(len, (rank[0] for rank in left))) - len({(c, r) for c, r, *_ in off})
    return (
        f"{good} of the {n if own else n * n} chunks of all ranks hold the sum. Chunk {c} of rank {r} has"
        f" parts of {_made_of(read, n, mark)}; it should have {_made_of(right, n, mark)}. In step k, which"
        " chunk does a rank send, which one does it receive? Is what comes added, or written over? (dist.recv"
        " puts it into the tensor you give; it returns the sender's rank.)"
    )


def _made_of(number: float, n: int, mark: int) -> str:
    """'rank 0 once, rank 3 twice'."""
    if not 0 <= number < BASE**n or number != int(number):
        return "different kinds, or no whole parts"
    times = {i: int(number) // BASE**i % BASE for i in range(n)}
    words = {1: "once", 2: "twice"}
    return (
        ", ".join(f"{MARKS[mark]} {i} {words.get(k, f'{k} times')}" for i, k in times.items() if k)
        or "nothing"
    )
