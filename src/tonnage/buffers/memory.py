"""What buffers and arenas have in common: an address, a size, and a record of who looks at them."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Protocol

from tonnage.buffers.stream import Stream
from tonnage.errors import BufferInUse, BufferOOM, DriverOOM


class Exports:
    """The views handed out over one range of addresses, known by a weak reference.

    Views hang on a ctypes array without memory of its own; when the last view goes, so does the array.
    """

    def __init__(self) -> None:
        self._owner: weakref.ref[ctypes.Array[ctypes.c_char]] | None = None
        self._view: weakref.ref[Any] | None = None
        self._name = ""

    @property
    def is_alive(self) -> bool:
        return self._owner is not None and self._owner() is not None

    @property
    def view(self) -> Any:
        """The view remembered by ``remember``, or None where it is gone."""
        return None if self._view is None else self._view()

    def remember(self, view: object, *, name: str) -> None:
        self._view, self._name = weakref.ref(view), name

    def owner(self, addr: int, size: int) -> ctypes.Array[ctypes.c_char]:
        """The array over ``[addr, addr + size)`` that views are made from: the living one, or a new one."""
        found = None if self._owner is None else self._owner()
        if found is None:
            found = (ctypes.c_char * size).from_address(addr)
            self._owner = weakref.ref(found)
        return found

    def require_none(self, what: object) -> None:
        """Raise ``BufferInUse`` while a view is alive: closing would leave it pointing at nothing."""
        if self.is_alive:
            raise BufferInUse(f"{what!r} cannot be closed: {self._name} over it is still alive")


class Memory(Protocol):
    """A buffer or an arena, as views and the workspace see it. ``size_bytes`` of an arena is its reservation."""

    @property
    def stream(self) -> Stream: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def usable_bytes(self) -> int:
        """Leading bytes that may be touched."""

    @property
    def exports(self) -> Exports: ...


def out_of_memory(error: DriverOOM, stream: Stream, *, size_bytes: int, owner: str) -> BufferOOM:
    """The driver's refusal with who asked, for how much, and how full the device is."""
    free, total = stream.driver.mem_info()
    return BufferOOM(
        size_bytes=size_bytes, used_bytes=total - free, capacity_bytes=total, owner=owner, detail=str(error)
    )
