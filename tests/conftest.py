"""Shared by all tests: one world of four ranks, and a guard against processes left behind."""

import os
import sys
import uuid
from pathlib import Path

import cloudpickle
import pytest

# Marks every process that descends from this run, so that the guard finds its own and no others.
MARK = f"THREE_AXES_TEST={uuid.uuid4()}"
os.environ.update([MARK.split("=")])


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items if hasattr(item, "module")}:
        cloudpickle.register_pickle_by_value(module)  # ranks need not import the tests


@pytest.fixture(scope="session")
def shared_world():
    from helpers import World
    with World(4, timeout=20) as world:
        yield world


@pytest.fixture
def world(shared_world):
    shared_world.timeout = 20
    return shared_world


def processes() -> list[int]:
    """Process ids of everything alive that descends from this run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request):
    yield
    if sys.platform != "linux" or hasattr(request.config, "workerinput"):
        return  # under xdist each worker is itself a descendant; the Makefile's guard looks after all have ended
    from helpers.runtime.world import _open
    assert not [w for w in _open if w.is_open], "a test left a World open"
