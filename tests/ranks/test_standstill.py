"""When a call is stopped whose ranks can never continue, with given looks instead of processes."""

import itertools
import time
from types import SimpleNamespace

import pytest

from helpers.ranks import standstill
from helpers.ranks.failure import RankStatus
from three_axes import lines
from three_axes.count.moves import Begun, Channel, Look, Operation, Waiting

EVERYBODY = (0, 1, 2)
CHANNEL = Channel("collective", "0", EVERYBODY)
STANDS = Look(1, Waiting((Operation(CHANNEL, 1, EVERYBODY),)), False, {CHANNEL: Begun(1, ["all_reduce"])})
MOVES, FINISHED = Look(0), Look(0, ended=True)


class Ranks(SimpleNamespace):
    """Processes: ranks 0 and 1 return the given looks one after the other; rank 2 has finished."""

    def __init__(self, looks):
        super().__init__(calls=itertools.count(), processes=EVERYBODY, looks=iter(looks))

    def tell(self, *_):
        pass

    def collect(self, *_, **__):
        pair = next(self.looks)
        return {0: (pair[0], False), 1: (pair[1], False), 2: (FINISHED, True)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(standstill, "FIRST", 0)
    monkeypatch.setattr(standstill, "EVERY", 0)


def found(looks):
    """What is proven from the looks, and how many of them are left."""
    ranks = Ranks(looks)
    watched = standstill.Standstill(ranks, 1)
    while not watched.is_proven({2: ()}, None):
        pass
    return watched.found, len(list(ranks.looks))


def test_where_all_stand_two_looks_are_enough():
    deadlock, left = found([(STANDS, STANDS)] * 6)
    assert deadlock.kind == "absent" and deadlock.finished == [2] and left == 4


def test_a_rank_that_moves_is_waited_for():
    deadlock, left = found(
        [(STANDS, MOVES)] * 3 + [(STANDS, STANDS), (STANDS, MOVES)] + [(STANDS, STANDS)] * 3
    )
    assert deadlock.kind == "absent" and left == 1


def test_after_some_seconds_without_a_movement_it_is_said(monkeypatch):
    monkeypatch.setattr(lines, "STILL", 0.05)
    ranks, said = Ranks([(MOVES, MOVES)] * 9), []
    ranks.look = lambda *_: [RankStatus(finished=True), RankStatus(), RankStatus()]
    watched = standstill.Standstill(ranks, 1, said.append)
    watched.is_proven({}, None)
    time.sleep(0.1)
    for _ in range(3):
        watched.is_proven({}, None)
    assert said == ["", "rank 0: finished; ranks 1 and 2: no answer"]
