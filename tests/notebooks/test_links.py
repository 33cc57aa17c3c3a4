"""Every link leads somewhere, every name in the prose exists, and a term is explained before it is used."""

import importlib
import re
from pathlib import Path

import nbformat
import pytest
from test_notebooks import NOTEBOOKS, text

from helpers.practice.books import module_of

ROOT = Path(__file__).resolve().parents[2]
BOOKS = {path.name[:2]: nbformat.read(path, as_version=4) for path in NOTEBOOKS}


def anchors(markdown: str) -> set[str]:
    """The anchors of a page: those of its headings, and explicit ones."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.M)
    own = re.findall(r'<a id=\\?"([^"\\]*)', markdown)  # in a notebook the quotes are escaped
    return {*own, *(re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)}


FILES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *NOTEBOOKS]


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_every_relative_link_leads_somewhere(file):
    prose = text(nbformat.read(file, as_version=4)) if file.suffix == ".ipynb" else file.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            there = (file.parent / path).resolve() if path else file
            assert there.exists(), target
            assert not anchor or anchor in anchors(there.read_text()), target


SHORT = "helpers.toy helpers.draw three_axes.paper.schedules three_axes.paper.simulation".split()
NAMES = {name.rpartition(".")[2]: name for name in [*map(module_of, BOOKS), *SHORT]}


@pytest.mark.parametrize("number", BOOKS)
def test_every_name_in_the_prose_exists(number):
    for named in re.findall(r"`([\w.]+)(?:\([^`]*\))?`", text(BOOKS[number])):
        first, *rest = named.split(".")
        if first == "helpers" or first in NAMES and rest:
            parts = [*NAMES.get(first, first).split("."), *rest]
            for k in range(len(parts), 0, -1):
                try:
                    thing = importlib.import_module(".".join(parts[:k]))
                    break
                except ImportError:
                    continue
            for name in parts[k:]:
                assert hasattr(thing, name), f"{named} does not exist"
                thing = getattr(thing, name)


# term -> the drop that explains it, in bold; no earlier drop may use it
TERMS = dict(rank="01", twin="01", bucket="05", bubble="07", microbatch="07", budget="10", MFU="11")
TERMS |= {"reduce-scatter": "02", "sequence parallelism": "06"}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_explained_before_it_is_used(term):
    elsewhere = r"(?s)\*\*Next\.\*\*.*|<[^>]+>|`[^`]*`|\[[^\]]*\]\([^)]*\)"  # of later drops, or code
    for number, book in BOOKS.items():
        if number < TERMS[term]:
            found = re.search(rf"\b{term}s?\b", re.sub(elsewhere, "", text(book)))
            assert not found, f"drop {number} uses {term!r}, which drop {TERMS[term]} explains"
    assert re.search(rf"\*\*[^*]*{term}[^*]*\*\*", text(BOOKS[TERMS[term]]), re.I), (
        f"drop {TERMS[term]} does not make {term!r} bold where it explains it"
    )
