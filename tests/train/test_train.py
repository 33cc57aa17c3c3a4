"""`helpers.train`: under every layout its losses equal those of one process (the twin), and a checkpoint can
be continued under any other layout.
"""

import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import forked
import pytest
import torch.distributed as dist
from small_run import SMALL_RUN, expect_twins_losses
from worlds import Shared

from drops import d14
from helpers import train
from helpers.ranks.launched import store_of_attempt
from helpers.train import Config, Trainer

# Its gradients are clipped from the first step on.
SMALL = Config(hidden=32, seq_len=16, batch=16, steps=20, warmup=5, clip=0.5)
HERE = Path(__file__).resolve().parents[1]


def layouts() -> list[dict]:
    """Each (dp, tp, pp) for 1, 2, 4 or 8 ranks, pp at most 4, with each sp and schedule that matters."""
    made = []
    for n, tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
        for sp, schedule in itertools.product((False, True), train.SCHEDULES):
            layers = 8 if schedule == "interleaved" and pp == 4 else 4
            layout = dict(dp=n // tp // pp, tp=tp, pp=pp, sp=sp, schedule=schedule, layers=layers)
            same = (sp and tp == 1) or (schedule != "1F1B" and pp == 1)  # as without sp, as under 1F1B
            if n % (tp * pp) == 0 and not same:
                made.append(layout)
    return made


# Layouts that `make test` runs, and layouts of eight ranks that `make test-all` runs.
QUICK = [
    dict(dp=2, tp=2, pp=2, sp=True, schedule="1F1B", layers=4),
    dict(dp=4, tp=1, pp=2, sp=False, schedule="interleaved", layers=4),
]
ON_EIGHT = [
    dict(dp=8, tp=1, pp=1, sp=False, schedule="1F1B", layers=4),
    dict(dp=1, tp=8, pp=1, sp=True, schedule="1F1B", layers=4),
    dict(dp=2, tp=2, pp=2, sp=True, schedule="GPipe", layers=4),
    dict(dp=1, tp=2, pp=4, sp=True, schedule="interleaved", layers=8),
]


@pytest.fixture(scope="module")
def worlds():
    shared = {n: Shared(n, many=40, timeout=240) for n in (1, 2, 4, 8)}
    yield shared
    for one in shared.values():
        one.close()


@pytest.fixture
def eight(worlds):
    with worlds[8].lent() as world:
        yield world


@cache
def twin_of(layers: int) -> list[float]:
    """The losses of 20 steps of the same model in this process, with plain torch."""
    return d14.twin(replace(SMALL, layers=layers), SMALL.steps)


@pytest.fixture
def twin():
    return twin_of(SMALL.layers)


def small(dp=1, tp=1, pp=1, **choice) -> Config:
    """SMALL with another layout and with the fewest microbatches, because more of them take more time."""
    return replace(SMALL, dp=dp, tp=tp, pp=pp, **{"microbatch": SMALL.batch // dp // pp} | choice)


def losses_of(config: Config, steps: int) -> list[float]:
    trainer = Trainer(config)
    return [trainer.step()["loss"] for _ in range(steps)]


def near(losses, others, bound):
    """Check that the relative difference of losses is below a bound."""
    assert len(losses) == len(others)
    assert max(abs(a / b - 1) for a, b in zip(losses, others)) < bound


def name_of(layout: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in layout.items())


def cases() -> list:
    """Every layout. On eight ranks most run once a week: up to four ranks have all pairs of axes."""
    made = []
    for layout in layouts():
        often = layout in ON_EIGHT or layout["dp"] * layout["tp"] * layout["pp"] < 8
        mark = pytest.mark.slow if often else pytest.mark.exhaustive
        made.append(pytest.param(layout, marks=[] if layout in QUICK else mark))
    return made


@pytest.mark.parametrize("layout", cases(), ids=name_of)
def test_every_layout_is_the_twin(worlds, layout):
    with worlds[layout["dp"] * layout["tp"] * layout["pp"]].lent() as world:
        ranks = world.run(losses_of, small(**layout), 4)
    assert all(losses == ranks[0] for losses in ranks)
    near(ranks[0], twin_of(layout["layers"])[:4], 1e-6)


def test_there_are_55_layouts():
    assert len(layouts()) == 55 and all(one in layouts() for one in QUICK + ON_EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [dict(dp=8, microbatch=1), dict(dp=4, pp=2, microbatch=0)], ids=str)
def test_microbatches_change_nothing(eight, twin, choice):
    near(eight.run(losses_of, small(**choice), 6)[0], twin[:6], 1e-6)


@pytest.mark.slow
def test_half_precision_follows_the_twin_from_afar(eight, twin):
    for choice in (dict(dp=2, tp=2, pp=2), dict(tp=2, pp=2, dp=2, sp=True)):
        near(eight.run(losses_of, small(**choice, precision="bfloat16"), 6)[0], twin[:6], 2e-2)


def go_on(config: Config, steps: int):
    """On a rank: the lines about the checkpoint, and the losses of so many steps; saves after the last."""
    trainer, said = Trainer(config), []
    trainer.resume(said.append)
    losses = [trainer.step()["loss"] for _ in range(steps)]
    trainer.save()
    trainer.saved()
    return said, losses


@pytest.mark.slow
def test_training_continues_under_other_layouts_and_numbers_of_ranks(worlds, twin, tmp_path):
    before, done = "", 0
    for n, choice in (
        (8, dict(dp=2, tp=2, pp=2)),
        (8, dict(dp=4, pp=2, schedule="interleaved")),
        (4, dict(dp=1, tp=4, sp=True)),
        (2, dict(pp=2, schedule="GPipe", async_save=True)),
        (1, dict()),
        (8, dict(dp=8)),
    ):
        with worlds[n].lent() as world:
            said, losses = world.run(go_on, small(**choice, out=str(tmp_path)), 3)[0]
        sentence = f"going on from step-{done:06d}, the last complete checkpoint {before}"
        assert said == [sentence] * bool(done)
        near(losses, twin[done : done + 3], 1e-5)
        done += 3
        before = f"(written under {small(**{'dp': 1} | choice).layout})"


# -- options that cannot work --------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice, sentence",
    [
        (dict(dp=2, tp=2), "dp 2 · tp 2 · pp 1 is 4 ranks, not 8"),
        (dict(tp=0), "tp cannot be 0"),
        (dict(tp=8, heads=4), "tp 8 does not divide 4 attention heads"),
        (dict(pp=8), "4 layers do not divide over 8 stages"),
        (dict(dp=4, pp=2, microbatch=4), "pp 2 needs 2 microbatches or more, not 1"),
        (
            dict(dp=2, pp=4, layers=8, microbatch=1, batch=12, schedule="interleaved"),
            "interleaved needs a multiple of 4 microbatches, not 6",
        ),
        (dict(dp=8, schedule="interleaved"), "interleaved needs a pipeline: pp 2 or more"),
        (dict(dp=8, batch=12), "a batch of 12 does not divide by dp·microbatch = 8·1"),
        (dict(tp=8, sp=True, seq_len=12), "under sp tp 8 must divide 12 tokens"),
        (dict(dp=8, schedule="ZB-V"), "schedule 'ZB-V' is none of 1F1B, GPipe, interleaved"),
        (dict(dp=8, precision="fp8"), "precision 'fp8' is none of ('float32', 'bfloat16', 'float64')"),
        (dict(dp=8, lr=float("nan")), "lr cannot be nan"),
        (dict(dp=8, batch=-8), "batch cannot be -8"),
    ],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused_in_a_sentence(choice, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        replace(SMALL, **choice).checked(8)
    assert "\n" not in str(refusal.value)


def test_default_sizes_are_always_accepted():
    for n, pp, layers in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (4, 6, 12)):
        if n % pp == 0 and layers % pp == 0 and 32 % (n // pp) == 0:
            made = Config(pp=pp, layers=layers).checked(n)
            m = made.batch // made.dp // made.microbatch
            assert m >= 2 * pp or pp == 1 or m == 32 // (n // pp)


def test_a_text_that_is_too_short_is_refused(tmp_path):
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
    """What the command for one process returns and prints, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    sizes = ["--hidden", "32", "--seq-len", "16", "--batch", "8", "--out", str(run)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = train.main([*sizes, *options])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return code, out.getvalue(), err.getvalue()


def test_rank_0_prints_a_refusal_and_all_ranks_exit_with_2(tmp_path):
    (tmp_path / "a_file").write_text("")
    for options, sentence in (
        ("--tp 3", "dp 1 · tp 3 · pp 1 is 3 ranks, not 2"),
        ("--text /nowhere.txt", "No such file or directory: '/nowhere.txt'"),
        (f"--out {shlex.quote(str(tmp_path))}/a_file", "File exists"),
    ):
        done = forked.command(*SMALL_RUN[1:], *shlex.split(options), cwd=HERE.parent, ranks=2)
        assert done.returncode == 2, done.stderr
        group, *others = done.stderr.splitlines()
        assert group == "2 ranks on the CPU over gloo", done.stderr
        # Where one rank ends before the other, PyTorch may add lines about its store.
        assert [sentence in line for line in others].count(True) == 1, done.stderr


@pytest.mark.slow
def test_a_checkpoint_of_another_model_or_none_is_refused(trained, aside, tmp_path):
    code, _, err = aside(main_of, trained, "--steps", "6", "--layers", "8")
    assert code == 2 and "holds model {" in err and "'layers': 4" in err and "change --out" in err
    code, _, err = aside(main_of, tmp_path, "--sample", "The")
    assert code == 2 and "has no complete checkpoint" in err


def in_a_log(*options):
    """With a line for each step."""
    train.LOG_SECONDS = 0.0
    return main_of(*options)


@pytest.mark.slow
def test_going_on_within_one_schedule_gives_the_losses_of_one_long_run(aside, tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for run, steps in ((parts, 4), (parts, 8), (whole, 8)):
        code, _, err = aside(in_a_log, run, "--steps", str(steps), "--schedule-steps", "8", "--every", "4")
        assert code == 0 and f"\nstep {steps} of {steps}: loss " in err and " tokens/s, 0 s left\n" in err
    losses = [[line["loss"] for line in train.read_metrics(run)] for run in (parts, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(aside, tmp_path):
    options = "--steps 8 --every 8 --lr 1e8 --warmup 0 --clip 1e8".split()
    code, _, err = aside(main_of, tmp_path / "run", *options)
    assert code == 2 and err.endswith(": it is not saved. Take a smaller lr\n"), err
    assert not train.checkpoints(tmp_path / "run")


def test_the_trained_model_writes(trained, aside):
    code, out, _ = aside(main_of, trained, "--sample", "The ")
    assert code == 0 and out.startswith("The ")


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    manual = " ".join(capsys.readouterr().out.split())
    for option in Config.__dataclass_fields__.values():
        assert " ".join(option.metadata["help"].split()) in manual
    assert "seconds without an answer after which another rank counts as lost (default 60.0)" in manual


# -- launchers and lost hosts ----------------------------------------------------------------------


def test_ranks_agree_on_an_attempt_whatever_dead_ones_left():
    store = dist.HashStore()
    store.set("asks/1", "a token of a rank that died")
    for attempt in ("first", "second"):
        with ThreadPoolExecutor(3) as ranks:
            parts = list(ranks.map(lambda rank: store_of_attempt(store, rank, 3), range(3)))
        assert not parts[2].check(["here"])
        parts[0].set("here", attempt)
        assert [part.get("here").decode() for part in parts] == [attempt] * 3
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistNetworkError, match=r"timed out waiting for ranks \[1\] of 2"):
        store_of_attempt(dist.PrefixStore("alone", store), 0, 2)


def unshared(kind: str, what: str) -> list[str]:
    """A command that runs others in namespaces of their own. Skips the test where that is not permitted."""
    for way in (["unshare", *kind.split()], ["unshare", "--user", "--map-root-user", *kind.split()]):
        tried = [*way, "sh", "-c", what]
        if shutil.which("unshare") and not subprocess.run(tried, capture_output=True, timeout=300).returncode:
            return way
    pytest.skip(f"not permitted here, or a program is missing: unshare {kind}, {what}")


def on_two_hosts(folder: Path, when: str, *command: str) -> list[str]:
    """What a command prints on two hosts (namespaces). when: the file after which the second is lost."""
    way = unshared("--net", "nsenter --version && ip link add this type veth peer name that")
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    script = str(HERE / "two_hosts.sh")
    how = dict(cwd=HERE.parent, env=environ, timeout=250)
    done = subprocess.run([*way, script, str(folder), when, *command], **how)
    printed = [(folder / name).read_text() for name in ("host0", "host1")]
    assert done.returncode == 0, printed
    return printed


@pytest.mark.slow
def test_training_continues_when_one_of_two_hosts_is_lost(tmp_path):
    run, steps = tmp_path / "run", 24
    train_it = (
        "[ $FIRST = 1 ] && net=here || net=there; export GLOO_SOCKET_IFNAME=$net;"
        f" exec {sys.executable} -m torch.distributed.run --nnodes 1:2 --nproc-per-node 2"
        " --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf"
        " is_host=$FIRST,last_call_timeout=4,keep_alive_interval=1 --max-restarts 1 --local-addr $HOST"
        f" -m helpers.train --tp 2 --hidden 32 --seq-len 16 --batch 8 --steps {steps}"
        f" --every 4 --timeout 8 --out {run}"
    )
    log, _ = on_two_hosts(tmp_path, str(run / "step-000004"), "sh", "-c", train_it)
    expect_twins_losses(run, steps)
    assert "steps under dp 1 · tp 2 · pp 1" in log
    assert re.search(r"going on from step-\d+, the last complete checkpoint \(written under dp 2 · tp 2", log)
