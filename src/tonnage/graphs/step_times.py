"""How long a replayed decode step takes at each batch size: a model, or points that were measured.

A step has two parts. The graph's own time is that of its size, whoever is in it: weights are read and matrices are
multiplied for padding as for sequences. What comes beside it is that of the sequences that are really there: their keys
and values are read, their tokens chosen; padding takes no part in that. Only the first part makes padding dear, and
where both are known as one, every padded row is charged as if it were a sequence.

Between two measured points a time is interpolated linearly and rounded up to a nanosecond; below the first it is the
first's, which padding always reaches; above the last nothing is known, so asking for it is an error. Points within one
tile of a kernel should therefore be measured at both its ends.

A size may be slower than a larger one. Padding to the larger is legal then, so every choice sees the running minimum
from the right (``least_ns``), which never falls with the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import mul

from tonnage.errors import InputError
from tonnage.graphs.histogram import Histogram
from tonnage.units import ceil_div, round_up


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times in nanoseconds for batch sizes 1 to ``max_batch_size``.

    step_ns         [b - 1] a replay of the graph of ``b``
    eager_extra_ns  what a step without a graph takes more, at any size: its launches, one by one, by the host
    beside_ns       [b - 1] what a step of ``b`` sequences takes beside its graph, however far it is padded; empty: 0
    told            where the times are from, for a person
    least_ns        [b - 1] the fastest graph that a step of ``b`` could replay
    """

    step_ns: tuple[int, ...]
    eager_extra_ns: int = 0
    told: str = ""
    beside_ns: tuple[int, ...] = ()
    least_ns: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.step_ns
        assert min(self.step_ns) > 0
        assert self.eager_extra_ns >= 0
        assert min(self.beside_ns, default=0) >= 0
        object.__setattr__(self, "beside_ns", self.beside_ns or (0,) * len(self.step_ns))
        assert len(self.beside_ns) == len(self.step_ns)
        object.__setattr__(self, "least_ns", tuple(accumulate(reversed(self.step_ns), min))[::-1])

    @property
    def max_batch_size(self) -> int:
        return len(self.step_ns)

    def at(self, batch_size: int) -> int:
        """A replay of exactly that size."""
        return self.step_ns[batch_size - 1]

    def least(self, batch_size: int) -> int:
        return self.least_ns[batch_size - 1]

    def beside(self, batch_size: int) -> int:
        return self.beside_ns[batch_size - 1]

    def unpadded(self, batch_size: int) -> int:
        """A whole step, with a graph for every size."""
        return self.least(batch_size) + self.beside(batch_size)

    def eager(self, batch_size: int) -> int:
        """A whole step without a graph."""
        return self.at(batch_size) + self.eager_extra_ns + self.beside(batch_size)

    def edges(self) -> tuple[int, ...]:
        """Sizes worth a graph: the last ones before the time rises. No other size is faster, or pads less time."""
        rises = (size for size, (here, after) in enumerate(pairwise(self.least_ns), 1) if here < after)
        return (*rises, self.max_batch_size)

    def fastest(self, batch_size: int) -> int:
        """The size itself, or the next edge where a graph of that is faster."""
        if self.at(batch_size) == self.least(batch_size):
            return batch_size
        return next(edge for edge in self.edges() if edge >= batch_size)

    def fixed_share(self, batch_size: int) -> Fraction:
        """The part of a step that does not grow with the batch, 0 to 1: by the rise from half the size to it.

        For ``alpha + beta b`` this is ``alpha / t(b)``. 1 for a batch of one, whose rise nothing shows.
        """
        half = ceil_div(batch_size, 2)
        if half == batch_size:
            return Fraction(1)
        here = self.unpadded(batch_size)
        rise = Fraction(here - self.unpadded(half), batch_size - half)
        return min(Fraction(1), max(Fraction(0), 1 - batch_size * rise / here))


