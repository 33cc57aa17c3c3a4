"""The recorder of collectives, without ranks. The tests make the calls that the interposer (which replaces
PyTorch's functions) would make, so every number is known.
"""

from types import SimpleNamespace

import pytest
import torch

from three_axes.count import meter, wire
from three_axes.count.interpose import Call
from three_axes.count.meter import Recorder
from three_axes.count.moves import Channel, Operation, Waiting
from three_axes.count.operators import InBatch

# The recorder keeps weak references to groups: a class allows them, a SimpleNamespace does not.
GROUP = type("Group", (), {"group_name": "of two"})()


class Work:
    """A collective that has not ended until `done`."""

    def __init__(self, done: bool = False):
        self.done = done

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True


class Wire:
    """The bytes that the operating system would report. `sent` are those of the known connections; `hidden`
    are added when `refresh` looks for new connections.
    """

    def __init__(self):
        self.sent, self.hidden = {"first": 7}, {}

    def refresh(self) -> None:
        self.sent, self.hidden = self.sent | self.hidden, {}

    def read(self) -> dict:
        return dict(self.sent)

    def total(self) -> int:
        return sum(self.sent.values())

    def carried(self) -> int:
        return 0

    def forget(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def around(monkeypatch):
    """The recorder's surroundings: a clock that the test sets, and an interposer that replaces nothing."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    nothing = lambda one: None
    interposer = SimpleNamespace(add=nothing, remove=nothing, fabric=None, wait_for=Work.wait)
    interposer.axes = SimpleNamespace()
    interposer.is_issuing = interposer.is_capturing = False
    monkeypatch.setattr(meter, "time", clock)
    monkeypatch.setattr(meter, "interposer", interposer)
    monkeypatch.setattr(wire, "Sockets", Wire)
    monkeypatch.setattr(wire, "available", True)
    return SimpleNamespace(clock=clock, interposer=interposer)


def call(op="all_reduce", axis="dp", root=None, first=(100,), device="cpu", **sizes):
    """A call of a collective by rank 4 of ranks 4 and 5. first: the shape of its first tensor."""
    tensor = None if first is None else torch.empty(first, device=device)
    sizes = {"payload": 400, "size": 400, "algorithmic": 600} | sizes
    group = dict(group=GROUP, members=[4, 5], me=0, alone=True, reduces="", tag=0)
    return Call(op=op, axis=axis, root=root, first=tensor, **sizes, **group)


def issue(recorder, call, work=None, sends=0):
    """Start a collective, during which `sends` bytes leave the rank. Returns its Work."""
    work = work or Work()
    recorder.begins(call)
    recorder.begun(call, work)
    recorder.sockets.sent["first"] += sends
    return work


def test_rows_add_up_and_what_overlaps_is_held_at_once(around):
    recorder = Recorder()
    first = issue(recorder, call(), sends=600)
    second = issue(recorder, call(axis="tp", payload=80, size=100, algorithmic=120), sends=30)
    assert not recorder.is_idle()
    around.clock.now = 1.5
    recorder.waited(first, 1.0)
    third = issue(recorder, call(payload=40, size=50, algorithmic=60))
    recorder.waited(third, 1.25)
    second.done = True
    assert recorder.is_idle()
    rows = {row.axis: row for row in recorder.counted_so_far()}
    dp, tp = rows["dp"], rows["tp"]
    assert (dp.calls, dp.payload, dp.algorithmic, dp.members) == (2, 440, 660, (4, 5))
    assert (tp.calls, tp.payload, tp.algorithmic, tp.waited) == (1, 80, 120, 0)
    assert dp.waited == 0.5 + 0.25 and dp.types == {"float32"}
    assert dp.wire is None and tp.wire is None, "they overlapped: only their sum is known"
    report = recorder.stop()
    assert report.wire == {"first": 630} and report.peak_in_flight == 500 and report.late == 0
    assert report.not_waited == 1, "nobody waited for the second"


def test_bytes_belong_to_what_was_alone_under_way(around):
    recorder = Recorder()
    for _ in range(2):
        recorder.waited(issue(recorder, call(), sends=600), 0.0)
    issue(recorder, call("broadcast", "tp", root=0), Work(done=True), sends=50)
    recorder.sockets.hidden = {"made later": 1000}
    assert {row.op: row.wire for row in recorder.counted_so_far()} == {"all_reduce": 1200, "broadcast": 50}
    report = recorder.stop()
    assert report.wire == {"first": 1250, "made later": 1000} and report.peak_in_flight == 400
    assert report.not_waited == 1


def test_bytes_that_form_a_group_belong_to_no_collective(around):
    recorder = Recorder()
    recorder.sockets.hidden = {"greeted": 900}
    recorder.waited(issue(recorder, call(), sends=600), 0.0)
    recorder.find_connections(None)
    recorder.sockets.hidden = {"of a group that is known": 1}
    recorder.find_connections(GROUP)
    (row,) = recorder.counted_so_far()
    assert row.wire == 600 and recorder.sockets.hidden


def test_bytes_that_the_operating_system_does_not_count_are_unknown(around):
    # An emulated network counts the operations that ended too late.
    around.interposer.fabric = SimpleNamespace(late=9)
    recorder = Recorder()
    assert around.interposer.fabric.late == 0
    around.interposer.fabric.late = 3
    recorder.waited(issue(recorder, call(device="meta"), sends=5), 0.0)
    report = recorder.stop()
    assert report.wire is None and report.rows[0].wire is None and report.late == 3
    recorder.start()
    assert recorder.stop().wire == {"first": 0}
    recorder.start()
    recorder.waited(issue(recorder, call("barrier", first=None), sends=5), 0.0)
    assert recorder.stop().rows[0].wire == 5


def test_spans_and_streams_are_kept_once_and_up_to_a_number(around):
    recorder = Recorder(spans=2)
    for k in range(3):
        around.clock.now = 10.0 * k + 1  # a start of 0 would be none
        work = issue(recorder, call(backward=1))
        around.clock.now += 5
        work.done = True
        recorder.waits(None)
        recorder.waited_for_ddp(around.clock.now - 3, 1)
        recorder.waited(work, around.clock.now - 1e-4 / 2)
    report = recorder.stop()
    assert report.spans == [("wait", "all_reduce dp", start, start + 3) for start in (3, 13)]
    assert report.streams == [("comm", "all_reduce dp", start, start + 5) for start in (1, 11)]
    assert report.rows[0].waited == pytest.approx(9 + 3e-4 / 2) and report.peak_in_flight == 400


def test_a_wait_for_a_tensor_is_for_the_first_that_is_under_way(around):
    recorder = Recorder()
    issue(recorder, call("broadcast", root=0), Work(done=True))
    recorder.waits(torch.ones(1))
    recorder.waited_for_tensor(0.5)
    issue(recorder, call("all_gather"))
    issue(recorder, call(backward=1))
    recorder.waits(torch.ones(1))
    around.clock.now = 2.0
    recorder.waited_for_tensor(0.5)
    recorder.waited_for_ddp(1.0, 1)
    waited = {row.op: row.waited for row in recorder.rows.values()}
    assert waited == {"broadcast": 0, "all_gather": 1.5, "all_reduce": 1.0}


def test_a_tensor_may_be_waited_for_after_its_collective_has_ended(around):
    recorder, other = Recorder(), torch.ones(1)
    early, late, never = (call(first=(n,)) for n in (1, 2, 3))
    for one in (early, late, never):
        one.result = torch.ones(1)
        issue(recorder, one, Work(done=True))  # ends before the next begins
    for tensor in (late.result, other, late.result):
        recorder.waits(tensor)
        recorder.waited_for_tensor(0.0)
    assert recorder.not_waited() == 2


def test_unknown_bytes_on_the_wire_are_never_0(around):
    recorder = Recorder()
    work = issue(recorder, call(), sends=10)
    assert [row.wire for row in recorder.counted_so_far()] == [None]
    work.done = True
    assert [row.wire for row in recorder.counted_so_far()] == [10]
    issue(recorder, call(backward=1), sends=7)
    recorder.waited_for_ddp(0.0, 2)  # a wait of another thread
    assert not recorder.is_idle()
    recorder.waited_for_ddp(0.0, 1)
    assert [row.wire for row in recorder.counted_so_far()] == [17], "the Work may complete a moment later"
    issue(recorder, call("broadcast", root=0), sends=10)
    report = recorder.stop()
    assert [row.wire for row in report.rows] == [17, None] and report.wire is None
    assert report.under_way == 1 and report.not_waited == 3, "DDP waits for its bucket in C++"


def test_a_look_has_the_operations_that_the_rank_waits_for(around, monkeypatch):
    monkeypatch.setattr(meter, "_is_in_backward", lambda: True)
    recorder = Recorder()
    of_all = Channel("collective", "of two", (4, 5))
    given = torch.ones(1)
    works = [issue(recorder, one) for one in (call("all_gather"), call(), call(result=given))]
    recorder.waits(works[1])
    first = recorder.moves.snapshot()
    assert first.waiting == Waiting((Operation(of_all, 2, (5,)),)) and first.may_end == ""
    recorder.waited(works[1], 0.0)
    assert recorder.moves.snapshot().waiting is None and recorder.moves.snapshot().moves > first.moves
    for awaited, numbers, every in (
        (torch.ones(1), [1, 3], False),
        (None, [1, 3], False),
        (given, [3], True),
        (None, [1], False),  # a wait for a result is a wait for its collective, even if its Work is not done
    ):
        recorder.waits(awaited)
        seen = recorder.moves.snapshot().waiting
        assert ([operation.number for operation in seen.operations], seen.every) == (numbers, every)
        recorder.waited_for_tensor(0.0)
    works[0].done = True
    assert recorder.is_idle()
    recorder.waits(issue(recorder, call(limit=5.0)))
    assert "a limit of less than a minute" in recorder.moves.snapshot().may_end
    recorder.waits(issue(recorder, call(backend="nccl")))
    assert "another backend than gloo" in recorder.moves.snapshot().may_end
    monkeypatch.setattr(around.interposer, "fabric", SimpleNamespace(holds=lambda: True, late=0))
    recorder.waits(issue(recorder, call()))
    assert "holds back" in recorder.moves.snapshot().may_end
    around.interposer.is_issuing = True
    recorder.begins(call("barrier", first=None))
    assert recorder.moves.awaited(), "some backends block until others have come"


def test_a_collective_that_pytorch_refused_has_not_begun(around):
    recorder = Recorder()
    of_all = Channel("collective", "of two", (4, 5))
    issue(recorder, call("all_gather"))
    recorder.begins(call())
    recorder.refused(call())
    assert recorder.moves.begun[of_all].count == 1
    issue(recorder, call("barrier", first=None))
    assert [*recorder.moves.begun[of_all].last] == [(1, "all_gather of 100 float32"), (2, "barrier")]


def test_the_works_of_a_batch_end_together(around):
    recorder = Recorder()
    for op in ("send", "recv"):
        issue(recorder, call(op, "pp", root=1), InBatch())
    batch = Work()
    recorder.batch_begun(batch)
    around.clock.now = 1.0
    recorder.waited(batch, 0.0)
    assert [row.waited for row in recorder.rows.values()] == [1.0, 0]
    issue(recorder, call(size=700))
    assert recorder.stop().peak_in_flight == 800 and recorder.is_idle()
