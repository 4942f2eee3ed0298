"""Streams and events of a device that does everything at once: order is the order of the calls."""

from __future__ import annotations

from itertools import count

from tonnage.errors import DriverError


class EagerStreams:
    """Handles that exist or do not; work on any of them is done when the call returns. Stream 0 always exists."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._streams = {0}
        self._events: set[int] = set()

    def stream_create(self, *, priority: int) -> int:  # noqa: ARG002 - nothing waits, so nothing is preferred
        self._streams.add(number := next(self._numbers))
        return number

    def stream_destroy(self, stream: int) -> None:
        if stream == 0:
            raise DriverError("stream_destroy", "INVALID_HANDLE", "stream 0 belongs to the device")
        self._require_stream("stream_destroy", stream)
        self._streams.remove(stream)

    def stream_sync(self, stream: int) -> None:
        self._require_stream("stream_sync", stream)

    def stream_wait(self, stream: int, event: int) -> None:
        self._require_stream("stream_wait", stream)
        self._require_event("stream_wait", event)

    def stream_capturing(self, stream: int) -> bool:
        self._require_stream("stream_capturing", stream)
        return False

    def event_create(self) -> int:
        self._events.add(number := next(self._numbers))
        return number

    def event_destroy(self, event: int) -> None:
        self._require_event("event_destroy", event)
        self._events.remove(event)

    def event_record(self, event: int, *, stream: int) -> None:
        self._require_stream("event_record", stream)
        self._require_event("event_record", event)

    def event_done(self, event: int) -> bool:
        self._require_event("event_done", event)
        return True

    def event_sync(self, event: int) -> None:
        self._require_event("event_sync", event)

    def device_sync(self) -> None:
        """Everything is done already."""

    def _require_stream(self, call: str, stream: int) -> None:
        if stream not in self._streams:
            raise DriverError(call, "INVALID_HANDLE", f"no stream {stream}")

    def _require_event(self, call: str, event: int) -> None:
        if event not in self._events:
            raise DriverError(call, "INVALID_HANDLE", f"no event {event}")
