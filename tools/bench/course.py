"""The course itself: seconds of each notebook under nbval, words and minutes of each drop, and how long a
slider takes to redraw: `python tools/bench/course.py`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import nbformat
from report import save, timed

from helpers.draw import explore
from tools import pages

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def latency(make) -> float:
    """Seconds from a new setting to the picture's bytes, without a browser: median over all settings."""
    explorer = make()
    explorer.picture.png()
    took = []
    for name, (_, options, first) in explorer.controls.items():
        for option in (o for o in options if o != first):
            took.append(timed(lambda: (explorer.set(**{name: option}), explorer.picture.png())))
        explorer.set(**{name: first})
    return statistics.median(took)


def under_nbval(folder: Path) -> tuple[float, dict[str, tuple[float, bool]]]:
    """(seconds of one run of nbval, notebook -> (its share, whether its outputs are those stored))."""
    report = folder / "report.xml"
    options = f"-q -p no:cacheprovider --nbval --nbval-cell-timeout=120 --junitxml={report}"
    command = [sys.executable, "-m", "pytest", *options.split(), *map(str, NOTEBOOKS)]
    environ = os.environ | {"THREE_AXES_STREAM_AFTER": "60", "THREE_AXES_PROGRESS": ""}
    root = NOTEBOOKS[0].parent.parent
    seconds = timed(lambda: subprocess.run(command, cwd=root, capture_output=True, env=environ))
    cells = list(ElementTree.parse(report).iter("testcase"))
    counts = {}
    for path in NOTEBOOKS:
        mine = [cell for cell in cells if path.stem in cell.get("classname")]
        same = not any(len(cell) for cell in mine)  # a failed cell has its reason inside
        counts[path.stem] = sum(float(cell.get("time")) for cell in mine), same
    return seconds, counts


def main() -> None:
    with TemporaryDirectory() as folder:
        total, counts = under_nbval(Path(folder))
    rows, sums = [], [0, 0]
    for path in NOTEBOOKS:
        seconds, same = counts[path.stem]
        notebook = nbformat.read(path, as_version=4)
        count, (reading, practice) = pages.words(notebook), pages.minutes(notebook)
        sums = [a + b for a, b in zip(sums, (practice, count))]
        name, stored = path.stem.replace("_", " "), "yes" if same else "no"
        rows.append([name, reading, str(practice), str(count), f"{seconds:.1f} s", stored])
    rows.append(["all", "", *map(str, sums), f"{total:.0f} s", ""])
    made = (explore.schedules, explore.memory, explore.plans)
    sliders = "; ".join(f"{make.__name__} {1e3 * latency(make):.0f} ms" for make in made)
    note = f"From a slider's setting to its picture, median: {sliders}."
    columns = ["drop", "to read", "to practise", "words", "under nbval", "outputs as stored"]
    save("course", "The course", columns, rows, note, packages=("nbval", "matplotlib"))


if __name__ == "__main__":
    main()
