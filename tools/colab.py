"""The cell and the badge that open a notebook in Colab, and what `make colab REPO=owner/name` runs:

python -m tools.colab owner/name

Colab opens a file of the repository as it is stored, and no metadata is sure to hide an output there. So the
badges lead to copies without outputs, in colab/, and a prediction comes before its answer.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat

from helpers.practice.books import notebooks, number
from three_axes.files import find

from .lab import blank

UNNAMED = "OWNER/three-axes"  # until `make colab` has been told where the course lives

FIRST = """#@title Run this cell and the next one first, and again after the kernel was restarted
# It takes some seconds: PyTorch is imported. Where the course is not installed, it is found or fetched.
"""
SETUP = """from importlib.util import find_spec
if not find_spec("helpers"):
    import os, site, sys
    course = os.path.abspath("{up}" if os.path.isdir("{up}/helpers") else "three-axes")
    {fetched}if not os.path.isdir(course):
        raise FileNotFoundError("The course is not here. {help}")
    sys.path[:0] = [course, course + "/notebooks"]
    %pip install --quiet accelerate cloudpickle tqdm ipywidgets
    site.addsitedir(site.getusersitepackages())"""
FETCHED = """if not os.path.isdir(course):
        !git clone --quiet --depth 1 https://github.com/{repo} three-axes
    """
LOST = "git could not fetch it from github.com/{repo}: see above."
UNPUBLISHED = "It is not published yet: open this notebook in the course's own folder."
# The cell is folded: in JupyterLab, and in Colab, which shows its title.
FOLDED = {"tags": ["setup"], "jupyter": {"source_hidden": True}, "cellView": "form"}
HERE = """
from helpers import World
from helpers.practice import progress
progress.here("{number}")"""
AT = "https://colab.research.google.com"
BADGE = f"[![Open in Colab]({AT}/assets/colab-badge.svg)]({AT}/github/{{repo}}/blob/main/colab/{{name}})"


def setup_of(repo: str, up: str) -> str:
    """What makes the course importable. up: the way from the notebook's folder to the course's."""
    known = repo != UNNAMED
    return SETUP.format(
        up=up,
        fetched=FETCHED.format(repo=repo) * known,
        help=LOST.format(repo=repo) if known else UNPUBLISHED,
    )


def stamp(notebook: nbformat.NotebookNode, name: str, repo: str = UNNAMED) -> nbformat.NotebookNode:
    """Put the setup cell behind the title, and with a real `repo` a badge under it.

    name: its path in the folder of notebooks. Doing it twice, or for another repo, leaves one of each.
    """
    title, *rest = notebook.cells
    head, _, rest_of_it = re.sub(r"\n\[!\[Open in Colab\].*\n", "", title.source).partition("\n")
    badge = "" if repo == UNNAMED else f"\n{BADGE.format(repo=repo, name=name)}\n"
    title.source = f"{head}\n{badge}{rest_of_it}"
    up = "/".join([".."] * len(Path(name).parts))  # from the notebook's folder to the course's
    source = FIRST + setup_of(repo, up) + HERE.format(number=number(Path(name)))
    setup = nbformat.v4.new_code_cell(source, metadata=FOLDED)
    if rest and "setup" in rest[0].metadata.get("tags", []):
        old = rest.pop(0)
        setup.execution_count, setup.outputs = old.execution_count, old.outputs
    notebook.cells = [title, setup, *rest]
    return notebook


def linked(readme: str, repo: str) -> str:
    """The README with its paragraph on Colab for a real `repo`. Doing it twice changes nothing more."""
    first = f"{AT}/github/{repo}/blob/main/colab/{notebooks()[0].name}"
    told = (
        f"**Colab.** [Open drop 01]({first}), or another of the folder `colab`. The first cell fetches the"
        " course and uses the torch that is there."
    )
    return re.sub(r"(?m)^\*\*Colab\.\*\*.*$", lambda _: told, readme)


def published() -> str:
    """The repository that `make colab` was told; "" where none was."""
    told = re.search(rf"{AT}/github/([\w.-]+/[\w.-]+)/blob", find("README.md").read_text(encoding="utf-8"))
    return told[1] if told else ""


def make_colab(repo: str) -> None:
    """Stamp every notebook, write its copy into colab/, and link the README."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(f"{repo!r} is no repository; give owner/name, as in make colab REPO=owner/name")
    for path in notebooks():
        name = path.relative_to(find("notebooks")).as_posix()
        notebook = stamp(nbformat.read(path, as_version=4), name, repo)
        for i, cell in enumerate(notebook.cells):
            cell.id = f"drop-{path.name[:2]}-{i:02d}"
        nbformat.write(notebook, path)
        copy = find("notebooks").parent / "colab" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(blank(notebook), copy)
    readme, project = find("README.md"), find("pyproject.toml")
    readme.write_text(linked(readme.read_text(encoding="utf-8"), repo), encoding="utf-8")
    urls = re.sub(r"github\.com/[\w.-]+/[\w.-]+", f"github.com/{repo}", project.read_text(encoding="utf-8"))
    project.write_text(urls, encoding="utf-8")
    opened = f"{len(notebooks())} notebooks open in Colab from github.com/{repo}"
    print(f"{opened}: commit notebooks, colab, README.md and pyproject.toml")


if __name__ == "__main__":
    try:
        make_colab(" ".join(sys.argv[1:]))
    except ValueError as e:
        sys.exit(str(e))
