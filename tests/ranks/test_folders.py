"""The kernel's folder of temporary files: it is made again, has a short path, and is removed with its kernel.
And the messages about a rank that stops in a call, or that cannot print its own error.
"""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from forked import python as kernel
from test_world import all_end, linux

from helpers import World
from helpers.ranks import folders
from helpers.ranks.failure import FRESH, RankError

ROOT = Path(__file__).resolve().parents[2]
ONE_CALL = "from helpers import World; print(World(2).run(lambda: 7))"


def frozen_while_it_sends():
    """Rank 0 is stopped while it sends a large result."""
    from threading import Timer

    if torch.distributed.get_rank() == 0:
        Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return torch.zeros(300_000_000, dtype=torch.uint8)


@pytest.mark.slow
@linux
def test_a_folder_that_was_removed_is_made_again():
    with World(2) as before:
        shutil.rmtree(folders.home())
        assert before.run(lambda: 1) == [1, 1]
        with World(2) as after:
            assert after.run(lambda: 2) == [2, 2] and before.run(lambda: 3) == [3, 3]


@pytest.mark.slow
@linux
def test_a_long_temporary_folder_is_left_for_a_short_one(tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    assert kernel(ONE_CALL, TMPDIR=str(long)).stdout == "[7, 7]\n" and not list(long.glob("three-axes-*"))


@linux
@pytest.mark.slow
def test_files_of_a_killed_kernel_are_removed_and_its_stopped_rank_ends():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder has a long name
        killed = kernel(
            "import os, signal\nfrom helpers import World\nworld = World(2)\n"
            "os.kill(world.pids[0], signal.SIGSTOP)\nprint(*world.pids, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)",
            TMPDIR=folder,
        )
        assert all_end(killed.stdout.split(), within=10)
        (left,) = Path(folder).glob("three-axes-*")
        code = f"{ONE_CALL}; import os; print(os.path.exists({str(left)!r}))"
        assert kernel(code, TMPDIR=folder).stdout == "[7, 7]\nFalse\n"
        assert not list(Path(folder).glob("three-axes-*"))


@linux
@pytest.mark.slow
def test_a_rank_that_stops_while_it_sends_does_not_hold_the_call(world):
    start = time.monotonic()
    with pytest.raises(RankError, match="no end after 3 s"):
        world.run(frozen_while_it_sends, timeout=3)
    assert time.monotonic() - start < 20 and world.run(lambda: 1) == [1] * 4


@linux
@pytest.mark.slow
def test_the_fork_server_that_is_killed_is_named():
    """In a separate kernel: the ranks of all its worlds are lost."""
    said = kernel(
        "import os, signal, time\nfrom helpers import World\nfrom helpers.ranks import failure, server\n"
        "one, other = World(2), World(2)\n"
        "os.kill(server.server_pid(), signal.SIGKILL)\n"
        "for world in (one, other):\n"
        "    try:\n        world.run(time.sleep, 5)\n"
        "    except failure.RankError as e:\n        print(e)\n"
        "    print(world.run(lambda: 2))"
    ).stdout
    assert said.count("the process that forks all ranks is gone") == 2 == said.count("\n[2, 2]"), said


def test_a_rank_without_descriptors_says_its_own_error():
    def none_left():
        opened = []
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            raise ValueError(f"mine, with {len(opened) > 0}") from None

    with World(1) as world, pytest.raises(RankError, match="raised ValueError: mine, with True"):
        world.run(none_left)


def test_a_group_that_cannot_be_formed_again_costs_variables_and_says_so(capsys, monkeypatch):
    with World(2) as world:
        world.push(x=1)
        join = World._join
        answers = iter([False])
        monkeypatch.setattr(World, "_join", lambda self, *how: join(self, *how) and next(answers, True))
        world.cell("dist.destroy_process_group()")
        assert capsys.readouterr().out.strip().endswith(FRESH)
        with pytest.raises(RankError, match="no variable 'x'"):
            world.pull("x")
