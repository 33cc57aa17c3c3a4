"""Beyond, b5: the loss falls, and the training is wrong. Which run, which parameter, which sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from helpers.practice.engine import Asked, Form, OnRanks, changed
from helpers.practice.runs import Run, told
from three_axes.files import find, rows_of
from three_axes.table import Table
from three_axes.verify import verify
from three_axes.verify.drift import Copies
from three_axes.verify.marks import mark

# -- practice: name the bug -----------------------------------------------------------------------

SEEN = {
    "right": "All ranks hold the twin's gradient, but for rounding: torch.allclose.",
    "never summed": "The ranks hold different gradients, and their sum is the twin's, but for rounding.",
    "never averaged": "The ranks hold different gradients, and their mean is the twin's, but for rounding.",
    "summed once too often": "All ranks hold n times the twin's gradient.",
    "averaged once too often": "All ranks hold 1/n of the twin's gradient.",
}
NAMES = tuple(SEEN)


def name_the_bug(held, twin):
    """One of b5.NAMES, for a gradient that several ranks should hold alike.

    held: what each rank has, a list of tensors. twin: what each should have.
    """
    # A factor first: a sum or mean once too often leaves all ranks alike. Then what the ranks have together.
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
    """Each bug, for 2 and for 4 ranks, and with numbers as small as late gradients are; one that is right on
    rank 0 alone by chance, and one whose numbers add up to the same on all ranks.
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
        cases.append(([total, -sum(rest, torch.zeros(6)), *rest], total))  # whose sum is the twin's
        level = [part - part.mean() + size for part in parts]
        cases.append((level, sum(level) / n))
    return cases


def _mistaken(run: Run, truth: Run) -> tuple[str, str] | None:
    """The first gradient that has another name, and what is seen in it."""
    for (held, _), said, was in zip(_gradients(), run.values, truth.values):
        if said != was:
            return f"{said} where it was {was}", f"On {len(held)} ranks you say {said!r}. {SEEN[was]}"
    return None


