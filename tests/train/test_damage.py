"""A damaged checkpoint or file of metrics is found: the run continues from what is intact, with a message."""

import json
import os
import random
import shutil
from pathlib import Path

import forked
import pytest
from small_run import SMALL_RUN
from test_train import HERE, main_of

from helpers import train

LAST, BEFORE = "step-000004", "step-000002"
FILES = "__0_0.distcp", "__1_0.distcp", ".metadata", train.ABOUT, train.SUMS
KINDS = "truncated", "flipped", "emptied", "missing", "zeros", "a pipe", "of an older step", "of another run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of two ranks, with different seeds, with checkpoints at steps 2 and 4."""
    made = []
    for seed in "01":
        run = tmp_path_factory.mktemp(f"seed{seed}") / "run"
        options = ["--out", str(run), "--steps", "4", "--every", "2", "--seed", seed]
        done = forked.command(*SMALL_RUN[1:], *options, cwd=HERE.parent, ranks=2)
        assert done.returncode == 0, done.stderr
        made.append(run)
    return made


def harm(run: Path, other: Path, kind: str, name: str, chance: random.Random) -> None:
    """Damage a file of a run's last checkpoint. other: another run."""
    file = run / LAST / name
    size = file.stat().st_size
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[: chance.randrange(1, size)])
    elif kind == "flipped":
        content = bytearray(file.read_bytes())
        content[chance.randrange(size)] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif kind == "emptied":
        file.write_bytes(b"")
    elif kind == "missing":
        file.unlink()
    elif kind == "a pipe":  # a process that opens it waits until somebody writes
        file.unlink()
        os.mkfifo(file)
    elif kind == "zeros":
        with file.open("r+b") as opened:
            opened.seek(chance.randrange(size))
            opened.write(bytes(4096))
    else:
        shutil.copy((run / BEFORE if kind == "of an older step" else other / LAST) / name, file)


def damages() -> list[tuple[str, str, int]]:
    """(kind, file, seed): each kind of each file, and more bits that are flipped."""
    made = [(kind, name, 0) for kind in KINDS for name in FILES]
    return made + [("flipped", name, seed) for name in FILES for seed in (1, 2)]


@pytest.mark.parametrize("kind, name, seed", damages())
def test_every_damage_is_found_and_the_file_named(runs, tmp_path, kind, name, seed):
    assert len(damages()) >= 40
    run, other, said = shutil.copytree(runs[0], tmp_path / "run"), runs[1], []
    before = (run / LAST / name).read_bytes()
    harm(run, other, kind, name, random.Random(seed))
    if (run / LAST / name).is_file() and (run / LAST / name).read_bytes() == before:
        pytest.skip("the two files are the same")
    assert train.last_intact(run, said.append) == run / BEFORE
    (sentence,) = said
    assert sentence.startswith(f"{run / LAST} is damaged. ")
    assert sentence.endswith(f"it is renamed to {LAST}.damaged") and "\n" not in sentence
    if name != train.SUMS:  # a damaged list of digests may name any file
        assert f"damaged. {name}: " in sentence
    assert train.checkpoints(run) == [run / BEFORE]


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(runs, undisturbed, aside, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    harm(run, runs[1], "of another run", "__0_0.distcp", random.Random(0))
    code, _, err = aside(main_of, run, "--steps", "6")
    lines = err.splitlines()
    assert code == 0, err
    assert lines[1].endswith(f"it is renamed to {LAST}.damaged")
    assert lines[2].startswith(f"going on from {BEFORE}")
    losses = [line["loss"] for line in train.read_metrics(run)]
    assert losses == pytest.approx(undisturbed, rel=1e-6)


@pytest.fixture(scope="module")
def undisturbed(runs, aside, tmp_path_factory):
    """The losses of six steps."""
    run = shutil.copytree(runs[0], tmp_path_factory.mktemp("undisturbed") / "run")
    assert aside(main_of, run, "--steps", "6")[0] == 0
    return [line["loss"] for line in train.read_metrics(run)]


def test_without_an_intact_checkpoint_nothing_is_deleted(runs, aside, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    for folder in (LAST, BEFORE):
        (run / folder / "__0_0.distcp").write_bytes(b"")
    for _ in range(2):
        code, _, err = aside(main_of, run, "--steps", "6")
        assert code == 2 and "no other checkpoint is left. To start anew, give another --out" in err
    assert len(train.read_metrics(run)) == 4
    assert {p.name for p in run.glob("step-*")} == {f"{LAST}.damaged", BEFORE}


def test_a_sample_is_of_the_last_intact_checkpoint(runs, aside, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    (run / LAST / "__0_0.distcp").unlink()
    code, out, err = aside(main_of, run, "--sample", "The")
    assert code == 0 and out.startswith("The") and f"{LAST} is damaged. __0_0.distcp: " in err


def test_sha256sum_reads_the_list(runs):
    if not shutil.which("sha256sum"):
        pytest.skip("there is no sha256sum")
    import subprocess

    command = ["sha256sum", "-c", train.SUMS]
    done = subprocess.run(command, cwd=runs[0] / LAST, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(FILES) - 1, "one line a file, in the language of the system"


def test_damaged_lines_of_metrics_are_skipped(runs, aside, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    first, _, _, last = (run / "metrics.jsonl").read_text().splitlines()
    lines = first, "[1]", "\0" * 40, '{"step": "3"}', "[" * 9999, last, '{"st'
    (run / "metrics.jsonl").write_text("\n".join(lines))
    assert aside(main_of, run, "--steps", "6")[0] == 0
    assert [line["step"] for line in train.read_metrics(run)] == [1, 4, 5, 6]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6
