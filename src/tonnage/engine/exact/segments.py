"""Torch's caching allocator, replayed: from bytes alive to bytes reserved, with no device.

What torch asks of the driver are segments; blocks are cut from them, come back to a list of free ones and merge with
free neighbours; a segment is never given back while nobody empties the cache. The rules are those of
``c10/cuda/CUDACachingAllocator.cpp`` with its default settings, one stream, and no limit: sizes in multiples of 512 B;
requests of up to 1 MiB from segments of 2 MiB, others from segments of 20 MiB where they are below 10 MiB and of their
own size in multiples of 2 MiB above; the smallest free block that is large enough, of these the one at the lowest
address; its rest stays free where it is 512 B (small) or more than 1 MiB (large). ``expandable`` is the setting
``expandable_segments:True``: one range for each pool, which grows at its end in steps of 2 or 20 MiB, and every rest of
512 B is cut off.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from tonnage.units import MiB, round_up

#: Every size is a multiple of this.
BLOCK_BYTES = 512
#: The largest request that the pool of small blocks serves.
SMALL_BYTES = MiB
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MiB, 20 * MiB
#: From this size on a request gets a segment of its own size.
OWN_SEGMENT_BYTES, OWN_ROUNDING_BYTES = 10 * MiB, 2 * MiB

#: What changed: which storage, and its bytes; below zero, it died.
Event = tuple[Hashable, int]


@dataclass(slots=True, eq=False)
class Block:
    """Bytes ``[address, address + size)`` of a segment, beside its neighbours there."""

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """``allocate`` and ``free`` by any key; ``reserved_bytes`` and ``allocated_bytes`` with their peaks.

    ``allocated_bytes`` counts blocks as they are, with a rest that was too small to be cut off, as torch does.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._last: dict[bool, Block | None] = {True: None, False: None}
        self._blocks: dict[Hashable, Block] = {}
        self._next_address = 0
        self.segments: list[Block] = []
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Raises ``KeyError`` where ``key`` has a block already."""
        if key in self._blocks:
            raise KeyError(key)
        size = round_up(max(num_bytes, 1), BLOCK_BYTES)
        block = self._taken(size, is_small=size <= SMALL_BYTES)
        self._blocks[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Raises ``KeyError`` where it has none."""
        block = self._blocks.pop(key)
        self.allocated_bytes -= block.size
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._forget(other)
                self._merge(block, other)
        self._remember(block)

    def replay(self, events: Iterable[Event]) -> None:
        """Allocate what has bytes above zero, free what has bytes below."""
        for key, num_bytes in events:
            if num_bytes < 0:
                self.free(key)
            elif num_bytes > 0:
                self.allocate(key, num_bytes)

    def free_blocks(self) -> list[Block]:
        return [block for pool in self._free.values() for _, _, block in pool]

    def used_blocks(self) -> list[Block]:
        return list(self._blocks.values())

    def _taken(self, size: int, *, is_small: bool) -> Block:
        pool = self._free[is_small]
        place = bisect_left(pool, (size, 0), key=lambda entry: entry[:2])
        if place < len(pool):
            block = pool.pop(place)[2]
        elif self._expandable:
            block = self._grown(size, is_small=is_small)
        else:
            block = self._segment(_segment_bytes(size), is_small=is_small)
        block.is_free = False
        self._split(block, size)
        return block

    def _segment(self, size: int, *, is_small: bool) -> Block:
        block = Block(address=self._next_address, size=size, is_small=is_small)
        self._next_address += size + LARGE_SEGMENT_BYTES  # segments never touch
        self.segments.append(Block(address=block.address, size=size, is_small=is_small))
        self._reserve(size)
        return block

    def _grown(self, size: int, *, is_small: bool) -> Block:
        """The range of the pool made longer, from the free block at its end if there is one."""
        step = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        last = self._last[is_small]
        have = last.size if last is not None and last.is_free else 0
        grown = round_up(size - have, step)
        self._reserve(grown)
        if last is not None and last.is_free:
            self._forget(last)
            last.size += grown
            return last
        # The two ranges lie so far apart that neither reaches the other.
        address = last.address + last.size if last is not None else 0 if is_small else 2**60
        block = Block(address=address, size=grown, is_small=is_small, before=last)
        if last is not None:
            last.after = block
        self._last[is_small] = block
        return block

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        is_cut = rest >= BLOCK_BYTES if block.is_small or self._expandable else rest > SMALL_BYTES
        if not is_cut:
            return
        after = Block(address=block.address + size, size=rest, is_small=block.is_small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = after
        if self._last[block.is_small] is block:
            self._last[block.is_small] = after
        block.after, block.size = after, size
        self._remember(after)

    def _merge(self, block: Block, other: Block) -> None:
        """``block`` takes in its free neighbour."""
        block.size += other.size
        if other is block.before:
            block.address, block.before = other.address, other.before
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block
            if self._last[block.is_small] is other:
                self._last[block.is_small] = block

    def _remember(self, block: Block) -> None:
        insort(self._free[block.is_small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _forget(self, block: Block) -> None:
        pool = self._free[block.is_small]
        pool.pop(bisect_left(pool, (block.size, block.address), key=lambda entry: entry[:2]))


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, OWN_ROUNDING_BYTES)
