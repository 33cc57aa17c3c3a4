"""A program that ends by itself is never called a hang, whatever ends its waits. A program that hangs is
proven to hang, even if something idle runs beside it.
"""

import re

import cloudpickle
import ending
import hanging
import pytest

from helpers import World
from helpers.ranks.failure import RankError
from helpers.ranks.output import View
from three_axes import lines

pytestmark = pytest.mark.waits
# Ranks need not import these files.
cloudpickle.register_pickle_by_value(ending)
cloudpickle.register_pickle_by_value(hanging)


@pytest.mark.parametrize("name", ending.ENDS)
def test_a_program_that_ends_by_itself_is_never_called_hung(world, name, tmp_path):
    given = [str(tmp_path)] if name == "group_that_comes_again" else []
    world.run(ending.ENDS[name], *given)


@pytest.fixture(scope="module")
def alone():
    """A world in which no program of ENDS has run: a thread that one left would prevent a proof."""
    with World(4) as made:
        yield made


@pytest.mark.parametrize("name", hanging.HANGS)
def test_a_program_that_hangs_is_proven_to_hang(alone, name):
    with pytest.raises(RankError) as caught:
        alone.run(hanging.PROGRAMS[name], timeout=8)
    assert caught.value.kind == "deadlock", caught.value


@pytest.mark.parametrize("name", hanging.NOTED)
def test_a_hang_that_is_not_certain_is_noted_and_not_proven(world, name, monkeypatch):
    notes = []
    monkeypatch.setattr(lines, "STILL", 0.5)
    monkeypatch.setattr(View, "set_places", lambda view, places: notes.append(places))
    with pytest.raises(RankError) as caught:
        world.run(hanging.PROGRAMS[name], timeout=2)
    assert caught.value.kind == "timeout" and "No rank can" not in str(caught.value)
    assert any("rank" in places for places in notes)
    if name == "second_forward_of_ddp":
        assert re.search(r", with broadcast of int32\[\d+\], root 0 begun", notes[-1])
    if name in hanging.REASONS:
        assert "That is no proof of a hang: rank 0 has a" in str(caught.value)
