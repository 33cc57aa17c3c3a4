"""A port for launchers that must be told one."""

from __future__ import annotations

import random
import socket

# Below those that a system hands out unasked (Linux from 32768, macOS and Windows from 49152),
# so that no gloo pair or kernel takes it before its user does.
FROM, TO = 20_000, 32_768


def free_port() -> str:
    """A TCP port of this machine on which nobody listens, as text, which launchers take.

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
