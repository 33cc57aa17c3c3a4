"""Settings and fixtures of all tests: the order of test files, and a World (one process for each rank)."""

import os
import re
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import cloudpickle
import forked
import kernels
import nbformat
import nbval.kernel
import pytest
import run_all
import worlds
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# The same examples on every machine; with `--all` more of them.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("thorough", settings.get_profile("repeatable"), max_examples=150)
settings.load_profile("repeatable")

# A shell starts a background job with SIGINT ignored: no stop button would work in the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("prose")
nbval.kernel.KernelManager = kernels.WithoutPorts
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # more ranks than GPUs; only test_gpus.py uses GPUs
os.environ.setdefault("THREE_AXES_PROGRESS", "")  # stored outputs do not depend on this machine's progress
# Tests run side by side, at least one on each core. More threads in one test would spin while another
# computes, and the toys are too small to need them. Nothing above has imported NumPy or PyTorch, which read
# this once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FAILED = os.environ.pop(run_all.FAILED, None)  # neither workers nor the processes of tests inherit it
BEYOND = re.compile(r"\[b\d\.")  # in the name of a test: an exercise of notebooks/beyond
# The files that take longest in `make test-all`, the longest first. All others take less than half a minute.
LONGEST = """
    test_gpus test_browser test_exercises 14_defend test_left_behind test_train test_site
    test_silent test_beyond test_trace test_endings test_attempts test_count test_copies test_install 08_grid
    b1_fsdp test_browser_stored test_standing b4_hang b5_silent test_limits 11_scaling test_drops 10_crash
    test_colab test_toy test_training
""".split()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Mark as slow the tests of notebooks/beyond, and of the sections at a notebook's end that are for
    another day. Sort: first the files that mostly wait, longest first; then the files that compute, longest
    last.
    """
    for item in items:
        if item.path.parent.name == "beyond" or item.path.stem == "test_beyond" or BEYOND.search(item.name):
            item.add_marker(pytest.mark.slow)
        elif hasattr(item, "cell") and item.cell_num >= cells_for_today(item.path):
            item.add_marker(pytest.mark.slow)
    yield
    for module in {item.module for item in items if hasattr(item, "module")}:
        cloudpickle.register_pickle_by_value(module)  # ranks need not import the tests
    waiting = {item.path for item in items if waits(item)}
    place = lambda path: LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)
    items.sort(key=lambda item: (0, place(item.path)) if item.path in waiting else (1, -place(item.path)))


@cache
def cells_for_today(path: Path) -> int:
    """The number of a notebook's code cells before the sections for another day."""
    from tools.pages import lesson  # imported here because it imports NumPy

    return sum(cell.cell_type == "code" for cell in lesson(nbformat.read(path, as_version=4)))


def waits(item) -> bool:
    """Whether a file mostly waits: it is marked, or its notebook emulates a network or measures sleeps."""
    if hasattr(item, "cell"):
        return bool(re.search(r"\bfabric=|\bmeasured\b", item.cell.source))
    return item.get_closest_marker("waits") is not None


class FromBothEnds(LoadFileScheduling):
    """The first worker takes files from the front, where the waiting files are; the other workers take them
    from the end. So the two kinds run side by side, and no worker is left alone with a long one.
    """

    def _assign_work_unit(self, node) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node) -> None:
        """Give a worker at least two tests. It starts its last test only when it gets another one or the
        message that there is none, so a worker that replaces another with one test would wait for ever.
        """
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def remove_node(self, node) -> str | None:
        """The test during which a worker ended is not repeated; a new worker runs the file's other tests."""
        tests = ((unit, test) for unit in self.assigned_work[node].values() for test in unit)
        ended = next(((unit, test) for unit, test in tests if not unit[test]), None)
        if ended:
            ended[0][ended[1]] = True
        super().remove_node(node)
        return ended and ended[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FromBothEnds(config, log) if config.option.dist == "loadfile" else None


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        run_all.ends_with_its_parent()


def pytest_runtest_logreport(report):
    """Tell `run_all` the name of a failed test at once."""
    if FAILED and report.failed:
        os.write(int(FAILED), f"  {report.nodeid}\n".encode())


@pytest.fixture(scope="module")
def aside():
    """Call functions in another process, which is the same for all calls of a module."""
    how = dict(mp_context=forked.context(), initializer=forked.end_with_starter)
    with ProcessPoolExecutor(1, **how) as other:
        yield lambda fn, *args: other.submit(fn, *args).result(120)


@pytest.fixture(scope="module")
def kills_kernels():
    """For files that kill kernels: a killed kernel leaves its temporary folder behind. The processes that
    these tests start have another TMPDIR, which is removed at the end.
    """
    from helpers.ranks import folders

    how = dict(dir=folders.short_parent(40), ignore_cleanup_errors=True)
    with tempfile.TemporaryDirectory(**how) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield


shared_world = worlds.shared(4, timeout=20)


@pytest.fixture
def world(shared_world):
    """A world for one test. A module may have another `shared_world`."""
    with shared_world.lent() as world:
        world.timeout = shared_world.how["timeout"]
        yield world


@pytest.fixture(scope="module")
def judges_share_worlds():
    """Exercises are checked in worlds that are used again: see `worlds.Lent`."""
    from helpers import World

    lent = worlds.Lent(World)
    judging = ("helpers.practice.engine", "drops")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(judging) and getattr(module, "World", None) is World:
                patch.setattr(module, "World", lent)
        yield
    lent.close()
