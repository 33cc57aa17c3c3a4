"""Where a World is made: without a folder, without Unicode, in a process that may start none."""

import os
import subprocess
import sys

import pytest

from three_axes.files import ROOT

BEGIN = "import os, multiprocessing, sys\nfrom helpers import World\n"
PROGRAMS = {
    "in a folder that is gone": (
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "with World(2) as world: print(world.run(lambda: 7))",
        "[7, 7]",
    ),
    "without Unicode": ("with World(2) as world: world.run(lambda: print('it│is'))", "ranks 0 and 1 | it|is"),
    "in a daemonic process": (
        "def child():\n    try: World(2)\n    except RuntimeError as e: print(e, flush=True)\n"
        "child = multiprocessing.get_context('fork').Process(target=child, daemon=True)\n"
        "child.start(), child.join()",
        "a daemonic process of multiprocessing may start no ranks: make the World in its parent",
    ),
}


FIRST, *OTHERS = PROGRAMS


@pytest.mark.parametrize("where", [FIRST, *(pytest.param(where, marks=pytest.mark.slow) for where in OTHERS)])
def test_a_world_says_what_it_can_do_where_it_is_made(where, tmp_path):
    program, told = PROGRAMS[where]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    how = dict(cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", BEGIN + program], **how)
    assert told in done.stdout and done.returncode == 0, done
