"""Beyond, b2: one sequence over four ranks, three ways; who waits for whom."""

from __future__ import annotations

import math
from collections import Counter
from operator import index, itemgetter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector

from drops.b2.attention import inputs
from helpers import toy
from helpers.practice import Answer, Asked, OnRanks, Run, WrongForm, alike, first, multiple, right
from helpers.ranks import World
from helpers.toy import context

# -- practice: merge two partial softmaxes --------------------------------------------------------


def merge_parts(y1, lse1, y2, lse2):
    """Attention to all keys, from attention to two parts of them: (y, lse).

    y1, y2: softmax(scores) @ v over one part each, (tokens, h). lse1, lse2: (tokens, 1), the logarithm of
    each softmax's sum, log Σ exp(score). Return the same two for all keys.
    """
    # exp of a difference from the larger one cannot overflow.
    most = torch.maximum(lse1, lse2)
    w1, w2 = (lse1 - most).exp(), (lse2 - most).exp()
    return (w1 * y1 + w2 * y2) / (w1 + w2), most + (w1 + w2).log()


MANY = 100  # tokens, where the other cases have four


def _two_parts() -> list[tuple]:
    """The arguments of `merge_parts` in four cases: small scores; large scores; two tokens that see one part
    alone; many tokens. One part has 3 keys, the other 5.
    """
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=chance, dtype=torch.float64) for n in (4, 8, 8))
    many = torch.randn(1, 1, MANY, 8, generator=chance, dtype=torch.float64)
    cases = []
    for q, scale, hidden in ((q, 1.0, 0), (q, 5e3, 0), (q, 1.0, 2), (many, 1.0, 0)):
        mask = torch.ones(q.shape[2], 8, dtype=torch.bool)
        mask[:hidden, 3:] = False
        one = context.attend(q * scale, k[:, :, :3], v[:, :, :3], mask[:, :3])
        two = context.attend(q * scale, k[:, :, 3:], v[:, :, 3:], mask[:, 3:])
        cases.append(tuple(x[0, 0] for x in one + two))
    return cases


def _y_and_lse(answer) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(answer, torch.Tensor):
        raise WrongForm("you return one tensor")
    y, lse = answer
    shapes, n = (tuple(y.shape), tuple(lse.shape)), MANY if len(y) == MANY else 4
    if shapes != ((n, 8), (n, 1)):
        wanted = f"({n}, 8) and ({n}, 1)"
        raise WrongForm(f"you return y of {shapes[0]} and lse of {shapes[1]}, and {wanted} are wanted")
    return y, lse


CLOSE = 1e-5  # float32 is right too
_y = lambda values: values[0][0]  # of the case with small scores


def _far(run: Run, truth: Run) -> str:
    far = float((_y(run.values) - _y(truth.values)).abs().max())
    return f"below {CLOSE:g}" if far < CLOSE else f"{far:.2g}"


def _found_in_parts(run: Run, truth: Run) -> tuple[str, str] | None:
    off = lambda of: not alike(of(run.values), of(truth.values), CLOSE)
    small, large, unseen = (off(itemgetter(i)) for i in range(3))
    sums = run.values[1][1]
    lost = sums == -math.inf  # log 0 where both exp were 0
    some = bool(lost.any() and not lost.all() and sums[~lost].isfinite().all())
    return first(
        {
            "one maximum for all tokens": not small and some,
            "another y": off(_y),
            "sums that are not merged": small,
            "the larger lse not taken out first": large,
            "a part that a token may not see": unseen,
        }
    )


parts = Asked(
    "merge two partial softmaxes",
    merge_parts,
    minutes=6,
    hints=[
        "A softmax over all keys divides by exp(lse1) + exp(lse2). Part 1 has divided by exp(lse1) already.",
        "So y = (exp(lse1) · y1 + exp(lse2) · y2) / (exp(lse1) + exp(lse2)). The new lse is the logarithm of"
        " that sum.",
        "exp of 1,000 is infinite. Take the larger lse, `torch.maximum(lse1, lse2)`, out of both.",
    ],
    cases=_two_parts,
    reads=_y_and_lse,
    tolerance=CLOSE,
    proves=_y,  # a wrong y is named first, whatever else is wrong
    praise="Two parts became one softmax, also where scores are large and where a token sees one part alone.",
    figures=lambda run, truth: [
        ("largest difference from attention to all keys", _far(run, truth), f"below {CLOSE:g}"),
        ("lse of the first token", *(f"{float(one.values[0][1][0]):.3f}" for one in (run, truth))),
    ],
    finds=_found_in_parts,
)


# -- practice: tokens that share the work ---------------------------------------------------------


