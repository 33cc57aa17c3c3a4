"""Programs that end by themselves are never called hung, whatever helps them; those that hang are proven to,
whatever is idle beside them.

Each of ENDS ends in plain PyTorch too. In each, a rank stands for `LONG` seconds in what
something else than its main thread brings to its end.
"""

import asyncio
import ctypes
import logging
import queue
import sched
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from logging.handlers import QueueListener
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool

import cloudpickle
import hanging
import outside
import pytest
import torch
import torch.distributed as dist

from helpers import World
from helpers.ranks.failure import RankError
from helpers.ranks.output import View

pytestmark = pytest.mark.waits
LONG = 0.8  # seconds: a rank that stands is looked at five times a second

ENDS = {}


def ends(function):
    return ENDS.setdefault(function.__name__, function)


def sends(*_):
    """A message to rank 1, from wherever this is called."""
    dist.send(torch.ones(4), 1)


def sends_later(*_):
    time.sleep(LONG)
    sends()


def meets(helps) -> None:
    """Rank 0 stands until rank 1 answers, and rank 1 until what `helps` has prepared sends to it."""
    x = torch.ones(4)
    if dist.get_rank() == 0:
        kept = helps()
        dist.recv(x, 1)
        return callable(kept) and kept()
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        dist.send(x, 0)


@ends
def timer():
    meets(lambda: threading.Timer(LONG, dist.send, (torch.ones(4), 1)).start())


@ends
def scheduler():
    def helps():
        plan = sched.scheduler()
        plan.enter(LONG, 1, dist.send, (torch.ones(4), 1))
        threading.Thread(target=plan.run).start()

    meets(helps)


@ends
def event_loop():
    def helps():
        loop = asyncio.new_event_loop()
        loop.call_later(LONG, dist.send, torch.ones(4), 1)
        threading.Thread(target=loop.run_forever, daemon=True).start()
        return lambda: loop.call_soon_threadsafe(loop.stop)

    meets(helps)


@ends
def event_loop_called_from_a_timer():
    def helps():
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        threading.Timer(LONG, loop.call_soon_threadsafe, (dist.send, torch.ones(4), 1)).start()
        return lambda: loop.call_soon_threadsafe(loop.stop)

    meets(helps)


@ends
def pool_of_threads_when_done():
    meets(lambda: ThreadPoolExecutor(1).submit(time.sleep, LONG).add_done_callback(sends))


@ends
def pool_of_processes_when_done():
    def helps():
        pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
        pool.submit(time.sleep, LONG).add_done_callback(sends)
        return pool.shutdown

    meets(helps)


@ends
def older_pool_when_done():
    def helps():
        pool = get_context("fork").Pool(1)
        pool.apply_async(time.sleep, (LONG,), callback=sends)
        return pool.terminate

    meets(helps)


@ends
def older_pool_of_threads_when_done():
    def helps():
        pool = ThreadPool(1)
        pool.apply_async(time.sleep, (LONG,), callback=sends)
        return pool.terminate

    meets(helps)


@ends
def listener_fed_by_a_timer():
    def helps():
        records, handler = queue.Queue(), logging.Handler()
        handler.handle = sends
        listener = QueueListener(records, handler)
        listener.start()
        threading.Timer(LONG, records.put, (logging.makeLogRecord({}),)).start()
        return listener.stop

    meets(helps)


@ends
def low_level_thread():
    import _thread

    meets(lambda: _thread.start_new_thread(sends_later, ()))


@ends
def thread_of_c():
    def helps():
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        call, thread = kind(lambda _: sends_later()), ctypes.c_ulong()
        ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, call, None)
        return lambda: ctypes.CDLL(None).pthread_join(thread, None) and call

    meets(helps)


@ends
def future_of_a_collective():
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future().then(sends_later) if dist.get_rank() == 0 else work.wait()
    meets(lambda: future)


@ends
def future_of_a_future():
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if dist.get_rank() == 0:
        first = work.get_future().then(lambda _: time.sleep(LONG))
        first.add_done_callback(sends)
    else:
        work.wait()
    meets(lambda: None)


@ends
def rank_that_has_finished():
    if dist.get_rank() == 0:
        threading.Timer(LONG, dist.send, (torch.ones(4), 1)).start()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@ends
def thread_that_is_woken_later():
    def helps():
        event = threading.Event()
        threading.Thread(target=lambda: (event.wait(), sends())).start()
        threading.Timer(LONG, event.set).start()

    meets(helps)


@ends
def thread_that_wakes_the_main_one():
    if dist.get_rank() == 0:
        event = threading.Event()
        threading.Timer(LONG, event.set).start()
        event.wait()
        sends()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@ends
