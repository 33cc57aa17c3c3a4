"""`three_axes.lines` reads the frames of all threads while garbage collection is off."""

import forked
import pytest

# Each round leaves garbage that holds a `threading.local`. The collector runs after `many` new objects, and
# `sys.ASK` makes objects (frames), so in some rounds the collector would run inside `sys.ASK`.
PROGRAM = """
import gc, sys, threading
from three_axes import lines
class Node: pass
def leave():
    node = Node()
    node.itself, node.local = node, threading.local()
    node.local.value = 1
def look(): return lines.of_threads(sys.ASK)
for many in range(1, 40):
    gc.collect(), gc.set_threshold(many), leave()
    kept = [(look(), []) for _ in range(30)]
print(gc.isenabled(), gc.disable(), look() and gc.isenabled())
"""


@pytest.mark.parametrize("ask", ["_current_frames", "_current_exceptions"])
def test_reading_the_frames_of_all_threads_runs_no_garbage_collection(ask):
    done = forked.python(PROGRAM.replace("ASK", ask), timeout=60)
    assert done.stdout == "True None False\n", done.stderr
