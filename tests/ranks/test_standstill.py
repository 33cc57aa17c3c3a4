"""When a call is stopped whose ranks can never go on, by looks that are written down."""

import itertools
from types import SimpleNamespace

import pytest

from helpers.ranks import standstill
from three_axes.count.moves import Begun, Channel, Look, Operation, Waiting

EVERYBODY = (0, 1, 2)
CHANNEL = Channel("collective", "0", EVERYBODY)
STANDS = Look(1, {CHANNEL: Begun(1, ["all_reduce"])}, [Waiting((Operation(CHANNEL, 1, EVERYBODY),))])
MOVES, FINISHED = Look(0, {}, None), Look(0, {}, [])


class Ranks(SimpleNamespace):
    """Processes whose ranks 0 and 1 are as the looks say, one after the other; rank 2 has finished."""

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
    """What is proven by the looks, and how many are left of them."""
    ranks = Ranks(looks)
    watched = standstill.Standstill(ranks, 1)
    while not watched.is_proven({2: ()}, None):
        pass
    return watched.found, len(list(ranks.looks))


def test_where_all_stand_two_looks_are_enough():
    deadlock, left = found([(STANDS, STANDS)] * 6)
    assert deadlock.of(3) == "no rank can ever go on" and left == 4


def test_a_rank_that_is_late_is_told_too():
    deadlock, left = found([(STANDS, MOVES)] * 3 + [(STANDS, STANDS)] * 3)
    assert deadlock.of(3) == "no rank can ever go on" and left == 0


def test_a_rank_that_never_stands_is_waited_for_a_while():
    deadlock, left = found([(STANDS, MOVES)] * 9)
    assert deadlock.of(3) == "rank 0 can never go on" and left == 3
