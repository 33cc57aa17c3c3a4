"""`verify` must accuse no right program, and find every edit of data/silent."""

import pytest
import silent
import torch
import worlds
from sampled import sampled

from three_axes.files import find

EDITS = silent.mutants()
shared_world = worlds.shared(4, many=30, timeout=120)


@pytest.mark.parametrize("dtype", sampled([None, torch.float32]), ids=str)
@pytest.mark.parametrize("program", silent.PROGRAMS)
def test_right_programs_are_not_accused(program, dtype, world):
    report = world.run(silent.verified, program, "", silent.PROGRAMS[program], 3, dtype)[0]
    assert report.ok, report
    assert ("In float64" in repr(report)) == (dtype is None)


@pytest.mark.parametrize("edit", sampled(EDITS), ids=lambda edit: edit.name)
def test_every_edit_is_found_within_two_steps(edit, world):
    report = world.run(silent.verified, edit.program, edit.edit, [edit.layout])[0]
    assert edit.found_by(report), f"{edit.name}\n{report}"
    assert edit.explained_by(report) == bool(edit.kinds), f"{edit.name}\n{report}"


def test_most_causes_are_known():
    assert {edit.program for edit in EDITS} == {*silent.PROGRAMS}
    assert len(EDITS) >= 40 and sum(bool(edit.kinds) for edit in EDITS) >= 0.9 * len(EDITS)


@pytest.mark.parametrize(
    "name, said",
    [
        ("clipped before the sum", "all_reduce over dp received it too late, or nobody waited"),
        ("mean over cp, unequal tokens", "of each row tokens 1–4 1.05 times, tokens 5–12 0.955 times"),
    ],
)
def test_a_report_gives_details_of_a_cause(world, name, said):
    edit = next(edit for edit in EDITS if edit.name == name)
    report = world.run(silent.verified, edit.program, edit.edit, [edit.layout])[0]
    assert said in " ".join(repr(report).split()), report


def test_the_documentation_shows_a_report_of_this_version(world):
    edit = next(edit for edit in EDITS if edit.name == "norms not summed under SP")
    report = world.run(silent.verified, "dense", edit.edit, ["dp 2", "tp 2", "dp 2 tp 2"])[0]
    said = find("docs/verify.md").read_text(encoding="utf-8")
    assert f"```\n{report}\n```" in said
    explained = sum(bool(edit.kinds) for edit in EDITS)
    assert f"All {len(EDITS)} are found" in said and f"The cause is right for {explained}" in said
