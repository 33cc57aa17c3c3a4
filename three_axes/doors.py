"""Makes a package's door: the names that other packages may import. All its other names may change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module


def door(
    room: str, **modules: Collection[str]
) -> tuple[Callable[[str], object], Callable[[], Collection[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) of the package `room`. modules: module -> its public names. A
    module is loaded when one of its names is first used; `dir`, and so completion by Tab, loads none.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{home[name]}"), name)

    return __getattr__, lambda: sorted({*vars(sys.modules[room]), *home} - {"door"})
