"""b2's first practice: two softmaxes over parts of the keys become one over all."""

from __future__ import annotations

import torch

from ....toy import context
from ...practice import Answer, Exercise, ask, right, wrong


def merge_parts(y1, lse1, y2, lse2):
    """Attention to all keys, from attention to two parts of them: (y, lse).

    y1, y2: softmax(scores) @ v over one part each, (tokens, h). lse1, lse2: (tokens, 1), the logarithm of
    each softmax's sum, log Σ exp(score). Return the same two for all keys.
    """
    most = torch.maximum(lse1, lse2)
    w1, w2 = (lse1 - most).exp(), (lse2 - most).exp()
    return (w1 * y1 + w2 * y2) / (w1 + w2), most + (w1 + w2).log()


def _cases() -> list[tuple[tuple, tuple]]:
    """(the two parts, what is right): parts of 3 and 5 keys; large scores; a part that a token cannot see"""
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=chance, dtype=torch.float64) for n in (4, 8, 8))
    made = []
    for scale, hidden in ((1.0, 0), (5e3, 0), (1.0, 2)):
        mask = torch.ones(4, 8, dtype=torch.bool)
        mask[:hidden, 3:] = False
        flat = lambda parts: tuple(x[0, 0] for x in parts)
        one = context.attend(q * scale, k[:, :, :3], v[:, :, :3], mask[:, :3])
        two = context.attend(q * scale, k[:, :, 3:], v[:, :, 3:], mask[:, 3:])
        made.append((flat(one) + flat(two), flat(context.attend(q * scale, k, v, mask))))
    return made


OTHERS = {
    "averaging partial softmaxes": (
        lambda y1, l1, y2, l2: (y1 + y2) / 2,
        "Each part's weights sum to 1 over its own keys. Half and half gives both parts the same say, however"
        " small the scores in one of them are. A part counts by its sum, exp(lse).",
    ),
    "adding partial softmaxes": (
        lambda y1, l1, y2, l2: y1 + y2,
        "Each part's weights sum to 1 already, so together they sum to 2. Weigh the parts by their sums,"
        " exp(lse), and divide by both.",
    ),
    "weighted by the logarithm": (
        lambda y1, l1, y2, l2: (l1 * y1 + l2 * y2) / (l1 + l2),
        "lse is the logarithm of a part's sum. The weight of a part is the sum itself, exp(lse).",
    ),
    "weights of the other part": (
        lambda y1, l1, y2, l2: context.merge(y1, l2, y2, l1)[0],
        "y1 counts by exp(lse1), the sum of its own part, and y2 by exp(lse2).",
    ),
    "not divided by both sums": (
        lambda y1, l1, y2, l2: l1.exp() * y1 + l2.exp() * y2,
        "Each part counts by its sum. Together they must be divided by both sums.",
    ),
    "weighed, and not divided by the weights": (
        lambda y1, l1, y2, l2: (
            (l1 - torch.maximum(l1, l2)).exp() * y1 + (l2 - torch.maximum(l1, l2)).exp() * y2
        ),
        "The weights are right, and do not sum to 1. Divide by their sum, token by token.",
    ),
    "the larger part alone": (
        lambda y1, l1, y2, l2: torch.where(l1 > l2, y1, y2),
        "The larger maximum makes exp safe. The smaller part still counts, by exp(its lse − the larger one).",
    ),
}


def _judge(attempt) -> Answer:
    cases = _cases()
    answers = ask(attempt, [parts for parts, _ in cases])
    tensors = lambda a: isinstance(a, (tuple, list)) and len(a) == 2 and all(torch.is_tensor(x) for x in a)
    for (given, truth), answer in zip(cases, answers):
        if not tensors(answer) or any(a.shape != t.shape for a, t in zip(answer, truth)):
            return wrong(
                "not y and lse",
                "Return two tensors, y of (4, 8) and lse of (4, 1): the next part is merged to these.",
            )
    near = lambda a, b: torch.allclose(a.to(b.dtype), b, rtol=1e-5, atol=1e-7)
    (given, (y, lse)), (mine, mine_lse) = cases[0], answers[0]
    far = f"{float((mine - y).abs().max()):.2g}"
    figures = [("largest difference from attention to all keys", far, "0")]
    if not near(mine, y):
        for name, (other, why) in OTHERS.items():
            if near(mine, other(*given)):
                return wrong(name, why, *figures)
        return wrong("another y", "Each part counts by its sum, exp(lse), divided by both sums.", *figures)
    if not near(mine_lse, lse):
        return wrong(
            "sums that are not merged",
            "y is right, lse is not: the next part would be weighed against a wrong sum. It is the logarithm"
            " of exp(lse1) + exp(lse2).",
            ("lse of the first token", f"{float(mine_lse[0]):.3f}", f"{float(lse[0]):.3f}"),
        )
    if not all(near(a, t) for a, t in zip(answers[1], cases[1][1])):
        return wrong(
            "the larger lse not taken out first",
            f"Right for small scores. exp of an lse of {float(cases[1][0][1].max()):.0f} is infinite. For"
            " each token, take the larger lse out of both before exp, as softmax does.",
        )
    if not all(near(a, t) for a, t in zip(answers[2], cases[2][1])):
        return wrong(
            "a part that a token may not see",
            "Tokens 0 and 1 see no key of the second part: its lse is −∞ and its y is 0. Their answer is the"
            " first part's.",
        )
    return right(
        "Two parts became one softmax, also where scores are large and where a token sees one part alone.",
        *figures,
    )


parts = Exercise(
    "merge two partial softmaxes",
    merge_parts,
    _judge,
    minutes=6,
    hints=[
        "A softmax over all keys divides by exp(lse1) + exp(lse2). Part 1 has divided by exp(lse1) already.",
        "So y = (exp(lse1) · y1 + exp(lse2) · y2) / (exp(lse1) + exp(lse2)). The new lse is the logarithm of"
        " that sum.",
        "exp of 1,000 is infinite. Take the larger lse, `torch.maximum(lse1, lse2)`, out of both.",
    ],
)
