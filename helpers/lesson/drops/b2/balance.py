"""b2's second practice: tokens for ranks, so that the causal half is shared evenly."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....runtime.world import World
from ....toy import context
from ...practice import Answer, Exercise, ask, right, wrong
from .shown import inputs


def tokens_of(rank, c, s):
    """The positions of the tokens that `rank` of c ranks holds, in rising order, as a list.

    s: tokens in all, a multiple of 2·c. Token i looks at i + 1 tokens: itself and all before it.
    """
    half = s // (2 * c)
    front, back = rank * half, s - (rank + 1) * half
    return [*range(front, front + half), *range(back, back + half)]


CASES = [(c, s) for c in (4, 8, 2) for s in (64, 4096)]
pairs = lambda tokens: sum(i + 1 for i in tokens)


def _front(rank: int, c: int, s: int) -> list[int]:
    half = s // (2 * c)
    return [*range(rank * half, (rank + 1) * half), *range((c + rank) * half, (c + rank + 1) * half)]


def _judge(attempt) -> Answer:
    answers = ask(attempt, [(rank, c, s) for c, s in CASES for rank in range(c)])
    for c, s in CASES:
        mine, answers = answers[:c], answers[c:]
        where = f"With {s} tokens on {c} ranks"
        try:
            mine = [[int(i) for i in tokens] for tokens in mine]
        except (TypeError, ValueError):
            return wrong(
                "no list of positions", f"{where} rank 0 gets {mine[0]!r}; return a list of numbers."
            )
        held = sorted(i for tokens in mine for i in tokens)
        if held != list(range(s)):
            present = set(held)
            twice = next((i for i, after in zip(held, held[1:]) if i == after), None)
            lost = next((i for i in range(s) if i not in present), None)
            nowhere = next((i for i in held if not 0 <= i < s), None)
            seen = [
                f"token {i} {what}"
                for i, what in (
                    (lost, "is on no rank"),
                    (twice, "is there twice"),
                    (nowhere, "does not exist"),
                )
                if i is not None
            ]
            return wrong(
                "tokens that are not shared out",
                f"{where}: {', '.join(seen)}. Every token belongs to one rank.",
            )
        most, mean = max(map(pairs, mine)), s * (s + 1) / 2 / c
        figures = [(f"{where}: pairs of the busiest rank, mean = 1", f"{most / mean:.2f}", "1.00")]
        if any(len(tokens) != s // c for tokens in mine):
            return wrong(
                "unequal numbers of tokens",
                f"{where} a rank holds {len(mine[0])}. Norms and MLPs are as long as their tokens: give each"
                f" rank {s // c}.",
                *figures,
            )
        if any(tokens != sorted(tokens) for tokens in mine):
            return wrong("positions out of order", f"{where}: return them in rising order.", *figures)
        if mine == [list(range(r * s // c, (r + 1) * s // c)) for r in range(c)]:
            return wrong(
                "chunks in order",
                "The last rank's tokens look at all others, the first rank's at themselves. All wait for the"
                " last.",
                *figures,
            )
        if mine == [_front(r, c, s) for r in range(c)]:
            return wrong(
                "both chunks counted from the front",
                "Chunks r and c + r: rank 0 has the lighter of each pair. Let one come from the front and the"
                " other from the end.",
                *figures,
            )
        striped = all(tokens == list(range(r, s, c)) for r, tokens in enumerate(mine))
        if most > 1.001 * mean and not striped:
            return wrong(
                "one rank has more pairs",
                "Token i looks at i + 1 tokens. A light chunk from the front goes with a heavy one from the"
                " end: front and end together weigh the same for every rank.",
                *figures,
            )
    with World(4, timeout=8) as world:
        equal, counted = zip(*world.run(_on_ring, attempt))
    if not all(equal):  # a bug of ours, or an answer that depends on the rank it runs on
        return wrong("another answer on another rank", "On four ranks the places do not fit together.")
    text = "On four real ranks the ring equals the twin, and every rank computes its share of the pairs."
    if striped:
        text += " (This is striped attention: even but for s/c tokens' worth, and in single tokens, not in"
        text += " chunks, so half of every part is masked.)"
    return right(text, *figures, ("pairs on four real ranks", ", ".join(f"{n:,}" for n in counted), ""))


def _on_ring(attempt) -> tuple[bool, int]:
    *whole, _ = inputs(4, 4, 64)
    c, rank = dist.get_world_size(), dist.get_rank()
    at = [torch.tensor(list(attempt(r, c, 64))) for r in range(c)]
    counted = 0

    def counting(q, k, v, mask):
        nonlocal counted
        counted += int(mask.sum())
        return context.attend(q, k, v, mask)

    y = context.ring_attention(*(x[:, :, at[rank]] for x in whole), at, attend=counting)
    line = torch.arange(64)
    twin, _ = context.attend(*whole, context.sees(line, line))
    return torch.allclose(y, twin[:, :, at[rank]], atol=1e-5), counted


places = Exercise(
    "tokens that share the work",
    tokens_of,
    _judge,
    minutes=7,
    hints=[
        "Token i looks at i + 1 tokens: the end is heavy. Which chunk should a light one go with?",
        "Cut into 2·c chunks. The lightest goes with the heaviest: chunk r with chunk 2c − 1 − r.",
        "half = s // (2 * c): one chunk begins at rank · half, the other at s − (rank + 1) · half.",
    ],
)
