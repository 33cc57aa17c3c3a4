"""Ranks that are spawned, as on macOS, and the spare processes that wait to become ranks.

With THREE_AXES_SPAWN=1 in the environment, any test or notebook spawns its ranks on Linux as well.
"""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from test_world import alive, all_end

pytestmark = pytest.mark.usefixtures("kills_kernels")

# A kernel whose spares and ranks are killed, and that is killed itself in the end.
SCRIPT = """
    import os, signal, sys, time
    from helpers.ranks import server
    server.SPARES = 2
    from helpers import World
    from helpers.ranks.failure import RankError

    pids = lambda: [spare.process.pid for spare in server._spares]
    first = pids()
    world = World(2)
    assert world.pids == first and world.run(lambda: 1) == [1, 1]
    waiting = pids()
    assert len(waiting) == 2

    os.kill(waiting[0], signal.SIGKILL)     # a spare that dies is replaced
    os.kill(world.pids[1], signal.SIGKILL)
    try:
        world.run(lambda: 1)
    except RankError as e:
        assert e.kind == "died" and e.ranks == [1], e
    assert world.pids[0] == waiting[1] and world.run(lambda: 2) == [2, 2]
    assert len(pids()) == 2

    fork = os.fork()                        # must not keep spares or ranks alive
    if fork == 0:
        time.sleep(120)
        os._exit(0)
    with open(sys.argv[1], "w") as file:
        print(fork, *first, *waiting, *world.pids, *pids(), file=file)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_recovery_takes_spares_and_nothing_outlives_the_kernel(tmp_path):
    written = tmp_path / "pids"
    command, environ = [sys.executable, "-c", textwrap.dedent(SCRIPT), written], {"THREE_AXES_SPAWN": "1"}
    kernel = subprocess.run(command, timeout=300, env=os.environ | environ)
    assert kernel.returncode == -signal.SIGKILL
    fork, *pids = map(int, written.read_text().split())
    assert all_end(set(pids), within=120)  # those that still import look when they have
    assert alive([fork]) and len(set(pids)) >= 6
    os.kill(fork, signal.SIGKILL)


def test_on_windows_the_first_import_says_where_the_course_runs(monkeypatch):
    import helpers

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="On Windows start the course inside WSL 2"):
        helpers.__getattr__("World")
