"""The form of the notebooks: order, length, stored outputs, nothing of one machine. nbval runs them."""

import builtins
import dis
import importlib
import re
from base64 import b64decode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import CodeType

import beside
import nbformat
import pytest
from matplotlib.image import imread

from drops.lines import Line
from helpers.practice import cards
from helpers.practice.books import drop_number, module_of
from helpers.practice.exercise import Exercise
from tools import pages
from tools.colab import FOLDED, UNNAMED, stamp
from tools.pages import Course, minutes
from tools.refresh import normalise

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
FOURTEEN = sorted(FOLDER.glob("*.ipynb"))
NOTEBOOKS = FOURTEEN + sorted((FOLDER / "beyond").glob("*.ipynb"))
FORM: list[Callable] = []  # the checks of each notebook's form


def form(check: Callable) -> Callable:
    """Add a check to FORM."""
    FORM.append(check)
    return check


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name[:2])
def test_the_form_of_a_notebook(path):
    failed = []
    for check in FORM:
        try:
            check(path, nbformat.read(path, as_version=4))
        except AssertionError as e:
            failed.append(f"{check.__name__}: {e}")
    assert not failed, "\n\n".join(failed)


def text(notebook) -> str:
    """The Markdown of a notebook."""
    return "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")


def code(notebook) -> list:
    return [c for c in notebook.cells if c.cell_type == "code"]


@form
def a_setup_cell_is_after_the_title(path, notebook):
    assert notebook.cells[1].metadata == FOLDED and len(notebook.cells[1].outputs) == 1
    repo = (re.search(r"github.com/(\S+)", notebook.cells[1].source) or ["", UNNAMED])[1]
    again = stamp(nbformat.read(path, as_version=4), path.relative_to(FOLDER).as_posix(), repo)
    assert [c["source"] for c in again["cells"]] == [c.source for c in notebook.cells]


@form
def title_minutes_and_outcome_come_first(path, notebook):
    first = notebook.cells[0].source.splitlines()
    assert first[0].startswith(f"# {path.name[:2]} · ")
    assert first[2].startswith("*6 minutes, [practice ") and first[2].endswith("*")


@form
def the_frame_is_of_tools_pages(path, notebook):
    """Minutes, place, links and closing cell are those that `python -m tools.pages` writes."""
    again = Course().frame(path, nbformat.read(path, as_version=4))
    assert [c.source for c in again.cells] == [c.source for c in notebook.cells]


def shown(cell) -> str:
    """The text of a code cell's outputs, without the words of pictures."""
    outputs = [output for output in cell.outputs if "image/png" not in output.get("data", {})]
    return "\n".join(output.get("text") or output.data.get("text/plain", "") for output in outputs)


@form
def the_core_is_read_in_six_minutes(path, notebook):
    core = pages.core(notebook)
    cells = code(notebook)[2 : len([c for c in core if c.cell_type == "code"])]  # behind the set-up's two
    prose = pages.prose(core)
    outputs = [shown(cell) for cell in cells]
    lengths = [len(cell.source.splitlines()) for cell in cells]
    assert len(cells) <= 7 and max(lengths) <= 20 and sum(lengths) <= 60, lengths
    source = "\n".join(cell.source for cell in core)
    assert source.count(" predict(") == 1 == source.count(".reveal("), "one prediction"
    pictures = sum("image/png" in o.get("data", {}) for cell in cells for o in cell.outputs)
    assert 1 <= pictures <= 2, f"{pictures} pictures"
    tables = [rows for said in outputs for rows in re.findall(r"─\n((?:.+\n?)+)", said)]
    tables += re.findall(r"\|-.*\n((?:\|.*\n?)+)", prose)
    assert all(len(rows.strip().splitlines()) <= 8 for rows in tables), "a table of more than 8 rows"
    numbers = re.findall(r"(?<![\w.·])\d[\d.,]*(?!\w)", re.sub(r"[Dd]rops? \d\d|^#.*", "", prose, flags=re.M))
    assert len(numbers) <= 25, f"{len(numbers)} numbers in the prose: {numbers}"
    assert "<details>" not in pages.LISTING.sub("", source), "the core folds text away"


@form
def the_parts_are_in_their_order(path, notebook):
    text_ = text(notebook)
    parts = pages.BOX, "## Practice: ", "## Check yourself", "## Cheat sheet", "**Next.**", pages.LATER
    places = [text_.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), dict(zip(parts, places))
    box = text_[places[0] : places[1]]
    assert re.search(r"^> \*\*.+\*\*", box, re.M) and "*Your cost model gains* " in box, box
    assert len(pages.exercises(notebook, pages.lesson(notebook))) == 1, "one exercise in the lesson"
    later = text_[places[-1] :].split("\n### ")[1:]
    assert later and all(re.match(r".* \d+ minutes(\n|$)", section) for section in later), "no minutes"


