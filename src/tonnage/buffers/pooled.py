"""Buffers out of the device's private pool: what every step allocates and frees.

So little is called on the way, what is found once is kept, and the ledger is told without its lock. What the whole
costs beside the driver's own two calls is measured by ``benchmarks/buffers_overhead.py``. It is in an order of its
own: all that is called is called before the driver, so that Ctrl-C finds nothing between its answer and the books.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, ClassVar

from tonnage.buffers.buffer import Buffer
from tonnage.buffers.dlpack import wait_for
from tonnage.buffers.kinds import Source
from tonnage.buffers.ladder import climb, require_possible
from tonnage.buffers.stream import Stream
from tonnage.device.driver import Driver
from tonnage.errors import CaptureError, DriverError, DriverOOM
from tonnage.ledger import Account, Ledger
from tonnage.ledger.journal import MAX_NOTED
from tonnage.terms import MemoryKind

_BEFORE_OR_AFTER = "free it before or after the capture"


class PooledBuffer(Buffer):
    """A buffer whose free is work on its manager's stream: ``Pooled.give`` is written out in its ``close``."""

    __slots__ = ()

    _source: Pooled

    def close(self) -> None:
        base = self.base
        if base:
            source, account, handle = self._source, self.account, self._source.handle
            if self._exports is not None:
                self._exports.require_none(self)
                source.follow(self)
            elif self.used_on:
                source.follow(self)
            journal = source.journal
            change = (monotonic_ns(), account.number, -self.capacity_bytes, handle, journal.moment)
            try:
                source.free(base, stream=handle)
            except DriverError as error:
                if not source.free_late(self, error):
                    raise
            except BaseException:
                source.settle(self)
                raise
            self.base = 0
            account.note(change)
            if len(journal.noted) >= MAX_NOTED:
                journal.catch_up()
            if self.used_on:
                self.used_on = ()
        self.size_bytes = self.capacity_bytes = 0
        if self._shape is not None:
            self._shape = None

    close.__doc__ = Buffer.close.__doc__
    release = close


