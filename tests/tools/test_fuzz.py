"""Command lines and files made at random: `tools/fuzz.py` tries more of them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
def test_whatever_strangers_give_is_answered_or_refused():
    command = [sys.executable, ROOT / "tools/fuzz.py", "--cases", "200"]
    tried = subprocess.run(command, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stdout + tried.stderr
