"""Copies of a tensor that were equal must stay equal. Here are the sketches (random sums) by which `verify`
compares copies, and `verify` on a script.
"""

import shutil
import subprocess

import forked
import pytest
import silent
import torch

from drops import b5
from three_axes.__main__ import main
from three_axes.verify.findings import axis_of
from three_axes.verify.sketches import distance, sketch

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from model import batch, build, step

layout, steps = sys.argv[1].split(), int(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", tuple(map(int, layout[1::2])), mesh_dim_names=tuple(layout[::2]))
model, optimizer = build(mesh)
for number in range(steps):
    step(model, batch(), mesh)
    optimizer.step()
    optimizer.zero_grad()
print("to its end")
dist.destroy_process_group()
"""


def verified(folder, program: str, edit: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `verify` on an edited program. arguments: its options, the script, a layout, a number of steps."""
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # else an older model.py may run
    (folder / "train.py").write_text(SCRIPT)
    (folder / "model.py").write_text(b5.edited(program, edit))
    return forked.command("three_axes", "verify", *arguments, cwd=folder, ranks=4)


def test_marks_estimate_how_far_tensors_are_apart():
    chance = torch.Generator().manual_seed(0)
    for size in (3, 1000, 5000):
        a, b = (torch.randn(size, generator=chance) for _ in range(2))
        for far in (1e-3, 1e-1, 1.0):
            told = distance(sketch("w", a + far * b), sketch("w", a))
            assert 0.3 < told / (far * float(b.norm() / a.norm())) < 2
        assert distance(sketch("w", a), sketch("w", a)) == 0


def test_the_axis_along_which_copies_differ():
    axes = {(0, 1, 2, 3): "the world", (0, 1): "tp", (2, 3): "tp", (0, 2): "dp", (1, 3): "dp"}
    assert axis_of({0: "a", 1: "b", 2: "a", 3: "b"}, axes) == "tp"
    assert axis_of({0: "a", 1: "a", 2: "b", 3: "b"}, axes) == "dp"
    assert axis_of({0: "a", 1: "b", 2: "b", 3: "a"}, axes) == "dp and tp"
    assert axis_of({0: "a", 3: "b"}, axes) == "the world"


@pytest.mark.slow
def test_a_script_whose_copies_stay_equal(tmp_path):
    done = verified(tmp_path, "pipeline", "", "train.py", "pp 2 dp 2", "9")
    assert done.returncode == 0
    assert "25 tensors have copies on several ranks, equal after 5 steps" in done.stdout
    assert "to its end" not in done.stdout
    done = verified(tmp_path, "zero", "", "train.py", "dp 4", "2")
    assert "9 tensors have copies on several ranks, equal after 2 steps" in done.stdout, done.stdout
    assert done.returncode == 0 and done.stdout.count("to its end") == 4


@pytest.mark.slow
def test_a_script_whose_copies_part(tmp_path):
    edits = {edit.name: edit.edit for edit in silent.mutants()}
    edit = edits["tied weights not summed over pp"]
    done = verified(tmp_path, "pipeline", edit, "train.py", "pp 2 dp 2", "9")
    assert "after step 1: words.weight differs along pp (ranks 0, 1 | 2, 3), by" in done.stdout, done.stdout
    assert done.returncode and "of 25 tensors with copies 1 have parted, in 9 steps" in done.stdout
    edit = "        dist.all_reduce(p.grad, group=dp)⏎ => ⏎"
    done = verified(tmp_path, "pipeline", edit, "--steps", "1", "train.py", "pp 2 dp 2", "9")
    said = "after step 1: layers.3.norm.bias differs along dp (ranks 2 | 3), by 2 of its length"
    assert said in done.stdout
    assert "after step 1: and 17 more\n" in done.stdout
    assert "train.py: of 25 tensors with copies 25 have parted, in 2 steps\n" in done.stdout


@pytest.mark.slow
def test_scripts_with_nothing_to_compare(tmp_path, capsys):
    (tmp_path / "alone.py").write_text("print('alone')")
    done = forked.command("three_axes", "verify", "alone.py", cwd=tmp_path)
    assert done.returncode == 0
    assert "no optimizer has stepped on several ranks: there is nothing" in done.stdout
    assert main(["verify", "nowhere.py"]) == 2
    assert "there is no script 'nowhere.py'" in capsys.readouterr().err
    assert main(["verify", "--steps", "0", str(tmp_path / "alone.py")]) == 2
    assert "--steps 0: give 1 or more" in capsys.readouterr().err
