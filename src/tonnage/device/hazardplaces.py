"""What lies where, as ``HazardDriver`` sees it: reservations, mappings, allocations, and what was freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonnage.device.hazardclock import Span
from tonnage.device.ranges import Range, RangeBook


@dataclass(slots=True)
class Mapped:
    """A mapping of ``handle``; ``accessible`` once access was set."""

    handle: int
    accessible: bool = False


@dataclass(frozen=True, slots=True)
class Allocated:
    """``size`` bytes asked for of ``padded`` that lie there, from the call ``call``."""

    call: str
    size: int
    padded: int


class HazardPlaces:
    """``still_ours(addr, size)`` says whether freed memory is still the device's and not handed to somebody else."""

    def __init__(self, still_ours: Callable[[int, int], bool]) -> None:
        self._still_ours = still_ours
        self.reserved: RangeBook[None] = RangeBook()
        self.mapped: RangeBook[Mapped] = RangeBook()
        self.allocated: RangeBook[Allocated] = RangeBook()
        self.adopted: RangeBook[None] = RangeBook()
        self._freed: RangeBook[str] = RangeBook()

    def allocate(self, addr: int, one: Allocated) -> None:
        self._forget_freed(addr, one.padded)
        self.allocated.add(addr, one.padded, one)

    def free(self, addr: int, by: str, *, remember: bool) -> None:
        """``remember``: touching it from now on is an error, until it is allocated again."""
        gone = self.allocated.remove(addr)
        if remember:
            self._forget_freed(addr, gone.size)
            self._freed.add(addr, gone.size, by)

    def reserve(self, addr: int, size: int) -> None:
        self._forget_freed(addr, size)
        self.reserved.add(addr, size, None)

    def reservation_of(self, addr: int) -> Range[None] | None:
        found = self.reserved.overlapping(addr, 1)
        return found[0] if found else None

    def fault(self, span: Span, *, nobodys_is_fine: bool) -> str | None:
        """Why a device may not touch these bytes; None when it may. Memory that nobody told us of is not judged when
        ``nobodys_is_fine``: the driver that does the copy knows it.
        """
        addr, size = span
        if size <= 0 or self._is_live(addr, size):
            return None
        told = f"{size:,} bytes at {addr:#x} "
        for one in self.allocated.overlapping(addr, size):
            return told + f"pass the {one.value.size:,} bytes that {one.value.call} gave at {one.start:#x}"
        for gone in self._freed.overlapping(addr, size):
            if self._still_ours(gone.start, gone.size):
                return told + f"were freed by {gone.value}"
            self._freed.remove(gone.start)
        if self.reserved.overlapping(addr, size):
            return told + "are not all mapped with access"
        return None if nobodys_is_fine else told + "are nobody's memory: adopt what others allocated"

    def _is_live(self, addr: int, size: int) -> bool:
        mapped = self.mapped.covering(addr, size)
        if mapped is not None:
            return all(one.value.accessible for one in mapped)
        found = self.allocated.covering(addr, size)
        if found is not None and len(found) == 1 and addr + size <= found[0].start + found[0].value.size:
            return True
        return self.adopted.covering(addr, size) is not None

    def _forget_freed(self, addr: int, size: int) -> None:
        for one in self._freed.overlapping(addr, size):
            self._freed.remove(one.start)
            if one.start < addr:
                self._freed.add(one.start, addr - one.start, one.value)
            if one.end > addr + size:
                self._freed.add(addr + size, one.end - addr - size, one.value)