def affine(max_batch_size: int, *, base_ns: int, row_ns: int, tile_rows: int = 1, eager_extra_ns: int = 0) -> StepTimes:
    """``base_ns + row_ns * b``, with ``b`` rounded up to whole tiles: with ``tile_rows`` above 1 a staircase."""
    steps = tuple(base_ns + row_ns * round_up(size, tile_rows) for size in range(1, max_batch_size + 1))
    tiles = f", in tiles of {tile_rows}" if tile_rows > 1 else ""
    told = f"{base_ns / 1000:g} us + {row_ns / 1000:g} us a sequence{tiles}"
    return StepTimes(steps, eager_extra_ns, told)


@dataclass(frozen=True, slots=True)
class StepPoints:
    """What was measured: nanoseconds of a graph by its size, and of what comes beside it by sequences that are there.

    told  how, for a person
    """

    graph_ns: Mapping[int, int]
    beside_ns: Mapping[int, int] = field(default_factory=dict)
    told: str = ""


def measured(points: StepPoints, max_batch_size: int, *, file: str, eager_extra_ns: int = 0) -> StepTimes:
    """Measured points, completed by the rule above. Raises ``InputError`` naming ``file`` for points that end below
    ``max_batch_size``: what lies beyond them is not guessed."""
    steps = _completed(points.graph_ns, max_batch_size, file)
    beside = _completed(points.beside_ns, max_batch_size, file) if points.beside_ns else ()
    told = f"{len(points.graph_ns)} measured sizes, straight lines between{points.told}"
    return StepTimes(steps, eager_extra_ns, told, beside)


def _completed(points: Mapping[int, int], max_batch_size: int, file: str) -> tuple[int, ...]:
    sizes = sorted(points)
    if not sizes or sizes[-1] < max_batch_size:
        last = f"end at batch size {sizes[-1]}" if sizes else "are none"
        raise InputError(
            f"{file}: the step times {last}, and max_batch_size is {max_batch_size}",
            value=file,
            remedy=f"measure a step of {max_batch_size} too, or lower --max-batch-size",
        )
    return tuple(_interpolated(points, sizes, max_batch_size))


def _interpolated(points: Mapping[int, int], sizes: Sequence[int], max_batch_size: int) -> list[int]:
    steps = [points[sizes[0]]] * sizes[0]
    for left, right in pairwise(sizes):
        rise, run = points[right] - points[left], right - left
        steps += [points[left] + ceil_div(rise * step, run) for step in range(1, run + 1)]
    return steps[:max_batch_size]


def batch_costs(sizes: Sequence[int], times: StepTimes) -> list[int]:
    """[b] nanoseconds of a whole step of ``b``: with the fastest of ``sizes`` that holds it, or eager. [0] is 0.

    ``sizes`` ascending, none above ``times.max_batch_size``.
    """
    fastest = list(accumulate((times.at(size) for size in reversed(sizes)), min))[::-1]
    costs = [0]
    for size, cost in zip(sizes, fastest, strict=True):
        costs += [cost + beside for beside in times.beside_ns[len(costs) - 1 : size]]
    return [*costs, *map(times.eager, range(len(costs), times.max_batch_size + 1))]


def total_ns(histogram: Histogram, sizes: Sequence[int], times: StepTimes) -> int:
    """J: nanoseconds of all steps of ``histogram`` with graphs of ``sizes``, as ``batch_costs`` has them.

    ``times.max_batch_size`` is at least ``histogram.largest``.
    """
    return sum(map(mul, histogram.steps, batch_costs(sizes, times)))


def unpadded_ns(histogram: Histogram, times: StepTimes) -> int:
    """What J is with a graph for every size: nothing can be lower."""
    return sum(count * times.unpadded(size) for size, count in enumerate(histogram.steps) if count)


def beside_total_ns(histogram: Histogram, times: StepTimes) -> int:
    """The part of J that no list of sizes changes, where every step has a graph."""
    return sum(count * times.beside(size) for size, count in enumerate(histogram.steps) if count)
