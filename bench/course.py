"""The course itself: seconds of each notebook under nbval, words and minutes of each drop, and how long a slider takes to redraw: `python bench/course.py`."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from report import save

from helpers.lesson import explore

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


def latency(make) -> float:
    """Seconds from a new setting to the picture's bytes, median over each value of each control, in this process without a browser."""
    explorer = make()
    explorer.picture.png()
    took = []
    for name, (_, options, first) in explorer.controls.items():
        for option in (o for o in options if o != first):
            start = time.perf_counter()
            explorer.set(**{name: option})
            explorer.picture.png()
            took.append(time.perf_counter() - start)
        explorer.set(**{name: first})
    return statistics.median(took)


def run(path: Path) -> tuple[float, bool]:
    """Seconds of a notebook under nbval, pytest's start included, and whether it gave what is stored."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest", "--nbval", "--nbval-cell-timeout=60", "-q", "-p", "no:cacheprovider", str(path)],
                          cwd=path.parent.parent, capture_output=True, env={**os.environ, "THREE_AXES_STREAM_AFTER": "60", "THREE_AXES_PROGRESS": ""})
    return time.perf_counter() - start, done.returncode == 0


def words(path: Path) -> tuple[int, str]:
    """(words of a drop's prose, the minutes it says)."""
    prose = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")
    return len(re.findall(r"[A-Za-z][\w'’-]*", prose)), re.search(r"(\d+) minutes", prose)[1]


def main() -> None:
    rows, total = [], 0.0
    for path in NOTEBOOKS:
        seconds, same = run(path)
        total += seconds
        count, minutes = words(path)
        rows.append([path.stem.replace("_", " "), minutes, str(count), f"{seconds:.1f} s", "yes" if same else "no"])
    rows.append(["all", str(sum(int(r[1]) for r in rows)), str(sum(int(r[2]) for r in rows)), f"{total:.0f} s", ""])
    sliders = "; ".join(f"{make.__name__} {1e3 * latency(make):.0f} ms" for make in (explore.schedules, explore.memory, explore.plans))
    save("course", "The course", ["drop", "minutes", "words", "under nbval", "outputs as stored"], rows,
         f"From a slider's setting to its picture, median: {sliders}.", packages=("nbval", "matplotlib"))


if __name__ == "__main__":
    main()
