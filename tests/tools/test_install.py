"""The copies of the notebooks that `make lab` makes; the wheel in fresh environments, with each command
run in an empty folder; and the index from which `make` installs torch. Nothing is fetched from a network.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import venv
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_connection, create_server

import nbformat
import numpy
import pytest
from traces import by_hand

from helpers.ranks.ports import free_port
from three_axes.commands import COMMANDS
from tools import colab, lab, pages

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(numpy.__file__).parents[1]  # the folder of the installed packages


# -- copies of the notebooks ---------------------------------------------------------------------------


def test_a_copy_is_made_once_and_is_the_readers(tmp_path):
    mine = tmp_path / "deep" / "my"
    assert lab.prepare(mine) == []
    stored = sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if p.parent.name != ".ipynb_checkpoints")
    copies = sorted(mine.rglob("*.ipynb"))
    assert [p.relative_to(mine) for p in copies] == [p.relative_to(ROOT / "notebooks") for p in stored]
    for path, original in zip(copies, stored):
        copy, drop = nbformat.read(path, as_version=4), nbformat.read(original, as_version=4)
        assert [c.source for c in copy.cells] == [c.source for c in drop.cells]
        assert not any(c.get("outputs") or c.get("execution_count") for c in copy.cells)
    answered = mine / stored[6].name
    changed = nbformat.read(answered, as_version=4)
    changed.cells[-1].source = "my answer"
    nbformat.write(changed, answered)
    (mine / stored[0].name).unlink()
    assert lab.prepare(mine) == []  # what is missing comes back, what is there stays
    assert (mine / stored[0].name).exists() and "my answer" in answered.read_text()
    for n in (1, 2):
        (told,) = lab.prepare(mine, ["07"])
        kept = mine / "old" / f"{answered.stem}-{n}.ipynb"
        assert str(answered) in told and str(kept) in told and kept.exists()
    assert "my answer" in (mine / "old" / f"{answered.stem}-1.ipynb").read_text()
    assert "my answer" not in answered.read_text()


def test_a_newer_version_of_a_drop_is_announced(tmp_path, monkeypatch):
    lab.prepare(tmp_path)
    third, seventh, ninth = (next(tmp_path.glob(f"{n}_*")) for n in ("03", "07", "09"))
    old = json.loads(third.read_text())
    old["metadata"][lab.MADE_FROM] = "of yesterday"
    third.write_text(json.dumps(old))
    seventh.write_text('{"cells": [')  # half of a notebook
    ninth.write_text("[]")
    monkeypatch.delenv("MAKELEVEL", raising=False)
    (told,) = lab.prepare(tmp_path)
    assert "newer version of: 03 07 09" in told and "--fresh 03 --fresh 07 --fresh 09" in told
    monkeypatch.setenv("MAKELEVEL", "1")
    assert 'make lab FRESH="03 07 09"' in lab.prepare(tmp_path)[0]
    assert len(lab.prepare(tmp_path, ["03", "07", "09"])) == 3 and lab.prepare(tmp_path) == []


def test_a_folder_that_cannot_hold_copies_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no drop '99'; they are 01, 02"):
        lab.prepare(tmp_path, ["99"])
    with pytest.raises(ValueError, match="name another folder for your own copies"):
        lab.prepare(ROOT / "notebooks")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot hold the notebooks"):
        lab.prepare(tmp_path / "file")


# -- the wheel -----------------------------------------------------------------------------------------


CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKELEVEL")}


def run(*command, cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    """Run a command without the variables that lead to this project's folder."""
    how = dict(capture_output=True, text=True, timeout=300)
    return subprocess.run(list(map(str, command)), cwd=cwd, env=CLEAN | environ, **how)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project's wheel, built here."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = "-m pip wheel --no-deps --no-build-isolation --no-index --wheel-dir".split()
    built = run(sys.executable, *pip, folder, ROOT, cwd=folder)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def environment(folder: Path, wheel: Path, packages: Path) -> Path:
    """The commands of a fresh environment with the wheel and the packages of `packages`."""
    python = bare(folder, packages) / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    installed = run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return python.parent


