"""The structure of the project: which package may import which, and lists that must agree."""

import ast
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import forked
import pytest

from helpers import World
from helpers.practice import notebooks
from tools import colab

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"three_axes": ROOT, "helpers": ROOT, "tools": ROOT, "drops": ROOT / "notebooks"}
FILES = [file for top, folder in PLACES.items() for file in (folder / top).rglob("*.py")]
# The parts of the project, from the top: each imports only from parts after it, as docs/architecture.md says.
ORDER = """
    tools drops
    helpers.practice helpers.draw helpers.live helpers.train helpers.ranks helpers.emulate helpers.toy
    three_axes.__main__ three_axes.run three_axes.options three_axes.sizing three_axes.commands
    three_axes.verify three_axes.count three_axes.trace three_axes.ledger three_axes.explain
    three_axes.plan three_axes.paper three_axes.table three_axes.terminal three_axes.checks
    three_axes.lines three_axes.devices three_axes.nccl three_axes.pytorch_private
    three_axes.cpython_private three_axes.replaced three_axes.files three_axes.foreign three_axes.doors
""".split()


def name_of(file: Path) -> str:
    """The module name of a file of the project: 'three_axes.plan.cost'."""
    place = file.relative_to(ROOT / "notebooks" if "drops" in file.parts else ROOT)
    return ".".join(place.with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The part of the project to which a module belongs: 'three_axes.plan', 'drops'."""
    top, *rest = module.split(".")
    return top if top in ("drops", "tools") or not rest else f"{top}.{rest[0]}"


MODULES = {name_of(file): file for file in FILES}


@cache
def parsed(file: Path) -> ast.Module:
    """Parse it like the oldest Python that is supported."""
    return ast.parse(file.read_text(), feature_version=(3, 11))


def absolute(node: ast.ImportFrom, package: list[str]) -> str:
    """The name of the module that this node of a package's file imports from."""
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join(filter(None, [*above, node.module]))


def imports(file: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """Absolute names of all modules that these nodes of a file import."""
    package = name_of(file).split(".")[: None if file.name == "__init__.py" else -1]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, package)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_in_one_direction(part):
    files = [file for file in FILES if part_of(name_of(file)) == part and "bench" not in file.parts]
    assert files
    may = set(ORDER[ORDER.index(part) :]) if part != "helpers.toy" else {part}  # learners read it alone
    for file in files:
        met = imports(file, ast.walk(parsed(file))) & (MODULES.keys() | {"helpers"})
        met = {part_of(name) for name in met} - {"three_axes", "helpers"}
        assert met <= may, f"{file.relative_to(ROOT)} imports {met - may}"


ROOMS = [f"three_axes.{room}" for room in ("paper", "plan", "count", "verify", "explain", "trace")]
MOST = 69  # public names of these packages together: a new name replaces another
# The packages whose __init__.py (their door) exports names of their modules.
DOORS = ROOMS + [f"helpers.{room}" for room in ("ranks", "draw", "practice", "emulate", "toy")]


@cache
def public(room: str) -> set[tuple[str, str]]:
    """(module, name) of all names that a package's __init__.py exports."""
    shown = set()
    for node in ast.walk(parsed(MODULES[room])):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").endswith("doors"):
            shown |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "door":
            shown |= {(word.arg, name.value) for word in node.keywords for name in word.value.elts}
    return shown


@pytest.mark.parametrize("room", DOORS)
def test_a_package_has_the_names_that_it_exports(room):
    for _, name in public(room):
        shown = getattr(importlib.import_module(room), name)
        assert not isinstance(shown, ModuleType), f"{name} is the module, and not the thing in it"
        assert name in dir(importlib.import_module(room)), f"completion by Tab does not offer {name}"


def test_packages_export_few_names():
    assert sum(len(public(room)) for room in ROOMS) == MOST


def sources(part: str) -> Iterable[tuple[str, ast.Module]]:
    """(name, source) of the files of a part; for notebooks, of each cell that is only Python."""
    if part != "notebooks":
        files = [file for file in FILES if name_of(file).split(".")[0] == part]
        yield from ((name_of(file), parsed(file)) for file in files if "bench" not in file.parts)
        return
    for book in notebooks():
        for cell in json.loads(book.read_text())["cells"]:
            lines = [line for line in "".join(cell["source"]).split("\n") if not line.startswith("%")]
            with suppress(SyntaxError):  # prose, a magic or an unfinished exercise
                yield book.stem, ast.parse("\n".join(lines) if cell["cell_type"] == "code" else "")


@pytest.mark.parametrize("part", ["helpers", "drops", "tools", "notebooks"])
def test_other_packages_use_only_exported_names(part):
    """Benchmarks are not checked: they use modules inside the planner, as its tests do."""
    for name, source in sources(part):
        modules = {}
        for node in ast.walk(source):
            if not isinstance(node, ast.ImportFrom) or name in DOORS:
                continue
            asked = absolute(node, name.split(".")[:-1])
            if part_of(asked) not in DOORS or part_of(asked) == part_of(name):
                continue
            assert asked in DOORS, f"{name}, line {node.lineno}: import from {part_of(asked)}"
            for alias in node.names:
                if alias.name not in {shown for _, shown in public(asked)}:
                    assert f"{asked}.{alias.name}" in MODULES, f"{name}: {asked} does not export {alias.name}"
                    modules[alias.asname or alias.name] = asked, alias.name
        for node in ast.walk(source):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
                asked, module = modules[node.value.id]
                assert (module, node.attr) in public(asked), f"{name}: {asked} does not export {node.attr}"


def test_frames_of_all_threads_are_asked_for_in_one_place():
    """Called elsewhere, these can block the process for ever (CPython's issue 106883)."""
    bare = re.compile(r"_current_(?:frames|exceptions)\s*\(")
    for file in [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "notebooks").rglob("*.ipynb")]:
        if file.name == "lines.py":
            continue
        assert not bare.search(file.read_text()), f"{file.relative_to(ROOT)}: use lines.frames_of_threads"


def test_paper_plan_and_explain_need_no_torch():
    code = (
        "import sys, three_axes.plan.planner, three_axes.paper.placement, three_axes.explain;"
        " print('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert forked.python(code).stdout.strip() == "False"


def versions(requirements) -> dict[str, str]:
    """'torch>=2.9' -> {'torch': '>=2.9'}"""
    return {m[1].lower(): m[2] for r in requirements if (m := re.match(r"([A-Za-z0-9_.-]+)\s*(.*)", r))}


def test_the_three_lists_of_packages_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    course = [r for r in extras["course"] if r != "three-axes[pages]"]
    needed = versions(project["dependencies"] + course + extras["pages"])
    conda = versions(re.findall(r"^      - (?!-)(\S+)$", (ROOT / "environment.yml").read_text(), re.M))
    assert conda == needed
    pinned = re.findall(r"^([a-z0-9_.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    for name in needed | versions(r for r in extras["test"] if not r.startswith("three-axes")):
        assert name in dict(pinned), f"constraints.txt has no exact version of {name}"
    fetched = re.findall(r'"(\w+)"', re.search(r"NEEDED = (.*)", colab.SETUP)[1])
    assert fetched and versions(fetched).keys() <= needed.keys()


def test_ranks_that_run_exercises_import_no_pictures():
    drops = [f"drops.{file.parent.name}" for file in (ROOT / "notebooks" / "drops").glob("*/exercises.py")]

    def imports_pictures():
        for drop in drops:
            importlib.import_module(drop)
        return "matplotlib" in sys.modules

    with World(1) as world:
        assert world.run(imports_pictures) == [False]
