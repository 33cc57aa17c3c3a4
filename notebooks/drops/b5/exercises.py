"""Beyond, b5: the loss falls, and the training is wrong: find the run, the parameter and the sum."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from helpers.practice import Asked, OnRanks, Run, WrongForm, facts_so_far
from three_axes.table import Table

# -- practice: name the bug -----------------------------------------------------------------------

EVIDENCE = {
    "right": "All ranks hold the twin's gradient, but for rounding: torch.allclose.",
    "never summed": "The ranks hold different gradients, and their sum is the twin's, but for rounding.",
    "never averaged": "The ranks hold different gradients, and their mean is the twin's, but for rounding.",
    "summed once too often": "All ranks hold n times the twin's gradient.",
    "averaged once too often": "All ranks hold 1/n of the twin's gradient.",
}
NAMES = tuple(EVIDENCE)


def name_the_bug(held, twin):
    """One of b5.NAMES, for a gradient that several ranks should hold alike.

    held: what each rank has, a list of tensors. twin: what each should have.
    """
    # A wrong factor first: after one sum or mean too many, all ranks still agree. Then the sum over ranks.
    n = len(held)
    near = torch.allclose
    if near(held[0], twin) and all(near(one, twin) for one in held):
        return "right"
    if near(held[0], n * twin):
        return "summed once too often"
    if near(held[0], twin / n):
        return "averaged once too often"
    if near(sum(held), twin):
        return "never summed"
    return "never averaged"


def _gradients() -> list[tuple]:
    """The arguments of each case, on 2 and on 4 ranks, and on 4 with numbers as small as gradients late in
    training: each of NAMES; a gradient that is right on rank 0 alone; gradients whose numbers have the same
    total on all ranks.
    """
    chance = torch.Generator().manual_seed(5)
    cases = []
    for n, size in ((2, 1.0), (4, 1.0), (4, 1e-6)):
        draw = lambda size=size: size * torch.randn(6, generator=chance)
        parts = [draw() for _ in range(n)]
        total = sum(parts)
        cases += [
            ([total.clone() for _ in range(n)], total),
            (parts, total),
            (parts, total / n),
            ([n * total for _ in range(n)], total),
            ([total / n for _ in range(n)], total),
        ]
        rest = [draw() for _ in range(n - 2)]
        cases.append(([total, -sum(rest, torch.zeros(6)), *rest], total))  # their sum is the twin's
        level = [part - part.mean() + size for part in parts]
        cases.append((level, sum(level) / n))
    return cases


def _mistaken(run: Run, truth: Run) -> tuple[str, str] | None:
    """(mistake, text) for the first gradient that gets a wrong name; None if none does."""
    for (held, twin), answer, was in zip(_gradients(), run.values, truth.values):
        if answer != was:
            size = f" Their numbers are about {twin.abs().max():.0e}." * bool(twin.abs().max() < 1e-3)
            if answer == "right":
                ranks = torch.stack(list(held))
                size += f" Two of them are {(ranks.amax(0) - ranks.amin(0)).max():.1e} apart."
            text = f"On {len(held)} ranks you say {answer!r}. {EVIDENCE[was]}{size}"
            return f"{answer} where it was {was}", text
    return None


named = Asked(
    "name the bug",
    name_the_bug,
    minutes=6,
    hints=[
        "Where every rank has the same wrong gradient, look at the factor: n, or 1 over n?",
        "Where each has another one, they have not been reduced. Is their sum the twin's, or their mean?",
        "torch.allclose(sum(held), twin)",
    ],
    cases=_gradients,
    praise="Five causes from one comparison. `verify` tries the same, along every axis of the mesh.",
    reads=lambda answer: NAMES[NAMES.index(answer.strip())],
    finds=_mistaken,
)


# -- practice: clip the norm ----------------------------------------------------------------------


def clip_norm(gradients, cut, largest, tp, pp):
    """Scale all gradients, in place, so that the whole model's norm is at most `largest`.

    gradients: {name: tensor} of this rank. cut: the names that tp cuts; the others tp's ranks hold whole. tp,
    pp: process groups.
    """
    squares = torch.zeros(1)
    for name, gradient in gradients.items():
        square = gradient.square().sum()
        # A copy counts once, so each of tp's ranks brings its part of it.
        squares += square if name in cut else square / dist.get_world_size(tp)
    dist.all_reduce(squares, group=tp)
    dist.all_reduce(squares, group=pp)
    scale = min(1.0, largest / squares.sqrt().item())
    for gradient in gradients.values():
        gradient *= scale


CUT = ("attention.q.weight", "mlp.up.weight")
WHOLE = ("norm1.weight", "norm2.weight", "norm2.bias")


def _to_clip(rank: int, n: int, p: int, t: int) -> list[tuple]:
    """The arguments of each case: gradients that are clipped, gradients whose norm is small enough, and
    gradients whose norm is too large although those of some ranks alone are not.
    """
    mesh = init_device_mesh("cpu", (p, n // p // t, t), mesh_dim_names=("pp", "dp", "tp"))
    at = mesh.get_coordinate()
    draw = lambda seed, size: torch.randn(size, generator=torch.Generator().manual_seed(seed))
    # Ranks of a dp group hold the same gradients, ranks of a tp group the same of WHOLE.
    gradients = {name: draw(10 * at[0] + i, 8) for i, name in enumerate(WHOLE)}
    gradients |= {name: draw(1000 + 100 * at[0] + 10 * at[2] + i, 12) for i, name in enumerate(CUT)}
    groups = mesh.get_group("tp"), mesh.get_group("pp")
    cases = [
        ({name: one.clone() for name, one in gradients.items()}, set(CUT), largest, *groups)
        for largest in (2.0, 1e3, 7.5)
    ]
    # An attempt may put other tensors into the dict.
    facts_so_far()["tensors"] = [list(case[0].values()) for case in cases]
    return cases


clipped = OnRanks(
    "clip the norm",
    clip_norm,
    minutes=7,
    hints=[
        "A norm is the root of a sum of squares. First the sum of this rank's squares. What do tp's ranks"
        " hold twice?",
        "A copy must count once: let each of tp's ranks bring square / dist.get_world_size(tp) of it. Then"
        " all_reduce the sum over tp, and over pp. dp's ranks hold the same.",
        "scale = min(1.0, largest / squares.sqrt().item()), and gradient *= scale for every gradient.",
    ],
    tries=((4, 2, 2), (6, 1, 2), (4, 1, 4)),
    inputs=_to_clip,
    sees=lambda arguments, answer: torch.cat(facts_so_far()["tensors"][facts_so_far()["case"]]),
    praise="The whole model's norm, on pp 2 · tp 2, on dp 3 · tp 2 and on tp 4; what is small stays.",
)


# -- practice: unequal tokens ---------------------------------------------------------------------

TOKENS = ((7, 21), (30, 2), (12,), (5, 5, 50))  # of each rank's microbatches


def accumulate(parts):
    """The gradient of the mean loss over all tokens of all ranks' microbatches.

    parts: of this rank's microbatches (the gradient of the SUM of its tokens' losses, how many tokens).
    """
    gradient = sum(part for part, _ in parts)
    tokens = torch.tensor([float(sum(n for _, n in parts))])
    dist.all_reduce(gradient)
    dist.all_reduce(tokens)
    return gradient / tokens


def _to_accumulate(rank: int, n: int) -> list[tuple]:
    cases = []
    for shift in range(2):
        numbers = TOKENS[(rank + shift) % len(TOKENS)]
        chance = torch.Generator().manual_seed(10 * shift + rank)
        # Each token has a direction of its own, so a mean of means is another vector, not a multiple.
        cases.append(([(torch.randn(k, 64, generator=chance).sum(0), k) for k in numbers],))
    return cases


def three_means() -> Table:
    """Three wrong means on four ranks: the weight of a token in each, as a multiple of the right weight."""
    every, ranks = sum(map(sum, TOKENS)), len(TOKENS)
    ways = {
        "the mean of each microbatch, then of all of them": lambda r, n: 1 / n / sum(map(len, TOKENS)),
        "the mean of each microbatch, then of a rank's, then of ranks": lambda r, n: (
            1 / n / len(TOKENS[r]) / ranks
        ),
        "the mean of each rank's tokens, then of ranks (DDP's)": lambda r, n: 1 / sum(TOKENS[r]) / ranks,
    }
    rows = []
    for name, weight in ways.items():
        counts = [every * weight(rank, n) for rank, numbers in enumerate(TOKENS) for n in numbers]
        rows.append([name, f"{min(counts):.2f}", f"{max(counts):.2f}"])
    return Table(["divided by", "a token counts at least", "at most"], rows)


accumulated = OnRanks(
    "unequal tokens",
    accumulate,
    minutes=6,
    hints=[
        "A mean over all tokens is a sum over all tokens, divided by their number on all ranks.",
        "Add up the sums of your microbatches, and their tokens. Both need an all_reduce. Divide once, at the"
        " end.",
    ],
    tries=((4,), (2,)),
    inputs=_to_accumulate,
    praise="Every token counts alike, on whatever rank and in whatever microbatch it stands.",
)


# -- practice: what must stay equal ---------------------------------------------------------------


def have_parted(before, after):
    """The names of the tensors whose copies were equal on two ranks, and are not any more, in order.

    before, after: for each rank {name: a number that stands for its tensor}. A rank has the names of its
    stage; shards have other numbers from the start.
    """
    parted = set()
    for a in range(len(before)):
        for b in range(a):
            for name in before[a].keys() & before[b].keys():
                # Shards and other stages never were copies: only what was equal can part.
                if before[a][name] == before[b][name] and after[a][name] != after[b][name]:
                    parted.add(name)
    return sorted(parted)


def _marks() -> list[tuple]:
    same = {"norm": 1, "up": 2, "head": 3}
    return [
        ([same, same], [{"norm": 4, "up": 5, "head": 6}] * 2),
        ([same, same], [{"norm": 4, "up": 5, "head": 6}, {"norm": 7, "up": 5, "head": 6}]),
        # up is cut over ranks 0 and 1, and copied on 2 and 3
        (
            [same, same | {"up": 8}, same, same | {"up": 8}],
            [{"norm": 4, "up": 5, "head": 6}, {"norm": 4, "up": 9, "head": 6}] * 2,
        ),
        # the copies differ on the last two ranks alone
        (
            [same, same | {"up": 8}, same, same | {"up": 8}],
            [{"norm": 4, "up": 5, "head": 6}, {"norm": 4, "up": 9, "head": 6}]
            + [{"norm": 4, "up": 5, "head": 0}, {"norm": 4, "up": 7, "head": 0}],
        ),
        # two stages, with the embedding on both
        ([{"words": 1, "0": 2}, {"words": 1, "1": 3}], [{"words": 4, "0": 5}, {"words": 6, "1": 7}]),
        # a last bit
        ([same, same], [{"norm": 4.0, "up": 5, "head": 6}, {"norm": 4 + 1e-15, "up": 5, "head": 6}]),
        # tensors that were never equal are no copies, though they are equal now
        ([{"up": 1}, {"up": 2}], [{"up": 3}, {"up": 3}]),
    ]


def _names(answer) -> list[str]:
    if isinstance(answer, str) or not all(isinstance(name, str) for name in answer):
        raise WrongForm(f"You return {answer!r}")
    return sorted(set(answer))


parted = Asked(
    "what must stay equal",
    have_parted,
    minutes=6,
    hints=[
        "Take two ranks and a name that both have. What must have been so before, to call them copies?",
        "before[a][name] == before[b][name], and after that it must be so again.",
        "All pairs of ranks: for a in range(len(before)): for b in range(a): …",
    ],
    cases=_marks,
    reads=_names,
    praise="That is `three-axes verify train.py`, but for the axis and the way to the other ranks.",
)
