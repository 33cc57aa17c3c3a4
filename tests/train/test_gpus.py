"""Ranks on GPUs, tested on machines without a GPU: there tests/standin replaces PyTorch's GPU functions.
Tests marked gpu also run on a real GPU, which four ranks share (`make test-gpu`).
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from run_all import ON_GPU
from small_run import SMALL_RUN

from helpers import World
from helpers.ranks.messages import Error, text_of
from three_axes import devices, nccl
from three_axes.__main__ import main
from three_axes.count import operators
from three_axes.plan import CLUSTERS
from tools import doctor

HERE = Path(__file__).resolve().parents[1]
STANDIN = HERE / "standin"
REAL = bool(os.environ.get(ON_GPU))  # whether this machine's GPU is used, not a stand-in
on_gpu = pytest.mark.gpu  # runs on a real GPU as well
really = pytest.mark.skipif(not REAL, reason="needs a real GPU: stand-ins run no kernels")


# -- which rank takes which GPU ---------------------------------------------------------------------------


# seen: the GPUs that each rank sees. taken: which of them each rank takes; None if a rank sees no GPU.
@pytest.mark.parametrize(
    "seen, taken",
    [
        ([()], None),
        ([("a", "b")] * 2, [0, 1]),
        ([("a",), ("b",)], [0, 0]),  # one visible GPU a rank
        ([("a", "b"), ("a",)], [1, 0]),  # one has no choice
        ([("a", "b"), ("c", "d"), ("a", "b"), ("c", "d")], [0, 0, 1, 1]),  # two hosts, ranks in turn
        ([("a", "b"), ()], None),  # a host without
        ([("a",), ("a",)], [0, 0]),  # from here on ranks share: the same one for both
        ([("a", "b", "c")] * 4, [0, 1, 2, 0]),
        ([("a",), ("b", "c"), ("a",), ("b", "c")], [0, 0, 0, 1]),  # two hosts, one has too few
    ],
)
def test_every_rank_has_a_gpu_and_they_share_evenly(seen, taken):
    assert devices.assign(seen) == taken
    if taken:
        users = Counter(there[i] for there, i in zip(seen, taken))
        hosts = {there for there in seen if len(there) > 1}
        assert all(max(users[gpu] for gpu in host) - min(users[gpu] for gpu in host) <= 1 for host in hosts)
        assert devices.in_use(seen, taken) == len(users)


@pytest.mark.parametrize(
    "ranks, gpus, sentence",
    [
        (1, 0, "1 rank on the CPU over gloo"),
        (4, 0, "4 ranks on the CPU over gloo"),
        (2, 2, "2 ranks on GPUs over NCCL, one for each"),
        (4, 1, "4 ranks share 1 GPU over NCCL; seconds mean nothing"),
        (4, 3, "4 ranks share 3 GPUs over NCCL; seconds mean nothing"),
    ],
)
def test_one_sentence_says_what_ranks_have(ranks, gpus, sentence):
    assert devices.placed(ranks, gpus) == sentence


@pytest.fixture
def with_gpus(monkeypatch):
    """Make this process believe in n GPUs, an NCCL of some version, and another NCCL that is installed."""

    def believe(n: int, version: tuple[int, ...], newer: str | None = None):
        monkeypatch.setattr(devices, "gpus", lambda: n)
        monkeypatch.setattr(devices, "identities", lambda: tuple("abcdefgh"[:n]))
        monkeypatch.setattr(nccl, "version", lambda: version)
        monkeypatch.setattr(nccl, "newer", lambda: newer)
        monkeypatch.setattr(torch.version, "cuda", "12.8")

    return believe


@pytest.mark.parametrize(
    "gpus, version, words",
    [
        (0, (), ["World(4, gpus=True): PyTorch finds no GPU that it can use with NCCL. "]),
        (1, (2, 28, 9), ["4 ranks have 1 GPU", "NCCL 2.30 or newer; 2.28.9 is loaded", "takes it, and"]),
        (
            2,
            (2, 29, 7),
            ["2.29.7", "`pip install --target ~/.cache/three-axes/nccl nvidia-nccl-cu12`", "takes them"],
        ),
        (2, (), ["4 ranks have 2 GPUs", "none is loaded. World(2"]),  # AMD's
    ],
)
def test_where_ranks_cannot_share_they_are_refused_with_what_to_do(with_gpus, gpus, version, words):
    with_gpus(gpus, version)
    with pytest.raises(ValueError) as refusal:
        World(4, gpus=True)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert str(refusal.value).endswith("World(4) runs on the CPU")


def test_advice_for_launched_ranks_names_the_library_to_preload(with_gpus, monkeypatch):
    with_gpus(1, (2, 28, 9))
    assert "Begin the command with LD_PRELOAD=~/.cache/three-axes/nccl/nvidia/" in nccl.why_not(2, 1, True)
    with_gpus(1, (2, 28, 9), "/opt/libnccl.so.2")
    assert nccl.why_not(2, 1, True).endswith(" Begin the command with LD_PRELOAD=/opt/libnccl.so.2")


@pytest.mark.parametrize("last", ["", *(f"Last error:{c}Duplicate GPU detected" for c in " \n")])
def test_an_error_of_nccl_is_one_line(last):
    said = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage (run with"
        " NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid"
        f" usage of NCCL library.\n{last}"
    )
    line = f"NCCL 2.28.9: {'Duplicate GPU detected' if last else 'invalid usage'} (ncclInvalidUsage)"
    assert text_of(RuntimeError(said)).strip() == line


@pytest.mark.parametrize(
    "kind, message, spoils",
    [
        ("AcceleratorError", "CUDA error: device-side assert triggered", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", True),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("ValueError", "no good", False),
    ],
)
def test_an_error_of_cuda_spoils_the_ranks(kind, message, spoils):
    assert Error(kind, message, [], False).spoils is spoils


def test_a_collective_without_a_work_ends_when_the_gpu_has_passed_its_event(monkeypatch):
    class Event:
        passed = False

        def record(self, stream): ...
        def query(self):
            return self.passed

        def synchronize(self):
            self.passed = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    work = operators.OnStream(torch.device("cuda", 0))
    assert not work.is_completed()
    work.wait()
    assert work.is_completed()


# -- the doctor --------------------------------------------------------------------------------


def test_the_doctor_says_what_is_wrong_and_what_to_do(monkeypatch, capsys):
    def wrong():
        raise doctor.Wrong("one thing\nand another")

    checks = [
        doctor.Check("good", "", "", lambda: "fine"),
        doctor.Check("bad", "a thing", "mend it", wrong),
        doctor.Check("broken", "an answer", "ask", lambda: 1 / 0),
    ]
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor"]) == 1
    output = re.sub(r"\d+\.\d s", "0.0 s", capsys.readouterr().out)
    assert (
        output.split("\n", 1)[1]
        == """1 good: ok, 0.0 s
  fine
