"""Writes the frame of every notebook: its minutes, its place among the others, links to other drops, and its
last cell.

Run `python -m tools.pages` after a title, a text or an exercise has changed.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import nbformat

from helpers.draw import explore
from helpers.practice import LATER, Written, drop_number, notebooks, written
from three_axes.files import find

LIVE = ("orders", "schedules", "memory")  # explorers for which tools/site/frames.py computes all pictures
# The core of a notebook is everything above BOX, its lesson everything above LATER.
CORE = 6  # minutes promised for every core; tests/notebooks/test_notebooks.py limits what a core may hold
BOX = "## When it hurts\n"
# The parts of the course, for the list of drops in each notebook: name -> numbers of its drops.
PHASES = {"Split": range(1, 5), "Trace": range(5, 10), "Mend": range(10, 14), "Defend": range(14, 15)}
# The lines of a notebook that this module writes.
PLACE = re.compile(r"^\*\*\w\w of 14\*\*.*$|^\*\*\w\w, beyond the fourteen\*\*.*$", re.M)
MINUTES = re.compile(
    r"^\*\d+ minutes, \[?practice \d+(?: minutes)?(?:\]\([^)]*\))?\. Afterwards you can ", re.M
)
PRACTICE = re.compile(r'^(##+ Practice: .*?)(?: · \w+, \d+ minutes)?(?:<a id="[^"]*"></a>)?$', re.M)
ANCHOR = '<a id="practice-{}"></a>'  # JupyterLab does not find a heading by a link that has "·" in it
SECTION = re.compile(r"^### .* (\d+) minutes$", re.M)
ENOUGH = "Enough for today? The last cell of this notebook ends the ranks."
LATER_TITLE = re.compile(rf"^{LATER}.*$(?:\n\n{re.escape(ENOUGH)})?", re.M)
LISTING = re.compile(r"<details><summary>The fourteen drops and their minutes</summary>.*?</details>", re.S)
LINK = re.compile(r'\[([^\]]*)\]\(([^)]*)\)|<a href="([^"]*)">([^<]*)</a>')  # Markdown; HTML inside <details>
DROP = re.compile(r"\b[Dd]rop (\d\d)\b")
CLOSING = """# Ends the ranks of this notebook, and shows what you have solved.
# The kernel holds 0.6 to 1.5 GB until you end it too: menu Kernel, Shut Down Kernel.
from helpers.practice import progress
progress.leave("{number}")"""


def unlinked(text: str) -> str:
    """The text with the words of its links in place of the links, and without anchors."""
    return LINK.sub(lambda link: link[1] or link[4], re.sub(ANCHOR.format("..?"), "", text))


def prose(cells: list[nbformat.NotebookNode]) -> str:
    """The text of the markdown cells, without links and without the frame."""
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = PRACTICE.sub(r"\1", MINUTES.sub("*Afterwards you can ", text))
    return unlinked(LISTING.sub("", PLACE.sub("", text)))


def at(notebook: nbformat.NotebookNode, heading: str) -> int:
    """The index of the cell that begins with this heading. Raises StopIteration if there is none."""
    return next(i for i, cell in enumerate(notebook.cells) if cell.source.startswith(heading))


def core(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells for which the minutes are promised: from the title up to the box."""
    return notebook.cells[: at(notebook, BOX)]