ALONE = """
rank 0 alone
    Rank 0 may have the twin's gradient by chance. Compare all ranks with it before you say "right".
    - near(held[0], twin) and all(near(one, twin) for one in held) => near(held[0], twin)
bit for bit
    Sums in another order differ in the last bits, so == and torch.equal find differences that are none:
    torch.allclose.
    - near = torch.allclose => near = torch.equal
a fixed number of ranks
    The gradient is held by as many ranks as `held` has, 2 or 4: n = len(held).
    - n = len(held) => n = 4
    - n = len(held) => n = 2
"""
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
    reads=lambda said: NAMES[NAMES.index(said.strip())],
    finds=_mistaken,
    mistakes="\n".join(
        (
            "no name of the five\n    Return one of b5.NAMES, as it is written.\n    ~ form",
            ALONE,
            *(f"{said} where it was {was}" for said, was in permutations(NAMES, 2)),
        )
    ),
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
    """One case that is clipped, and one whose norm is small enough."""
    mesh = init_device_mesh("cpu", (p, n // p // t, t), mesh_dim_names=("pp", "dp", "tp"))
    at = mesh.get_coordinate()
    draw = lambda seed, size: torch.randn(size, generator=torch.Generator().manual_seed(seed))
    # dp's ranks hold the same, tp's the same of what is whole.
    gradients = {name: draw(10 * at[0] + i, 8) for i, name in enumerate(WHOLE)}
    gradients |= {name: draw(1000 + 100 * at[0] + 10 * at[2] + i, 12) for i, name in enumerate(CUT)}
    told().update(given=torch.cat(list(gradients.values())))
    groups = mesh.get_group("tp"), mesh.get_group("pp")
    return [
        ({name: one.clone() for name, one in gradients.items()}, set(CUT), largest, *groups)
        for largest in (2.0, 1e3)
    ]


def _as_given(run: Run, _) -> bool:
    return not run.error and all(torch.equal(rank["values"][0], rank["given"]) for rank in run.ranks)


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
    sees=lambda arguments, answer: torch.cat(list(arguments[0].values())),
    praise="The whole model's norm, on pp 2 · tp 2, on dp 3 · tp 2 and on tp 4; what is small stays.",
    shows={"gradients as they were": _as_given},
    mistakes="""
        gradients as they were
            The tensors in `gradients` are unchanged. `g *= scale` writes into a tensor; `g = g * scale`
            makes a new one, which nobody sees.
        the norm of this rank's part
            Each rank clips by the norm of what it holds, so each by another factor. Sum the squares over tp,
            and over pp.
            - dist.all_reduce(squares, group=tp) => pass & dist.all_reduce(squares, group=pp) => pass
            - square if name in cut else square / dist.get_world_size(tp) => square &
              dist.all_reduce(squares, group=tp) => pass & dist.all_reduce(squares, group=pp) => pass
        never summed over tp
            tp's ranks hold other columns of what is cut. Their squares belong to the same norm.
            - dist.all_reduce(squares, group=tp) => pass
        never summed over pp
            pp's ranks hold other layers. Their squares belong to the same norm.
            - dist.all_reduce(squares, group=pp) => pass
        copies counted t times
            What tp does not cut is whole on each of its ranks. Summed over tp it counts t times: bring
            square / dist.get_world_size(tp).
            - square if name in cut else square / dist.get_world_size(tp) => square
        parts counted 1/t times
            What tp cuts is another part on each of its ranks: it is to be summed as it is.
            - square if name in cut else square / dist.get_world_size(tp) => square /
              dist.get_world_size(tp)
        what is whole left out
            The names that are not in `cut` belong to the norm too.
            - squares += square if name in cut else square / dist.get_world_size(tp) => squares += square if
              name in cut else 0
        summed over dp too
            dp's ranks hold the same gradients already. Sum over tp and over pp alone.
            - dist.all_reduce(squares, group=tp) => dist.all_reduce(squares) & dist.all_reduce(squares,
              group=pp) => pass
        scaled up
            A norm that is small enough stays: scale by at most 1.
            - min(1.0, largest / squares.sqrt().item()) => largest / squares.sqrt().item()
        norms added, not squares
            The norm of the whole is the root of the sum of squares, not the sum of the parts' norms.
            - gradient.square().sum() => gradient.norm() & squares.sqrt().item() => squares.item()
        the root forgotten
            The norm is the root of the sum of squares.
            - squares.sqrt().item() => squares.item()
    """,
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
        # Of each token its own direction: a mean of means is another vector, not a multiple.
        cases.append(([(torch.randn(k, 64, generator=chance).sum(0), k) for k in numbers],))
    return cases


def three_means() -> Table:
    """Three ways that are wrong, by how much a token counts in each, of what it should; on four ranks."""
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
    mistakes="""
        never summed over the ranks
            Each rank has other tokens. Add up the gradients, and the numbers, with dist.all_reduce.
            - dist.all_reduce(gradient) => pass
            - dist.all_reduce(gradient) => pass & dist.all_reduce(tokens) => pass
        the mean of the ranks' means
            Each rank divides by its own tokens, and then the ranks take a mean: what DDP does by itself. A
            token of a rank with few tokens counts more. Sum first, on all ranks, and divide once.
            - dist.all_reduce(tokens) => tokens *= dist.get_world_size()
            - dist.all_reduce(gradient) => gradient /= tokens * dist.get_world_size();
              dist.all_reduce(gradient) & return gradient / tokens => return gradient
        the mean of the microbatches' means
            A microbatch with few tokens counts as much as one with many. Add up sums, not means.
            - part for part, _ in parts => part / n for part, n in parts & return gradient / tokens => return
              gradient / dist.get_world_size() / len(parts)
            - part for part, _ in parts => part / n / len(parts) for part, n in parts & return gradient /
              tokens => return gradient / dist.get_world_size()
        divided by this rank's own tokens
            The sum is of all ranks' tokens, so divide by the number of all: all_reduce that too.
            - dist.all_reduce(tokens) => pass
        a sum where the mean was meant
            The loss is a mean over tokens. Divide the sum of the gradients by their number.
            - return gradient / tokens => return gradient
        divided by microbatches, not tokens
            Microbatches have unequal numbers of tokens: count tokens.
            - sum(n for _, n in parts) => len(parts)
        divided by the ranks as well
            The sum over all ranks is divided by all tokens, once.
            - return gradient / tokens => return gradient / tokens / dist.get_world_size()
    """,
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
        # the copies part on the last two ranks alone
        (
            [same, same | {"up": 8}, same, same | {"up": 8}],
            [{"norm": 4, "up": 5, "head": 6}, {"norm": 4, "up": 9, "head": 6}]
            + [{"norm": 4, "up": 5, "head": 0}, {"norm": 4, "up": 7, "head": 0}],
        ),
        # two stages, with the embedding on both
        ([{"words": 1, "0": 2}, {"words": 1, "1": 3}], [{"words": 4, "0": 5}, {"words": 6, "1": 7}]),
        # a last bit
        ([same, same], [{"norm": 4.0, "up": 5, "head": 6}, {"norm": 4 + 1e-15, "up": 5, "head": 6}]),
        # what was never equal is nobody's copy, though it is equal now
        ([{"up": 1}, {"up": 2}], [{"up": 3}, {"up": 3}]),
    ]


def _names(answer) -> list[str]:
    if isinstance(answer, str) or not all(isinstance(name, str) for name in answer):
        raise Form(f"You return {answer!r}")
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
    mistakes="""
        no list of names
            Return a list of names (strings), empty where nothing has parted.
            ~ form
        a name that not every rank has
            A rank has the names of its own stage. Ask for a name only where both ranks have it.
            ! KeyError
        shards taken for copies
            up is cut over two ranks: it was never equal there, and need not be.
            - before[a][name] == before[b][name] and => \x20
        not all pairs of ranks
            Any two ranks may hold copies of each other that a third one has not. Compare each rank with each
            other one.
            - range(len(before)) => range(1, len(before)) & for b in range(a) => for b in (0,)
            - range(len(before)) => range(1, len(before)) & for b in range(a) => for b in (a - 1,)
            - range(len(before)) => range(1, len(before), 2) & for b in range(a) => for b in (a - 1,)
        a tolerance
            Copies are equal bit for bit. Compare with == and !=.
            - after[a][name] != after[b][name] => abs(after[a][name] - after[b][name]) > 1e-6
        what stayed equal
            You name what is as it must be.
            - after[a][name] != after[b][name] => after[a][name] == after[b][name]
        what has changed
            Every step changes every tensor. Compare ranks with each other, not before with after.
            - after[a][name] != after[b][name] => after[a][name] != before[a][name]
            - after[a][name] != after[b][name] => before[a][name] != after[b][name]
            - parted = set() => return sorted({n for b, a in zip(before, after) for n in b if a[n] != b[n]})
        nothing parts
            In three of the cases copies have parted.
            - parted.add(name) => pass
    """,
)


