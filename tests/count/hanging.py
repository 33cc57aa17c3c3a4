"""Programs that hang for ever, and what may be idle beside them."""

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from logging.handlers import QueueListener
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def ring():
    """Everybody receives before anybody sends."""
    dist.recv(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


def ring_in_threads():
    thread = threading.Thread(target=ring)
    thread.start()
    thread.join()


def ring_in_a_pool():
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ring).result()


def two_of_four_beside_one_that_computes():
    rank, until = dist.get_rank(), time.monotonic() + 10
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    while rank >= 2 and time.monotonic() < until:
        torch.ones(100).sum()


def two_of_four_beside_waits_that_are_not_seen():
    rank = dist.get_rank()
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    elif rank == 2:
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=10))
    else:
        dist.monitored_barrier(timeout=timedelta(seconds=10))


def barrier_that_is_monitored():
    if dist.get_rank():
        dist.monitored_barrier()


def main_thread_that_nobody_wakes():
    if dist.get_rank() == 0:
        queue.Queue().get()
    dist.barrier()


def main_thread_that_nobody_wakes_beside_a_loader():
    """It has a process more that starts workers, and handles the signal of their end."""
    if dist.get_rank() == 0:
        kept = iter(
            torch.utils.data.DataLoader(torch.arange(9), num_workers=1, multiprocessing_context="forkserver")
        )
        queue.Queue().get(), next(kept)
    dist.barrier()


def message_too_few_for_who_takes_them_from_anybody():
    rank, x = dist.get_rank(), torch.ones(4)
    if rank:
        for _ in range(rank):
            dist.send(x, 0)
        dist.barrier()
    for _ in range(7 if rank == 0 else 0):
        dist.recv(x)


def wait_with_a_long_limit():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(minutes=10))


def future_waited_for():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


def call_that_will_never_come():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).get_future().then(print)
        dist.recv(torch.ones(2), 0)


def constructor_of_ddp():
    if dist.get_rank():
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


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


def hook_of_ddp_on_some():
    """A hook of Python's calls the collective, and DDP waits for its future in C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2 if dist.get_rank() else 1):
        model(torch.ones(1, 2)).sum().backward()


def collective_that_is_checked_first():
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.set_debug_level(before)
    for _ in range(2 if dist.get_rank() else 1):
        dist.all_reduce(torch.ones(2), group=group)


def futures_waited_for_together():
    group, x = dist.new_group(), torch.ones(2)
    futures = [dist.all_reduce(x, async_op=True).get_future()]
    if dist.get_rank():
        futures.append(dist.all_reduce(x, group=group, async_op=True).get_future())
    torch.futures.wait_all(futures)


def call_of_several_futures():
    x = torch.ones(2)
    futures = [dist.all_reduce(x, async_op=True).get_future() for _ in range(2 if dist.get_rank() else 1)]
    torch.futures.collect_all(futures).then(lambda them: them.value()).wait()


def beside_bars():
    from tqdm import tqdm

    bar = tqdm(range(3), disable=None)
    tqdm.monitor = tqdm.monitor or __import__("tqdm").TMonitor(tqdm, 10)
    return bar


def beside_a_librarys_bar():
    from huggingface_hub.utils import tqdm

    return tqdm(range(3), disable=None), beside_bars()


def beside_a_profiler_that_has_ended():
    """It leaves a thread of C's behind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(2).sum()


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


def _another(waits):
    thread = threading.Thread(target=waits, daemon=True)
    return thread.start()


def beside_who_takes_a_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock, _another(lambda: lock.acquire())


def beside_who_is_in_a_lock():
    class Kept:
        lock = threading.RLock()

    Kept.lock.acquire()

    def waits():
        with Kept.lock:
            pass

    return Kept, _another(waits)


def beside_who_takes_from_a_queue():
    items = queue.SimpleQueue()
    return items, _another(lambda: items.get())


def beside_whose_whole_body_is_a_method_of_a_queue():
    return _another(queue.SimpleQueue().get)


def beside_a_listener():
    listener = QueueListener(queue.Queue(), logging.NullHandler())
    return listener, listener.start()


def beside_a_debugger():
    import debugpy

    debugpy.listen(0)


PROGRAMS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__ and not name.startswith("_")
}
BESIDE = {name: function for name, function in PROGRAMS.items() if name.startswith("beside_")}
HANGS = {name: function for name, function in PROGRAMS.items() if name not in BESIDE}
