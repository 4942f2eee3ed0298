"""In which order cached blocks are given up: by priority, equal ones by age."""

from __future__ import annotations

import heapq
from collections.abc import Callable

#: A rank is ``priority * _AGES + stamp``; stamps count up for ever and stay below this.
_AGES = 2**48
#: Entries that no longer count, beyond as many again as there are live ones, before a heap is rebuilt.
_SPARE_ENTRIES = 1024


class Ranks:
    """The rank of each block: lower ones are evicted first. ``priorities``, and for how many seconds without use they
    hold (None: for ever), by id."""

    def __init__(self, num_blocks: int, *, default_priority: int) -> None:
        self._default = default_priority
        self._stamp = 0
        self.ranks = [0] * num_blocks
        self.priorities = [default_priority] * num_blocks
        self.seconds: list[float | None] = [None] * num_blocks

    def touch(self, block: int) -> None:
        """It is the newest of its priority."""
        self._stamp += 1
        self.ranks[block] = self.priorities[block] * _AGES + self._stamp

    def set(self, block: int, priority: int, seconds: float | None) -> None:
        self.priorities[block], self.seconds[block] = priority, seconds

    def forget(self, block: int) -> None:
        """As a block that was never kept."""
        self.set(block, self._default, None)


class EvictionQueue:
    """The evictable blocks of one place, lowest rank first. A block is in it, or not: pushing again is a defect.

    What was taken out stays in the heap until it comes to the top; an entry counts if the block is here with that
    very rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks.ranks
        self._heap: list[tuple[int, int]] = []
        self._here: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, block: int) -> bool:
        return block in self._here

    def push(self, block: int) -> None:
        assert block not in self._here
        rank = self._here[block] = self._ranks[block]
        heapq.heappush(self._heap, (rank, block))
        if len(self._heap) > 2 * len(self._here) + _SPARE_ENTRIES:
            self._heap = [(rank, block) for block, rank in self._here.items()]
            heapq.heapify(self._heap)

    def discard(self, block: int) -> None:
        self._here.pop(block, None)

    def lowest(self) -> int | None:
        """The rank of who goes next."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop(self) -> int:
        self._drop_stale()
        block = heapq.heappop(self._heap)[1]
        del self._here[block]
        return block

    def listed(self) -> list[int]:
        """All blocks, in the order in which they go."""
        return sorted(self._here, key=self._here.__getitem__)

    def clear(self) -> None:
        self._heap.clear()
        self._here.clear()

    def _drop_stale(self) -> None:
        heap, here = self._heap, self._here
        while heap and here.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)


class Deadlines:
    """Unused blocks whose priority runs out some day, soonest first. ``clock`` tells seconds."""

    def __init__(self, ranks: Ranks, clock: Callable[[], float]) -> None:
        self._ranks, self._clock = ranks, clock
        self._heap: list[tuple[float, int, int]] = []
        self._num_kept = 0  # entries when it was last looked which still count

    def start(self, block: int) -> None:
        """Its time begins now: nobody uses it any more."""
        seconds = self._ranks.seconds[block]
        if seconds is not None:
            heapq.heappush(self._heap, (self._clock() + seconds, block, self._ranks.ranks[block]))
            if len(self._heap) > 2 * self._num_kept + _SPARE_ENTRIES:
                self._heap = [(when, block, rank) for when, block, rank in self._heap if self._counts(block, rank)]
                heapq.heapify(self._heap)
                self._num_kept = len(self._heap)

    def _counts(self, block: int, rank: int) -> bool:
        """It was not used since: its rank is the same, and its priority still runs out."""
        return self._ranks.ranks[block] == rank and self._ranks.seconds[block] is not None

    def passed(self) -> list[int]:
        """Those whose time is over and which were not used since, lowest rank first: children before parents."""
        now, ranks = self._clock(), self._ranks.ranks
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, block, rank = heapq.heappop(self._heap)
            if self._counts(block, rank):
                due.append(block)
        return sorted(due, key=ranks.__getitem__)
