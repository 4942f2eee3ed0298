"""First-fit allocation inside segments: the pools of the host device, and its plain allocations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tonnage.device.driver import PoolStats
from tonnage.units import round_up

#: Bytes: every allocation starts and ends on such a border, as on CUDA.
ALIGNMENT = 512


@dataclass(slots=True)
class _Segment:
    """One range of mapped memory; ``free`` are its holes (start, size) in order, none touching the next."""

    start: int
    size: int
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.free == [(self.start, self.size)]

    def take(self, size: int) -> int | None:
        for index, (start, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        holes = sorted([*self.free, (start, size)])
        joined = holes[:1]
        for at, room in holes[1:]:
            last, length = joined[-1]
            if last + length == at:
                joined[-1] = (last, length + room)
            else:
                joined.append((at, room))
        self.free = joined


class HostPool:
    """Segments from ``grow(size) -> address``, given back through ``shrink(address, size)`` when they are empty.

    ``keep_bytes`` of empty segments stay reserved after a free; None keeps all until ``trim``.
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        keep_bytes: int | None,
        grow: Callable[[int], int],
        shrink: Callable[[int, int], None],
    ) -> None:
        self._page_bytes, self._keep_bytes, self._grow, self._shrink = page_bytes, keep_bytes, grow, shrink
        self._segments: list[_Segment] = []
        self.live: dict[int, tuple[_Segment, int]] = {}
        self._used = self._reserved = self._used_high = self._reserved_high = 0

    def alloc(self, size: int) -> int:
        """The address of ``size`` bytes; raises what ``grow`` raises and is then unchanged."""
        need = round_up(size, ALIGNMENT)
        for segment in self._segments:
            start = segment.take(need)
            if start is not None:
                return self._book(segment, start, need)
        segment = self._new_segment(round_up(need, self._page_bytes))
        start = segment.take(need)
        assert start is not None
        return self._book(segment, start, need)

    def free(self, addr: int) -> None:
        """``addr`` must be live."""
        segment, size = self.live.pop(addr)
        segment.give(addr, size)
        self._used -= size
        if self._keep_bytes is not None:
            self.trim(self._keep_bytes)

    def trim(self, keep_bytes: int) -> None:
        """Give empty segments back as long as ``keep_bytes`` stay reserved."""
        for segment in [segment for segment in self._segments if segment.is_empty]:
            if self._reserved - segment.size >= keep_bytes:
                self._shrink(segment.start, segment.size)
                self._segments.remove(segment)
                self._reserved -= segment.size

    def stats(self) -> PoolStats:
        return PoolStats(
            used_bytes=self._used,
            reserved_bytes=self._reserved,
            used_high_bytes=self._used_high,
            reserved_high_bytes=self._reserved_high,
        )

    def reset_high(self) -> None:
        """The highest marks start again from what stands now."""
        self._used_high, self._reserved_high = self._used, self._reserved

    def _new_segment(self, size: int) -> _Segment:
        start = self._grow(size)
        self._segments.append(_Segment(start, size, [(start, size)]))
        self._reserved += size
        self._reserved_high = max(self._reserved_high, self._reserved)
        return self._segments[-1]

    def _book(self, segment: _Segment, start: int, size: int) -> int:
        self.live[start] = (segment, size)
        self._used += size
        self._used_high = max(self._used_high, self._used)
        return start
