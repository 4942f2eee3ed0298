"""Choose values of several knobs so that a target is reached with the least sacrifice. Knows nothing of models.

Each knob is a ``Dimension``: its candidate values from the most wanted to the most sacrificed. The order of the
dimensions is the order of sacrifice: the first is given up first, the last is the most precious. Of all choices that
reach the target the best is the one that keeps the most precious dimension best, then the next, and so on.

Giving up more never loses the target (``reaches`` is monotone), so that choice needs no search over combinations:
from the most precious dimension to the least, take the best value with which the target is still reached while
everything less precious is given up whole. Only the most precious dimension may be ``ordered=False``: its values are
tried one by one, so that one of them may be in the way of another (a narrower cache that has to be widened for use).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tonnage.budget.search import largest, smallest

#: A candidate value: a count, or a name such as that of a dtype.
Value: TypeAlias = int | str
Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One knob. ``values`` run from the most wanted to the most sacrificed; ``costs`` is what giving it up costs.

    ``ordered``: a later value never loses what an earlier one reaches.
    """

    name: str
    values: tuple[Value, ...]
    costs: str
    ordered: bool = True

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.name}: a dimension has at least one value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sacrifice:
    """What was given up: ``wanted`` became ``kept``. ``why`` is what that buys, ``costs`` what it costs."""

    name: str
    wanted: Value
    kept: Value
    why: str
    costs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The choice. ``values`` stand in the order of sacrifice, and so do the ``sacrifices`` among them."""

    values: tuple[tuple[str, Value], ...]
    sacrifices: tuple[Sacrifice, ...]

    def as_mapping(self) -> dict[str, Value]:
        return dict(self.values)


def wanted(order: Sequence[Dimension]) -> dict[str, Value]:
    """Nothing given up."""
    return {dimension.name: dimension.values[0] for dimension in order}


def sacrificed(order: Sequence[Dimension]) -> dict[str, Value]:
    """Everything given up."""
    return {dimension.name: dimension.values[-1] for dimension in order}


def last_resorts(order: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Everything given up, once for each value of a dimension that is not ordered, the most sacrificed first."""
    if any(not dimension.ordered for dimension in order[:-1]):
        raise ValueError("only the most precious dimension may be unordered")
    everything = sacrificed(order)
    if not order or order[-1].ordered:
        return [everything]
    return [everything | {order[-1].name: value} for value in reversed(order[-1].values)]


def least_sacrifice(
    order: Sequence[Dimension],
    reaches: Callable[[Values], bool],
    *,
    why: Callable[[Values, str, Value], str] = lambda _values, _name, _wanted: "",
) -> Fitted | None:
    """The values that reach the target with the least sacrifice; None where not even everything given up reaches it.

    ``reaches`` must be monotone: what it holds for, it holds for with more given up. ``why(values, name, wanted)``
    tells what giving up ``name`` buys: ``values`` are those chosen, ``wanted`` what it would have been.
    """
    values = next((values for values in last_resorts(order)[::-1] if reaches(values)), None)
    if values is None:
        return None
    for dimension in reversed(order):
        if dimension.ordered:
            values[dimension.name] = _best(dimension, values, reaches)
    found = tuple(
        Sacrifice(
            name=dimension.name,
            wanted=dimension.values[0],
            kept=values[dimension.name],
            why=why(values, dimension.name, dimension.values[0]),
            costs=dimension.costs,
        )
        for dimension in order
        if values[dimension.name] != dimension.values[0]
    )
    return Fitted(values=tuple(values.items()), sacrifices=found)


def best_goal(order: Sequence[Dimension], reaches: Callable[[int, Values], bool], *, low: int, high: int) -> int | None:
    """The largest goal in ``[low, high]`` that is reached with everything given up; None if not even ``low`` is.

    ``reaches(goal, values)`` must be monotone in the goal too: once out of reach, so is everything larger.
    """
    found = None
    for values in last_resorts(order):
        # Only what is more than was found already is of interest.
        more = largest(lambda goal, values=values: reaches(goal, values), low=low, high=high)  # type: ignore[misc]
        if more is not None:
            found, low = more, more + 1
    return found


def _best(dimension: Dimension, values: Values, reaches: Callable[[Values], bool]) -> Value:
    """The most wanted value that still reaches the target; the last one is known to."""
    last = len(dimension.values) - 1
    found = smallest(lambda place: reaches({**values, dimension.name: dimension.values[place]}), low=0, high=last - 1)
    return dimension.values[last if found is None else found]
