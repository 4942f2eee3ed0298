"""How often each decode batch size was seen. Sizes are those that ranks agreed on: the largest over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

#: Steps that the prior stands for at batch size 1; a size has this over itself.
_PRIOR_STEPS = 10**6


@dataclass(frozen=True, slots=True)
class Histogram:
    """``steps[b]``: decode steps of ``b`` sequences; ``steps[0]`` is 0. Whole numbers, so that sums are exact."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.steps
        assert self.steps[0] == 0
        assert min(self.steps) >= 0
        assert any(self.steps)

    @classmethod
    def of(cls, batch_sizes: Iterable[int]) -> Histogram:
        """Counted; sizes of 0 (a step without decodes) are left out. At least one must be above."""
        return cls.counted(Counter(batch_sizes))

    @classmethod
    def counted(cls, counts: dict[int, int]) -> Histogram:
        """From size to number of steps."""
        most = max(size for size, count in counts.items() if count and size)
        return cls((0, *(counts.get(size, 0) for size in range(1, most + 1))))

    @property
    def largest(self) -> int:
        """The largest batch size with a step."""
        return max(size for size, count in enumerate(self.steps) if count)

    @property
    def num_steps(self) -> int:
        return sum(self.steps)

    @property
    def num_tokens(self) -> int:
        """One token for every sequence of every step."""
        return sum(size * count for size, count in enumerate(self.steps))

    def up_to(self, most: int) -> list[int]:
        """Steps of at most ``b`` sequences, for ``b`` from 0 to ``most``, which is at least ``largest``."""
        assert most >= self.largest
        steps = [*self.steps[: most + 1], *[0] * (most + 1 - len(self.steps))]
        return list(accumulate(steps))

    def spread(self, low: Fraction, high: Fraction, *, most: int) -> Histogram:
        """The same load drifted: each size's steps spread evenly over ``low`` to ``high`` times it, 1 to ``most``.

        Steps are counted in parts, so that hardly any are lost; with ``low`` equal to ``high`` the shape is stretched.
        """
        changes = [0] * (most + 2)
        for size, count in enumerate(self.steps):
            if count:
                first = _clamp((2 * size - 1) * low.numerator // (2 * low.denominator) + 1, most)
                last = max(first, _clamp((2 * size + 1) * high.numerator // (2 * high.denominator), most))
                share = count * _PARTS // (last - first + 1)
                changes[first] += share
                changes[last + 1] -= share
        return Histogram(tuple(accumulate(changes[:-1])))

    def normed(self, parts: int) -> Histogram:
        """The same shape in about so many steps, whole ones; a size that was seen keeps one at least."""
        total = self.num_steps
        return Histogram(tuple(max(count * parts // total, count > 0) for count in self.steps))


#: Parts of a step that ``spread`` counts in.
_PARTS = 10**6


def _clamp(size: int, most: int) -> int:
    return max(1, min(most, size))


def prior(most: int) -> Histogram:
    """Weight ``1/b`` for each size up to ``most``: every octave of sizes alike, where nothing is known."""
    return Histogram((0, *(_PRIOR_STEPS // size for size in range(1, most + 1))))
