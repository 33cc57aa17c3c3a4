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


def test_a_sum_that_comes_too_late_is_named(world):
    (edit,) = (edit for edit in EDITS if edit.name == "clipped before the sum")
    report = world.run(silent.verified, edit.program, edit.edit, [edit.layout])[0]
    assert "all_reduce over dp received it too late, or nobody waited" in " ".join(repr(report).split())


def test_the_documentation_shows_a_report_of_this_version(world):
    edit = next(edit for edit in EDITS if edit.name == "norms not summed under SP")
    report = world.run(silent.verified, "dense", edit.edit, ["dp 2", "tp 2", "dp 2 tp 2"])[0]
    said = find("docs/verify.md").read_text(encoding="utf-8")
    assert f"```\n{report}\n```" in said
    explained = sum(bool(edit.kinds) for edit in EDITS)
    assert f"All {len(EDITS)} are found" in said and f"The cause is right for {explained}" in said
