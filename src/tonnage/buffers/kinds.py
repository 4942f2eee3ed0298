"""Where buffers of each kind get their memory, and how they give it back.

A buffer keeps the source it came from, so a scope that is left later does not change how it is freed. What may still
use the memory is in ``buffer.used_on``: handles of streams, the manager's own left out where order makes it safe.
"""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from tonnage.buffers.buffer import Buffer
from tonnage.buffers.ladder import climb, require_possible
from tonnage.buffers.stream import Stream
from tonnage.buffers.uninterrupted import uninterrupted
from tonnage.errors import BufferOOM, DriverError, DriverOOM, DriverUnsupported, NotMaterialized
from tonnage.ledger import Ledger
from tonnage.terms import MemoryKind

if TYPE_CHECKING:
    from tonnage.buffers.fences import Mark
    from tonnage.buffers.scopes import ScopeConfig

#: What a source took: the address, what is needed beside it to free it, and the bytes it takes.
Block: TypeAlias = tuple[int, Any, int]


class Source:
    """Base of all: plain memory of the device, whose allocation and free may wait for the device."""

    __slots__ = ("driver", "handle", "kind", "ledger", "orphans", "stream")
    path: ClassVar[str] = "synchronous"
    on_host: ClassVar[bool] = False
    #: Whether a free comes by itself after all that our stream was asked; else the host waits for that.
    in_order: ClassVar[bool] = False
    #: What the buffers are that have their memory from here.
    makes: ClassVar[type[Buffer]] = Buffer

    def __init__(self, kind: MemoryKind, stream: Stream, ledger: Ledger) -> None:
        self.kind, self.stream, self.ledger, self.orphans = kind, stream, ledger, stream.device.orphans
        self.driver, self.handle = stream.driver, stream.bare_handle

    def fill(self, buffer: Buffer, size_bytes: int) -> None:
        """Give an empty buffer memory, after the ladder where need be.

        Raises ``BufferOOM``, ``CaptureError``, ``DriverUnsupported``, ``LedgerError``; the buffer is empty then.
        """
        require_possible(self, size_bytes, owner=buffer.account.owner)
        try:
            self.obtain(buffer, size_bytes)
        except (DriverOOM, BufferOOM) as error:
            climb(self, buffer, size_bytes, error)

    @uninterrupted
    def obtain(self, buffer: Buffer, size_bytes: int) -> None:
        """One attempt: memory, its booking and its sizes in the buffer, or nothing."""
        self.require_no_capture("asked for")
        block = address, held, physical_bytes = self.take(size_bytes)
        try:
            buffer.account.add(size_bytes, physical_bytes, stream=self.handle)
        except BaseException:
            self.drop(*block[:2])
            raise
        buffer.base, buffer.held, buffer.physical_bytes = address, held, physical_bytes
        buffer.size_bytes = buffer.capacity_bytes = size_bytes

    def give(self, buffer: Buffer) -> None:
        """Free, take it off the books, and take its address from the buffer. Raises ``DriverError`` or ``CaptureError``
        with nothing done, so that it can be repeated."""
        self.require_no_capture("freed")
        mark = self.last_use(buffer)
        if mark is not None:
            try:
                mark.wait()
            finally:
                mark.close()
        with uninterrupted:
            try:
                self.drop(buffer.base, buffer.held)
            except DriverError:
                raise
            except BaseException:
                self.settle(buffer)
                raise
            self.unbook(buffer)
            buffer.base = 0

    def settle(self, buffer: Buffer) -> None:
        """A free was cut short, by Ctrl-C say, and may be done or not: free once more, before anybody can be given the
        address. Where the driver knows no such allocation, it was done."""
        with uninterrupted:
            try:
                self.drop(buffer.base, getattr(buffer, "held", None))
            except DriverError as error:
                if "no allocation at" not in error.detail:
                    return  # as before: it can be closed again
            self.unbook(buffer)
            buffer.base = buffer.size_bytes = buffer.capacity_bytes = 0

    def unbook(self, buffer: Buffer) -> None:
        buffer.account.sub(buffer.capacity_bytes, buffer.physical_bytes, stream=self.handle)

    def last_use(self, buffer: Buffer) -> Mark | None:
        """The point by which nothing uses the memory any more, or None where only the host ever did."""
        fences = self.stream.device.fences
        if buffer.was_exported:
            return fences.mark()  # whoever had the tensor may have used it on any stream
        return fences.mark(*buffer.used_on) if buffer.used_on else None

    def take(self, size_bytes: int) -> Block:
        return self.driver.mem_alloc(size_bytes), None, size_bytes

    def drop(self, address: int, held: Any) -> None:  # noqa: ARG002 - for the sources that hold something
        self.driver.mem_free(address)

    def require_no_capture(self, what: str) -> None:
        """Plain calls would break a capture on any stream."""
        self.stream.device.fences.require_no_capture(f"{self.kind} memory is {what}")

    def require_usable(self, buffer: Buffer) -> None:
        """Raise where the memory may not be touched now."""


