"""Pinned host memory, kept and handed out again: pinning is slow, and a copy may still read what was freed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tonnage.errors import DriverOOM
from tonnage.units import MiB, round_up

if TYPE_CHECKING:
    from tonnage.buffers.device import Device

#: Bytes: every block starts and ends on such a border.
ALIGNMENT = 256
DEFAULT_CHUNK_BYTES = 64 * MiB


class Passable(Protocol):
    """A point that work reaches some day, such as ``Mark``."""

    @property
    def passed(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedStats:
    """Bytes: in blocks that are handed out, freed but perhaps still read, and pinned in all, with the high marks."""

    used_bytes: int
    waiting_bytes: int
    reserved_bytes: int
    used_high_bytes: int
    reserved_high_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self.used_bytes - self.waiting_bytes


class _Block:
    """``[start, start + size)`` of a chunk, between its neighbours; the outermost have none on one side."""

    __slots__ = ("after", "before", "chunk_size", "is_free", "size", "start")

    def __init__(self, start: int, size: int, chunk_size: int) -> None:
        self.start, self.size, self.chunk_size = start, size, chunk_size
        self.is_free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class PinnedPool:
    """Blocks cut from chunks of ``chunk_bytes``; a request gets a chunk of exactly its own size where it is larger, or
    where no more can be had.

    A request takes what it asks for, rounded up to ``ALIGNMENT``. At most ``limit_bytes`` are pinned at once. Safe
    to use from any thread: no lock is held while the driver works. Safe in finalisers, which may run in the middle of
    any call here: what they free is joined by the next call, and what they ask for gets a chunk of its own.
    """

    def __init__(
        self, device: Device, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, limit_bytes: int | None = None
    ) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunks of {chunk_bytes:,} bytes")
        self._driver = device.driver
        self.chunk_bytes = round_up(chunk_bytes, ALIGNMENT)
        self.limit_bytes = limit_bytes
        self._lock, self._is_busy = threading.RLock(), False
        self._late: deque[Callable[[], None]] = deque()  # what is to be put into the books, in this order
        self._free: dict[int, dict[int, _Block]] = {}  # by size class, then by address
        self._used: dict[int, _Block] = {}
        self._waiting: list[tuple[Passable, _Block]] = []
        self._used_bytes = self._waiting_bytes = self._reserved_bytes = 0
        self._used_high = self._reserved_high = 0

    def __repr__(self) -> str:
        return f"<PinnedPool of {self._driver.uuid}: {self._used_bytes:,} of {self._reserved_bytes:,} bytes used>"

    def alloc(self, size_bytes: int) -> int:
        """The address of at least ``size_bytes`` (0 counts as 1). Raises ``DriverOOM``; nothing is changed then."""
        need = round_up(max(1, size_bytes), ALIGNMENT)
        found = self._find(need)
        if found is None and self.reap():
            found = self._find(need)
        if found is None and need < self.chunk_bytes:
            found = self._try_chunk(need)
        return (found or self._grow(need, need)).start

    def free(self, address: int, *, after: Passable | None = None) -> None:
        """Take a block back; with ``after`` nobody gets it before that point is passed.

        Raises ``ValueError`` for an address that is not handed out.
        """
        block = self._used.pop(address, None)
        if block is None:
            raise ValueError(f"{self!r} has handed out no block at {address:#x}")
        self._late.append(partial(self._take_back, block, after))
        with self._alone():
            """In the books now, unless we are a finaliser in the middle of them."""

    def block_bytes(self, address: int) -> int:
        """The size of the block handed out at ``address``, rounding included."""
        return self._used[address].size

    def reap(self) -> int:
        """Blocks whose point is passed become free; returns the bytes. Never waits."""
        with self._alone() as is_alone:
            if not is_alone:
                return 0
            waiting, self._waiting = self._waiting, []
        still, done = list(waiting), []
        try:
            for entry in waiting:
                if entry[0].passed:
                    done.append(entry[1])
                    still.remove(entry)
        finally:
            with self._alone():
                self._waiting += still
                for block in done:
                    self._waiting_bytes -= block.size
                    self._join(block)
        return sum(block.size for block in done)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give wholly free chunks back, largest first, while ``keep_bytes`` stay pinned; returns the bytes.

        A chunk that the driver does not take back (``DriverError``) is ours as before.
        """
        self.reap()
        given = 0
        while (block := self._take_whole_chunk(keep_bytes)) is not None:
            try:
                self._driver.host_free(block.start)
            except BaseException:
                with self._alone():
                    self._reserved_bytes += block.size
                    self._insert(block)
                raise
            given += block.size
        return given

    def stats(self) -> PinnedStats:
        with self._alone():
            return PinnedStats(
                used_bytes=self._used_bytes,
                waiting_bytes=self._waiting_bytes,
                reserved_bytes=self._reserved_bytes,
                used_high_bytes=self._used_high,
                reserved_high_bytes=self._reserved_high,
            )

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock, with the books up to date.

        False in a finaliser that interrupts whoever holds it, in the same thread: the books are in disorder then. It
        may look at them, touch ``_used`` by one step, and leave the rest in ``_late``.
        """
        with self._lock:
            was_busy, self._is_busy = self._is_busy, True
            try:
                while self._late and not was_busy:
                    self._late.popleft()()
                yield not was_busy
            finally:
                self._is_busy = was_busy

    def _take_back(self, block: _Block, after: Passable | None) -> None:
        self._used_bytes -= block.size
        if after is None:
            self._join(block)
        else:
            self._waiting.append((after, block))
            self._waiting_bytes += block.size

    def _find(self, need: int) -> _Block | None:
        """A block cut from a free one: the first that fits in its own class, or any of the next class that has one."""
        with self._alone() as is_alone:
            if not is_alone:
                return self._aside(need)
            own = _class(need)
            for block in self._free.get(own, {}).values():
                if block.size >= need:
                    return self._cut(block, need)
            higher = [number for number, blocks in self._free.items() if number > own and blocks]
            if not higher:
                return None
            return self._cut(next(iter(self._free[min(higher)].values())), need)

    def _aside(self, size: int) -> _Block:
        """A chunk for a finaliser, which may not touch any other."""
        self._require_within(size)
        block = _Block(self._driver.host_alloc(size, flags=0), size, size)
        self._used[block.start] = block
        self._late.append(partial(self._count, used_bytes=size, reserved_bytes=size))
        return block

    def _count(self, *, used_bytes: int = 0, reserved_bytes: int = 0) -> None:
        self._used_bytes += used_bytes
        self._reserved_bytes += reserved_bytes
        self._used_high = max(self._used_high, self._used_bytes)
        self._reserved_high = max(self._reserved_high, self._reserved_bytes)

    def _try_chunk(self, need: int) -> _Block | None:
        """From a new chunk of the usual size, or None where only less can be had."""
        try:
            return self._grow(need, self.chunk_bytes)
        except DriverOOM:
            return None

    def _grow(self, need: int, size: int) -> _Block:
        with self._alone():
            # Counted before it is there, so that two threads cannot both pass the limit.
            self._require_within(size)
            self._reserved_bytes += size
        try:
            start = self._driver.host_alloc(size, flags=0)
        except BaseException:
            with self._alone():
                self._reserved_bytes -= size
            raise
        with self._alone():
            self._reserved_high = max(self._reserved_high, self._reserved_bytes)
            return self._cut(_Block(start, size, size), need)

    def _require_within(self, size: int) -> None:
        if self.limit_bytes is not None and self._reserved_bytes + size > self.limit_bytes:
            raise DriverOOM(
                "host_alloc",
                "LIMIT",
                f"{size:,} bytes more than the {self._reserved_bytes:,} pinned now would pass the pool's limit of "
                f"{self.limit_bytes:,} bytes",
            )

    def _cut(self, block: _Block, need: int) -> _Block:
        """Hand out the front of a block that is free or new; what is behind is free. Called with the lock held."""
        if block.is_free:
            self._remove(block)
        if block.size > need:
            rest = _Block(block.start + need, block.size - need, block.chunk_size)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, need
            self._insert(rest)
        self._used[block.start] = block
        self._count(used_bytes=need)
        return block

    def _join(self, block: _Block) -> None:
        """Free a block together with its free neighbours of the same chunk. Called with the lock held."""
        before, after = block.before, block.after
        if after is not None and after.is_free:
            self._remove(after)
            _absorb(block, after)
        if before is not None and before.is_free:
            self._remove(before)
            _absorb(before, block)
            block = before
        self._insert(block)

    def _insert(self, block: _Block) -> None:
        block.is_free = True
        self._free.setdefault(_class(block.size), {})[block.start] = block

    def _remove(self, block: _Block) -> None:
        block.is_free = False
        del self._free[_class(block.size)][block.start]

    def _take_whole_chunk(self, keep_bytes: int) -> _Block | None:
        with self._alone() as is_alone:
            if not is_alone:
                return None
            spare = self._reserved_bytes - keep_bytes
            whole = [
                block
                for blocks in self._free.values()
                for block in blocks.values()
                if block.size == block.chunk_size and block.size <= spare
            ]
            if not whole:
                return None
            block = max(whole, key=lambda one: one.size)
            self._remove(block)
            self._reserved_bytes -= block.size
            return block


def _class(size: int) -> int:
    """Sizes of one class differ by less than two times."""
    return (size // ALIGNMENT).bit_length()


def _absorb(block: _Block, following: _Block) -> None:
    block.size += following.size
    block.after = following.after
    if following.after is not None:
        following.after.before = block
