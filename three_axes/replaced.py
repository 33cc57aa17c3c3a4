"""Replaces attributes of PyTorch's classes and modules for a time, and restores exactly what was there."""

from __future__ import annotations

from typing import Any

MISSING = object()  # in place of an entry, if a class has the attribute from a base class only


class Replaced:
    """The attributes that this object has replaced, until `restore`.

    What is put back is the entry of the owner's own `__dict__`. `getattr` would not do: for a method that
    pybind11 has defined, it may return the function without what binds it to an object, and the method could
    not be called on an object any more.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, new: Any) -> None:
        """Set the attribute `name` of a class or module to `new`. Raises AttributeError if it has none."""
        getattr(owner, name)
        self._entries.append((owner, name, vars(owner).get(name, MISSING)))
        setattr(owner, name, new)

    def restore(self) -> None:
        """Put all entries back, those replaced last first."""
        while self._entries:
            owner, name, entry = self._entries.pop()
            if entry is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, entry)
