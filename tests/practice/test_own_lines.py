"""The cost model that learners write in drop 13, and the layouts that drop 14 chooses with it."""

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from drops import d13, d14
from helpers.practice.runs import Run

SOURCE = textwrap.dedent(inspect.getsource(d13.cost))
OTHER = {ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mult}
# (old, new) with equal results: the stage is at most 3, and the branch of 3, the last, overwrites; 0.0 is 0.
SAME = {("cut.zero == 2", "cut.zero >= 2"), ("cut.zero == 3", "cut.zero >= 3"), ("0", "0.0")}
# If ZeRO-0 divided 1 byte a parameter and not 0, memory would differ by less than a tenth, which is praised.
NEAR = {("0", "1")}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """A node with a factor or a branch removed, an operator exchanged, or a number doubled or halved."""
    if isinstance(node, ast.BinOp):
        yield node.left
        yield node.right
        if turned := OTHER.get(type(node.op)):
            yield ast.BinOp(node.left, turned(), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value * 2 if node.value else 1)
        yield ast.Constant(node.value / 2)
    elif isinstance(node, ast.Compare):
        yield ast.UnaryOp(ast.Not(), node)
        turned = {ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.Eq: ast.GtE}[type(node.ops[0])]
        yield ast.Compare(node.left, [turned()], node.comparators)
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("max", "min"):
        yield from node.args


def single_changes() -> Iterator[tuple[int, str, str, Callable]]:
    """(line, old expression, new expression, changed function) for each single change of the solution."""
    tree = ast.parse(SOURCE)
    for place, node in enumerate(ast.walk(tree)):
        for number, changed in enumerate(changes(node)):
            made = copy.deepcopy(tree)
            target = list(ast.walk(made))[place]
            other = list(changes(target))[number]

            class Put(ast.NodeTransformer):
                def visit(self, at):
                    return other if at is target else self.generic_visit(at)

            names = dict(vars(d13.exercises))
            exec(compile(ast.fix_missing_locations(Put().visit(made)), "<changed>", "exec"), names)
            yield node.lineno, ast.unparse(node), ast.unparse(changed), names["cost"]


