"""Shared by all tests: one world of four ranks; kernels that need no ports."""

import inspect
import os
import signal
from concurrent.futures import ProcessPoolExecutor

import cloudpickle
import forked
import kernels
import nbval.kernel
import order
import pytest
import worlds
from hypothesis import settings

# The same examples on every machine; with `--all` more of them.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("thorough", settings.get_profile("repeatable"), max_examples=150)
settings.load_profile("repeatable")

# What a shell gives to a background job, where no stop button would work.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("exercise_tests", "prose")


nbval.kernel.KernelManager = kernels.Forked
os.environ.setdefault("THREE_AXES_PROGRESS", "")  # what was solved on this machine is in no stored output
# Tests run side by side, one for each core or more: threads of one would spin where another computes, and the
# toys are too small to need them. Nothing above has imported NumPy or PyTorch, which read this once.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_generate_tests(metafunc):
    import exercise_tests

    names = list(inspect.signature(metafunc.function).parameters)
    if (
        metafunc.function.__module__ == "exercise_tests"
        and (cases := exercise_tests.cases(metafunc.module, names)) is not None
    ):
        metafunc.parametrize(names, cases, ids=lambda x: getattr(x, "name", getattr(x, "__name__", "")))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: order.place(item.path.name, order.WAIT + order.COMPUTE))
    for module in {item.module for item in items if hasattr(item, "module")}:
        cloudpickle.register_pickle_by_value(module)  # ranks need not import the tests


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return order.SideBySide(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="module")
def aside():
    """Call a function in another process, one for all calls of a module."""
    with ProcessPoolExecutor(1, mp_context=forked.context()) as other:
        yield lambda fn, *args: other.submit(fn, *args).result(120)


@pytest.fixture(scope="module")
def shared_world():
    shared = worlds.Shared(4, timeout=20)
    yield shared
    shared.close()


@pytest.fixture
def world(shared_world):
    with shared_world.lent() as world:
        world.timeout = 20
        yield world
