"""Every exercise: its solution passes, an empty attempt counts as not started, and each known mistake (an
edit of the solution) gets its own name.
"""

import ast
import functools
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
from edits import edited
from sampled import sampled

from drops import d02, d03, d05
from helpers.practice import diagnose
from helpers.practice.books import drop_number, exercises, module_of, notebooks
from helpers.practice.engine import Compared
from helpers.practice.exercise import Exercise, wrong

pytestmark = pytest.mark.usefixtures("judges_share_worlds")


def _exercises() -> dict[str, Exercise]:
    """'d02.ring' -> the exercise, of all drops."""
    modules = [importlib.import_module(module_of(drop_number(path))) for path in notebooks()]
    things = [(f"{m.__name__.rpartition('.')[2]}.{name}", x) for m in modules for name, x in vars(m).items()]
    return {name: thing for name, thing in things if isinstance(thing, Exercise)}


EXERCISES = _exercises()
WITH_EDITS = {name: one for name, one in EXERCISES.items() if isinstance(one, Compared) and one.edits}


def empty(exercise):
    """A function with the arguments that an exercise requires, and an empty body."""
    names = list(inspect.signature(exercise.reference).parameters)
    made = {}
    exec(f"def attempt({', '.join(names)}):\n    'Documented.'\n    ...", made)
    return made["attempt"]


def test_all_exercises_are_found():
    in_order = sorted(EXERCISES.items(), key=lambda item: item[1].made)
    for drop, names in exercises().items():
        module = module_of(drop).rpartition(".")[2]
        assert names == [x.name for name, x in in_order if name.partition(".")[0] == module]


@pytest.mark.parametrize("exercise", sampled(WITH_EDITS.values()), ids=WITH_EDITS)
def test_each_known_mistake_gets_its_own_name(exercise):
    told = exercise.told_apart()
    assert told and [(row, edit) for row, edit, name in told if name != row] == []


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_the_solution_passes(exercise):
    answer = exercise.check(exercise.reference)
    assert answer.kind == "right" and all(map(len, answer.figures)), answer


def stubs() -> dict[str, str]:
    """'d02.ring' -> the docstring in the notebook's def of the function."""
    said = {}
    for path in notebooks():
        module = module_of(drop_number(path)).rpartition(".")[2]
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and (check := re.search(r"(\w+)\.check\((\w+)\)$", source)):
                defined = {f.name: f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}
                said[f"{module}.{check[1]}"] = ast.get_docstring(defined[check[2]])
    return said


STUBS = stubs()


@pytest.mark.parametrize("name", EXERCISES)
def test_a_return_is_compared_where_the_stub_promises_one_and_nowhere_else(name):
    exercise, stub = EXERCISES[name], STUBS[name]
    promises = "Returns nothing" not in stub
    assert "Returns " in stub, stub

    @functools.wraps(exercise.reference)
    def other(*arguments):
        exercise.reference(*arguments)
        return None if promises else arguments[0]

    assert (exercise.check(other).kind == "right") != promises


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_empty_is_not_started_and_gives_no_hint_unasked(exercise):
    answer = exercise.check(empty(exercise))
    assert answer.kind == "not started" and exercise.hints[0] not in answer.text
    assert repr(exercise.hint()) and exercise.reference.__name__ in str(exercise.solution())


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_rows_have_names_of_their_own(exercise):
    names = [row.name for row in getattr(exercise, "rows", [])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_a_row_without_a_proof_is_named_by_its_exercise(exercise):
    folder = Path(inspect.getfile(exercise.reference)).parent
    code = "".join(path.read_text() for path in (*folder.glob("*.py"), *folder.parent.glob("*.py")))
    code += inspect.getsource(diagnose)
    bare = [row.name for row in getattr(exercise, "rows", []) if not (row.edits or row.errors)]
    assert not [name for name in bare if f'"{name}"' not in code]


def test_advice_shows_its_markdown_and_arithmetic_as_it_is():
    said = wrong("x", "See **slide 12**, `a**b`, [here](https://a.b/c). 2*b*s, 2**k and 3**j, m[-1](x), <b>.")
    shown = 'See <b>slide 12</b>, <code>a**b</code>, <a href="https://a.b/c">here</a>. 2*b*s, 2**k and 3**j,'
    assert f"{shown} m[-1](x), &lt;b&gt;." in said._repr_html_()


def test_prints_of_ranks_are_shown_and_never_hide_the_verdict(capsys):
    def says(gradient, examples):
        [print(i) for i in range(20_000)]  # no loop without an end
        return d02.weighted_average(gradient, examples)

    assert d02.average.check(says).kind == "right"
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 31 and any(line.startswith("… ") for line in shown) and "19999" in shown[-1]


def test_hints_come_in_steps_and_the_solution_on_request():
    exercise = d02.ring
    exercise._shown = []
    exercise.check(lambda x, rank, world_size: None)  # not started
    shown = [str(exercise.hint()) for _ in range(len(exercise.steps) + 2)]
    assert shown[0].startswith("Hint 1 of 5") and shown[4].startswith("Hint 5 of 5")
    assert shown[5] == shown[6] and "solution()" in shown[5]
    lines = shown[1].split("```python\n")[1].split("\n```")[0].splitlines()
    assert lines == sorted(lines) and "chunks[incoming] += buffer" in lines, "hint 2 sorts the lines"
    assert "def ring_all_reduce(x, rank, world_size):" in str(exercise.solution())


def test_after_a_named_mistake_the_first_hint_is_that_mistakes():
    d03.mlp._shown = []
    d03.mlp.check(edited(d03.split_mlp, "    x = toy.copy_to_tp(x)⏎ => "))
    shown = [str(d03.mlp.hint()) for _ in d03.mlp.steps]
    assert shown[0].startswith("Hint 4 of 4: Backward, each rank has") and "copy_to_tp" in shown[0]
    assert [one[:6] for one in shown[1:]] == ["Hint 1", "Hint 2", "Hint 3"]
    for exercise in WITH_EDITS.values():
        assert all(0 <= row.hint <= len(exercise.hints) for row in exercise.rows), exercise.name


def test_other_arguments_and_no_function_are_refused():
    assert d02.ring.check(lambda x: None).misconception == "other arguments than asked for"
    with pytest.raises(TypeError, match="your function itself, without brackets"):
        d02.ring.check(3)


def test_waits_that_are_missing_are_counted_and_no_others():
    last_alone = edited(d05.overlap, "work.wait() => under_way[-1][0].wait()")
    assert "Nobody called wait() for 11 of 12" in d05.overlapped.check(last_alone).text
