"""The lines of the cost model that readers write from drop 02 on: judged, kept, and used."""

import ast
import inspect
import random
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from drops import lines
from drops.lines import LINES
from helpers.practice import notebooks, read_book
from three_axes.table import Table

# For each line: attempts, as the expression that is returned, and what each is told: '' for a right one.
ATTEMPTS = {
    "all_reduce": {
        "2 * S - 2 * S / d": "",
        "S / d * (d - 1 + d - 1)": "",
        "S * (d - 1) / d": "half of the way",
        "(d - 1) * 2 * S": "the whole tensor in each step",
        "(d - 1) * S": "another figure",
        "2 * S": "another figure",
        "1.5 * S": "another figure",
        "2 * (d - 1) // d * S": "another figure",
    },
    "tp_sends": {
        "L * 4 * all_reduce(T * h * e, t)": "",
        "8 * L * (t - 1) / t * T * h * e": "",
        "L * all_reduce(e * T * h, t)": "one all-reduce a layer",
        "4 * L * T * h * e": "tensors without an all-reduce's factor",
        "2 * L * all_reduce(e * T * h, t)": "another figure",
        "4 * L * all_reduce(T * h, t)": "another figure",
        "4 * L * all_reduce(e * T * h / t, t)": "another figure",
        "4 * L * all_reduce(2 * T * h, t)": "another figure",
    },
    "compute": {
        "(6 * N * T + 7.5 * L * T * s * h) / C": "",
        "6 * T / C * (N + L * s * h / 0.8)": "",
        "2 * N * T / C + 2 * L * T * s * h / (0.8 * C)": "another figure",
        "6 * T * (N + L * s * h) / C": "attention as fast as a product",
        "6 * N * T / C": "another figure",
        "6 * N * T / C + 12 * L * T * s * h / (0.8 * C)": "attention not halved",
        "6 * N * T / C + 6 * L * T * s * h * 0.8 / C": "another figure",
        "6 * N * T / C + 6 * L * s * h / (0.8 * C)": "another figure",
    },
    "stage_sends": {
        "T * h * e / t": "",
        "e * (T / t) * h": "",
        "2 * e * T * h / t": "there and back",
        "e * T * h": "whole on each TP rank",
        "T * h / t": "another figure",
        "e * T / t": "another figure",
        "4 * T * h / t": "another figure",
        "e * T * h * t": "another figure",
    },
    "shows": {
        "A / 5 if A - hides < A / 5 else A - hides": "",
        "A - min(hides, 0.8 * A)": "",
        "max(0, A - hides)": "no tail",
        "A / 5 + max(0, A - hides)": "both together",
        "A - hides": "another figure",
        "A / 5": "another figure",
        "min(A / 5, A - hides)": "another figure",
        "max(hides / 5, A - hides)": "another figure",
    },
    "bubble": {
        "1 - m * v / (m * v + p - 1)": "",
        "(p - 1) / v / (m + (p - 1) / v)": "",
        "(p - 1) / (m * v)": "idle over busy time",
        "(p - 1) / m": "idle over busy time",
        "(p - 1) / (m + p - 1)": "v is left out",
        "p / (m * v + p)": "another figure",
        "(p - 1) / (m * v + p)": "another figure",
        "v * (p - 1) / (m + v * (p - 1))": "another figure",
        "(p - 1) / (m / v + p - 1)": "another figure",
    },
    "bandwidth": {
        "W if stride * ranks <= node else min(W, max(1, node // stride) * R)": "",
        "min(W, R * max(1, node // stride)) if ranks * stride > node else W": "",
        "W if ranks * stride <= node else R": "one port for all",
        "W if ranks * stride <= node else R * max(1, node // stride)": "faster than a link",
        "W if ranks <= node else min(W, R * max(1, node // stride))": "another figure",
        "W if ranks * stride < node else min(W, R * max(1, node // stride))": "another figure",
        "W if ranks * stride <= node else min(W, R * node)": "another figure",
        "W if ranks * stride <= node else min(W, R * (node // stride))": "another figure",
    },
    "states": {
        "n * (w / (d if zero > 2 else 1) + g / (d if zero > 1 else 1) + o / (d if zero else 1))": "",
        "n * [w + g + o, w + g + o / d, w + (g + o) / d, (w + g + o) / d][zero]": "",
        "n * (w + g + o) / (d if zero else 1)": "all divided by d",
        "n * [w + g + o, w + g + o / d, w + g + o / d, (w + g + o) / d][zero]": (
            "ZeRO-2 divides the optimizer alone"
        ),
        "n * (w + g + o)": "another figure",
        "n * (w + g + o) / d": "all divided by d",
        "n * (w + g + o) / d / 1e9": "another figure",
        "n * [w + g + o, w + g + o / d, w / d + g + o / d, (w + g + o) / d][zero]": "another figure",
        "n * [16, 4 + 12 / d, 2 + 14 / d, 16 / d][zero]": "another figure",
    },
    "activations": {
        "L * k * T * h / t": "",
        "k * T * h * L // 1 / t": "",
        "k * L * T * h": "whole on each TP rank",
        "k * T * h / t": "one layer",
        "34 * L * T * h / t": "another figure",
        "2 * k * L * T * h / t": "another figure",
        "k * L * T / t": "another figure",
        "k * L * h / t": "another figure",
    },
}


