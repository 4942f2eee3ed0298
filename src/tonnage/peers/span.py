"""A whole number with the lowest and the highest that it may be: what the rules of other engines add and subtract."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.peers.start import Count
from tonnage.terms import Quantity, Source


@dataclass(frozen=True, slots=True)
class Span:
    """``low <= best <= high``."""

    best: int
    low: int
    high: int

    @classmethod
    def exact(cls, number: int) -> Span:
        return cls(number, number, number)

    @classmethod
    def of(cls, quantity: Quantity) -> Span:
        return cls(quantity.bytes, quantity.low, quantity.high)

    @classmethod
    def around(cls, best: int, *others: int) -> Span:
        """From figures at the best, and at whatever corners of their inputs."""
        return cls(best, min(best, *others), max(best, *others))

    def __add__(self, other: Span) -> Span:
        return Span(self.best + other.best, self.low + other.low, self.high + other.high)

    def times(self, factor: int | Fraction) -> Span:
        """Each of the three times a factor of at least 0, rounded down."""
        return Span(int(self.best * factor), int(self.low * factor), int(self.high * factor))

    def at_least(self, floor: int) -> Span:
        return Span(max(self.best, floor), max(self.low, floor), max(self.high, floor))

    def quantity(self, source: Source, ref: str) -> Quantity:
        return Quantity(bytes=self.best, low=self.low, high=self.high, source=source, ref=ref)

    def count(self) -> Count:
        return Count(best=self.best, low=self.low, high=self.high)
