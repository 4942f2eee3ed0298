"""Requests played through decode steps, to see which batch sizes a list of graphs leads to.

A request takes a seat when it has arrived and one is free, in order of arrival; its first token comes with its prompt,
and every step after that gives one token to each seat taken. Prompts take no time here: they are computed in steps of
their own, or beside decodes, and no bucket changes that.

Which batches come up depends on how long steps take, and so on the list itself: faster steps empty the seats sooner.
``settled`` therefore chooses twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush

from tonnage.graphs.histogram import Histogram
from tonnage.graphs.step_times import StepTimes, batch_costs


@dataclass(frozen=True, slots=True, order=True)
class Request:
    """Arrival in nanoseconds after the start, and output in tokens, at least 1."""

    arrival_ns: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it: batches that were seen, time spent in steps, and the time of the last one's end."""

    histogram: Histogram
    busy_ns: int
    end_ns: int

    @property
    def mean_step_ns(self) -> Fraction:
        return Fraction(self.busy_ns, self.histogram.num_steps)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of decode steps over the time spent in them."""
        return self.histogram.num_tokens * 1e9 / self.busy_ns


def play(requests: Sequence[Request], sizes: Sequence[int], times: StepTimes, *, num_seats: int) -> Played:
    """At least one request has a second token. ``num_seats`` is 1 to ``times.max_batch_size``."""
    assert 1 <= num_seats <= times.max_batch_size
    cost = batch_costs(sizes, times)
    coming = sorted((request for request in requests if request.output_tokens > 1), reverse=True)
    seen = Counter[int]()
    ends: list[int] = []  # the step before which each seat is free again
    now_ns = busy_ns = step = 0
    while coming or ends:
        if not ends:
            now_ns = max(now_ns, coming[-1].arrival_ns)
        while coming and len(ends) < num_seats and coming[-1].arrival_ns <= now_ns:
            heappush(ends, step + coming.pop().output_tokens - 1)
        seen[len(ends)] += 1
        now_ns += cost[len(ends)]
        busy_ns += cost[len(ends)]
        step += 1
        while ends and ends[0] <= step:
            heappop(ends)
    return Played(Histogram.counted(seen), busy_ns, now_ns)


def settled(
    requests: Sequence[Request],
    choose: Callable[[Histogram], Sequence[int]],
    times: StepTimes,
    *,
    num_seats: int,
    first: Sequence[int],
) -> Histogram:
    """The batches under the list that ``choose`` makes of the batches under ``first``."""
    before = play(requests, first, times, num_seats=num_seats).histogram
    return play(requests, choose(before), times, num_seats=num_seats).histogram
