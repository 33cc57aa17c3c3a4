"""Programs that end by themselves though no thread of Python's helps them: by a future's callback, a thread
of C's, a signal, a connection that another rank ends, or code that a library's idle thread runs. In plain
PyTorch each ends in each of five runs.
"""

import asyncio
import collections
import ctypes
import functools
import operator
import os
import signal
import subprocess
import threading
import time
from _thread import start_new_thread
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist

LONG = 0.8  # seconds
# As a module of a library would have it: no frame is in a file of the reader's.
LIBRARY = """
import subprocess
def calls(event):
    subprocess.run("sleep 0.8; echo", shell=True, capture_output=True)
    event.set()
async def awaited(event): calls(event)
"""


def _from_library(name: str):
    names: dict = {}
    exec(LIBRARY, names)
    return names[name]


def _wakes(helps) -> None:
    """Rank 0 sleeps until what `helps` prepares wakes it. The others wait for it."""
    if dist.get_rank() == 0:
        event = threading.Event()
        kept = helps(event)
        event.wait()
        if callable(kept):
            kept()
    dist.barrier()


def callback_of_a_future_that_wakes_the_main_thread():
    if dist.get_rank() == 1:
        time.sleep(LONG)
    woken = threading.Event()
    dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: woken.set())
    woken.wait()


def _begin_in_c(*steps) -> None:
    """A thread without a frame, in functions of C's: it calls these, one after the other."""
    start_new_thread(functools.partial(collections.deque, map(operator.call, steps)), ())


def thread_of_c_that_has_no_frame():
    _wakes(lambda event: _begin_in_c(functools.partial(time.sleep, LONG), event.set))


def thread_of_c_that_has_run_python_before():
    """It has a name that is left from then, and no frame."""
    slowly = threading.current_thread, functools.partial(time.sleep, LONG)
    _wakes(lambda event: _begin_in_c(*slowly, event.set))


def thread_of_c_with_the_name_of_gloos():
    """It was begun in a callback that gloo's thread called."""
    alone, event = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()], threading.Event()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=alone, async_op=True)
        work.get_future().then(lambda _: _begin_in_c(functools.partial(time.sleep, LONG), event.set))
        event.wait()
    dist.barrier()


def _survives(does) -> None:
    """Rank 0's operation raises when others end its group. `does` calls it and keeps the error. Then the rank
    goes on and frees rank 1.
    """
    group, pair, x = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1]), torch.ones(4)
    if dist.get_rank() == 0:
        does(lambda: dist.gather(x, [torch.ones(4) for _ in range(4)], group=group))
        dist.send(x, 1, group=pair)
    elif dist.get_rank() == 1:
        dist.recv(x, 0, group=pair)
    else:
        time.sleep(LONG)
        dist.destroy_process_group(group)


def connection_that_another_rank_ends():
    def does(meets):
        with suppress(RuntimeError):
            meets()

    _survives(does)


def error_that_a_library_keeps():
    def does(meets):
        async def meets_later():
            meets()

        async def keeps():
            await asyncio.gather(meets_later(), return_exceptions=True)

        asyncio.run(keeps())

    _survives(does)


def handler_of_the_stop_signal():
    def helps(event):
        before = signal.signal(signal.SIGINT, lambda *_: event.set())
        child = subprocess.Popen(["sh", "-c", f"sleep {LONG}; kill -INT {os.getpid()}"])
        return lambda: (child.wait(), signal.signal(signal.SIGINT, before))

    _wakes(helps)


def stop_signal_that_is_caught():
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        child = subprocess.Popen(["sh", "-c", f"sleep {LONG}; kill -INT {os.getpid()}"])
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        child.wait(), signal.signal(signal.SIGINT, before)
    dist.barrier()


def bar_that_writes_into_a_file_of_the_readers():
    import tqdm

    class File:
        def write(self, text):
            if threading.current_thread() is not threading.main_thread():
                self.event.set()

        def flush(self): ...

    def helps(event):
        before, tqdm.tqdm.monitor_interval = tqdm.tqdm.monitor_interval, 1
        File.event = event
        bar = tqdm.tqdm(total=100, file=File(), miniters=50, maxinterval=1)
        bar.update()

        def ends():
            bar.close(), tqdm.tqdm.monitor.exit()
            tqdm.tqdm.monitor, tqdm.tqdm.monitor_interval = None, before

        return ends

    _wakes(helps)


