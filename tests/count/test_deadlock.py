"""`count.deadlock.read` says which rank waits for which, from the operations that they have started."""

import os
import random
import time

import programs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import World, draw
from helpers.ranks import current
from helpers.ranks.failure import RankError
from three_axes.count.deadlock import read
from three_axes.count.moves import Channel, Moves, Operation, Snapshot, Waiting
from three_axes.paper.collectives import needs

PROGRAMS = int(os.environ.get("THREE_AXES_PROGRAMS", 100))  # random programs to check
ALL = Channel("collective", "world", (0, 1, 2))
PAIR = Channel("collective", "of two", (0, 1))


def message(kind, source, target, tag=0):
    return Channel(kind, "world", (0, 1, 2), source, target, tag)


def rank(*begun, stands=None, needs=(), every=True, signature="all_reduce of float32[3]"):
    """The state of a rank that has started operations on the channels `begun`. It waits for those at the
    places `stands`, for all of them or (`every` false) for any. If `stands` is None, it has ended.
    """
    moves = Moves()
    operations = [Operation(channel, moves.begin(channel, signature), needs) for channel in begun]
    waits = None if stands is None else Waiting(tuple(operations[i] for i in stands), every)
    return Snapshot((), waits, stands is None, dict(moves.begun))


def test_a_reading_says_which_rank_waits_for_which():
    sends = [rank(message("send", r, (r + 1) % 3), stands=[0], needs=((r + 1) % 3,)) for r in range(3)]
    found = read(sends)
    assert (found.kind, found.ranks) == ("cycle", [0, 1, 2])
    found.lines = {0: 4, 1: 4}
    assert str(found) == (
        "rank 0 waits to send to rank 1 (line 4); rank 1 waits to send to rank 2 (line 4); rank 2 waits to"
        " send to rank 0: everybody sends before anybody receives."
    )
    receives = [rank(message("recv", 1 - r, r), stands=[0], needs=(1 - r,)) for r in range(2)]
    end = "rank 1 waits to receive from rank 0: everybody receives before anybody sends."
    assert str(read(receives)).endswith(end)
    other = [rank(PAIR, stands=[0], needs=(1,)), rank(message("recv", 0, 1), stands=[0], needs=(0,))]
    assert str(read(other)) == (
        "rank 0 waits to meet in all_reduce of float32[3] with rank 1; rank 1 waits to receive from rank 0:"
        " each waits for the next."
    )


def test_a_reading_says_why_operations_never_match():
    def words(*channels):
        return str(read([rank(c, stands=[0], needs=(1 - r,)) for r, c in enumerate(channels)]))

    sends, receives = message("send", 0, 1), message("recv", 0, 1)
    never = "these never match, because they differ in"
    assert words(sends._replace(tag=7), receives).endswith(f"receive from rank 0: {never} tag.")
    assert words(sends._replace(group="pair", members=(0, 1)), receives).endswith(f"{never} group.")
    assert words(PAIR, PAIR._replace(group="another")).endswith(f"with rank 0: {never} group.")
    assert words(sends, message("send", 1, 0)).endswith("everybody sends before anybody receives.")


def test_only_the_smallest_set_of_ranks_is_named():
    looks = [
        rank(ALL, stands=[0], needs=(1, 2)),
        rank(message("recv", 2, 1), stands=[0], needs=(2,)),
        rank(message("recv", 1, 2), stands=[0], needs=(1,)),
    ]
    for first in (looks[0], rank(message("recv", 1, 0), stands=[0], needs=(1,))):
        found = read([first, *looks[1:]])
        assert found.ranks == [1, 2] and {wait.rank for wait in found.waits} == {1, 2}
    of_five = lambda r, other: Channel("recv", "world", (0, 1, 2, 3, 4), other, r, 0)
    waits_for = lambda r, other: rank(of_five(r, other), stands=[0], needs=(other,))
    of_three, of_two = [waits_for(r, (r + 1) % 3) for r in range(3)], [waits_for(3, 4), waits_for(4, 3)]
    assert read(of_three + of_two).ranks == [3, 4]


def test_a_rank_that_has_finished_never_comes():
    stuck = rank(ALL, ALL, stands=[1], needs=(0, 1))
    found = read([rank(ALL), rank(ALL), stuck])
    assert (found.kind, found.ranks) == ("absent", [2])
    assert str(found) == "rank 2 waits for ranks 0 and 1, which did not come: they have finished."
    assert read([rank(ALL), rank(ALL), rank(ALL, stands=[0], needs=(0, 1))]) is None


def test_unequal_collectives_are_read_only_if_all_their_ranks_wait():
    meets = [
        rank(ALL, stands=[0], needs=(1, 2)),
        rank(ALL, stands=[0], needs=(0, 2), signature="barrier"),
        rank(ALL, stands=[0], needs=(0, 1)),
    ]
    found = read(meets)
    assert (found.kind, found.ranks) == ("disagree", [0, 1])
    assert "number 1 of their group: rank 0 called all_reduce of float32[3], rank 1 barrier." in str(found)
    for busy in (None, Snapshot(()), meets[2]._replace(may_end="has a limit")):
        assert read([*meets[:2], busy]) is None
    told = [
        rank(message("send", 0, 1), stands=[0], needs=(1,), signature="8 float32"),
        rank(message("recv", 0, 1), stands=[0], needs=(0,), signature="16 float32"),
    ]
    assert "do not agree on message number 1 of theirs: rank 0 passed 8" in str(read(told, course=True))
    assert read(told) is None, "PyTorch allows it, or raises an error"


