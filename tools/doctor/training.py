"""Checks of `three-axes doctor` on training and launchers, on one machine and on two."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from helpers.ranks import World
from helpers.train import Config, Trainer, read_metrics
from three_axes import devices, nccl

from .check import ROOT, Skipped, Wrong, check, expect, own_device

PORT = 29401  # on which two hosts meet


@check(
    "drop 09's states",
    "what each rank holds under DP, ZeRO and FSDP, within 1 % of the formulas",
    "report it: PyTorch holds something that the course does not expect",
)
def states(meet: str) -> str:
    from drops import d09

    with World(4, timeout=60) as world:
        table = d09.states_table(world, {kind: d09.measured_states(world, kind)[0] for kind in d09.KINDS})
    expect(all(abs(float(row[-1]) - 1) <= 0.01 for row in table.rows), repr(table))
    return ", ".join(f"{row[0]} {row[-1]}" for row in table.rows) + " of the formulas"


def _config(**choice) -> Config:
    return Config(**dict(hidden=32, seq_len=16, batch=16, steps=20, warmup=5) | choice)


def _train(config: Config, steps: int) -> list[float]:
    """Train `steps` steps on a rank, and return their losses. With `config.out`, begin at the last checkpoint
    there, if there is one, and save one at the end.
    """
    trainer = Trainer(config, own_device())
    if config.out:
        trainer.resume()
    losses = [trainer.step()["loss"] for _ in range(steps)]
    if config.out:
        trainer.save()
    return losses


def _layouts(n: int) -> list[dict[str, int]]:
    """All (dp, tp, pp) of n ranks for a model of 4 layers and 8 heads."""
    sizes = [(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4) if n % (t * p) == 0]
    return [{"dp": n // (t * p), "tp": t, "pp": p} for t, p in sizes]


def _apart(losses: list[float], twin: list[float]) -> float:
    """The largest relative difference of a step's losses."""
    return max(abs(a / b - 1) for a, b in zip(losses, twin, strict=True))


def _training_world() -> World:
    """The ranks that training uses here: on GPUs if there are several, four that share a single GPU, or four
    on the CPU.
    """
    from drops.d14 import world_here

    if devices.gpus() > 1:
        return world_here()
    if devices.gpus() and not (nccl.shares() or nccl.newer()):
        return World(1, gpus=True, timeout=120)
    return World(4, gpus=devices.gpus() == 1, timeout=120)


@check(
    "training",
    "the twin's losses in every layout, within 0.00001 in float32 and 2 % in bfloat16; a checkpoint of GPUs"
    " is continued on the CPU, and back",
    "report it with the layout that differs",
)
def training(meet: str) -> str:
    from drops.d14 import twin

    config = _config()
    alone = twin(config, 9)
    with _training_world() as world, World(2, timeout=120) as on_cpu, tempfile.TemporaryDirectory() as folder:
        n, worst = world.n, 0.0
        for layout in _layouts(n):
            apart = _apart(world.run(_train, _config(**layout), 4)[0], alone[:4])
            worst = max(worst, apart)
            expect(apart < 1e-5, f"{layout}: losses differ from the twin's by {apart:.1e}")
        half = _apart(world.run(_train, _config(dp=n, precision="bfloat16"), 4)[0], alone[:4])
        expect(half < 0.02, f"bfloat16: losses differ from the twin's by {half:.1%}")
        first, second = (world, _config(dp=n, out=folder)), (on_cpu, _config(tp=2, out=folder))
        resumed = [loss for w, choice in (first, second, first) for loss in w.run(_train, choice, 3)[0]]
        apart = _apart(resumed, alone)
        expect(apart < 1e-5, f"saved, resumed on the CPU and back: losses differ by {apart:.1e}")
    where = "GPUs" if devices.gpus() else "the CPU"
    return (
        f"{len(_layouts(n))} layouts of {n} on {where}: within {worst:.0e} of the twin; bfloat16 {half:.1%};"
        " resumed on the CPU and back"
    )


@check(
    "accelerate",
    "the twin's losses by accelerate's own API, and by ranks that its launcher starts",
    "compare your accelerate's version with constraints.txt",
)
def accelerate(meet: str) -> str:
    from drops import d14

    config = _config()
    with _training_world() as world:
        apart = _apart(world.run(d14.with_accelerate, config, 3)[0], d14.twin(config, 3))
        ranks = world.n
    expect(apart < 1e-5, f"on {ranks} ranks losses differ from the twin's by {apart:.1e}")
    with tempfile.TemporaryDirectory() as folder:
        n = _two_at_most()
        launcher = f"-m accelerate.commands.launch --num_processes {n} --num_machines 1 --main_process_port 0"
        launcher += " --mixed_precision no --dynamo_backend no" + " --multi_gpu" * (n > 1)
        ran = _command(*launcher.split(), *SMALL_RUN, *f"--tp {n} --steps 3 --out".split(), folder)
        _expect_end(ran, "accelerate launch", "3 steps under")
        expect_twins_losses(Path(folder), 3)
    return f"{ranks} ranks within {apart:.0e} of the twin; launched: {_first_line(ran)}"


