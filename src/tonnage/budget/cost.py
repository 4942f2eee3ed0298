"""The price of a number of units (tokens, blocks): a piecewise-linear law and its exact integer inverse.

    bytes(T) = slope * T + intercept + sum_i rate_i * min(T, until_i)

The slope is what every unit costs (full attention), the intercept what is paid whatever their number (states, the
resident windows), and the bounded segments what only the first units cost (pages that windows hold while a prompt of
``until`` tokens is read).

The shape: a segment with a positive rate bends the law downwards, so with windows it is concave, not convex: units
get cheaper, never dearer. A negative rate bends it upwards (units that only begin to cost after ``until``). All that
the inverse needs is that it never decreases, and that is checked when a cost is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """``rate`` bytes for each of the first ``until`` units, nothing for those beyond."""

    rate: int
    until: int

    def at(self, units: int) -> int:
        return self.rate * min(units, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What units cost in bytes; see the head of this file. Raises ``ValueError`` if more units could cost less.

    bytes_per_request   the most that one request pins beyond the intercept, whatever the units; None: not known.
                        Policy: ``at`` does not count it, a split between two caches may weigh by it
    quota_per_request   the quota that an allocator insists on for each resident request; None: it insists on none.
                        Policy: bounds the share of a cache from below and above
    name                whose cost it is
    """

    slope: int
    intercept: int = 0
    bounded: tuple[Bounded, ...] = ()
    bytes_per_request: int | None = None
    quota_per_request: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.slope < 0 or self.intercept < 0 or any(segment.until < 0 for segment in self.bounded):
            raise ValueError(f"{self.name or 'a cost'}: slope, intercept and the ends of segments must be >= 0")
        if any(slope < 0 for _, _, slope in self._pieces()):
            raise ValueError(f"{self.name or 'a cost'} would fall with more units")

    def at(self, units: int) -> int:
        """Bytes of ``units`` >= 0 units."""
        return self.slope * units + self.intercept + sum(segment.at(units) for segment in self.bounded)

    def units_within(self, budget_bytes: int) -> int | float:
        """The most units that the budget pays for: an ``int``, or ``math.inf`` where no number is too many.

        0 where it does not even pay the intercept. Infinite where the law has become flat at a height that the
        budget pays, as with caches made of windows and states alone.
        """
        if budget_bytes < self.intercept:
            return 0
        for start, end, slope in self._pieces():
            left = budget_bytes - self.at(start)
            if slope and (end is None or left < slope * (end - start)):
                return start + left // slope
        return math.inf

    def scaled(self, factor: Fraction | int) -> Cost:
        """The same cost where each unit is ``factor`` times as dear, rounded up; what is fixed stays, and so does
        every other field, those added later included."""
        segments = tuple(replace(segment, rate=math.ceil(segment.rate * factor)) for segment in self.bounded)
        return replace(self, slope=math.ceil(self.slope * factor), bounded=segments)

    def __add__(self, other: Cost) -> Cost:
        """Both caches together: slopes and intercepts add, segments join, names are joined.

        The fields per request are dropped. They say how one cache would be treated, and two such wishes have no sum.
        """
        return Cost(
            slope=self.slope + other.slope,
            intercept=self.intercept + other.intercept,
            bounded=_joined(self.bounded + other.bounded),
            name=" + ".join(name for name in (self.name, other.name) if name),
        )

    def _pieces(self) -> Iterator[tuple[int, int | None, int]]:
        """(first unit, end, bytes a unit) of each straight piece in order; the last one has no end."""
        start, slope = 0, self.slope + sum(segment.rate for segment in self.bounded if segment.until)
        for segment in _joined(self.bounded):
            yield start, segment.until, slope
            start, slope = segment.until, slope - segment.rate
        yield start, None, slope


def _joined(segments: tuple[Bounded, ...]) -> tuple[Bounded, ...]:
    """One segment for every end, in ascending order; those that cost nothing disappear."""
    rates: dict[int, int] = {}
    for segment in segments:
        rates[segment.until] = rates.get(segment.until, 0) + segment.rate
    return tuple(Bounded(rate=rate, until=until) for until, rate in sorted(rates.items()) if rate and until)
