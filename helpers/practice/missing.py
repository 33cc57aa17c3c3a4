"""Adds advice to a NameError in a notebook: the kernel is new, and an earlier cell makes the name."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .books import drop_number, notebooks, read_book

ADVICE = "No cell has made `{}` since this kernel began: run the cells above this one, from the first."


def advise(drop: str) -> None:
    """From now on, a cell that needs a name which an earlier cell of this drop makes says so."""
    from IPython import get_ipython

    if (shell := get_ipython()) is None:
        return

    def show(self, kind, error, trace, tb_offset=None) -> None:
        name = getattr(error, "name", None)
        if name and name not in self.user_ns and name in names_made(_sources(drop)):
            error.args = (f"{error}\n{ADVICE.format(name)}",)
        self.showtraceback((kind, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((NameError,), show)


def _sources(drop: str) -> list[str]:
    path = next(path for path in notebooks() if drop_number(path) == drop)
    return [cell["source"] for cell in read_book(path)["cells"] if cell["cell_type"] == "code"]


def names_made(sources: Iterable[str]) -> set[str]:
    """The names that cells with these sources give the notebook. A %%ranks cell gives its names to ranks, and
    the notebook the one after `--traffic`.
    """
    made: set[str] = set()
    for source in sources:
        first = source.partition("\n")[0]
        if first.startswith("%%"):
            made |= {word for flag, word in zip(first.split(), first.split()[1:]) if flag == "--traffic"}
            continue
        try:
            body = ast.parse(source).body
        except SyntaxError:  # a line for the shell
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            else:
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                made |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return made
