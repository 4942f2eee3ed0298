"""The affine cost and its exact inverse."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.cost import AffineCost
from tonnage.budget.search import largest, smallest

COSTS = st.builds(AffineCost, slope=st.integers(1, 10**6), intercept=st.integers(0, 10**9), name=st.just("target"))


@given(COSTS, st.integers(0, 10**14))
def test_the_inverse_is_exact(cost, budget):
    units = cost.units_within(budget)
    assert units == 0 or cost.at(units) <= budget
    assert cost.at(units + 1) > budget


@given(COSTS, st.integers(0, 10**9))
def test_round_trip(cost, units):
    assert cost.units_within(cost.at(units)) == units


def test_a_budget_below_the_intercept_buys_nothing():
    assert AffineCost(slope=3, intercept=100).units_within(99) == 0


def test_slope_zero_has_no_most():
    with pytest.raises(ValueError, match="state slots"):
        AffineCost(slope=0, intercept=5, name="state slots").units_within(100)


@pytest.mark.parametrize(("factor", "slope"), [(4, 32_768), (Fraction(1, 3), 2731), (1, 8192)])
def test_scaling_touches_the_slope_only(factor, slope):
    cost = AffineCost(slope=8192, intercept=77, name="draft")
    assert cost.scaled(factor) == AffineCost(slope=slope, intercept=77, name="draft")


def test_adding():
    total = AffineCost(slope=10, intercept=1, name="target") + AffineCost(slope=4, intercept=2, name="draft")
    assert total == AffineCost(slope=14, intercept=3, name="target + draft")


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-60, 60))
def test_search(low, high, edge):
    want = [n for n in range(low, high + 1) if n <= edge]
    assert largest(lambda n: n <= edge, low=low, high=high) == (want[-1] if want else None)
    want = [n for n in range(low, high + 1) if n >= edge]
    assert smallest(lambda n: n >= edge, low=low, high=high) == (want[0] if want else None)
