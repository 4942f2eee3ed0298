"""What buffers and arenas have in common: an address, a size, and a record of who looks at them."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, Protocol

from tonnage.buffers.stream import Stream
from tonnage.errors import BufferInUse, BufferOOM, DriverOOM, NotMaterialized

_numbers = count(1)


class Until(weakref.ref[Any]):
    """A weak reference that is a key even where what it refers to could not be one."""

    __slots__ = ()
    # Those of C, because a key may be looked for in the middle of anything.
    __hash__, __eq__ = object.__hash__, object.__eq__


class Exports:
    """The views handed out over one range of addresses: what they are called, until their last holder lets go.

    ``on_host`` says that the addresses are the host's whatever the device is. A view may end on any thread, in the
    middle of anything: no lock is taken then and no code of ours runs.
    """

    def __init__(self, *, on_host: bool = False) -> None:
        self.on_host = on_host
        self._alive: dict[int | Until, str] = {}
        self._view: weakref.ref[Any] | None = None
        self._extent = (0, 0)

    @property
    def is_alive(self) -> bool:
        return bool(self._alive)

    @property
    def names(self) -> tuple[str, ...]:
        """What is alive, oldest first."""
        return tuple(self._alive.values())

    def add(self, name: str) -> int:
        """One more view; returns the number by which ``drop`` knows it."""
        self._alive[number := next(_numbers)] = name
        return number

    def drop(self, number: int) -> None:
        self._alive.pop(number, None)

    def add_until(self, name: str, held: object) -> None:
        """One more view, alive as long as ``held`` is."""
        self._alive[Until(held, self._alive.pop)] = name

    def view(self, address: int, size_bytes: int) -> Any:
        """The view remembered over exactly this range, or None where it is gone."""
        return None if self._view is None or self._extent != (address, size_bytes) else self._view()

    def remember(self, view: object, address: int, size_bytes: int) -> None:
        self._view, self._extent = weakref.ref(view), (address, size_bytes)

    def require_none(self, what: object) -> None:
        """Raise ``BufferInUse`` while a view is alive: closing would leave it pointing at nothing."""
        if self._alive:
            raise BufferInUse(f"{what!r} cannot be closed: {' and '.join(self.names)} over it is still alive")


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


def require_usable(memory: Memory) -> None:
    """Raise ``NotMaterialized`` while it sleeps, ``ValueError`` once it is closed: nothing lies at its address then."""
    ask = getattr(memory, "require_usable", None)
    if ask is not None:
        ask()
    elif getattr(getattr(memory, "root", memory), "is_asleep", False):
        raise NotMaterialized(f"{memory!r} sleeps: materialise it before it is looked at")
    if memory.size_bytes and not memory.address:
        raise ValueError(f"{memory!r} is closed")


def out_of_memory(error: DriverOOM, stream: Stream, *, size_bytes: int, owner: str) -> BufferOOM:
    """The driver's refusal with who asked, for how much, and how full the device is."""
    free, total = stream.driver.mem_info()
    return BufferOOM(
        size_bytes=size_bytes,
        used_bytes=total - free,
        capacity_bytes=total,
        owner=owner,
        detail=str(error),
        stream=stream.bare_handle,
    )