def bare(folder: Path, packages: Path) -> Path:
    """A fresh environment with the packages of `packages`, without the course."""
    venv.create(folder, with_pip=False)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(f"{packages}\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def numpy_only(wheel, tmp_path_factory) -> Path:
    """The commands of an environment with the wheel and NumPy alone."""
    folder = tmp_path_factory.mktemp("planner")
    packages = folder / "packages"
    packages.mkdir()
    for path in PACKAGES.glob("numpy*"):
        (packages / path.name).symlink_to(path)
    return environment(folder / "venv", wheel, packages)


@pytest.fixture(scope="module")
def course(wheel, tmp_path_factory) -> Path:
    """The commands of an environment with the wheel and all packages."""
    folder = tmp_path_factory.mktemp("course") / "venv"
    commands = environment(folder, wheel, PACKAGES)
    (folder / "share").symlink_to(PACKAGES.parents[2] / "share")  # Jupyter's templates and pages
    return commands


# command -> (arguments, words that it prints)
SIZING = {
    "plan": ("llama-3-8b --gpus 8 --batch 32", "best: "),
    "estimate": ("llama-3-8b --gpus 8 --batch 32 --explain --measured 9000tokens/s", "cost_constants.json"),
    "explain": ("TRACE", "compute"),
    "count": ("--help", "predicted beside counted"),  # the rest of these two needs PyTorch
    "verify": ("--help", "optimizer steps, after which the job ends"),
}
COURSE = {"doctor": ("1", "1 ok"), "class": (f"collect {ROOT / 'data' / 'incidents'}", "0 students")}
RUN = "-m three_axes.run"  # of modules for makers
LAUNCHED = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
TRAIN = "helpers.train --tp 2 --steps 2 --hidden 32 --seq-len 16 --batch 8"
FROM_A_WHEEL = [
    *((f"three-axes {name} {arguments}", expected) for name, (arguments, expected) in COURSE.items()),
    (f"python {RUN} tools.printables cards cheatsheet worksheets", "19 worksheets to print"),
    (f"python {RUN} tools.slides 07", "1 deck in"),
    (f"python {LAUNCHED} {RUN} {TRAIN}", "2 steps under"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", SIZING)
def test_a_planner_with_numpy_alone(numpy_only, tmp_path, tmp_path_factory, command):
    arguments, expected = SIZING[command]
    trace = tmp_path_factory.mktemp("traces") / "rank0.json"
    trace.write_text(json.dumps({"traceEvents": by_hand()}))
    arguments = arguments.replace("TRACE", str(trace))
    done = run(numpy_only / "three-axes", command, *arguments.split(), cwd=tmp_path)
    assert done.returncode == 0 and expected in done.stdout, done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_with_numpy_alone_other_commands_say_what_they_need(numpy_only, tmp_path):
    for command in set(COMMANDS) - set(SIZING) - {"class"}:
        arguments, _ = COURSE.get(command, ("", ""))
        refused = run(numpy_only / "three-axes", command, *arguments.split(), cwd=tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert refused.stderr.startswith(f"three-axes {command} needs ")
        assert "pip install '.[course]' in a clone of the course" in refused.stderr
        told = run(numpy_only / "three-axes", command, "--help", cwd=tmp_path)
        assert told.returncode == 0 and told.stdout.startswith(f"usage: three-axes {command}"), told.stderr
    counting = run(numpy_only / "python", "-c", "from three_axes import counting", cwd=tmp_path)
    assert "three_axes.counting needs" in counting.stderr and "in a clone of the course" in counting.stderr
    names = {path.name for path in numpy_only.parent.glob("lib/python*/site-packages/*") if path.is_dir()}
    assert "three_axes" in names and not names & {"helpers", "drops", "tools"}
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("command, expected", FROM_A_WHEEL)
def test_the_whole_course_from_a_wheel(course, tmp_path, command, expected):
    program, *words = command.split()
    done = run(course / program, *words, cwd=tmp_path)
    status = int("class" in words)  # it is given files, of which none is a student's
    assert done.returncode == status and expected in done.stdout + done.stderr, done.stderr
    assert {p.name for p in tmp_path.iterdir()} <= {"build"}


def wait_until_it_listens(port: int) -> None:
    """Wait until something listens on the port: a server prints its address a little earlier."""
    for _ in range(600):
        try:
            return create_connection(("localhost", port)).close()
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}")


@pytest.mark.slow
def test_the_lab_of_a_wheel_has_the_readers_copies_and_a_kernel_that_knows_the_course(course, tmp_path):
    port = free_port()
    names = ("JUPYTER_CONFIG_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environ = CLEAN | {name: str(tmp_path / name) for name in names}
    command = [course / "three-axes", "lab", "--no-browser", f"--port={port}"]
    server = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    opens = re.compile(r"(http://localhost\S*/)lab/tree/three-axes/01_\S+(\?token=\w+)")
    try:
        printed = ""
        while not (address := opens.search(printed)):
            assert (line := server.stderr.readline()), printed
            printed += line
        wait_until_it_listens(port)
        ask = lambda path: json.load(urllib.request.urlopen(address[1] + path + address[2], timeout=60))
        names = {entry["name"] for entry in ask("api/contents/three-axes")["content"]}
        assert names == {p.name for p in (ROOT / "notebooks").glob("*.ipynb")} | {"beyond"}
        settings = ask("lab/api/settings/@jupyterlab/apputils-extension:notification")
        assert settings["schema"]["properties"]["fetchNews"]["default"] == "false"
    finally:
        server.terminate()
        server.communicate(timeout=60)
    book = next((tmp_path / "three-axes").glob("03_*"))
    copy = nbformat.read(book, as_version=4)
    copy.cells = pages.core(copy)  # nbval runs the rest
    nbformat.write(copy, book)
    said = "import os; from three_axes.files import *; course_on_path(); print(os.environ['PYTHONPATH'])"
    path = run(course / "python", "-c", said, cwd=tmp_path).stdout.strip()  # as the lab's kernels have it
    execute = "-m nbconvert --to notebook --execute --inplace".split()
    ran = run(course / "python", *execute, book.name, cwd=book.parent, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stderr
    assert any(c.get("outputs") for c in nbformat.read(book, as_version=4).cells)


@pytest.mark.slow
def test_a_wheel_beside_a_notebook_is_found_by_its_first_cell(wheel, tmp_path):
    """In an environment without the course, and without asking a network."""
    commands = bare(tmp_path / "venv", PACKAGES)
    shutil.copy(wheel, tmp_path)
    cell = colab.setup_of(colab.UNNAMED, "..").replace('!"{sys.exec', "raise SystemExit('installed') #")
    code = f"{cell}\nimport helpers, drops\nprint(helpers.__file__)"
    done = run(commands / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "three-axes-wheel" in done.stdout, done.stderr


DOCUMENTED = re.findall(r"^\| (pip|uv alone) \| `(.+?)`", (ROOT / "docs" / "install.md").read_text(), re.M)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, command", DOCUMENTED)
def test_what_the_documents_say_installs_the_course(name, command, tmp_path):
    """The documented command, except that `three-axes doctor 1` replaces `three-axes lab`."""
    venv.create(tmp_path / "venv", with_pip=name == "pip")
    bins = [tmp_path / "venv" / "bin", Path(sys.executable).parent]
    environ = {"PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]])}
    environ["UV_CACHE_DIR"] = str(tmp_path / "cache")
    environ["UV_FIND_LINKS"] = os.environ.get("PIP_FIND_LINKS", "")
    words = [word.strip("'") for word in command.replace("three-axes lab my", "three-axes doctor 1").split()]
    how = dict(capture_output=True, text=True, timeout=1200)
    done = subprocess.run(words, cwd=ROOT, env=CLEAN | environ, **how)
    if name == "pip":
        assert done.returncode == 0, done.stderr
        done = run(bins[0] / "three-axes", "doctor", "1", cwd=tmp_path)
    assert done.returncode == 0 and "1 ok" in done.stdout, done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["lint", "test", "site", "lab"])
def test_make_installs_nothing_where_bin_is_given(target):
    given = subprocess.run(
        ["make", "-n", target, "BIN=/nowhere/bin"], cwd=ROOT, capture_output=True, text=True
    )
    assert given.returncode == 0 and "/nowhere/bin/" in given.stdout, given.stderr
    assert "install" not in given.stdout and "venv" not in given.stdout


# -- where make takes torch from -----------------------------------------------------------------------


@pytest.fixture
def index(tmp_path) -> Path:
    """A folder in place of PyTorch's index, with an empty torch."""
    folder = tmp_path / "index" / "torch"
    folder.mkdir(parents=True)
    name, info = "torch-2.13.0+cpu-py3-none-any.whl", "torch-2.13.0+cpu.dist-info"
    with zipfile.ZipFile(folder / name, "w") as made:
        made.writestr("torch/__init__.py", "")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    return folder.parent


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("make"), reason="make on Linux")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="here is an NVIDIA GPU")
def test_make_takes_the_cpu_build_where_its_index_answers(tmp_path, index):
    def make(number: int, *variables: str):
        folder = tmp_path / f"venv-{number}"
        start = time.monotonic()
        command = ["make", f"VENV={folder}", f"PYTHON={sys.executable}", *variables, folder / ".torch"]
        done = run(*command, cwd=ROOT, PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
        assert done.returncode == 0, done.stderr
        return done.stdout, list(folder.rglob("torch-2.13.0+cpu.dist-info")), time.monotonic() - start

    handler = functools.partial(SimpleHTTPRequestHandler, directory=index)
    with ThreadingHTTPServer(("localhost", 0), handler) as server, create_server(("localhost", 0)) as silent:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        printed, installed, _ = make(1, f"CPU_BUILDS=http://localhost:{server.server_port}")
        assert installed and "took the CPU build" in printed
        printed, installed, seconds = make(2, f"CPU_BUILDS=http://localhost:{silent.getsockname()[1]}")
        assert not installed and "does not answer" in printed and seconds < 60
        server.shutdown()
    printed, installed, _ = make(3, f"TORCH={index.as_uri()}")
    assert installed and "NVIDIA" not in printed
