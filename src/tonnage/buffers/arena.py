"""An arena: addresses reserved once, pages mapped as it grows, and an address that never changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.buffers.memory import Exports, out_of_memory
from tonnage.buffers.stream import Stream
from tonnage.errors import DriverError, DriverOOM, LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import MiB, round_up

#: One handle of physical memory is at most this large: few calls for a large commit, yet a decommit can give back
#: all but the part of one handle.
DEFAULT_CHUNK_BYTES = 64 * MiB


@dataclass(slots=True)
class _Chunk:
    """One handle and how far it has come: each flag says that a step was done and is to be undone."""

    addr: int
    size: int
    handle: int | None = None
    mapped: bool = False
    booked: bool = False


class VaArena:
    """``reserve_bytes`` of addresses (rounded up to pages), of which the first ``committed_bytes`` have memory.

    Booked under ``owner``, ``line`` and ``tag``: requested bytes as asked for, physical bytes in whole pages.
    Shrinking and closing are for moments when nothing on the device uses the pages. Not thread-safe.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        ledger: Ledger,
        owner: str,
        line: LineKind,
        reserve_bytes: int,
        tag: str = "",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        driver = stream.driver
        self._page_bytes = driver.capabilities().page_bytes
        self._chunk_bytes = round_up(chunk_bytes, self._page_bytes)
        self.stream, self.owner, self.size_bytes = stream, owner, round_up(reserve_bytes, self._page_bytes)
        self.exports = Exports()
        self._account = ledger.open(owner=owner, line=line, memory=MemoryKind.GPU, tag=tag)
        self._chunks: list[_Chunk] = []
        self._leftovers: list[_Chunk] = []  # what a failed driver call kept us from giving back: tried again later
        self._requested_bytes = 0
        self._address = driver.va_reserve(self.size_bytes, align=self._page_bytes)

    def __repr__(self) -> str:
        return (
            f"<VaArena {self.owner!r} {self.committed_bytes:,} of {self.size_bytes:,} bytes "
            f"at {self._address:#x} on {self.stream!r}>"
        )

    @property
    def address(self) -> int:
        """The first byte, the same for life; 0 once closed."""
        return self._address

    @property
    def committed_bytes(self) -> int:
        """Leading bytes that have memory, in whole pages."""
        return self._chunks[-1].addr + self._chunks[-1].size - self._address if self._chunks else 0

    @property
    def usable_bytes(self) -> int:
        return self.committed_bytes

    def commit(self, num_bytes: int) -> int:
        """Make at least the first ``num_bytes`` usable; returns ``committed_bytes``.

        All or nothing: whatever fails, the arena and the ledger are as before and the call may be repeated. Raises
        ``BufferOOM`` for want of memory, ``LedgerError`` after a strict seal, ``DriverError`` for the rest.
        """
        self._require_open()
        if not 0 <= num_bytes <= self.size_bytes:
            raise ValueError(f"{self!r} cannot commit {num_bytes:,} bytes")
        self._sweep()
        new = list(self._missing(num_bytes))
        try:
            self._back(new)
        except (DriverError, LedgerError) as error:
            self._abandon(new)
            if isinstance(error, DriverOOM):
                wanted = num_bytes - self.committed_bytes
                raise out_of_memory(error, self.stream, size_bytes=wanted, owner=self.owner) from error
            raise
        self._chunks += new
        self._request(max(self._requested_bytes, num_bytes))
        return self.committed_bytes

    def decommit(self, num_bytes: int) -> int:
        """Give back whole handles beyond the first ``num_bytes``; returns the bytes given back.

        Contents beyond are lost; ``committed_bytes`` may stay above ``num_bytes`` by part of one handle. When a
        driver call fails, what it kept is out of use, stays booked, and is given back by a later call.
        """
        self._require_open()
        before = self.committed_bytes
        self._request(min(self._requested_bytes, max(0, num_bytes)))
        gone = [chunk for chunk in self._chunks if chunk.addr - self._address >= num_bytes]
        self._chunks = self._chunks[: len(self._chunks) - len(gone)]
        self._leftovers += gone
        self._sweep()
        return before - self.committed_bytes

    def close(self) -> None:
        """Give everything back, addresses included. Closing again does nothing.

        Raises ``BufferInUse`` while a tensor over it is alive, and ``DriverError`` when the driver keeps something;
        the call may then be repeated.
        """
        if not self._address:
            return
        self.exports.require_none(self)
        self.decommit(0)
        self.stream.driver.va_free(self._address, self.size_bytes)
        self._address = 0

    def _missing(self, num_bytes: int) -> Iterator[_Chunk]:
        start, end = self.committed_bytes, round_up(num_bytes, self._page_bytes)
        while start < end:
            size = min(self._chunk_bytes, end - start)
            yield _Chunk(self._address + start, size)
            start += size

    def _back(self, chunks: list[_Chunk]) -> None:
        """Create all, map all, open all, book all: what is likeliest to fail comes first, the ledger last."""
        driver = self.stream.driver
        for chunk in chunks:
            chunk.handle = driver.phys_create(chunk.size)
        for chunk in chunks:
            assert chunk.handle is not None
            driver.map(chunk.addr, chunk.size, chunk.handle)
            chunk.mapped = True
        if chunks:
            driver.set_access(chunks[0].addr, sum(chunk.size for chunk in chunks))
        for chunk in chunks:
            self._account.add(0, chunk.size)
            chunk.booked = True

    def _undo(self, chunk: _Chunk) -> None:
        """Undo what was done, newest first, remembering each step so that a failed one can be repeated."""
        driver = self.stream.driver
        if chunk.mapped:
            driver.unmap(chunk.addr, chunk.size)
            chunk.mapped = False
        if chunk.handle is not None:
            driver.phys_release(chunk.handle)
            chunk.handle = None
        if chunk.booked:
            self._account.sub(0, chunk.size)
            chunk.booked = False

    def _abandon(self, chunks: list[_Chunk]) -> None:
        """Undo without raising: the failure that brought us here is the one to report."""
        self._leftovers += chunks
        try:
            self._sweep()
        except DriverError:
            for chunk in self._leftovers:
                self._book_leftover(chunk)

    def _book_leftover(self, chunk: _Chunk) -> None:
        """Memory that the driver would not take back is ours until it does, and the ledger says so."""
        if chunk.handle is not None and not chunk.booked:
            self._account.add(0, chunk.size)
            chunk.booked = True

    def _sweep(self) -> None:
        while self._leftovers:
            self._undo(self._leftovers[-1])
            self._leftovers.pop()

    def _request(self, num_bytes: int) -> None:
        self._account.adjust_requested(num_bytes - self._requested_bytes)
        self._requested_bytes = num_bytes

    def _require_open(self) -> None:
        if not self._address:
            raise ValueError(f"{self!r} is closed")
