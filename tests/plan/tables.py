"""The scripts of `make planner-tables` read published tables, and print their results as Markdown,
by this.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path


def folder_of_tables(about: str) -> Path:
    """The folder that the command line gives."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--published", type=Path, required=True, help="the folder with the tables")
    return parser.parse_args().published


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, whose comment lines are skipped."""
    with open(path, encoding="utf-8") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def show(title: str, columns: list[str], rows: list[list[str]], *notes: str) -> None:
    """Print a table under its title, and notes below it."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    table = "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])
    print("\n\n".join([f"### {title}", table, *notes]) + "\n", flush=True)
