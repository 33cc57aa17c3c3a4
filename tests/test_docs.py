"""README.md and docs/: the glossary's words are in the notebooks, and pictures are those of the notebooks."""

import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

from helpers.practice.books import drop_number, notebooks
from tools import refresh
from tools.pages import minutes

ROOT = Path(__file__).resolve().parent.parent
ROWS = re.findall(
    r"^\| (.+) \| (.+) \| \[(.+)\]\((.+)\) \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M
)


@cache
def text(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)


@pytest.mark.parametrize("names, meaning, label, link", ROWS, ids=[row[0] for row in ROWS])
def test_a_word_of_the_glossary_is_where_its_link_leads(names, meaning, label, link):
    path = (ROOT / "docs" / link).resolve()
    assert path.name.startswith(label)
    patterns = [re.sub(r"[ -]", "[ _-]", re.escape(name).replace("\\", "")) for name in names.split(", ")]
    there = text(path)
    assert any(re.search(rf"(?<!\w){pattern}", there, re.I) for pattern in patterns)


@pytest.mark.parametrize("name", refresh.PICTURES)
def test_pictures_of_readme_and_docs_are_those_of_the_notebooks(name):
    assert (ROOT / "data" / name).read_bytes() == refresh.stored(name), "python -m tools.refresh --pictures"


def test_the_first_table_of_the_readme_is_drop_08s():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    book = nbformat.read(ROOT / "notebooks" / "08_grid.ipynb", as_version=4)
    cell = next(cell for cell in book.cells if "d08.by_axis(" in cell.source)
    texts = (output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    stored = next(text for text in texts if text.startswith("bytes sent by rank 0, along each axis"))
    for line in stored.splitlines()[3:]:
        name, *sizes, _ = re.split(r" {2,}", line.strip())
        assert f"| {name} | {' | '.join(sizes)} |" in readme


def test_a_lesson_of_60_or_90_minutes_takes_what_it_says():
    practice = {drop_number(path): minutes(nbformat.read(path, as_version=4))[0] for path in notebooks()}
    plans = re.findall(
        r"^\| (60|90) minutes: .*\((\d+)\) \| ([\w, ]+) \| (.*?) \|",
        text(ROOT / "docs" / "teaching.md"),
        re.M,
    )
    assert [length for length, *_ in plans] == 3 * ["90"] + 3 * ["60"]
    for length, told, drops, how in plans:
        listed = drops.split(", ")
        extra = sum(map(int, re.findall(r"\((\d+)\)", how)))
        frame = {"60": 5 + 5, "90": 10 + 10}[length]
        assert int(told) == frame + sum(6 + 4 + practice[n] for n in listed) + extra <= int(length)