def tokens_of(rank, c, s):
    """The positions of the tokens that `rank` of c ranks holds, in rising order, as a list.

    s: tokens in all, a multiple of 2·c. Token i looks at i + 1 tokens: itself and all before it.
    """
    # A light chunk from the front goes with a heavy one from the end: as much work on every rank.
    half = s // (2 * c)
    front, back = rank * half, s - (rank + 1) * half
    return [*range(front, front + half), *range(back, back + half)]


SIZES = [(c, s) for c in (4, 8, 2) for s in (64, 4096)]
_striped = lambda c, s: [list(range(rank, s, c)) for rank in range(c)]


def _by_size(run: Run) -> list[tuple[int, int, list[list[int]]]]:
    """(c, s, the tokens of each of the c ranks) of each size."""
    answers = iter(run.values)
    return [(c, s, [next(answers) for _ in range(c)]) for c, s in SIZES]


def _load(c: int, s: int, held: list[list[int]]) -> float:
    """Pairs of the busiest rank, in units of the mean."""
    return max(sum(i + 1 for i in tokens) for tokens in held) / (s * (s + 1) / 2 / c)


def _positions(tokens) -> list[int]:
    """The positions as a list of int. Raises TypeError for a mask or a float."""
    if any(isinstance(i, bool) or getattr(i, "dtype", None) is torch.bool for i in tokens):
        raise TypeError("a mask")
    return [index(i) for i in tokens]


def _lost(s: int, held: list[list[int]]) -> str:
    """A text on tokens that are on no rank, on several, or do not exist; "" if there are none."""
    if len(held) > 1 and all(sorted(tokens) == sorted(held[0]) for tokens in held):
        return "all ranks return the same positions"
    on = Counter(i for tokens in held for i in tokens)
    faults = {
        "on no rank": [i for i in range(s) if i not in on],
        "there more than once": [i for i in on if on[i] > 1],
        "beyond the text": [i for i in on if not 0 <= i < s],
    }
    say = lambda tokens, what: f"{len(tokens)} token{'s' * (len(tokens) > 1)} {what}, {min(tokens)} first"
    counted = (say(tokens, what) for what, tokens in faults.items() if tokens)
    return ", ".join(counted)


def _loads(run: Run) -> list[tuple[str, str, str]]:
    """The figure of the size with the most pairs on one rank; [] if the tokens are not shared out."""
    sizes = _by_size(run)
    if any(_lost(s, held) for _, s, held in sizes):
        return []
    c, s, held = max(sizes, key=lambda size: _load(*size))
    what = f"With {s} tokens on {c} ranks: pairs of the busiest rank, mean = 1"
    return [(what, f"{_load(c, s, held):.2f}", "1.00")]


