"""Jupyter kernels for tests. Clients reach them through files, not through TCP ports."""

import uuid

from jupyter_client.manager import KernelManager


class WithoutPorts(KernelManager):
    """A kernel whose sockets are files. A usual kernel's five ports are chosen a second before it opens them;
    if ranks of other tests take one meanwhile, the kernel never answers. The files' paths are short, because
    a socket's path may have 107 characters.
    """

    def __init__(self, **kwargs):
        from helpers.ranks import folders  # imported here because conftest must first set variables

        super().__init__(transport="ipc", ip=f"{folders.home()}/{uuid.uuid4().hex[:8]}", **kwargs)

    def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """Ask the kernel to end, as Jupyter's menu does. nbval would kill it, and a killed kernel leaves its
        temporary folders behind.
        """
        super().shutdown_kernel(now=False, restart=restart)
