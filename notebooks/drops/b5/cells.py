"""Functions for the cells of drop b5's notebook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from three_axes.files import find, rows_of
from three_axes.table import Table
from three_axes.verify import Copies, sketch, verify

STEPS = 12
LAYOUT = "dp 2 tp 2"
RUNS = {"A": "", "B": "norms not summed under SP", "C": "mean over dp, unequal tokens"}  # run -> its edit
ABOVE = 1.5  # the monitor of the loss rings at more than ABOVE times the lowest loss so far


def edits() -> dict[str, dict[str, str]]:
    """The rows of data/silent/edits.csv, by name."""
    return {row["name"]: row for row in rows_of("silent/edits.csv")}


def changed(text: str, edit: str, name: str) -> str:
    """A text in which each 'old => new' of `edit` is replaced everywhere. ` & ` separates several of them,
    and ⏎ ends a line. Raises ValueError if the text, that of `name`, does not contain an old part.
    """
    for part in edit.replace("⏎", "\n").split(" & "):
        old, arrow, new = part.partition(" =>")
        if not arrow or old not in text:
            raise ValueError(f"{name} has no {old!r} to be edited, as {part!r} asks")
        text = text.replace(old, new.removeprefix(" "))
    return text


def edited(name: str, edit: str) -> str:
    """The text of a file of data/silent, `changed` by an edit; '' changes nothing."""
    text = find(f"data/silent/{name}.py").read_text(encoding="utf-8")
    return changed(text, edit, name) if edit else text


def program(name: str, edit: str = "") -> dict:
    """The names that the `edited` file defines: its functions and constants."""
    names = {"__name__": f"silent_{name}"}
    exec(compile(edited(name, edit), f"{name}.py", "exec"), names)
    return names


def _of_run(run: str) -> dict:
    return program("dense", edits()[RUNS[run]]["edit"] if RUNS[run] else "")


def trained(names: dict, layout: str, steps: int, look: Callable) -> tuple[list, list]:
    """On a rank: (the losses of a program on a layout, the results of look(model) before the first step and
    after each). A loss that this rank does not know is None. Both lists are empty on a rank outside the
    layout.
    """
    sizes = tuple(map(int, layout.split()[1::2]))
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(layout.split()[::2]))
    if mesh.get_coordinate() is None:
        return [], []
    model, optimizer = names["build"](mesh)
    losses, looked = [], [look(model)]
    for _ in range(steps):
        loss = names["step"](model, names["batch"](), mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss))
        looked.append(look(model))
    return losses, looked


def losses(run: str, steps: int = STEPS) -> list[float]:
    """On a rank: the losses of a run."""
    return trained(_of_run(run), LAYOUT, steps, lambda model: None)[0]


def sketches(run: str) -> list[dict]:
    """On a rank: the `sketch` of each tensor, before the first step and after it."""
    look = lambda model: {name: sketch(name, p) for name, p in model.named_parameters()}
    return trained(_of_run(run), LAYOUT, 1, look)[1]


def copies(world, runs: Sequence[str] = tuple(RUNS)) -> Table:
    """A row for each run: how many tensors were equal on several ranks before the first step, and how many of
    them differ after it.
    """
    rows = []
    for run in runs:
        before, after = zip(*world.run(sketches, run))
        watched = Copies(before)
        number, drifts = len(watched.groups), watched.look(1, after)
        farthest = max(drifts, key=lambda drift: drift.far).name if drifts else "-"
        rows.append([run, str(number), str(len(drifts)), farthest])
    return Table(["run", "tensors with copies", "differ after step 1", "the farthest"], rows)


def rings(seen: Sequence[float]) -> bool:
    return any(not loss <= ABOVE * min(seen[: i + 1]) for i, loss in enumerate(seen))


def monitor(curves: dict[str, list[float]]) -> Table:
    """A monitor of the loss: it rings when a loss is more than ABOVE times the lowest so far."""
    rows = []
    for run, seen in curves.items():
        rows.append([run, f"{seen[0]:.1f}", f"{seen[-1]:.1f}", "yes" if rings(seen) else "no"])
    return Table(["run", "first loss", "last loss", "it rings"], rows)


def verified(run: str, layouts: Sequence[str]):
    """On a rank: `verify` of a run's model on these layouts."""
    names = _of_run(run)
    return verify(names["build"], names["step"], names["batch"](), layouts)


def answer(reports: dict) -> tuple[str, str]:
    """The arguments of `guess.reveal`. reports: run -> the report of `verify`; one finds no difference."""
    (right,) = (run for run, report in reports.items() if " off " not in str(report))
    return right, "Its copies stay equal, and its gradients are the twin's."
