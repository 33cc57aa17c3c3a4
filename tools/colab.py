"""Writes notebooks for Colab and Kaggle, and the first cell of every notebook, which imports the course.

python -m tools.colab              build/colab/NN.ipynb, each with the whole course: upload one, run it
python -m tools.colab owner/name   links that open the notebooks in Colab, once the course is on GitHub

It needs only Python 3.11 or newer, and takes a second. Both commands write copies without outputs, so that a
prediction is asked before its answer is visible.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import zipfile
from pathlib import Path

from helpers.practice import BUILD, drop_number, notebooks, read_book, write_book
from three_axes.files import find

from .lab import blank

UNNAMED = "OWNER/three-axes"  # until `make colab` is given the repository's name

# The first code cell is FIRST + SETUP + HERE. SETUP finds the course, or downloads it.
FIRST = """#@title Run this cell and the next one first; after a restart of the kernel, the %%ranks cells too
# It takes some seconds: PyTorch is imported. Where the course is not installed, it is found or fetched.
"""
SETUP = r"""import base64, glob, importlib, io, os, sys, zipfile
from importlib.util import find_spec

PARCEL = ""  # the whole course, where a notebook carries it
NEEDED = "accelerate", "cloudpickle", "ipywidgets", "matplotlib", "tqdm"

def is_here(*folders):
    sys.path[:0] = map(os.path.abspath, folders)
    if not hasattr(sys.modules.get("helpers"), "World"):  # another's helpers
        sys.modules.pop("helpers", None)
    importlib.invalidate_caches()
    try:
        from helpers import World
        import drops
    except ImportError as e:
        if (e.name or "").split(".")[0] not in ("helpers", "drops"):
            raise  # the course is here, and a package is not
        del sys.path[:len(folders)]
        return False
    return True

def is_installed():
    if not find_spec("three_axes"):
        return False
    from three_axes.files import course_on_path
    course_on_path()
    return is_here()

def unpacked(archive, to):
    zipfile.ZipFile(archive).extractall(to)
    return to, to + "/notebooks"

def bring_course():
    missing = " ".join(name for name in NEEDED if not find_spec(name))
    if missing:
        !"{sys.executable}" -m pip install --quiet --disable-pip-version-check {missing}
    if is_here() or is_installed():
        return
    beside = [at for at in ("{up}", "three-axes") if os.path.isdir(at + "/helpers")]
    if any(is_here(at, at + "/notebooks") for at in beside):
        return
    wheels = glob.glob("three_axes-*.whl") + glob.glob("/kaggle/input/**/three_axes-*.whl", recursive=True)
    if wheels:
        sys.path[:0] = unpacked(wheels[-1], os.path.abspath("three-axes-wheel"))
        if is_installed():
            return
    if PARCEL and is_here(*unpacked(io.BytesIO(base64.b85decode(PARCEL)), "three-axes")):
        return
    {fetched}raise FileNotFoundError("The course is not here. {help}")

