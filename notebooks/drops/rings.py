"""Finds the mistake in a ring all-reduce, or in one step of it, that was written as an exercise.

The ring sums tensors whose numbers are powers of BASE, one power for each rank or for each chunk. So the
digits of a result, in that base, count how often each rank's numbers, or each chunk's, were added.
"""

from __future__ import annotations

import torch

from helpers.practice import Run

# Digit i + 1 counts rank or chunk i; digit 0 is unused. A float32 is exact for six digits, so for five ranks.
BASE = 16
MARKS = ("rank", "chunk")  # what the powers stand for in the first and in the second tensor of `marked`


def marked(rank: int, n: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Two tensors of this rank. In the first every number is BASE·BASE**rank, in the second
    BASE·BASE**(the number of its chunk). A result whose digit 0 is not 0 is no sum of such numbers.
    """
    chunk = [torch.full_like(c, i) for i, c in enumerate(torch.tensor_split(like, n))]
    return [BASE * BASE ** torch.full_like(like, rank), BASE * BASE ** torch.cat(chunk)]


def faults(run: Run, truth: Run) -> dict[str, bool | str]:
    """Mistake -> whether the run has it, or a text that shows it. An earlier mistake explains later ones."""
    if run.error:
        return {}
    where, times = where_it_parts(run), _times(run, 0)
    return {
        "the mean where the sum was meant": _mean(run),
        "x was not changed": all(
            bool((rank["values"][0] == BASE * BASE**r).all()) for r, rank in enumerate(run.ranks)
        ),
        "half of the way": _half_of_the_way(run, truth),
        "a part added more than once": any(max(one) > 1 for one in times) and where,
        "chunks of different numbers added": (
            any(len(one) - one.count(0) > 1 for one in _times(run, 1)) and where
        ),
        "parts that never came": bool(times) and all(max(one) == 1 for one in times) and where,
        "another value than the sum": where,
    }


def to_pass_on(rank: int, n: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends in one step of a ring: the first of `marked`. And what it receives into, which has
    rank + 1 times the mark of a rank more than there are.
    """
    of = lambda r: marked(r, n, torch.empty(length))[0]
    return of(rank), (rank + 1) * of(n)


def step_faults(run: Run) -> dict[str, bool | str]:
    """The same for one step of a ring with the tensors of `to_pass_on`. A value is (incoming, outgoing)."""
    n = run.n
    if run.error:
        return {}
    held, kept = ([_marks(_number(rank["values"][0][which]), n) for rank in run.ranks] for which in (0, 1))
    sent = [f"rank {r}'s outgoing" for r in range(n)]
    wrong = [r for r in range(n) if held[r] != [sent[r - 1]]]
    if not wrong:
        changed = any(kept[r] != [sent[r]] for r in range(n))
        return {
            "outgoing is changed": changed
            and "Every rank receives the right numbers. Leave outgoing as it was."
        }
    r = wrong[0]
    mine = " plus ".join(held[r]) or "something else"
    text = f"Rank {r}'s incoming has become {mine}; it should be {sent[r - 1]}."
    return {
        "turned round": held == [[sent[(r + 1) % n]] for r in range(n)] and text,
        "nothing received": all(held[r] == [f"rank {r}'s incoming"] for r in range(n)),
        "added, not received": any(len(marks) > 1 for marks in held) and text,
        "not what the previous rank sent": text,
    }


def _marks(number: float, n: int) -> list[str]:
    """Whose numbers were added up to this one in a step; [] if it is no such sum."""
    if not 0 <= number < BASE ** (n + 1) or number != int(number):
        return []
    *ranks, old = _digits(number, n + 1)
    if max(ranks) > 2 or old > n:
        return []
    marks = [f"rank {r}'s outgoing" for r, times in enumerate(ranks) for _ in range(times)]
    return marks + [f"rank {old - 1}'s incoming"] * (old > 0)


def _half_of_the_way(run: Run, truth: Run) -> bool:
    """Whether the ring ended after its reduce-scatter: half of the bytes are sent, and each rank holds one
    finished chunk, no two the same.
    """
    if max(run.traffic.counted) > 0.6 * max(truth.traffic.counted):
        return False
    whole = sum(BASE**r for r in range(run.n))
    finished = [
        [c for c, chunk in _chunks(rank["values"][0], run.n) if _number(chunk) == whole]
        for r, rank in enumerate(run.ranks)
    ]
    return sorted(finished) == [[c] for c in range(run.n)]


def _mean(run: Run) -> bool:
    """Whether every number is the mean over the ranks, in place of the sum."""
    whole = sum(BASE**r for r in range(run.n))
    chunks = (c for r, rank in enumerate(run.ranks) for _, c in _chunks(rank["values"][0], run.n))
    return all(_number(chunk) * run.n == whole for chunk in chunks)


def _times(run: Run, mark: int) -> list[list[int]]:
    """For each chunk of each rank: how often each rank (mark 0) or each chunk (mark 1) was added to it. [] if
    the chunks are no such sums.
    """
    n = run.n
    chunks = [_number(c) for rank in run.ranks for _, c in _chunks(rank["values"][mark], n)]
    if not all(0 <= x < BASE**n and x == int(x) for x in chunks):
        return []
    times = [_digits(x, n) for x in chunks]
    return times if all(sum(one) <= 2 * n for one in times) else []  # with more: not counted


def where_it_parts(run: Run) -> str:
    """A text on the first chunk, in either tensor of `marked`, that is not the sum; '' if there is none."""
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


def _digits(number: float, n: int) -> list[int]:
    """How often each of n marks was added to this number, which is a whole one."""
    return [int(number) // BASE**i % BASE for i in range(n)]


def _chunks(x: torch.Tensor, n: int):
    return enumerate(torch.tensor_split(x, n))


def _number(chunk: torch.Tensor) -> float:
    """The number of which a chunk is full, divided by BASE; nan if its numbers differ."""
    same = chunk.numel() and bool((chunk == chunk.flatten()[0]).all())
    return float(chunk.flatten()[0]) / BASE if same else float("nan")


def _made_of(number: float, n: int, mark: int) -> str:
    """What was added up to this number, such as 'rank 0 once, rank 3 twice'."""
    if not 0 <= number < BASE**n or number != int(number):
        return "unequal or unexpected numbers"
    words = {1: "once", 2: "twice"}
    times = enumerate(_digits(number, n))
    parts = [f"{MARKS[mark]} {i} {words.get(k, f'{k} times')}" for i, k in times if k]
    return ", ".join(parts) or "nothing"
