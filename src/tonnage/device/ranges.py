"""A book of address ranges that do not overlap, each with a value."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """``[start, start + size)``, in bytes."""

    start: int
    size: int
    value: T

    @property
    def end(self) -> int:
        return self.start + self.size


class RangeBook(Generic[T]):
    """Ranges by their start. Lookups are logarithmic; adding and removing move a list of ints."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, Range[T]] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Range[T]]:
        return iter([self._ranges[start] for start in self._starts])

    def add(self, start: int, size: int, value: T) -> Range[T]:
        """Book a range; the caller has checked that it overlaps none."""
        made = self._ranges[start] = Range(start, size, value)  # first: what is in ``_starts`` is looked up here
        insort(self._starts, start)
        return made

    def remove(self, start: int) -> Range[T]:
        self._starts.pop(bisect_right(self._starts, start) - 1)
        return self._ranges.pop(start)

    def get(self, start: int) -> Range[T] | None:
        """The range that starts exactly there."""
        return self._ranges.get(start)

    def overlapping(self, start: int, size: int) -> list[Range[T]]:
        """All ranges that share a byte with ``[start, start + size)``, in order."""
        index = max(0, bisect_right(self._starts, start) - 1)
        found = []
        while index < len(self._starts) and self._starts[index] < start + size:
            one = self._ranges[self._starts[index]]
            if one.end > start:
                found.append(one)
            index += 1
        return found

    def covering(self, start: int, size: int) -> list[Range[T]] | None:
        """The ranges that hold every byte of ``[start, start + size)``, or None where one is missing."""
        found = self.overlapping(start, size)
        reached = start
        for one in found:
            if one.start > reached:
                return None
            reached = one.end
        return found if reached >= start + size else None

    def exactly(self, start: int, size: int) -> list[Range[T]] | None:
        """The ranges side by side that make up ``[start, start + size)`` and nothing beyond it, or None."""
        found = self.covering(start, size)
        return found if found and found[0].start == start and found[-1].end == start + size else None
