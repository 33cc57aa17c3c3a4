"""Checkpoints and metrics that are no longer what was saved, or never were ours: nothing is read in silence,
and nothing in them is run.
"""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from test_train import main_of, trained  # noqa: F401

from helpers import train
from helpers.train import checkpoint
from three_axes.foreign import DataUnpickler

LAST, BEFORE = "step-000004", "step-000002"


class Command:
    """Unpickled as it stands, it makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def shorter(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:1000])


def missing(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def a_block_of_zeros(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(20 * 4096)
        file.write(bytes(4096))


def of_an_older_step(folder: Path) -> None:
    shutil.copy(folder.parent / BEFORE / "__0_0.distcp", folder)


def another_bit_in_the_index(folder: Path) -> None:
    index = bytearray((folder / ".metadata").read_bytes())
    index[1000] ^= 1
    (folder / ".metadata").write_bytes(index)


def no_json(folder: Path) -> None:
    (folder / checkpoint.ABOUT).write_text("{")


def other_json(folder: Path) -> None:
    (folder / checkpoint.ABOUT).write_text('{"files": [], "model": {}, "step": 4}')


@pytest.fixture(scope="module")
def undisturbed(trained, aside, tmp_path_factory):  # noqa: F811
    """The losses of six steps."""
    run = shutil.copytree(trained, tmp_path_factory.mktemp("undisturbed") / "run")
    assert aside(main_of, run, "--steps", "6")[0] == 0
    return [line["loss"] for line in train.read_metrics(run)]


@pytest.mark.parametrize(
    "harm, sentence",
    [
        (shorter, "__0_0.distcp has 1,000 of"),
        (missing, "__0_0.distcp is missing"),
        (a_block_of_zeros, "__0_0.distcp has other bytes than were saved"),
        (of_an_older_step, "__0_0.distcp has other bytes than were saved"),
        (another_bit_in_the_index, ".metadata has other bytes than were saved"),
        (no_json, "its about.json cannot be read"),
        (other_json, "its about.json cannot be read"),
    ],
)
def test_the_checkpoint_before_is_taken(trained, undisturbed, aside, tmp_path, harm, sentence):  # noqa: F811
    run = shutil.copytree(trained, tmp_path / "run")
    harm(run / LAST)
    code, _, err = aside(main_of, run, "--steps", "6")
    _, told, goes_on, *_ = err.splitlines()
    assert code == 0 and sentence in told and told.endswith(f"; it is put aside as {LAST}.damaged")
    assert goes_on.startswith(f"going on from {BEFORE}")
    assert [line["loss"] for line in train.read_metrics(run)] == undisturbed
    assert [folder.name for folder in checkpoint.complete(run)] == [BEFORE, "step-000006"]


def test_where_none_is_whole_nothing_is_lost(trained, aside, tmp_path):  # noqa: F811
    run = shutil.copytree(trained, tmp_path / "run")
    for folder in (LAST, BEFORE):
        a_block_of_zeros(run / folder)
    code, _, err = aside(main_of, run, "--steps", "6")
    assert code == 2 and "no other complete one is there. To begin anew, give another --out" in err
    assert len(train.read_metrics(run)) == 4 and len(checkpoint.complete(run)) == 2


def test_a_sample_is_of_the_last_whole_one(trained, aside, tmp_path):  # noqa: F811
    run = shutil.copytree(trained, tmp_path / "run")
    a_block_of_zeros(run / LAST)
    code, out, err = aside(main_of, run, "--sample", "The")
    assert code == 0 and out.startswith("The") and err.endswith("; the one before it is taken\n")


def test_an_index_that_holds_code_is_not_read(trained, aside, tmp_path):  # noqa: F811
    run, made = shutil.copytree(trained, tmp_path / "run"), tmp_path / "made"
    index, about = run / LAST / ".metadata", json.loads((run / LAST / checkpoint.ABOUT).read_text())
    index.write_bytes(pickle.dumps(Command(made)))
    about["files"][".metadata"] = [index.stat().st_size, checkpoint._digest(index)]
    (run / LAST / checkpoint.ABOUT).write_text(json.dumps(about))
    for command in (("--sample", "The"), ("--steps", "6")):
        code, _, err = aside(main_of, run, *command)
        assert code == 2 and "it names " in err and "which may be code" in err, err
    assert not made.exists()


def test_a_name_behind_a_dot_is_none_of_dcps():
    reads = DataUnpickler(b"", checkpoint._is_of_index)
    for module, name in (("torch.distributed.checkpoint.metadata", "os.system"), ("torch", "hub.load")):
        with pytest.raises(pickle.UnpicklingError, match="may be code"):
            reads.find_class(module, name)


def test_an_entry_that_holds_code_is_not_read(tmp_path):
    entry = io.BytesIO()
    torch.save(Command(tmp_path / "made"), entry)
    entry.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint._Data().load_bytes(None, entry)
    assert not (tmp_path / "made").exists()


def test_metrics_say_which_steps_they_lack(trained, aside, tmp_path):  # noqa: F811
    run = shutil.copytree(trained, tmp_path / "run")
    first, _, _, last = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([first, "\0" * 40, '{"step": "3"}', last, '{"st']))
    code, _, err = aside(main_of, run, "--steps", "6")
    assert code == 0
    assert "metrics.jsonl is damaged: 2 of the 4 steps so far have no line in it, step 2 is the first" in err
    assert [line["step"] for line in train.read_metrics(run)] == [1, 4, 5, 6]


def test_a_run_that_goes_on_otherwise_says_so(trained, aside, tmp_path):  # noqa: F811
    run = shutil.copytree(trained, tmp_path / "run")
    options = "--steps 6 --lr 0.001 --seed 1 --precision float64".split()
    code, _, err = aside(main_of, run, *options)
    assert code == 0, err
    assert (
        "pp 1; precision float32, now float64; seed 0, now 1; lr 0.003, now 0.001; schedule_steps 4, now 6)"
        in err
    )
