"""A fixture that runs a command of the planner."""

import os
import re
import shlex

import pytest

from three_axes.__main__ import main

# A number alone: neither the end of a name ("ZeRO-0") nor the beginning of another number ("-0.5").
MINUS_ZERO = re.compile(r"(?<!\w)[-−]0(\.0+)?(?!\w|[.,]\d)")


@pytest.fixture
def output_of(capsys):
    """output_of(command) is what a command prints; with rc=2, what it prints when it refuses."""

    def run(command: str, rc: int = 0) -> str:
        words = shlex.split(command)
        assert main(words) == rc
        got = capsys.readouterr()
        numbers = got.out
        for path in (word for word in words if os.sep in word):  # a folder may have any name
            numbers = numbers.replace(path, "")
        assert not MINUS_ZERO.search(numbers), "zero is printed with a minus sign"
        return got.err if rc else got.out

    return run