bring_course()
"""
FETCHED = """!git clone --quiet --depth 1 https://github.com/{repo} three-axes
    if is_here("three-axes", "three-axes/notebooks"):
        return
    """
LOST = "git could not fetch it from github.com/{repo}: see above."
UNPUBLISHED = (
    "Open this notebook in the course's own folder, or one of build/colab, which `make colab` writes."
)
# The cell is folded: in JupyterLab, and in Colab, which shows its title.
FOLDED = {"tags": ["setup"], "jupyter": {"source_hidden": True}, "cellView": "form"}
HERE = """from helpers import World
from helpers.practice import progress
progress.here("{number}")"""
AT = "https://colab.research.google.com"
BADGE = f"[![Open in Colab]({AT}/assets/colab-badge.svg)]({AT}/github/{{repo}}/blob/main/colab/{{name}})"


def setup_of(repo: str, up: str) -> str:
    """The code that makes the course importable. up: the path from the notebook's folder to the course's."""
    is_published = repo != UNNAMED
    values = {
        "{up}": up,
        "{fetched}": FETCHED.format(repo=repo) * is_published,
        "{help}": LOST.format(repo=repo) if is_published else UNPUBLISHED,
    }
    return re.sub(r"\{(up|fetched|help)\}", lambda name: values[name[0]], SETUP)


def stamp(notebook: dict, name: str, repo: str = UNNAMED) -> dict:
    """Add the setup cell after the title and, with a real `repo`, a badge under the title.

    name: the notebook's path in the folder of notebooks. A second run, also for another repo, replaces both.
    """
    title, *rest = notebook["cells"]
    head, _, rest_of_it = re.sub(r"\n\[!\[Open in Colab\].*\n", "", title["source"]).partition("\n")
    badge = "" if repo == UNNAMED else f"\n{BADGE.format(repo=repo, name=name)}\n"
    title["source"] = f"{head}\n{badge}{rest_of_it}"
    up = "/".join([".."] * len(Path(name).parts))  # path from the notebook's folder to the course's
    source = FIRST + setup_of(repo, up) + HERE.format(number=drop_number(Path(name)))
    setup = {"cell_type": "code", "id": "setup", "execution_count": None, "outputs": []}
    if rest and "setup" in rest[0]["metadata"].get("tags", []):
        setup = rest.pop(0)
    notebook["cells"] = [title, setup | {"source": source, "metadata": FOLDED}, *rest]
    return notebook


def linked(install: str, repo: str) -> str:
    """docs/install.md, with `repo` in its commands to clone it and in its paragraph on Colab. A second call
    with the same `repo` changes nothing.
    """
    clone = rf"\g<1>{repo}\g<2>{repo.rpartition('/')[2]}"
    install = re.sub(r"(git clone https://github\.com/)[\w.-]+/[\w.-]+( && cd )[\w.-]+", clone, install)
    first = f"{AT}/github/{repo}/blob/main/colab/{notebooks()[0].name}"
    paragraph = (
        f"**Colab.** [Open drop 01]({first}), or another of the folder `colab`. The first cell fetches the"
        " course and uses the torch that is there."
    )
    return re.sub(r"(?m)^\*\*Colab\.\*\*.*$", lambda _: paragraph, install)


def published() -> str:
    """The repository that `make colab` was given; "" if none was."""
    found = re.search(
        rf"{AT}/github/([\w.-]+/[\w.-]+)/blob", find("docs/install.md").read_text(encoding="utf-8")
    )
    return found[1] if found else ""


def parcel() -> str:
    """A zip, as text, of the files that notebooks import and read, without outputs and pictures."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as z:
        for name in ("helpers", "three_axes", "tools", "data", "notebooks"):
            folder = find(name)
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                inside = path.relative_to(folder).as_posix()
                if name == "notebooks" and path.suffix != ".ipynb" and not inside.startswith("drops/"):
                    continue  # a reader's own work
                # JupyterLab's checkpoints may hold a reader's answers.
                left_out = "__pycache__", ".ipynb_checkpoints"
                if (
                    path.suffix == ".png"
                    or inside.startswith("course/")
                    or any(part in inside for part in left_out)
                ):
                    continue
                content = path.read_bytes()
                if path.suffix == ".ipynb":
                    content = json.dumps(blank(read_book(path)), ensure_ascii=False).encode()
                z.writestr(f"{name}/{inside}", content)
    return base64.b85encode(packed.getvalue()).decode()


def carrying(notebook: dict, course: str) -> dict:
    """The notebook without outputs, with the whole course in its setup cell."""
    setup = notebook["cells"][1]
    setup["source"] = setup["source"].replace('PARCEL = ""', f"PARCEL = {course!r}")
    return blank(notebook)


def make_parcels() -> None:
    """Write each notebook, with the whole course in its setup cell, into build/colab."""
    course, folder = parcel(), BUILD / "colab"
    folder.mkdir(parents=True, exist_ok=True)
    for path in notebooks():
        name = path.relative_to(find("notebooks")).as_posix()
        stamped = stamp(read_book(path), name)
        write_book(carrying(stamped, course), folder / f"{drop_number(path)}.ipynb")
    size = f"{len(course) / 1e6:.1f} MB"
    print(f"{len(notebooks())} notebooks in {folder}, each with the course ({size}): upload one to Colab")


def make_colab(repo: str) -> None:
    """Stamp every notebook, write a copy of it without outputs into colab/, and write `repo` into
    docs/install.md, pyproject.toml and CITATION.cff. Raises ValueError for a `repo` that is not owner/name.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(f"{repo!r} is no repository; give owner/name, as in make colab REPO=owner/name")
    for path in notebooks():
        name = path.relative_to(find("notebooks")).as_posix()
        notebook = stamp(read_book(path), name, repo)
        for i, cell in enumerate(notebook["cells"]):
            cell["id"] = f"drop-{path.name[:2]}-{i:02d}"
        write_book(notebook, path)
        copy = find("notebooks").parent / "colab" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_book(blank(notebook), copy)
    install = find("docs/install.md")
    install.write_text(linked(install.read_text(encoding="utf-8"), repo), encoding="utf-8")
    for file in (find("pyproject.toml"), find("CITATION.cff")):
        text = re.sub(r"github\.com/[\w.-]+/[\w.-]+", f"github.com/{repo}", file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
    opened = f"{len(notebooks())} notebooks open in Colab from github.com/{repo}"
    print(f"{opened}: commit notebooks, colab, docs, CITATION.cff and pyproject.toml")


if __name__ == "__main__":
    try:
        make_colab(" ".join(sys.argv[1:])) if sys.argv[1:] else make_parcels()
    except ValueError as e:
        sys.exit(str(e))
