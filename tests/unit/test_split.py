"""The split of one budget over any number of linear demands: exact, maximal, independent of order."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.split import Demand, cost_of, split

SMALL = st.lists(
    st.builds(Demand, name=st.just("d"), rate_bytes=st.integers(0, 9), ceiling_bytes=st.integers(0, 60)), max_size=5
)
LARGE = st.lists(
    st.builds(Demand, name=st.just("d"), rate_bytes=st.integers(0, 10**7), ceiling_bytes=st.integers(0, 10**13)),
    max_size=8,
)


@given(st.integers(0, 300), st.integers(1, 9), SMALL)
def test_equals_counting_up_one_unit_at_a_time(budget, rate, demands):
    units = 0
    while cost_of(units + 1, rate_bytes=rate, demands=demands) <= budget:
        units += 1
    assert split(budget, rate_bytes=rate, demands=demands).units == units


@given(st.integers(0, 10**15), st.integers(1, 10**7), LARGE)
def test_within_the_budget_and_one_more_is_not(budget, rate, demands):
    found = split(budget, rate_bytes=rate, demands=demands)
    assert cost_of(found.units, rate_bytes=rate, demands=demands) <= budget
    assert cost_of(found.units + 1, rate_bytes=rate, demands=demands) > budget
    assert found.base_bytes + sum(found.granted) + found.left_bytes == budget
    assert found.left_bytes >= 0
    assert found.granted == tuple(demand.at(found.units) for demand in demands)


@given(st.integers(0, 10**15), st.integers(1, 10**7), LARGE, st.randoms(use_true_random=False))
def test_the_order_does_not_matter(budget, rate, demands, random):
    shuffled = list(demands)
    random.shuffle(shuffled)
    first = split(budget, rate_bytes=rate, demands=demands)
    second = split(budget, rate_bytes=rate, demands=shuffled)
    assert (first.units, first.left_bytes) == (second.units, second.left_bytes)
    assert sorted(first.granted) == sorted(second.granted)


@given(st.integers(0, 10**15), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**9))
def test_one_demand_is_the_reference_reserve(budget, k, w, longest):
    """reserve = min(w L, B w / (k + w)), up to the bytes that whole units leave."""
    found = split(budget, rate_bytes=k, demands=[Demand(name="workspace", rate_bytes=w, ceiling_bytes=w * longest)])
    reserve = min(Fraction(w * longest), Fraction(budget * w, k + w))
    assert reserve - w < found.granted[0] <= reserve
    assert found.units == max(budget // (k + w), (budget - w * longest) // k)


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.integers(1, 10**6), LARGE)
def test_more_money_never_buys_less(budget, more, rate, demands):
    assert (
        split(budget + more, rate_bytes=rate, demands=demands).units
        >= split(budget, rate_bytes=rate, demands=demands).units
    )


@given(st.integers(0, 10**12), st.integers(1, 10**6), LARGE, st.integers(1, 10**6), st.integers(0, 10**12))
def test_another_demand_never_buys_more(budget, rate, demands, w, ceiling):
    extra = Demand(name="extra", rate_bytes=w, ceiling_bytes=ceiling)
    with_it = split(budget, rate_bytes=rate, demands=[*demands, extra])
    assert with_it.units <= split(budget, rate_bytes=rate, demands=demands).units


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_no_demand_is_division(budget, rate):
    assert split(budget, rate_bytes=rate).units == budget // rate


@pytest.mark.parametrize(("budget", "rate"), [(-1, 1), (5, 0), (5, -1)])
def test_senseless_inputs(budget, rate):
    with pytest.raises(ValueError, match="must be"):
        split(budget, rate_bytes=rate)
