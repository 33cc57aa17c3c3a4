"""Do the tests notice? Numbers and operators are changed one at a time, at random, and the tests that
concern the changed file run against each change: `python tools/bench/mutation.py [how many] [seed]
[room …]`, so many in each room. What survives is printed.

A change to a message, to a picture or to what only speed depends on changes no figure. Look at the survivors:
write a test for each that does, and give the others a line in `NO_FIGURE`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PLAN_FILES = "attention cost data_parallel feed_forward layout memory op operations stages traffic".split()
# Room -> its files, as `glob` takes them.
ROOMS = {
    "paper": [f"three_axes/paper/{name}.py" for name in ("by_hand", "collectives", "[ps]*")],
    "plan": [f"three_axes/plan/{name}.py" for name in PLAN_FILES],
    "meter": [f"three_axes/count/{name}.py" for name in ("meter", "operators", "wire")],
    "proof": [f"three_axes/count/{name}.py" for name in ("deadlock", "moves")],
    "toy": ["helpers/toy/*.py"],
    "engine": ["helpers/practice/engine.py", "helpers/practice/runs.py"],
}
PLAN = "by_hand terms placement collectives memory experts precision frozen traffic planner cost_model"
# The tests that concern a file: those of the longest beginning that fits. Quick ones come first.
CONCERNED = {
    "three_axes/p": PLAN.split(),
    "three_axes/paper/s": ["schedules", "by_hand", "terms"],
    "three_axes/count/": ["recorder", "meter", "count"],
    "three_axes/count/deadlock.py": ["deadlock"],
    "three_axes/count/moves.py": ["recorder", "deadlock", "meter"],
    "helpers/toy/": ["toy"],
    "helpers/toy/context.py": ["beyond", "traffic"],
    "helpers/toy/experts.py": ["beyond", "toy"],
    "helpers/toy/fsdp.py": ["beyond", "attempts"],
    "helpers/toy/pace.py": ["toy", "timeline"],
    "helpers/toy/backward.py": ["toy", "beyond"],
    "helpers/practice/": ["engine"],
}
# File -> what stands in lines where a change changes nothing that is said, and why: they are left alone.
NO_FIGURE = {
    "three_axes/count/meter.py": ("BOX_BYTES =", "spans: int ="),  # room in a file, how many spans are kept
    # How much is kept for a comparison; by how much, and from where, the count of moves rises.
    "three_axes/count/moves.py": ("KEPT_FIRST =", "KEPT_LAST =", "self._moves += 1", "self._moves, self"),
    "helpers/practice/engine.py": ("PATIENCE =", "seconds: float ="),  # how long a busy machine may take
}
PAIRS = ((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.Gt, ast.GtE), (ast.Lt, ast.LtE), (ast.And, ast.Or))
OTHER = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])} | {ast.Eq: ast.NotEq}
EXTREME = {"min": "max", "max": "min"}


def figures(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that a figure may come from: without messages, which only say it."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.JoinedStr, ast.Raise)):
            yield from figures(child)


def changed(node: ast.AST) -> str | None:
    """Change a node in place, and say what it has become; None for one that cannot be changed."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() as value):
            node.value = value + 1
            return f"{value} becomes {node.value}"
        case ast.Constant(value=float() as value):
            node.value = value * 1.5 if value else 1.0
            return f"{value} becomes {node.value}"
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            before = ast.unparse(node)
            node.op = OTHER[type(op)]()
        case ast.Compare(ops=[op, *_]) if type(op) in OTHER:
            before = ast.unparse(node)
            node.ops[0] = OTHER[type(op)]()
        case ast.Call(func=ast.Name(id=name)) if name in EXTREME:
            before = ast.unparse(node)
            node.func.id = EXTREME[name]
        case _:
            return None
    return f"{before[:60]} becomes {ast.unparse(node)[:60]}"


def places(file: str) -> list[tuple[int, int, str]]:
    """(number of the node, its line, what it becomes) for all that can be changed in a file."""
    source, made = (ROOT / file).read_text(), []
    lines = source.splitlines()
    for number, node in enumerate(figures(ast.parse(source))):
        becomes = changed(node)
        if becomes and not any(text in lines[node.lineno - 1] for text in NO_FIGURE.get(file, ())):
            made.append((number, node.lineno, becomes))
    return made


def change(source: str, number: int) -> str:
    """The source with one node changed."""
    tree = ast.parse(source)
    changed(next(node for i, node in enumerate(figures(tree)) if i == number))
    return ast.unparse(tree)


def tests_of(file: str) -> list[str]:
    """What pytest runs for a change to a file."""
    names = CONCERNED[max(filter(file.startswith, CONCERNED), key=len)]
    return [str(next((ROOT / "tests").rglob(f"test_{name}.py")).relative_to(ROOT)) for name in names]


def survives(file: str, number: int) -> bool:
    """Whether the tests pass with that change, in a copy of the project."""
    with tempfile.TemporaryDirectory() as folder:
        kept = shutil.ignore_patterns(".*", "build", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=kept, dirs_exist_ok=True)
        path = Path(folder, file)
        path.write_text(change(path.read_text(), number))
        surroundings = {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q"]
        command += ["-m", "not slow and not exhaustive", *tests_of(file)]
        how = dict(cwd=folder, capture_output=True, timeout=600, env=os.environ | surroundings)
        try:
            run = subprocess.run(command, **how)
        except subprocess.TimeoutExpired:
            return False
    if run.returncode in (4, 5):  # no such file, no such test
        raise RuntimeError(f"{file}: {' '.join(tests_of(file))}: {run.stdout.decode()[-500:]}")
    return run.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("many", nargs="?", type=int, default=25, help="changes tried in each room")
    parser.add_argument("seed", nargs="?", default="0")
    parser.add_argument("rooms", nargs="*", default=[*ROOMS], metavar="room", help=", ".join(ROOMS))
    options = parser.parse_args()
    chosen, possible = [], 0
    for room in options.rooms:
        paths = {path for pattern in ROOMS[room] for path in ROOT.glob(pattern)}
        files = sorted(path.relative_to(ROOT).as_posix() for path in paths)
        inside = [(file, *place) for file in files for place in places(file)]
        possible += len(inside)
        chosen += random.Random(options.seed).sample(inside, min(options.many, len(inside)))
    left = 0
    with ThreadPoolExecutor(CORES) as pool:
        passes = pool.map(lambda case: survives(*case[:2]), chosen)
        for (file, _, line, becomes), unnoticed in zip(chosen, passes):
            left += unnoticed
            if unnoticed:
                print(f"  {file}, line {line}: {becomes}", flush=True)
    print(f"{len(chosen)} of {possible} changes tried, {left} not noticed")


if __name__ == "__main__":
    main()
