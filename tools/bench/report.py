"""Times the calls of the benches, and writes their tables, as Markdown with the date, the versions and the
machine, into build/bench/.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build" / "bench"


def timed(action: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def paired(pairs: Sequence[tuple[float, float]]) -> str:
    """'1.02 (0.97 to 1.08)': the median and the extremes of the pairs' ratios, the second to the first."""
    ratios = sorted(second / first for first, second in pairs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def versions(*packages: str) -> str:
    """'Python 3.11.7, torch 2.13.0, …': packages that are not installed are left out."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", *packages):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass
    return ", ".join(versions)


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])


def save(
    name: str,
    title: str,
    columns: list[str],
    rows: list[list[str]],
    *notes: str,
    packages: Sequence[str] = (),
) -> None:
    """Print a table and write it to build/bench/NAME.md."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    head = f"{date.today()}, {versions(*packages)}, {machine}"
    text = "\n\n".join([f"### {title}", head, markdown(columns, rows), *notes]) + "\n"
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{name}.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
