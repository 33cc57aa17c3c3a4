"""The plugin for pytest: on two ranks, right tests pass, wrong ones fail with their report or table."""

import subprocess
import sys

import forked
import pytest

TESTS = """
import pytest, torch, torch.distributed as dist
from torch import nn

def build(mesh):
    torch.manual_seed(0)
    return nn.Linear(4, 2)

def step(model, batch, mesh, reduces=True):
    part = batch if mesh is None else batch.chunk(mesh.size())[mesh.get_local_rank()]
    loss = model(part).square().mean()
    loss.backward()
    for p in model.parameters():
        if mesh is not None and reduces:
            dist.all_reduce(p.grad, group=mesh.get_group())
            p.grad /= mesh.size()
    return loss

BATCH = torch.linspace(-1, 1, 32).view(8, 4)

@pytest.mark.parametrize("layout", ["dp 2"])
def test_right(three_axes_verify, layout):
    assert three_axes_verify(build, step, BATCH, layout, dtype=torch.float64).ok

def test_wrong(three_axes_verify):
    three_axes_verify(build, lambda *a: step(*a, reduces=False), BATCH, "dp 2")

def test_budget(three_axes_bytes):
    with three_axes_bytes(world="4 * n * max(1, 2)", where={"n": 50}):
        dist.all_reduce(torch.zeros(100))
    with three_axes_bytes(world=410, tolerance=0.05):
        dist.all_reduce(torch.zeros(100))

def test_too_many(three_axes_bytes):
    with three_axes_bytes(tp=0, world="4 * 50"):
        dist.all_reduce(torch.zeros(100))

def test_nonsense(three_axes_bytes):
    with pytest.raises(ValueError, match="layers.*where="), three_axes_bytes(tp="4 * layers"):
        pass
"""


@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path):
    (tmp_path / "test_split.py").write_text(TESTS)
    words = "pytest", "-q", "-rN", "-p", "three_axes.pytest", "-p", "no:cacheprovider", "test_split.py"
    done = forked.command(*words, cwd=tmp_path, ranks=2)
    assert done.stdout.count("2 failed, 3 passed") == 2, done.stdout + done.stderr
    assert done.stdout.count("gradients of weight, bias: never averaged over dp") == 2
    (row,) = {" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("world ")}
    assert row == "world 400 B 200 B 4 * 50 no" and "world: 1 all_reduce of 400 B" in done.stdout


def test_it_asks_for_no_torch_and_skips_without_ranks(tmp_path):
    (tmp_path / "test_split.py").write_text(
        "import sys\n"
        "def test_plain(): assert 'torch' not in sys.modules\n"
        "def test_bytes(three_axes_bytes): pass\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "three_axes.pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "test_split.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert "1 passed, 1 skipped" in done.stdout and "no ranks: torchrun" in done.stdout, done.stdout
