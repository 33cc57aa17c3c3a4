"""Kernels for tests: like those of readers, but reached through files."""

import tempfile
import uuid
from pathlib import Path

from jupyter_client.manager import KernelManager


class WithoutPorts(KernelManager):
    """A kernel's five ports are chosen a second before it opens them, and ranks of other tests may take one
    meanwhile. Then the kernel never answers. So this one uses sockets in files.
    """

    def __init__(self, **kwargs):
        files = Path(tempfile.gettempdir()) / f"kernel-{uuid.uuid4().hex}"
        super().__init__(transport="ipc", ip=str(files), **kwargs)
