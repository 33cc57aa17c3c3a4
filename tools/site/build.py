"""Writes all pages of the site, and the links between them.

The site has the folders of the repository: notebooks/02_….ipynb becomes notebooks/02_….html, docs/train.md
becomes docs/train.html, README.md becomes the first page. A file of Python becomes a page if a document links
to it. So a link between pages is the link between the files, with another ending.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from pathlib import Path, PurePosixPath

from bs4 import BeautifulSoup, Tag
from tqdm import tqdm

from helpers.practice import LATER, cards, drop_number, notebooks
from three_axes.files import find

from .. import slides
from ..colab import published
from ..printables import cheatsheet_body, rendered
from . import drop, frames
from .first import first

PAGES = (".ipynb", ".md", ".py", "")  # these files become pages; other files are copied
FIRST = "README.md"  # becomes the first page
GLOSSARY = "docs/glossary.md"


def build(folder: Path) -> int:
    """Write the site into `folder`, replacing its content. Returns the number of pages. Raises
    FileNotFoundError for a link to a file that does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    books = ["notebooks/" + path.relative_to(find("notebooks")).as_posix() for path in notebooks()]
    documents = sorted(f"docs/{path.name}" for path in find("docs").glob("*.md"))
    waiting = [FIRST, *books, *documents]  # the loop adds the files to which these link
    bodies: dict[str, BeautifulSoup] = {}
    for name in tqdm(waiting, total=float("inf"), unit=" pages", disable=None, leave=False):  # on a terminal
        if name not in bodies:
            path = find(name)
            body = drop.page(path) if path.suffix == ".ipynb" else drop.document(path)
            bodies[name] = BeautifulSoup(body, "html.parser")
            waiting += _linked(bodies[name], name, folder)
    deck = rendered("cards", deck=cards.load())
    for name, body in (("cards.md", deck), ("cheatsheet.md", cheatsheet_body())):
        bodies[name] = BeautifulSoup(body, "html.parser")
    slides.write("", folder / "slides")
    repo = published()
    titles = {name: _title(body) for name, body in bodies.items()}
    sections = []
    for name, body in bodies.items():
        _headings(body)
        _tables(body)
        _later(body)
        if name == GLOSSARY:
            body.table["class"] = "words"  # for style.css
        if not name.endswith((".py", "LICENSE")):
            sections += _sections(body, address(name), titles[name])
        if name == FIRST:
            vote = BeautifulSoup(first(), "html.parser")
            _linked(vote, name, folder)  # copies its picture
            body.img.find_parent("p").insert_before(vote)
        place = books.index(name) if name in books else None
        page = rendered(
            "page",
            body=str(body),
            title=titles[name],
            up="../" * (len(PurePosixPath(name).parts) - 1),
            source=f"https://github.com/{repo}/blob/main/{name}" if repo else "",
            previous=books[place - 1] if place else None,
            next=books[place + 1] if place is not None and place + 1 < len(books) else None,
            drop=drop_number(Path(name)) if place is not None else None,
            here=name,
            books=books,
            documents=documents,
            titles=titles,
            address=address,
            number=lambda book: drop_number(Path(book)),
        )
        (folder / address(name)).parent.mkdir(parents=True, exist_ok=True)
        (folder / address(name)).write_text(page, encoding="utf-8")
    for asset in ("style.css", "site.js", "first.js"):
        shutil.copy(find(f"data/site/{asset}"), folder / asset)
    index = f"const SECTIONS = {json.dumps(sections, ensure_ascii=False)};\n"
    scripts = {f"frames-{name}.js": frames.script(name) for name in frames.FRAMES}
    for script, text in {**scripts, "search.js": index}.items():
        (folder / script).write_text(text, encoding="utf-8")
    return len(bodies)


def address(name: str) -> str:
    """The path on the site of a file of the repository: 'docs/train.md' -> 'docs/train.html'."""
    return "index.html" if name == FIRST else str(PurePosixPath(name).with_suffix(".html"))


