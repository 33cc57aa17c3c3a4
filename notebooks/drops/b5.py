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
            *(f"{said} where it was {was}" for said, was in permutations(NAMES, 2)),
        )
    ),
)


# -- practice: the sum that is missing ------------------------------------------------------------


def reduce_gradients(gradients, tp, dp):
    """Make every gradient the whole model's, in place.

    gradients: {name: tensor}. Under sequence parallelism a tp rank's norms have seen its tokens only; dp
    ranks have seen other rows, and the loss is their mean. tp, dp: process groups.
    """
    for name, gradient in gradients.items():
        # A norm's copies on tp have seen other tokens each: parts of a sum. Then the mean over dp, for all.
        if "norm" in name:
            dist.all_reduce(gradient, group=tp)
        dist.all_reduce(gradient, group=dp)
        gradient /= dist.get_world_size(dp)


PARAMETERS = ("0.norm1.weight", "0.norm1.bias", "0.attention.q.weight", "0.norm2.weight", "0.mlp.up.weight")


def _to_reduce(rank: int, n: int, t: int) -> list[tuple]:
    mesh = init_device_mesh("cpu", (n // t, t), mesh_dim_names=("dp", "tp"))
    chance = torch.Generator().manual_seed(100 * t + rank)
    gradients = {name: torch.randn(8, generator=chance) for name in PARAMETERS}
    told().update(gradients=gradients, given=torch.stack(list(gradients.values())))
    return [(gradients, mesh.get_group("tp"), mesh.get_group("dp"))]


def _as_given(run: Run, _) -> bool:
    return not run.error and all(torch.equal(rank["values"][0], rank["given"]) for rank in run.ranks)


reduced = OnRanks(
    "the sum that is missing",
    reduce_gradients,
    minutes=5,
    hints=[
        "Which parameters has a tp rank seen with a part of the tokens? Those that no axis cuts.",
        "Over tp the parts add up: sum. Over dp the loss is a mean: sum, then divide by the size of dp.",
        'if "norm" in name: dist.all_reduce(gradient, group=tp)',
    ],
    tries=((4, 2), (4, 4), (4, 1)),
    inputs=_to_reduce,
    sees=lambda arguments, answer: torch.stack(list(arguments[0].values())),
    praise="Every gradient is the whole model's, on dp 2 · tp 2, on tp 4 and on dp 4.",
    shows={"gradients as they were": _as_given},
    mistakes="""
        gradients as they were
            The tensors in `gradients` are unchanged. Write into them: all_reduce does, and `g /= …`; a new
            tensor, or a new dictionary, nobody sees.
        norms never summed over tp
            A tp rank has seen its own tokens only. What its norms have found is a part of the sum.
            - dist.all_reduce(gradient, group=tp) => pass
        norms averaged over tp
            The tokens' gradients add up, on whatever rank they were found: sum over tp, and do not divide.
            - dist.all_reduce(gradient, group=tp) => dist.all_reduce(gradient, group=tp); gradient /=
              dist.get_world_size(tp)
        everything summed over tp
            The other matrices are cut: each tp rank holds other columns, and their gradients are no parts of
            one sum.
            - if "norm" in name: => if True:
        one of the norms
            A block has two norms, each with a weight and a bias. All four have seen this rank's tokens only.
            - "norm" in name => "norm1" in name
            - "norm" in name => "norm" in name and "weight" in name
        never summed over dp
            dp ranks have seen other rows. Their gradients differ, and the optimizers would drift apart.
            - dist.all_reduce(gradient, group=dp) => pass
            - dist.all_reduce(gradient, group=dp) => "norm" in name or dist.all_reduce(gradient, group=dp) &
              gradient /= => gradient /= 1 if "norm" in name else
        summed over dp, not averaged
            The loss is the mean over dp, so the gradient is too. Divide by the size of dp, in place:
            `g = g / n` makes a new tensor.
            - gradient /= dist.get_world_size(dp) => pass
        divided by all ranks
            Divide by the size of dp alone: over tp nothing is averaged.
            - dist.get_world_size(dp) => dist.get_world_size()
            - dist.get_world_size(dp) => dist.get_world_size(tp)
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
