"""The shim seen from Python: heaps that carve segments out of ranges, and what happened in them.

Calls release the GIL and hold the heap's lock for microseconds, so they may be made on any thread while torch
allocates on another.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_int32, c_uint64
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tonnage.errors import BufferInUse, ResourceError

_OK, _IN_USE = 0, -2


class SegmentChange(IntEnum):
    """What an event of a heap is. UNKNOWN_FREED: an address that it never gave out, which is a defect somewhere."""

    ALLOCATED = 1
    FREED = 2
    REFUSED = 3
    UNKNOWN_FREED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvent:
    """One call of torch's allocator, numbered from 0 in its heap.

    ``num_bytes`` is what the segment takes, ``asked_bytes`` what torch asked for; ``at_ns`` compares with
    ``time.monotonic_ns``.
    """

    sequence: int
    at_ns: int
    change: SegmentChange
    address: int
    num_bytes: int
    asked_bytes: int
    stream: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapState:
    """Exact figures of one heap at one moment, events lost or not. Bytes and counts.

    limit_bytes         how far from its base the heap may place segments
    top_bytes           end of its last segment: the limit cannot go lower now
    largest_hole_bytes  the largest segment that would still fit
    num_lost            events that were overwritten before they were read
    """

    next_sequence: int
    limit_bytes: int
    live_bytes: int
    high_bytes: int
    top_bytes: int
    largest_hole_bytes: int
    num_segments: int
    num_allocated: int
    num_freed: int
    num_refused: int
    num_unknown_frees: int
    num_lost: int


class _Event(Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("sequence", "at_ns", "address", "num_bytes", "asked_bytes", "stream")),
        ("kind", c_int32),
        ("device", c_int32),
    )

    def told(self) -> SegmentEvent:
        return SegmentEvent(
            sequence=self.sequence,
            at_ns=self.at_ns,
            change=SegmentChange(self.kind),
            address=self.address,
            num_bytes=self.num_bytes,
            asked_bytes=self.asked_bytes,
            stream=self.stream,
            device=self.device,
        )


class _State(Structure):
    _fields_ = tuple((name, c_uint64) for name in HeapState.__dataclass_fields__)

    def told(self) -> HeapState:
        return HeapState(**{name: getattr(self, name) for name in HeapState.__dataclass_fields__})


class Shim:
    """The library at ``path``, loaded. Loading it again gives the same heaps: they belong to the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library: Any = ctypes.CDLL(str(path))
        self.num_heaps: int = self.library.tonnage_num_heaps()
        self.library.tonnage_open.argtypes = [c_int, c_int, c_uint64, c_uint64, c_uint64]
        self.library.tonnage_set_limit.argtypes = [c_int, c_uint64]
        self.library.tonnage_drain.argtypes = [c_int, POINTER(_Event), c_int, POINTER(_State)]
        self.library.tonnage_segments.argtypes = self.library.tonnage_drain.argtypes

    def __repr__(self) -> str:
        return f"<Shim {self.path}>"

    def open_heap(self, *, address: int, limit_bytes: int, align_bytes: int, device: int) -> ShimHeap:
        """The first heap that nobody has open, over ``limit_bytes`` from ``address``; all multiples of the alignment.

        It serves torch's device number ``device`` only. Raises ``ValueError`` for a range that it cannot use, and
        ``ResourceError`` when all heaps are open.
        """
        for number in range(self.num_heaps):
            result = self.library.tonnage_open(number, device, address, limit_bytes, align_bytes)
            if result == _OK:
                return ShimHeap(self, number)
            if result != _IN_USE:
                raise ValueError(
                    f"no heap over {limit_bytes:,} bytes at {address:#x}: "
                    f"both must be multiples of {align_bytes:,}, and the address not 0"
                )
        raise ResourceError(f"all {self.num_heaps} heaps of the shim are open: close one that is no longer used")


class ShimHeap:
    """One open heap. ``alloc_name`` and ``free_name`` are the functions that torch is to call for it."""

    def __init__(self, shim: Shim, number: int) -> None:
        self.shim, self.number = shim, number
        self.alloc_name, self.free_name = f"tonnage_alloc_{number}", f"tonnage_free_{number}"
        self._is_open = True
        self._room = (_Event * shim.library.tonnage_num_events())()

    def __repr__(self) -> str:
        return f"<ShimHeap {self.number}>"

    def state(self) -> HeapState:
        """The figures now; unread events stay unread."""
        state = _State()
        self._require(self.shim.library.tonnage_drain(self.number, self._room, 0, state))
        return state.told()

    def drain(self) -> tuple[list[SegmentEvent], HeapState]:
        """All events since the last call, oldest first, and the state that they lead to. Not for two threads at once.

        Their numbers have a gap where events were lost; ``segments`` then says what is there.
        """
        events: list[SegmentEvent] = []
        state = _State()
        while True:
            num = self.shim.library.tonnage_drain(self.number, self._room, len(self._room), state)
            self._require(num)
            events += [event.told() for event in self._room[:num]]
            if num < len(self._room):
                return events, state.told()

    def segments(self) -> tuple[list[SegmentEvent], HeapState]:
        """The live segments by address, as the events that made them, and the state they belong to."""
        state = _State()
        room = (_Event * self.shim.library.tonnage_max_segments())()
        num = self.shim.library.tonnage_segments(self.number, room, len(room), state)
        self._require(num)
        return [event.told() for event in room[:num]], state.told()

    def set_limit(self, limit_bytes: int) -> None:
        """How far from its base the heap may place segments, in whole alignments; ``ValueError`` for another number.

        Raises ``BufferInUse``, changing nothing, when a live segment lies beyond.
        """
        result = self.shim.library.tonnage_set_limit(self.number, limit_bytes)
        if result == _IN_USE:
            raise BufferInUse(f"{self!r} cannot end at {limit_bytes:,} bytes: its last segment ends later")
        if result != _OK:
            raise ValueError(f"{self!r} cannot end at {limit_bytes:,} bytes: not in whole segments, or it is closed")

    def close(self) -> None:
        """Give the heap's number back; closing again does nothing. ``BufferInUse`` while segments are alive."""
        if self._is_open and self.shim.library.tonnage_close(self.number) == _IN_USE:
            raise BufferInUse(f"{self!r} cannot be closed: {self.state().num_segments:,} segments are alive")
        self._is_open = False  # from here on the number may be somebody else's

    def _require(self, result: int) -> None:
        if result < 0:
            raise ResourceError(f"{self!r} is not a heap of {self.shim!r}")