2 bad: WRONG, 0.0 s
  expected: a thing
  seen: one thing
  and another
  do: mend it
3 broken: WRONG, 0.0 s
  expected: an answer
  seen: ZeroDivisionError: division by zero
  do: ask
1 ok, 2 WRONG, 0 s
"""
    )
    assert main(["doctor", "1"]) == 0
    assert main(["doctor", "4"]) == 2 and "there is no check 4: they are 1 to 3" in capsys.readouterr().err


@pytest.fixture(scope="session")
def standin():
    """Environment of a process that believes in n GPUs; for `make test-gpu`, of one that sees this machine's
    first GPU. Stand-ins are compiled once for each PyTorch.
    """
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return this_machine(environ) if REAL else with_standins(environ)


def this_machine(environ: dict[str, str]):
    """For `make test-gpu`: the environment of a process that sees this machine's first GPU."""

    def sees(n: int, version: str = "", installed: str = "", launched: bool = False) -> dict[str, str]:
        """launched: a launcher's ranks, which load the NCCL that their command names."""
        preload = launched and not nccl.shares() and nccl.newer()
        return environ | {"CUDA_VISIBLE_DEVICES": "0"} | ({"LD_PRELOAD": preload} if preload else {})

    return sees


def with_standins(environ: dict[str, str]):
    """Compile the stand-ins. Then: the environment of a process that believes in n GPUs."""
    source = b"".join(file.read_bytes() for file in sorted(STANDIN.glob("nccl_*")))
    source += torch.__version__.encode() + sys.version.encode()
    folder = HERE.parent / "build" / f"standin-{hashlib.sha256(source).hexdigest()[:12]}"
    if not (folder / "nccl_like.so").exists():
        sys.path.insert(0, str(STANDIN))
        import standin_gpus

        try:
            standin_gpus.build(folder)
        except (OSError, subprocess.CalledProcessError) as e:
            why = getattr(e, "stderr", None) or e
            pytest.skip(f"the GPUs' stand-in cannot be compiled here: {why}"[:300])

    def believes(n: int, version="2.30.7", installed="", launched=False) -> dict[str, str]:
        """version: of NCCL. installed: the version of another NCCL, in a folder on Python's path."""
        path = [STANDIN, folder, folder / installed] if installed else [STANDIN, folder]
        of_machine = dict(STANDIN_GPUS=str(n), STANDIN_NCCL=version, HOME=str(folder))
        return environ | of_machine | dict(PYTHONPATH=os.pathsep.join(map(str, path)), OMP_NUM_THREADS="1")

    return believes


