"""Jupyter kernels for tests. Clients reach them through files, not through TCP ports."""

import tempfile
import uuid
from pathlib import Path

from jupyter_client.manager import KernelManager


class WithoutPorts(KernelManager):
    """A kernel whose sockets are files. A usual kernel's five ports are chosen a second before it opens them;
    if ranks of other tests take one meanwhile, the kernel never answers.
    """

    def __init__(self, **kwargs):
        files = Path(tempfile.gettempdir()) / f"kernel-{uuid.uuid4().hex}"
        super().__init__(transport="ipc", ip=str(files), **kwargs)
