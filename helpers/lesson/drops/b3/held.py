"""b3's third practice: how many parameters a rank holds, of a model that uses few of them for each token."""

from __future__ import annotations

from ...practice import Answer, Exercise, ask, right, wrong


def parameters_on_rank(layers, attention, expert, experts, k, tp, ep):
    """Parameters that a rank holds. attention, expert: those of one layer's attention, and of one expert.

    experts: in each layer; k: of them for each token. tp cuts attention, ep shares the experts out.
    """
    return layers * (attention / tp + experts * expert / ep)


# Mixtral 8x22B (hidden 6144, 48 heads and 8 of K and V, experts of 16384, 56 layers), without its embeddings
HIDDEN, INNER, LAYERS = 6144, 16384, 56
MIXTRAL = (LAYERS, 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 6, 3 * HIDDEN * INNER, 8, 2)
CASES = [
    (*MIXTRAL, 2, 8),
    (*MIXTRAL, 2, 4),
    (*MIXTRAL, 1, 1),
    (1, 100, 1000, 64, 8, 4, 16),
    (2, 70, 30, 4, 1, 2, 2),
]
MISTAKES = {
    "counting active parameters for memory": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + k * e / ep),
        "A token uses k experts, but other tokens use the others. A rank must hold every expert that it owns."
        " Active parameters count for compute.",
    ),
    "active parameters, not shared out": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + k * e),
        "k experts work for one token. In memory are all that the rank owns: experts / ep.",
    ),
    "experts cut by tp as well": (
        lambda l, a, e, n, k, tp, ep: l * (a + n * e / ep) / tp,
        "tp cuts attention. Here an expert is whole on its rank: the experts' mesh has its own size for that,"
        " etp, and it is 1.",
    ),
    "attention shared out over ep": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + n * e) / ep,
        "ep shares out the experts. Attention is on every rank of it, cut by tp alone.",
    ),
    "every expert on every rank": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + n * e),
        "That is data parallelism. With ep ranks, each holds experts / ep of them.",
    ),
    "attention left whole": (
        lambda l, a, e, n, k, tp, ep: l * (a + n * e / ep),
        "tp cuts attention's matrices: a rank holds 1/tp.",
    ),
    "every expert on every rank, cut by tp": (
        lambda l, a, e, n, k, tp, ep: l * (a + n * e) / tp,
        "tp cuts attention. The experts are shared out over ep: a rank holds experts / ep of them, whole.",
    ),
    "all of it shared out over ep": (
        lambda l, a, e, n, k, tp, ep: l * (a + n * e) / ep,
        "ep shares out the experts. Attention is cut by tp alone.",
    ),
    "all of it cut by tp and ep": (
        lambda l, a, e, n, k, tp, ep: l * (a + n * e) / (tp * ep),
        "tp cuts attention, ep shares out the experts. Neither does the other's work here.",
    ),
    "one expert on each rank": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + e),
        "A layer has `experts` of them, and ep ranks share them out: experts / ep on each.",
    ),
    "one expert, shared out": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + e / ep),
        "A layer has `experts` of them, and ep ranks share them out: each has experts / ep, whole.",
    ),
    "experts counted, not their parameters": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + n / ep),
        "experts / ep is how many a rank owns. Each of them has `expert` parameters.",
    ),
    "k times too many": (
        lambda l, a, e, n, k, tp, ep: l * (a / tp + n * k * e / ep),
        "k says how many experts work for a token. It changes nothing in memory.",
    ),
    "experts of one layer": (
        lambda l, a, e, n, k, tp, ep: l * a / tp + n * e / ep,
        "Every layer has experts of its own: a bracket is missing.",
    ),
    "one layer": (lambda l, a, e, n, k, tp, ep: a / tp + n * e / ep, "That is one layer of them."),
}


def _judge(attempt) -> Answer:
    answers, truth = ask(attempt, CASES), [parameters_on_rank(*case) for case in CASES]
    near = lambda a, b: abs(a - b) <= 1e-6 * abs(b)
    for case, value in zip(CASES, answers):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return wrong("no number", f"parameters_on_rank{case} returned {value!r}.")
    figures = [
        (f"Mixtral 8x22B, TP 2, EP {case[-1]}, in 10⁹", f"{a / 1e9:.1f}", f"{b / 1e9:.1f}")
        for case, a, b in zip(CASES[:2], answers, truth)
    ]
    if all(map(near, answers, truth)):
        return right("All experts that a rank owns are in its memory, whoever uses them.", *figures)
    for name, (other, why) in MISTAKES.items():
        if all(near(a, other(*case)) for a, case in zip(answers, CASES)):
            return wrong(name, why, *figures)
    return wrong("another number", "layers · (attention / tp + experts · expert / ep).", *figures)


parameters = Exercise(
    "parameters on a rank",
    parameters_on_rank,
    _judge,
    minutes=6,
    hints=[
        "Take one layer: attention, cut by tp, and the experts that this rank owns.",
        "How many experts does a rank own? experts / ep. Does k matter for that?",
    ],
)