def python(*arguments: str, environ: dict) -> tuple[str, str]:
    """What a Python process prints, to standard output and to standard error."""
    how = dict(cwd=HERE.parent, env=environ, capture_output=True, text=True, timeout=300)
    ran = subprocess.run([sys.executable, *arguments], **how)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    return ran.stdout, ran.stderr


# As on Colab.
ONE_GPU = [
    "ranks can share a GPU over",
    "4 on 1 GPU after",
    "2 ranks share 1 GPU over NCCL",
    "1 GPU: ",
    "6 layouts of 4 ranks on GPUs",
]


@on_gpu
@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong(standin):
    output, _ = python("-m", "three_axes", "doctor", environ=standin(1))
    assert "5 ok, 0 WRONG" in output
    assert [line for line in ONE_GPU if line not in output] == [], output


# -- what else sees GPUs -----------------------------------------------------------------------


@pytest.mark.slow
def test_drop_11_knows_its_axes_beside_a_gpu(standin):
    code = """
from drops import d11
parts = d11.measure(1, 4, 1).parts
print({axis: seconds > 0.1 for axis, seconds in parts.items() if axis in ("tp", "pp", "dp")})
"""
    assert "{'tp': True, 'pp': False, 'dp': False}" in python("-c", code, environ=standin(1))[0]


AHEAD = """
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(1000, device="cuda")
for step in range(5):
    if rank == 1 and step == 3 and sys.argv[1] == "ends":
        sys.exit(0)
    if rank == 1 and step == 3 and sys.argv[1] == "differs":
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "differs"])
def test_a_hang_is_reported_where_the_host_runs_ahead_of_the_gpu(standin, tmp_path, how):
    (tmp_path / "ahead.py").write_text(AHEAD)
    command = "-m torch.distributed.run --standalone --nproc-per-node 3 -m three_axes count --watch --exit 75"
    environ = standin(3) | {"STANDIN_AHEAD": "1"}
    environ["PYTHONPATH"] += f"{os.pathsep}{HERE.parent}"
    how_run = dict(cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    ranks = subprocess.Popen([sys.executable, *command.split(), "ahead.py", how], **how_run)
    limit = threading.Timer(250, ranks.terminate)
    limit.start()
    told, ends = "", {"ends": "did not come to", "differs": "is not alike"}[how]
    for line in ranks.stdout or ():
        told += line
        if ends in line:
            break
    limit.cancel()
    ranks.terminate()  # torchrun ends its ranks
    ranks.communicate(timeout=60)
    assert told.startswith("watching ranks on NCCL"), told
    if how == "ends":
        assert "rank 1 did not come to all_reduce number 4 of world, float32[1000]." in told
        assert "3 of them complete, the next all_reduce number 4 of world, float32[1000] (ahead.py," in told
    else:
        assert "number 4 of ranks 0–2 is not alike: rank 0: all_reduce of float32[1000]; rank 1: " in told


DROP_14 = """
import tempfile
from pathlib import Path
from drops import d14
from three_axes.plan import Layout
from helpers.train import Config
with d14.world_here() as world, tempfile.TemporaryDirectory() as folder:
    sizes = dict(batch=16, microbatch=4, steps=8, hidden=32, seq_len=16)
    config = Config(**d14.layout_here(world.n, Layout(dp=4, tp=8, pp=2)), **sizes, out=folder)
    print(world, d14.train_on(world, config))
    print(d14.three_ways(d14.one_step(world, config), config), d14.speeds(world, config), sep="\\n")
