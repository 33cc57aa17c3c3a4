"""Colab and Kaggle: notebooks with a link that opens them, or with the whole course in them."""

import copy
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest

from helpers.practice import books
from tools import colab

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = books.notebooks()


def sources(notebook: dict) -> list[str]:
    return [cell["source"] for cell in notebook["cells"]]


def test_stamping_a_repository_is_idempotent_and_can_be_changed():
    for path in NOTEBOOKS:
        plain, name = books.read_book(path), path.relative_to(FOLDER).as_posix()
        once = colab.stamp(copy.deepcopy(plain), name, "owner/name")
        twice = colab.stamp(copy.deepcopy(once), name, "owner/name")
        other = colab.stamp(copy.deepcopy(once), name, "some/where")
        back = colab.stamp(copy.deepcopy(once), name)
        assert sources(once) == sources(twice) and len(once["cells"]) == len(plain["cells"])
        title, setup = sources(once)[:2]
        assert title.count("colab-badge") == 1 and f"owner/name/blob/main/colab/{name}" in title
        assert "owner/name" in setup and "owner" not in "".join(sources(other)[:2])
        assert sources(back) == sources(colab.stamp(plain, name))
    with pytest.raises(ValueError, match="give owner/name"):
        colab.make_colab("nonsense")


@pytest.fixture(scope="module")
def carried(tmp_path_factory) -> dict[str, str]:
    """'01' -> the file of a notebook that carries the course, made by a Python without what is installed."""
    folder = tmp_path_factory.mktemp("carried")
    command = [sys.executable, "-S", "-m", "tools.colab"]
    how = dict(cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    done = subprocess.run(command, **how)
    assert (done.returncode, done.stderr) == (0, "")
    return {path.stem: path for path in (folder / "build" / "colab").glob("*.ipynb")}


def test_each_notebook_can_carry_the_whole_course_without_an_answer(carried):
    assert len(carried) == len(NOTEBOOKS)
    for path in carried.values():
        book = nbformat.read(path, as_version=4)
        assert path.stat().st_size < 1.3e6 and 'PARCEL = ""' not in book.cells[1].source
        assert not any(cell.get("outputs") for cell in book.cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["01", "13"])
def test_a_notebook_that_carries_the_course_runs_in_an_empty_folder(carried, tmp_path, name):
    """All cells run where another package `helpers` is installed, and the course is not."""
    site = tmp_path / "packages"
    site.mkdir()
    for package in Path(nbformat.__file__).parents[1].iterdir():
        if not re.match(r"(__editable__|_?three_axes|_editable|helpers|drops|tools)", package.name):
            (site / package.name).symlink_to(package)
    (site / "helpers").mkdir()
    (site / "helpers" / "__init__.py").write_text("somebody = 'else'\n")
    venv.create(tmp_path / "venv", with_pip=False)
    (own,) = tmp_path.glob("venv/lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{site}\n")
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(carried[name], work)
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"THREE_AXES_PROGRESS": ""}
    execute = [tmp_path / "venv/bin/python", "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
    how = dict(cwd=work, env=environ, capture_output=True, text=True, timeout=900)
    ran = subprocess.run([*map(str, execute), f"{name}.ipynb"], **how)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert (work / "three-axes" / "helpers").is_dir()


def test_what_colab_opens_has_no_outputs(tmp_path, monkeypatch):
    for path in NOTEBOOKS[:2]:
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "notebooks")
    (tmp_path / "docs").mkdir()
    for name in ("docs/install.md", "pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(colab, "find", lambda name: tmp_path / name)
    monkeypatch.setattr(colab, "notebooks", lambda: sorted((tmp_path / "notebooks").glob("*.ipynb")))
    for _ in range(2):
        colab.make_colab("owner/name")
    for path in NOTEBOOKS[:2]:
        copy, stored = (nbformat.read(tmp_path / folder / path.name, 4) for folder in ("colab", "notebooks"))
        assert f"owner/name/blob/main/colab/{path.name}" in copy.cells[0].source
        assert sources(copy) == sources(stored)
        assert not any(c.get("outputs") or c.get("execution_count") for c in copy.cells)
        assert any(c.get("outputs") for c in stored.cells)
    install = (tmp_path / "docs/install.md").read_text()
    assert install.count("**Colab.**") == install.count("owner/name/blob/main/colab/01_") == 1
    assert install.count("git clone https://github.com/owner/name && cd name\n") == 1
    assert 'Source = "https://github.com/owner/name"' in (tmp_path / "pyproject.toml").read_text()
    assert "repository-code: https://github.com/owner/name\n" in (tmp_path / "CITATION.cff").read_text()


SLOW = [pytest.param(clone, marks=pytest.mark.slow) for clone in ("../..", "three-axes")]


@pytest.mark.parametrize("clone", ["..", *SLOW])
def test_the_setup_cell_finds_a_clone_where_nothing_is_installed(tmp_path, clone):
    """A notebook's folder, a clone above or beside it, and a Python that does not know the course."""
    inside = {"..": "course/notebooks", "../..": "course/notebooks/beyond"}
    root = tmp_path / inside.get(clone, "content")
    root.mkdir(parents=True)
    for name in ("three_axes", "helpers", "notebooks"):
        copy, left = (root / clone).resolve() / name, shutil.ignore_patterns("__pycache__", "*.ipynb")
        shutil.copytree(ROOT / name, copy, ignore=left, dirs_exist_ok=True)
    cell = colab.setup_of("owner/name", ".." if clone == "three-axes" else clone)
    cell = cell.replace("!git", "raise SystemExit('cloned anew') #").replace('!"{sys.exec', "pass #")
    code = (
        f"import sys\nsys.path = [p for p in sys.path if p not in {[str(ROOT), str(FOLDER)]!r}]\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"{cell}\nimport helpers, drops\nprint(helpers.__file__, drops.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path.resolve()) in done.stdout
