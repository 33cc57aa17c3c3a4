"""How a run of helpers.train ends before its last step: asked to stop, killed, out of disk."""

import errno
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import kills
import pytest
from test_train import main_of, unshared

from helpers import World, counted_so_far, train
from helpers.train import Config, Trainer, checkpoint, launch, metrics, stop
from helpers.train.stop import Stop, listening

ROOT = Path(__file__).resolve().parents[2]
SMALL = Config(hidden=32, seq_len=16, batch=8, steps=1000, every=50)


def soon(happened, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    return happened()


# -- asked to stop -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    with World(2, timeout=60) as world:
        yield world


def test_all_ranks_stop_when_one_is_asked_and_save_once(pair, tmp_path):
    def run(config):
        import torch.distributed as dist

        asked = Stop()
        asked.signal = signal.SIGTERM * (dist.get_rank() == 1)
        trainer = train.train(config, stop=asked)
        return trainer.number, trainer.stopping, asked.status

    assert pair.run(run, replace(SMALL, dp=2, out=str(tmp_path))) == [(1, True, 143)] * 2
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000001"]
    assert [line["step"] for line in train.read_metrics(tmp_path)] == [1]


STARTED = ["python", "-m", "helpers.train", "--out", "a run"]


def interrupted(run: Path) -> tuple[int, str, str]:
    """The command, which this process sends Ctrl-C when it has trained for two steps."""

    def press() -> None:
        soon(lambda: len(train.read_metrics(run)) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # what ranks are forked from hears no button
    sys.orig_argv = STARTED
    threading.Thread(target=press).start()
    return main_of(run, "--steps", "1000")


def test_ctrl_c_says_one_sentence_and_the_command_that_goes_on(aside, tmp_path):
    code, _, err = aside(interrupted, tmp_path)
    step = train.read_metrics(tmp_path)[-1]["step"]
    assert code == 130 and len(err.splitlines()) == 2, err
    sentence, command = err.splitlines()[1].split("; to go on from it: ")
    assert sentence == f"SIGINT ended the run after step {step} of 1000. step-{step:06d} is complete"
    assert shlex.split(command) == STARTED
    assert [p.name for p in checkpoint.complete(tmp_path)] == [f"step-{step:06d}"]


def test_what_a_signal_does_and_when(monkeypatch):
    monkeypatch.setattr(stop, "PATIENCE", 0.05)
    why = []
    with listening(why.append) as early:
        os.kill(os.getpid(), signal.SIGTERM)
        assert soon(lambda: why)
    assert why == ["SIGTERM came before the ranks had met, so nothing was trained"]
    assert early.signal == signal.SIGTERM
    why.clear()
    with listening(why.append) as unheard:
        unheard.joined = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert soon(lambda: why)
        os.kill(os.getpid(), signal.SIGTERM)  # as where a system and a launcher both send it
        time.sleep(0.1)
    assert why == ["SIGTERM came, and the others have not heard of it within 0.05 s"]
    why.clear()
    with listening(why.append) as twice:
        twice.joined = True
        twice.agreed()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            soon(lambda: twice.signal)
            twice._came -= 2  # seconds ago
        assert soon(lambda: why)
    assert why == ["Ctrl-C came again, so this rank ends without saving"] and twice.status == 130


@pytest.mark.parametrize(
    "message, reason",
    [
        (
            "[../gloo/pair.cc:553] Read error [10.77.0.2]:4242: Connection reset by peer (GLHF! 🏖️)",
            "connection reset: 10.77.0.2 port 4242",
        ),
        ("[../gloo/x.cc:81] Timed out waiting 8000ms for recv operation to complete", "timed out"),
        ("some\nother fault", "some other fault"),
    ],
)
def test_a_lost_connection_is_said_in_our_words(message, reason):
    assert launch.reason_of(RuntimeError(message)) == reason


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    manual = " ".join(capsys.readouterr().out.split())
    for option in Config.__dataclass_fields__.values():
        assert " ".join(option.metadata["help"].split()) in manual
    assert "seconds without an answer after which another rank counts as lost (default 60.0)" in manual


# -- checkpoints in the background ----------------------------------------------------------------------


IN_BACKGROUND = Config(hidden=32, seq_len=16, batch=8, dp=2, steps=9, warmup=5, async_save=True)


def test_a_checkpoint_in_the_background_is_of_the_step_that_began_it(pair, tmp_path):
    """Training goes on for two steps before the first byte is written."""

    def train_on(config):
        trainer, may_write = Trainer(config), threading.Event()
        trainer.background._thread.submit(may_write.wait)
        for _ in range(3):
            trainer.step()
        trainer.save()
        losses = [trainer.step()["loss"] for _ in range(2)]
        may_write.set()
        trainer.saved()
        return losses, [p.name for p in checkpoint.complete(Path(config.out))]

    def resumed(config, folder):
        trainer = Trainer(config)
        trainer.resume(folder)
        return [trainer.step()["loss"] for _ in range(2)]

    config = replace(IN_BACKGROUND, out=str(tmp_path))
    losses, complete = pair.run(train_on, config)[0]
    assert complete == ["step-000003"]
    assert pair.run(resumed, replace(config, async_save=False), tmp_path / "step-000003")[0] == losses


def test_what_a_checkpoint_in_the_background_says_is_not_counted(pair, tmp_path):
    def step(config, save):
        trainer = Trainer(config)
        trainer.step()
        if save:
            trainer.save()
        before = counted_so_far()
        trainer.step()
        after = counted_so_far()
        trainer.saved()
        return [(r.op, r.axis, r.calls) for r in after], [(r.op, r.axis, r.calls) for r in before]

    config = replace(IN_BACKGROUND, out=str(tmp_path))
    assert pair.run(step, config, True) == pair.run(step, config, False)


def test_a_checkpoint_that_fails_in_the_background_is_told_when_it_is_waited_for(pair, tmp_path):
    (tmp_path / "run").write_text("a file, where a folder should be")

    def fails(config):
        trainer = Trainer(config)
        trainer.step()
        trainer.save()
        loss = trainer.step()["loss"]
        try:
            trainer.saved()
        except checkpoint.SaveFailed as e:
            return loss, str(e)

    for loss, told in pair.run(fails, replace(IN_BACKGROUND, out=str(tmp_path / "run"))):
        assert loss > 0 and told.startswith("step-000001 could not be written")


# -- checkpoints and disks ------------------------------------------------------------------------------


def test_old_checkpoints_are_pruned_and_never_the_last(tmp_path):
    for step in (2, 4, 6):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / checkpoint.ABOUT).write_text("{}")
    (tmp_path / "step-000008").mkdir()  # was never complete, and is nobody's business here
    checkpoint.prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000006", "step-000008"]
    checkpoint.prune(tmp_path, 0)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000006"]


def test_metrics_that_the_disk_does_not_take_wait(tmp_path, monkeypatch):
    messages, room, write = [], 30, os.write

    def almost_full(handle, data):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(handle, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", almost_full)
    with metrics.metrics_of(tmp_path, 0, messages.append) as file:
        for step in (1, 2, 3, 4):
            file.write({"step": step, "loss": 5.0})
        assert [line["step"] for line in train.read_metrics(tmp_path)] == [1]
        assert messages == ["metrics of step 2 on wait in memory (No space left on device); training goes on"]
        room = 10**6
        file.write({"step": 5, "loss": 5.0})
    assert [line["step"] for line in train.read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    room = 0
    with metrics.metrics_of(tmp_path, 3, messages.append) as file:  # two lines less need no room
        file.write({"step": 4, "loss": 5.0})
    assert [line["step"] for line in train.read_metrics(tmp_path)] == [1, 2, 3]
    assert messages[-1] == "the disk never took the last 1 lines of metrics.jsonl; they are lost"


@pytest.mark.slow
def test_a_full_disk_is_named_with_what_is_needed_and_free(tmp_path):
    """A disk of 2.2 MB takes one checkpoint of 1.9 MB, then is filled to the last byte for a while."""
    way = unshared("--mount", "mount -t tmpfs -o size=100k tmpfs /mnt")
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from helpers import train\n"
        "from helpers.train import launch\n"
        "step, fill = train.Trainer.step, Path('/mnt/fill')\n"
        "def filling(self, stop):\n"
        "    if self.number == 4:\n"
        "        try:\n"
        "            with open(fill, 'wb', buffering=0) as f:\n"
        "                while True: f.write(bytes(4096))\n"
        "        except OSError: pass\n"
        "    if self.number == 40: fill.unlink()\n"
        "    return step(self, stop)\n"
        "train.Trainer.step = filling\n"
        "code = launch.main()\n"
        "print(Path('/mnt/run/metrics.jsonl').read_text())\n"
        "print(*sorted(p.name for p in Path('/mnt/run').iterdir()))\n"
        "sys.stdout.flush(); os._exit(code)\n"
    )
    options = "--hidden 32 --seq-len 16 --batch 8 --steps 60 --every 3 --out /mnt/run"
    mount_and_run = f"mount -t tmpfs -o size=2200k tmpfs /mnt && exec {sys.executable} {script} {options}"
    environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    how = dict(cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    done = subprocess.run([*way, "sh", "-c", mount_and_run], **how)
    messages = done.stderr.splitlines()
    full = next(line for line in messages if line.startswith("step-000006 could not be written"))
    assert "the disk is full: the checkpoint needs 1.88 MB, and" in full, messages
    assert "free; the checkpoints before it are" in full, messages
    assert any(line.startswith("metrics of step") and "No space left on device" in line for line in messages)
    assert messages[-1].startswith("training has ended, but its last checkpoint is missing")
    assert done.returncode == 2
    *lines, folders = done.stdout.strip().splitlines()
    assert [json.loads(line)["step"] for line in lines if line] == list(range(1, 61))
    assert folders.split() == ["metrics.jsonl", "step-000003"]


# -- killed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_runs_go_on_under_other_layouts(tmp_path):
    """Three of `tests/kills.py`'s; it runs as many as one likes."""
    chance = random.Random(1)
    run = tmp_path / "run"
    for whom, number, moment in (
        ("rank", signal.SIGKILL, "saving"),
        ("launcher", signal.SIGTERM, "training"),
        ("machine", signal.SIGINT, "saving"),
    ):
        layout = chance.choice(kills.LAYOUTS[2 if whom == "machine" else 1])
        kills.disturb(run, kills.Kill(layout, whom, number, moment), chance, "float64")
    assert kills.last_step(run) > 6 and kills.apart(run, "float64") < 1e-9
