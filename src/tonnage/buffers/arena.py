"""An arena: addresses reserved once, pages mapped as it grows, and an address that never changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from tonnage.buffers.chunk import Chunk, Piece, State
from tonnage.buffers.dlpack import Exportable
from tonnage.buffers.memory import Exports, out_of_memory
from tonnage.buffers.restore import Restore
from tonnage.buffers.runs import ArenaRun, lay_out
from tonnage.buffers.stream import Stream
from tonnage.buffers.uninterrupted import undone_if_interrupted, uninterrupted
from tonnage.errors import (
    BufferInUse,
    BufferOOM,
    DriverError,
    DriverOOM,
    LedgerError,
    NotMaterialized,
    RangePoisoned,
    RangeReferenced,
)
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import MiB, round_up

#: A large handle: few calls for a large commit. Arenas that sleep whole do better with larger ones: on an H200, 40 GiB
#: in handles of 64 MiB take 45 ms to give back, of 256 MiB 20 to 35.
DEFAULT_CHUNK_BYTES = 64 * MiB


class VaArena(Exportable):
    """``reserve_bytes`` of addresses (rounded up to pages), of which the first ``committed_bytes`` have memory.

    Booked under ``owner``, ``line`` and ``tag``: requested bytes as asked for, physical bytes in whole pages. With a
    ``tag`` it can be released and materialised by it through ``device.virtual``, ``restore`` saying what becomes of
    the contents; exactly the committed pages come back.

    chunk_bytes          size of the large handles that a commit takes where a whole one fits; the rest are pages
    fine_from_bytes      from this offset on only pages, so that a decommit stops exactly where it should
    least_reserve_bytes  a reservation that the system refuses is tried again with half, down to this
    zero_on_commit       new memory is zeroed on the consumer's stream before it counts as committed
    zero_ranges          (offset, bytes) that are zero after every commit and materialise: semaphores, counters
    concurrent_growth    a commit does not wait for running work; only where the card was shown to bear it
    peers                devices that may access the memory too

    Pages change at drained points: decommit, close and, by default, commit wait for the device's streams; all three
    are refused during a capture. Without virtual memory ``path`` is "static": all of it is one plain allocation, made
    here, that neither grows nor shrinks. Not thread-safe. Not usable in a child after a fork (``ForkedProcess``).
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
        restore: Restore = Restore.NONE,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        fine_from_bytes: int | None = None,
        least_reserve_bytes: int | None = None,
        zero_on_commit: bool = False,
        zero_ranges: tuple[tuple[int, int], ...] = (),
        concurrent_growth: bool = False,
        peers: tuple[int, ...] = (),
    ) -> None:
        found = stream.driver.capabilities()
        self.path = "virtual" if found.vmm else "static"
        self._page_bytes = found.page_bytes
        self._chunk_bytes = max(self._page_bytes, round_up(chunk_bytes, self._page_bytes))
        self.stream, self.owner, self.tag = stream, owner, tag
        self._zero_on_commit, self._zero_ranges, self._concurrent = zero_on_commit, zero_ranges, concurrent_growth
        self._exports = Exports()
        self._graphs = stream.device.graphs
        self._address, self.size_bytes = 0, round_up(reserve_bytes, self._page_bytes)
        self._account = ledger.open(owner=owner, line=line, memory=MemoryKind.GPU, tag=tag)
        self._run = ArenaRun(stream.device, self._account, edited=self._edited, peers=peers)
        self._chunk: Chunk[list[Piece]] | None = None
        self._registered_zeros: list[tuple[int, int]] = []
        with undone_if_interrupted(self.close):
            for offset, size in zero_ranges:
                self._require_inside(offset, size)
            least_bytes = round_up(least_reserve_bytes or self.size_bytes, self._page_bytes)
            if self.path == "static":
                self._allocate(least_bytes)
            else:
                self._reserve(least_bytes)
                if tag:
                    self._register(restore)
            self._fine_from = self.size_bytes if fine_from_bytes is None else fine_from_bytes

    def __repr__(self) -> str:
        state = f" {self.path}" if self.path == "static" else ""
        state += " asleep" * self.is_asleep
        return (
            f"<VaArena {self.owner!r}{state} {self.committed_bytes:,} of {self.size_bytes:,} bytes "
            f"at {self._address:#x} on {self.stream!r}>"
        )

    @property
    def address(self) -> int:
        """The first byte, the same for life; 0 once closed. Whoever reads it during a capture is taken to use it."""
        self._graphs.hand_out(self)
        return self._address

    @property
    def exports(self) -> Exports:
        """The views over it. Asking during a capture counts as using the memory."""
        self._graphs.hand_out(self)
        return self._exports

    @property
    def has_views(self) -> bool:
        return self._exports.is_alive

    @property
    def committed_bytes(self) -> int:
        """Leading bytes that have memory, or have it again after ``materialize``; in whole pages."""
        if self.path == "static":
            return self.size_bytes if self._address else 0
        pieces = self._run.pieces
        return pieces[-1].addr + pieces[-1].size - self._address if pieces else 0

    @property
    def usable_bytes(self) -> int:
        """Leading bytes that may be touched now."""
        return 0 if self.is_asleep else self.committed_bytes

    @property
    def is_asleep(self) -> bool:
        """Released by its tag and not yet materialised."""
        return self._chunk is not None and self._chunk.state is not State.MATERIALIZED

    @property
    def poisoned(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) that the driver would not unmap: never used again, booked until ``close`` gets them back."""
        return tuple((piece.addr, piece.size) for piece in self._run.poisoned)

    @property
    def leftover_bytes(self) -> int:
        """Physical bytes out of use that the driver did not take back; they stay booked."""
        return self._run.leftover_bytes

    @property
    def num_edits(self) -> int:
        """Changes of the page table so far: map, set_access and unmap calls."""
        return self._run.num_edits

    @uninterrupted
    def commit(self, num_bytes: int, *, stream: Stream | None = None, timeout_s: float | None = None) -> int:
        """Make at least the first ``num_bytes`` usable; returns ``committed_bytes``.

        What is to be zero is zeroed in the order of ``stream``, the consumer's; by default the arena's own. All or
        nothing: whatever fails, the arena and the ledger are as before and the call may be repeated. Raises
        ``BufferOOM`` for want of memory, ``BufferInUse`` when work is still running after ``timeout_s``,
        ``CaptureError``, ``NotMaterialized``, ``LedgerError`` after a strict seal, ``DriverError`` for the rest.
        """
        self._require_awake()
        if not 0 <= num_bytes <= self.size_bytes:
            raise ValueError(f"{self!r} cannot commit {num_bytes:,} bytes")
        self._run.sweep()
        new = self._missing(num_bytes)
        if new:
            self._grow(new, num_bytes, stream or self.stream, timeout_s)
        elif self.path == "static" and num_bytes > self._run.requested_bytes:
            self._zero(self._run.requested_bytes, num_bytes, stream or self.stream)
        self._run.request(max(self._run.requested_bytes, num_bytes))
        self._register_zeros()
        return self.committed_bytes

    @uninterrupted
    def decommit(self, num_bytes: int, *, timeout_s: float | None = None) -> int:
        """Give back whole handles beyond the first ``num_bytes``; returns the bytes given back.

        Contents beyond are lost; ``committed_bytes`` may stay above ``num_bytes`` by part of one handle. What the
        driver does not unmap is ``poisoned``, what it does not take back is tried again later: neither raises.
        Raises ``RangeReferenced`` where a graph or a registration holds what would go, ``BufferInUse`` when work is
        still running after ``timeout_s``, ``CaptureError`` and ``NotMaterialized``; then nothing has changed.
        """
        self._require_awake()
        keep_bytes = max(0, num_bytes)
        gone = [piece for piece in self._run.pieces if piece.addr - self._address >= keep_bytes]
        if gone:
            self.require_unreferenced(gone[0].addr, self._address + self.committed_bytes - gone[0].addr)
            self._shrink(gone, timeout_s)
        self._run.request(min(self._run.requested_bytes, keep_bytes))
        self._run.sweep()
        self._register_zeros()
        return sum(piece.size for piece in gone if not piece.is_held)

    @uninterrupted
    def close(self, *, timeout_s: float | None = None) -> None:
        """Give everything back, addresses included. Closing again does nothing.

        Raises ``BufferInUse`` while a tensor over it is alive or work runs after ``timeout_s``, ``RangeReferenced``
        while a graph replays over it, and ``DriverError`` when the driver keeps something; the call may be repeated.
        """
        if not self._address:
            return
        self._run.require_process()
        self._exports.require_none(self)
        self.require_unreferenced()
        with self._entry_held(), self._edit(self._address, self.size_bytes, unmaps=True, timeout_s=timeout_s):
            self._give_back()
        self._graphs.forget(self._address, self.size_bytes)
        self._address = 0

    def require_unreferenced(self, addr: int | None = None, size: int | None = None) -> None:
        """Raise ``RangeReferenced`` while a graph or a registration holds a byte of the range; by default of all."""
        addr, size = self._address if addr is None else addr, self.size_bytes if size is None else size
        held = self._graphs.referenced(addr, size)
        if held is not None:
            raise RangeReferenced(f"{self!r} cannot give {size:,} bytes at {addr:#x} back: {held}")

    @uninterrupted
    def keep_zero(self, offset: int, size: int) -> None:
        """One more of the ``zero_ranges``: zero from now on after every commit and materialise, and zeroed now.

        For semaphores and counters that kernels leave at zero when they are done.
        """
        self._require_awake()
        self._require_inside(offset, size)
        if (offset, size) not in self._zero_ranges:
            self._zero_ranges = (*self._zero_ranges, (offset, size))
        stop = min(offset + size, self.committed_bytes)
        if offset < stop:
            self.stream.driver.fill(self._address + offset, 0, stop - offset, stream=self.stream.bare_handle)
        self._register_zeros()

    def _grow(self, new: list[Piece], num_bytes: int, stream: Stream, timeout_s: float | None) -> None:
        start = new[0].addr - self._address
        end = new[-1].addr + new[-1].size - self._address
        self._graphs.require_no_capture(f"a commit of {self!r}")
        self.stream.device.fences.require_no_capture(f"a commit of {self!r}")
        try:
            self._run.create_pieces(new)  # touches no address, so before anything has to wait
            with self._edit(new[0].addr, end - start, unmaps=False, timeout_s=timeout_s):
                self._run.map_pieces(new)
                self._run.book(new)
                self._zero_or_wait(start, end, stream)
                self._run.pieces += new
        except BaseException as error:
            if self.committed_bytes >= end:  # the pages are there: a registration could not be put up again
                raise
            self._run.abandon(new)
            if isinstance(error, DriverOOM):
                wanted = num_bytes - self.committed_bytes
                raise out_of_memory(error, self.stream, size_bytes=wanted, owner=self.owner) from error
            raise

    def _shrink(self, gone: list[Piece], timeout_s: float | None) -> None:
        end = gone[-1].addr + gone[-1].size
        with self._edit(gone[0].addr, end - gone[0].addr, unmaps=True, timeout_s=timeout_s):
            self._run.drop(gone)

    def _give_back(self) -> None:
        if self.path == "static":
            self.stream.driver.mem_free(self._address)
            self._account.sub(0, self.size_bytes)
            self._run.request(0)
        else:
            self._run.take_away(tuple(self._run.pieces))
            self._run.pieces.clear()
            self._run.request(0)
            self._run.rescue()
            if self._chunk is not None:
                self.stream.device.virtual.remove(self._address)
                self._chunk.destroy()  # it has no pages left
                self._chunk = None
            self.stream.driver.va_free(self._address, self.size_bytes)

    def _entry_held(self) -> AbstractContextManager[None]:
        """No other thread puts it to sleep meanwhile. Before the graphs' lock, as in every release."""
        return nullcontext() if self._chunk is None else self.stream.device.virtual.holding(self._address)

    @contextmanager
    def _edit(self, addr: int, size: int, *, unmaps: bool, timeout_s: float | None) -> Iterator[None]:
        """A drained point: no launch begins meanwhile, and nothing that began before still runs."""

        def drain() -> None:
            if (unmaps or not self._concurrent) and not self.stream.device.fences.wait_idle(timeout_s=timeout_s):
                raise BufferInUse(f"{self!r} was not changed: work was still running after {timeout_s} s")

        with self._graphs.editing(addr, size, unmaps=unmaps, drain=drain):
            yield

    def _edited(self, addr: int, size: int, mapped: bool) -> None:  # noqa: FBT001 - called by our run alone
        self._graphs.edited(addr, size, mapped=mapped, owner=self.owner)

    def _zero(self, start: int, end: int, stream: Stream) -> None:
        """What must be zero once ``[start, end)`` is new: fresh pages hold anything."""
        wanted = [(start, end)] if self._zero_on_commit else []
        for offset, size in self._zero_ranges:
            stop = min(offset + size, end)
            # Beside running work only what is new: kernels may be counting in the rest.
            if offset < stop and not (self._concurrent and stop <= start):
                wanted.append((max(offset, start) if self._concurrent else offset, stop))
        for first, stop in wanted:
            stream.driver.fill(self._address + first, 0, stop - first, stream=stream.bare_handle)

    def _zero_or_wait(self, start: int, end: int, stream: Stream) -> None:
        """When one fill cannot be asked for, those before it are waited for: the pages are about to be unmapped."""
        try:
            self._zero(start, end, stream)
        except DriverError:
            with suppress(DriverError):
                stream.sync()
            raise

    def _missing(self, num_bytes: int) -> list[Piece]:
        start, end = self.committed_bytes, round_up(num_bytes, self._page_bytes)
        if end <= start:
            return []
        barrier = min((piece.addr for piece in self._run.poisoned), default=None)
        if barrier is not None and self._address + end > barrier:
            free, total = self.stream.driver.mem_info()
            raise BufferOOM(
                size_bytes=num_bytes - start,
                used_bytes=total - free,
                capacity_bytes=total,
                owner=self.owner,
                detail=f"the arena ends at {barrier - self._address:,} bytes: the driver would not unmap what follows",
            )
        places = lay_out(
            start, end, page_bytes=self._page_bytes, bulk_bytes=self._chunk_bytes, fine_from=self._fine_from
        )
        return [Piece(self._address + offset, size) for offset, size in places]

    def _register(self, restore: Restore) -> None:
        """One entry of ``device.virtual``, which releases and materialises whatever the run holds at that moment."""
        self._chunk = Chunk(self._run, [self._run])
        self._chunk.materialize()  # nothing is committed yet, so nothing is made
        self._register_zeros()
        self.stream.device.virtual.add(
            self._address,
            self._chunk,
            tag=self.tag,
            owner=self.owner,
            extent=self._run,
            stream=self.stream,
            restore=restore,
            zero_ranges=self._registered_zeros,
            tells_graphs=True,
        )

    def _register_zeros(self) -> None:
        """What is zeroed on waking: the ``zero_ranges``, as far as they have memory now."""
        start, end = self._address, self.committed_bytes
        self._registered_zeros[:] = [
            (start + offset, min(size, end - offset)) for offset, size in self._zero_ranges if offset < end
        ]

    def _reserve(self, least_bytes: int) -> None:
        driver, size = self.stream.driver, self.size_bytes
        while True:
            try:
                self._address, self.size_bytes = driver.va_reserve(size, align=self._page_bytes), size
                break
            except DriverError as error:
                if size <= least_bytes:
                    detail = f"{self.owner!r} needs {size:,} bytes of addresses, no memory yet; {error.detail}"
                    raise type(error)(error.call, error.code, detail) from error
                size = max(least_bytes, round_up(size // 2, self._page_bytes))
        self._graphs.know(self, size=self.size_bytes)

    def _allocate(self, least_bytes: int) -> None:
        """Without virtual memory: all of it at once, as much as there is down to ``least_bytes``."""
        driver, size = self.stream.driver, self.size_bytes
        while True:
            try:
                self._address, self.size_bytes = driver.mem_alloc(size), size
                break
            except DriverOOM as error:
                if size <= least_bytes:
                    raise out_of_memory(error, self.stream, size_bytes=size, owner=self.owner) from error
                size = max(least_bytes, round_up(size // 2, self._page_bytes))
        try:
            self._account.add(0, size)
        except LedgerError:
            driver.mem_free(self._address)
            raise
        self._graphs.know(self, size=0)

    def _require_inside(self, offset: int, size: int) -> None:
        if offset < 0 or size <= 0 or offset + size > self.size_bytes:
            raise ValueError(f"{self!r} has no {size:,} bytes at {offset:,}")

    def _require_awake(self) -> None:
        self._run.require_process()
        if not self._address:
            raise ValueError(f"{self!r} is closed")
        if self._chunk is not None and self._chunk.is_terminal:
            raise RangePoisoned(f"{self!r} lost memory in a release that failed: close it")
        if self.is_asleep:
            raise NotMaterialized(f"{self!r} was released by tag {self.tag!r}: materialise it first")
