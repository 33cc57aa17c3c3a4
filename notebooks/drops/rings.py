"""Where a ring of chunks parts from the sum, told from numbers that name their rank or their chunk."""

from __future__ import annotations

import torch

from helpers.practice import Run

BASE = 16  # a digit for each rank or chunk, from the second on; float32 is exact for five of them
MARKS = ("rank", "chunk")


def marked(rank: int, n: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Two tensors of this rank. In the first every number is BASE·BASE**rank, in the second BASE·BASE**(its
    chunk): what has a first digit is no sum of these.
    """
    chunk = [torch.full_like(c, i) for i, c in enumerate(torch.tensor_split(like, n))]
    return [BASE * BASE ** torch.full_like(like, rank), BASE * BASE ** torch.cat(chunk)]


def unchanged(run: Run, _) -> bool:
    """Whether every rank's numbers are still its own."""
    return not run.error and all(
        bool((rank["values"][0] == BASE * BASE**r).all()) for r, rank in enumerate(run.ranks)
    )


def half_of_the_way(run: Run, truth: Run) -> bool:
    """Whether each rank holds one finished chunk, each another one, with half of a ring's bytes sent."""
    if run.error or max(run.traffic.counted) > 0.6 * max(truth.traffic.counted):
        return False
    whole = sum(BASE**r for r in range(run.n))
    finished = [
        [c for c, chunk in _chunks(rank["values"][0], run.n) if _number(chunk) == whole]
        for r, rank in enumerate(run.ranks)
    ]
    return sorted(finished) == [[c] for c in range(run.n)]


def mean(run: Run, _) -> bool:
    """Whether every number is the sum's, divided by the number of ranks."""
    if run.error:
        return False
    whole = sum(BASE**r for r in range(run.n))
    chunks = (c for r, rank in enumerate(run.ranks) for _, c in _chunks(rank["values"][0], run.n))
    return all(_number(chunk) * run.n == whole for chunk in chunks)


def repeated(run: Run, _) -> str:
    """Where it parts, if some chunk has a rank's numbers more than once."""
    return where_it_parts(run) if any(max(times) > 1 for times in _times(run, 0)) else ""


def lacking(run: Run, _) -> str:
    """Where it parts, if all that is missing of the sum are parts of ranks."""
    times = _times(run, 0)
    return where_it_parts(run) if times and all(max(one) == 1 for one in times) else ""


def mixed(run: Run, _) -> str:
    """Where it parts, if some chunk has numbers of several chunks."""
    several = any(len(times) - times.count(0) > 1 for times in _times(run, 1))
    return where_it_parts(run) if several else ""


def _times(run: Run, mark: int) -> list[list[int]]:
    """How often each rank, or chunk, is in each chunk; [] where these are no parts of ranks or chunks."""
    n, ranks = run.n, () if run.error else enumerate(run.ranks)
    chunks = [_number(c) for r, rank in ranks for _, c in _chunks(rank["values"][mark], n)]
    if not all(0 <= x < BASE**n and x == int(x) for x in chunks):
        return []
    times = [[int(x) // BASE**i % BASE for i in range(n)] for x in chunks]
    return times if all(sum(one) <= 2 * n for one in times) else []  # else something else was added


def where_it_parts(run: Run, _=None) -> str:
    """The first place where chunks part from the sum; '' where no number of the first two cases does."""
    if run.error:
        return ""
    n = run.n
    whole = [[sum(BASE**i for i in range(n))] * n, [n * BASE**c for c in range(n)]]
    chunks = {
        (c, r, mark): _number(chunk)
        for r in range(n)
        for mark in range(len(MARKS))
        for c, chunk in _chunks(run.ranks[r]["values"][mark], n)
    }
    off = [(c, r, mark) for (c, r, mark), read in chunks.items() if read != whole[mark][c]]
    if not off:
        return ""
    c, r, mark = min(off)
    good = len(chunks) // 2 - len({(c, r) for c, r, _ in off})
    return (
        f"{good} of the {len(chunks) // 2} chunks of all ranks hold the sum. Chunk {c} of rank {r} has"
        f" parts of {_made_of(chunks[c, r, mark], n, mark)}; it should have"
        f" {_made_of(whole[mark][c], n, mark)}."
    )


def _chunks(x: torch.Tensor, n: int):
    return enumerate(torch.tensor_split(x, n))


def _number(chunk: torch.Tensor) -> float:
    """The one number in a chunk, without its first digit; nan where it holds several."""
    same = chunk.numel() and bool((chunk == chunk.flatten()[0]).all())
    return float(chunk.flatten()[0]) / BASE if same else float("nan")


def _made_of(number: float, n: int, mark: int) -> str:
    """'rank 0 once, rank 3 twice'."""
    if not 0 <= number < BASE**n or number != int(number):
        return "different kinds, or no whole parts"
    times = {i: int(number) // BASE**i % BASE for i in range(n)}
    words = {1: "once", 2: "twice"}
    parts = [f"{MARKS[mark]} {i} {words.get(k, f'{k} times')}" for i, k in times.items() if k]
    return ", ".join(parts) or "nothing"