class Virtual(Source):
    """Virtual memory of the scope that was open: whole pages, a tag, and it can sleep."""

    __slots__ = ("config",)
    path = "virtual"
    in_order = True

    def __init__(self, kind: MemoryKind, stream: Stream, ledger: Ledger, *, config: ScopeConfig) -> None:
        super().__init__(kind, stream, ledger)
        self.config = config

    @uninterrupted
    def obtain(self, buffer: Buffer, size_bytes: int) -> None:
        account = buffer.account
        held = self.stream.device.virtual.allocate(
            size_bytes, config=self.config, account=account, owner=account.owner, stream=self.stream
        )
        buffer.base, buffer.held, buffer.physical_bytes = held.address, held, held.padded_bytes
        buffer.size_bytes = buffer.capacity_bytes = size_bytes

    @uninterrupted
    def give(self, buffer: Buffer) -> None:
        # Page tables know no streams: the range is unmapped once all registered streams are past this point.
        buffer.held.free()
        buffer.base = 0

    def require_usable(self, buffer: Buffer) -> None:
        state = buffer.held.state
        if state.value != "materialized":
            raise NotMaterialized(f"{buffer!r} of tag {buffer.held.tag!r} is {state.value}: materialize it first")


class Managed(Source):
    """Memory that the host may touch too; freed like plain memory."""

    __slots__ = ()
    path = "managed"

    def take(self, size_bytes: int) -> Block:
        capabilities = self.driver.capabilities()
        if not capabilities.managed:
            why = capabilities.reasons.get("managed", "the device has no managed memory")
            raise DriverUnsupported("managed_alloc", "NOT_SUPPORTED", why)
        return self.driver.managed_alloc(size_bytes), None, size_bytes


class Pageable(Source):
    """Ordinary memory of the host, straight from the system, so that freeing gives it straight back."""

    __slots__ = ()
    path = "host"
    on_host = True

    def require_no_capture(self, what: str) -> None:
        """The device does not hear of it."""

    def take(self, size_bytes: int) -> Block:
        try:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DriverOOM("mmap", error.strerror or "ENOMEM", "host memory") from error
        return addressof(c_char.from_buffer(memory)), memory, size_bytes

    def drop(self, address: int, held: Any) -> None:  # noqa: ARG002
        held.close()


class Pinned(Source):
    """Page-locked memory of the host, made and freed by the driver: slow, for what lives long."""

    __slots__ = ()
    path = "host"
    on_host = True

    def take(self, size_bytes: int) -> Block:
        return self.driver.host_alloc(size_bytes, flags=0), None, size_bytes

    def drop(self, address: int, held: Any) -> None:  # noqa: ARG002
        self.driver.host_free(address)


class PinnedPooled(Source):
    """Blocks of the device's pinned pool. Freed while a copy may read them, they wait until it cannot."""

    __slots__ = ()
    path = "host pool"
    on_host = True

    def take(self, size_bytes: int) -> Block:
        pool = self.stream.device.pinned
        address = pool.alloc(size_bytes)
        return address, None, pool.block_bytes(address)

    @uninterrupted
    def give(self, buffer: Buffer) -> None:
        self.stream.device.pinned.free(buffer.base, after=self.last_use(buffer))
        self.unbook(buffer)
        buffer.base = 0

    def drop(self, address: int, held: Any) -> None:  # noqa: ARG002
        self.stream.device.pinned.free(address)


#: The sources that need nothing but kind, stream and ledger.
PLAIN: dict[MemoryKind, type[Source]] = {
    MemoryKind.GPU_SYNC: Source,
    MemoryKind.CPU: Pageable,
    MemoryKind.PINNED: Pinned,
    MemoryKind.PINNED_POOL: PinnedPooled,
    MemoryKind.MANAGED: Managed,
}
