"""Programs that hang for ever, one for a kind. A World ends those of HANGS after two seconds without a
movement; of NOTED it only prints each rank's place, because something that it does not know may still free a
rank. More hangs are in tests/ranks/test_world.py.
"""

import queue
import subprocess
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

SOON = 8  # seconds after which what runs beside a rank ends by itself


def ring():
    """Each rank receives before any rank sends."""
    dist.recv(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


def ring_beside_a_process():
    subprocess.Popen(["sleep", str(SOON)])
    ring()


def two_orders():
    """Two groups of the same ranks, which rank 0 uses in another order."""
    groups, x = [dist.new_group(), dist.new_group()], torch.ones(2)
    for group in groups if dist.get_rank() else groups[::-1]:
        dist.all_reduce(x, group=group)


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


def waits_in_backward():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank():
        loss.backward()


def gathers_by_functions():
    if dist.get_rank():
        print(all_gather_tensor(torch.ones(2), 0, dist.group.WORLD).sum())


HANGS = {  # program -> words that the message must hold
    ring_beside_a_process: "rank 0 waits to receive from rank 1",
    two_orders: "because they differ in group",
    batch_of_which_one_message_is_missing: "rank 2 waits for rank 1, which did not come",
    wait_with_a_long_limit: "ranks 1–3 wait for rank 0, which did not come: it has finished.",
    buffers_of_ddp: "ranks 1–3 wait for rank 0, which did not come",
    waits_in_backward: "ranks 1–3 wait for rank 0, which did not come: it has finished.",
    gathers_by_functions: "ranks 1–3 wait for rank 0, which did not come: it has finished.",
}


# -- something that is not known may free a rank ---------------------------------------------------


def ring_beside_a_thread():
    over = threading.Event()
    threading.Thread(target=over.wait, args=(SOON,), name="heartbeat").start()
    ring()


def two_of_four_beside_two_that_compute():
    rank, until = dist.get_rank(), time.monotonic() + 10
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    while rank >= 2 and time.monotonic() < until:
        torch.ones(100).sum()


def main_thread_that_nobody_wakes():
    if dist.get_rank() == 0:
        queue.Queue().get()
    dist.barrier()


def future_waited_for():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


def second_forward_of_ddp():
    """In the second forward of DDP the ranks agree on the buckets, in C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)) if dist.get_rank() else dist.barrier()


NOTED = [
    ring_beside_a_thread,
    two_of_four_beside_two_that_compute,
    main_thread_that_nobody_wakes,
    future_waited_for,
    second_forward_of_ddp,
]
