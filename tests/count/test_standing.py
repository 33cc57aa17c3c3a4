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
import outside
import pytest
import torch
import torch.distributed as dist

from helpers import World
from helpers.ranks.failure import RankError

pytestmark = pytest.mark.waits
LONG = 0.8  # seconds: a rank that stands is looked at five times a second

ENDS, HANGS = {}, {}


def kept(where):
    return lambda function: where.setdefault(function.__name__, function)


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


@kept(ENDS)
def timer():
    meets(lambda: threading.Timer(LONG, dist.send, (torch.ones(4), 1)).start())


@kept(ENDS)
def scheduler():
    def helps():
        plan = sched.scheduler()
        plan.enter(LONG, 1, dist.send, (torch.ones(4), 1))
        threading.Thread(target=plan.run).start()

    meets(helps)


@kept(ENDS)
def event_loop():
    def helps():
        loop = asyncio.new_event_loop()
        loop.call_later(LONG, dist.send, torch.ones(4), 1)
        threading.Thread(target=loop.run_forever, daemon=True).start()
        return lambda: loop.call_soon_threadsafe(loop.stop)

    meets(helps)


@kept(ENDS)
def event_loop_called_from_a_timer():
    def helps():
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        threading.Timer(LONG, loop.call_soon_threadsafe, (dist.send, torch.ones(4), 1)).start()
        return lambda: loop.call_soon_threadsafe(loop.stop)

    meets(helps)


@kept(ENDS)
def pool_of_threads_when_done():
    meets(lambda: ThreadPoolExecutor(1).submit(time.sleep, LONG).add_done_callback(sends))


@kept(ENDS)
def pool_of_processes_when_done():
    def helps():
        pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
        pool.submit(time.sleep, LONG).add_done_callback(sends)
        return pool.shutdown

    meets(helps)


@kept(ENDS)
def older_pool_when_done():
    def helps():
        pool = get_context("fork").Pool(1)
        pool.apply_async(time.sleep, (LONG,), callback=sends)
        return pool.terminate

    meets(helps)


@kept(ENDS)
def older_pool_of_threads_when_done():
    def helps():
        pool = ThreadPool(1)
        pool.apply_async(time.sleep, (LONG,), callback=sends)
        return pool.terminate

    meets(helps)


@kept(ENDS)
def listener_fed_by_a_timer():
    def helps():
        records, handler = queue.Queue(), logging.Handler()
        handler.handle = sends
        listener = QueueListener(records, handler)
        listener.start()
        threading.Timer(LONG, records.put, (logging.makeLogRecord({}),)).start()
        return listener.stop

    meets(helps)


@kept(ENDS)
def low_level_thread():
    import _thread

    meets(lambda: _thread.start_new_thread(sends_later, ()))


@kept(ENDS)
def thread_of_c():
    def helps():
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        call, thread = kind(lambda _: sends_later()), ctypes.c_ulong()
        ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, call, None)
        return lambda: ctypes.CDLL(None).pthread_join(thread, None) and call

    meets(helps)


@kept(ENDS)
def future_of_a_collective():
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future().then(sends_later) if dist.get_rank() == 0 else work.wait()
    meets(lambda: future)


@kept(ENDS)
def future_of_a_future():
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if dist.get_rank() == 0:
        first = work.get_future().then(lambda _: time.sleep(LONG))
        first.add_done_callback(sends)
    else:
        work.wait()
    meets(lambda: None)


@kept(ENDS)
def rank_that_has_finished():
    if dist.get_rank() == 0:
        threading.Timer(LONG, dist.send, (torch.ones(4), 1)).start()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@kept(ENDS)
def thread_that_is_woken_later():
    def helps():
        event = threading.Event()
        threading.Thread(target=lambda: (event.wait(), sends())).start()
        threading.Timer(LONG, event.set).start()

    meets(helps)


@kept(ENDS)
def thread_that_wakes_the_main_one():
    if dist.get_rank() == 0:
        event = threading.Event()
        threading.Timer(LONG, event.set).start()
        event.wait()
        sends()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@kept(ENDS)
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


@kept(ENDS)
def signal_that_wakes_the_main_thread():
    if dist.get_rank() == 0:
        event = threading.Event()
        before = signal.signal(signal.SIGALRM, lambda *_: event.set())
        signal.setitimer(signal.ITIMER_REAL, LONG)
        event.wait()
        signal.signal(signal.SIGALRM, before)
    dist.barrier()


@kept(ENDS)
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


@kept(ENDS)
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


@kept(ENDS)
def limit_of_a_wait():
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.irecv(torch.ones(4), 1).wait(timedelta(seconds=LONG))


@kept(ENDS)
def limit_of_one_call():
    x, group, other = torch.ones(4), dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=LONG)
        with pytest.raises(RuntimeError):
            group.allreduce([x], options).wait()
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=other)


@kept(ENDS)
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


@kept(ENDS)
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


@kept(ENDS)
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


# -- what hangs ----------------------------------------------------------------------------------


def ring():
    """Everybody receives before anybody sends."""
    dist.recv(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


@kept(HANGS)
def ring_in_threads():
    thread = threading.Thread(target=ring)
    thread.start()
    thread.join()


@kept(HANGS)
def ring_in_a_pool():
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ring).result()