def _names_used(function: CodeType) -> set[str]:
    """The globals that a function uses, and those of the functions in it."""
    return {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}.union(
        *(_names_used(inner) for inner in function.co_consts if isinstance(inner, CodeType))
    )


@form
def a_practice_cell_runs_alone_and_its_solution_where_it_is_pasted(path, notebook):
    drop = importlib.import_module(module_of(drop_number(path)))
    checked = lambda cell: re.findall(r"(\w+)\.check\(", cell.source)
    cells = {name: cell.source for cell in code(notebook) for name in checked(cell)}
    mine = lambda x: isinstance(x, Line) and x.formula.drop == drop_number(path)
    lines = {name: x for name, x in vars(drop).items() if mine(x)}
    assert set(cells) == {name for name, x in vars(drop).items() if isinstance(x, Exercise)} | set(lines)
    for name, source in cells.items():
        here = {}
        exec(source, here)
        solution = lines[name].ours if name in lines else getattr(drop, name).reference
        missed = _names_used(solution.__code__) - set(here) - set(dir(builtins))
        assert not missed, (name, missed)


def sections(cells) -> list[str]:
    """The headings of some cells, without their minutes."""
    markdown = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return [heading.split(" · ")[0] for heading in re.findall(r"^##+ (.*)$", markdown, re.M)]


@form
def there_are_three_questions_and_each_names_the_section_that_teaches_it(path, notebook):
    source = "\n".join(c.source for c in notebook.cells)
    answers = re.findall(r"<details><summary>\d\. .*?</details>", source, re.S)
    assert len(answers) == 3
    before = sections(notebook.cells[: pages.at(notebook, "## Check yourself")])
    for answer in answers:
        named = re.search(r"<i>\((.*)\)</i></details>$", answer)
        assert named and named[1] in before, f"no section above teaches it: {answer[:80]}"


@form
def cards_name_the_section_that_teaches_them(path, notebook):
    """The first three cards are asked at the end of the notebook, so its core or its box must teach them."""
    mine = [card for card in cards.load() if card.drop == drop_number(path)]
    everywhere = sections(notebook.cells)
    core = sections(notebook.cells[: pages.at(notebook, "## Practice")])
    for place, card in enumerate(mine):
        there = core if place < 3 else everywhere
        assert card.section in there, f"card {place + 1}, {card.front!r}: no section {card.section!r}"


@form
def what_is_beside_an_open_question_was_read(path, notebook):
    """Somebody has read it since its last change, and found no answer in it: see tests/beside.py."""
    rows, number = beside.kept(), drop_number(path)
    asked = beside.questions(notebook)
    assert set(asked) == {name for row, name in rows if row == number}, f"{beside.KEPT.name} has others"
    for name, at in asked.items():
        cells, read = rows[number, name]
        assert beside.digest(notebook, at, cells) == read, f"new text at {name!r}: python tests/beside.py"


@form
def outputs_are_stored_and_clean(path, notebook):
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error" or "raises-exception" in cell.metadata.get("tags", [])
            assert output.get("name") != "stderr", f"stderr under: {cell.source[:60]}"
    counts = [c.execution_count for c in code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not from one run of a clean kernel; make refresh"


@form
def a_cell_that_is_not_compared_says_that_it_differs(path, notebook):
    for cell in code(notebook):
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            assert re.search(r"^# .*\bdiffer\b", cell.source, re.M), cell.source


@form
def nothing_of_one_machine(path, notebook):
    assert not re.search(r"/(home|Users|root|work|tmp|content)/|[A-Z]:\\\\", path.read_text())


@form
def only_content_is_stored(path, notebook):
    assert nbformat.writes(notebook) == nbformat.writes(normalise(nbformat.read(path, 4), path.name[:2]))


@form
def every_picture_has_words_and_a_margin_into_which_nothing_runs(path, notebook):
    for cell in code(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                assert output.metadata["image/png"]["alt"]
                inked = imread(BytesIO(b64decode(output.data["image/png"])))[:, :, :3] < 0.9
                inked[3:-3, 3:-3] = False
                assert not inked.any(), f"a word or a line is cut off at the edge: {cell.source}"


def test_the_readme_promises_the_same_minutes():
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    for path, notebook in Course().books.items():
        practice, later = minutes(notebook)
        row = rf"^\| {drop_number(path)} \|.*{path.name}.*\| {practice} \| {later} \|$"
        assert re.search(row, readme, re.M)