# -- what the cells show --------------------------------------------------------------------------

STEPS = 12
LAYOUT = "dp 2 tp 2"
RUNS = {"A": "", "B": "norms not summed under SP", "C": "mean over dp, unequal tokens"}
ABOVE = 1.5


def edits() -> dict[str, dict[str, str]]:
    """The rows of data/silent/edits.csv, by name."""
    return {row["name"]: row for row in rows_of("silent/edits.csv")}


def edited(name: str, edit: str) -> str:
    """The text of a file of data/silent, `changed`. edit: '' for none."""
    text = find(f"data/silent/{name}.py").read_text(encoding="utf-8")
    return changed(text, edit, name) if edit else text


def program(name: str, edit: str = "") -> dict:
    """What such a file defines."""
    names = {"__name__": f"silent_{name}"}
    exec(compile(edited(name, edit), f"{name}.py", "exec"), names)
    return names


def _of_run(run: str) -> dict:
    return program("dense", edits()[RUNS[run]]["edit"] if RUNS[run] else "")


def trained(names: dict, layout: str, steps: int, look: Callable) -> tuple[list, list]:
    """On the ranks: the losses of a program on a layout, None where another rank knows them, and what
    look(model) gives before the first step and after each. Both are empty on ranks that are not in it.
    """
    sizes = tuple(map(int, layout.split()[1::2]))
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(layout.split()[::2]))
    if mesh.get_coordinate() is None:
        return [], []
    model, optimizer = names["build"](mesh)
    seen, looked = [], [look(model)]
    for _ in range(steps):
        loss = names["step"](model, names["batch"](), mesh)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(None if loss is None else float(loss))
        looked.append(look(model))
    return seen, looked


def losses(run: str, steps: int = STEPS) -> list[float]:
    """On the ranks of a World: the losses of a run."""
    return trained(_of_run(run), LAYOUT, steps, lambda model: None)[0]


def marks(run: str) -> list[dict]:
    """On the ranks: what stands for each tensor, before the first step and after it."""
    look = lambda model: {name: mark(name, p) for name, p in model.named_parameters()}
    return trained(_of_run(run), LAYOUT, 1, look)[1]


def copies(world, runs: Sequence[str] = tuple(RUNS)) -> Table:
    """Of each run, whether what the ranks held alike before the first step is alike after it."""
    rows = []
    for run in runs:
        before, after = zip(*world.run(marks, run))
        watched = Copies(before)
        number, drifts = len(watched.groups), watched.look(1, after)
        farthest = max(drifts, key=lambda drift: drift.far).name if drifts else "-"
        rows.append([run, str(number), str(len(drifts)), farthest])
    return Table(["run", "tensors with copies", "parted after step 1", "the farthest"], rows)


def rings(seen: Sequence[float]) -> bool:
    return any(not loss <= ABOVE * min(seen[: i + 1]) for i, loss in enumerate(seen))


def monitor(curves: dict[str, list[float]]) -> Table:
    """What a monitor of the loss sees. It rings where a loss is half as much again as the lowest before."""
    rows = []
    for run, seen in curves.items():
        rows.append([run, f"{seen[0]:.1f}", f"{seen[-1]:.1f}", "yes" if rings(seen) else "no"])
    return Table(["run", "first loss", "last loss", "it rings"], rows)


def verified(run: str, layouts: Sequence[str]):
    """On the ranks: a run's model against the whole one."""
    names = _of_run(run)
    return verify(names["build"], names["step"], names["batch"](), layouts)
