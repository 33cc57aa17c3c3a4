"""An axis is a record of `paper/axes.py`, and a field of `Axes` and of a layout's sizes. A copy of the
project with one more axis must print that axis wherever it prints axes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from three_axes.paper.axes import AXES, NAMED
from three_axes.plan import Axes, Layout

ROOT = Path(__file__).resolve().parents[2]
RECORD = """
    Axis("zp", "zebra parallel", "the stripes", "layer", "zebra parallel", "m · all", beside="tp"),"""
# A program that adds one operation along the new axis to each layer, and prints what the commands print.
CODE = """
import contextlib, io, json, sys
from three_axes.__main__ import main
from three_axes.plan import Job, Layout, operations, plan
from three_axes.plan.models import find_model
from three_axes.plan.op import sending

attention = operations.attention
stripes = sending("stripes", "zp", "F", "all_reduce", 1, 1e6)
operations.attention = lambda at, eager: [*attention(at, eager), stripes]

def said(*line):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(line)
        except SystemExit:
            pass
    return out.getvalue() + err.getvalue()

from helpers.practice.defence import Defence

of = plan(Job(find_model("llama-3-8b"), global_batch=8), gpus=8, zp=2)
sizes = ("llama-3-8b", "--dp", "2", "--tp", "2", "--zp", "2")
planned = ("plan", "llama-3-8b", "--gpus", "8")
json.dump({
    "help": said("estimate", "--help"),
    "estimate": said("estimate", *sizes, "--explain"),
    "json": json.loads(said("estimate", *sizes, "--json")),
    "plan": said(*planned, "--zp", "2", "--why", "2,2,1,1,1,1,2"),
    "usual": json.loads(said(*planned, "--json")),
    "flags": said(*planned, "--zp", "2", "--flags", "megatron"),
    "too many": of.why(dp=8, zp=2),
    "defence": repr(Defence(of, Layout(dp=2, tp=2, zp=2, zero=1))),
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict:
    """Command -> what it prints in a copy of the project that has one more axis."""
    there = tmp_path_factory.mktemp("zebra")
    for name in ("three_axes", "helpers"):
        shutil.copytree(ROOT / name, there / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("data", "notebooks"):
        (there / name).symlink_to(ROOT / name)
    file = there / "three_axes" / "paper" / "axes.py"
    before, behind = re.split(r"(?<=\nAXES = \(\n)", file.read_text(encoding="utf-8"))
    file.write_text(before + behind.replace("\n)\n", f"{RECORD}\n)\n", 1), encoding="utf-8")
    fields = there / "three_axes" / "plan" / "layout.py"
    more = re.sub(r"( +)etp: (\w+) = 1\n", r"\g<0>\1zp: \2 = 1\n", fields.read_text(encoding="utf-8"))
    fields.write_text(more, encoding="utf-8")
    how = dict(cwd=there, env=os.environ | {"PYTHONPATH": str(there)}, capture_output=True, text=True)
    run = subprocess.run([sys.executable, "-c", CODE], timeout=120, **how)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_command_line_has_the_new_axis(said):
    assert "--zp ZP" in said["help"] and "ranks that share the stripes" in said["help"]
    assert re.search(r"^DP 2 · TP 2 · PP 1 · ZP 2: \w", said["plan"], re.M), "--why takes it"


def test_tables_have_the_new_axis(said):
    estimate = said["estimate"]
    assert "DP 2 · TP 2 · PP 1 · ZP 2" in estimate
    assert re.search(r"^zebra parallel +2\.05 GB$", estimate, re.M)
    assert re.search(r"^zebra parallel .* m · all$", estimate, re.M) and "zp = 2" in estimate
    assert re.search(r"^DP \d · TP \d · PP \d · ZP 2 ", said["plan"], re.M)


def test_json_has_the_new_axis(said):
    assert said["json"]["layout"]["zp"] == 2 and said["json"]["time"]["zebra parallel"] > 0
    assert {row["layout"]["zp"] for row in said["usual"]["ranked"]} == {1}


def test_a_defence_names_the_new_axis(said):
    inside = r"sends .* inside the node"
    assert re.search(rf"TP {inside}.*; DP {inside}; ZP {inside}\.", said["defence"]), "sorted by bytes"


def test_the_new_axis_takes_ranks_and_flags_refuse_it(said):
    assert said["too many"] == "DP 8 · TP 1 · PP 1 · ZP 2 takes 16 GPUs, but there are 8"
    assert "megatron-lm has no flag for zp 2" in said["flags"]


def test_every_axis_is_a_field():
    assert Axes._fields == tuple(axis.name for axis in AXES) == tuple(asdict(Layout()))[: len(AXES)]


def test_every_axis_is_explained():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    options = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for axis in AXES:
        assert re.search(rf"^\| {axis.name.upper()}\b", glossary, re.M), axis.name
        assert f"`--{axis.name}`" in options, axis.name


def test_records_of_axes_name_axes_that_exist():
    for axis in NAMED.values():
        assert axis.talks in ("layer", "microbatch", "step")
        assert not axis.beside or axis.beside in Layout().order
    assert list(Layout(cp=2).sizes) == ["pp", "dp", "cp", "tp"]
