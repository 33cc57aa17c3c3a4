"""The cell magic %%ranks: run a cell on every rank of the latest world."""

from __future__ import annotations

import linecache

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ..runtime import output
from ..runtime.world import World, latest


@magic_arguments()
@argument("world", nargs="?", help="name of a World; the one made last if left out")
@argument("--traffic", metavar="NAME", help="keep the bytes that this cell moved in the variable NAME")
@argument("--timeout", type=float, help="seconds after which the cell counts as hung")
def ranks(line: str, cell: str) -> None:
    """Run this cell on every rank. Variables stay from cell to cell, on each rank its own.

    `rank`, `world_size`, `device`, `torch` and `dist` are there. What the ranks print is shown
    in rank order; so is the value of the last line, if it is an expression.
    """
    args = parse_argstring(ranks, line)
    shell = get_ipython()
    world = shell.user_ns.get(args.world) if args.world else latest()
    if args.world and not isinstance(world, World):
        raise UsageError(f"{args.world!r} is not a World")
    if world is None:
        raise UsageError("there is no open World yet: run  world = World(4)  first")
    if wrong := [text for text in cell.splitlines() if text.startswith(("%", "!", "?"))]:
        raise UsageError(f"{wrong[0]!r}: a %%ranks cell holds Python only, since the ranks are no notebooks")
    # The magic's own line is line 1 of what the reader sees, so a blank stands in for it.
    source = "\n" + cell
    file = shell.compile.cache(source, shell.execution_count, raw_code=f"%%ranks {line}\n{cell}")
    linecache.cache[file] = (len(source), None, f"%%ranks {line}\n{cell}".splitlines(keepends=True), file)
    values = world.cell(source, file, **({} if args.timeout is None else {"timeout": args.timeout}))
    if args.traffic:
        shell.user_ns[args.traffic] = world.traffic
    if text := output.fold([v or "" for v in values]):
        print(text)


def register() -> None:
    """Make %%ranks known to the running notebook, if there is one."""
    if shell := get_ipython():
        shell.register_magic_function(ranks, "cell", "ranks")
