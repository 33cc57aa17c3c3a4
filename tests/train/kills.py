"""A training run under torchrun that is killed: test_endings.py.

One torchrun has two ranks; two of them act as two machines with two ranks each. A signal is sent to a
launcher, to a rank, or to both ranks of a machine, while the run trains or saves. Then all processes must
have ended by themselves, no complete checkpoint may be lost, and in the end every step's loss must equal that
of a single undisturbed process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from helpers import World
from helpers.train import Config, Trainer, checkpoints, damage, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(hidden=32, seq_len=16, batch=8, steps=100_000, precision="float64")
PATIENCE = 150  # seconds within which a killed run must have ended, on a busy machine


def start(run: Path, layout: str, machines: int) -> list[subprocess.Popen]:
    """Start the training with one torchrun for each machine. Returns these launchers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    meet = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1"
    # A torchrun waits for a machine that was lost before they met: 45 s, not the usual ten minutes.
    meet += f" --rdzv-conf join_timeout=45 --rdzv-id {uuid.uuid4()}"
    sizes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
    how = f"{sizes} --every 3 --keep 4 --timeout 10 {layout} --out {run}"
    launch = f"-m torch.distributed.run --nnodes {machines} --nproc-per-node 2 {meet}"
    logs = f"--log-dir={run.with_name('logs')}"  # a launcher that is killed leaves them behind
    command = [sys.executable, *launch.split(), logs, "-m", "helpers.train", *how.split()]
    environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    quiet = dict(cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    said = (open(run.with_name(f"said-{number}"), "w") for number in range(machines))
    return [subprocess.Popen(command, **quiet, stderr=log) for log in said]


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The processes that a launcher has started."""
    try:
        return psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def last_step(run: Path) -> int:
    lines = read_metrics(run)
    return lines[-1]["step"] if lines else 0


def disturb(run: Path, layout: str, whom: str, number: signal.Signals, saving: bool) -> None:
    """Start a run, kill it, and check that it ends and has lost nothing. whom: "launcher", "rank" or
    "machine"; a layout for a machine has four ranks. saving: kill it while it saves. Raises AssertionError.
    """
    saved = checkpoints(run)
    began = int(saved[-1].name[5:]) if saved else 0  # the step from which it continues
    launchers = start(run, layout, machines=1 + (whom == "machine"))
    everybody: dict[int, psutil.Process] = {p.pid: psutil.Process(p.pid) for p in launchers}
    try:
        deadline = time.monotonic() + PATIENCE
        metrics = run / "metrics.jsonl"
        # The file still has later steps of the run before until this one has begun.
        began_at = metrics.stat().st_mtime_ns if metrics.exists() else 0
        while not (
            metrics.exists() and metrics.stat().st_mtime_ns > began_at and last_step(run) >= began + 4
        ):
            assert all(p.poll() is None for p in launchers), "it ended before it was killed"
            assert time.monotonic() < deadline, "it does not train"
            time.sleep(0.02)
        while saving and not list(run.glob("*.unfinished")):
            assert time.monotonic() < deadline, "it does not save"
            time.sleep(0.0005)
        for launcher in launchers:
            everybody |= {p.pid: p for p in ranks_of(launcher)}
        complete = checkpoints(run)
        launcher = launchers[0]  # the other machine meets it at this one
        ranks = [p for p in ranks_of(launcher) if "helpers.train" in p.cmdline()]
        targets = {"launcher": [psutil.Process(launcher.pid)], "rank": ranks[:1], "machine": ranks}[whom]
        for target in targets:
            target.send_signal(number)
        for p in launchers:
            everybody |= {child.pid: child for child in ranks_of(p)}
            p.wait(PATIENCE)
        _, alive = psutil.wait_procs(list(everybody.values()), timeout=20)
        assert not alive, f"left running: {alive}"
    finally:
        for process in everybody.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
    left = checkpoints(run)
    assert not complete or complete[-1] in left or left[-1].name > complete[-1].name, "a checkpoint is lost"
    for folder in left:
        assert not damage(folder), damage(folder)


def undisturbed(config: Config, steps: int) -> list[float]:
    """On a rank: the losses of a run that nobody kills."""
    trainer = Trainer(config)
    return [trainer.step()["loss"] for _ in range(steps)]


def apart(run: Path) -> float:
    """The largest relative difference of any step's loss from that of a single undisturbed process. Raises
    AssertionError if a step is missing or is listed twice.
    """
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "steps are missing"
    with World(1, timeout=300, counted=False) as alone:
        losses = alone.run(undisturbed, Config(**SIZES), len(lines))[0]
    return max(abs(line["loss"] / loss - 1) for line, loss in zip(lines, losses))