def test_a_receive_from_any_rank_may_have_taken_the_message_that_seems_not_to_fit():
    takes = message("recv_any", None, 1)
    looks = [
        rank(message("send", 0, 1), stands=[0], needs=(1,), signature="8 float32"),
        rank(takes, message("recv", 0, 1), stands=[1], needs=(0,), signature="16 float32"),
    ]
    assert read(looks) is read(looks, course=True) is None


@pytest.mark.parametrize(
    "looks",
    [
        [rank(ALL, stands=[0], needs=(1, 2)), rank(), None],
        [
            rank(PAIR, message("recv", 1, 0), stands=[0, 1], needs=(1,), every=False),
            rank(PAIR, PAIR, stands=[1], needs=(0,)),
        ],
    ],
    ids=["one was not seen", "one of two may end"],
)
def test_a_wait_that_may_still_end_has_no_reading(looks):
    assert read(looks) is None


@settings(max_examples=PROGRAMS)
@given(st.integers(0, 2**32))
def test_the_reading_is_right_in_every_state_of_random_programs(seed):
    programs.check(programs.random_program(random.Random(seed)))


@pytest.fixture
def sooner(monkeypatch):
    """A hang ends its call after three polls: what is tested is not how long it takes."""
    monkeypatch.setattr(
        World, "quiet", property(lambda world: 0.4, lambda world, seconds: None), raising=False
    )


def without(op: str, root: int, missing: int) -> None:
    """Call a collective on all ranks but `missing`."""
    me, n = dist.get_rank(), dist.get_world_size()
    x, parts = torch.ones(100), [torch.empty(100) for _ in range(n)]
    calls = {
        "broadcast": lambda: dist.broadcast(x, root),
        "reduce": lambda: dist.reduce(x, root),
        "gather": lambda: dist.gather(x, parts if me == root else None, root),
        "scatter": lambda: dist.scatter(x, parts if me == root else None, root),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(100), x),
    }
    if me != missing:
        calls[op]()


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter", "all_reduce", "all_to_all"])
def test_which_ranks_end_a_collective_without_a_missing_rank(world, op, sooner):
    for root in (0, 2):
        for missing in range(4):
            with pytest.raises(RankError) as caught:
                world.run(without, op, root, missing)
            left = {r for r, seen in enumerate(caught.value.seen) if seen.finished}
            stuck = {r for r in range(4) if missing in needs(op, 4, r, root, 100, held=True)}
            assert caught.value.kind == "deadlock" and left == set(range(4)) - stuck, (root, missing)


def test_the_picture_says_what_the_reading_says(world):
    with pytest.raises(RankError) as caught:
        world.run(without, "gather", 0, 3)
    assert draw.waiting(caught.value).alt == f"Who waits for whom. {caught.value.deadlock}"
    assert "rank 0 waits for rank 3, which did not come" in str(caught.value.deadlock)


def test_nccl_keeps_a_message_and_gloo_does_not():
    assert needs("send", 4, 0, 1, 100, held=True) == [1] and needs("send", 4, 0, 1, 100, held=False) == []
    assert needs("broadcast", 4, 1, 0, 100, held=False) == [0] == needs("recv", 4, 1, 0, 100, held=False)
    of_all = needs("all_reduce", 3, 1, None, 100, held=False), needs("barrier", 3, 1, None, None, False)
    assert of_all == ([0, 2], [0, 2])
    assert needs("recv", 4, 0, None, 100, True) == needs("all_reduce", 4, 0, None, 0, True) == []
    assert needs("reduce", 4, 1, 0, 24, True) == [] and needs("reduce", 4, 1, 0, 25, True) == [0, 2, 3]


def received_by_nobody():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(3), 1)


def sent_by_nobody():
    if dist.get_rank() == 0:
        dist.irecv(torch.ones(3), 1)
        dist.barrier()
    else:
        time.sleep(1)
        dist.barrier()


def called_by_one():
    if dist.get_rank() == 3:
        dist.all_reduce(torch.ones(3), async_op=True)


@pytest.mark.parametrize("fn", [received_by_nobody, sent_by_nobody, called_by_one])
def test_an_operation_that_no_rank_waits_for_stops_no_rank(world, fn, capsys):
    """The program ends in PyTorch alone, too."""

    def run():
        fn()
        return 7

    assert world.run(run) == [7] * 4
    said = capsys.readouterr().out
    assert f"rank {3 * (fn is called_by_one)} began" in said and "cannot end, so it was given up" in said
    assert world.run(lambda: dist.get_world_size()) == [4] * 4
    world.run(lambda: dist.all_reduce(torch.ones(3)))
    assert "given up" not in capsys.readouterr().out


def waited_for_beside_it():
    if dist.get_rank() == 0:
        dist.irecv(torch.ones(3), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0)


def test_an_operation_without_a_wait_hides_no_hang(world):
    with pytest.raises(RankError) as caught:
        world.run(waited_for_beside_it)
    assert caught.value.kind == "deadlock" and 1 in caught.value.ranks


def begins_late():
    """Make rank 1 begin the next call 1 s late. Until then its last collective is of this call."""
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        recorder = current.rank.recorder
        start = recorder.start
        recorder.start = lambda: (setattr(recorder, "start", start), time.sleep(1), start())


def test_a_rank_that_has_not_begun_the_call_is_not_judged_by_the_one_before(world):
    world.run(begins_late)
    assert world.run(lambda: dist.all_reduce(torch.ones(4))) is not None
