"""What a room shows to those outside of it. The rest of its modules may change from one day to the next."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module


def door(
    room: str, **modules: Collection[str]
) -> tuple[Callable[[str], object], Callable[[], Collection[str]]]:
    """A package's `__getattr__` and `__dir__`, by PEP 562. modules: module -> its public names. It is loaded
    when the first of them is asked for; `dir`, and with it completion by Tab, knows them before.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{home[name]}"), name)

    return __getattr__, lambda: sorted({*vars(sys.modules[room]), *home} - {"door"})
