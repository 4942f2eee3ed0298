"""What becomes of the contents of memory that is released: forgotten, zeroed, or kept on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

from tonnage.buffers.backing import Backing, Backings
from tonnage.buffers.fences import Fences
from tonnage.device.driver import Driver
from tonnage.errors import DriverError, TonnageError
from tonnage.units import MiB

#: (address, bytes) of memory whose contents count.
Span: TypeAlias = tuple[int, int]

_VERIFY_BYTES = 16 * MiB


class Restore(StrEnum):
    """How contents come back when memory is materialised again. The first time nothing is done: they are undefined.

    NONE    undefined
    MEMSET  zero
    CPU     as they were, from pageable host memory
    PINNED  as they were, from pinned host memory: fast both ways, slow to set up the first time
    """

    NONE = "none"
    MEMSET = "memset"
    CPU = "cpu"
    PINNED = "pinned"

    @property
    def discards(self) -> bool:
        """Whether what was written before a release is lost."""
        return self in (Restore.NONE, Restore.MEMSET)


class Restorer(Protocol):
    """Saves the contents of one entry and brings them back. Called in this order, for all entries of a batch at once:

    ``prepare``, ``save``, (copies are waited for) ``verify``; ``abandon`` instead when the batch is called off.
    ``restore`` after every materialise; ``settle`` only when the whole batch is awake, so that a wake which is rolled
    back may be repeated. ``close`` when the entry goes.
    """

    def prepare(self, spans: Sequence[Span], *, owner: str) -> None:
        """Take what ``save`` needs. Raises ``BufferOOM`` or ``DriverError``."""

    def save(self, *, stream: int) -> None:
        """Ask for the copies."""

    def verify(self, *, stream: int) -> None:
        """Read once more and compare; raises ``DriverError`` where a byte differs."""

    def abandon(self) -> None:
        """The memory stays as it is: give back what ``prepare`` took. Never raises."""

    def restore(self, spans: Sequence[Span], *, stream: int) -> None: ...
    def settle(self, fences: Fences, *, stream: int) -> None:
        """The contents are back once ``stream`` has done what was asked of it. Never raises."""

    def close(self) -> None:
        """No copy is in flight. Closing again does nothing; never raises."""


class Zeros:
    """Restore.MEMSET: nothing is saved, zeros come back."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def prepare(self, spans: Sequence[Span], *, owner: str) -> None: ...
    def save(self, *, stream: int) -> None: ...
    def verify(self, *, stream: int) -> None: ...
    def abandon(self) -> None: ...
    def settle(self, fences: Fences, *, stream: int) -> None: ...
    def close(self) -> None: ...

    def restore(self, spans: Sequence[Span], *, stream: int) -> None:
        for addr, size in spans:
            self._driver.fill(addr, 0, size, stream=stream)


class HostCopy:
    """Restore.CPU and Restore.PINNED: one copy each way per span, through host memory that may be kept between sleeps.

    The bytes are those asked for, not the padding behind them.
    """

    def __init__(self, driver: Driver, backings: Backings, *, pinned: bool) -> None:
        self._driver, self._backings, self._pinned = driver, backings, pinned
        self._backing: Backing | None = None
        self._spans: tuple[Span, ...] = ()
        self._is_new = False

    def prepare(self, spans: Sequence[Span], *, owner: str) -> None:
        self._spans = tuple(span for span in spans if span[1])
        size = sum(size for _, size in self._spans)
        if self._backing is not None and self._backing.size_bytes != size:
            self.close()  # an arena has grown or shrunk since
        self._is_new = self._backing is None and size > 0
        if self._is_new:
            self._backing = self._backings.take(size, pinned=self._pinned, owner=owner)
        elif self._backing is not None:
            self._backings.use(self._backing)

    def save(self, *, stream: int) -> None:
        for addr, size, host in self._places():
            self._driver.copy(host, addr, size, stream=stream)

    def verify(self, *, stream: int) -> None:
        step = min(_VERIFY_BYTES, max((size for _, size in self._spans), default=0))
        if not step:
            return
        staging = self._driver.host_alloc(step, flags=0)
        try:
            for addr, size, host in self._places():
                for at in range(0, size, step):
                    length = min(step, size - at)
                    self._driver.copy(staging, addr + at, length, stream=stream)
                    self._driver.stream_sync(stream)
                    if _view(staging, length) != _view(host + at, length):
                        raise DriverError("verify", "MISMATCH", f"{length:,} bytes at {addr + at:#x} read differently")
        finally:
            self._driver.host_free(staging)

    def abandon(self) -> None:
        if self._is_new:
            self.close()
        elif self._backing is not None:
            self._retain(self._backing)

    def restore(self, spans: Sequence[Span], *, stream: int) -> None:  # noqa: ARG002 - what was saved comes back
        for addr, size, host in self._places():
            self._driver.copy(addr, host, size, stream=stream)

    def settle(self, fences: Fences, *, stream: int) -> None:
        backing, self._spans = self._backing, ()
        if backing is None or self._backings.keep(backing):
            return
        try:
            mark = fences.mark(stream)
        except TonnageError:
            return  # no event to be had: it stays until the next sleep instead
        self._backing = None
        fences.after(mark, lambda: self._backings.give_back(backing))

    def close(self) -> None:
        backing, self._backing = self._backing, None
        if backing is not None:
            self._backings.give_back(backing)

    def _retain(self, backing: Backing) -> None:
        if not self._backings.keep(backing):
            self.close()

    def _places(self) -> list[tuple[int, int, int]]:
        """(device address, bytes, host address) of every span."""
        assert self._backing is not None or not self._spans
        places, host = [], self._backing.address if self._backing else 0
        for addr, size in self._spans:
            places.append((addr, size, host))
            host += size
        return places


def restorer_for(restore: Restore, driver: Driver, backings: Backings) -> Restorer | None:
    """What does it, or None where nothing is to be done."""
    if restore is Restore.NONE:
        return None
    if restore is Restore.MEMSET:
        return Zeros(driver)
    return HostCopy(driver, backings, pinned=restore is Restore.PINNED)


def _view(addr: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(addr)).cast("B")
