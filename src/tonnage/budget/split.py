"""Several linear demands on one budget: how many units it pays for, and what each demand then gets.

Every unit costs ``rate`` bytes, and each demand *i* adds ``w_i`` bytes a unit until it reaches its ceiling ``c_i``
(what the largest possible use needs, ``w_i * L_i``; more would never be used):

    cost(T) = rate * T + sum_i min(w_i * T, c_i)

Wanted is the largest whole T with cost(T) <= budget.

The cost is concave: in any state some demands have reached their ceiling, the rest still grow. Take any set S of
demands as being at their ceilings; the straight line

    line_S(T) = rate * T + sum_{i in S} c_i + sum_{i not in S} w_i * T

lies nowhere below the cost, and at every T one of these lines equals it: the one whose S holds exactly the demands
with c_i <= w_i * T. So the cost is the minimum of the lines, a T is affordable when it is so on *some* line, and the
answer is the largest T that any single line allows. Demands reach their ceilings in the order of c_i / w_i, hence the
prefixes of that order are all the sets that matter.

With one demand this is max(budget // (rate + w), (budget - w * L) // rate): the pool keeps what is left beside the
worst case, or its fair share, whichever is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """``rate_bytes`` a unit, never more than ``ceiling_bytes``; both >= 0."""

    name: str
    rate_bytes: int
    ceiling_bytes: int

    def at(self, units: int) -> int:
        return min(self.rate_bytes * units, self.ceiling_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """``units`` for everyone; ``granted`` bytes of each demand, in the order given; ``left`` bytes pay for no more."""

    units: int
    base_bytes: int
    granted: tuple[int, ...]
    left_bytes: int


def cost_of(units: int, *, rate_bytes: int, demands: Sequence[Demand]) -> int:
    """Bytes that ``units`` units cost with all demands served."""
    return rate_bytes * units + sum(demand.at(units) for demand in demands)


def split(budget_bytes: int, *, rate_bytes: int, demands: Sequence[Demand] = ()) -> Split:
    """The largest number of units the budget pays for: their cost is within it, one unit more would exceed it.

    Exact, whatever the number or the order of the demands. Raises ``ValueError`` for a negative budget, or a rate
    below 1 (then the units would be free once all ceilings are reached).
    """
    if budget_bytes < 0 or rate_bytes < 1:
        raise ValueError(f"budget {budget_bytes} must be >= 0 and rate {rate_bytes} >= 1")
    growing = sorted((d for d in demands if d.rate_bytes > 0), key=lambda d: Fraction(d.ceiling_bytes, d.rate_bytes))
    slope, ceilings = rate_bytes + sum(demand.rate_bytes for demand in growing), 0
    units = budget_bytes // slope
    for demand in growing:
        slope, ceilings = slope - demand.rate_bytes, ceilings + demand.ceiling_bytes
        units = max(units, (budget_bytes - ceilings) // slope)
    return Split(
        units=units,
        base_bytes=rate_bytes * units,
        granted=tuple(demand.at(units) for demand in demands),
        left_bytes=budget_bytes - cost_of(units, rate_bytes=rate_bytes, demands=demands),
    )
