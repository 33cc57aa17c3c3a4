"""The shape of the project: which way imports run, how fast they are not, and that its lists agree."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

from helpers import World
from tools import colab

ROOT = Path(__file__).resolve().parent.parent
HELPERS = ROOT / "helpers"
# What each part may import of the others. `toy` is read by learners: it stands alone.
MAY = {
    "terminal": set(),
    "table": {"terminal"},
    "files": set(),
    "theory": {"table", "files"},
    "explain": {"theory", "table", "terminal"},
    "toy": set(),
    "devices": set(),
    "runtime": {"theory", "toy", "table", "terminal", "devices"},
    "train": {"theory", "toy", "runtime", "devices", "files", "table", "terminal"},
    "count": {"theory", "runtime", "table"},
    "lesson": {"theory", "explain", "runtime", "toy", "table", "terminal", "files", "devices", "train"},
    "doctor": {"files", "terminal", "devices", "lesson", "runtime", "toy", "train"},
    "commands": set(),
    "sizing": {"theory", "table"},
    "options": {"theory", "sizing"},
    "__main__": {"options", "sizing", "terminal", "commands", "count"},
}


def imports(file: Path) -> set[str]:
    """Absolute names of all modules that a file imports."""
    package = list(file.relative_to(ROOT).with_suffix("").parts[:-1])
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            modules |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("part", MAY)
def test_arrows_run_one_way(part):
    files = list((HELPERS / part).rglob("*.py")) if (HELPERS / part).is_dir() else [HELPERS / f"{part}.py"]
    assert files
    for file in files:
        parts = {name.split(".")[1] for name in imports(file) if name.startswith("helpers.")}
        assert parts <= MAY[part] | {part}, f"{file.relative_to(ROOT)} imports {parts - MAY[part] - {part}}"


def loads(file: Path) -> set[Path]:
    """Files of helpers that a file imports as it is loaded itself: not in functions, nor for types alone."""
    package = list(file.relative_to(ROOT).with_suffix("").parts[:-1])
    imported = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("helpers")):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ROOT.joinpath(*base, *(node.module or "").split("."))
            names = [base / alias.name for alias in node.names] + [base]
            imported |= {f.with_suffix(".py") for f in names if f.with_suffix(".py").is_file()}
    return imported - {file}


def test_no_module_needs_itself():
    open_, done = [], set()

    def visit(file):
        assert file not in open_, " -> ".join(str(f.relative_to(HELPERS)) for f in [*open_, file])
        if file not in done:
            open_.append(file)
            for other in loads(file):
                visit(other)
            done.add(open_.pop())

    for file in HELPERS.rglob("*.py"):
        visit(file)


def test_theory_needs_no_torch():
    for file in (HELPERS / "theory").rglob("*.py"):
        assert not {
            name for name in imports(file) if name.split(".")[0] in ("torch", "matplotlib", "IPython")
        }
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, three_axes.plan; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    assert loaded.strip() == "False"


def test_files_stay_small_enough_to_be_read():
    for file in HELPERS.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= (300 if file.parent.name == "theory" else 350), file


def test_the_reading_path_is_as_long_as_it_says():
    path = (HELPERS / "ARCHITECTURE.md").read_text().split("## To learn")[1].split("\n## ")[0]
    length = lambda file: len((HELPERS / file).read_text().splitlines())
    first, second = path.split("**The second**")
    rows = re.findall(r"^\| \[.*?\]\((.*?)\) \| (\d+) \|", first, re.M)
    for file, claimed in rows:
        assert abs(length(file) - int(claimed)) <= 0.15 * length(file), file
    claimed = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) lines", path)]
    evenings = [
        sum(length(file) for file, _ in rows),
        sum(map(length, re.findall(r"\]\(([\w/]+\.py)\)", second))),
    ]
    assert claimed == pytest.approx([sum(evenings), *evenings], rel=0.05)


def names(requirements) -> dict[str, str]:
    """'torch>=2.9' -> {'torch': '>=2.9'}"""
    return {m[1].lower(): m[2] for r in requirements if (m := re.match(r"([A-Za-z0-9_.-]+)\s*(.*)", r))}


def test_the_three_lists_of_packages_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = names(project["dependencies"] + extras["course"])
    conda = names(re.findall(r"^      - (?!-)(\S+)$", (ROOT / "environment.yml").read_text(), re.M))
    assert conda == needed
    pinned = re.findall(r"^([a-z0-9_.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    for name in needed | names(r for r in extras["test"] if not r.startswith("three-axes")):
        assert name in dict(pinned), f"constraints.txt has no exact version of {name}"
    fetched = re.search(r"%pip install --quiet (.*)", colab.SETUP)[1].replace('"', "").split()
    assert names(fetched).keys() <= needed.keys()


def test_every_python_that_is_named_is_admitted():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text and "(3, 10)" in (ROOT / "Makefile").read_text()
    for file in HELPERS.rglob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 10))


def test_ranks_that_run_exercises_import_no_pictures():
    drops = [f"drops.{file.stem}" for file in (HELPERS / "lesson" / "drops").glob("[bd]*")]

    def imports_pictures():
        for drop in drops:
            importlib.import_module(drop)
        return "matplotlib" in sys.modules

    with World(1) as world:
        assert world.run(imports_pictures) == [False]
