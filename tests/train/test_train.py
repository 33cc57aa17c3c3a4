"""The real sharded training: every layout is the twin, and whatever befalls a run, it goes on from its last
checkpoint.
"""

import importlib
import io
import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch.distributed as dist
from worlds import Shared

from drops import d14
from helpers import World, train
from helpers.train import Config, Trainer, checkpoint, launch
from tools.doctor.training import SMALL_RUN, expect_twins_losses

SMALL = Config(hidden=32, seq_len=16, batch=16, steps=20, warmup=5)
LAYOUTS = [(8, 1, 1), (2, 2, 2), (1, 2, 4)]  # more in tests/verify
HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def eight():
    shared = Shared(8, many=40, timeout=120)
    yield shared
    shared.close()


@pytest.fixture
def world(eight):
    with eight.lent() as world:
        yield world


@pytest.fixture(scope="module")
def twin():
    """The losses of 20 steps of the same model in this process, with nothing but torch."""
    return d14.twin(SMALL, SMALL.steps)


def small(dp=1, tp=1, pp=1, **choice) -> Config:
    """With the fewest microbatches, which are what costs time: the default is twice as many."""
    return replace(SMALL, dp=dp, tp=tp, pp=pp, **{"microbatch": SMALL.batch // dp // pp} | choice)


def losses_of(config: Config, steps: int) -> list[float]:
    trainer = Trainer(config)
    return [trainer.step()["loss"] for _ in range(steps)]


def near(losses, others, bound):
    assert len(losses) == len(others)
    assert max(abs(a / b - 1) for a, b in zip(losses, others)) < bound


slow = lambda *cases: [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("dp, tp, pp", LAYOUTS)
def test_every_layout_is_the_twin(world, twin, dp, tp, pp):
    ranks = world.run(losses_of, small(dp, tp, pp), 20)
    assert all(losses == ranks[0] for losses in ranks)
    near(ranks[0], twin, 1e-6)


@pytest.mark.parametrize(
    "choice",
    [
        dict(dp=2, tp=2, pp=2, sp=True),
        *slow(
            dict(dp=4, tp=2, sp=True),
            dict(dp=8, shard=2),
            dict(dp=4, pp=2, microbatch=0),
            dict(dp=4, tp=2, shard=1),
            dict(dp=4, pp=2, microbatch=1, schedule="GPipe"),
            dict(dp=8, microbatch=1),
        ),
    ],
    ids=str,
)
def test_so_is_every_other_choice(world, twin, choice):
    near(world.run(losses_of, small(**choice), 6)[0], twin[:6], 1e-6)


@pytest.mark.parametrize(
    "choice",
    [
        dict(dp=2, cp=2, pp=2, shard=2),
        *slow(
            dict(cp=8),
            dict(dp=4, cp=2, microbatch=2),
            dict(dp=2, cp=4, shard=1),
            dict(dp=2, cp=4, shard=2),
            dict(dp=1, tp=2, pp=2, cp=2, sp=True),
        ),
    ],
    ids=str,
)
def test_a_cut_sequence_is_the_twin_to_the_last_digit(world, choice):
    config = small(**choice, precision="float64")
    near(world.run(losses_of, config, 3)[0], d14.twin(config, 3), 1e-12)


@pytest.mark.slow
def test_half_precision_follows_the_twin_from_afar(world, twin):
    for choice in (dict(dp=2, tp=2, pp=2), dict(tp=2, pp=2, cp=2)):
        near(world.run(losses_of, small(**choice, precision="bfloat16"), 6)[0], twin[:6], 2e-2)


@pytest.mark.slow
def test_it_goes_on_under_another_layout(world, twin, tmp_path):
    def begin(config):
        trainer = Trainer(config)
        losses = [trainer.step()["loss"] for _ in range(5)]
        trainer.save()
        return losses

    def go_on(config, folder, steps):
        trainer = Trainer(config)
        wrote = trainer.resume(folder)
        losses = [trainer.step()["loss"] for _ in range(steps)]
        trainer.save()
        return wrote, losses

    here = {"out": str(tmp_path)}
    near(world.run(begin, small(2, 2, 2, **here))[0], twin[:5], 1e-6)
    for start, choice, wrote in (
        (5, dict(dp=4, pp=2), "dp 2 · tp 2 · pp 2"),
        (8, dict(dp=1, tp=2, pp=2, cp=2, sp=True), "dp 4 · tp 1 · pp 2"),
        (11, dict(dp=2, cp=4, shard=2), "dp 1 · tp 2 · pp 2 · cp 2 · sp"),
    ):
        by, losses = world.run(go_on, small(**choice, **here), checkpoint.complete(tmp_path)[-1], 3)[0]
        assert by == f"written under {wrote}"
        near(losses, twin[start : start + 3], 1e-5)
    with World(1, timeout=60) as alone:
        near(alone.run(go_on, small(**here), checkpoint.complete(tmp_path)[-1], 6)[0][1], twin[14:], 1e-5)
    assert [p.name for p in checkpoint.complete(tmp_path)] == [f"step-{k:06d}" for k in (5, 8, 11, 14, 20)]


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice, sentence",
    [
        (
            dict(dp=2, tp=2),
            (
                "dp·tp·pp = 2·2·1 = 4, but 8 processes were started; start one for each, as torchrun"
                " --nproc-per-node 4"
            ),
        ),
        (dict(tp=3), "dp·tp·pp = ?·3·1, but 8 processes were started"),
        (dict(cp=3), "dp·tp·pp·cp = ?·1·1·3, but 8 processes were started"),
        (dict(cp=0), "cp must be at least 1, not 0"),
        (
            dict(cp=4, seq_len=20),
            "cp 4 cuts each sequence into 8 pieces, and 20 tokens do not divide by that",
        ),
        (dict(cp=8, seq_len=10), "take a sequence of 16, or another cp"),
        (dict(cp=2, shard=3), "shard 3 does not divide dp·cp 4·2"),
        (dict(tp=4, cp=2, sp=True, seq_len=12), "tp 4 must divide a rank's part of the sequence, 6 tokens"),
        (dict(tp=8, heads=4), "tp 8 does not divide 4 attention heads; take 4"),
        (dict(pp=8), "4 layers do not divide over pp 8; take pp 1, 2, 4"),
        (
            dict(dp=4, pp=2, microbatch=4),
            "1F1B needs at least as many microbatches as stages: 1 of 4 sequences are too few for 2",
        ),
        (dict(dp=8, batch=12), "a batch of 12 sequences does not divide by dp 8; take a batch of 8"),
        (dict(dp=8, microbatch=4), "a batch of 16 does not divide by dp·microbatch = 8·4"),
        (dict(dp=8, shard=3), "shard 3 does not divide dp 8"),
        (dict(tp=8, sp=True, seq_len=12), "tp 8 must divide the sequence of 12 tokens"),
        (dict(dp=8, schedule="ZB-V"), "schedule is one of 1F1B, GPipe"),
        (dict(dp=8, lr=-1.0), "lr must be positive, not -1.0"),
        (dict(dp=8, steps=0), "steps must be at least 1, not 0"),
        (dict(dp=8, lr=float("inf")), "lr must be at most 1,000,000,000, not inf"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(choice, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        replace(SMALL, **choice).checked(8)
    assert "\n" not in str(refusal.value)


def test_a_default_is_never_blamed():
    with pytest.raises(ValueError, match="4 layers do not divide over pp 3; take pp 1, 2, 4"):
        Config(pp=3).checked(3)
    assert Config(pp=3, layers=6).checked(3).microbatch == 4  # a sixth of 32 is 5, which divides nothing


def test_a_text_that_is_missing_or_too_short(tmp_path):
    with pytest.raises(ValueError, match="the text .*nowhere.txt cannot be read .*; give a file with --text"):
        train.read_text(str(tmp_path / "nowhere.txt"))
    (tmp_path / "short.txt").write_text("hello")
    with pytest.raises(ValueError, match="the text has 5 tokens; sequences of 16 need at least 18"):
        train.batch_of(train.read_text(str(tmp_path / "short.txt")), 0, SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one process with checkpoints at steps 2 and 4."""
    run = tmp_path_factory.mktemp("trained")
    options = ["--out", str(run), "--steps", "4", "--every", "2"]
    done = forked.command(*SMALL_RUN[1:], *options, cwd=HERE.parent)
    assert done.returncode == 0, done.stderr
    return run


def main_of(run: Path, *options: str) -> tuple[int, str, str]:
    """What the command of one process returns and prints, in this process."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = launch.main(
                ["--hidden", "32", "--seq-len", "16", "--batch", "8", "--out", str(run), *options]
            )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return code, out.getvalue(), err.getvalue()


def test_a_checkpoint_of_another_model_or_none(trained, aside, tmp_path):
    code, _, err = aside(main_of, trained, "--steps", "6", "--layers", "8")
    assert code == 2 and "holds a model of" in err and "'layers': 4" in err and "another --out" in err
    code, _, err = aside(main_of, tmp_path, "--sample", "The")
    assert code == 2 and "has no complete checkpoint" in err


def test_a_run_goes_on_with_the_text_it_began_with(aside, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name * 100)
    run, end = tmp_path / "run", ("--steps", "2", "--every", "2")
    assert aside(main_of, run, *end, "--text", str(tmp_path / "one"))[0] == 0
    for text in ((), ("--text", str(tmp_path / "two"))):
        code, _, err = aside(main_of, run, "--steps", "4", *text)
        assert code == 2 and f"learned from {tmp_path / 'one'} (300 tokens), this run would" in err, err
    assert aside(main_of, run, "--steps", "4", "--text", str(tmp_path / "one"))[0] == 0


def in_a_log(*options):
    """With a line for each step."""
    importlib.import_module("helpers.train.run").EVERY = 0.0
    return main_of(*options)


def test_going_on_within_one_schedule_gives_the_losses_of_one_long_run(aside, tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for run, steps in ((parts, 4), (parts, 8), (whole, 8)):
        code, _, err = aside(in_a_log, run, "--steps", str(steps), "--schedule-steps", "8", "--every", "4")
        assert code == 0 and f"\nstep {steps} of {steps}: loss " in err and " tokens/s, 0 s left\n" in err
    losses = [[line["loss"] for line in train.read_metrics(run)] for run in (parts, whole)]
    assert losses[0] == losses[1]


def test_a_folder_that_cannot_be_and_a_sample_of_nothing(aside, tmp_path):
    (tmp_path / "a_file").write_text("")
    code, _, err = aside(main_of, tmp_path / "a_file", "--steps", "2")
    assert code == 2 and err.endswith(f"\n{tmp_path / 'a_file'} cannot be the run's folder: File exists\n")
    code, _, err = aside(main_of, Path(), "--out", "", "--sample", "The")
    assert code == 2 and err == "--sample and --export need --out, the folder of a run\n"


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(aside, tmp_path):
    options = "--steps 8 --every 8 --lr 1e8 --warmup 0 --clip 1e8".split()
    code, _, err = aside(main_of, tmp_path / "run", *options)
    assert code == 2 and err.endswith(
        "so training has ended; nothing was saved after it. Take a smaller lr\n"
    ), err
    assert not checkpoint.complete(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n[1]\n')
    assert train.read_metrics(tmp_path / "run") == [{"step": 1}]


def test_the_trained_model_writes(trained, aside):
    code, out, _ = aside(main_of, trained, "--sample", "The ")
    assert code == 0 and out.startswith("The ")


def test_a_full_disk_loses_nothing(tmp_path):
    """A limit on the size of files stands for the disk: the checkpoint does not fit, the metrics do."""

    def run(config):
        messages = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        try:
            train.train(config, say=messages.append)
        except ValueError as e:
            return messages, str(e)

    config = replace(SMALL, dp=2, steps=4, every=2, out=str(tmp_path))
    with World(2, timeout=60) as world:
        messages, end = world.run(run, config)[0]
    assert len(messages) == 2 and "step-000002 could not be written" in messages[0]
    assert "File too large" in messages[0] and "training goes on" in messages[0]
    assert "its last checkpoint is missing" in end
    assert len(train.read_metrics(tmp_path)) == 4 and not list(tmp_path.glob("step-*"))


# -- launchers, and what befalls a run -------------------------------------------------------------


@pytest.mark.parametrize(
    "message, lost",
    [
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242", True),
        ("[../gloo/transport/tcp/pair.cc:553] Read error [10.77.0.2]:4242: Connection reset by peer", True),
        (
            (
                "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to"
                " complete"
            ),
            True,
        ),
        ("[../gloo/transport/tcp/pair.cc:193] Connect timeout [127.0.0.1]:4242", True),
        ("Application timeout caused pair closure", True),
        ("writev [10.77.0.2]:4242: Broken pipe", True),
        ("[../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", False),
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)", False),
        (
            (
                "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL"
                " version 2.28\nncclRemoteError: A call failed possibly due to a network error or a remote"
                " process exiting prematurely."
            ),
            True,
        ),
        ("NCCL communicator was aborted on rank 1.", True),
        (
            (
                "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
                " Timeout(ms)=60000) ran for 60041 milliseconds"
            ),
            True,
        ),
        (
            (
                "NCCL error in: ProcessGroupNCCL.cpp:3356, invalid usage (run with NCCL_DEBUG=WARN for"
                " details), NCCL version 2.28\nncclInvalidUsage: This usually reflects invalid usage of NCCL"
                " library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000"
            ),
            False,
        ),
        (
            (
                "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error, NCCL version"
                " 2.28\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2"
                " 'out of memory' (timeout was not the reason)"
            ),
            False,
        ),
    ],
)
def test_a_lost_rank_is_told_from_a_mistake(message, lost):
    assert launch.lost_contact(dist.DistBackendError(message)) is lost
    assert launch.lost_contact(RuntimeError(message)) is lost


def test_ranks_agree_on_an_attempt_whatever_dead_ones_left():
    store = dist.HashStore()
    store.set("asks/1", "a token of a rank that died")
    names = []
    for _ in range(2):
        with ThreadPoolExecutor(3) as ranks:
            agreed = list(ranks.map(lambda rank: launch.agree_on_attempt(store, rank, 3), range(3)))
        assert len(set(agreed)) == 1
        names.append(agreed[0])
    assert names[0] != names[1]
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistNetworkError, match=r"timed out waiting for ranks \[1\] of 2"):
        launch.agree_on_attempt(dist.PrefixStore("alone", store), 0, 2)


def unshared(kind: str, what: str) -> list[str]:
    """A command that runs others in a namespace of their own; where this system does not permit that, or what
    is to be done there, the test is skipped.
    """
    for way in (["unshare", kind], ["unshare", "--user", "--map-root-user", kind]):
        tried = [*way, "sh", "-c", what]
        if shutil.which("unshare") and subprocess.run(tried, capture_output=True).returncode == 0:
            return way
    pytest.skip(f"not permitted here, or a program is missing: unshare {kind}, {what}")


def on_two_hosts(folder: Path, when: str, *command: str) -> list[str]:
    """What a command prints on each of two hosts, which are namespaces here. when: the file after which
    tests/two_hosts.sh takes the second one away, or "-".
    """
    way = unshared("--net", "nsenter --version && ip link add this type veth peer name that")
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    script = str(HERE / "two_hosts.sh")
    done = subprocess.run(
        [*way, script, str(folder), when, *command], cwd=HERE.parent, env=environ, timeout=250
    )
    printed = [(folder / name).read_text() for name in ("host0", "host1")]
    assert done.returncode == 0, printed
    return printed


@pytest.mark.slow
def test_one_of_two_hosts_is_lost(tmp_path):
    run, steps = tmp_path / "run", 24
    train_it = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 1:2 --nproc-per-node 2"
        " --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf"
        " is_host=$FIRST,last_call_timeout=4,keep_alive_interval=1 --max-restarts 1 --local-addr $HOST -m"
        f" helpers.train --tp 2 --hidden 32 --seq-len 16 --batch 8 --steps {steps} --every 4 --timeout 8"
        f" --out {run}"
    )
    log, _ = on_two_hosts(tmp_path, str(run / "step-000004"), "sh", "-c", train_it)
    expect_twins_losses(run, steps)
    assert "steps under dp 1 · tp 2 · pp 1" in log
    assert re.search(r"has lost the others .*step-\d+ is complete: start the same command again", log)
    assert re.search(r"going on from step-\d+, the last complete checkpoint \(written under dp 2 · tp 2", log)


@pytest.mark.slow
def test_the_doctor_brings_two_hosts_together(tmp_path):
    doctor = [sys.executable, "-m", "three_axes", "doctor", "13", "--meet", "10.77.0.1"]
    for report in on_two_hosts(tmp_path, "-", *doctor):
        assert "13 two hosts: ok" in report and "2 ranks trained together" in report