# For each line, values of its arguments as jobs have them.
GIVEN = {
    "S": (1e9, 4e6), "d": (1, 2, 8, 64), "L": (2, 4, 80), "h": (64, 4096, 8192), "T": (256, 8192, 65536),
    "t": (1, 2, 4, 8), "e": (1, 2, 4), "N": (1e9, 70e9), "s": (32, 2048, 8192), "C": (1e9, 5e14),
    "A": (0.1, 0.5, 3.0), "hides": (0.05, 0.9, 5.0), "m": (4, 8, 64), "p": (1, 2, 4, 16), "v": (1, 2, 5),
    "ranks": (2, 4, 8, 16, 64), "stride": (1, 2, 4, 8, 16), "node": (4, 8, 72), "W": (342e9, 20e6),
    "R": (34e9, 1e6), "n": (1e9, 7e10), "zero": (0, 1, 2, 3), "w": (2, 4), "g": (2, 4), "o": (8, 12),
    "k": (2, 4, 34),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_no_line_with_another_name_or_number_in_one_place_is_right(name):
    """Each name of the course's line is replaced by each other one, and by each number that it may stand for.
    What then gives the right figures in the check gives them for every job.
    """
    ours = LINES[name].ours
    tree = ast.parse(inspect.getsource(ours)).body[0]
    tree.decorator_list, arguments = [], list(inspect.signature(ours).parameters)
    chance, replaced = random.Random(0), set()
    for node in [node for line in tree.body for node in ast.walk(line)]:
        if isinstance(node, ast.Name) and node.id in arguments:
            was = node.id
            for other in (*arguments, *map(repr, GIVEN[was]), f"({was} + 1)", f"({was} / 2)"):
                node.id = other
                replaced.add(ast.unparse(tree))
            node.id = was
    jobs = [[chance.choice(GIVEN[one]) for one in arguments] for _ in range(200)]
    for source in sorted(replaced):
        exec(source, names := dict(ours.__globals__))
        if not LINES[name].wrong(names[name]):
            for job in jobs:
                assert names[name](*job) == pytest.approx(ours(*job)), (source, job)


@pytest.fixture
def beside_progress(tmp_path, monkeypatch):
    """The folder of a reader's progress."""
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path


@pytest.fixture(autouse=True)
def _a_new_kernel(monkeypatch):
    monkeypatch.setattr(lines, "_in_kernel", [""])


def written(folder, name: str, body: str, more: str = ""):
    """A reader's function with the arguments of this line, as if it stood in a notebook."""
    arguments = str(inspect.signature(LINES[name].ours)).strip("()")
    path = folder / "notebook.py"
    path.write_text(f"from drops.lines import all_reduce\n{more}\ndef {name}({arguments}):\n    {body}\n")
    spec = spec_from_file_location("notebook", path)
    spec.loader.exec_module(notebook := module_from_spec(spec))
    return getattr(notebook, name)


@pytest.mark.parametrize(
    "name, returned, told", [(name, *row) for name, rows in ATTEMPTS.items() for row in rows.items()]
)
def test_an_attempt_at_a_line_is_right_or_meets_this_drops_figure(tmp_path, name, returned, told):
    answer = LINES[name].check(written(tmp_path, name, f"return {returned}"))
    assert (answer.kind, answer.misconception or "") == ("wrong" if told else "right", told), answer
    assert not told or "yours says" in answer.text


def test_a_wrong_figure_is_shown_where_and_as_it_can_be_seen(tmp_path):
    """Attention is 1 % of the toy's step, and gigabytes are no bytes."""
    matrices = LINES["compute"].check(written(tmp_path, "compute", "return 6 * N * T / C"))
    assert "8,192, 554·10¹² a second: yours says 710 ms" in matrices.text
    gigabytes = LINES["states"].check(written(tmp_path, "states", "return n * (w + g + o) / 1e9"))
    assert "yours says 0.0527647, the ranks hold 33.0 MB" in gigabytes.text
    nothing = LINES["shows"].check(written(tmp_path, "shows", "print(A - hides)"))
    assert "yours returns None" in nothing.text


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_not_written_is_not_started_and_never_called(tmp_path, name):
    line = LINES[name]
    assert line.check(written(tmp_path, name, "return ...")).kind == "not started"
    assert str(line.solution()).startswith(f"def {name}(") and set(ATTEMPTS) == set(LINES)
    given = next(iter(line.formula.cases.values()))
    assert line(*given) == line.ours(*given)


@pytest.mark.parametrize("name", sorted(set(LINES) - {"compute"}))
def test_a_right_line_gives_what_its_drop_prints(name):
    """(`compute` is held against its first addend alone.)"""
    line = LINES[name]
    (path,) = (path for path in notebooks() if path.name.startswith(line.formula.drop))
    outputs = str([cell.get("outputs") for cell in read_book(path)["cells"]])
    assert line.formula.shown(line.ours(*next(iter(line.formula.cases.values())))) in outputs


def test_a_right_line_is_kept_and_used_and_named_below_the_table(beside_progress):
    line = LINES["all_reduce"]
    assert (
        "kept in cost_model.py"
        in line.check(written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d")).text
    )
    file = beside_progress / "cost_model.py"
    assert "# Drop 02. Bytes that a rank sends" in file.read_text()
    assert repr(line) == "all_reduce(S, d): yours"
    assert line.whose is not line.ours and line(8, 4) == 12
    assert repr(line.below(Table(["a"], [["1"]]))).endswith("predicted: by your all_reduce in cost_model.py")
    assert "by your all_reduce" in line.below(Table(["a"], [["1"]]))._repr_html_()
    of_three = LINES["tp_sends"].below(Table(["a"], [["1"]]), line, LINES["stage_sends"])
    assert of_three.note == "predicted: by your all_reduce in cost_model.py"
    file.write_text(file.read_text() + "\n\ndef stage_sends(h, T, t=1, e=2):\n    return h\n")
    of_three = LINES["tp_sends"].below(of_three, line, LINES["stage_sends"])
    assert "your all_reduce in cost_model.py; by the course's stage_sends, not by yours" in of_three.note


def test_a_line_that_was_edited_is_used_while_it_is_right(beside_progress):
    line, file = LINES["all_reduce"], beside_progress / "cost_model.py"
    line.check(written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d"))
    kept = file.read_text()
    file.write_text(kept.replace("2 * S - 2 * S / d", "S - S / d + S * (d - 1) / d  # mine"))
    assert line.whose is not line.ours
    file.write_text(kept.replace("2 * S - 2 * S / d", "S"))
    below = repr(line.below(Table(["a"], [["1"]])))
    assert (
        line.whose is line.ours
        and "by the course's all_reduce, not by yours in cost_model.py: 13.2 MB" in below
    )
    file.write_text(kept + "def no(:")
    assert line(8, 4) == 12 and "it does not run (SyntaxError" in repr(line.below(Table(["a"], [["1"]])))
    file.write_text(kept + "while True: pass")
    assert "it does not run (TimeoutError" in repr(line.below(Table(["a"], [["1"]])))
    file.unlink()
    assert repr(line.below(Table(["a"], [["1"]]))).endswith("1")


def test_a_line_is_judged_with_ours_below_it_and_used_with_theirs(beside_progress):
    LINES["all_reduce"].check(written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d"))
    file = beside_progress / "cost_model.py"
    file.write_text(file.read_text().replace("2 * S - 2 * S / d", "S"))
    made = written(beside_progress, "tp_sends", "return 4 * L * all_reduce(e * T * h, t)")
    assert LINES["tp_sends"].check(made).kind == "right"
    assert (
        LINES["tp_sends"].whose is not LINES["tp_sends"].ours
        and LINES["all_reduce"].whose is LINES["all_reduce"].ours
    )


def test_a_line_is_kept_with_the_functions_that_it_calls_and_once(beside_progress):
    more = "def factor(d):\n    return 2 * (d - 1) / d\n"
    for _ in range(2):
        LINES["all_reduce"].check(written(beside_progress, "all_reduce", "return factor(d) * S", more))
    source = (beside_progress / "cost_model.py").read_text()
    assert source.count("def factor") == source.count("def all_reduce") == source.count("# Drop 02") == 1
    assert LINES["all_reduce"].whose is not LINES["all_reduce"].ours


def test_a_line_that_needs_other_names_is_not_kept(beside_progress):
    made = written(beside_progress, "all_reduce", "return TWO * (d - 1) / d * S", "TWO = 2\n")
    assert "not kept" in LINES["all_reduce"].check(made).text
    assert not (beside_progress / "cost_model.py").exists()


def test_a_line_is_kept_with_the_imports_that_it_uses(beside_progress):
    more = "import numpy as np\nfrom fractions import Fraction\n"
    made = written(
        beside_progress, "all_reduce", "return float(np.float64(2) * S * (1 - Fraction(1, d)))", more
    )
    assert "It is kept" in LINES["all_reduce"].check(made).text
    assert LINES["all_reduce"].whose is not LINES["all_reduce"].ours
    kept = (beside_progress / "cost_model.py").read_text()
    assert kept.index("import numpy as np") < kept.index("def all_reduce")


def test_a_table_below_a_wrong_line_says_that_it_is_the_courses(beside_progress):
    line, table = LINES["all_reduce"], lambda: LINES["all_reduce"].below(Table(["a"], [["1"]])).note
    assert not table()
    line.check(written(beside_progress, "all_reduce", "return 2 * S"))
    assert table() == "predicted: by the course's all_reduce: yours is not right yet"
    line.check(written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d"))
    assert table() == "predicted: by your all_reduce in cost_model.py"


def test_another_file_of_this_name_is_renamed_in_a_sentence(beside_progress):
    file = beside_progress / "cost_model.py"
    file.write_text("from drops.d13 import Cost, Cut, Given\n\n\ndef cost(job, cut):\n    return Cost()\n")
    made = written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d")
    for number in (1, 2):
        assert f"it is now cost_model_{number}.py" in LINES["all_reduce"].check(made).text
        assert "def cost" in (beside_progress / f"cost_model_{number}.py").read_text()
        file.write_text("def cost(job, cut):\n    return 1\n")


def test_a_file_without_the_courses_import_stays_the_readers(beside_progress):
    file = beside_progress / "cost_model.py"
    LINES["all_reduce"].check(written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d"))
    for first in ("", "from drops.lines import all_reduce  # mine\n"):
        file.write_text(file.read_text().replace(f"{lines.FIRST}\n", first))
        made = written(
            beside_progress, "stage_sends", "return float(np.float64(e * T * h / t))", "import numpy as np"
        )
        assert "was another file" not in LINES["stage_sends"].check(made).text
        assert {"all_reduce", "stage_sends"} == set(lines.kept().right)
        assert "from drops.lines import" in file.read_text()


def test_a_file_with_an_error_is_left_as_it_is(beside_progress):
    file, line = beside_progress / "cost_model.py", LINES["all_reduce"]
    made = written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d")
    line.check(made)
    file.write_text(broken := file.read_text() + "\ndef cost(job, cut:\n")
    told = line.check(made).text
    assert f"has an error in line {len(broken.splitlines())}, so this is not kept" in told
    assert file.read_text() == broken and [*beside_progress.glob("cost_model*")] == [file]


def test_where_no_progress_is_kept_a_line_lives_as_long_as_the_kernel(tmp_path):
    answer = LINES["all_reduce"].check(written(tmp_path, "all_reduce", "return 2 * S - 2 * S / d"))
    assert (
        "until the kernel ends" in answer.text and LINES["all_reduce"].whose is not LINES["all_reduce"].ours
    )


def test_on_colab_the_line_is_printed_to_be_copied(beside_progress, monkeypatch):
    monkeypatch.setitem(lines.sys.modules, "google.colab", lines)
    answer = LINES["all_reduce"].check(written(beside_progress, "all_reduce", "return 2 * S - 2 * S / d"))
    assert answer.text.endswith("def all_reduce(S, d):\n    return 2 * S - 2 * S / d")


@pytest.mark.parametrize(
    "returned, told",
    {
        "S / 0": "ZeroDivisionError",
        "'much'": "TypeError",
        "sunk * S": "NameError",
        "sum(iter(lambda: 1, 2))": "TimeoutError: it computes for more than 2 s",
        "None": "not started",
    }.items(),
)
def test_a_line_that_crashes_says_on_which_sizes(tmp_path, returned, told):
    answer = LINES["all_reduce"].check(written(tmp_path, "all_reduce", f"return {returned}"))
    assert told in answer.text or answer.kind == told


def test_a_line_under_another_name_or_the_courses_own_is_no_attempt(tmp_path):
    made = written(tmp_path, "all_reduce", "return 2 * S - 2 * S / d")
    made.__name__ = "mine"
    assert LINES["all_reduce"].check(made).misconception == "another name"
    assert LINES["all_reduce"].check(LINES["all_reduce"]).misconception == "the course's own line"
