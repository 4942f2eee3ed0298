"""Admission policies: how long a sequence is expected to become, and so how many others may run beside it.

The KV manager admits a request when the blocks that it and all running sequences are still expected to take are
free. ``ReserveAll`` expects the most that was asked for, so nobody ever runs short. ``Optimistic`` expects what the
past suggests; when the pool runs short all the same, the scheduler suspends sequences and tells the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from tonnage.step import Ints

#: How many of the last finished requests the optimistic expectation looks at.
WINDOW = 512
#: A suspension adds this to the pessimism, and a finished request leaves this share of it.
SUSPENSION_STEP, FINISH_DECAY = 1 / 4, 31 / 32


class Admission(Protocol):
    """One policy. Pure bookkeeping: the same calls in the same order give the same answers.

    ``may_suspend``: whether running sequences can run short of blocks, so that the scheduler must suspend some.
    """

    @property
    def name(self) -> str: ...
    @property
    def may_suspend(self) -> bool: ...

    def expected_new_tokens(self, generated: Ints, most: Ints) -> Ints:
        """Tokens that a sequence is expected to have generated when it ends, one entry a sequence.

        It has generated ``generated`` and may generate ``most`` in all: 0 <= generated <= most. The answer lies in
        (generated, most]; at generated = most it is ``most``. It never falls when ``most`` rises.
        """

    def finished(self, num_generated: int) -> None:
        """A request ended by itself (not cancelled, not failed) after generating so many tokens."""

    def suspended(self) -> None:
        """A running sequence had to give its blocks up because the pool ran short."""


class ReserveAll:
    """Whole lives are reserved: a running sequence never fails to get a block. The reference's no-evict rule."""

    name = "reserve_all"
    may_suspend = False

    def expected_new_tokens(self, generated: Ints, most: Ints) -> Ints:  # noqa: ARG002 - nothing is guessed
        return most

    def finished(self, num_generated: int) -> None:
        pass

    def suspended(self) -> None:
        pass


class Optimistic:
    """Expects the mean of what the last finished requests generated, and is careful when it was wrong.

    A sequence at g tokens is compared with the finished ones that got beyond g, each cut at its own limit ``most``,
    and with one imagined request that goes on to the limit. With n finished requests of lengths l beyond g::

        mean = ceil((sum of min(l, most) + most) / (n + 1))

    So with nothing to compare with the expectation is ``most``, and a few short answers do not make it reckless.

    ``pessimism`` in [0, 1] leads from there to ``most``. Each suspension adds to it, each finish lets it fade: one
    suspension in eight finishes and more turn the policy into ``ReserveAll``, so that a pool under pressure does not
    spend its time computing again what it gave up (where the reference, which always refills, lost two fifths of its
    throughput).
    """

    name = "optimistic"
    may_suspend = True

    def __init__(self, *, window: int = WINDOW) -> None:
        self._lengths = np.zeros(window, np.int64)
        self._num_finished = 0
        self._sorted: Ints = self._lengths[:0]
        # _sums[i]: total of the i smallest lengths.
        self._sums: Ints = np.zeros(1, np.int64)
        self._is_stale = False
        self._pessimism = 0.0

    @property
    def pessimism(self) -> float:
        """0: the mean of the past; 1: the most that was asked for."""
        return self._pessimism

    def expected_new_tokens(self, generated: Ints, most: Ints) -> Ints:
        mean = self._mean(generated, most)
        return mean + np.floor(self._pessimism * (most - mean)).astype(np.int64)

    def finished(self, num_generated: int) -> None:
        self._lengths[self._num_finished % self._lengths.size] = num_generated
        self._num_finished += 1
        self._is_stale = True
        self._pessimism *= FINISH_DECAY

    def suspended(self) -> None:
        self._pessimism = min(1.0, self._pessimism + SUSPENSION_STEP)

    def _mean(self, generated: Ints, most: Ints) -> Ints:
        if self._is_stale:
            self._sort()
        ended = np.searchsorted(self._sorted, generated, side="right")
        within = np.searchsorted(self._sorted, most, side="right")
        num_longer = self._sorted.size - ended
        num_cut = self._sorted.size - within
        total = self._sums[within] - self._sums[ended] + most * (num_cut + 1)
        mean: Ints = -(-total // (num_longer + 1))
        return mean

    def _sort(self) -> None:
        self._sorted = np.sort(self._lengths[: self._num_finished])
        self._sums = np.concatenate(([0], np.cumsum(self._sorted)))
        self._is_stale = False


#: The policies by the name that a user writes.
ADMISSIONS: Mapping[str, Callable[[], Admission]] = MappingProxyType(
    {Optimistic.name: Optimistic, ReserveAll.name: ReserveAll}
)
