"""b3's first practice: dispatch and combine, with splits that are not even."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .... import toy
from ....runtime.failure import RankError
from ....runtime.world import World
from ....toy.experts import Experts
from ...practice import Answer, Exercise, right, wrong
from .shown import tokens


def expert_layer(x, choice, weight, expert, rank, world_size):
    """y (T, h) of this rank's tokens x (T, h). Expert number r is on rank r.

    choice, weight: (T, k), the numbers of each token's experts, and what their answers count. expert: this
    rank's, a function of rows (n, h) -> (n, h). toy.swap(rows, give, take) sends the first give[0] rows to
    rank 0, the next give[1] to rank 1, and so on; take[r] rows come from rank r. Its backward is there.
    """
    order = choice.flatten().argsort(stable=True)  # copies of tokens, by expert
    give = choice.flatten().bincount(minlength=world_size)
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give)
    give, take = give.tolist(), take.tolist()
    rows = toy.swap(x[order // choice.shape[1]], give, take)
    back = toy.swap(expert(rows), take, give)
    copies = torch.zeros_like(back).index_copy(0, order, back)
    return (copies.view(*choice.shape, -1) * weight.unsqueeze(-1)).sum(1)


T, H, K = 12, 8, 2


def _on_rank(attempt) -> dict:
    rank, n = dist.get_rank(), dist.get_world_size()
    twin = Experts(H, n, K).double()
    twin.bias[0] = 0.15  # so that the splits are uneven
    x = tokens(T, H).double()
    whole = x.clone().requires_grad_()
    choice, weight = (part.detach() for part in twin.route(whole))
    answers = torch.stack([twin.experts[e](whole) for e in range(n)], 1)  # of all experts to all tokens
    mine = answers.gather(1, choice[..., None].expand(-1, -1, H))  # (T, k, h)
    truth = (mine * weight[..., None]).sum(1)
    truth.sum().backward()
    given, seen = x.clone().requires_grad_(), []

    def expert(rows):
        seen.append(len(rows))
        return twin.experts[rank](rows)

    y = attempt(given, choice.clone(), weight.clone(), expert, rank, n)
    if not isinstance(y, torch.Tensor) or y.shape != truth.shape:
        return {"shape": tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__}
    near = lambda a, b: torch.allclose(a.to(b.dtype), b, rtol=1e-5, atol=1e-7)
    order = choice.flatten().argsort(stable=True)
    unsorted = mine.flatten(0, 1)[order]  # as they come back
    mixed = lambda rows: (rows.view(T, K, H) * weight[..., None]).sum(1)
    asked, copy = choice.flatten(), torch.arange(T * K)
    of_tokens = lambda token: mixed(answers[token, asked])  # copy i is of token[i]
    at_random = answers[copy // K, asked[order]]  # the copies as they are, to experts in order
    facts = {
        "shape": None,
        "right": near(y, truth),
        "rows": sum(seen),
        "unweighted": near(y, mine.sum(1)),
        "mean": near(y, mine.mean(1)),
        "order": near(y, mixed(unsorted)) or near(y, mixed(unsorted[order])),
        "first": any(near(y, mine[:, i]) or near(y, mine[:, i] * weight[:, i, None]) for i in range(K)),
        "reversed": near(y, (mine * weight.flip(1)[..., None]).sum(1)),
        "divided": near(y, truth / K),
        "copies": near(y, of_tokens(copy % T)) or near(y, of_tokens(copy % K)),
        "not sorted": near(y, mixed(at_random))
        or near(y, mixed(torch.zeros_like(at_random).index_copy(0, order, at_random))),
        "not asked": not seen,
        "dx": False,
    }
    if y.requires_grad:
        y.sum().backward()
        facts["dx"] = given.grad is not None and near(given.grad, whole.grad)
    return facts


EXCHANGED = (
    "How many rows come is known to those who send them. First exchange the numbers, an all-to-all of `give`;"
    " then the rows."
)


THERE_AND_BACK = (
    "Copies go out by give, and take of them come. Their answers go the other way: out by take, in by give."
)


def _judge(attempt) -> Answer:
    for n in (4, 2):
        with World(n, timeout=5) as world:
            try:
                results = world.run(_on_rank, attempt)
            except RankError as e:
                return _named(e, n) or Answer("crashed", f"On {n} ranks:\n{e.report}")
        if odd := [r["shape"] for r in results if r["shape"] is not None]:
            return wrong("another shape", f"On {n} ranks you return {odd[0]}; y is {(T, H)}.")
        if not all(r["right"] for r in results):
            for key, name, why in (
                (
                    "unweighted",
                    "combining without the router's weights",
                    "The answers are added as they are. Each counts by the router's weight, and without the"
                    " weights the router would never learn.",
                ),
                (
                    "mean",
                    "combining without the router's weights",
                    "The answers are averaged. Each counts by the router's weight.",
                ),
                (
                    "order",
                    "un-permuted in the wrong order",
                    "Every answer is there, at another token's place. Row i of what comes back belongs"
                    " to copy"
                    " order[i]: put it there (index_copy, or back[order.argsort()]), do not take"
                    " back[order].",
                ),
                (
                    "divided",
                    "divided by k once more",
                    "Every answer is weighed, and the weights sum to 1: sum them, no mean.",
                ),
                (
                    "copies",
                    "copies of other tokens",
                    "choice.flatten() has k copies of token 0, then k of token 1: copy i is of token i // k.",
                ),
                (
                    "not sorted",
                    "copies that are not sorted",
                    "The first give[0] rows go to rank 0. Put the copies in the order of their experts first:"
                    " copy order[i] is row i.",
                ),
                ("not asked", "no expert was asked", "Call expert(rows) on the rows that have come."),
                ("reversed", "weights of the other expert", "Weight i belongs to the answer of choice i."),
                (
                    "first",
                    "one expert of k",
                    "Each token has k experts, and you use one. Send k copies of every token.",
                ),
            ):
                if all(r[key] for r in results):
                    return wrong(name, why)
            return wrong(
                "another y",
                f"On {n} ranks y is not the twin's. A token's copies go out by expert, are answered, come"
                f" back"
                " by expert, and must find their token again.",
            )
        if not all(r["dx"] for r in results):
            return wrong(
                "an output cut off from x",
                "y is right, the gradient of x is not. Something between them has no backward:"
                " dist.all_to_all_single has none, and detach() cuts it off. toy.swap has one.",
            )
    return right(
        "y and the gradient of x are the twin's on 4 and on 2 ranks, with splits that are not even.",
        ("rows that rank 0 and rank 1 computed", f"{results[0]['rows']} and {results[1]['rows']}", ""),
        ("copies of tokens", str(2 * T * K), ""),
    )


def _named(error: RankError, n: int) -> Answer | None:
    """An all-to-all of rows that ended in a crash or a hang: its sizes do not fit."""
    # Where one died, the others may not have come so far.
    ranks = [s for s in error.seen if (s.exit is not None if error.kind == "died" else not s.finished)]
    last = [(s.where and s.where["in"]) or s.box for s in ranks]
    rows = [at and at["op"] == "all_to_all" and len(at["shape"] or []) == 2 for at in last]
    messages = [s.error.message for s in error.seen if s.error and not s.error.aborted]
    said_so = any("alltoall" in text or "Split sizes" in text for text in messages)
    if not (said_so or error.kind in ("timeout", "died") and rows and all(rows)):
        return None
    # Where rows are the first thing that a rank sends, no numbers were sent before them.
    at_once = any(of_rows and at["number"] == 1 for of_rows, at in zip(rows, last))
    name, why = (
        ("split sizes not exchanged", EXCHANGED) if at_once else ("splits that do not fit", THERE_AND_BACK)
    )
    return Answer(
        "crashed",
        f"On {n} ranks an all-to-all does not fit: give must add up to the rows that go out, and take must be"
        f" what the others give."
        f" {why}\n\n{error.report}",
        name,
    )


layer = Exercise(
    "dispatch and combine",
    expert_layer,
    _judge,
    minutes=12,
    hints=[
        "Make k copies of every token, T·k in all, and sort them by expert:"
        " choice.flatten().argsort(stable=True)."
        " Copy i belongs to token i // k.",
        "give is how many copies each expert gets: bincount. take is what the others have for you: an"
        " all-to-all of give, dist.all_to_all_single(take, give).",
        "rows = toy.swap(copies, give, take); the answers go back by toy.swap(…, take, give).",
        "What comes back is in the order of `order`: torch.zeros_like(back).index_copy(0, order, back) undoes"
        " it. Then weigh, and sum over k.",
    ],
)
