"""Single buffers by kind. The manager asks the device for memory and knows nothing of budgets."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from ctypes import addressof, c_char
from typing import TypeAlias

from tonnage.buffers.memory import Exports, out_of_memory
from tonnage.buffers.stream import Stream
from tonnage.errors import BufferOOM, DriverOOM, DriverUnsupported
from tonnage.ledger import Account, Ledger
from tonnage.terms import LineKind, MemoryKind

Free: TypeAlias = Callable[[], None]


class Buffer:
    """``size_bytes`` of one kind of memory at ``address``, made by a ``BufferManager``. Single owner; close it once.

    An empty buffer has no memory: its address is 0.
    """

    def __init__(
        self, stream: Stream, *, kind: MemoryKind, size_bytes: int, address: int, account: Account, free: Free
    ) -> None:
        self.stream, self.kind, self.size_bytes, self.address = stream, kind, size_bytes, address
        self.exports = Exports()
        self._account, self._free = account, free

    def __repr__(self) -> str:
        return f"<Buffer {self.kind} {self.size_bytes:,} bytes at {self.address:#x} on {self.stream!r}>"

    @property
    def usable_bytes(self) -> int:
        return self.size_bytes

    def close(self) -> None:
        """Give the memory back. Closing again does nothing. Raises ``BufferInUse`` while a tensor over it is alive.

        Work on other streams that uses the memory must be done before.
        """
        if self.address:
            self.exports.require_none(self)
            self._free()
            self._account.sub(self.size_bytes, self.size_bytes)
        self.address = self.size_bytes = 0


class BufferManager:
    """Buffers for ``owner`` on the device of ``stream``, each booked in ``ledger`` under the line it is for.

    ``gpu_sync`` is the device's plain allocation: it and its free may wait for the device. ``cpu`` is pageable host
    memory. The other kinds have no room yet and are refused with ``DriverUnsupported``.
    """

    def __init__(self, stream: Stream, *, ledger: Ledger, owner: str) -> None:
        self.stream, self.owner = stream, owner
        self._ledger = ledger
        self._take = {MemoryKind.GPU_SYNC: self._take_device, MemoryKind.CPU: self._take_host}

    def __repr__(self) -> str:
        return f"<BufferManager {self.owner!r} on {self.stream!r}>"

    def gpu_sync(self, size_bytes: int, *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.GPU_SYNC, size_bytes, line=line, tag=tag)

    def cpu(self, size_bytes: int, *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.CPU, size_bytes, line=line, tag=tag)

    def allocate(self, kind: MemoryKind, size_bytes: int, *, line: LineKind, tag: str = "") -> Buffer:
        """A new buffer; its contents are undefined. All or nothing, in memory and in the ledger.

        Raises ``BufferOOM`` with size, used, capacity and owner; ``LedgerError`` after a strict seal.
        """
        if kind not in self._take:
            raise DriverUnsupported("allocate", "NOT_SUPPORTED", f"no buffers of kind {kind} yet")
        if size_bytes < 0:
            raise ValueError(f"a buffer of {size_bytes:,} bytes")
        account = self._ledger.open(owner=self.owner, line=line, memory=kind, tag=tag)
        address, free = self._take[kind](size_bytes) if size_bytes else (0, _nothing)
        try:
            if size_bytes:
                account.add(size_bytes, size_bytes)
        except BaseException:
            free()
            raise
        return Buffer(self.stream, kind=kind, size_bytes=size_bytes, address=address, account=account, free=free)

    def copy(self, dst: Buffer, src: Buffer) -> None:
        """All of ``src`` to the start of ``dst``, in stream order. Raises ``ValueError`` where it does not fit."""
        if src.size_bytes > dst.size_bytes:
            raise ValueError(f"{src!r} does not fit into {dst!r}")
        if src.size_bytes:
            self.stream.driver.copy(dst.address, src.address, src.size_bytes, stream=self.stream.handle)

    def set_zero(self, buffer: Buffer) -> None:
        """Every byte 0, in stream order."""
        if buffer.size_bytes:
            self.stream.driver.fill(buffer.address, 0, buffer.size_bytes, stream=self.stream.handle)

    def _take_device(self, size_bytes: int) -> tuple[int, Free]:
        driver = self.stream.driver
        try:
            address = driver.mem_alloc(size_bytes)
        except DriverOOM as error:
            raise out_of_memory(error, self.stream, size_bytes=size_bytes, owner=self.owner) from error
        return address, lambda: driver.mem_free(address)

    def _take_host(self, size_bytes: int) -> tuple[int, Free]:
        try:
            # Straight from the system, so that closing gives it straight back.
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            free, total = self.stream.driver.mem_info()
            raise BufferOOM(
                size_bytes=size_bytes,
                used_bytes=total - free,
                capacity_bytes=total,
                owner=self.owner,
                detail=f"host memory: {error.strerror}; the figures are the device's",
            ) from error
        return addressof(c_char.from_buffer(memory)), memory.close


def _nothing() -> None:
    """An empty buffer has nothing to free."""
