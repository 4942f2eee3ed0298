"""Which work is certainly done, and which certainly comes before which: the streams and events of ``HazardDriver``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

Span = tuple[int, int]  # (address, size)
_Clock = dict[int, int]  # stream -> number of its works that are before a moment


@dataclass(frozen=True, slots=True)
class Work:
    """Something queued on a stream that touches memory. ``number`` counts the works of the stream, ``at_call`` the
    calls at the seam when it was declared.
    """

    stream: int
    what: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    number: int
    at_call: int

    def __str__(self) -> str:
        return f"{self.what} on stream {self.stream:#x}, declared at call {self.at_call}"

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.reads + self.writes

    def conflicts(self, reads: tuple[Span, ...], writes: tuple[Span, ...]) -> bool:
        """Whether the order of the two would be seen in the bytes: both touch some, and one of them writes."""
        return meet(self.writes, reads + writes) or meet(self.reads, writes)


def meet(some: tuple[Span, ...], others: tuple[Span, ...]) -> bool:
    """Whether a byte lies in both."""
    return any(a < b + size_b and b < a + size_a for a, size_a in some for b, size_b in others)


class HazardClock:
    """Work is in flight from when it is declared until the host has waited for something that comes after it.

    Streams do not wait for each other, nor for stream 0, unless an event says so; those named in ``blocking`` wait
    for stream 0, and it for them, as streams made without the non-blocking flag do.
    """

    def __init__(self) -> None:
        self.blocking: set[int] = set()
        self._queued: _Clock = {}
        self._after: dict[int, _Clock] = {}  # what the next work of a stream comes after
        self._events: dict[int, _Clock] = {}
        self._done: _Clock = {}
        self._works: dict[tuple[object, ...], Work] = {}
        self._open: list[Work] = []

    def queue(self, stream: int, what: str, reads: tuple[Span, ...], writes: tuple[Span, ...], at_call: int) -> Work:
        for other in self._waited_for(stream):
            _merge(self._after.setdefault(stream, {}), self._moment(other))
        self._queued[stream] = number = self._queued.get(stream, 0) + 1
        work = Work(stream, what, reads, writes, number, at_call)
        # The same again stands for both: on one stream the earlier one is done when the later one is.
        self._works[stream, what, reads, writes] = work
        return work

    def hold(self, work: Work) -> None:
        """In flight whatever is waited for, until ``let_go``: its kernels are still being queued."""
        self._open.append(work)

    def let_go(self, work: Work) -> None:
        self._open.remove(work)
        self.queue(work.stream, work.what, work.reads, work.writes, work.at_call)

    def record(self, event: int, stream: int) -> None:
        self._events[event] = self._moment(stream)

    def forget_event(self, event: int) -> None:
        self._events.pop(event, None)

    def wait(self, stream: int, event: int) -> None:
        _merge(self._after.setdefault(stream, {}), self._events.get(event, {}))

    def host_waited_for_stream(self, stream: int) -> None:
        self._finish(self._moment(stream))

    def host_waited_for_event(self, event: int) -> None:
        self._finish(self._events.get(event, {}))

    def host_waited_for_all(self) -> None:
        self._finish(dict(self._queued))

    def in_flight(self) -> Iterator[Work]:
        yield from self._open
        yield from self._works.values()

    def forget_span(self, span: Span) -> None:
        """What is in flight over these bytes harms nobody any more."""
        for key, work in self._works.items():
            if meet(work.spans, (span,)):
                reads, writes = (tuple(one for one in spans if not meet((one,), (span,)))
                                 for spans in (work.reads, work.writes))  # fmt: skip
                self._works[key] = replace(work, reads=reads, writes=writes)

    def touching(self, *spans: Span) -> Work | None:
        """Some work in flight that touches a byte of ``spans``."""
        return next((work for work in self.in_flight() if meet(work.spans, spans)), None)

    def unordered(self, stream: int, reads: tuple[Span, ...], writes: tuple[Span, ...]) -> Work | None:
        """Some work in flight on another stream that would race with this, were it queued on ``stream`` now."""
        before = self._moment(stream)
        for other in self._waited_for(stream):
            _merge(before, self._moment(other))
        for work in self.in_flight():
            if work.stream != stream and work.number > before.get(work.stream, 0) and work.conflicts(reads, writes):
                return work
        return None

    def _waited_for(self, stream: int) -> tuple[int, ...]:
        if stream == 0:
            return tuple(self.blocking)
        return (0,) if stream in self.blocking else ()

    def _moment(self, stream: int) -> _Clock:
        """All that is before whatever is queued on ``stream`` next, by its own order and by its waits."""
        moment = dict(self._after.get(stream, {}))
        _merge(moment, {stream: self._queued.get(stream, 0)})
        return moment

    def _finish(self, moment: _Clock) -> None:
        _merge(self._done, moment)
        self._works = {key: work for key, work in self._works.items() if work.number > self._done.get(work.stream, 0)}


def _merge(into: _Clock, other: _Clock) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)
