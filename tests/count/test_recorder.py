"""The recorder of collectives, without ranks. The tests make the calls that the interposer (which replaces
PyTorch's functions) would make, so every number is known.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from _thread import start_new_thread
from types import SimpleNamespace

import pytest
import torch

from three_axes.count import meter, moves, threads, wire
from three_axes.count.interpose import Call
from three_axes.count.meter import Recorder
from three_axes.count.moves import Channel, Operation, Waiting
from three_axes.count.operators import InBatch, must_send

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

    def forget(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def around(monkeypatch):
    """The recorder's surroundings: a clock that the test sets, and an interposer that replaces nothing."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    nothing = lambda one: None
    interposer = SimpleNamespace(add=nothing, remove=nothing, fabric=None, wait_for=Work.wait)
    interposer.axes, interposer.beside = SimpleNamespace(), None
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
    monkeypatch.setattr(threads, "is_in_backward", lambda: True)
    recorder = Recorder()
    of_all = Channel("collective", "of two", (4, 5))
    given = torch.ones(1)
    works = [issue(recorder, one) for one in (call("all_gather"), call(), call(result=given))]
    recorder.waits(works[1])
    first = recorder.moves.snapshot()
    assert first.waiting == Waiting((Operation(of_all, 2, (5,)),)) and first.why == ""
    assert [operation.number for operation in first.open] == [1, 3]
    recorder.waited(works[1], 0.0)
    assert recorder.moves.snapshot().waiting is None and recorder.moves.snapshot().moves == first.moves + 1
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
    assert "a limit of less than a minute" in recorder.moves.snapshot().why


def test_a_collective_that_pytorch_refused_has_not_begun(around):
    recorder = Recorder()
    of_all = Channel("collective", "of two", (4, 5))
    issue(recorder, call("all_gather"))
    recorder.begins(call())
    recorder.refused(call())
    assert recorder.moves.begun[of_all].count == 1
    issue(recorder, call("barrier", first=None))
    assert [*recorder.moves.begun[of_all].last] == [(1, "all_gather of 100 float32"), (2, "barrier")]


C = ctypes.CDLL(None)


def sleeping_thread_of_c() -> None:
    C.pthread_create(ctypes.byref(ctypes.c_ulong()), None, C.sleep, ctypes.c_void_p(3))


def test_a_thread_from_before_the_recorder_prevents_no_proof(around):
    """Neither a Python thread nor a native thread with the process's name prevents a proof."""
    over = threading.Event()
    python = threading.Thread(target=over.wait)
    python.start(), sleeping_thread_of_c()
    recorder = Recorder()
    recorder.waits(issue(recorder, call()))
    assert recorder.moves.snapshot().why == ""
    over.set(), python.join(20)


def thread(over, name):
    threading.Thread(target=over.wait, args=(20,), name=name).start()


def low_level_thread(over):
    begun = threading.Lock()
    begun.acquire()
    start_new_thread(lambda: (begun.release(), over.wait(20)), ())
    begun.acquire(timeout=20)


def handler_of_c(*_):
    C.signal.restype = ctypes.c_void_p
    before = C.signal(signal.SIGUSR2, C.getpid)
    return lambda: C.signal(signal.SIGUSR2, ctypes.c_void_p(before))


def handler(*_):
    before = signal.signal(signal.SIGUSR2, print)
    return lambda: signal.signal(signal.SIGUSR2, before)


def timer(*_):
    signal.setitimer(signal.ITIMER_REAL, 100)
    return lambda: signal.setitimer(signal.ITIMER_REAL, 0)


def process(*_):
    """The system cuts the name of this process after 15 bytes, within a character."""
    folder = tempfile.TemporaryDirectory()
    os.symlink(shutil.which("sleep"), program := f"{folder.name}/üüüüüüüü")
    child = subprocess.Popen([program, "20"])
    return lambda: (child.kill(), child.wait(20), folder.cleanup())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere less of it is seen")
