"""Host memory behind device memory that sleeps: where its bytes are until it wakes, and whether it is kept after."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, c_char
from dataclasses import dataclass

from tonnage.buffers.uninterrupted import uninterrupted
from tonnage.device.driver import Driver
from tonnage.device.machine import host_memory
from tonnage.errors import BufferOOM, DriverError, DriverOOM


@dataclass(frozen=True, slots=True)
class Retain:
    """How many bytes of host memory stay allocated while the memory behind which they stand is awake.

    What is kept need not be made again for the next sleep: pinning takes seconds for tens of GiB. ``None``: no limit.
    """

    limit_bytes: int | None

    @classmethod
    def always(cls) -> Retain:
        return cls(None)

    @classmethod
    def never(cls) -> Retain:
        return cls(0)

    @classmethod
    def budget(cls, limit_bytes: int) -> Retain:
        return cls(limit_bytes)


@dataclass(eq=False, slots=True)
class Backing:
    """``size_bytes`` of host memory at ``address``. Made by ``Backings.take``; given back by ``Backings.give_back``."""

    address: int
    size_bytes: int
    free: Callable[[], None]
    is_kept: bool = False  # the memory that it stands behind is awake


class Backings:
    """Takes and gives back host memory, and keeps to the budget of what stays while its owner is awake.

    ``held_bytes`` is all of it, ``kept_bytes`` the part whose owner is awake. Safe to use from any thread.
    """

    def __init__(self, driver: Driver, *, retain: Retain | None = None) -> None:
        self._driver = driver
        self._lock = threading.RLock()  # a finaliser may give something back while its thread holds it
        self._stuck: list[Backing] = []  # the driver would not free them: tried again
        self.retain = retain or Retain.always()
        self.held_bytes = self.kept_bytes = 0

    @uninterrupted
    def take(self, size_bytes: int, *, pinned: bool, owner: str) -> Backing:
        """New host memory. ``BufferOOM``, with the figures of the host, where there is none."""
        self.sweep()
        try:
            backing = self._pinned(size_bytes) if pinned else self._pageable(size_bytes)
        except (OSError, DriverOOM) as error:
            raise _host_is_full(error, size_bytes=size_bytes, owner=owner, pinned=pinned) from error
        with self._lock:
            self.held_bytes += size_bytes
        return backing

    @uninterrupted
    def give_back(self, backing: Backing) -> None:
        """Free it, no copy from or to it being in flight. Never raises: what cannot be freed is tried again later."""
        self.use(backing)
        with self._lock:
            self._stuck.append(backing)
        self.sweep()

    def keep(self, backing: Backing) -> bool:
        """Its owner is awake: whether it may stay allocated for the next sleep."""
        limit = self.retain.limit_bytes
        with self._lock:
            if limit is not None and self.kept_bytes + backing.size_bytes > limit:
                return False
            backing.is_kept = True
            self.kept_bytes += backing.size_bytes
        return True

    def use(self, backing: Backing) -> None:
        """Its owner sleeps again, or has no more use for it: it does not count as kept."""
        with self._lock:
            if backing.is_kept:
                self.kept_bytes -= backing.size_bytes
            backing.is_kept = False

    @uninterrupted
    def sweep(self) -> None:
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for backing in stuck:
            try:
                backing.free()
            except DriverError:
                with self._lock:
                    self._stuck.append(backing)
                continue
            with self._lock:
                self.held_bytes -= backing.size_bytes

    def _pinned(self, size_bytes: int) -> Backing:
        address = self._driver.host_alloc(size_bytes, flags=0)
        return Backing(address, size_bytes, lambda: self._driver.host_free(address))

    def _pageable(self, size_bytes: int) -> Backing:
        # Straight from the system, so that giving it back shrinks the process at once.
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # large pages are only faster
            memory.madvise(mmap.MADV_HUGEPAGE)
        return Backing(addressof(c_char.from_buffer(memory)), size_bytes, memory.close)


def _host_is_full(error: Exception, *, size_bytes: int, owner: str, pinned: bool) -> BufferOOM:
    host = host_memory()
    total = host.total_bytes or 0
    return BufferOOM(
        size_bytes=size_bytes,
        used_bytes=total - (host.available_bytes or 0),
        capacity_bytes=total,
        owner=owner,
        detail=f"{'pinned' if pinned else 'pageable'} host memory to sleep in; the figures are the host's: {error}",
    )
