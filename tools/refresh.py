"""Runs notebooks in a fresh kernel and stores their outputs: `make refresh` for all notebooks, or
`python -m tools.refresh` with names of notebooks.

Only content is stored: no timings, no metadata of the machine, and a widget's text in place of the widget. So
each difference in a commit is one that the reader can see.

The pictures in README.md and docs/ are copied from these outputs. `python -m tools.refresh --pictures` only
writes the pictures, for instance after a merge has changed outputs.
"""

import os
import sys
from base64 import b64decode
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from helpers.practice import notebooks
from tools.lab import static

ROOT = Path(__file__).resolve().parent.parent
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def normalise(notebook: nbformat.NotebookNode, number: str) -> nbformat.NotebookNode:
    """Number the cells of a drop's notebook, and remove its live widgets and all other metadata, in place."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id = f"drop-{number}-{i:02d}"
        kept = {key: cell.metadata[key] for key in ("tags", "jupyter", "cellView") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
    static({"type": "notebook", "content": notebook})
    return notebook


# Picture in data/ -> (number of its notebook, a text in the source of its cell).
PICTURES = {"timeline.png": ("07", 'gantt.timeline({"1F1B, predicted"'), "cube.png": ("01", "draw.cuts(4)")}


def stored(name: str) -> bytes:
    """The PNG of one of PICTURES, from the only code cell that contains its text."""
    number, text = PICTURES[name]
    (path,) = ROOT.glob(f"notebooks/{number}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    (cell,) = (cell for cell in cells if cell.cell_type == "code" and text in cell.source)
    (png,) = (o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {}))
    return b64decode(png)


def refresh(path: Path) -> None:
    """Run a notebook in its folder, and write it with its new outputs."""
    notebook = nbformat.read(path, as_version=4)
    in_folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=in_folder).execute()
    nbformat.write(normalise(notebook, path.name[:2]), path)


if __name__ == "__main__":
    os.environ["THREE_AXES_PROGRESS"] = ""
    os.environ["THREE_AXES_STREAM_AFTER"] = "60"  # print at the end of a cell, as nbval expects it
    for path in () if sys.argv[1:] == ["--pictures"] else map(Path, sys.argv[1:] or notebooks()):
        print("refreshing", path.name, flush=True)
        refresh(path)
    for name in PICTURES:
        (ROOT / "data" / name).write_bytes(stored(name))
