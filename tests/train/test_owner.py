"""Only one run at a time may use a folder of checkpoints, and ranks end with their launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_run import SMALL_RUN
from test_train import main_of, unshared

from helpers import train
from helpers.ranks.launched import owning

ROOT = Path(__file__).resolve().parents[2]
HOLDS = """import sys
from pathlib import Path
from helpers.ranks.launched import owning
with owning(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A function that starts a process which owns the folder `run`. prefix: words before its command."""
    started = []

    def other(*prefix: str) -> subprocess.Popen:
        command = [*prefix, sys.executable, "-c", HOLDS, str(tmp_path / "run")]
        how = dict(cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, **how))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield other
    for process in started:
        process.kill()
        process.wait(30)
        process.stdin.close(), process.stdout.close()


def test_a_second_run_is_refused_with_the_owner_of_the_folder(holder, aside, tmp_path):
    run, first = tmp_path / "run", holder()
    code, _, err = aside(main_of, run, "--steps", "2")
    assert code == 2
    assert f"belongs to a run that is under way: process {first.pid} on " in err and "start again" in err
    first.stdin.close()
    assert first.wait(60) == 0
    code, _, err = aside(main_of, run, "--steps", "2")
    assert code == 0 and "without a word" not in err
    assert not (run / "owner").exists()


def test_the_run_after_a_killed_run_prints_a_sentence(holder, aside, tmp_path):
    run, first = tmp_path / "run", holder()
    first.kill()
    first.wait(30)
    code, _, err = aside(main_of, run, "--steps", "2")
    assert code == 0 and f"belonged to a run that ended without a word, process {first.pid} on" in err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"a line\n" * 999])
def test_an_unreadable_note_of_an_owner_does_no_harm(tmp_path, content):
    (tmp_path / "owner").write_bytes(content)
    said = []
    with owning(tmp_path, said.append):
        assert (tmp_path / "owner").read_text().startswith(f"process {os.getpid()} on ")
    assert len(said) == 1 and len(said[0]) < 500


def test_a_run_on_another_host_owns_a_shared_folder(holder, aside, tmp_path):
    """Namespaces replace another host: they have a name, process ids and a network of their own."""
    far = unshared("--uts --pid --net --fork --kill-child", "hostname far")
    holder(*far, "sh", "-c", 'hostname far; exec "$@"', "sh")
    code, _, err = aside(main_of, tmp_path / "run", "--steps", "2")
    assert code == 2 and "belongs to a run that is under way: process " in err and " on far, since 20" in err


def test_a_run_whose_settings_are_refused_leaves_the_folder_free(aside, tmp_path):
    assert aside(main_of, tmp_path / "run", "--steps", "2", "--every", "2")[0] == 0
    assert aside(main_of, tmp_path / "run", "--steps", "4", "--layers", "8")[0] == 2
    code, _, err = aside(main_of, tmp_path / "run", "--steps", "4")
    assert code == 0 and "without a word" not in err


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    run = tmp_path / "run"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start += [*SMALL_RUN, "--every", "3", "--out", "run"]
    surroundings = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    quiet = dict(cwd=tmp_path, env=surroundings, text=True, stderr=subprocess.PIPE)
    going = subprocess.Popen([*start, "--pp", "2", "--steps", "100000"], **quiet)
    try:
        deadline = time.monotonic() + 120
        while len(train.checkpoints(run)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = psutil.Process(going.pid).children(recursive=True)
        second = subprocess.run([*start, "--steps", "5"], timeout=120, **quiet)
        assert "belongs to a run that is under way" in second.stderr
    finally:
        going.send_signal(signal.SIGKILL)
        going.wait(30)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert ranks and not alive
    last = int(train.checkpoints(run)[-1].name[5:])  # it continues with another layout
    third = subprocess.run([*start, "--steps", str(last + 2)], timeout=120, **quiet)
    assert third.returncode == 0, third.stderr
    # Rank 0 was killed and left its note, or had noticed that rank 1 was dead and removed it.
    assert f"going on from step-{last:06d}, the last complete checkpoint" in third.stderr
    assert "(written under dp 1 · tp 1 · pp 2)" in third.stderr
    assert not list(run.glob("*.unfinished"))
    assert [line["step"] for line in train.read_metrics(run)] == list(range(1, last + 3))