def stop_signal_of_another_rank():
    pid = [os.getpid()]
    dist.broadcast_object_list(pid, 0)
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        signal.signal(signal.SIGINT, before)
    elif dist.get_rank() == 1:
        time.sleep(LONG)
        os.kill(pid[0], signal.SIGINT)
    dist.barrier()


def handler_of_c():
    """Python does not know of it."""
    process, event = ctypes.CDLL(None), threading.Event()
    process.signal.restype = ctypes.c_void_p
    if dist.get_rank() == 0:
        handles = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: event.set())
        before = process.signal(signal.SIGUSR2, handles)
        child = get_context("fork").Process(target=_signals, args=(os.getpid(),))
        child.start(), event.wait()
        process.signal(signal.SIGUSR2, ctypes.c_void_p(before)), child.join()
    dist.barrier()


def _signals(pid):
    time.sleep(LONG)
    os.kill(pid, signal.SIGUSR2)


def views_of_one_buffer():
    """A receive into one half is open while a functional collective works in the other."""
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


def callback_of_backward_beside_ddp():
    """Rank 0's own callback runs after that which begins DDP's wait, and frees rank 1."""
    pair, x = dist.new_group([0, 1]), torch.ones(4)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    def frees(*_):
        later = lambda: (time.sleep(LONG), dist.send(x, 1, group=pair))
        torch.autograd.Variable._execution_engine.queue_callback(later)

    if dist.get_rank() == 0:
        list(model.parameters())[0].register_post_accumulate_grad_hook(frees)
    if dist.get_rank() == 1:
        dist.recv(x, 0, group=pair)
    model(torch.ones(1, 2)).sum().backward()


def callback_of_a_library():
    def helps(event):
        pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
        pool.submit(int).add_done_callback(functools.partial(_called, event))
        return pool.shutdown

    _wakes(helps)


def _called(event, _):
    _from_library("calls")(event)


def coroutine_of_a_library():
    def helps(event):
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        asyncio.run_coroutine_threadsafe(_from_library("awaited")(event), loop)
        return lambda: (loop.call_soon_threadsafe(loop.stop), thread.join())

    _wakes(helps)


def check_that_finds_two_collectives():
    """Where each is checked first, both ranks raise, and go on."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group, x = dist.new_group(timeout=timedelta(seconds=20)), torch.ones(2)
    dist.set_debug_level(before)
    if dist.get_rank() == 1:
        time.sleep(LONG)
    with suppress(RuntimeError):
        dist.all_reduce(x, group=group) if dist.get_rank() else dist.broadcast(x, 0, group=group)


def loaders_process_that_dies():
    """Its end raises in the main thread, which waits for a lock and catches that."""
    if dist.get_rank() == 0:
        items = torch.utils.data.DataLoader(_Dying(), num_workers=1, multiprocessing_context="fork")
        kept = iter(items)
        with suppress(RuntimeError):
            next(kept), threading.Event().wait()
    dist.barrier()


class _Dying(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        if i == 2:
            time.sleep(LONG)
            os._exit(1)
        return i


def hook_of_ddp_that_calls_more_when_a_part_has_ended():
    def hook(state, bucket):
        time.sleep(LONG if dist.get_rank() == 1 else 0)
        more = lambda _: (time.sleep(LONG), dist.all_reduce(bucket.buffer()), bucket.buffer())[-1]
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(more)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()


def futures_of_which_one_is_late():
    x = torch.ones(2)
    first = dist.all_reduce(x, async_op=True).get_future()
    if dist.get_rank() == 1:
        time.sleep(LONG)
    both = torch.futures.collect_all([first, dist.all_reduce(x, async_op=True).get_future()])
    woken = threading.Event()
    both.then(lambda _: woken.set())
    torch.futures.wait_all([both]), woken.wait()


def thread_that_is_named_as_the_courses_own():
    steps = lambda event: lambda: (time.sleep(LONG), event.set())
    _wakes(lambda event: threading.Thread(target=steps(event), name="three-axes").start())


ENDS = {
    function.__name__: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__ and not name.startswith("_")
}
