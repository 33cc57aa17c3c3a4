"""`three_axes.lines` reads the frames of all threads while garbage collection is off."""

import forked

# Each round leaves garbage that holds a `threading.local`. The collector runs after `many` new objects, and
# `sys._current_frames` makes objects (frames), so in some rounds the collector would run inside it.
PROGRAM = """
import gc, sys, threading
from three_axes import lines
class Node: pass
def leave():
    node = Node()
    node.itself, node.local = node, threading.local()
    node.local.value = 1
def look(): return lines.frames_of_threads()
for many in range(1, 40):
    gc.collect(), gc.set_threshold(many), leave()
    kept = [(look(), []) for _ in range(30)]
print(gc.isenabled(), gc.disable(), look() and gc.isenabled())
"""


def test_reading_the_frames_of_all_threads_runs_no_garbage_collection():
    done = forked.python(PROGRAM, timeout=60)
    assert done.stdout == "True None False\n", done.stderr
