"""A list fitted to one load that is no worse than a given list on others: a load never stays where it was seen.

A set fitted tightly to a peak pays several times the padding of an even one once the peak moves. So the load is
blended with the same load drifted up and down and with the prior; wherever the best list for the blend is still worse
than the list to compare with, that scenario weighs twice as much in the next blend, and elsewhere less. The best list
found that is nowhere worse is the answer. There is always one: whatever holds the very sizes of the list to compare
with is nowhere worse than it, and where step times rise in tiles some of those sizes are of no use and leave room.

How far the load may drift is a choice. A list that is nowhere worse than an even one is as dense as that one
everywhere, so the wider the drift the less is gained at home: the widest is taken that still gains half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from operator import mul

from tonnage.graphs.histogram import Histogram, prior
from tonnage.graphs.optimise import Choice, Rules, frontier
from tonnage.graphs.step_times import StepTimes, batch_costs, total_ns, unpadded_ns

#: How far loads are taken to drift, both ways, in octaves of the batch size; tried from the first.
REACHES = (3, 2, 1)
#: Scenarios to an octave: each spreads the load over the factors to the next, so that no size between is left out.
STEPS = 8
#: Padding that counts as none, as a share of the steps' time: an even list may pad nothing at all where its sizes fall
#: on the tiles of a kernel, and to be exactly as good there would take those very sizes.
NEGLIGIBLE = Fraction(1, 1000)
#: Blends that are tried, the weight of the load in all of them, and that of each scenario in the first.
ROUNDS, HOME_WEIGHT, FIRST_WEIGHT = 16, 256, 8
#: What each load counts before it is weighed.
_PARTS = 2**20


@dataclass(frozen=True, slots=True)
class Guarded:
    """The list, and how far the load may drift, both ways, before it may be worse than the one beside it."""

    choice: Choice
    octaves: int


def drifted(home: Histogram, most: int, *, octaves: int) -> tuple[Histogram, ...]:
    """The load from ``2 ** -octaves`` to ``2 ** octaves`` times its sizes, none above ``most``, and the prior."""
    steps = range(-STEPS * octaves, STEPS * octaves + 1)
    factors = [Fraction(2 ** (step / STEPS)).limit_denominator(1000) for step in steps]
    return (*(home.spread(low, high, most=most) for low, high in pairwise(factors)), prior(most))


def guarded(home: Histogram, times: StepTimes, rules: Rules, *, beside: Sequence[int]) -> Guarded:
    """The best list for ``home``, of as many sizes as ``beside`` has, that costs no more than ``beside`` on ``home``
    and, where its padding is not ``NEGLIGIBLE``, on ``home`` drifted as far as leaves at most half of the padding of
    ``beside``. Where no blend finds one it is a list that holds the sizes of ``beside``; that need not keep ``rules``.

    Raises ``InvalidSetting`` where the rules take more graphs than ``beside`` has.
    """
    half = Fraction(total_ns(home, beside, times) + unpadded_ns(home, times), 2)
    start = _dominating(home, times, rules, beside)
    best = Guarded(start, REACHES[0])
    for octaves in REACHES:
        scenarios = drifted(home, rules.max_batch_size, octaves=octaves)
        choice = _held(home, times, rules, beside, scenarios, start)
        if choice.total_ns < best.choice.total_ns:
            best = Guarded(choice, octaves)
        if choice.total_ns <= half:
            break
    return best


def _held(
    home: Histogram,
    times: StepTimes,
    rules: Rules,
    beside: Sequence[int],
    scenarios: Sequence[Histogram],
    best: Choice,
) -> Choice:
    """The best list that is nowhere worse; ``best`` is one that is known."""
    loads = (home, *scenarios)
    bounds = _bounds(loads, times, beside)
    columns = _columns([load.normed(_PARTS) for load in loads])
    weights = [HOME_WEIGHT, *(FIRST_WEIGHT for _ in scenarios)]
    for _ in range(ROUNDS):
        mixed = Histogram(tuple(sum(map(mul, weights, column)) for column in columns))
        sizes = frontier(mixed, times, rules, most_graphs=len(beside)).of(len(beside)).sizes
        costs = _totals(loads, sizes, times)
        is_worse = [cost > bound for cost, bound in zip(costs, bounds, strict=True)]
        if not any(is_worse) and costs[0] < best.total_ns:
            best = Choice(sizes, costs[0])
        weights[1:] = [
            2 * weight if worse else max(1, weight * 3 // 4)
            for weight, worse in zip(weights[1:], is_worse[1:], strict=True)
        ]
    return best


def _bounds(loads: Sequence[Histogram], times: StepTimes, beside: Sequence[int]) -> list[Fraction]:
    """What each load may cost; the first, which the list is for, has no allowance."""
    allowed = [Fraction(0), *((1 + NEGLIGIBLE) * unpadded_ns(load, times) for load in loads[1:])]
    costs = _totals(loads, beside, times)
    return [max(Fraction(cost), least) for cost, least in zip(costs, allowed, strict=True)]


def _totals(loads: Sequence[Histogram], sizes: Sequence[int], times: StepTimes) -> list[int]:
    costs = batch_costs(sizes, times)
    return [sum(map(mul, load.steps, costs)) for load in loads]


def _columns(parts: Sequence[Histogram]) -> list[tuple[int, ...]]:
    """[b] what each load counts of ``b``."""
    most = max(len(part.steps) for part in parts)
    return list(zip(*((*part.steps, *[0] * (most - len(part.steps))) for part in parts), strict=True))


def _dominating(home: Histogram, times: StepTimes, rules: Rules, beside: Sequence[int]) -> Choice:
    """Every size of ``beside`` at its edge, and the rest of the graphs at their best for ``home``."""
    edges = times.edges()
    kept = {next(edge for edge in edges if edge >= size) for size in beside}
    plain = Choice(tuple(beside), total_ns(home, beside, times))
    if len(kept | set(rules.always)) > len(beside):
        return plain
    held = replace(rules, always=tuple(kept | set(rules.always)), most_padding=None)
    return min(frontier(home, times, held, most_graphs=len(beside)).of(len(beside)), plain, key=lambda c: c.total_ns)
