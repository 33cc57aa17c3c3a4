"""One run owns its folder, and ranks end with their launcher."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers import train
from helpers.train import owner
from helpers.train.owner import FILE, owning

ROOT = Path(__file__).resolve().parents[2]


def claim(run: Path, **changed) -> None:
    """The file of a run in this process, changed."""
    with owning(run, 0):
        about = json.loads((run / FILE).read_text())
    (run / FILE).write_text(json.dumps(about | changed))


def test_a_second_run_is_refused_and_told_who_has_it(tmp_path):
    with owning(tmp_path, 0):
        with pytest.raises(
            ValueError, match=rf"process {os.getpid()} on .*, since 20.*, last step 40\. Let it"
        ):
            with owning(tmp_path, 40):
                raise AssertionError("two runs in one folder")
        assert (tmp_path / FILE).exists()
    assert list(tmp_path.iterdir()) == []
    with owning(tmp_path, 40):
        pass


@pytest.mark.parametrize("changed", [{"process": 2**22 + 5}, {"began": 1.0}])
def test_a_run_whose_process_is_gone_is_followed(tmp_path, changed):
    claim(tmp_path, token="gone", **changed)
    with owning(tmp_path, 0):
        assert json.loads((tmp_path / FILE).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": 1}'])
def test_a_damaged_claim_is_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with owning(tmp_path, 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_another_machine_is_known_by_its_touches(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "SILENT", 1.0)
    claim(tmp_path, token="there", sees="another machine", host="other")
    with owning(tmp_path, 0):
        pass  # nobody touched it
    claim(tmp_path, token="there", sees="another machine", host="other")
    code = f"import os, time\nwhile 1: os.utime({str(tmp_path / FILE)!r}); time.sleep(.01)"
    touching = subprocess.Popen([sys.executable, "-c", code])
    try:
        with pytest.raises(ValueError, match="on other, since"):
            with owning(tmp_path, 0):
                pass
    finally:
        touching.kill()
        touching.wait()


def taken_over(run):
    other = json.loads((run / FILE).read_text()) | {"token": "new", "process": 7, "host": "b"}
    (run / FILE).write_text(json.dumps(other))


@pytest.mark.parametrize(
    "befalls, sentence, left",
    [(taken_over, "taken over by process 7 on b", [FILE]), (shutil.rmtree, "has been removed", [])],
)
def test_a_run_that_lost_its_folder_ends(tmp_path, monkeypatch, befalls, sentence, left):
    monkeypatch.setattr(owner, "BEAT", 0.01)
    run = tmp_path / "run"
    run.mkdir()
    with owning(run, 0) as mine:
        mine.check()
        befalls(run)
        deadline = time.monotonic() + 20
        while not mine.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(ValueError, match=f"{sentence}, so this run ends here"):
            mine.check()
    assert [file.name for file in run.glob("*")] == left  # another's claim stays


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    sizes = "--hidden 32 --seq-len 16 --batch 8 --every 3 --out run".split()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start += ["-m", "helpers.train", *sizes]
    surroundings = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    quiet = dict(cwd=tmp_path, env=surroundings, text=True, stderr=subprocess.PIPE)
    going = subprocess.Popen([*start, "--pp", "2", "--steps", "100000"], **quiet)
    try:
        deadline = time.monotonic() + 120
        while len(train.checkpoint.complete(tmp_path / "run")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = psutil.Process(going.pid).children(recursive=True)
        second = subprocess.run([*start, "--steps", "5"], timeout=120, **quiet)
        assert "belongs to a run that is under way" in second.stderr and "last step" in second.stderr
    finally:
        going.send_signal(signal.SIGKILL)
        going.wait()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert ranks and not alive
    last = int(train.checkpoint.complete(tmp_path / "run")[-1].name[5:])  # it goes on under another layout
    third = subprocess.run([*start, "--steps", str(last + 2)], timeout=120, **quiet)
    assert third.returncode == 0, third.stderr
    assert f"going on from step-{last:06d}, the last complete checkpoint" in third.stderr
    assert "(written under dp 1 · tp 1 · pp 2" in third.stderr
    assert not list((tmp_path / "run").glob("*.unfinished"))
    steps = [line["step"] for line in train.read_metrics(tmp_path / "run")]
    assert steps == list(range(1, last + 3))
