"""The best ``n`` batch sizes for a load: exact, by dynamic programming (spec/runtime.md 6.3).

    J(S) = sum over b of h(b) t(next_S(b))

with ``h`` the steps seen of each size and ``t`` the running minimum of the graphs' times; what a step takes beside its
graph is the same for every list, and is added at the end. Sizes are taken in ascending order; a graph of ``j`` after
one of ``i`` serves the steps of ``i + 1 .. j`` at ``t(j) (H(j) - H(i))``, ``H`` being the running sum of ``h``. ``t``
never falls, so these costs satisfy the quadrangle inequality: the best left neighbour of ``j`` never moves left as
``j`` grows, each layer is divide and conquer, all of them O(n K log K), and ``J*(n)`` is convex. A limit on padding and
sizes that must be there forbid segments that reach too far; that keeps the inequality.
Whole numbers throughout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from tonnage.errors import InvalidSetting
from tonnage.graphs.histogram import Histogram
from tonnage.graphs.step_times import StepTimes, beside_total_ns
from tonnage.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a list of sizes must keep, whatever the load.

    always         sizes that are in it, beside ``max_batch_size``: where the load sits when memory binds
    most_padding   padding of any batch as a share of it, above ``padding_from`` sequences; None: no limit. Two sizes
                   with no rise of the step time between them may always stand side by side
    candidates_of  above ``padding_from`` only multiples of this are tried: 1 is exact, 8 an order faster
    """

    max_batch_size: int
    always: tuple[int, ...] = ()
    most_padding: Fraction | None = None
    padding_from: int = 128
    candidates_of: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A list of sizes, ascending, and the nanoseconds of all steps with it."""

    sizes: tuple[int, ...]
    total_ns: int

    @property
    def num_graphs(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The best list of every length from ``least_graphs`` on: shorter ones would break a rule."""

    choices: tuple[Choice, ...]

    @property
    def least_graphs(self) -> int:
        return self.choices[0].num_graphs

    def of(self, num_graphs: int) -> Choice:
        """The best list of at most that many. Raises ``InvalidSetting`` where no list of so few keeps the rules."""
        if num_graphs < self.least_graphs:
            raise InvalidSetting(
                "num_graphs",
                num_graphs,
                f"the sizes that must be there and the limit on padding take {self.least_graphs}",
                remedy=f"allow {self.least_graphs} graphs, or more padding",
            )
        return self.choices[min(num_graphs, self.choices[-1].num_graphs) - self.least_graphs]

    def under(self, price_ns: Fraction) -> Choice:
        """The least ``J + price_ns * n``: since ``J*`` is convex, the last graph that saves more than it costs."""
        for here, after in pairwise(self.choices):
            if here.total_ns - after.total_ns <= price_ns:
                return here
        return self.choices[-1]


def frontier(histogram: Histogram, times: StepTimes, rules: Rules, *, most_graphs: int) -> Frontier:
    """The best lists of up to ``most_graphs`` sizes; at least one, however many the rules take.

    Raises ``InvalidSetting`` for a batch of ``histogram`` that is above ``rules.max_batch_size``.
    """
    _check(histogram, times, rules)
    sizes = (0, *_candidates(times, rules))
    below = histogram.up_to(rules.max_batch_size)
    steps = [below[size] for size in sizes]
    costs = [0, *(times.least(size) for size in sizes[1:])]
    lows = _lows(sizes, times, rules)
    layer, parents, choices = _first(steps, costs, lows), [[0] * len(sizes)], []
    beside = beside_total_ns(histogram, times)
    while True:
        if len(layer) == len(sizes):
            choices.append(Choice(_walk(sizes, parents), layer[-1] + beside))
        num = len(parents) + 1
        if num == len(sizes) or (choices and num > most_graphs):
            return Frontier(tuple(choices))
        layer, chosen = _next(layer, num, steps, costs, lows)
        parents.append(chosen)


def _check(histogram: Histogram, times: StepTimes, rules: Rules) -> None:
    assert times.max_batch_size == rules.max_batch_size
    assert all(1 <= size <= rules.max_batch_size for size in rules.always)
    if histogram.largest > rules.max_batch_size:
        raise InvalidSetting(
            "max_batch_size",
            rules.max_batch_size,
            f"the load has steps of {histogram.largest} sequences",
            remedy=f"plan for {histogram.largest}, or measure with the limit that will be served with",
        )


def _candidates(times: StepTimes, rules: Rules) -> tuple[int, ...]:
    """Edges of the step times, thinned where that is allowed, and what must be there."""
    thin = {min(rules.max_batch_size, round_up(e, _grid(e, rules))) for e in times.edges()}
    return tuple(sorted({times.fastest(size) for size in thin} | _always(times, rules)))


def _grid(size: int, rules: Rules) -> int:
    return rules.candidates_of if size > rules.padding_from else 1


def _always(times: StepTimes, rules: Rules) -> set[int]:
    """A size whose next edge is faster is served by that: a graph of its own would only slow it down."""
    return {times.fastest(size) for size in (*rules.always, rules.max_batch_size)}


def _lows(sizes: Sequence[int], times: StepTimes, rules: Rules) -> list[int]:
    """For each candidate the least place of its left neighbour; never falls from one candidate to the next."""
    fixed = sorted(bisect_left(sizes, size) for size in _always(times, rules))
    lows = [0]
    for place, size in enumerate(sizes[1:], 1):
        low = fixed[bisect_left(fixed, place) - 1] if place > fixed[0] else 0
        if rules.most_padding is not None:
            # The least batch that may be padded to this size, and so the least size that its neighbour may have.
            padded = -(-size * rules.most_padding.denominator // _whole(rules.most_padding))
            if padded - 1 > rules.padding_from:
                low = max(low, bisect_left(sizes, padded - 1))
        lows.append(min(low, place - 1))
    return lows


def _whole(share: Fraction) -> int:
    """The numerator of ``1 + share``."""
    return share.numerator + share.denominator


def _first(steps: Sequence[int], costs: Sequence[int], lows: Sequence[int]) -> list[int]:
    """One graph for everything up to a candidate, as far as one may reach; place 0 stands for no step at all."""
    reach = bisect_right(lows, 0) - 1
    return [0, *(costs[place] * steps[place] for place in range(1, reach + 1))]


def _next(
    layer: list[int], num: int, steps: Sequence[int], costs: Sequence[int], lows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The layer of exactly ``num`` graphs from that of one fewer, as far as it reaches, and each place's neighbour.

    Places below ``num`` cannot have so many graphs and are left at 0: no layer looks at them.
    """
    last = bisect_right(lows, len(layer) - 1) - 1
    made, chosen = [0] * (last + 1), [0] * (last + 1)
    spans = [(num, last, num - 1, len(layer) - 1)]
    while spans:
        first, end, low, high = spans.pop()
        if first > end:
            continue
        place = (first + end) // 2
        start, cost = max(low, lows[place]), costs[place]
        stop = min(high, place - 1) + 1
        # cost * (steps[place] - steps[left]) + layer[left], without what is the same for all
        tried = [before - cost * seen for before, seen in zip(layer[start:stop], steps[start:stop], strict=True)]
        best = min(tried)
        left = start + tried.index(best)
        made[place], chosen[place] = best + cost * steps[place], left
        spans += ((first, place - 1, low, left), (place + 1, end, left, high))
    return made, chosen


def _walk(sizes: Sequence[int], parents: Sequence[Sequence[int]]) -> tuple[int, ...]:
    place, found = len(sizes) - 1, []
    for chosen in reversed(parents):
        found.append(sizes[place])
        place = chosen[place]
    return tuple(reversed(found))
