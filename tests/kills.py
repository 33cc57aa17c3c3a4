"""Kill a training run thirty times, under changing layouts: `python tests/kills.py 30`.

Two torchruns act as two machines with two ranks each; every second run has one machine. A signal (SIGKILL,
SIGTERM or SIGINT) is sent to a launcher, to a rank, or to both ranks of a machine, at a random moment: while
the run starts, trains or saves. Then all processes must have ended by themselves, no complete checkpoint may
be lost, and in the end every step's loss must equal that of a single undisturbed process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers import World
from helpers.train import Config, Trainer, checkpoints, damage, read_metrics

ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(hidden=32, seq_len=16, batch=8, steps=100_000)
LAYOUTS = {  # number of machines -> options of helpers/train.py
    1: ("--dp 2", "--tp 2", "--pp 2", "--pp 2 --schedule interleaved", "--tp 2 --sp", "--dp 2 --async-save"),
    2: (
        *("--dp 4", "--dp 2 --tp 2", "--tp 2 --pp 2", "--dp 2 --pp 2", "--pp 4 --schedule GPipe", "--pp 4"),
        *("--dp 2 --tp 2 --async-save", "--dp 2 --pp 2 --async-save"),
    ),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = ("training", "training", "saving", "saving", "saving", "starting")
PATIENCE = 150  # seconds within which a killed run must have ended, on a busy machine


@dataclass
class Kill:
    """One run and how it ended."""

    layout: str
    whom: str  # "launcher", "rank", "machine"
    signal: signal.Signals
    moment: str
    steps: int = 0  # in its metrics when the signal was sent
    seconds: float = 0.0  # until all of its processes had ended

    def __str__(self) -> str:
        return (
            f"{self.signal.name} to a {self.whom} while {self.moment}, {self.layout}: at step {self.steps},"
            f" all ended after {self.seconds:.1f} s"
        )


def chosen(chance: random.Random, number: int) -> Kill:
    """A kill: each signal is sent to each target in turn; layout and moment are random."""
    whom = ("launcher", "rank", "machine")[number % 3]
    layout = chance.choice(LAYOUTS[1 + number % 2])
    return Kill(layout, whom, SIGNALS[number // 3 % 3], chance.choice(MOMENTS))


def start(run: Path, layout: str, machines: int, precision: str) -> list[subprocess.Popen]:
    """Start the training with one torchrun for each machine. Returns these launchers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    meet = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1"
    # A torchrun waits for a machine that was lost before they met: 45 s, not the usual ten minutes.
    meet += f" --rdzv-conf join_timeout=45 --rdzv-id {uuid.uuid4()}"
    sizes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
    how = f"{sizes} --every 3 --keep 4 --timeout 10 --precision {precision} {layout} --out {run}"
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


def disturb(run: Path, kill: Kill, chance: random.Random, precision: str) -> None:
    """Start a run, kill it, and check that it ends and has lost nothing. Raises AssertionError."""
    machines = 2 if kill.layout in LAYOUTS[2] else 1
    saved = checkpoints(run)
    began = int(saved[-1].name[5:]) if saved else 0  # the step from which it continues
    launchers = start(run, kill.layout, machines, precision)
    everybody: dict[int, psutil.Process] = {p.pid: psutil.Process(p.pid) for p in launchers}
    try:
        deadline = time.monotonic() + PATIENCE
        wanted = began + chance.randint(2, 9)
        until = time.monotonic() + (chance.uniform(0.5, 12) if kill.moment == "starting" else PATIENCE)
        # The file still has later steps of the run before until this one has begun.
        began_at = (run / "metrics.jsonl").stat().st_mtime_ns if (run / "metrics.jsonl").exists() else 0
        while time.monotonic() < until:
            assert all(p.poll() is None for p in launchers), "it ended before it was killed"
            if kill.moment != "starting" and (run / "metrics.jsonl").exists():
                moved = (run / "metrics.jsonl").stat().st_mtime_ns > began_at
                if moved and last_step(run) >= wanted:
                    break
            time.sleep(0.02)
        else:
            assert kill.moment == "starting", "it does not train"
        while kill.moment == "saving" and not list(run.glob("*.unfinished")):
            assert time.monotonic() < deadline, "it does not save"
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.05))
        for launcher in launchers:
            everybody |= {p.pid: p for p in ranks_of(launcher)}
        complete = checkpoints(run)
        kill.steps = last_step(run)
        launcher = chance.choice(launchers)
        ranks = [p for p in ranks_of(launcher) if "helpers.train" in p.cmdline()]
        targets = {"launcher": [psutil.Process(launcher.pid)], "rank": ranks[:1], "machine": ranks}[kill.whom]
        for target in targets or [psutil.Process(launcher.pid)]:  # there is no rank yet
            target.send_signal(kill.signal)
        sent = time.monotonic()
        for p in launchers:
            everybody |= {child.pid: child for child in ranks_of(p)}
            p.wait(PATIENCE)
        _, alive = psutil.wait_procs(list(everybody.values()), timeout=20)
        kill.seconds = time.monotonic() - sent
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


def apart(run: Path, precision: str) -> float:
    """The largest relative difference of any step's loss from that of a single undisturbed process. Raises
    AssertionError if a step is missing or is listed twice.
    """
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "steps are missing"
    with World(1, timeout=300, counted=False) as alone:
        losses = alone.run(undisturbed, Config(**SIZES, precision=precision), len(lines))[0]
    return max(abs(line["loss"] / loss - 1) for line, loss in zip(lines, losses))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("count", type=int)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--precision", default="float64")
    args = options.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for number in range(args.count):
            kill = chosen(chance, number)
            try:
                disturb(run, kill, chance, args.precision)
            except Exception:
                print(f"FAILED: {kill}", *(log.read_text()[-6000:] for log in run.parent.glob("said-*")))
                raise
            print(f"{number + 1:2} {kill}", flush=True)
        far = apart(run, args.precision)
        print(f"{last_step(run)} steps, losses within {far:.1e} of the undisturbed run's")


if __name__ == "__main__":
    main()
