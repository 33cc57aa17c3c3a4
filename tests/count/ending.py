"""Programs that end by themselves although every main thread waits. What ends the wait is outside the main
threads: another thread, a callback, a time limit, or a connection that another rank closes. In plain PyTorch
each program of ENDS ended in each of five runs. A World waits for longer than two seconds for none of them.
"""

import functools
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

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


# -- by a thread, a process or a callback ---------------------------------------------------------


@by
def timer():
    threading.Timer(5, sends).start()


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


@ends
def callback_of_a_future():
    """A thread of PyTorch's calls it when the collective, to which rank 1 comes late, has ended."""
    time.sleep(LONG / 2 if dist.get_rank() == 1 else 0)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    kept = work.get_future().then(sends_later) if dist.get_rank() == 0 else work.wait()
    _meets(lambda: kept)


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
def message_from_anybody():
    """Which receive takes the message is not known, so nobody is read to wait in vain for the second."""
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
def limit_of_a_wait():
    if dist.get_rank() == 0:
        with suppress(RuntimeError):
            dist.irecv(torch.ones(4), 1).wait(timedelta(seconds=LONG))


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
