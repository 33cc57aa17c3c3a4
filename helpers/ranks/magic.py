"""The cell magic %%ranks: run a cell on every rank of the latest world."""

from __future__ import annotations

import ast
import linecache
import re
from copy import copy

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from . import arguments, output
from .failure import RankError
from .world import World, open_worlds

_last_pids: list[int] = []  # pids of the ranks that ran a %%ranks cell to its end most recently
_defined_by: dict[str, list[int]] = {}  # name that a cell has defined -> pids of the ranks that ran it


@magic_arguments()
@argument("world", nargs="?", help="name of a World; by default the World made last")
@argument("--traffic", metavar="NAME", help="store the bytes that this cell sent in the variable NAME")
@argument("--timeout", type=float, help="seconds after which the cell counts as hung")
def ranks(line: str, cell: str) -> None:
    """Run this cell on every rank. Each rank keeps its own variables from cell to cell.

    `rank`, `world_size`, `device`, `torch` and `dist` are defined. What the ranks print is printed here in
    rank order, and then the value of the last line if it is an expression.
    """
    args = parse_argstring(ranks, line)
    try:
        timeout = {} if args.timeout is None else {"timeout": arguments.seconds(args.timeout)}
    except ValueError as e:
        raise UsageError(str(e)) from None
    shell = get_ipython()
    worlds = open_worlds()
    world = shell.user_ns.get(args.world) if args.world else next(reversed(worlds), None)
    if args.world and not isinstance(world, World):
        named = [k for k, value in shell.user_ns.items() if k[0] != "_" and isinstance(value, World)]
        raise UsageError(f"{args.world!r} is not a World; there are: {', '.join(named) or 'none'}")
    if world is None:
        raise UsageError(
            "no ranks are running: run the notebook's first two cells (again), or"
            "  from helpers import World; world = World(4)"
        )
    if wrong := [text for text in cell.splitlines() if text.startswith(("%", "!", "?"))]:
        raise UsageError(f"{wrong[0]!r}: a %%ranks cell holds Python only, since the ranks are no notebooks")
    # For the reader, the line with %%ranks is line 1. It is not in `cell`, so an empty line takes its place.
    source = "\n" + cell
    # This cell's number. IPython 9 has increased its counter by now, IPython 8 has not. Both have added the
    # cell to the history.
    number = len(shell.history_manager.input_hist_parsed) - 1
    file = shell.compile.cache(source, number, raw_code=f"%%ranks {line}\n{cell}")
    linecache.cache[file] = (len(source), None, f"%%ranks {line}\n{cell}".splitlines(keepends=True), file)
    try:
        values = world.cell(source, file, **timeout)
    except RankError as e:
        raise _for_a_cell(e, shell.user_ns, world) from None
    _last_pids[:] = world.pids
    _defined_by.update(dict.fromkeys(_names_of(source), world.pids))
    if args.traffic:
        shell.user_ns[args.traffic] = world.traffic
    if text := output.fold([v or "" for v in values]):
        output.say(text)


def _names_of(source: str) -> set[str]:
    """The names that a cell defines."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _for_a_cell(error: RankError, names: dict, world: World) -> RankError:
    """The error with advice for %%ranks cells. names: the notebook's variables."""
    text = str(error).replace("with timeout=… in seconds", "with %%ranks --timeout 60")
    missing = {
        name[1]
        for status in error.seen
        if status.error and status.error.type == "NameError"
        if (name := re.match(r"name '(\w+)' is not defined", status.error.message))
    }
    variable = next((name for name, value in names.items() if value is world and name[0] != "_"), "world")
    are_new = _last_pids != world.pids
    earlier = {name for name in missing if _defined_by.get(name, world.pids) != world.pids}
    if earlier or (missing and are_new):
        text += "\nThe ranks are new: run the %%ranks cells above this one again, from the first."
    for name in sorted(missing & names.keys() - earlier):
        text += (
            f"\nIf no such cell makes `{name}`: {variable}.push({name}={name}) gives them the notebook's."
            if are_new
            else f"\nThe notebook has `{name}`, the ranks do not: {variable}.push({name}={name}) gives it to"
            " them."
        )
    advised = copy(error)
    advised.args = (text,)
    return advised


def _a_line(line: str) -> None:
    """The line magic `%ranks`, which IPython calls when a %%ranks cell is empty."""
    raise UsageError("%%ranks stands alone on the first line of a cell, and the ranks' Python below it")


def load_ipython_extension(shell) -> None:
    """Register the magic. IPython calls this at the first %%ranks cell, because `import helpers` has
    registered this module for it.
    """
    shell.register_magic_function(ranks, "cell", "ranks")
    shell.register_magic_function(_a_line, "line", "ranks")