@pytest.mark.parametrize(
    "begins, why",
    [
        (lambda over: thread(over, "later"), "has a thread 'later'"),
        (lambda over: thread(over, "three-axes"), "has a thread 'three-axes'"),
        (low_level_thread, "has a thread that Python's threading does not know"),
        (lambda over: sleeping_thread_of_c(), "has a native thread"),
        (process, "has started a process, 'üüüüüüü"),
        (timer, "has set a timer"),
        (handler, "has a handler of SIGUSR2"),
        (handler_of_c, "has a handler of SIGUSR2"),
    ],
)
def test_a_later_thread_timer_handler_or_process_prevents_a_proof(begins, why):
    before, over = threads.Baseline(), threading.Event()
    assert before.since() == ""
    ends = begins(over)
    try:
        assert before.since().startswith(why)
    finally:
        over.set()
        if callable(ends):
            ends()
        until = time.monotonic() + 20
        while before.since() and time.monotonic() < until:  # the next case may get this thread's identity
            time.sleep(0.01)


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


def test_the_last_operations_of_each_channel_are_remembered(around):
    recorder = Recorder()
    issue(recorder, call("send", root=1))
    issue(recorder, call("broadcast", root=1))
    issue(recorder, call("all_to_all"))
    issue(recorder, call("barrier", first=None))
    message, of_all = (Channel("send", "of two", (4, 5), 4, 5), Channel("collective", "of two", (4, 5)))
    begun = recorder.moves.begun
    signatures = ["broadcast of 100 float32 with root 5", "all_to_all", "barrier"]
    assert [begun[of_all].signature(number) for number in range(5)] == [None, *signatures, None]
    assert begun[message].signature(1) == "100 float32"
    for _ in range(moves.KEPT - 2):
        issue(recorder, call())
    recorder.start()  # `count_from_here` does so, at another moment on each rank
    assert begun[of_all].signature(1) is None and begun[of_all].signature(2) == "all_to_all"
    assert begun[of_all].signature(moves.KEPT + 1) == "all_reduce of float32[100]"
    recorder.moves.take_back(of_all)
    assert begun[of_all].count == moves.KEPT and begun[of_all].signature(moves.KEPT + 1) is None


def test_the_box_holds_the_last_collective_for_other_processes(around):
    seen = []
    with tempfile.TemporaryFile() as file:
        recorder = Recorder(box=file.fileno())
        recorder.watch = lambda *calls: seen.append(calls)
        around.clock.now = 3.0
        work = issue(recorder, call(first=(2, 50)))
        assert recorder.pending()["op"] == "all_reduce"
        work.done = True
        assert recorder.pending() is None
        around.interposer.is_issuing = True  # some backends return only after the collective has ended
        assert recorder.pending()["op"] == "all_reduce"
        issue(recorder, call("recv", "pp", root=1, first=(2, 50)))
        text = file.read()
        assert len(text) == meter.BOX_BYTES
        last = json.loads(text.rstrip(b"\0"))
        file_, _, function = last.pop("line")
        assert file_.endswith("test_recorder.py") and function == "issue"
        expected = dict(op="recv", axis="pp", number=2, at=3.0, peer=1, needs=[5], shape=[2, 50])
        channel = ["recv", "of two", [4, 5], 5, 4, 0]
        beside = dict(rank=4, channel=channel, nth=1, signature="100 float32")
        assert last == expected | {"dtype": "float32"} | beside
        issue(recorder, call("broadcast", root=1))
        assert recorder.last["needs"] == [4, 5]
        issue(recorder, call("recv"))  # from any rank
        assert recorder.last["needs"] == [4, 5] and recorder.last["number"] == 4
        issue(recorder, call("barrier"))
        assert recorder.last["shape"] is None is recorder.last["dtype"]
        recorder.start()
        file.seek(0)
        assert file.read() == bytes(meter.BOX_BYTES)
    assert [(made.op, made.root) for (made,) in seen[:2]] == [("all_reduce", None), ("recv", 1)]


def test_an_uneven_all_to_all_keeps_its_own_part():
    assert must_send("alltoall_base_", (0, 0, 0, 0, [1, 3]), 8.0, 2, 0, 0) == 6


def test_a_recorder_that_is_off_counts_nothing(around):
    recorder = Recorder(on=False)
    recorder.sockets.hidden = {"greeted": 900}
    recorder.find_connections(GROUP)
    recorder.spans.append("kept")
    report = recorder.stop()
    assert recorder.sockets.hidden and report.spans == ["kept"] and (report.rows, report.wire) == ([], None)