"""


ON_CPU = "World(8): 8 ranks on the CPU over gloo"


@pytest.mark.slow
@on_gpu
@pytest.mark.parametrize(
    "more, seen",
    [
        ({}, ["World(8): 8 ranks share 1 GPU over NCCL"]),
        pytest.param(
            {"NCCL_MULTI_RANK_GPU_ENABLE": "0"},
            ["8 ranks could not share", "4 ranks could not share", ON_CPU],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_drop_14_runs_to_its_end_on_what_is_there(standin, more, seen):
    output, _ = python("-c", DROP_14, environ=standin(1) | more)
    assert all(words in output for words in [*seen, "8 steps are done."]), output
    ranks = int(re.search(r"World\((\d)\)", output)[1])
    axes = {2: {"tp"}, 4: {"tp", "pp"}, 8: {"tp", "pp", "dp"}}[ranks]
    rows = re.findall(r"^(tp|pp|dp)(?: \(FSDP\))?\s+(\S+ .?B)\s+\2$", output, re.M)
    assert {axis for axis, _ in rows} == axes, output  # predicted and counted are the same
    assert ("shared: seconds mean nothing" in output) == ("ranks share 1 GPU" in output)


SHARING = """
import torch, torch.distributed as dist
from helpers import World
from helpers.ranks import RankError, current
from three_axes import nccl

def skips():
    x = torch.ones(3, device=current.rank.device)
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0) if dist.get_rank() == 1 else None
    for step in range(5):
        if (step, dist.get_rank()) != (3, 1):
            dist.all_reduce(x)
        x.sum().item()

try:
    with World(4, gpus=True) as world:
        print(world.run(nccl.version)[0])
        world.push(kept=7)
        try:
            world.run(skips, timeout=3)
        except RankError as e:
            print(e.kind, e.ranks, e.state_kept, world.pull("kept"))
except (ValueError, RuntimeError) as e:
    print(type(e).__name__, e)
"""


@on_gpu
@pytest.mark.slow
def test_ranks_share_and_a_hang_of_theirs_keeps_what_they_know(standin):
    output, error = python("-c", SHARING, environ=standin(1) | {"TORCH_CPP_LOG_LEVEL": "ERROR"})
    placed, loaded, *_ = output.splitlines()
    assert placed == "4 ranks share 1 GPU over NCCL; seconds mean nothing"
    assert loaded == "(2, 30, 7)" or REAL and re.match(r"\(2, [3-9]\d, ", loaded)
    assert "timeout [0, 2, 3] True [7, 7, 7, 7]" in output
    assert "watchdog" not in output + error, "a connection was cut before NCCL was aborted"


# A library with the text of a version that can share. A process that loads it ends.
BROKEN = """
#include <unistd.h>
const char text[] = "NCCL version 2.31.2+cuda13.0";
__attribute__((constructor)) static void ends(void) { _exit(3); }
"""
BESIDE = """
from helpers import World
from three_axes import nccl
try:
    with World(2, gpus=True) as world:
        print("ranks that share have", world.run(nccl.version)[0])
except RuntimeError as e:
    print(e)
