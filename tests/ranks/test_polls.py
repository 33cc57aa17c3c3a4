"""Polls of ranks during a call: when a call that can never end is stopped, and notes about idle ranks."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers import World
from helpers.ranks import failure, polls
from helpers.ranks.failure import RankStatus
from helpers.ranks.output import View
from three_axes import counting, lines
from three_axes.count.moves import Begun, Channel, Operation, Snapshot, Waiting

EVERYBODY = (0, 1, 2)
CHANNEL = Channel("collective", "0", EVERYBODY)
# Answers of a rank to a poll: it waits in a collective, it waits in no operation, it has finished.
STANDS = Snapshot((1,), Waiting((Operation(CHANNEL, 1, EVERYBODY),)), False, {CHANNEL: Begun(1)})
BUSY, FINISHED = Snapshot(()), Snapshot((), ended=True)
THREAD = STANDS._replace(thread="has a thread")


class Ranks(SimpleNamespace):
    """Three ranks. looks: for each poll, the answers of ranks 0 and 1. Rank 2 has finished."""

    def __init__(self, looks):
        super().__init__(calls=itertools.count(), processes=EVERYBODY, looks=iter(looks))

    def tell(self, *_):
        pass

    def collect(self, *_, **__):
        pair = next(self.looks)
        return {0: (pair[0], False), 1: (pair[1], False), 2: (FINISHED, True)}

    def look(self, *_):
        return [RankStatus(finished=True), RankStatus(), RankStatus()]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Polls follow each other almost at once."""
    monkeypatch.setattr(polls, "FIRST", 0)
    monkeypatch.setattr(polls, "EVERY", 1e-6)


@pytest.mark.parametrize(
    "looks",
    [
        [],
        [(STANDS, STANDS)] * 9 + [(STANDS, BUSY)],
        [(STANDS, STANDS)] * 9 + [(None, STANDS), (STANDS, None)],
        [(STANDS, STANDS)] * 5 + [(STANDS._replace(moves=(2,)), STANDS)],
        [(STANDS, THREAD)] * 20,
    ],
    ids=["all stand", "one is busy", "one does not answer", "one moves", "a thread may act"],
)
def test_a_call_ends_after_ten_polls_in_a_row_without_a_movement(looks):
    ranks = Ranks(looks + [(STANDS, STANDS)] * 13)
    made = polls.Polls(ranks, 1, quiet=10 * polls.EVERY)
    while not made.end({2: ()}, None):
        pass
    assert made.found.kind == "absent" and made.found.finished == [2]
    assert len(list(ranks.looks)) == 2, "the first poll finds it, and ten more find it again"


SAID = "no counted operation has begun and no counted wait has ended for 0 s"


@pytest.mark.parametrize(
    "looks, said",
    [
        ([(BUSY, BUSY)] * 2, [f"{SAID}. rank 0 had finished; ranks 1 and 2 did not answer"]),
        ([(BUSY, None)] * 2, [f"{SAID}, as far as ranks answer. rank 0 "]),
        ([(Snapshot((k,)), None) for k in range(3)], []),
        ([(Snapshot((k,)), BUSY) for k in range(3)], []),
        ([(BUSY, BUSY), (BUSY, BUSY), (Snapshot((1,)), BUSY)], [SAID, ""]),
        ([(BUSY, BUSY), (None, BUSY), (Snapshot((1,)), BUSY)], [SAID, ""]),
    ],
)
def test_a_note_says_where_ranks_are_and_for_how_long(monkeypatch, looks, said):
    monkeypatch.setattr(lines, "STILL", 0.05)
    answers = lambda ranks, *_, **__: {r: (look, False) for r, look in enumerate(next(ranks.looks))}
    monkeypatch.setattr(Ranks, "collect", answers)
    notes = []
    made = polls.Polls(Ranks([(*pair, BUSY) for pair in looks]), 1, notes.append)
    for _ in looks:
        made.end({}, None)
        time.sleep(0.06)
    assert len(notes) == len(said) and all(map(str.startswith, notes, said))


@pytest.mark.waits
def test_without_counting_no_note_speaks_of_movement(monkeypatch):
    notes = []
    monkeypatch.setattr(lines, "STILL", 0.3)
    monkeypatch.setattr(View, "set_places", lambda view, places: notes.append(places))

    def trains(counts):
        for _ in range(10):
            with counting() if counts else torch.enable_grad():
                dist.all_reduce(torch.ones(3), async_op=True).wait()
                time.sleep(0.1)
        dist.barrier()

    with World(2, counted=False) as world:
        for counts in (False, True):
            world.run(trains, counts)
        with pytest.raises(Exception, match="No rank is in a counted collective"):
            world.run(lambda: dist.get_rank() or dist.barrier(), timeout=1)
    assert notes == []


def test_a_line_of_code_is_in_the_note_as_it_is_in_its_file(tmp_path):
    (file := tmp_path / "a.py").write_text("x = 1   # one\n")
    where = {"running": 1, "line": lines.Line(str(file), 1, "f"), "in": None, "waits": False, "may": ""}
    assert failure.standing([RankStatus(where=where)]) == "rank 0 was at a.py, line 1:  x = 1   # one"
