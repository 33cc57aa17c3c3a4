"""b1's second practice: the order of a step, with each layer gathered while the one before it computes."""

from __future__ import annotations

from ....runtime.world import World
from ...practice import Answer, Exercise, ask, right, wrong
from .facts import mistake, shown_by
from .shown import LAYERS, ONE_NODE, order_timeline, whole_at_once


def step_order(n):
    """One step of n layers: a list of ("gather", i), ("F", i), ("free", i), ("B", i), ("reduce", i).

    A gather or a reduction only begins; F and B wait for their layer's weights.
    """
    order = [("gather", 0)]
    for i in range(n):
        order += [("gather", i + 1)] * (i + 1 < n) + [("F", i), ("free", i)]
    order += [("gather", n - 1)]
    for i in reversed(range(n)):
        order += [("gather", i - 1)] * (i > 0) + [("B", i), ("free", i), ("reduce", i)]
    return order


WORDS = ("gather", "F", "free", "B", "reduce")


def _walk(order: list[tuple[str, int]], n: int) -> dict:
    """What an order does, on paper: what lacks weights, comes late, is reduced how often."""
    whole, fetched, done = set(), set(), []
    facts = {"without": None, "late": 0, "again": 0, "early": 0, "kept": 0}
    computed = [line for line in order if line[0] in "FB"]
    for what, i in order:
        if what == "gather":
            facts["again"] += i in whole
            whole.add(i)
            fetched.add(i)
        elif what == "free":
            whole.discard(i)
        elif what == "reduce":
            facts["early"] += ("B", i) not in done
        else:
            if i not in whole and facts["without"] is None:
                facts["without"] = "freed" if i in fetched else what
            fetched.discard(i)
            after = computed[len([line for line in done if line[0] in "FB"]) + 1 :][:1]
            facts["late"] += bool(after) and after[0][1] != i and after[0][1] not in whole
        done.append((what, i))
        if (what, i) == ("F", n - 1):
            facts["kept"] = len(whole)  # at the end of forward
    reduced = [done.count(("reduce", i)) for i in range(n)]
    return facts | {
        "computed": computed == [("F", i) for i in range(n)] + [("B", i) for i in reversed(range(n))],
        "whole": whole_at_once(order),
        "left": len(whole),
        "least reduced": min(reduced),
        "most reduced": max(reduced),
    }


EARLY = (
    "Gathered long before they are needed, all layers are whole at once: the memory that FSDP saves is gone,"
    " and the step is no shorter. One layer ahead is enough to hide a gather under the compute before it."
)
KEPT = (
    "Weights that are not freed after their forward add up: at the end of forward the whole model is here."
    " That is reshard_after_forward=False. Free each layer after F, and after B."
)


# In this order: what comes first explains more.
MISTAKES = (
    mistake(
        "layers in the wrong order",
        "Forward runs layers 0 to n−1, backward n−1 to 0, each once.",
        lambda f: not f["computed"],
    ),
    mistake(
        "freed before it is used",
        "The weights were gathered, and freed before their layer computed. F i comes before free i, and so"
        " does B i.",
        lambda f: f["without"] == "freed",
    ),
    mistake(
        "backward without a second gather",
        "B needs the whole weights too, and they were freed after F. Gather each layer again in backward.",
        lambda f: f["without"] == "B",
    ),
    mistake(
        "weights that are not there",
        "F needs its layer's weights: its gather must have begun, and nothing freed them since.",
        lambda f: f["without"] == "F",
    ),
    mistake(
        "gradients reduced twice",
        "One reduction for each layer, after its B. A second one sums sums.",
        lambda f: f["most reduced"] > 1,
    ),
    mistake(
        "gradients not reduced",
        "After its B, every layer's gradients are reduced.",
        lambda f: f["least reduced"] == 0,
    ),
    mistake("reduced before backward", "There are no gradients before B.", lambda f: f["early"]),
    mistake("gathered weights kept", KEPT, lambda f: f["left"] or f["kept"] > 2),
    mistake(
        "gathered twice over",
        "A gather of weights that are whole sends bytes for nothing.",
        lambda f: f["again"],
    ),
    mistake("prefetch so early that nothing is saved", EARLY, lambda f: f["whole"] > 2),
    mistake(
        "gathered only when needed",
        "While a layer computes, nothing is on its way, and the next one must wait. Begin the next layer's"
        " gather before F or B of this one.",
        lambda f: f["late"],
    ),
)
SIZES = (3, LAYERS, 9)


def _judge(attempt) -> Answer:
    answers = ask(attempt, [(n,) for n in SIZES])
    orders = []
    for n, order in zip(SIZES, answers):
        try:
            orders.append([(str(what), int(i)) for what, i in order])
        except (TypeError, ValueError):
            return wrong(
                "no list of steps", f"For {n} layers: return a list such as [('gather', 0), ('F', 0)]."
            )
        if odd := [line for line in orders[-1] if line[0] not in WORDS or not 0 <= line[1] < n]:
            return wrong(
                "a step that does not exist",
                f"For {n} layers: {odd[0]!r}. There are {', '.join(WORDS)}, of layers 0 to {n - 1}.",
            )
    facts = [_walk(order, n) for order, n in zip(orders, SIZES)]
    figures = [("layers whole at once, of 9", str(facts[-1]["whole"]), "2")]
    if mistaken := shown_by(facts, MISTAKES):
        return wrong(mistaken.name, mistaken.text, *figures)
    for n, order, known in zip(SIZES, orders, facts):  # a mistake with some numbers of layers only
        if mistaken := shown_by([known], MISTAKES):
            return wrong(mistaken.name, f"With {n} layers: {mistaken.text}", *figures)
    with World(4, fabric=ONE_NODE, timeout=20) as world:
        timeline = order_timeline(world, [(*line, 0) for line in orders[1]])
    from ... import gantt  # ranks import this module, and need no matplotlib

    answer = right(
        "Two layers whole at a time, and gathers run under compute. Below: on real ranks.", *figures
    )
    answer.picture = gantt.timeline(timeline, "Your order, on four ranks")
    return answer


order = Exercise(
    "the order of a step",
    step_order,
    _judge,
    minutes=6,
    hints=[
        "Forward of layer i needs gather i before it and free i after it. Where must gather i + 1 stand, to"
        " run while F i computes?",
        "Begin with gather 0. Then for each layer: gather i + 1, F i, free i. Backward is the same, down.",
        "Backward begins with gather n − 1. After B i: free i, reduce i.",
    ],
)
