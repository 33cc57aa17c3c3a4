"""The course in JupyterLab, on the reader's own copy of it.

The copies have no outputs, so that a prediction is asked before its answer is visible. A drop that is missing
from the reader's folder is copied there; a copy that is there already is kept. Each copy records the version
of the drop from which it was made, and a newer version is announced.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

from helpers.live import LIVE
from helpers.practice import drop_number, notebooks, onward, passed, read_book, write_book
from three_axes.files import course_on_path, find

MADE_FROM = "three_axes_made_from"  # in a copy's metadata: the version of its drop


def version(notebook: dict) -> str:
    """A digest of what the reader reads or runs in a notebook; outputs do not count."""
    cells = [(cell["cell_type"], cell["source"]) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def blank(notebook: dict) -> dict:
    """Remove a notebook's outputs, and record its version in its metadata, in place."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"][MADE_FROM] = version(notebook)
    return notebook


def _made_from(copy: Path) -> str | None:
    """The version from which a copy was made; None if the copy does not have it, or cannot be read."""
    try:
        return json.loads(copy.read_text(encoding="utf-8"))["metadata"].get(MADE_FROM)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _put_away(copy: Path) -> Path:
    """Move a copy into old/ beside it, under a free name."""
    old = copy.parent / "old"
    old.mkdir(exist_ok=True)
    free = (old / f"{copy.stem}-{n}.ipynb" for n in itertools.count(1))
    return copy.rename(next(path for path in free if not path.exists()))


def prepare(folder: Path, fresh: Collection[str] = ()) -> list[str]:
    """Copy each missing drop into `folder`, and replace the copies of the drops in `fresh` ('07'). Returns
    lines to print.

    A replaced copy is kept in old/. Raises ValueError for a drop that does not exist, for the folder of the
    stored notebooks, and for a folder that cannot be written.
    """
    stored = {drop_number(path): path for path in notebooks()}
    if unknown := [n for n in fresh if n not in stored]:
        raise ValueError(f"there is no drop {unknown[0]!r}; they are {', '.join(stored)}")
    if folder.resolve() == find("notebooks").resolve():
        raise ValueError(f"{folder} has the stored notebooks; name another folder for your own copies")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        messages, outdated = [], []
        for n, path in stored.items():
            copy = folder / path.relative_to(find("notebooks"))
            drop = blank(read_book(path))
            if copy.exists() and n not in fresh:
                if _made_from(copy) != drop["metadata"][MADE_FROM]:
                    outdated.append(n)
                continue
            if copy.exists():
                messages.append(f"{copy} is new. What you had is {_put_away(copy)}.")
            copy.parent.mkdir(exist_ok=True)
            part = copy.with_suffix(
                ".part"
            )  # renamed at the end, so that no incomplete copy has a drop's name
            write_book(drop, part)
            part.replace(copy)
    except OSError as e:
        raise ValueError(f"{folder} cannot hold the notebooks ({e.strerror}); name another folder") from None
    if outdated:
        them = " ".join(outdated)
        command = f"three-axes lab {folder} {' '.join(f'--fresh {n}' for n in outdated)}"
        if "MAKELEVEL" in os.environ:
            command = f'make lab FRESH="{them}"'
        messages.append(
            f"There is a newer version of: {them}. Your copies in {folder} are as you left them.\n"
            f"  {command}\nputs the new version there, and keeps yours in the folder old beside it."
        )
    return messages


def static(model: dict, **_) -> None:
    """Remove the live widgets from a notebook before it is stored, because without their kernel they are
    empty. Each has a picture or a text beside it. A hook of Jupyter's contents manager calls this function.
    """
    if model["type"] == "notebook":
        model["content"]["metadata"].pop("widgets", None)
        for cell in model["content"]["cells"]:
            for output in cell.get("outputs", ()):
                output.get("data", {}).pop(LIVE, None)


def run(args: Namespace) -> None:
    """Prepare the copies, and start JupyterLab at the next drop. Returns when JupyterLab ends."""
    import zmq
    from jupyter_client import KernelManager
    from jupyterlab.labapp import LabApp

    for line in prepare(args.folder, args.fresh):
        print(line, flush=True)
    print(f"Your copies are in {args.folder}. JupyterLab starts; Ctrl-C here ends it.", flush=True)
    print("Shift+Enter runs a cell and goes to the next.", flush=True)
    folder = args.folder.resolve()
    course_on_path()
    if args.fresh:
        opened = next(p for p in notebooks() if drop_number(p) == args.fresh[0])
    else:
        done = passed.mine(folder)
        opened = onward.next_drop(done)
        if done.exercises or done.left:
            print(f"{onward.where(done)}. Drop {drop_number(opened)} opens: it is next.", flush=True)
    place = Path(folder.name) / opened.relative_to(find("notebooks"))
    # Open only one tab, the next drop: restoring a notebook would start its kernel, and its ranks.
    shutil.rmtree(folder / ".workspaces", ignore_errors=True)
    # Kernels inherit this variable. A reader's own value is kept.
    os.environ.setdefault("PYTHONSTARTUP", str(find("data/jupyterlab/startup.py").resolve()))
    # Without this option of newer versions each kernel warns on the terminal that it is not encrypted.
    can_encrypt = hasattr(KernelManager, "transport_encryption") and zmq.has("curve")
    server = LabApp.initialize_server(
        [
            f"--ServerApp.root_dir={folder.parent}",
            f"--LabApp.default_url=/lab/tree/{quote(place.as_posix())}",
            f"--LabApp.app_settings_dir={find('data/jupyterlab')}",
            # A workspace of its own: tabs of other projects do not open here, nor the other way round.
            f"--LabApp.workspaces_dir={folder / '.workspaces'}",
            f"--LabApp.extra_labextensions_path={find('data/jupyterlab/extensions').resolve()}",
            "--LabApp.custom_css=True",
            # A kernel without an open page ends after a night.
            f"--MappingKernelManager.cull_idle_timeout={8 * 3600}",
            *["--KernelManager.transport_encryption=auto"] * can_encrypt,
            f"--port={args.port}",
            "--log-level=WARN",  # the address is still printed, and earlier lines stay visible
            *["--no-browser"] * args.no_browser,
            *["--allow-root"] * (hasattr(os, "geteuid") and os.geteuid() == 0),
        ]
    )
    server.static_custom_path.append(str(find("data/jupyterlab").resolve()))  # after the reader's own folders
    server.contents_manager.register_pre_save_hook(static)
    server.start()
