"""The processes of one world, the pipes to them, and how they end."""

from __future__ import annotations

import json
import multiprocessing.process
import os
import shutil

from . import server, worker
from .meter import BOX_BYTES


class Processes:
    """The processes of one world and the pipes to them. Holds no World, so that a forgotten World can end."""

    def __init__(self, folder: str):
        self.folder, self.owner = folder, os.getpid()
        self.processes, self.controls, self.outputs, self.leashes = [], [], [], []

    def add(self, setup: worker.Setup) -> None:
        server.warm()
        context = server.context()
        mine, its = context.Pipe()
        printed, printing = context.Pipe(duplex=False)
        leashed, leash = context.Pipe(duplex=False)
        os.set_blocking(printed.fileno(), False)
        process = context.Process(target=worker.main, args=(setup, its, printing, leashed), daemon=True)
        self.processes.append(process)
        self.controls.append(mine)
        self.outputs.append(printed)
        self.leashes.append(leash)
        try:
            with server.main_hidden():
                process.start()
        except (EOFError, BrokenPipeError, ConnectionError):  # the fork server had ended
            server.warm()
            with server.main_hidden():
                process.start()
        finally:
            for end in (its, printing, leashed):
                end.close()

    def forget(self) -> None:
        """In a fork of the kernel: these ranks are the kernel's, and must see when it ends."""
        for pipe in (*self.controls, *self.outputs, *self.leashes):
            pipe.close()
        for p in self.processes:
            multiprocessing.process._children.discard(p)
        self.processes, self.controls, self.outputs, self.leashes = [], [], [], []

    def box(self, rank: int) -> dict | None:
        """The last collective that a rank entered in this call, also when its process is gone."""
        try:
            with open(os.path.join(self.folder, f"box-{rank}"), "rb") as f:
                return json.loads(f.read(BOX_BYTES).rstrip(b"\0"))
        except (OSError, ValueError):
            return None

    def end(self, folder: bool = False) -> None:
        """Kill the processes and close the pipes. Killing is safe: ranks own nothing that outlives them."""
        if os.getpid() != self.owner:
            return  # a fork of the kernel that ends: the ranks are not its own
        for p in self.processes:
            if p.pid is not None:
                p.kill()
        for p in self.processes:
            if p.pid is not None:
                p.join()
                p.close()
        for pipe in (*self.controls, *self.outputs, *self.leashes):
            pipe.close()
        self.processes, self.controls, self.outputs, self.leashes = [], [], [], []
        if folder:
            shutil.rmtree(self.folder, ignore_errors=True)