SMALL_RUN = "-m helpers.train --hidden 32 --seq-len 16 --batch 8".split()


def _expect_end(ran: subprocess.CompletedProcess, launcher: str, *expected: str) -> None:
    """Raises Wrong unless a command has ended with status 0 and has printed all of `expected`."""
    well = ran.returncode == 0 and all(words in ran.stderr for words in expected)
    last = " | ".join(ran.stderr.strip().splitlines()[-4:])
    expect(well, f"{launcher} ended with {ran.returncode}: {last}")


def expect_twins_losses(folder: Path, steps: int) -> None:
    """Raises Wrong unless the metrics of a run of SMALL_RUN have every step once, with the loss of the same
    run in a single process.
    """
    from drops.d14 import twin

    metrics = read_metrics(folder)
    recorded = [line["step"] for line in metrics]
    steps_text = f"its metrics have the steps {', '.join(map(str, recorded))}, not 1 to {steps}"
    expect(recorded == list(range(1, steps + 1)), steps_text)
    alone = twin(Config(hidden=32, seq_len=16, batch=8, steps=steps), steps)
    apart = _apart([line["loss"] for line in metrics], alone)
    expect(apart < 1e-5, f"launched, its losses differ from the twin's by {apart:.1e}")


def _command(*arguments: str, seconds: float = 150, **environ: str) -> subprocess.CompletedProcess:
    """Run Python with these arguments. Raises Wrong if it does not end in so many seconds."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environ
    how = dict(cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds)
    try:
        return subprocess.run([sys.executable, *arguments], **how)
    except subprocess.TimeoutExpired as e:
        last = (e.stderr or b"").decode(errors="replace")[-300:]
        raise Wrong(f"no end after {seconds:g} s: {last}") from None


def _two_at_most() -> int:
    """Processes for a launcher: two, or one if there is a single GPU."""
    return min(2, devices.gpus() or 2)


def _first_line(ran: subprocess.CompletedProcess) -> str:
    """The line in which a run prints its devices."""
    found = re.search(r"(?m)^\d+ ranks? on .*$", ran.stderr)
    return found[0] if found else "(no first line)"


KILLED = """import os
from helpers import train
step = train.Trainer.step
def dies(self):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if self.number == 5 and first and os.environ["RANK"] == os.environ["DIES"]:
        os._exit(9)
    return step(self)
train.Trainer.step = dies
os._exit(train.main())
"""


@check(
    "torchrun",
    "a run that loses a rank after step 5 starts again from the checkpoint of step 3 and ends, with the"
    " twin's losses",
    "the run's output says which rank; try a longer --timeout",
)
def torchrun(meet: str) -> str:
    n = _two_at_most()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "dies.py"
        script.write_text(KILLED)
        launcher = f"-m torch.distributed.run --nproc-per-node {n} --max-restarts 1".split()
        options = "--steps 8 --every 3 --timeout 20 --out".split()
        ran = _command(*launcher, str(script), *SMALL_RUN[2:], *options, folder, DIES=str(n - 1))
        _expect_end(ran, "torchrun", "going on from step-000003", "8 steps under")
        expect_twins_losses(Path(folder), 8)
    return f"{_first_line(ran)}; went on from step-000003, 8 steps as the twin's"


def own_address(other: str) -> str:
    """The address from which this machine sends to another; "" if it has no route to it. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)
            return s.getsockname()[0]
    except OSError:
        return ""


@check(
    "two hosts",
    "ranks on both machines in one run",
    "open the firewall between them for all ports, or name the network with GLOO_SOCKET_IFNAME and"
    " NCCL_SOCKET_IFNAME",
)
def two_hosts(meet: str) -> str:
    if not meet:
        raise Skipped(
            "not asked for. Run  three-axes doctor 13 --meet HOST  on two machines at once, HOST being"
            " the name of one of them"
        )
    on_each_host, own = max(1, devices.gpus()), own_address(meet)
    loopback = not own or ipaddress.ip_address(own).is_loopback
    first = loopback or own == socket.gethostbyname(meet)  # whether this machine is HOST
    address = [] if loopback else ["--local-addr", own]
    of_name = [name for name, all_ in psutil.net_if_addrs().items() if own in (a.address for a in all_)]
    network = {"GLOO_SOCKET_IFNAME": of_name[0]} if of_name and not loopback else {}
    ran = _command(
        *f"-m torch.distributed.run --nnodes 2 --nproc-per-node {on_each_host} --rdzv-backend c10d".split(),
        *f"--rdzv-endpoint {meet}:{PORT} --rdzv-conf is_host={int(first)},join_timeout=60".split(),
        *address,
        *[*SMALL_RUN, *"--tp 2 --steps 5".split()],
        seconds=200,
        **{name: os.environ.get(name, value) for name, value in network.items()},
    )
    _expect_end(ran, "torchrun")
    where = f": {_first_line(ran)}"
    if "steps under" not in ran.stderr:
        where = "; the other machine's report says on what"
    return f"{2 * on_each_host} ranks trained together{where}"
