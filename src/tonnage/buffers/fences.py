"""Proof that work is done: marks on all streams that touch our memory, and what waits for them.

Unmapping memory does not wait for kernels that still use it (measured: the call returns while they run), so nothing
is unmapped, freed or handed out again before every registered stream has passed a mark made after its last use.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tonnage.buffers.graph_ranges import GraphRanges
from tonnage.device.driver import Driver
from tonnage.errors import CaptureError, DeviceLost

_log = logging.getLogger(__name__)
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


@dataclass(slots=True)
class _Waiting:
    mark: Mark
    action: Callable[[], None]
    has_failed: bool = False


class Fences:
    """The streams whose work may touch our memory; stream 0 is always among them.

    A stream made elsewhere (torch's, a library's) counts only once it is registered by its handle, and until it is
    forgotten. Of the captures that go on, those on registered streams are seen, and those that are announced in
    ``graphs``. For any thread, and for finalisers, which may run in the middle of any of this: every step is a single
    one of a dict or a deque, and there is no lock to wait for.
    """

    def __init__(self, driver: Driver, graphs: GraphRanges | None = None) -> None:
        self._driver, self._graphs = driver, graphs
        self._streams: dict[int, None] = {0: None}  # in the order of registration
        self._waiting: deque[_Waiting] = deque()

    @property
    def streams(self) -> tuple[int, ...]:
        return tuple(self._streams)

    def register(self, stream: int) -> None:
        self._streams[stream] = None

    def forget(self, stream: int) -> None:
        """The stream's work is done, and it is destroyed or never touches our memory again.

        ``Stream.close`` does this. For a stream made elsewhere call it before its owner destroys it: a handle that is
        registered and dead fails every later fence.
        """
        if stream != 0:
            self._streams.pop(stream, None)

    def usable(self, stream: int) -> int:
        """The stream while it is registered; 0 once it is closed. What was asked of it is done then, and what follows
        for the memory that was its own is asked of stream 0."""
        return stream if stream in self._streams else 0

    def require_no_capture(self, what: str) -> None:
        """Raise ``CaptureError`` while something is being captured: ``what`` must not become part of it.

        That is a registered stream, or any stream under ``GraphRanges.capture``. Stream 0 also stands for streams
        that it would wait for, and nothing can be asked of it while one of those is captured.
        """
        if self._graphs is not None:
            self._graphs.require_no_capture(what)
        for stream in self.streams:
            if self._driver.stream_capturing(stream):
                raise CaptureError(f"{what} while stream {stream:#x} is being captured: do it before the capture")

    def mark(self, *streams: int) -> Mark:
        """The present point of the given streams, or of all that are registered. ``CaptureError`` during a capture.

        A stream that is closed counts as stream 0: see ``usable``.
        """
        self.require_no_capture("a fence")
        events: list[int] = []
        try:
            for stream in dict.fromkeys(map(self.usable, streams or self.streams)):
                events.append(self._driver.event_create())
                self._driver.event_record(events[-1], stream=stream)
        except BaseException:
            Mark(self._driver, events).close()
            raise
        return Mark(self._driver, events)

    def wait_idle(self, *, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs: without a time-out the whole device, with one the registered streams.

        False: the time was over first, and nothing may be unmapped. True is all that an unmap needs, as long as
        nothing new is asked of the device: no further wait, which would know of no time-out. Runs nothing of ours, so
        it may be called with locks held. Raises ``CaptureError`` during a capture.
        """
        self.require_no_capture("a wait for the device")
        if timeout_s is None:
            self._driver.device_sync()
            return True
        mark = self.mark()
        try:
            return mark.wait(timeout_s=timeout_s)
        finally:
            mark.close()

    def quiesce(self, *, timeout_s: float | None = None) -> bool:
        """``wait_idle``, and then what waited for it runs. Raises also what ``reap`` raises."""
        if not self.wait_idle(timeout_s=timeout_s):
            return False
        self.reap()
        return True

    def after(self, mark: Mark, action: Callable[[], None]) -> None:
        """Run ``action`` in ``reap`` once ``mark`` is passed. Marks are passed in the order they were made."""
        self._waiting.append(_Waiting(mark, action))

    def reap(self) -> int:
        """Run the actions whose marks are passed, oldest first; returns how many ran. Never waits.

        The exception of an action goes on, and the action stays first in line, for the failure may pass. At its second
        failure it is dropped and logged, and what it should have given back stays taken: it must not keep the others
        from running. On a lost device no action can succeed, and each is dropped as ``DeviceLost`` goes on.
        """
        num_run = 0
        while (entry := self._take()) is not None:
            try:
                is_passed = entry.mark.passed
                if is_passed:
                    entry.action()
            except DeviceLost:
                raise
            except Exception as error:
                if not entry.has_failed:
                    entry.has_failed = True
                    self._waiting.appendleft(entry)
                    raise
                _log.error("given up after it failed twice: %r: %s", entry.action, error)
                continue
            except BaseException:  # an interrupt: nobody's failure
                self._waiting.appendleft(entry)
                raise
            if not is_passed:
                self._waiting.appendleft(entry)
                break
            num_run += 1
        return num_run

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _take(self) -> _Waiting | None:
        """The first in line, which is ours until we put it back: nobody else asks its mark meanwhile."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None
