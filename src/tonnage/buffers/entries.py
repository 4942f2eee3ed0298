"""Entries: the chunks that virtual memory knows by address, each with its tag, its owner and what restores it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tonnage.buffers.chunk import Chunk, PageRun, State
from tonnage.buffers.restore import Restorer, Span
from tonnage.device.driver import Driver
from tonnage.ledger import Account


class Extent(Protocol):
    """What an entry takes and what of it is worth saving; both are asked anew each time, so an arena may grow."""

    @property
    def padded_bytes(self) -> int:
        """Physical bytes while materialised."""

    @property
    def leftover_bytes(self) -> int:
        """Physical bytes out of use that the driver did not take back; 0 where that is not known."""

    @property
    def spans(self) -> Sequence[Span]: ...


@dataclass(frozen=True, slots=True)
class FixedExtent:
    """``requested_bytes`` at ``address``, in whole pages of ``padded_bytes``."""

    address: int
    requested_bytes: int
    padded_bytes: int
    leftover_bytes: int = 0

    @property
    def spans(self) -> Sequence[Span]:
        return ((self.address, self.requested_bytes),)


class Ranges(Protocol):
    """Who holds addresses where they are: captured graphs, and registrations by physical page. See ``GraphRanges``."""

    def editing(
        self, addr: int, size: int, *, unmaps: bool, drain: Callable[[], None]
    ) -> AbstractContextManager[None]: ...
    def edited(self, addr: int, size: int, *, mapped: bool, owner: str = "") -> None: ...
    def referenced(self, addr: int, size: int) -> str | None: ...
    def require_no_capture(self, what: str) -> None: ...
    def add_source(self, source: Callable[[], Iterable[Entry]]) -> None: ...
    def forget(self, addr: int, size: int) -> None: ...


class Watcher(Protocol):
    """Who is told when an entry sleeps and wakes; see ``VirtualMemory.watch``."""

    def require_sleepable(self) -> None:
        """Raise where it must not sleep now; nothing has been changed."""

    def woken(self) -> None:
        """It is awake again. Never raises."""


class Lock(AbstractContextManager[bool], Protocol):
    def acquire(self, blocking: bool = ...) -> bool: ...  # noqa: FBT001
    def release(self) -> None: ...


@dataclass(eq=False, slots=True)
class Entry:
    """One chunk in the registry of ``VirtualMemory``, with all that is to be done when it comes and goes.

    stream          handle of the stream on which contents are saved, restored and zeroed
    run             our own pages; None where the creator was given to us
    reserved_bytes  of addresses that are freed with it; 0 where the caller keeps them
    zero_ranges     (address, bytes) that read zero after every materialise
    tells_graphs    whoever made it tells the graphs of it by himself: what is mapped, and what a capture uses
    must_drain      the device is to be idle before it is undone: the mark made for it does not cover all work
    """

    address: int
    chunk: Chunk[Any]
    tag: str
    owner: str
    extent: Extent
    stream: int
    account: Account | None = None
    restorer: Restorer | None = None
    run: PageRun | None = None
    reserved_bytes: int = 0
    zero_ranges: Sequence[Span] = ()
    tells_graphs: bool = False
    watchers: list[Watcher] = field(default_factory=list, repr=False)
    num_holds: int = 0
    must_drain: bool = False
    # Re-entrant: a finaliser may free the entry on the thread that is just working on it.
    lock: Lock = field(default_factory=threading.RLock, repr=False)
    booked: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        return (
            f"<{self.owner!r} {self.extent.padded_bytes:,} bytes at {self.address:#x} {self.tag!r} {self.chunk.state}>"
        )

    @property
    def is_busy(self) -> bool:
        """A call is changing it at the moment."""
        return self.num_holds > 0

    @property
    def held_bytes(self) -> int:
        """Physical bytes that it takes now. Memory whose release failed counts: it is ours until it is known gone."""
        if self.run is not None:
            return self.run.held_bytes
        left_bytes = self.extent.leftover_bytes
        is_lost = self.chunk.is_terminal and not left_bytes  # all of it, for all that anybody knows
        return left_bytes + (self.extent.padded_bytes if self.chunk.is_releasable or is_lost else 0)

    # what a capture attributes to its graph: all of it, because anybody may have its address

    @property
    def committed_bytes(self) -> int:
        return self.extent.padded_bytes if self.chunk.state is State.MATERIALIZED else 0

    @property
    def has_views(self) -> bool:
        return True

    def book(self) -> None:
        """Bring the account to what is held. Raises ``LedgerError`` after a strict seal, with nothing booked."""
        if self.account is None:
            return
        awake = self.chunk.state is State.MATERIALIZED
        now = (sum(size for _, size in self.extent.spans) if awake else 0, self.held_bytes)
        if now == self.booked:
            return
        if any(self.booked):
            self.account.sub(*self.booked, stream=self.stream)
        self.booked = (0, 0)
        if any(now):
            self.account.add(*now, stream=self.stream)
        self.booked = now

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other thread touches it meanwhile."""
        with self.lock:
            self.num_holds += 1
            try:
                yield
            finally:
                self.num_holds -= 1

    def zero(self, driver: Driver) -> None:
        for addr, size in self.zero_ranges:
            driver.fill(addr, 0, size, stream=self.stream)