@pytest.mark.parametrize("one_a_line", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_no_single_change_of_a_term_is_praised(one_a_line):
    cases = d13.written._cases()
    does, passed, seen = d13.written._does(cases), [], set()
    for line, old, new, attempt in single_changes():
        if one_a_line and line in seen or (old, new) in SAME | NEAR:
            continue
        seen.add(line)
        try:
            run = Run(cases, [{"values": [attempt(*case) for case in cases]}])
        except (ZeroDivisionError, IndexError, TypeError):
            continue  # a crash is no praise
        if d13.written.judged(run, does) is None:
            passed.append((old, new))
    # "work hides DP" under ZeRO-3, and a chunk's share: within a tenth, and the praise says so.
    assert len(seen) > 15 and set(passed) <= {("work + tp", "work"), ("1", "0.5")}, passed


def test_a_term_that_is_near_enough_is_praised_with_its_difference():
    answer = d13.written.check(lambda job, cut: d13.cost(job, cut)._replace(tp=0.95 * d13.cost(job, cut).tp))
    assert answer.kind == "right" and ("`tp` differs from ours", "by up to 5.0%", "") in answer.figures


def in_a_notebook(folder: Path, *sources: str):
    """A module with these sources, as if they stood in a notebook."""
    path = folder / "notebook.py"
    path.write_text("\n".join(["from drops.d13 import Cost", "from drops.lines import *", *sources]))
    spec = spec_from_file_location("notebook", path)
    spec.loader.exec_module(notebook := module_from_spec(spec))
    return notebook


def test_a_right_function_is_kept_for_drop_14(tmp_path, monkeypatch):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    assert d13.your_lines().whose == "our lines"
    assert "cost_model.py" in d13.written.check(in_a_notebook(tmp_path, SOURCE).cost).text
    lines = d13.your_lines()
    assert repr(lines).startswith("your lines, the last of them in cost_model.py; all_reduce, tp_sends, ")
    assert "the course's, because yours is missing" in repr(d14.table(lines, d14.THUMB))
    assert all(lines(*case) == d13.cost(*case) for case in d13.written._cases())
    assert "not counted" not in d13.written.check(in_a_notebook(tmp_path, SOURCE).cost).text  # once more
    file = tmp_path / "cost_model.py"
    kept = file.read_text()
    for broken in (f"{kept}def no(:", kept.replace("return Cost(", "return Cost(1 + ")):
        file.write_text(broken)
        assert d13.your_lines().whose == "our lines" and "because of your `cost`" in d13.your_lines().where


def test_a_function_is_kept_with_those_that_it_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    notebook = in_a_notebook(
        tmp_path,
        "def half(x):\n    return twice(x) / 4",
        "def twice(x):\n    return 2 * x",
        SOURCE.replace("def cost(", "def as_asked("),
        "def cost(job, cut):\n    made = as_asked(job, cut)\n    return made._replace(tp=2 * half(made.tp))",
    )
    assert "is kept in cost_model.py" in d13.written.check(notebook.cost).text
    assert all(d13.your_lines()(*case) == d13.cost(*case) for case in d13.written._cases())


def test_a_function_that_needs_other_names_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("THREE_AXES_PROGRESS", str(tmp_path / "progress.json"))
    answer = d13.written.check(lambda job, cut: d13.cost(job, cut))
    assert answer.kind == "right" and "is not kept" in answer.text
    assert not (tmp_path / "cost_model.py").exists()


def test_nothing_that_fits_is_three_percent_faster_than_what_drop_14_defends():
    """By the lines or by the planner under Megatron-LM; what fits leaves a tenth of the GPU free by both."""
    pick = d14.fastest(d13.cost, d14.JOB)
    mine, theirs = d13.cost(d14.JOB, pick).seconds, d14.planned(pick)[0]
    for row in d14.the_plan().ranked:
        made = d13.cost(*d13.as_written(d14.the_plan().job, row.layout))
        if made.memory <= d14.ROOM:
            assert made.seconds > mine / 1.03 and row.seconds > theirs / 1.03, row.layout


JOBS = [
    ("llama-2-13b", "dgx-h100", 32, 256, 4096),
    ("llama-3-8b", "dgx-h100", 16, 128, 8192),
    ("gpt3-175b", "dgx-h100", 256, 1024, 2048),
    ("llama-2-70b", "dgx-h100", 64, 256, 4096),
    ("llama-3-70b", "dgx-h100", 256, 1024, 8192),
    ("opt-30b", "dgx-h100", 32, 256, 2048),
    ("llama-2-13b", "dgx-h100", 16, 64, 4096),
    ("llama-30b", "dgx-h100", 64, 512, 2048),
    ("llama-3-70b", "dgx-h100", 128, 512, 8192),
    ("llama-3-8b", "dgx-h100", 32, 256, 8192),
    # In these the output layer is large beside a stage.
    ("qwen3-1.7b", "dgx-h100", 8, 64, 4096),
    ("qwen3-1.7b", "dgx-h100", 16, 256, 4096),
    ("llama-3-8b", "dgx-h100", 8, 64, 8192),
    ("llama-3-70b", "dgx-a100", 128, 256, 4096),
    ("llama-3-8b", "dgx-b200", 8, 128, 8192),
    ("llama-3-405b", "gb200-nvl72", 256, 256, 8192),
    ("llama-2-13b", "dgx-a100-40gb", 24, 96, 4096),
    # In these FSDP does not fit by the planner, or data parallelism alone is best.
    ("llama-3-405b", "dgx-h100", 256, 256, 8192),
    ("llama-3-70b", "dgx-h100", 64, 64, 32768),
    ("llama-2-13b", "dgx-b200", 64, 512, 2048),
    ("tinyllama-1.1b", "dgx-h100", 16, 256, 2048),
    ("llama-3-8b", "dgx-b200", 64, 512, 2048),
]


@pytest.mark.parametrize("job", JOBS)
def test_the_first_row_of_your_job_that_fits_ties_with_the_planners_best(job):
    said = repr(d14.your_job(d13.cost, *job))
    behind = re.search(r"your first row that fits there: [\d.]+ s, ([+-][\d.]+)%", said)
    assert float(behind[1]) <= 10


def test_your_job_names_the_term_that_the_lines_err_by():
    said = repr(d14.your_job(d13.cost, "opt-30b", "dgx-b200", 64, 512, 2048))
    assert "+14.9%, most of it the output layer" in said


def test_your_job_leaves_out_what_the_planner_refuses_and_says_where_launching_decides():
    odd = repr(d14.your_job(d13.cost, "llama-3.2-3b", "dgx-h100", 12, 96, 4096))
    assert " · 3 · " not in odd  # TP 3 divides the heads, and not the 8 of K and V
    assert "126 GB, too much" in repr(d14.your_job(d13.cost, "qwen3-0.6b", "dgx-h100", 8, 128, 32768))
    assert "is launching kernels" in repr(d14.your_job(d13.cost, "gpt2-xl", "dgx-h100", 8, 64, 1024))
    with pytest.raises(ValueError, match="no layout of 12 GPUs divides 32 layers, 32 heads and 64 sequences"):
        d14.your_job(d13.cost, "llama-3-8b", "dgx-h100", 12, 64, 8192)
    assert "48 GPUs, not 64" in repr(d14.table(d13.cost, d13.Cut(3, 8, 2)))
