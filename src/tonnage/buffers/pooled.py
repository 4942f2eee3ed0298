"""Buffers out of the device's private pool: what every step allocates and frees.

So little is called on the way, what is found once is kept, and the ledger is told without its lock. What the whole
costs beside the driver's own two calls is measured by ``benchmarks/buffers_overhead.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, ClassVar

from tonnage.buffers.buffer import Buffer
from tonnage.buffers.dlpack import wait_for
from tonnage.buffers.kinds import Source
from tonnage.buffers.ladder import climb
from tonnage.buffers.stream import Stream
from tonnage.device.driver import Driver
from tonnage.errors import CaptureError, DriverError, DriverOOM
from tonnage.ledger import Account, Ledger
from tonnage.ledger.journal import MAX_NOTED
from tonnage.terms import MemoryKind


class PooledBuffer(Buffer):
    """A buffer whose free is work on its manager's stream: ``Pooled.give`` is written out in its ``close``."""

    __slots__ = ()

    _source: Pooled

    def close(self) -> None:
        base = self.base
        if base:
            if self._exports is not None:
                self._exports.require_none(self)
            source, account, handle = self._source, self.account, self._source.handle
            if self.used_on:
                source.follow(self)
            try:
                source.free(base, stream=handle)
            except DriverError as error:
                source.require_not_captured(self, error)
                raise
            self.base = 0
            journal = source.journal
            account.note((monotonic_ns(), account.number, -self.capacity_bytes, handle, journal.moment))
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

    __slots__ = ("alloc", "capturing", "free", "journal", "pool")
    path = "pool"
    makes: ClassVar[type[Buffer]] = PooledBuffer

    def __init__(self, kind: MemoryKind, stream: Stream, ledger: Ledger, orphans: deque[Buffer]) -> None:
        super().__init__(kind, stream, ledger, orphans)
        self.pool, self.journal = stream.device.pool, ledger.journal
        self.alloc, self.free = found(self.driver, "pool_alloc"), found(self.driver, "pool_free")
        self.capturing = found(self.driver, "stream_capturing")

    def make(self, account: Account, size_bytes: int) -> PooledBuffer:
        """``Buffer.made`` for bytes (more than none) on an account that was taken from before."""
        handle = self.handle
        if self.stream.may_be_captured and self.capturing(handle):
            raise self.captured(size_bytes)
        try:
            base = self.alloc(self.pool.handle, size_bytes, stream=handle)
        except DriverOOM as error:
            return self.make_late(account, size_bytes, error)
        account.note((monotonic_ns(), account.number, size_bytes, handle, self.journal.moment))
        buffer = PooledBuffer()
        buffer.base = base
        buffer._source = self
        buffer.account = account
        buffer.size_bytes = buffer.capacity_bytes = buffer.physical_bytes = size_bytes
        buffer.dtype = "uint8"
        buffer._shape = buffer._exports = None
        buffer.used_on = ()
        return buffer

    def make_late(self, account: Account, size_bytes: int, error: DriverOOM) -> PooledBuffer:
        """There was no memory: up the ladder."""
        buffer = PooledBuffer.made(self, account, 0, "uint8", None)
        climb(self, buffer, size_bytes, error)
        buffer.size_bytes = buffer.capacity_bytes = size_bytes
        return buffer

    def obtain(self, buffer: Buffer, size_bytes: int) -> None:
        handle = self.handle
        if self.stream.may_be_captured and self.capturing(handle):
            raise self.captured(size_bytes)
        base = self.alloc(self.pool.handle, size_bytes, stream=handle)
        try:
            buffer.account.take(size_bytes, handle)
        except BaseException:
            self.free(base, stream=handle)
            raise
        buffer.base, buffer.physical_bytes = base, size_bytes

    def captured(self, size_bytes: int) -> CaptureError:
        """Asked for each time, because whoever captures (torch, a library) does not tell us."""
        return CaptureError(
            f"a gpu buffer of {size_bytes:,} bytes is asked for while stream {self.handle:#x} is being captured: "
            "allocate before the capture, or ask with graph_memory=True"
        )

    def give(self, buffer: Buffer) -> None:
        self.follow(buffer)
        try:
            self.free(buffer.base, stream=self.handle)
        except DriverError as error:
            self.require_not_captured(buffer, error)
            raise
        self.unbook(buffer)

    def unbook(self, buffer: Buffer) -> None:
        buffer.account.give(buffer.capacity_bytes, self.handle)

    def follow(self, buffer: Buffer) -> None:
        """Work on our stream comes after what other streams have been asked to do with the buffer."""
        for other in buffer.used_on:
            if other != self.handle:
                # ``stream.handle``, because from here on ours is captured with the other, should that be captured.
                wait_for(self.driver, waiting=self.stream.handle, on=other)

    def require_not_captured(self, buffer: Buffer, error: DriverError) -> None:
        """Captured, the free would be a node that only memory of the same graph may have: the driver refuses it."""
        if self.capturing(self.handle):
            raise CaptureError(
                f"{buffer!r} is freed while its stream is being captured: free it before or after the capture"
            ) from error


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
