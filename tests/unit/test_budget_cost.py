"""The piecewise-linear cost, its algebra and its exact inverse."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, make_dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.cost import Bounded, Cost
from tonnage.budget.search import largest, smallest
from tonnage.budget.split import Demand, split

SEGMENTS = st.lists(st.builds(Bounded, rate=st.integers(0, 10**4), until=st.integers(0, 300)), max_size=4).map(tuple)
COSTS = st.builds(
    Cost,
    slope=st.integers(0, 10**4),
    intercept=st.integers(0, 10**6),
    bounded=SEGMENTS,
    bytes_per_request=st.none() | st.integers(0, 100),
    quota_per_request=st.none() | st.integers(0, 100),
    name=st.sampled_from(["", "target", "draft"]),
)
SMALL = st.integers(0, 6)


@given(COSTS, st.integers(0, 10**8))
def test_the_inverse_is_exact(cost, budget):
    units = cost.units_within(budget)
    if units == math.inf:
        assert cost.at(10**9) <= budget
        assert cost.slope == 0
        return
    assert isinstance(units, int)
    assert units == 0 or cost.at(units) <= budget
    assert cost.at(units + 1) > budget


@given(COSTS.filter(lambda cost: cost.slope > 0), st.integers(0, 10**6))
def test_round_trip(cost, units):
    assert cost.units_within(cost.at(units)) == units


@given(SMALL, SMALL, st.lists(st.tuples(st.integers(-3, 6), st.integers(0, 9)), max_size=3), st.integers(0, 120))
def test_the_inverse_equals_counting(slope, intercept, pairs, budget):
    """Convex kinks too: a segment of negative rate makes units dearer once it has ended."""
    segments = tuple(Bounded(rate=rate, until=until) for rate, until in pairs)
    price = [slope * t + intercept + sum(r * min(t, u) for r, u in pairs) for t in range(200)]
    if any(later < earlier for earlier, later in itertools.pairwise(price)):
        with pytest.raises(ValueError, match="fall"):
            Cost(slope=slope, intercept=intercept, bounded=segments)
        return
    cost = Cost(slope=slope, intercept=intercept, bounded=segments)
    assert [cost.at(t) for t in range(200)] == price
    most = max((t for t in range(200) if price[t] <= budget), default=0)
    assert cost.units_within(budget) == (math.inf if most == 199 else most)


@given(COSTS.filter(lambda cost: cost.slope > 0), st.integers(0, 10**8))
def test_a_segment_is_a_demand_with_a_ceiling(cost, left):
    """The same law as that of the split, which finds its answer from lines instead of pieces."""
    demands = [Demand(name="", rate_bytes=s.rate, ceiling_bytes=s.rate * s.until) for s in cost.bounded]
    assert cost.units_within(cost.intercept + left) == split(left, rate_bytes=cost.slope, demands=demands).units


def test_a_budget_below_the_intercept_buys_nothing():
    assert Cost(slope=3, intercept=100).units_within(99) == 0
    assert Cost(slope=0, intercept=100).units_within(99) == 0


def test_where_nothing_grows_there_is_no_most():
    states = Cost(slope=0, intercept=5)
    assert states.units_within(5) == math.inf
    windows = Cost(slope=0, bounded=(Bounded(rate=10, until=8),))
    assert (windows.units_within(79), windows.units_within(80)) == (7, math.inf)


@pytest.mark.parametrize("wrong", [{"slope": -1}, {"slope": 1, "intercept": -1}, {"slope": 1, "bounded": (-1, 1)}])
def test_negative_costs_are_defects(wrong):
    if "bounded" in wrong:
        until, rate = wrong["bounded"]
        wrong = {**wrong, "bounded": (Bounded(rate=rate, until=until),)}
    with pytest.raises(ValueError):
        Cost(**wrong)


@given(COSTS, COSTS, st.integers(0, 1000))
def test_adding_adds_bytes(one, other, units):
    both = one + other
    assert both.at(units) == one.at(units) + other.at(units)
    assert (both.bytes_per_request, both.quota_per_request) == (None, None)


@given(COSTS, COSTS, COSTS)
def test_the_order_of_a_sum_does_not_matter(a, b, c):
    def of(cost):
        return cost.slope, cost.intercept, cost.bounded

    assert of((a + b) + c) == of(a + (b + c))
    assert of(a + b) == of(b + a)


def test_adding_joins_names_and_segments():
    total = Cost(slope=10, intercept=1, name="target", bounded=(Bounded(rate=2, until=7),)) + Cost(
        slope=4, intercept=2, name="draft", bounded=(Bounded(rate=3, until=7), Bounded(rate=1, until=2))
    )
    segments = (Bounded(rate=1, until=2), Bounded(rate=5, until=7))
    assert total == Cost(slope=14, intercept=3, name="target + draft", bounded=segments)


@pytest.mark.parametrize(("factor", "slope"), [(4, 32_768), (Fraction(1, 3), 2731), (1, 8192)])
def test_scaling_touches_slopes_only(factor, slope):
    cost = Cost(slope=8192, intercept=77, name="draft", bounded=(Bounded(rate=3, until=9),), quota_per_request=5)
    scaled = cost.scaled(factor)
    assert scaled.slope == slope
    assert scaled.bounded == (Bounded(rate=math.ceil(3 * factor), until=9),)
    grows = {"slope", "bounded"}
    for field in fields(Cost):
        if field.name not in grows:
            assert getattr(scaled, field.name) == getattr(cost, field.name), field.name


def test_a_field_added_later_survives_scaling():
    longer = make_dataclass("Longer", [("added_later", int, 0)], bases=(Cost,), frozen=True, kw_only=True, slots=True)(
        slope=3, intercept=1, bytes_per_request=2, added_later=9
    )
    scaled = longer.scaled(2)
    assert (scaled.slope, scaled.intercept, scaled.bytes_per_request, scaled.added_later) == (6, 1, 2, 9)


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-60, 60))
def test_search(low, high, edge):
    want = [n for n in range(low, high + 1) if n <= edge]
    assert largest(lambda n: n <= edge, low=low, high=high) == (want[-1] if want else None)
    want = [n for n in range(low, high + 1) if n >= edge]
    assert smallest(lambda n: n >= edge, low=low, high=high) == (want[0] if want else None)
