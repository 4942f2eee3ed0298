"""Loads and step times that tests of graph sizes share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tonnage.graphs.histogram import Histogram
from tonnage.graphs.step_times import affine

K = 2048
#: The two models of the check in spec/runtime.md 6.3: 6 ms + 6 us b, and 2 ms + 12 us b in tiles of 8.
MODEL_A = affine(K, base_ns=6_000_000, row_ns=6_000)
MODEL_B = affine(K, base_ns=2_000_000, row_ns=12_000, tile_rows=8)


def blend(parts: Sequence[tuple[Histogram, Fraction]]) -> Histogram:
    """Several histograms as one, each with its share of the steps whatever it counted. Shares at least 0, not all 0.

    Exact: counts are brought to one common multiple.
    """
    weights = [Fraction(share) / part.num_steps for part, share in parts]
    scale = math.lcm(*(weight.denominator for weight in weights))
    most = max(len(part.steps) for part, _ in parts)
    steps = [0] * most
    for (part, _), weight in zip(parts, weights, strict=True):
        factor = int(weight * scale)
        for size, count in enumerate(part.steps):
            steps[size] += factor * count
    return Histogram(tuple(steps))


def bell(middle: int, spread: int, most: int = K) -> Histogram:
    """A normal distribution, in ten-millionths."""
    share = (math.exp(-(((size - middle) / spread) ** 2) / 2) for size in range(1, most + 1))
    return Histogram((0, *(int(1e7 * each) for each in share)))


def even(most: int) -> Histogram:
    return Histogram((0,) + (1,) * most)


def peak(middle: int, spread: int = 40) -> Histogram:
    """A peak, and a tenth of the steps spread over what is passed on the way up and down."""
    return blend([(bell(middle, spread), Fraction(9, 10)), (even(700), Fraction(1, 10))])


UNIFORM, PEAK_576 = even(K), peak(576)
BIMODAL = blend([(bell(140, 10), Fraction(1)), (bell(900, 60), Fraction(1))])
