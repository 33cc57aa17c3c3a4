"""A free port, for launchers that need one as an argument."""

from __future__ import annotations

import random
import socket

# Below the ports that a system gives out by itself (Linux from 32768, macOS and Windows from 49152), so that
# neither gloo nor another program receives this port before its user binds it.
FROM, TO = 20_000, 32_768


def free_port() -> str:
    """A TCP port of this machine on which nobody listens, as text, because launchers take text.

    Raises OSError if none of a thousand tried is free.
    """
    for port in random.SystemRandom().sample(range(FROM, TO), 1000):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
    raise OSError(f"no free port: 1000 between {FROM} and {TO} were tried; end what holds them")
