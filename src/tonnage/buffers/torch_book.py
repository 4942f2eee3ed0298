"""What the shim did, told to the ledger: one change of an account for every segment that torch took or gave back.

The arena under a heap books its committed memory as a whole. A segment is a finer split of that: its bytes move from
the arena's account to the segments' account and back, so that the sum of all accounts is the committed memory at any
moment, whether or not the book is up to date. What is left in the arena's account is in no segment.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

from tonnage.buffers.shim_heaps import HeapState, SegmentChange, SegmentEvent, ShimHeap
from tonnage.errors import LedgerError
from tonnage.ledger import Account, Ledger

#: Events kept for who asks later; the ledger has its own ring.
DEFAULT_NUM_EVENTS = 4096


class SegmentBook:
    """Moves the segments of ``heap`` between two accounts of ``ledger``. Every method may be called on any thread.

    ``arena`` is where the committed memory is booked: at least the heap's limit, requested and physical.
    """

    def __init__(
        self, heap: ShimHeap, *, ledger: Ledger, segments: Account, arena: Account, num_events: int = DEFAULT_NUM_EVENTS
    ) -> None:
        self._heap, self._ledger = heap, ledger
        self._segments, self._arena = segments, arena
        self._lock = threading.Lock()
        self._booked: dict[int, SegmentEvent] = {}  # by address: the event that made the segment
        self._pending: deque[SegmentEvent] = deque()
        self._next_sequence = 0
        self._is_folded = False
        self._history: deque[SegmentEvent] = deque(maxlen=num_events)

    @property
    def history(self) -> tuple[SegmentEvent, ...]:
        """The last events that were read, refusals too, oldest first: with stream, and the time of torch's call."""
        with self._lock:
            return tuple(self._history)

    @property
    def is_folded(self) -> bool:
        """Whether all bytes are the arena's until ``unfold``."""
        return self._is_folded

    def poll(self) -> HeapState:
        """Bring the ledger up to date; returns the exact figures that it now agrees with, unless it is folded.

        Raises ``LedgerError`` when a strictly sealed ledger refuses the account's first bytes. The segment is there
        all the same; it stays in the arena's account and every later call tries again.
        """
        with self._lock:
            events, state = self._heap.drain()
            fresh = [event for event in events if event.sequence >= self._next_sequence]
            self._history.extend(fresh)
            if self._is_folded:
                return state
            if state.next_sequence == self._next_sequence + len(fresh):
                self._pending.extend(fresh)
            else:
                state = self._catch_up()
            self._next_sequence = state.next_sequence
            while self._pending:
                self._apply(self._pending[0])
                self._pending.popleft()
            return state

    def fold(self) -> None:
        """All bytes back to the arena's account, as if no segment lived: before the arena is put to sleep.

        The arena takes its pages out of its own account. Until ``unfold`` no ``poll`` moves anything.
        """
        with self._lock:
            self._is_folded = True
            self._pending.clear()
            for address in list(self._booked):
                self._give_back(self._booked.pop(address))
            self._next_sequence = -1  # so that the next poll begins with what is there

    def unfold(self) -> None:
        """The next ``poll`` splits what is there by then. Unfolding again does nothing."""
        with self._lock:
            self._is_folded = False

    def _catch_up(self) -> HeapState:
        """Events were lost: what is there now says what is to be booked; the heap's own figures kept the highs."""
        segments, state = self._heap.segments()
        live = {segment.address: segment for segment in segments}
        self._pending.clear()
        for address, booked in self._booked.items():
            if live.get(address) != booked:
                self._pending.append(replace(booked, change=SegmentChange.FREED))
        for address, segment in live.items():
            if self._booked.get(address) != segment:
                self._pending.append(segment)
        return state

    def _apply(self, event: SegmentEvent) -> None:
        if event.change is SegmentChange.ALLOCATED:
            self._take(event)
            self._booked[event.address] = event
        elif event.change is SegmentChange.FREED:
            self._give_back(self._booked[event.address])
            del self._booked[event.address]

    def _take(self, segment: SegmentEvent) -> None:
        """Out of the arena first: the line's high-water mark must not count a segment twice."""
        with self._ledger.at_once():  # one step for whoever takes a snapshot
            self._arena.add(0, 0)  # a split is not a release: the arena has as many allocations as before
            self._arena.sub(segment.asked_bytes, segment.num_bytes)
            try:
                self._segments.add(segment.asked_bytes, segment.num_bytes, stream=segment.stream)
            except LedgerError:
                self._arena.add(segment.asked_bytes, segment.num_bytes)
                self._arena.sub(0, 0)
                raise

    def _give_back(self, segment: SegmentEvent) -> None:
        with self._ledger.at_once():
            self._segments.sub(segment.asked_bytes, segment.num_bytes, stream=segment.stream)
            self._arena.add(segment.asked_bytes, segment.num_bytes)
            self._arena.sub(0, 0)