@kept(HANGS)
def two_of_four_beside_one_that_computes():
    rank, until = dist.get_rank(), time.monotonic() + 10
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    while rank >= 2 and time.monotonic() < until:
        torch.ones(100).sum()


@kept(HANGS)
def two_of_four_beside_waits_that_are_not_seen():
    rank = dist.get_rank()
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    elif rank == 2:
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=10))
    else:
        dist.monitored_barrier(timeout=timedelta(seconds=10))


@kept(HANGS)
def barrier_that_is_monitored():
    if dist.get_rank():
        dist.monitored_barrier()


@kept(HANGS)
def main_thread_that_nobody_wakes():
    if dist.get_rank() == 0:
        queue.Queue().get()
    dist.barrier()


@kept(HANGS)
def main_thread_that_nobody_wakes_beside_a_loader():
    """It has a process more that starts workers, and handles the signal of their end."""
    if dist.get_rank() == 0:
        kept = iter(torch.utils.data.DataLoader(torch.arange(9), num_workers=1))
        queue.Queue().get(), next(kept)
    dist.barrier()


@kept(HANGS)
def message_too_few_for_who_takes_them_from_anybody():
    rank, x = dist.get_rank(), torch.ones(4)
    if rank:
        for _ in range(rank):
            dist.send(x, 0)
        dist.barrier()
    for _ in range(7 if rank == 0 else 0):
        dist.recv(x)


@kept(HANGS)
def wait_with_a_long_limit():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(minutes=10))


@kept(HANGS)
def future_waited_for():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


@kept(HANGS)
def call_that_will_never_come():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).get_future().then(sends)
        dist.recv(torch.ones(2), 0)


@kept(HANGS)
def constructor_of_ddp():
    if dist.get_rank():
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


@kept(HANGS)
def buffers_of_ddp():
    """Who validates with the wrapped model broadcasts its buffers."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = torch.nn.parallel.DistributedDataParallel(net)
    with torch.no_grad():
        model(torch.ones(2, 2))
        if dist.get_rank():
            dist.barrier()
        else:
            model(torch.ones(2, 2))


def beside_bars():
    from tqdm import tqdm

    bar = tqdm(range(3), disable=None)
    tqdm.monitor = tqdm.monitor or __import__("tqdm").TMonitor(tqdm, 10)
    return bar


def beside_ipython():
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()


def beside_a_pool_of_threads():
    pool = ThreadPoolExecutor(2)
    return pool, list(pool.map(abs, range(4)))


def beside_an_older_pool_of_threads():
    pool = ThreadPool(2)
    return pool, pool.map(abs, range(4))


def beside_a_pool_of_processes():
    pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
    return pool, list(pool.map(abs, range(4)))


def beside_an_older_pool():
    pool = get_context("fork").Pool(1)
    return pool, pool.map(abs, range(4))


def beside_a_loader():
    loader = iter(torch.utils.data.DataLoader(torch.arange(9), num_workers=1, multiprocessing_context="fork"))
    return loader, next(loader)


def beside_a_loader_that_pins():
    """The thread that a loader has where there is a GPU."""
    from torch.utils.data._utils.pin_memory import _pin_memory_loop

    loaded, over = get_context("fork").Queue(), threading.Event()
    thread = threading.Thread(
        target=_pin_memory_loop, args=(loaded, queue.Queue(), 0, over, None), daemon=True
    )
    return loaded, over, thread.start()


def beside_an_event_loop():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()


def another(waits):
    thread = threading.Thread(target=waits, daemon=True)
    return thread.start()


def beside_who_takes_a_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock, another(lambda: lock.acquire())


def beside_who_is_in_a_lock():
    class Kept:
        lock = threading.RLock()

    Kept.lock.acquire()

    def waits():
        with Kept.lock:
            pass

    return Kept, another(waits)


def beside_who_takes_from_a_queue():
    items = queue.SimpleQueue()
    return items, another(lambda: items.get())


def beside_a_listener():
    listener = QueueListener(queue.Queue(), logging.NullHandler())
    return listener, listener.start()


def beside_a_debugger():
    import debugpy

    debugpy.listen(0)


BESIDE = [function for name, function in list(globals().items()) if name.startswith("beside_")]


def beside(what):
    """A ring, where something that is idle has threads. It stays: its end would be another test."""
    threading.kept = what()
    ring()


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


@pytest.mark.parametrize("name", HANGS)
def test_what_can_never_go_on_is_proven(alone, name):
    error = is_proven(alone, HANGS[name])
    if name.startswith("two"):
        assert error.ranks == [0, 1] and "ranks 0 and 1 can never go on" in str(error)


@pytest.mark.parametrize("what", BESIDE)
def test_it_is_proven_beside_what_is_idle(alone, what):
    is_proven(alone, beside, what)


def test_the_timeout_says_which_thread_forbade_a_proof(world):
    def stands():
        threading.Timer(9, print).start()
        ring()

    with pytest.raises(RankError) as caught:
        world.run(stands, timeout=1)
    assert caught.value.kind == "timeout"
    assert "on rank 0 thread 'Thread-" in str(caught.value) and "All are in" not in str(caught.value)
