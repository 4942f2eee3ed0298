"""The least sacrifice: equal to trying every combination, and a fixed point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.budget.fit import Dimension, Fitted, Values, best_goal, least_sacrifice, sacrificed, wanted

Reaches = Callable[[Values], bool]


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[Dimension, ...], Reaches]:
    """Up to four dimensions of up to five values, and a target reached above any of a few corners: any monotone
    function of a grid is of that form. The last dimension may be unordered: its values have corners each its own."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    ordered = draw(st.booleans())
    order = tuple(
        Dimension(
            name=f"d{place}",
            values=tuple(range(100, 100 - size, -1)),
            costs=f"cost {place}",
            ordered=ordered or place < len(sizes) - 1,
        )
        for place, size in enumerate(sizes)
    )
    corner = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    corners = draw(st.lists(corner, max_size=5))

    def above(places: tuple[int, ...], corner: tuple[int, ...]) -> bool:
        last = places[-1] >= corner[-1] if ordered else places[-1] == corner[-1]
        return last and all(at >= least for at, least in zip(places[:-1], corner[:-1], strict=True))

    def reaches(values: Values) -> bool:
        return any(above(places_of(order, values), corner) for corner in corners)

    return order, reaches


def places_of(order: tuple[Dimension, ...], values: Values) -> tuple[int, ...]:
    return tuple(dimension.values.index(values[dimension.name]) for dimension in order)


def brute_force(order: tuple[Dimension, ...], reaches: Reaches) -> dict[str, object] | None:
    """Every combination; of those that reach the target the one that keeps the last dimension best, then the one
    before it, and so on."""
    names = [dimension.name for dimension in order]
    every = [dict(zip(names, values, strict=True)) for values in product(*(d.values for d in order))]
    good = [values for values in every if reaches(values)]
    return min(good, key=lambda values: places_of(order, values)[::-1], default=None)


@settings(max_examples=400)
@given(grids())
def test_equals_trying_every_combination(grid: tuple[tuple[Dimension, ...], Reaches]) -> None:
    order, reaches = grid
    found = least_sacrifice(order, reaches)
    assert (found and found.as_mapping()) == brute_force(order, reaches)


@settings(max_examples=200)
@given(grids(), st.data())
def test_is_a_fixed_point(grid: tuple[tuple[Dimension, ...], Reaches], data: st.DataObject) -> None:
    """The same again, and the same with any of the chosen values pinned."""
    order, reaches = grid
    found = least_sacrifice(order, reaches)
    assert found == least_sacrifice(order, reaches)
    if found is None:
        return
    pinned = data.draw(st.sets(st.sampled_from([dimension.name for dimension in order])))
    kept = found.as_mapping()
    narrowed = tuple(replace(d, values=(kept[d.name],)) if d.name in pinned else d for d in order)
    again = least_sacrifice(narrowed, reaches)
    assert again is not None
    assert again.values == found.values
    assert {s.name for s in again.sacrifices} == {s.name for s in found.sacrifices} - pinned


@settings(max_examples=200)
@given(grids(), st.integers(0, 3))
def test_a_sacrifice_is_never_idle(grid: tuple[tuple[Dimension, ...], Reaches], which: int) -> None:
    """One step back in any dimension, with everything before it given up whole, loses the target."""
    order, reaches = grid
    found = least_sacrifice(order, reaches)
    if found is None or which >= len(order) or not order[which].ordered:
        return
    values, dimension = found.as_mapping(), order[which]
    at = dimension.values.index(values[dimension.name])
    if at > 0:
        before = {**values, **sacrificed(order[:which]), dimension.name: dimension.values[at - 1]}
        assert not reaches(before)


def room(values: Values) -> int:
    """A little machine: what 100 units leave for a goal."""
    return 100 - 10 * int(values["rows"]) - (30 if values["kind"] == "wide" else 0)


ORDER = (
    Dimension(name="rows", values=(8, 4, 2, 1), costs="fewer at once"),
    Dimension(name="kind", values=("wide", "narrow"), costs="less exact"),
)


@pytest.mark.parametrize(
    ("need", "kept"),
    [
        (0, (4, "wide")),
        (30, (4, "wide")),
        (31, (2, "wide")),
        (60, (1, "wide")),
        (61, (2, "narrow")),
        (90, (1, "narrow")),
    ],
)
def test_the_first_is_given_up_before_the_last(need: int, kept: tuple[int, str]) -> None:
    found = least_sacrifice(ORDER, lambda values: room(values) >= need)
    assert found is not None
    assert tuple(found.as_mapping().values()) == kept


def test_sacrifices_tell_from_to_why_and_cost() -> None:
    found = least_sacrifice(
        ORDER,
        lambda values: room(values) >= 61,
        why=lambda values, name, wanted: f"{room(values) - room({**values, name: wanted})} more",
    )
    assert isinstance(found, Fitted)
    told = [(s.name, s.wanted, s.kept, s.why, s.costs) for s in found.sacrifices]
    assert told == [
        ("rows", 8, 2, "60 more", "fewer at once"),
        ("kind", "wide", "narrow", "30 more", "less exact"),
    ]


def test_what_cannot_be_reached_is_none() -> None:
    assert least_sacrifice(ORDER, lambda values: room(values) >= 91) is None
    assert best_goal(ORDER, lambda goal, values: room(values) >= goal, low=91, high=200) is None


def test_an_open_goal_is_the_best_of_everything_given_up() -> None:
    assert best_goal(ORDER, lambda goal, values: room(values) >= goal, low=1, high=1000) == 90
    assert best_goal(ORDER, lambda goal, values: room(values) >= goal, low=1, high=50) == 50


def widened(goal: int, values: Values) -> bool:
    """A narrow kind that costs more than it saves where there are many rows."""
    rows = int(values["rows"])
    return goal <= 100 - 10 * rows - (30 if values["kind"] == "wide" else 5 * rows * rows)


def test_one_dimension_may_be_in_its_own_way() -> None:
    order = (replace(ORDER[0], values=(8, 4, 3)), replace(ORDER[1], ordered=False))
    assert best_goal(order, widened, low=1, high=1000) == 40
    found = least_sacrifice(order, lambda values: widened(40, values))
    assert found is not None
    assert found.as_mapping() == {"rows": 3, "kind": "wide"}
    with pytest.raises(ValueError, match="only the most precious"):
        best_goal(order[::-1], widened, low=1, high=1000)


def test_no_dimensions_and_no_values() -> None:
    assert least_sacrifice((), lambda _: True) == Fitted(values=(), sacrifices=())
    assert (wanted(()), sacrificed(())) == ({}, {})
    with pytest.raises(ValueError, match="at least one value"):
        Dimension(name="rows", values=(), costs="")