def _linked(body: BeautifulSoup, name: str, folder: Path) -> list[str]:
    """Change a page's links to paths on the site, and copy the files that are no pages. Returns those that
    are to become pages.
    """
    pages = []
    for tag in body.select("a[href], img[src]"):
        attribute = "href" if tag.name == "a" else "src"
        target, hash_, anchor = tag[attribute].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            continue
        file = os.path.normpath(PurePosixPath(name).parent / target).replace(os.sep, "/")
        moved = file
        if PurePosixPath(file).suffix in PAGES:
            pages.append(file)
            moved = address(file)
        else:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(find(file), folder / file)
        tag[attribute] = os.path.relpath(moved, PurePosixPath(address(name)).parent) + hash_ + anchor
    return pages


def _hidden(tag: Tag) -> bool:
    """Whether it is a question, or a folded answer, hint or solution. A section for another day is not."""
    return tag.name == "form" or tag.name == "details" and "later" not in tag.get("class", [])


def _sections(body: BeautifulSoup, address: str, title: str) -> list[list[str]]:
    """The entries of the search: [address, page, heading, text] of each section, without folded answers and
    solutions.
    """
    found = [[address, title, "", ""]]
    for tag in body.find_all(["h2", "h3", "p", "li", "td", "pre"]):
        if tag.find_parent(_hidden) or tag.find_parent(["p", "li", "td"]):
            continue
        if tag.name in ("h2", "h3"):
            found.append([f"{address}#{tag['id']}", title, _words_of(tag), ""])
        else:
            found[-1][3] += " ".join(tag.get_text().split()) + " "
    return found


def _title(body: BeautifulSoup) -> str:
    """The first heading of a page."""
    return textwrap.shorten(_words_of(body.h1), 200) if body.h1 else "Three Axes"


def _words_of(heading: Tag) -> str:
    """A heading's text, without the sign that links to it."""
    return "".join(part for part in heading.strings if "anchor-link" not in part.parent.get("class", []))


def _headings(body: BeautifulSoup) -> None:
    """Give headings the anchors that GitHub gives them, because the documents' links use these."""
    taken: dict[str, int] = {}
    for heading in body.select("h1, h2, h3, h4"):
        anchor = re.sub(r"[^\w\- ]", "", _words_of(heading).lower().strip()).replace(" ", "-")
        taken[anchor] = taken.get(anchor, -1) + 1
        heading["id"] = anchor + (f"-{taken[anchor]}" if taken[anchor] else "")
        if link := heading.select_one("a.anchor-link"):
            link["href"] = f"#{heading['id']}"
            link["aria-label"] = "link to this section"


def _later(body: BeautifulSoup) -> None:
    """Fold each section of a drop that is for another day; a link to it opens it."""
    start = next((h for h in body.select("h2") if _words_of(h).startswith(LATER.lstrip("# "))), None)
    if not start:
        return
    cell = next(parent for parent in start.parents if "text_cell" in parent.get("class", []))
    blocks = list(start.next_siblings)
    for later in cell.find_next_siblings():
        text = later.select_one(".text_cell_render")
        blocks += list(text.children) if text else [later]
    fold = cell
    for tag in blocks:
        if tag.name == "h3":
            fold.insert_after(details := body.new_tag("details", attrs={"class": "later"}))
            fold = details
            fold.append(summary := body.new_tag("summary"))
            if link := tag.select_one("a.anchor-link"):
                link.decompose()  # a fold is a button, and holds no link
            summary.append(tag)
        elif fold is not cell:
            fold.append(tag)


def _tables(body: BeautifulSoup) -> None:
    """Let wide tables scroll by themselves, remove empty headings, and keep a flag's dashes with its name."""
    for head in body.select("th"):
        if not head.get_text(strip=True):
            head.name = "td"
    for table in body.select("table"):
        table.wrap(body.new_tag("div", attrs={"class": "wide"}))
    for code in body.select("td code"):
        if re.fullmatch(r"--[\w-]+", code.get_text()):
            code["class"] = "flag"
