"""What `make test` runs: tests and notebooks, in parallel; then a look for processes left behind.

Without `--all`, what `make test-all` gives, tests marked slow are left out, and of cases made at random fewer
are tried. What is marked exhaustive runs by `make attempts` only. Other arguments go to pytest.
"""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "THREE_AXES_TEST", str(uuid.uuid4())  # in the environment of everything that descends from this run


def left_behind() -> list[str]:
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if "=".join(MARK).encode() in (folder / "environ").read_bytes():
                processes.append(f"{folder.name}: {(folder / 'comm').read_text().strip()}")
        except OSError:
            pass  # gone meanwhile, or somebody else's
    return processes


def main() -> int:
    everything = "--all" in sys.argv
    # No live output: it is not the same twice.
    environ = dict([MARK], **os.environ, THREE_AXES_STREAM_AFTER="60", THREE_AXES_PROGRESS="")
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # thousands of processes would each compile the same files
    workers = max(2, os.cpu_count() or 2)  # more of them run into the tests' own timeouts
    command = f"-m pytest --nbval --nbval-cell-timeout=300 -n {workers} --dist loadfile"
    command += f" --hypothesis-profile={'thorough' if everything else 'repeatable'}"
    chosen = ["--no-loadscope-reorder", "tests", "notebooks", "-m"]
    chosen += ["not exhaustive" if everything else "not slow and not exhaustive"]
    chosen += [argument for argument in sys.argv[1:] if argument != "--all"]
    tests = subprocess.run([sys.executable, *command.split(), *chosen], cwd=ROOT, env=environ)
    deadline = time.monotonic() + 5
    while (left := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        print("processes left behind:", *left, sep="\n  ")
    return tests.returncode or bool(left)


if __name__ == "__main__":
    sys.exit(main())
