"""Programs that hang for ever. A World ends those of HANGS after two seconds without a movement; of NOTED it
only prints each rank's place, because something that it does not know may still free a rank.
"""

import asyncio
import queue
import subprocess
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor
from tqdm import tqdm


def ring():
    """Each rank receives before any rank sends."""
    dist.recv(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


def everybody_sends():
    dist.send(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


def two_orders():
    """Two groups of the same ranks, which rank 0 uses in another order."""
    groups, x = [dist.new_group(), dist.new_group()], torch.ones(2)
    for group in groups if dist.get_rank() else groups[::-1]:
        dist.all_reduce(x, group=group)


def two_kinds():
    dist.all_reduce(torch.ones(2)) if dist.get_rank() else dist.barrier()


def two_roots():
    dist.broadcast(torch.ones(2), dist.get_rank() % 2)


def absent_rank():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2))


def ring_in_threads():
    thread = threading.Thread(target=ring)
    thread.start()
    thread.join()


def two_of_four_beside_two_that_compute():
    rank, until = dist.get_rank(), time.monotonic() + 10
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    while rank >= 2 and time.monotonic() < until:
        torch.ones(100).sum()


def barrier_that_is_monitored():
    if dist.get_rank():
        dist.monitored_barrier()


def main_thread_that_nobody_wakes():
    if dist.get_rank() == 0:
        queue.Queue().get()
    dist.barrier()


def message_too_few_for_who_takes_them_from_anybody():
    rank, x = dist.get_rank(), torch.ones(4)
    if rank:
        for _ in range(rank):
            dist.send(x, 0)
        dist.barrier()
    for _ in range(7 if rank == 0 else 0):
        dist.recv(x)


def batch_of_which_one_message_is_missing():
    """Only a rank that waits for a message of the batch learns that the message has arrived."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ops = [dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % n)]
    if rank != 1:
        ops.append(dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % n))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


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


def buffers_of_ddp():
    """A rank that validates with the wrapped model broadcasts its buffers."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = torch.nn.parallel.DistributedDataParallel(net)
    with torch.no_grad():
        model(torch.ones(2, 2))
        if dist.get_rank():
            dist.barrier()
        else:
            model(torch.ones(2, 2))


def two_halves():
    """Ranks 0 and 1 each wait in their own group for a rank that does not call that group's collective."""
    halves = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    x = torch.ones(2)
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=halves[dist.get_rank()])


def waits_in_backward():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank():
        loss.backward()


def gathers_by_functions():
    if dist.get_rank():
        print(all_gather_tensor(torch.ones(2), 0, dist.group.WORLD).sum())


def second_forward_of_ddp():
    """In the second forward of DDP the ranks agree on the buckets, in C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)) if dist.get_rank() else dist.barrier()


def _loader():
    kept = iter(torch.utils.data.DataLoader(torch.arange(9), num_workers=1, multiprocessing_context="fork"))
    next(kept)
    return kept


def _bar():
    return tqdm(total=9)


def _heartbeat():
    over = threading.Event()
    threading.Thread(target=over.wait, args=(SOON,), name="heartbeat").start()


def _event_loop():
    loop = asyncio.new_event_loop()
    loop.call_later(SOON, loop.stop)
    threading.Thread(target=loop.run_forever).start()


SOON = 8  # seconds after which each of BESIDE ends; until then it is idle
BESIDE = {
    "a timer": lambda: threading.Timer(SOON, print).start(),
    "a loader": _loader,
    "a bar": _bar,
    "a heartbeat": _heartbeat,
    "an event loop": _event_loop,
    "a process": lambda: subprocess.Popen(["sleep", str(SOON)]),
}


def _ring_beside(begins):
    """`ring`, while something else runs on the rank."""
    kept = begins()
    ring()
    del kept


PROGRAMS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__ and not name.startswith("_")
} | {f"ring beside {what}": partial(_ring_beside, begins) for what, begins in BESIDE.items()}
# Where a thread of the program's runs Python, it may still end the wait.
THREADS = [
    "ring_in_threads",
    *(f"ring beside {what}" for what in BESIDE if what not in ("a bar", "a process")),
]
# The recorder cannot know what these wait for: C++ code, a lock or a future.
UNSEEN = """two_of_four_beside_two_that_compute barrier_that_is_monitored main_thread_that_nobody_wakes
future_waited_for second_forward_of_ddp"""
NOTED = THREADS + UNSEEN.split()
# name -> words that the message must hold; the others have the usual ones
HANGS = dict.fromkeys((name for name in PROGRAMS if name not in NOTED), "wait") | {
    "ring": "rank 0 waits to receive from rank 1",
    "everybody_sends": "everybody sends before anybody receives",
    "two_orders": "because they differ in group",
    "two_kinds": "do not agree on collective number 1 of their group: rank 0 called barrier",
    "two_roots": "called broadcast of 2 float32 with root 0, rank 1 broadcast of 2 float32 with root 1",
    "absent_rank": "ranks 1–3 wait for rank 0, which did not come: it has finished.",
    "two_halves": "rank 1 waits for rank 2, which did not come: it has finished.",
    "buffers_of_ddp": "ranks 1–3 wait for rank 0, which did not come",
}
