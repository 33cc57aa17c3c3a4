"""One run owns its folder: two would mix their metrics and replace each other's checkpoints.

    run/owner.json      which process on which machine trains here, and since when

The owner touches the file every few seconds, so that a start on another machine, which shares the disk and
cannot see the process, can tell a run that is under way from one that was killed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psutil

FILE = "owner.json"
BEAT = 3.0  # seconds between two touches
SILENT = 15.0  # seconds without one after which an owner on another machine counts as gone


class Owner:
    """This process's claim to a folder. `lost`: what became of it, '' while it is ours."""

    def __init__(self, run: Path):
        self.file, self.lost, self._ended = run / FILE, "", threading.Event()
        self.about = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "sees": _sees(),
            "process": os.getpid(),
            "began": psutil.Process().create_time(),
            "since": datetime.now().isoformat(" ", "seconds"),
        }
        made = self.file.with_name(f"{FILE}.{self.about['token']}")
        try:
            made.write_text(json.dumps(self.about))
            os.link(made, self.file)  # fails where somebody was faster, on a shared disk too
        finally:
            made.unlink(missing_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                os.utime(self.file)
                there = _read(self.file)
                if there and there["token"] != self.about["token"]:
                    self.lost = f"has been taken over by process {there['process']} on {there['host']}"
                    return
            except FileNotFoundError:
                self.lost = "has been removed"
                return
            except OSError:  # a full or sleeping disk; the next touch may come through
                pass

    def check(self) -> None:
        """Raises ValueError where another run has taken the folder, or somebody has removed it."""
        if self.lost:
            raise ValueError(f"{self.file.parent} {self.lost}, so this run ends here")

    def release(self) -> None:
        """Give the folder up: no more touches, and the file goes if it is still ours."""
        self._ended.set()
        if (_read(self.file) or {}).get("token") == self.about["token"]:
            self.file.unlink(missing_ok=True)


@contextmanager
def owning(run: Path, step: int) -> Iterator[Owner]:
    """Own the folder in this block. step: the last one that its metrics have, for whoever is refused.

    Raises ValueError while another run has it. One that is gone is followed without a question.
    """
    if (run / FILE).exists():
        there = _read(run / FILE)  # None: damaged, and so nobody's, since an owner writes it whole
        if there and _alive(run / FILE, there):
            raise ValueError(
                f"{run} belongs to a run that is under way: process {there['process']} on {there['host']},"
                f" since {there['since']}, last step {step}. Let it end, or end it there with"
                f" kill {there['process']}; then the same command goes on from its last checkpoint"
            )
        _clear(run, there)
    try:
        owner = Owner(run)
    except FileExistsError:
        raise ValueError(f"another run took {run} at this moment; it goes on, and this one ends") from None
    except OSError as e:
        raise ValueError(f"{run} cannot be written: {e.strerror}") from None
    try:
        yield owner
    finally:
        owner.release()


def _clear(run: Path, gone: dict | None) -> None:
    """Put away the file of an owner that is gone. Raises ValueError where somebody else did so first."""
    away = run / f"{FILE}.{uuid.uuid4().hex}"
    try:
        os.rename(run / FILE, away)
    except FileNotFoundError:
        return
    if (_read(away) or {}).get("token") != (gone or {}).get("token"):  # it was a new owner's
        os.rename(away, run / FILE)
        raise ValueError(f"another run took {run} at this moment; it goes on, and this one ends")
    away.unlink()


def _alive(file: Path, there: dict) -> bool:
    if there["sees"] == _sees():
        try:
            process = psutil.Process(there["process"])
            return process.create_time() == there["began"] and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
    last, until = file.stat().st_mtime_ns, time.monotonic() + SILENT
    while time.monotonic() < until:  # on another machine: by its touches, whatever its clock says
        time.sleep(SILENT / 30)
        try:
            if file.stat().st_mtime_ns != last:
                return True
        except FileNotFoundError:
            return False
    return False


def _sees() -> str:
    """The same in all processes that can see each other's numbers, and in no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return socket.gethostname()


def _read(file: Path) -> dict | None:
    try:
        about = json.loads(file.read_text())
        return about if {"token", "host", "sees", "process", "began", "since"} <= set(about) else None
    except (OSError, ValueError):
        return None


def end_with_launcher() -> None:
    """End this process within a second when torchrun, which started it, is gone: killed, it cannot end its
    ranks itself, and they would train on beside the next run. Without torchrun, nothing is watched.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher and began_under_python:
            time.sleep(0.5)
        message = f"rank {os.environ.get('RANK')} ends: its launcher is gone\n"
        os.write(2, message.encode())
        os._exit(1)

    # Killed while this rank imported torch, it has left us to a parent that is no launcher.
    began_under_python = any(_runs_python(process) for process in psutil.Process().parents())
    threading.Thread(target=watch, daemon=True).start()


def _runs_python(process: psutil.Process) -> bool:
    try:
        return Path(process.exe()).name.startswith("python")
    except psutil.Error:  # of another user
        return False