def lesson(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells before the heading "For another day"."""
    return notebook.cells[: at(notebook, LATER)]


def explorer_of(source: str) -> tuple[str, dict] | None:
    """(the name of the explorer, the first values of its controls) if this cell's last line is an explorer
    for which the site has frames, like `explore.schedules(m=8)`; None for another cell.
    """
    call_of = re.search(r"explore\.(\w+)\((.*)\)\s*$", source)
    if not call_of or call_of[1] not in LIVE:
        return None
    call = ast.parse(call_of[0].strip(), mode="eval").body
    arguments = [ast.literal_eval(value) for value in call.args]
    named = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    return call_of[1], getattr(explore, call_of[1])(*arguments, **named).values


def task(text: str) -> str:
    """The text of an exercise without its sentences on hints."""
    return re.sub(r"`[^`]*\.hint\(\)`.*?\.(?=\s|$)", "", text)


def stub(cell: str) -> str:
    """The function that an exercise's cell asks for: its head and docstring; "" if there is none."""
    found = re.search(r"(?ms)^def .*?(?=^    \.\.\.)", cell)
    return found[0] if found else ""


def questions(text: str) -> list[str]:
    """The questions of "Check yourself", without the answers that are folded under them."""
    return re.findall(r"<summary>(\d\. .*?)</summary>", text)


def not_started(output: nbformat.NotebookNode) -> bool:
    """Whether an output only says that the reader has not written anything yet."""
    return output.get("data", {}).get("text/plain", "").startswith("○ not started")


def exercises(
    notebook: nbformat.NotebookNode, cells: list[nbformat.NotebookNode] | None = None
) -> list[Written]:
    """The exercises that the notebook checks, in order; only those in `cells` if given."""
    known = written(notebook.cells[0].source.split()[1])  # "# 07 · Microbatches …"
    code = "\n".join(cell.source for cell in cells or notebook.cells if cell.cell_type == "code")
    return [known[name] for name in re.findall(r"(\w+)\.check\(", code) if name in known]


def minutes(notebook: nbformat.NotebookNode) -> tuple[int, int]:
    """(minutes of the lesson's exercises; minutes of the sections for another day)."""
    later = "\n".join(cell.source for cell in notebook.cells[at(notebook, LATER) :])
    return sum(e.minutes for e in exercises(notebook, lesson(notebook))), sum(
        map(int, SECTION.findall(later))
    )


class Course:
    """All stored notebooks, in order: their titles and minutes, and links between them."""

    def __init__(self) -> None:
        self.books = {path: nbformat.read(path, as_version=4) for path in notebooks()}
        self.paths = {drop_number(path): path for path in self.books}

    def title(self, path: Path) -> str:
        """'07 · Microbatches filling the pipeline'"""
        return self.books[path].cells[0].source.splitlines()[0].removeprefix("# ")

    def link(self, path: Path, other: Path, text: str) -> str:
        """A link from the notebook `path` to another one."""
        return f"[{text}]({os.path.relpath(other, path.parent).replace(os.sep, '/')})"

    def place(self, path: Path) -> str:
        """The line with this notebook's place, and links to the previous and the next one."""
        order = list(self.books)
        at, name = order.index(path), drop_number(path)
        parts = [f"**{name} of 14**" if name.isdigit() else f"**{name}, beyond the fourteen**"]
        if at:
            parts.append(self.link(path, order[at - 1], f"← {self.title(order[at - 1])}"))
            parts.append(self.link(path, order[0], "all drops"))
        if at + 1 < len(order):
            parts.append(self.link(path, order[at + 1], f"{self.title(order[at + 1])} →"))
        return " · ".join(parts)

    def listing(self, path: Path) -> str:
        """The folded list of all drops with their minutes, with links from this notebook."""

        def entry(n: int) -> str:
            other = self.paths[f"{n:02d}"]
            return f"{self.link(path, other, drop_number(other))} {minutes(self.books[other])[0]}"

        rows = [f"- {phase}: {', '.join(map(entry, drops))}" for phase, drops in PHASES.items()]
        head = "<details><summary>The fourteen drops and their minutes</summary>"
        sentence = f"{CORE} minutes each to read and run; behind each its minutes of practice."
        return "\n".join([head, "", sentence, "", *rows, "", "</details>"])

    def _linked(self, path: Path, text: str) -> str:
        """Make every 'drop 07' a link, except in headings and except this drop's own number."""
        plain = LINK.sub(lambda link: words if DROP.fullmatch(words := link[1] or link[4]) else link[0], text)

        def link(drop: re.Match, html: bool) -> str:
            other = self.paths.get(drop[1])
            if other in (None, path):
                return drop[0]
            markdown = self.link(path, other, drop[0])
            return LINK.sub(r'<a href="\2">\1</a>', markdown) if html else markdown

        lines = plain.split("\n")
        for i, line in enumerate(lines):
            if not line.startswith("#"):
                html = line.startswith("<details>")
                lines[i] = DROP.sub(lambda drop: link(drop, html), line)
        return "\n".join(lines)

    def frame(self, path: Path, notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
        """Write minutes, place, links and closing cell into a notebook. A second run changes nothing."""
        texts = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
        first, last = texts[0], next(cell for cell in texts if "**Next.**" in cell.source)
        practise, later = minutes(notebook)
        for cell in texts:
            cell.source = self._linked(path, re.sub(r"\n\n\Z", "", PLACE.sub("", cell.source)))
        place = self.place(path)
        last.source = f"{last.source.rstrip()}\n\n{place}"
        heading = notebook.cells[at(notebook, LATER)]
        enough = f"{LATER} · {later} minutes\n\n{ENOUGH}"
        heading.source = LATER_TITLE.sub(lambda _: enough, heading.source, count=1)
        asked, above = iter(exercises(notebook)), None
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                above = cell if PRACTICE.search(cell.source) else above
            elif exercises(notebook, [cell]):
                exercise = next(asked)
                if above:
                    titled = rf"\1 · {exercise.level}, {exercise.minutes} minutes"
                    above.source, above = PRACTICE.sub(titled, above.source), None
        today = next(cell for cell in texts if PRACTICE.search(cell.source))
        anchor = ANCHOR.format(
            drop_number(path)
        )  # with the drop's number, because several notebooks may be open in one page
        today.source = PRACTICE.sub(lambda heading: heading[0] + anchor, today.source, count=1)
        link = f"[practice {practise} minutes](#practice-{drop_number(path)})"
        promised = f"*{CORE} minutes, {link}. Afterwards you can "
        first.source = MINUTES.sub(promised, first.source, count=1)
        below = lambda promise: f"{promise[1]}\n\n{place}\n\n"
        first.source = re.sub(rf"(?m)^(\*{CORE} minutes, .*)\n+", below, first.source)
        first.source = LISTING.sub(lambda _: self.listing(path), first.source)
        if "closing" not in notebook.cells[-1].metadata.get("tags", []):
            notebook.cells.append(nbformat.v4.new_code_cell("", metadata={"tags": ["closing"]}))
        notebook.cells[-1].source = CLOSING.format(number=drop_number(path))
        return notebook


def main() -> None:
    course = Course()
    for path, notebook in course.books.items():
        framed = course.frame(path, notebook)
        for i, cell in enumerate(framed.cells):
            cell.id = f"drop-{path.name[:2]}-{i:02d}"
        nbformat.write(framed, path)
    print(f"{len(course.books)} notebooks framed in {find('notebooks')}")


if __name__ == "__main__":
    main()