with World(2) as world:
    print("ranks on the CPU have", world.run(nccl.version)[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_another_nccl_is_loaded_by_the_ranks_that_share_and_harms_no_other(standin, broken, tmp_path):
    environ = standin(1, "2.28.9", "" if broken else "2.31.2")
    if broken:
        library = tmp_path / nccl.IN_A_FOLDER
        library.parent.mkdir(parents=True)
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=BROKEN, text=True, check=True, timeout=60)
        environ["PYTHONPATH"] += os.pathsep + str(tmp_path)
    output, _ = python("-c", BESIDE, environ=environ)
    assert ("no ranks can start here" if broken else "ranks that share have (2, 31, 2)") in output, output
    assert "ranks on the CPU have (2, 28, 9)" in output, output


@on_gpu
@pytest.mark.slow
def test_nccls_own_error_is_printed_without_lines_for_developers(standin):
    output, error = python("-c", SHARING, environ=standin(1) | {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    told = r"RuntimeError 4 ranks could not share 1 GPU: all 4 ranks raised DistBackendError: NCCL 2\.\S+: \w"
    assert re.match(told, output) and output.endswith("World(4) runs on the CPU\n"), output
    output, error = python("-c", SHARING, environ=standin(1))
    assert "unbatched" not in output + error


TORCHRUN = "-m torch.distributed.run --nproc-per-node 2".split()


def launched(*words: str, environ: dict) -> subprocess.CompletedProcess:
    """What torchrun prints when two ranks run these words."""
    how = dict(cwd=HERE.parent, env=environ, capture_output=True, text=True, timeout=300)
    ran = subprocess.run([sys.executable, *TORCHRUN, *words], **how)
    print(ran.stdout, ran.stderr[-2000:], sep="\n")
    return ran


@on_gpu
@pytest.mark.slow
def test_launched_ranks_share_a_gpu(standin):
    shared = launched(*SMALL_RUN, "--steps", "2", environ=standin(1, launched=True))
    assert shared.returncode == 0 and "2 steps under dp 2" in shared.stderr, shared.stderr
    assert shared.stderr.count("2 ranks share 1 GPU over NCCL; seconds mean nothing") == 1


@pytest.mark.slow
def test_launched_ranks_that_cannot_share_are_refused_and_train_on_the_cpu(standin):
    refused = launched(*SMALL_RUN, "--steps", "2", environ=standin(1, "2.28.9"))
    assert refused.returncode and "exitcode  : 2" in refused.stderr, refused.stderr
    assert refused.stderr.count("2 ranks have 1 GPU, and can share one over NVIDIA's NCCL 2.30 or newer") == 1
    on_cpu = launched(*SMALL_RUN, "--steps", "2", environ=standin(1) | {"CUDA_VISIBLE_DEVICES": "-1"})
    assert on_cpu.returncode == 0 and "2 steps under dp 2" in on_cpu.stderr, on_cpu.stderr


# A user's job: two layers under DDP, then under FSDP2, two steps each. A word on the command line makes it
# wrong: rank 1 begins with a different norm.
A_JOB = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(0)
dist.init_process_group("nccl")
for wrap in (DistributedDataParallel, fully_shard)[: 1 if sys.argv[1:] else 2]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to("cuda")
    model = wrap(model)
    if sys.argv[1:] and dist.get_rank() == 1:
        with torch.no_grad():
            model.module[1].weight.mul_(1.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((4, 8), 1.0 + dist.get_rank(), device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
BYTES = 4 * (8 * 8 + 8 + 8 + 8)  # of its numbers


@on_gpu
@pytest.mark.slow
def test_a_job_of_ranks_that_share_is_counted_and_its_fault_named(standin, tmp_path):
    job, counted = tmp_path / "job.py", tmp_path / "counted.json"
    job.write_text(A_JOB)
    environ = standin(1, launched=True) | devices.SHARED
    count = f"-m three_axes count --json {counted} {job}".split()
    assert (ran := launched(*count, environ=environ)).returncode == 0, ran.stderr
    told = json.loads(counted.read_text())
    for rank in told["ranks"]:
        sent = Counter()
        for row in rank["total"]:
            sent[row["collective"]] += row["payload"]
        compared = 2 * 8  # DDP's: ranks compare how many parameters they have
        by_hand = {"all_reduce": 2 * BYTES, "all_gather": 2 * BYTES + compared, "reduce_scatter": 2 * BYTES}
        assert {op: sent[op] for op in by_hand} == by_hand, sent
    assert any("shared a GPU" in sentence for sentence in told["between_ranks"]), told["between_ranks"]
    verify = f"-m three_axes verify {job} planted".split()
    ran = launched(*verify, environ=environ)
    assert "1.weight differs along the world (ranks 0 | 1)" in ran.stdout + ran.stderr, ran.stderr


TRACED = """
import sys
import torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from helpers import World
from helpers.ranks import current
from three_axes.explain import explain

def traced(folder):
    x = torch.randn(512, 512, device=current.rank.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            x = x @ x
            x /= x.norm()
            dist.all_reduce(x)
    file = f"{folder}/rank{dist.get_rank()}.json"
    profiler.export_chrome_trace(file)
    return file

with World(2, gpus=True) as world:
    print(explain(world.run(traced, sys.argv[1])))
"""


@on_gpu
@pytest.mark.slow
@really
def test_traces_of_ranks_that_share_are_explained_with_a_doubt(standin, tmp_path):
    output, _ = python("-c", TRACED, str(tmp_path), environ=standin(1))
    assert "all_reduce" in output and "not known: whether ranks 0 and 1 shared a GPU" in output, output


def test_an_emulated_network_and_gpus_exclude_each_other(with_gpus):
    with_gpus(1, (2, 30, 7))
    with pytest.raises(ValueError, match="^gpus=True and fabric=: an emulated network holds back what gloo"):
        World(1, gpus=True, fabric=CLUSTERS["dgx-h100"])
