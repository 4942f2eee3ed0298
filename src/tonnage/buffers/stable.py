"""A buffer that grows without moving: graphs captured over it, views and pointers stay right."""

from __future__ import annotations

from tonnage.buffers.arena import DEFAULT_CHUNK_BYTES, VaArena
from tonnage.buffers.dlpack import Exportable
from tonnage.buffers.memory import Exports
from tonnage.buffers.restore import Restore
from tonnage.buffers.stream import Stream
from tonnage.buffers.uninterrupted import undone_if_interrupted, uninterrupted
from tonnage.errors import RangeReferenced
from tonnage.ledger import Ledger
from tonnage.terms import LineKind


class StableBuffer(Exportable):
    """The first ``num_bytes`` of an arena, which this buffer alone grows and shrinks.

    ``StableBuffer(arena)`` stands on somebody's arena, which stays theirs to close; ``StableBuffer.make`` has its own.
    Its address never changes and no byte is ever copied: what is there stays where it is. A view made once, over all
    that may ever be, sees the buffer grow.
    """

    def __init__(self, arena: VaArena, *, num_bytes: int = 0) -> None:
        self.arena = arena
        self._is_own = False
        self.num_bytes = 0
        self.grow(num_bytes)

    @classmethod
    def make(
        cls,
        stream: Stream,
        *,
        ledger: Ledger,
        owner: str,
        line: LineKind,
        most_bytes: int,
        num_bytes: int = 0,
        tag: str = "",
        restore: Restore = Restore.NONE,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        zero_ranges: tuple[tuple[int, int], ...] = (),
    ) -> StableBuffer:
        """One with an arena of its own, which can grow to ``most_bytes``. Raises as ``VaArena`` and ``grow`` do."""
        with undone_if_interrupted(lambda: arena.close()):
            arena = VaArena(
                stream,
                ledger=ledger,
                owner=owner,
                line=line,
                reserve_bytes=most_bytes,
                tag=tag,
                restore=restore,
                chunk_bytes=chunk_bytes,
                zero_ranges=zero_ranges,
            )
            try:
                buffer = cls(arena, num_bytes=num_bytes)
            except BaseException:
                arena.close()
                raise
            buffer._is_own = True
        return buffer

    def __repr__(self) -> str:
        return f"<StableBuffer {self.num_bytes:,} bytes of {self.arena!r}>"

    @property
    def stream(self) -> Stream:
        return self.arena.stream

    @property
    def owner(self) -> str:
        return self.arena.owner

    @property
    def address(self) -> int:
        """The same for life. Reading it during a capture counts as using the buffer."""
        return self.arena.address

    @property
    def size_bytes(self) -> int:
        """What a view spans: all that the buffer may grow to."""
        return self.arena.size_bytes

    @property
    def committed_bytes(self) -> int:
        return self.arena.committed_bytes

    @property
    def usable_bytes(self) -> int:
        """Leading bytes that may be touched now: ``num_bytes``, or none while the arena sleeps."""
        return min(self.num_bytes, self.arena.usable_bytes)

    @property
    def exports(self) -> Exports:
        return self.arena.exports

    @property
    def has_views(self) -> bool:
        return self.arena.has_views

    @property
    def root(self) -> VaArena:
        """The memory that it is a name of."""
        return self.arena

    @property
    def tag(self) -> str:
        return self.arena.tag

    def grow(self, num_bytes: int, *, stream: Stream | None = None, timeout_s: float | None = None) -> None:
        """At least ``num_bytes`` from now on, in place. All or nothing; raises as ``VaArena.commit`` does."""
        if num_bytes > self.num_bytes:
            with uninterrupted:
                self.arena.commit(num_bytes, stream=stream, timeout_s=timeout_s)
                self.num_bytes = num_bytes

    @uninterrupted
    def shrink(self, num_bytes: int, *, timeout_s: float | None = None) -> int:
        """At most ``num_bytes`` from now on; returns the bytes given back, in whole handles.

        Raises ``RangeReferenced`` below what a captured graph or a pinned registration holds, even where no page would
        go: the next shrink would take it. Raises as ``VaArena.decommit`` does; then nothing has changed.
        """
        if num_bytes >= self.num_bytes:
            return 0
        start = self.arena.address + max(0, num_bytes)
        held = self.stream.device.graphs.referenced(start, self.num_bytes - max(0, num_bytes))
        if held is not None:
            raise RangeReferenced(f"{self!r} cannot shrink to {num_bytes:,} bytes: {held}")
        given_bytes = self.arena.decommit(num_bytes, timeout_s=timeout_s)
        self.num_bytes = max(0, num_bytes)
        return given_bytes

    @uninterrupted
    def close(self) -> None:
        """Give back its own arena, or what it uses of somebody's. Closing again does nothing. Raises as they do."""
        if self._is_own:
            self.arena.close()
        elif self.arena.address:
            self.shrink(0)
        self.num_bytes = 0
