"""Programs that end by themselves although every main thread waits. What ends the wait is outside the main
threads: another thread, a callback, a time limit, or a connection that another rank closes. In plain PyTorch
each program of ENDS ended in each of five runs. A World waits for longer than two seconds for none of them.
"""

import asyncio
import functools
import signal
import threading
import time
from _thread import start_new_thread
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from tqdm import tqdm

LONG = 3.0  # seconds; a World ends a call after two seconds in which nothing moves
ENDS = {}  # name -> program


def ends(function):
    """Add a program to ENDS."""
    return ENDS.setdefault(function.__name__, function)


def sends(*_):
    """Send a message to rank 1, from the thread or callback that calls this."""
    dist.send(torch.ones(4), 1)


def sends_later(*_):
    time.sleep(LONG)
    sends()


def by(helps):
    """Add a program to ENDS. Rank 0 calls `helps`, which starts something that later sends to rank 1. Then
    rank 0 waits for a message from rank 1, which sends it once it has received the first one.
    """
    ENDS[helps.__name__] = functools.partial(_meets, helps)
    return helps


def _meets(helps) -> None:
    """Ranks 0 and 1 as `by` describes."""
    x = torch.ones(4)
    if dist.get_rank() == 0:
        kept = helps()
        dist.recv(x, 1)
        return callable(kept) and kept()
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        dist.send(x, 0)


def when_it_has_ended(leaves):
    """Add a program as `by` does. `leaves` gets the future of a collective that rank 1 calls late."""
    ENDS[leaves.__name__] = functools.partial(_follows, leaves)
    return leaves


def _follows(leaves) -> None:
    """Ranks 0 and 1 as `when_it_has_ended` describes."""
    time.sleep(LONG / 2 if dist.get_rank() == 1 else 0)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    kept = leaves(work.get_future()) if dist.get_rank() == 0 else work.wait()
    _meets(lambda: kept)


# -- by a thread, a process or a callback ---------------------------------------------------------


@by
def timer():
    threading.Timer(5, sends).start()


@by
def thread():
    threading.Thread(target=sends_later).start()


@by
def event_loop():
    loop = asyncio.new_event_loop()
    loop.call_later(LONG, lambda: (sends(), loop.stop()))
    threading.Thread(target=loop.run_forever).start()


@by
def display_of_a_bar():
    """The monitor, a thread of tqdm's, refreshes a bar that has been still for a while."""

    class Bar(tqdm):
        def refresh(self, *args, **kwargs):
            if threading.current_thread() is self.monitor:
                sends()

    Bar.monitor_interval = LONG
    bar = Bar(total=9, miniters=5, maxinterval=0.1)
    return bar.close