def callback_that_wakes_the_main_thread():
    event, work = threading.Event(), dist.all_reduce(torch.ones(4), async_op=True)
    if dist.get_rank() == 0:
        future = work.get_future().then(lambda _: (time.sleep(LONG), event.set()))
        event.wait()
        future.wait()
        sends()
    else:
        work.wait()
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@ends
def signal_that_wakes_the_main_thread():
    if dist.get_rank() == 0:
        event = threading.Event()
        before = signal.signal(signal.SIGALRM, lambda *_: event.set())
        signal.setitimer(signal.ITIMER_REAL, LONG)
        event.wait()
        signal.signal(signal.SIGALRM, before)
    dist.barrier()


@ends
def messages_from_anybody():
    """The second one is on its way while all stand, and the third is sent by a timer."""
    x = torch.ones(4)
    if dist.get_rank() == 0:
        works = [dist.irecv(x.clone()) for _ in range(2)]
        time.sleep(LONG)
        for work in works:
            work.wait()
        dist.recv(x)
    elif dist.get_rank() == 1:
        for _ in range(2):
            dist.isend(x, 0).wait()
        threading.Timer(LONG, dist.send, (x, 0)).start()
    dist.barrier()


@ends
def message_to_anybody_and_one_to_be_told_from_it():
    x = torch.ones(4)
    if dist.get_rank() == 0:
        early = dist.irecv(x.clone(), 1)
        time.sleep(LONG)
        dist.recv(x)
        early.wait()
    elif dist.get_rank() == 1:
        dist.send(x, 0)
        dist.send(x, 0)


@ends
def limit_of_a_wait():
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.irecv(torch.ones(4), 1).wait(timedelta(seconds=LONG))


@ends
def limit_of_one_call():
    x, group, other = torch.ones(4), dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=LONG)
        with pytest.raises(RuntimeError):
            group.allreduce([x], options).wait()
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=other)


@ends
def limit_that_is_set_later():
    from torch.distributed.distributed_c10d import _set_pg_timeout

    x, group, other = torch.ones(4), dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)
        _set_pg_timeout(timedelta(seconds=LONG), group)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(x, group=group)
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=other)


@ends
def group_that_comes_again(folder):
    """Rank 0 has called one collective more before: numbers would part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    for again in range(2):
        if rank == 0:
            time.sleep(LONG)
        dist.init_process_group("gloo", init_method=f"file://{folder}/{again}", rank=rank, world_size=size)
        if again == 0:
            dist.barrier()
            dist.destroy_process_group()
    if rank == 0:
        time.sleep(LONG)
    dist.all_gather_object([None] * size, rank)


@ends
def backend_called_by_itself():
    """What rank 0 sends passes no operator; then it stands."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    x = torch.ones(4)
    if dist.get_rank() == 0:
        work = backend.send([x], 1, 7)
        dist.recv(x, 1)
        work.wait()
    elif dist.get_rank() == 1:
        time.sleep(LONG)
        dist.recv(x, 0, tag=7)
        dist.send(x, 0)


cloudpickle.register_pickle_by_value(outside)
ENDS |= outside.ENDS


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_by_itself_is_never_called_hung(world, name, tmp_path):
    given = [str(tmp_path)] if name == "group_that_comes_again" else []
    world.run(ENDS[name], *given)


cloudpickle.register_pickle_by_value(hanging)


def is_proven(world, function, *args) -> RankError:
    with pytest.raises(RankError) as caught:
        world.run(function, *args, timeout=8)
    assert caught.value.kind == "deadlock", caught.value
    return caught.value


@pytest.fixture(scope="module")
def alone():
    """A world in which no program of ENDS has run: a thread that one left would forbid a proof, rightly."""
    with World(4) as made:
        yield made


@pytest.mark.parametrize("name", hanging.HANGS)
def test_what_can_never_go_on_is_proven(alone, name):
    is_proven(alone, hanging.HANGS[name])


@pytest.mark.parametrize("name", hanging.NOTED)
def test_beside_what_may_help_nothing_is_proven(world, name):
    with pytest.raises(RankError) as caught:
        world.run(hanging.NOTED[name], timeout=1)
    assert caught.value.kind == "timeout" and "No rank can" not in str(caught.value)
    if name in hanging.REASONS:
        assert "That is no proof of a hang: rank 0 has a" in str(caught.value)


ONE_IN_THREE = [
    pytest.param(name, marks=pytest.mark.exhaustive if i % 3 else pytest.mark.slow)
    for i, name in enumerate(hanging.PROGRAMS)
]


@pytest.mark.parametrize("name", ONE_IN_THREE)
def test_each_hang_is_told_long_before_its_timeout(name, monkeypatch):
    """By a proof, or by a note of where the ranks are."""
    notes = []
    monkeypatch.setattr(View, "stands", lambda view, places: notes.append(places))
    with World(4) as world, pytest.raises(RankError) as caught:
        world.run(hanging.PROGRAMS[name], timeout=15)
    is_proven = caught.value.kind == "deadlock"  # perhaps when what runs beside has ended
    assert is_proven or name not in hanging.HANGS and any("rank" in places for places in notes), notes