class Pooled(Source):
    """The device's private pool: allocation and free are work on the manager's stream."""

    __slots__ = ("alloc", "captures", "capturing", "free", "journal", "pool")
    path = "pool"
    in_order = True
    makes: ClassVar[type[Buffer]] = PooledBuffer

    def __init__(self, kind: MemoryKind, stream: Stream, ledger: Ledger) -> None:
        super().__init__(kind, stream, ledger)
        self.pool, self.journal = stream.device.pool, ledger.journal
        self.alloc, self.free = found(self.driver, "pool_alloc"), found(self.driver, "pool_free")
        self.capturing = found(self.driver, "stream_capturing")
        self.captures = stream.device.graphs._captures  # those that were announced, by graph

    def make(self, account: Account, size_bytes: int) -> PooledBuffer:
        """``Buffer.made`` for bytes (more than none) on an account that was taken from before."""
        handle = self.handle
        if self.captures or (self.stream.may_be_captured and self.capturing(handle)):
            raise self.captured(size_bytes)
        buffer = PooledBuffer()
        buffer.base = 0
        buffer._source = self
        buffer.account = account
        buffer.size_bytes = buffer.capacity_bytes = buffer.physical_bytes = size_bytes
        buffer.dtype = "uint8"
        buffer._shape = buffer._exports = None
        buffer.used_on = ()
        change = (monotonic_ns(), account.number, size_bytes, handle, self.journal.moment)
        try:
            buffer.base = self.alloc(self.pool.handle, size_bytes, stream=handle)
        except DriverOOM as error:
            return self.make_late(account, size_bytes, error)
        except Exception:
            require_possible(self, size_bytes, owner=account.owner)  # for too many, drivers have errors of their own
            raise
        account.note(change)
        return buffer

    def make_late(self, account: Account, size_bytes: int, error: DriverOOM) -> PooledBuffer:
        """There was no memory: up the ladder."""
        buffer = PooledBuffer.made(self, account, 0, "uint8", None)
        climb(self, buffer, size_bytes, error)
        return buffer

    def obtain(self, buffer: Buffer, size_bytes: int) -> None:
        handle = self.handle
        if self.captures or (self.stream.may_be_captured and self.capturing(handle)):
            raise self.captured(size_bytes)
        base = self.alloc(self.pool.handle, size_bytes, stream=handle)
        try:
            buffer.account.take(size_bytes, handle)
        except BaseException:
            self.free(base, stream=handle)
            raise
        buffer.base = base
        buffer.size_bytes = buffer.capacity_bytes = buffer.physical_bytes = size_bytes

    def captured(self, size_bytes: int) -> CaptureError:
        """Asked for each time, because whoever captures (torch, a library) does not tell us."""
        what = next((f"graph {graph!r}" for graph in tuple(self.captures)), f"stream {self.handle:#x}")
        return CaptureError(
            f"a gpu buffer of {size_bytes:,} bytes is asked for while {what} is being captured: "
            "allocate before the capture, or ask with graph_memory=True on the stream that is captured"
        )

    def give(self, buffer: Buffer) -> None:
        self.follow(buffer)
        try:
            self.free(buffer.base, stream=self.handle)
        except DriverError as error:
            if not self.free_late(buffer, error):
                raise
        except BaseException:
            self.settle(buffer)
            raise
        buffer.base = 0
        self.unbook(buffer)

    def unbook(self, buffer: Buffer) -> None:
        buffer.account.give(buffer.capacity_bytes, self.handle)

    def drop(self, address: int, held: Any) -> None:  # noqa: ARG002
        self.free(address, stream=self.handle)

    def follow(self, buffer: Buffer) -> None:
        """Work on our stream comes after what other streams have been asked to do with the buffer: those recorded, and
        all that are registered where somebody had a tensor over it. Raises ``CaptureError`` with nothing asked."""
        fences = self.stream.device.fences
        own, used_on = fences.usable(self.handle), fences.streams if buffer.was_exported else buffer.used_on
        others = [other for other in used_on if other != own and fences.usable(other) == other]  # else closed, and idle
        for stream in (own, *others) if others else ():
            if self.capturing(stream):
                raise CaptureError(
                    f"{buffer!r} is freed while stream {stream:#x} is being captured: {_BEFORE_OR_AFTER}"
                )
        for other in others:
            if own:
                self.stream.may_be_captured = True  # with the other, should a capture of that begin just now
            wait_for(self.driver, waiting=own, on=other)

    def free_late(self, buffer: Buffer, error: DriverError) -> bool:
        """The driver refused. Whether it is freed after all: a closed stream is done with everything, and another can
        free what was its own. Raises ``CaptureError`` where that was why."""
        if self.stream.device.fences.usable(self.handle) != self.handle:
            self.driver.pool_free(buffer.base, stream=0)
            return True
        if self.capturing(self.handle):
            # Captured, the free would be a node that only memory of the same graph may have.
            raise CaptureError(f"{buffer!r} is freed while its stream is being captured: {_BEFORE_OR_AFTER}") from error
        return False


class InGraph(Pooled):
    """Memory asked for during a capture: it belongs to the graph, has an address, and is there while the graph runs.

    Close the buffer inside the same capture, so that the graph frees what it allocates. The device counts such
    memory apart, so the books have what was asked for and no physical bytes.
    """

    __slots__ = ()
    path = "graph"
    makes = Buffer

    def obtain(self, buffer: Buffer, size_bytes: int) -> None:
        buffer.account.add(size_bytes, 0, stream=self.handle)
        try:
            buffer.base = self.alloc(self.pool.handle, size_bytes, stream=self.handle)
        except BaseException:
            buffer.account.sub(size_bytes, 0, stream=self.handle)
            raise
        buffer.size_bytes = buffer.capacity_bytes = size_bytes
        buffer.physical_bytes = 0

    def unbook(self, buffer: Buffer) -> None:
        buffer.account.sub(buffer.capacity_bytes, 0, stream=self.handle)


def found(driver: Driver, call: str) -> Callable[..., Any]:
    """A call of the driver, found once. A decorator may put another in its place at any time: there it is looked up
    each time."""
    if hasattr(type(driver), call):
        bound: Callable[..., Any] = getattr(driver, call)
        return bound
    return lambda *args, **kwargs: getattr(driver, call)(*args, **kwargs)