@by
def loader():
    """A worker of a data loader takes its time, and the main thread waits for it, in Python."""

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            time.sleep(LONG)
            return i

    list(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
    sends()


@by
def signal_handler():
    """The handler runs because the main thread waits in Python."""
    signal.signal(signal.SIGALRM, sends)
    signal.setitimer(signal.ITIMER_REAL, 5)
    signal.pause()


@by
def long_product():
    until, x = time.monotonic() + LONG, torch.ones(400, 400)
    while time.monotonic() < until:
        x = x @ x / 400
    sends()


@by
def pool_of_processes_when_done():
    pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
    pool.submit(time.sleep, LONG).add_done_callback(sends)
    return pool.shutdown


@when_it_has_ended
def future_of_a_collective(future):
    return future.then(sends_later)


@when_it_has_ended
def future_of_a_future(future):
    first = future.then(lambda _: time.sleep(LONG))
    first.add_done_callback(sends)
    return first


@when_it_has_ended
def thread_that_has_the_name_of_gloos(future):
    return future.then(lambda _: start_new_thread(sends_later, ()))


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
def rank_that_has_finished():
    if dist.get_rank() == 0:
        timer()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@ends
def callback_of_backward_beside_ddp():
    """Rank 0's own callback runs after the callback that starts DDP's wait, and sends to rank 1."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    later = lambda *_: torch.autograd.Variable._execution_engine.queue_callback(sends_later)
    if dist.get_rank() == 0:
        next(model.parameters()).register_post_accumulate_grad_hook(later)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)
    model(torch.ones(1, 2)).sum().backward()


@ends
def hook_of_ddp_that_calls_more_when_a_part_has_ended():
    def hook(state, bucket):
        time.sleep(LONG if dist.get_rank() == 1 else 0)
        more = lambda _: (time.sleep(LONG), dist.all_reduce(bucket.buffer()), bucket.buffer())[-1]
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(more)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()


# -- by a message that is not recorded, a limit, or an error --------------------------------------


@ends
def messages_from_anybody():
    """The second message is on its way while all ranks wait. A timer sends the third."""
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
def views_of_one_buffer():
    """A receive into one half of a buffer ends after a functional collective on the other half."""
    some, x = dist.new_group([0, 2, 3]), torch.zeros(8)
    late = LONG if dist.get_rank() == 2 else 0
    work = dist.irecv(x[4:], 1) if dist.get_rank() == 0 else None
    if dist.get_rank() != 1:
        time.sleep(late)
        half = torch.ops._c10d_functional.all_reduce_(x[:4], "sum", some.group_name)
        torch.ops._c10d_functional.wait_tensor(half)
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        work.wait()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)
        dist.send(torch.ones(4), 0)


@ends
def limit_of_a_group_while_all_wait():
    """Rank 0's collective fails after 4 s. Then it sends to rank 1, which has waited for that."""
    group = dist.new_group([0, 2], timeout=timedelta(seconds=4))
    if dist.get_rank() == 0:
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(4), group=group)
        sends()
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


@ends
def monitored_barrier():
    """A barrier with a limit of its own fails, and all ranks continue."""
    with suppress(RuntimeError):
        if dist.get_rank() != 1:
            dist.monitored_barrier(timeout=timedelta(seconds=LONG))


@ends
def limit_of_a_wait():
    if dist.get_rank() == 0:
        with suppress(RuntimeError):
            dist.irecv(torch.ones(4), 1).wait(timedelta(seconds=LONG))


def _fails_in(sets) -> None:
    """A limit ends rank 0's collective, which rank 1 does not call. Then both call another group's."""
    x, group, other = torch.ones(4), dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)
        calls = sets(group)
        if dist.get_rank() == 0:
            with suppress(RuntimeError):
                calls(x)
        dist.all_reduce(x, group=other)


@ends
def limit_of_a_group():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=LONG))
    if dist.get_rank() == 1:
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(4), group=group)


@ends
def limit_of_one_call():
    def sets(group):
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=LONG)
        return lambda x: group.allreduce([x], options).wait()

    _fails_in(sets)


@ends
def limit_that_is_set_later():
    def sets(group):
        _set_pg_timeout(timedelta(seconds=LONG), group)
        return lambda x: dist.all_reduce(x, group=group)

    _fails_in(sets)


@ends
def connection_that_another_rank_ends():
    """Rank 0's operation raises when other ranks destroy the group. Then rank 0 sends to rank 1."""
    group, x = dist.new_group([0, 1, 2, 3]), torch.ones(4)
    if dist.get_rank() == 0:
        with suppress(RuntimeError):
            dist.gather(x, [torch.ones(4) for _ in range(4)], group=group)
        sends()
    elif dist.get_rank() == 1:
        dist.recv(x, 0)
    else:
        time.sleep(LONG)
        dist.destroy_process_group(group)


@ends
def check_that_finds_two_collectives():
    """PyTorch's debug level DETAIL checks each collective first, so both ranks raise, and continue."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group, x = dist.new_group(timeout=timedelta(seconds=20)), torch.ones(2)
    dist.set_debug_level(before)
    if dist.get_rank() == 1:
        time.sleep(LONG)
    with suppress(RuntimeError):
        dist.all_reduce(x, group=group) if dist.get_rank() else dist.broadcast(x, 0, group=group)


@ends
def group_that_comes_again(folder):
    """A new group starts with numbers that differ: rank 0 has called one collective more in the old group."""
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
    """Rank 0 sends by the backend itself, so no operator of PyTorch is called. Then the rank waits."""
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
