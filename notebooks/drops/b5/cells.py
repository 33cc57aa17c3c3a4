"""What the cells of this drop show, and what they share with its practice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from three_axes.files import find, rows_of
from three_axes.table import Table
from three_axes.verify import Copies, mark, verify

STEPS = 12
LAYOUT = "dp 2 tp 2"
RUNS = {"A": "", "B": "norms not summed under SP", "C": "mean over dp, unequal tokens"}
ABOVE = 1.5


def edits() -> dict[str, dict[str, str]]:
    """The rows of data/silent/edits.csv, by name."""
    return {row["name"]: row for row in rows_of("silent/edits.csv")}


def changed(text: str, edit: str, name: str) -> str:
    """A text with each 'old => new' of `edit` changed, in all places where it stands.

    ` & ` parts several, and ⏎ ends a line.

    Raises ValueError where the text, that of `name`, has no such place.
    """
    for part in edit.replace("⏎", "\n").split(" & "):
        old, arrow, new = part.partition(" =>")
        if not arrow or old not in text:
            raise ValueError(f"{name} has no {old!r} to be edited, as {part!r} asks")
        text = text.replace(old, new.removeprefix(" "))
    return text


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
    """A row for each run: whether what the ranks held alike before the first step is alike after it."""
    rows = []
    for run in runs:
        before, after = zip(*world.run(marks, run))
        watched = Copies(before)
        number, drifts = len(watched.groups), watched.look(1, after)
        farthest = max(drifts, key=lambda drift: drift.far).name if drifts else "-"
        rows.append([run, str(number), str(len(drifts)), farthest])
    return Table(["run", "tensors with copies", "differ after step 1", "the farthest"], rows)


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


def answer(reports: dict) -> tuple[str, str]:
    """What `reveal` takes. reports: run -> what `verify` says of it; the right run is equal to its twin."""
    (right,) = (run for run, report in reports.items() if " off " not in str(report))
    return right, "Its copies stay equal, and its gradients are the twin's."
