"""Kernels for tests: those that readers get, but for how they are reached."""

import tempfile
import uuid
from pathlib import Path

from jupyter_client.manager import KernelManager


class WithoutPorts(KernelManager):
    """A kernel's five ports are chosen a second before it takes them, and ranks of other tests may take one
    meanwhile. Then it never answers. So it listens in files.
    """

    def __init__(self, **kwargs):
        files = Path(tempfile.gettempdir()) / f"kernel-{uuid.uuid4().hex}"
        super().__init__(transport="ipc", ip=str(files), **kwargs)
