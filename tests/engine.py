"""Runs backward on CPUs as on a GPU, for tests."""

import _thread
from contextlib import contextmanager
from functools import partial
from operator import call
from unittest import mock

import torch


def _on_a_bare_thread(outputs, *args, **kwargs):
    """Run backward on a thread that has no Python frame."""
    engine = torch.autograd.Variable._execution_engine
    backward = partial(engine.run_backward, outputs, *args, **kwargs)
    results, done = [], _thread.allocate_lock()
    done.acquire()
    # list(), extend() and map() are written in C: they call both steps without a Python frame.
    steps = [partial(results.extend, map(call, [backward])), done.release]
    _thread.start_new_thread(list, (map(call, steps),))
    assert done.acquire(timeout=60), "backward raised, or does not end"
    return results[0]


@contextmanager
def as_on_a_gpu():
    """Every backward runs on a thread without a Python frame, so DDP's collectives have no Python caller."""
    with mock.patch.object(torch.autograd, "_engine_run_backward", _on_a_bare_thread):
        yield