def _found_in_places(run: Run, _) -> tuple[str, str] | None:
    for c, s, held in _by_size(run):
        load, tokens = _load(c, s, held), [len(positions) for positions in held]
        found = {
            "tokens that are not shared out": _lost(s, held),
            "unequal numbers of tokens": tokens != [s // c] * c and f"the ranks hold {tokens}",
            "positions out of order": held != [sorted(t) for t in held] and "a rank's positions do not rise",
            "one rank has more pairs": (
                load > 1.001 and held != _striped(c, s) and f"the busiest rank has {load:.2f} times the mean"
            ),
        }
        for name, what in found.items():
            if what:
                return name, f"With {s} tokens on {c} ranks: {what}."
    return None


def _on_ring(places: list[list[int]]) -> tuple[bool, int]:
    """On a rank: (whether the ring equals the twin with the tokens at these places, pairs computed)."""
    *whole, _ = inputs(4, 4, 64)
    at, rank, counted = [torch.tensor(tokens) for tokens in places], dist.get_rank(), []

    def counting(q, k, v, mask):
        counted.append(int(mask.sum()))
        return context.attend(q, k, v, mask)

    y = context.ring_attention(*(x[:, :, at[rank]] for x in whole), at, attend=counting)
    line = torch.arange(64)
    twin, _ = context.attend(*whole, context.sees(line, line))
    return torch.allclose(y, twin[:, :, at[rank]], atol=1e-5), sum(counted)


def _on_real_ranks(run: Run) -> Answer:
    with World(4, timeout=8) as world:
        equal, counted = zip(*world.run(_on_ring, run.values[:4]))
    assert all(equal), "the ring is not the twin"
    text = "On four real ranks the ring equals the twin, and every rank computes its share of the pairs."
    if any(held == _striped(c, s) for c, s, held in _by_size(run)):
        text += " (This is striped attention: even but for s/c tokens' worth, and in single tokens, not in"
        text += " chunks, so half of every part is masked.)"
    pairs = ", ".join(f"{n:,}" for n in counted)
    return right(text, *_loads(run), ("pairs on four real ranks", pairs, ""))


places = Asked(
    "tokens that share the work",
    tokens_of,
    minutes=7,
    hints=[
        "Token i looks at i + 1 tokens: the end is heavy. Which chunk should a light one go with?",
        "Cut into 2·c chunks. The lightest goes with the heaviest: chunk r with chunk 2c − 1 − r.",
        "half = s // (2 * c): one chunk begins at rank · half, the other at s − (rank + 1) · half.",
    ],
    cases=[(rank, c, s) for c, s in SIZES for rank in range(c)],
    reads=_positions,
    compares=False,  # more than one way is right
    praise=_on_real_ranks,
    figures=lambda run, _: _loads(run),
    finds=_found_in_places,
)


# -- practice: a step with the sequence cut -------------------------------------------------------


def cut_step(model, tokens, targets, at, everywhere, dp, cp):
    """Forward and backward with the batch over the group dp and the sequence over the group cp. Return the
    loss of this rank's tokens; leave the gradients of the whole batch in the model.

    tokens, targets: (b/d, s/c), mine. at: (s/c,), their positions. everywhere: (s,), the positions of all
    tokens in the order in which the ranks of cp bring them.
    """
    x = model[0].token(tokens) + model[0].position.weight[at]
    # A token attends to all tokens whose position in the text is not after its own.
    mask = at[:, None] >= everywhere
    for block in model.blocks:
        x = toy.context_block(block, x, mask, cp)
    loss = toy.loss_of(model[-1](x), targets)
    loss.backward()
    toy.average_gradients(model)
    return loss.item()


def _watch_step(attempt, facts: dict) -> None:
    """Run the attempt on a grid of 2 × 2. Record its gradients, which are compared, and its loss: the mean of
    the ranks' losses must be the twin's.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = grid["dp"].get_group(), grid["cp"].get_group()
    order = context.zigzag(16, 2)
    at = order[dist.get_rank(cp)]
    model = toy.ToyTransformer(hidden=32, layers=2, seq_len=16).double()
    mine = [toy.my_share(x, dist.get_rank(dp), 2)[:, at] for x in toy.make_batch(4, 16)]
    loss = attempt(model, *mine, at.clone(), torch.cat(order), dp, cp)
    facts["loss"] = loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    facts["values"] = [parameters_to_vector(gradients)]


_losses = lambda run: [facts["loss"] for facts in run.ranks]


def _mean(run: Run) -> float:
    """The mean of the ranks' losses; nan if a rank returned no number."""
    numbers = all(isinstance(loss, float) for loss in _losses(run))
    return sum(_losses(run)) / run.n if numbers else math.nan


def _found_in_step(run: Run, truth: Run) -> tuple[str, str] | None:
    if run.error:
        return None
    if odd := [loss for loss in _losses(run) if not isinstance(loss, float)]:
        return "no loss", f"a rank returned {odd[0]!r:.100}."
    if run.off:
        ours, twin = (one.ranks[0]["values"][0] for one in (run, truth))
        times = float(ours @ twin / (twin @ twin))
        if times and all(alike(facts["values"], [times * twin]) for facts in run.ranks):
            name = "summed where the mean was meant" if times > 1 else "scaled once too often"
            return name, f"your gradients are {multiple(times)} the twin's."
        return "other gradients than the twin's", ""
    if abs(_mean(run) - _mean(truth)) > 1e-7:
        times = run.ranks[0]["loss"] / truth.ranks[0]["loss"]
        if alike(_losses(run), [times * loss for loss in _losses(truth)]):
            return "a loss with a factor", f"each rank's loss is {multiple(times)} what it should be."
        return "another loss than the twin's", ""
    same = alike(_losses(run), _losses(truth))
    return None if same else ("the loss of other ranks too", "")


step = OnRanks(
    "a step with the sequence cut",
    cut_step,
    minutes=12,
    hints=[
        "Write the step of one process first: embed, blocks, head, loss, backward. Then ask of each part:"
        " does it need to know where a token stands, or what other ranks hold?",
        "The embedding is model[0].token(tokens) + model[0].position.weight[…]: the places in the text. The"
        " mask says for each of my tokens which of all tokens stand no later.",
        "toy.context_block(block, x, mask, cp) runs a block. toy.average_gradients(model, group) averages"
        " over a group; without one, over all ranks.",
    ],
    tries=((4,),),
    watch=_watch_step,
    praise="On a grid of dp 2 × cp 2 every rank's gradients are the twin's.",
    figures=lambda run, truth: [
        (
            "mean of the ranks' losses; the target is the twin's",
            *(f"{_mean(one):.6f}" for one in (run, truth)),
        )
    ],
    finds=_found_in_step,
)
