"""Do the tests notice? Numbers and operators of the theory are changed one at a time, at random, and its
tests run against each change: `python bench/mutation.py [how many] [seed]`. What survives is printed.

A change in a message, or to what only speed depends on, changes no figure: look at the survivors, and write a
test for each that does.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "attention collectives cost data_parallel feed_forward layout memory op operations pipelines placement"
    " stages traffic"
).split()
TESTS = "terms planner memory collectives placement cost_model experts".split()
OTHER = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.Eq: ast.NotEq,
}


def places(tree: ast.AST) -> list[tuple[int, str]]:
    """(number of the node, what would change) for all that can be changed."""
    found = []
    for i, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            found.append((i, f"line {node.lineno}: {node.value} becomes {_changed(node.value)}"))
        if (
            isinstance(node, ast.BinOp)
            and type(node.op) in OTHER
            and not isinstance(node.left, ast.JoinedStr)
        ):
            found.append(
                (i, f"line {node.lineno}: {ast.unparse(node)[:60]}: {OTHER[type(node.op)].__name__}")
            )
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            found.append(
                (i, f"line {node.lineno}: {ast.unparse(node)[:60]}: {OTHER[type(node.ops[0])].__name__}")
            )
    return found


def _changed(value: float) -> float:
    return value + 1 if isinstance(value, int) else value * 1.5 if value else 1.0


def change(source: str, number: int) -> str:
    """The source with one node changed."""
    tree = ast.parse(source)
    node = list(ast.walk(tree))[number]
    if isinstance(node, ast.Constant):
        node.value = _changed(node.value)
    elif isinstance(node, ast.BinOp):
        node.op = OTHER[type(node.op)]()
    else:
        node.ops[0] = OTHER[type(node.ops[0])]()
    return ast.unparse(tree)


def survives(folder: Path, name: str, number: int) -> bool:
    """Whether the tests pass with that change, in a copy of the project of its own."""
    file = folder / "helpers" / "theory" / f"{name}.py"
    whole = file.read_text()
    file.write_text(change(whole, number))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
            + [f"tests/test_{test}.py" for test in TESTS],
            cwd=folder,
            capture_output=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(whole)


def main() -> None:
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    every = [
        (name, number, what)
        for name in FILES
        for number, what in places(ast.parse((ROOT / "helpers" / "theory" / f"{name}.py").read_text()))
    ]
    chosen = random.Random(sys.argv[2] if len(sys.argv) > 2 else "0").sample(every, min(many, len(every)))
    folders: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as base:
        for k in range(os.cpu_count() or 1):
            folders.put(Path(base, str(k)))
            kept = shutil.ignore_patterns(".*", "build", "notebooks", "__pycache__")
            shutil.copytree(ROOT, Path(base, str(k)), ignore=kept)

        def one(case: tuple[str, int, str]) -> bool:
            folder = folders.get()
            try:
                return survives(folder, *case[:2])
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            left = [case for case, alive in zip(chosen, pool.map(one, chosen)) if alive]
    print(f"{len(chosen)} of {len(every)} changes tried, {len(left)} not noticed")
    for name, _, what in left:
        print(f"  theory/{name}.py, {what}")


if __name__ == "__main__":
    main()
