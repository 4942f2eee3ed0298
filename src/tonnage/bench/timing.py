"""When tokens came, by the phase of a soak that asked for them. All times in microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.bench.moves import Ask

if TYPE_CHECKING:
    from tonnage.engine import Completion, Request

#: Of percentiles, in thousandths, and what they are called.
THOUSANDTHS = {"p50": 500, "p99": 990, "p99.9": 999}


def percentiles(counts: Mapping[int, int]) -> dict[str, int] | None:
    """Nearest ranks of values that occurred so often each, and the largest as "max"; None where there is none."""
    total, passed, found = sum(counts.values()), 0, {}
    ranks = {name: -(-total * share // 1000) for name, share in THOUSANDTHS.items()}
    for value in sorted(counts):
        passed += counts[value]
        for name in [name for name, rank in ranks.items() if passed >= rank]:
            found[name] = value
            del ranks[name]
    return {**found, "max": max(counts)} if total else None


@dataclass(slots=True, kw_only=True)
class PhaseFigures:
    """What one phase asked for and got.

    num_times        so often it began
    outcomes         requests by how they ended, and refused ones
    active_us        for so long at least one of its requests was there
    first_us, gaps_us   times to the first token from arrival, and between tokens, by how often they occurred
    """

    name: str
    num_times: int = 0
    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    active_us: int = 0
    first_us: Counter[int] = field(default_factory=Counter)
    gaps_us: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / (self.active_us / 10**6) if self.active_us else 0.0


@dataclass(slots=True, eq=False)
class _Live:
    """A request that is there. ``tokens`` is its own list, which grows; ``last_us`` None: it has no token yet, or none
    since the engine slept, so that the time to the next one is nobody's."""

    figures: PhaseFigures
    tokens: list[int]
    num_seen: int
    arrived_us: int
    has_first: bool = False
    last_us: int | None = None


@dataclass(slots=True, kw_only=True)
class LoadFigures:
    """How full the engine was over its steps: ``num_full`` of ``num_steps`` had a full batch or somebody
    who waited; the sums are of rows that ran and of requests that waited."""

    num_steps: int = 0
    num_full: int = 0
    running_sum: int = 0
    waiting_sum: int = 0


class Timing:
    """``arrived``, ``stepped`` after each step, ``ended``; ``phases`` has the figures. ``now_us`` is the clock."""

    def __init__(self, now_us: Callable[[], int], *, max_batch_size: int) -> None:
        self.phases: dict[str, PhaseFigures] = {}
        self.load = LoadFigures()
        self._now_us, self._max_batch_size = now_us, max_batch_size
        self._live: dict[str, _Live] = {}
        self._num_live: Counter[str] = Counter()
        self._active_since: dict[str, int] = {}

    def phase(self, name: str) -> PhaseFigures:
        return self.phases.setdefault(name, PhaseFigures(name=name))

    def arrived(self, ask: Ask, request: Request) -> None:
        now, tokens = self._now_us(), request.token_ids
        self._live[ask.id] = _Live(self.phase(ask.phase), tokens, len(tokens), now)
        if not self._num_live[ask.phase]:
            self._active_since[ask.phase] = now
        self._num_live[ask.phase] += 1

    def refused(self, ask: Ask) -> None:
        self.phase(ask.phase).outcomes["refused"] += 1

    def stepped(self, *, num_running: int, num_waiting: int) -> None:
        """A step returned. Of several tokens that came at once all but the first came no time after it."""
        now, load = self._now_us(), self.load
        load.num_steps += 1
        load.num_full += num_running >= self._max_batch_size or num_waiting > 0
        load.running_sum += num_running
        load.waiting_sum += num_waiting
        for live in self._live.values():
            if len(live.tokens) != live.num_seen:
                self._note(live, now)

    def paused(self) -> None:
        """The engine slept: what comes next was held up by that, not by a step."""
        for live in self._live.values():
            live.last_us = None

    def ended(self, ask: Ask, completion: Completion) -> None:
        now = self._now_us()
        live = self._live.pop(ask.id)
        if len(live.tokens) != live.num_seen:
            self._note(live, now)
        live.figures.num_tokens += len(completion.token_ids)
        live.figures.outcomes[str(completion.finish_reason)] += 1
        self._num_live[ask.phase] -= 1
        if not self._num_live[ask.phase]:
            live.figures.active_us += now - self._active_since.pop(ask.phase)

    def _note(self, live: _Live, now: int) -> None:
        num_new, live.num_seen = len(live.tokens) - live.num_seen, len(live.tokens)
        if not live.has_first:
            live.has_first = True
            live.figures.first_us[now - live.arrived_us] += 1
        elif live.last_us is not None:
            live.figures.gaps_us[now - live.last_us] += 1
        live.last_us = now
        if num_new > 1:
            live.figures.gaps_us[0] += num_new - 1
