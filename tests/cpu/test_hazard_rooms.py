"""The rooms above under the watch: they wait for what uses their memory, and a use they are not told of is caught."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tonnage.buffers import BufferManager, Device, Stream, VaArena
from tonnage.buffers.scopes import scope
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver
from tonnage.errors import CaptureError, DeviceLost
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

PAGE = 64 * 1024


class Bench:
    """A watched device on which any edit beside running work is a hazard, and two streams of it."""

    def __init__(self) -> None:
        self.host = HostDriver(64 * PAGE, page_bytes=PAGE)
        self.watch = HazardDriver(self.host, reservation_hazard=True)
        self.ledger = Ledger(0, 64 * PAGE)
        self.stream = Stream.create(Device(self.watch))
        self.other = Stream.create(self.stream.device)
        self.manager = BufferManager(self.stream, ledger=self.ledger, owner="rooms")

    def arena(self, **options: bool) -> VaArena:
        return VaArena(
            self.stream, ledger=self.ledger, owner="arena", line=LineKind.KV, reserve_bytes=32 * PAGE, **options
        )

    def close(self) -> None:
        assert self.watch.hazards == []
        self.host.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.host.close()


def test_an_arena_grows_and_shrinks_only_beside_finished_work(bench: Bench) -> None:
    arena = bench.arena()
    for num_pages in (1, 4, 9, 3, 8):
        (arena.commit if num_pages * PAGE > arena.committed_bytes else arena.decommit)(num_pages * PAGE)
        for stream in (bench.stream, bench.other):
            bench.watch.launch(stream.handle, reads=[(arena.address, arena.committed_bytes)], what="attention")
    arena.close()
    bench.close()


def test_growth_beside_running_work_is_seen_where_it_counts(bench: Bench) -> None:
    arena = bench.arena(concurrent_growth=True)
    arena.commit(PAGE)
    bench.watch.launch(bench.stream.handle, reads=[(arena.address, PAGE)], what="attention")
    with pytest.raises(DeviceLost, match="attention"):
        arena.commit(2 * PAGE)
    assert bench.watch.lost is not None
    assert bench.watch.lost.code == "RESERVATION_IN_USE"


@pytest.mark.parametrize("kind", [MemoryKind.GPU, MemoryKind.GPU_SYNC, MemoryKind.PINNED, MemoryKind.MANAGED])
def test_a_buffer_used_on_another_stream_says_so_or_is_caught(bench: Bench, kind: MemoryKind) -> None:
    told = bench.manager.allocate(kind, 1000, line=LineKind.TABLES)
    bench.watch.launch(bench.other.handle, reads=[(told.address, 1000)])
    told.record_stream(bench.other)
    told.close()
    assert bench.watch.hazards == []
    untold = bench.manager.allocate(kind, 1000, line=LineKind.TABLES)
    bench.watch.launch(bench.other.handle, reads=[(untold.address, 1000)], what="somebody")
    with pytest.raises(DeviceLost, match="somebody"):
        untold.close()


def test_pinned_blocks_are_not_handed_out_while_a_copy_reads_them(bench: Bench) -> None:
    target = bench.manager.gpu(PAGE, line=LineKind.TABLES)
    for _ in range(4):
        staging = bench.manager.pinned_pool(PAGE, line=LineKind.TABLES)
        bench.manager.copy(src=staging, dst=target)
        staging.close()
    bench.watch.device_sync()
    target.close()
    bench.close()


def test_sleep_waits_for_the_work_and_waking_memory_may_be_used(bench: Bench) -> None:
    virtual = bench.stream.device.virtual
    with scope("kv"):
        buffer = bench.manager.gpu(2 * PAGE, line=LineKind.KV)
    address = buffer.address
    for _ in range(3):
        bench.watch.launch(bench.other.handle, writes=[(address, 2 * PAGE)], what="forward")
        virtual.release("kv")
        virtual.materialize("kv")
    assert bench.watch.hazards == []
    bench.watch.device_sync()
    virtual.release("kv")
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        bench.watch.launch(bench.other.handle, reads=[(address, 8)], what="a graph that nobody stopped")


def test_during_a_capture_the_rooms_refuse_before_the_device_would_die(bench: Bench) -> None:
    arena = bench.arena()
    arena.commit(4 * PAGE)
    buffer = bench.manager.gpu(100, line=LineKind.TABLES)
    bench.watch.device_sync()
    with bench.watch.capturing(bench.stream.handle):
        for call in (
            lambda: arena.commit(8 * PAGE),
            lambda: arena.decommit(0),
            lambda: bench.manager.gpu(100, line=LineKind.TABLES),
            lambda: bench.manager.gpu_sync(100, line=LineKind.TABLES),
            lambda: bench.manager.pinned(100, line=LineKind.TABLES),
        ):
            with pytest.raises(CaptureError):
                call()
    buffer.close()
    arena.close()
    bench.close()


KINDS = (MemoryKind.GPU, MemoryKind.GPU_SYNC, MemoryKind.PINNED, MemoryKind.PINNED_POOL, MemoryKind.MANAGED)
STEPS = st.one_of(
    st.tuples(st.just("make"), st.sampled_from(KINDS), st.integers(1, 2 * PAGE)),
    st.tuples(st.just("use"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("copy"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("close"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("grow"), st.integers(1, 16), st.just(0)),
    st.tuples(st.just("trim"), st.just(0), st.just(0)),
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 25).flatmap(lambda size: st.lists(STEPS, min_size=size, max_size=size)))
def test_whatever_is_done_with_buffers_that_say_where_they_are_used_no_hazard(steps: list[tuple]) -> None:
    bench = Bench()
    arena, buffers = bench.arena(), []
    for name, first, second in steps:
        if name == "make":
            buffers.append(bench.manager.allocate(first, second, line=LineKind.TABLES))
        elif name == "grow":
            (arena.commit if first * PAGE > arena.committed_bytes else arena.decommit)(first * PAGE)
            bench.watch.launch(bench.other.handle, writes=[(arena.address, arena.committed_bytes)])
        elif name == "trim":
            bench.manager.trim_to(0)
        elif buffers:
            buffer = buffers[first % len(buffers)]
            if name == "use":
                # Readers alone: the order of writers is the business of whoever launches them.
                stream = bench.other if second else bench.stream
                if stream is bench.other:
                    _ordered(bench)
                bench.watch.launch(stream.handle, reads=[(buffer.address, buffer.size_bytes)])
                buffer.record_stream(stream)
            elif name == "copy":
                same = [one for one in buffers if one.size_bytes == buffer.size_bytes and one is not buffer]
                if same:
                    bench.other.sync()
                    bench.manager.copy(src=buffer, dst=same[second % len(same)])
            else:
                buffers.remove(buffer)
                buffer.close()
    for buffer in buffers:
        buffer.close()
    arena.close()
    bench.manager.trim_to(0, sync=True)
    bench.close()


def _ordered(bench: Bench) -> None:
    """The other stream waits for all that was asked of the manager's."""
    event = bench.watch.event_create()
    bench.watch.event_record(event, stream=bench.stream.handle)
    bench.watch.stream_wait(bench.other.handle, event)
    bench.watch.event_destroy(event)
