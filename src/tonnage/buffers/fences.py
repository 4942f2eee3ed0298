"""Proof that work is done: marks on all streams that touch our memory, and what waits for them.

Unmapping memory does not wait for kernels that still use it (measured: the call returns while they run), so nothing
is unmapped, freed or handed out again before every registered stream has passed a mark made after its last use.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from tonnage.device.driver import Driver
from tonnage.errors import CaptureError

_POLL_SECONDS = 0.0005


class Mark:
    """A point on several streams. Made by ``Fences.mark``; close it when it is no longer asked."""

    def __init__(self, driver: Driver, events: list[int]) -> None:
        self._driver, self._events = driver, events

    @property
    def passed(self) -> bool:
        """Whether all streams are past the point; never waits."""
        while self._events and self._driver.event_done(self._events[-1]):
            self._driver.event_destroy(self._events.pop())
        return not self._events

    def wait(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all streams are past the point, or the time is over; returns ``passed``."""
        if timeout_s is None:
            for event in self._events:
                self._driver.event_sync(event)
            return self.passed
        until = time.monotonic() + timeout_s
        while not self.passed:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Ask no more. Closing again does nothing."""
        while self._events:
            self._driver.event_destroy(self._events.pop())


class Fences:
    """The streams whose work may touch our memory; stream 0 is always among them.

    A stream made elsewhere (torch's, a library's) counts only once it is registered by its handle.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._streams: dict[int, None] = {0: None}  # in the order of registration
        self._waiting: deque[tuple[Mark, Callable[[], None]]] = deque()

    @property
    def streams(self) -> tuple[int, ...]:
        return tuple(self._streams)

    def register(self, stream: int) -> None:
        with self._lock:
            self._streams[stream] = None

    def forget(self, stream: int) -> None:
        """The stream is about to be destroyed, or never touches our memory again."""
        with self._lock:
            if stream != 0:
                self._streams.pop(stream, None)

    def require_no_capture(self, what: str) -> None:
        """Raise ``CaptureError`` while one of the streams is being captured: ``what`` must not become part of it."""
        for stream in self.streams:
            if self._driver.stream_capturing(stream):
                raise CaptureError(f"{what} while stream {stream:#x} is being captured: do it before the capture")

    def mark(self, *streams: int) -> Mark:
        """The present point of the given streams, or of all that are registered. ``CaptureError`` during a capture."""
        self.require_no_capture("a fence")
        events: list[int] = []
        try:
            for stream in streams or self.streams:
                events.append(self._driver.event_create())
                self._driver.event_record(events[-1], stream=stream)
        except BaseException:
            Mark(self._driver, events).close()
            raise
        return Mark(self._driver, events)

    def quiesce(self, *, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs: without a time-out the whole device, with one the registered streams.

        False: the time was over first, and nothing may be unmapped. Then runs what waited for it.
        """
        self.require_no_capture("a wait for the device")
        if timeout_s is None:
            self._driver.device_sync()
        else:
            mark = self.mark()
            try:
                if not mark.wait(timeout_s=timeout_s):
                    return False
            finally:
                mark.close()
        self.reap()
        return True

    def after(self, mark: Mark, action: Callable[[], None]) -> None:
        """Run ``action`` in ``reap`` once ``mark`` is passed. Marks are passed in the order they were made."""
        with self._lock:
            self._waiting.append((mark, action))

    def reap(self) -> int:
        """Run the actions whose marks are passed, oldest first; returns how many ran. Never waits.

        An action that raises is put back at the front, so that it runs again, and its exception goes on.
        """
        num_run = 0
        while True:
            with self._lock:
                if not self._waiting or not self._waiting[0][0].passed:
                    return num_run
                mark, action = self._waiting.popleft()
            try:
                action()
            except BaseException:
                with self._lock:
                    self._waiting.appendleft((mark, action))
                raise
            num_run += 1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)
