"""Makes a page of HTML of a drop's notebook, which works without a kernel.

Each code cell gets a `role` in its metadata, by which the template data/site/drop draws it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from helpers.practice import answering, drop_number, solutions_hidden, written
from three_axes.files import find

from ..pages import explorer_of, not_started
from . import lines


@cache
def _exporter() -> HTMLExporter:
    plain = dict(exclude_input_prompt=True, exclude_output_prompt=True, anchor_link_text="#")
    return HTMLExporter(template_name="drop", extra_template_basedirs=[str(find("data/site"))], **plain)


def page(path: Path) -> str:
    """The body of a drop's page."""
    notebook = nbformat.read(path, as_version=4)
    answers = answering(notebook)
    line = _measuring(notebook, drop_number(path))
    for cell, name in line.items():
        answers[cell] = [*answers.get(cell, []), name]
    machinery = {"setup", "closing"}  # cells that need a kernel
    notebook.cells = [cell for cell in notebook.cells if not machinery & set(cell.metadata.get("tags", []))]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            answered = answers.get(cell.id, [])
            first = "Give your number" if answered == [line.get(cell.id)] else "Choose your prediction"
            role = _role(cell, drop_number(path))
            cell.metadata["role"] = role | {"answers": answered, "first": f"{first} first"}
        else:  # without the badge, an external picture; the page has its own links to previous and next
            cell.source = re.sub(r"\[!\[Open in Colab\]\([^)]*\)\]", "[Open in Colab]", cell.source)
            cell.source = re.sub(r"(?m)^\*\*.*(\[← | →\]).*$", "", cell.source)
    body, _ = _exporter().from_notebook_node(notebook)
    return body


LINE = ".line.check("  # in the cell of a drop's line of the cost model


def _measuring(notebook: NotebookNode, drop: str) -> dict[str, str]:
    """Cell id -> the drop's line: the cell after it whose table compares the line with what was measured."""
    cells = iter(cell for cell in notebook.cells if cell.cell_type == "code")
    if drop not in lines.questions() or not any(LINE in cell.source for cell in cells):
        return {}
    texts = lambda cell: (output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    cell = next(cell for cell in cells if any("predicted" in text for text in texts(cell)))
    return {cell.id: lines.questions()[drop]["name"]}


def _role(cell: NotebookNode, drop: str) -> dict:
    """A code cell's role on the page, with its data: 'question', 'line', 'practice', 'explorer' or 'code'."""
    if LINE in cell.source:  # what is written there needs a kernel; the page asks a number in its place
        return {"is": "line"} | lines.questions()[drop]
    if asked := re.search(r"(\w+) = predict\(", cell.source):
        texts = (output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        question, *options = next(text for text in texts if "\n  ○ " in text).split("\n  ○ ")
        return {
            "is": "question",
            "name": asked[1],
            "question": question.replace("\n", " "),
            "options": options,
            "only": cell.source.startswith(asked[0]),
        }
    cell.outputs = [output for output in cell.outputs if not not_started(output)]
    checked = re.search(r"(\w+)\.check\(", cell.source)
    if checked and (exercise := written(drop).get(checked[1])):  # else it is another line of the cost model
        solution = "" if solutions_hidden() else exercise.solution
        return {"is": "practice", "hints": exercise.steps, "solution": solution}
    if found := explorer_of(cell.source):
        return {"is": "explorer", "name": found[0], "values": found[1]}
    return {"is": "code"}


def document(path: Path) -> str:
    """The body of the page of a file in Markdown or Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        code = highlight(text, PythonLexer(), HtmlFormatter())
        name = f"{path.parent.name}/{path.name}"
        return f'<h1>{name}</h1><div class="code_cell"><div class="input">{code}</div></div>'
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="text")])
    body, _ = _exporter().from_notebook_node(notebook)
    return body
