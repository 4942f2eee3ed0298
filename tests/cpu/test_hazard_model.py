"""The order that the watch keeps in counters, against the same order kept as a graph and searched."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from tonnage.device.hazardclock import HazardClock

STREAMS, EVENTS, PLACES = range(4), range(10, 13), range(3)
#: Streams made without the non-blocking flag: stream 0 waits for them, and they for it.
BLOCKING = (2, 3)


class Graph:
    """Moments with edges to what they come after; nothing is ever merged or forgotten."""

    def __init__(self) -> None:
        self.after: list[set[int]] = []  # by moment
        self.last: dict[int, set[int]] = {}  # by stream: what its next moment comes after
        self.events: dict[int, set[int]] = {}
        self.works: dict[int, tuple[int, int, bool]] = {}  # moment -> stream, place, writes
        self.waited: set[int] = set()

    def queue(self, stream: int, place: int, writes: bool) -> None:
        moment = len(self.after)
        self.after.append(self.next_after(stream))
        self.works[moment] = stream, place, writes
        self.last[stream] = {moment}

    def record(self, event: int, stream: int) -> None:
        self.events[event] = set(self.last.get(stream, ()))

    def wait(self, stream: int, event: int) -> None:
        self.last[stream] = self.last.get(stream, set()) | self.events.get(event, set())

    def next_after(self, stream: int) -> set[int]:
        """What work queued on the stream now would come after."""
        others = BLOCKING if stream == 0 else (0,) if stream in BLOCKING else ()
        return set().union(*(self.last.get(one, ()) for one in (stream, *others)))

    def before(self, moments: set[int]) -> set[int]:
        """All that must be done when these are."""
        found, todo = set(), list(moments)
        while todo:
            moment = todo.pop()
            if moment not in found:
                found.add(moment)
                todo += self.after[moment]
        return found

    def wait_for(self, moments: set[int]) -> None:
        self.waited |= self.before(moments)

    def touching(self, place: int) -> bool:
        return any(moment not in self.waited and at == place for moment, (_, at, _) in self.works.items())

    def unordered(self, stream: int, place: int, writes: bool) -> bool:
        known = self.waited | self.before(self.next_after(stream))
        return any(
            moment not in known and other != stream and at == place and (writes or wrote)
            for moment, (other, at, wrote) in self.works.items()
        )


ACTIONS = st.one_of(
    st.tuples(st.just("queue"), st.sampled_from(STREAMS), st.sampled_from(PLACES), st.booleans()),
    st.tuples(st.just("record"), st.sampled_from(EVENTS), st.sampled_from(STREAMS)),
    st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.sampled_from(EVENTS)),
    st.tuples(st.just("stream_sync"), st.sampled_from(STREAMS)),
    st.tuples(st.just("event_sync"), st.sampled_from(EVENTS)),
    st.tuples(st.just("device_sync")),
)


def act(clock: HazardClock, graph: Graph, action: tuple) -> None:
    name, *args = action
    if name == "queue":
        stream, place, writes = args
        span = ((place, 1),)
        clock.queue(stream, "work", () if writes else span, span if writes else (), 0)
        graph.queue(stream, place, writes)
    elif name == "record":
        clock.record(*args)
        graph.record(*args)
    elif name == "wait":
        clock.wait(*args)
        graph.wait(*args)
    elif name == "stream_sync":
        clock.host_waited_for_stream(args[0])
        graph.wait_for(graph.last.get(args[0], set()))
    elif name == "event_sync":
        clock.host_waited_for_event(args[0])
        graph.wait_for(graph.events.get(args[0], set()))
    else:
        clock.host_waited_for_all()
        graph.wait_for(set(graph.works))


# Every length as often as any other: short lists, which are what is drawn otherwise, rarely come back to a stream.
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40).flatmap(lambda size: st.lists(ACTIONS, min_size=size, max_size=size)))
def test_counters_and_graph_agree(actions: list[tuple]) -> None:
    clock, graph = HazardClock(), Graph()
    clock.blocking.update(BLOCKING)
    for action in actions:
        act(clock, graph, action)
        for place in PLACES:
            assert (clock.touching((place, 1)) is not None) == graph.touching(place)
            for stream in STREAMS:
                span = ((place, 1),)
                for writes in (False, True):
                    found = clock.unordered(stream, () if writes else span, span if writes else ())
                    assert (found is not None) == graph.unordered(stream, place, writes)
