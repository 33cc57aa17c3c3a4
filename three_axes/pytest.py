"""A pytest plugin, for ranks that torchrun starts: tests that a split model equals its twin, and what it
sends.

    torchrun --nproc-per-node 4 -m pytest -p three_axes.pytest tests/

    @pytest.mark.parametrize("layout", ["dp 4", "dp 2 tp 2"])
    def test_split(three_axes_verify, layout):
        three_axes_verify(build, step, batch, layout)  # the same arguments as three_axes.verify.verify

    def test_bytes(three_axes_bytes):
        sizes = dict(layers=2, batch=4, seq=128, hidden=64)
        with three_axes_bytes(tp="4 * layers * batch * seq * hidden * 4", tolerance=0.01, where=sizes):
            train_step()

Every rank runs every test. PyTorch is imported when a test uses one of the two fixtures.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from .table import Table, human

NAMES = {"max": max, "min": min, **{name: getattr(math, name) for name in ("ceil", "floor", "log2", "sqrt")}}


@pytest.fixture(scope="session")
def three_axes_ranks():
    """This job's default process group: NCCL's if each rank has a GPU, else gloo's. Skips the test in a
    process that no launcher started.
    """
    if "WORLD_SIZE" not in os.environ:
        pytest.skip("no ranks: torchrun --nproc-per-node 4 -m pytest -p three_axes.pytest")
    import torch
    import torch.distributed as dist

    made = not dist.is_initialized()
    if made:
        local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        on_gpus = torch.cuda.device_count() >= ranks_here
        if on_gpus:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if on_gpus else "gloo")
    yield dist.group.WORLD
    if made:
        dist.destroy_process_group()


@pytest.fixture
def three_axes_verify(three_axes_ranks):
    """`three_axes.verify.verify`; if a layout differs from the twin, it fails the test on every rank, with
    the report.
    """
    from .verify import verify

    def check(*args, **kwargs):
        report = verify(*args, **kwargs)
        if not report.ok:
            pytest.fail(f"the split model is not the whole one\n{report}", pytrace=False)
        return report

    return check


@pytest.fixture
def three_axes_bytes(three_axes_ranks):
    """`bytes_by_axis` below: a block's budget of bytes by axis. Names of groups from earlier tests are
    forgotten; a mesh that this test made is given as `mesh`.
    """
    from .count.interpose import interposer

    interposer.axes.forget()
    return bytes_by_axis


@contextmanager
def bytes_by_axis(
    *, tolerance: float = 0.0, where: Mapping[str, float] | None = None, mesh=(), **budget: str | float
) -> Iterator[None]:
    """Count the payload of this rank's collectives in a block, in bytes by axis. Fail with a table if an axis
    does not send what its budget says, or if an axis without a budget sends anything.

    budget: axis -> bytes, a number or an expression in the names of `where`. Receives are not counted,
    because their sends are. tolerance: the allowed relative deviation from a budget. mesh: its dimensions
    name the axes. Raises ValueError for an expression that cannot be computed.
    """
    from .count.counting import counting

    allowed = {axis: _value(axis, given, where or {}) for axis, given in budget.items()}
    with counting(mesh) as traffic:
        yield
    rows = traffic.ranks[traffic._counter.rank]
    sent: dict[str, float] = dict.fromkeys(allowed, 0.0)
    for row in rows:
        if row.op != "recv":
            sent[row.axis] = sent.get(row.axis, 0.0) + row.payload
    budgets = {axis: allowed.get(axis, 0.0) for axis in sent}
    missed = {axis for axis, n in sent.items() if abs(n - budgets[axis]) > tolerance * budgets[axis]}
    if missed:
        kept = {axis: "no" if axis in missed else "yes" for axis in sent}
        given = {axis: str(budget.get(axis, "-")) for axis in sent}
        lines = [[axis, human(n), human(budgets[axis]), given[axis], kept[axis]] for axis, n in sent.items()]
        calls = "; ".join(f"{row.axis}: {row.calls:g} {row.op} of {human(row.payload)}" for row in rows)
        table = Table(["axis", "sent", "budget", "of", "kept"], lines, title="bytes by axis, of one rank")
        pytest.fail(f"{table!r}\n{calls}", pytrace=False)


def _value(axis: str, size: str | float, where: Mapping[str, float]) -> float:
    try:
        return float(eval(size, {"__builtins__": {}}, {**NAMES, **where}) if isinstance(size, str) else size)
    except Exception as e:
        raise ValueError(f"{axis}={size!r} cannot be computed: {e}; name what is in it with where=") from None
