"""No output is wider than the terminal, and nothing is cut if there is no terminal."""

import io
import os
import sys

import forked
import pytest

from three_axes.__main__ import main
from three_axes.commands import COMMANDS
from three_axes.table import Table
from three_axes.terminal import fitted, fold

LONG = "plan llama-3-70b --gpus 64 --batch 128 --seq 8192 --why 4,8,2".split()


class Screen(io.StringIO):
    """A fake terminal with a number of columns, which keeps what is written."""

    def __init__(self, columns: int, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(columns))
        super().__init__()

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "command",
    [
        LONG,
        "plan llama-3-70b --gpus 64 --batch 128 --seq 8192 --framework megatron-lm".split(),
        "estimate llama-3-70b --tp 8 --pp 2 --dp 4 --batch 128 --explain".split(),
        "estimate llama-3-70b --tp 8 --pp 4 --dp 2 --batch 128".split(),
    ],
    ids=lambda command: " ".join(command[:1] + command[-1:]),
)
def test_output_fits_the_terminal_and_loses_no_word(columns, command, monkeypatch, capsys):
    assert main(command) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", screen := Screen(columns, monkeypatch))
    assert main(command) == 0
    written = screen.getvalue()
    assert max(map(len, written.splitlines())) <= columns
    words = lambda text: sorted(word for word in text.split() if set(word) - {"─"} and word != "how")
    assert words(written) == words(whole) and "\x1b" not in whole + written


def test_without_a_command_all_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    listed = capsys.readouterr().out
    assert ended.value.code == 0 and all(name in listed for name in ("plan", *COMMANDS))


def test_a_refusal_fits_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen(80, monkeypatch))
    assert main(["plan", "lama", "--gpus", "8"]) == 2
    assert max(map(len, screen.getvalue().splitlines())) <= 80 < len(screen.getvalue())


def test_nothing_is_folded_without_a_terminal():
    table = Table(["layout", "how"], [["DP 4 · TP 8", "a sentence that is longer than any line " * 5]])
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe, fitted(pipe):
        assert len(repr(table).splitlines()) == 3 and fold("word " * 50) == "word " * 50
    assert len(repr(table).splitlines()) == 3


def test_text_is_folded_on_a_real_terminal():
    leader, follower = pytest.importorskip("pty").openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as screen, fitted(screen):
        assert len(fold("word " * 200).splitlines()) > 1


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("pl", "plan"),
        ("plan lla", "llama-3-70b"),
        ("plan x --framework mega", "megatron-lm"),
        ("estimate x --recompute f", "full"),
        ("class co", "collect"),
        ("count --wa", "--watch"),
    ],
)
def test_tab_completion_offers_the_next_word(typed, offered, tmp_path):
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "told")}
    asked |= {"COMP_LINE": f"three-axes {typed}", "COMP_POINT": str(len(f"three-axes {typed}"))}
    code = "import sys; sys.argv = ['three-axes']; from three_axes.__main__ import command; command()"
    done = forked.python(code, **asked)
    told = (tmp_path / "told").read_text().split("\v")
    assert offered in [one.strip() for one in told], (told, done.stderr)


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--version"], "three-axes "),
        (["paln"], "unknown command 'paln'; the nearest is 'plan'"),
        (["plan", "llama-3-70b"], "the following arguments are required: --gpus"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(argv, sentence, capsys):
    try:
        main(argv)
    except SystemExit as end:
        assert end.code == 2
    said = "".join(capsys.readouterr())
    assert said.startswith(sentence) and len(said.splitlines()) <= 5
