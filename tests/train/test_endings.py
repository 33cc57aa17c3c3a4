"""Runs of helpers.train that are killed or whose disk is full. And checkpoints written in the background."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import kills
import pytest
import worlds
from test_train import unshared

from helpers import train
from helpers.train import Config, Trainer

ROOT = Path(__file__).resolve().parents[2]
IN_BACKGROUND = Config(hidden=32, seq_len=16, batch=8, dp=2, steps=9, warmup=5, async_save=True)


shared_world = worlds.shared(2, timeout=60)


# -- checkpoints in the background ----------------------------------------------------------------------


def test_a_checkpoint_in_the_background_is_of_the_step_that_began_it(world, tmp_path):
    """Training continues for two steps before the checkpoint gets its name."""

    def train_on(config):
        trainer, may_end = Trainer(config), threading.Event()
        trainer.saver.submit(may_end.wait)
        for _ in range(3):
            trainer.step()
        trainer.save()
        losses = [trainer.step()["loss"] for _ in range(2)]
        unnamed = [p.name for p in Path(config.out).iterdir()]
        may_end.set()
        trainer.saved()
        return losses, unnamed, [p.name for p in train.checkpoints(Path(config.out))]

    def resumed(config):
        trainer = Trainer(config)
        trainer.resume()
        return [trainer.step()["loss"] for _ in range(2)]

    config = replace(IN_BACKGROUND, out=str(tmp_path))
    losses, unnamed, complete = world.run(train_on, config)[0]
    assert complete == ["step-000003"] and unnamed == ["step-000003.unfinished"]
    assert world.run(resumed, replace(config, async_save=False))[0] == losses


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_that_fails_raises_on_every_rank(world, tmp_path, in_background):
    (tmp_path / "run").write_text("a file, where a folder should be")

    def fails(config):
        trainer = Trainer(config)
        trainer.step()
        try:
            trainer.save()
            trainer.step()
            trainer.saved()
        except OSError as e:
            return str(e)

    config = replace(IN_BACKGROUND, async_save=in_background, out=str(tmp_path / "run"))
    for told in world.run(fails, config):
        assert told.startswith("step-000001 could not be written: ")


# -- checkpoints and disks ------------------------------------------------------------------------------


def test_the_last_checkpoints_are_kept(world, tmp_path):
    (tmp_path / "step-000099x").mkdir()  # no checkpoint: it must stay
    config = Config(hidden=32, seq_len=16, batch=8, dp=2, steps=8, every=2, keep=2, out=str(tmp_path))
    world.run(lambda config: train.train(config).number, config)
    kept = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert kept == ["step-000006", "step-000008", "step-000099x"]


FILLS = """
import os, sys
from pathlib import Path
from helpers import train
step, fill = train.Trainer.step, Path('/mnt/fill')
def filling(self):
    if self.number == 7:
        try:
            with open(fill, 'wb', buffering=0) as f:
                while True: f.write(bytes(4096))
        except OSError: pass
    if self.number == 40: fill.unlink()
    return step(self)
train.Trainer.step = filling
code = train.main()
print(Path('/mnt/run/metrics.jsonl').read_text())
print(*sorted(p.name for p in Path('/mnt/run').iterdir()))
sys.stdout.flush(); os._exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--async-save",)], ids=str)
def test_a_full_disk_is_named_with_what_is_missing(tmp_path, how):
    """A disk of 2.2 MB takes one checkpoint of 1.9 MB, then is filled to the last byte for a while."""
    way = unshared("--mount", "mount -t tmpfs -o size=100k tmpfs /mnt")
    script = tmp_path / "run.py"
    script.write_text(FILLS)
    options = "--hidden 32 --seq-len 16 --batch 8 --steps 60 --every 3 --out /mnt/run".split() + list(how)
    mount = f'mount -t tmpfs -o size=2200k tmpfs /mnt && exec {sys.executable} {script} "$@"'
    environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    ran = dict(cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    done = subprocess.run([*way, "sh", "-c", mount, "sh", *options], **ran)
    messages = done.stderr.splitlines()
    full = next((line for line in messages if line.startswith("step-000006 could not be written")), messages)
    assert "It needs about 1.8" in full and " are free, " in full and " are missing" in full, messages
    assert full.endswith("the checkpoints before it are untouched, and training goes on")
    assert messages[-1].startswith("training has ended, but its last checkpoint is missing")
    assert done.returncode == 2
    *lines, folders = done.stdout.strip().splitlines()
    assert [json.loads(line)["step"] for line in lines if line] == list(range(1, 61))
    assert folders.split() == ["metrics.jsonl", "owner.lock", "step-000003"]


# -- killed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_runs_go_on_under_other_layouts(tmp_path):
    run = tmp_path / "run"
    kills.disturb(run, "--tp 2", "rank", signal.SIGKILL, saving=True)
    kills.disturb(run, "--dp 2 --async-save", "launcher", signal.SIGTERM, saving=False)
    kills.disturb(run, "--dp 2 --pp 2", "machine", signal.SIGINT, saving=True)
    assert kills.last_step(run) > 3 and kills.apart(run) < 1e-9
