"""Do the tests notice? Numbers and operators of `helpers` are changed one at a time, at random, and the tests
that concern the changed file run against each change: `python tools/bench/mutation.py [how many] [seed] [room …]`,
so many in each room. What survives is printed.

A change to a message, to a picture or to what only speed depends on changes no figure. Look at the survivors:
write a test for each that does, and give the others a line in `NO_FIGURE`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
HELPERS = ROOT / "helpers"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Room -> its files, as `glob` takes them. Pictures (shown.py) are none of them.
ROOMS = {
    "theory": [
        f"theory/{name}.py"
        for name in (
            "attention collectives cost data_parallel feed_forward layout memory op operations pipelines"
            " placement stages traffic"
        ).split()
    ],
    "meter": ["runtime/meter.py"],
    "toy": ["toy/*.py"],
    "judges": ["lesson/drops/*.py", "lesson/drops/*/*.py", "lesson/diagnose.py"],
}
THEORY = "terms placement collectives memory experts traffic planner cost_model".split()
# The tests that concern a file: those of the longest beginning that fits. Quick ones come first.
CONCERNED = {
    "theory/": THEORY,
    "runtime/meter.py": ["recorder", "meter", "count"],
    "toy/": ["toy"],
    "toy/context.py": ["beyond"],
    "toy/experts.py": ["beyond", "toy"],
    "toy/fsdp.py": ["beyond", "exercises_beyond"],
    "toy/pace.py": ["toy", "timeline"],
    "toy/backward.py": ["toy", "beyond"],
    "lesson/drops/rings.py": ["exercises_phase1", "exercises_phase2"],
    "lesson/diagnose.py": ["diagnose", "exercises_phase2"],
    "lesson/drops/b": ["exercises_beyond", "beyond", "attempts"],
    "lesson/drops/d0": ["exercises_phase1", "exercises_phase2", "attempts"],
    "lesson/drops/d09": ["exercises_phase2", "exercises_phase3", "attempts"],
    "lesson/drops/d1": ["exercises_phase3", "attempts"],
    "lesson/drops/d13": ["exercises_phase4", "attempts"],
    "lesson/drops/d14": ["exercises_phase4", "attempts"],
}
# File -> what stands in lines where a change changes nothing that is said, and why: they are left alone.
NO_FIGURE = {
    # room in a file, how many shapes are compared, how many spans are kept
    "runtime/meter.py": ("BOX_BYTES =", "REMEMBERED =", "spans: int ="),
    "lesson/drops/b2/one_step.py": ("rtol=1e-7",),  # how near is right
    "lesson/drops/d06/sequence_parallel.py": ("rtol=1e-7, atol=1e-9",),
    "lesson/drops/d04.py": ('tells("x.grad", "dy", to=r - 1)',),  # who sends one has had its backward
}
OTHER = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
EXTREME = {"min": "max", "max": "min"}


def figures(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that a figure may come from: without messages, which only say it."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.JoinedStr, ast.Raise)):
                nodes.append(child)


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
    """(number of the node, its line, what it becomes) for all that can be changed in a file of `helpers`."""
    source, made = (HELPERS / file).read_text(), []
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
    """What pytest runs for a change to a file of `helpers`: of exercises, those of its own drop."""
    names = CONCERNED[max(filter(file.startswith, CONCERNED), key=len)]
    chosen = [f"tests/test_{name}.py" for name in names]
    if drop := re.match(r"lesson/drops/([bd]\d+)", file):
        sources = (HELPERS / "lesson" / "drops").glob(f"{drop[1]}*/*.py")
        texts = [path.read_text() for path in (*sources, HELPERS / file)]
        titles = {title for text in texts for title in re.findall(r'Exercise\(\s*"([^"]+)"', text)}
        words = [re.findall(r"\w+", title) for title in titles]
        # pytest's -k knows words alone, and takes these three for its own.
        wanted = [
            "(" + " and ".join(w for w in title if w not in ("and", "or", "not")) + ")" for title in words
        ]
        chosen += ["-k", " or ".join([*wanted, f"{drop[1]}."])]
    return chosen


def survives(folder: Path, file: str, number: int) -> bool:
    """Whether the tests pass with that change, in a copy of the project of its own."""
    path = folder / "helpers" / file
    whole = path.read_text()
    path.write_text(change(whole, number))
    surroundings = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    if not file.startswith("lesson"):  # of a drop all is run, with every attempt that is written down
        command += ["-m", "not slow and not exhaustive"]
    try:
        run = subprocess.run(
            [*command, *tests_of(file)],
            cwd=folder,
            capture_output=True,
            timeout=600,
            env=os.environ | surroundings,
        )
        if run.returncode in (4, 5):  # no such file, no such test
            raise RuntimeError(f"{file}: {' '.join(tests_of(file))}: {run.stdout.decode()[-500:]}")
        return run.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("many", nargs="?", type=int, default=25, help="changes tried in each room")
    parser.add_argument("seed", nargs="?", default="0")
    parser.add_argument("rooms", nargs="*", default=[*ROOMS], metavar="room", help=", ".join(ROOMS))
    options = parser.parse_args()
    chosen, possible = [], 0
    for room in options.rooms:
        paths = {path for pattern in ROOMS[room] for path in HELPERS.glob(pattern) if path.name != "shown.py"}
        files = sorted(path.relative_to(HELPERS).as_posix() for path in paths)
        inside = [(file, *place) for file in files for place in places(file)]
        possible += len(inside)
        chosen += random.Random(options.seed).sample(inside, min(options.many, len(inside)))
    folders: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as base:
        for k in range(CORES):
            folders.put(Path(base, str(k)))
            kept = shutil.ignore_patterns(".*", "build", "__pycache__")
            shutil.copytree(ROOT, Path(base, str(k)), ignore=kept)

        def passes(case: tuple[str, int, int, str]) -> bool:
            folder = folders.get()
            try:
                return survives(folder, *case[:2])
            finally:
                folders.put(folder)

        left = 0
        with ThreadPoolExecutor(CORES) as pool:
            for (file, _, line, becomes), unnoticed in zip(chosen, pool.map(passes, chosen)):
                left += unnoticed
                if unnoticed:
                    print(f"  {file}, line {line}: {becomes}", flush=True)
    print(f"{len(chosen)} of {possible} changes tried, {left} not noticed")


if __name__ == "__main__":
    main()
