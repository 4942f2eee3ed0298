"""The price of a number of units (blocks, tokens): an affine law with an intercept, and its exact integer inverse.

No plan calls it yet, a block's price being linear: it serves the reference vectors, and pools that come later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCost:
    """``slope`` bytes for every unit, ``intercept`` bytes whatever the number; both >= 0.

    ``name`` says whose cost it is; scaling keeps it, adding joins the names.
    """

    slope: int
    intercept: int = 0
    name: str = ""

    def at(self, units: int) -> int:
        """Bytes of ``units`` units."""
        return self.slope * units + self.intercept

    def units_within(self, budget: int) -> int:
        """The most units that ``budget`` bytes pay for, 0 if it does not even pay the intercept.

        Raises ``ValueError`` at slope 0: then every number of units costs the same, and there is no most.
        """
        if self.slope <= 0:
            raise ValueError(f"{self.name or 'this cost'} does not grow with the units, so no budget bounds them")
        return max(0, (budget - self.intercept) // self.slope)

    def scaled(self, factor: Fraction | int) -> AffineCost:
        """The same cost for units ``factor`` times as large, rounded up. Only the slope grows."""
        return replace(self, slope=ceil(self.slope * factor))

    def __add__(self, other: AffineCost) -> AffineCost:
        names = " + ".join(name for name in (self.name, other.name) if name)
        return AffineCost(slope=self.slope + other.slope, intercept=self.intercept + other.intercept, name=names)
