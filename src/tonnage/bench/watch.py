"""What is free on the device, looked at all the time while others work.

The engine has a watch of its own; who judges the engine looks for itself, and keeps the lowest of each second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING

from tonnage.bench import inside

if TYPE_CHECKING:
    from tonnage.engine import Engine

INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeFigures:
    """Free bytes of the device as they were sampled.

    lowest_at_s           seconds from the start of the watch to the lowest sample
    longest_gap_ms        between two samples: what was there meanwhile nobody saw
    lowest_by_second      the lowest of each second, in order; a second without a sample has none
    """

    num_samples: int
    interval_ms: int
    lowest_bytes: int
    lowest_at_s: float
    longest_gap_ms: int
    lowest_by_second: tuple[int, ...]


def free_watch(engine: Engine) -> FreeWatch | None:
    """Of the engine's device; None where it is no card, which has no others on it."""
    read = inside.device_free(engine)
    return None if read is None else FreeWatch(read)


class FreeWatch:
    """A thread that calls ``read`` every ``interval_s`` between ``start`` and ``stop``. ``figures`` after that.

    Use as a context manager. ``failure`` is what ended it early, if anything did.
    """

    def __init__(self, read: Callable[[], int], *, interval_s: float = INTERVAL_S) -> None:
        self._read, self._interval_s = read, interval_s
        self._samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="free watch", daemon=True)
        self.failure: Exception | None = None

    def __enter__(self) -> FreeWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def figures(self) -> FreeFigures:
        began = self._samples[0][0]
        at, lowest = min(self._samples, key=lambda sample: sample[1])
        times = [time for time, _ in self._samples]
        by_second: dict[int, int] = {}
        for when, free in self._samples:
            second = int(when - began)
            by_second[second] = min(free, by_second.get(second, free))
        return FreeFigures(
            num_samples=len(self._samples),
            interval_ms=round(1000 * self._interval_s),
            lowest_bytes=lowest,
            lowest_at_s=round(at - began, 1),
            longest_gap_ms=round(1000 * max((b - a for a, b in pairwise(times)), default=0)),
            lowest_by_second=tuple(by_second.values()),
        )

    def _run(self) -> None:
        """At fixed times, so that a slow look is not followed by a late one."""
        due = time.monotonic() + self._interval_s
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._interval_s, time.monotonic())
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a thread has nobody to tell
                self.failure = error
                return

    def _look(self) -> None:
        free = self._read()
        self._samples.append((time.monotonic(), free))
