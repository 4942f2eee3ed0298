"""The manager beyond what every kind does alike: the ladder, forgotten buffers, captures, streams, and a model."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tonnage.buffers import Buffer, BufferManager, Device, Stream
from tonnage.buffers.scopes import pop_vm, push_vm
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import BufferOOM, CaptureError, DriverError, DriverOOM, DriverUnsupported, LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

MIB = 2**20
PAGE = 2**16
TABLES = LineKind.TABLES
KINDS = [kind for kind in MemoryKind if kind is not MemoryKind.IPC_NVLS]


class Recorder:
    """A driver that notes the calls on it, and plays streams that are being captured."""

    def __init__(self, driver: HostDriver) -> None:
        self.wrapped, self.calls, self.capturing = driver, [], set[int]()
        self.num_asked = 0  # whether a stream is being captured

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, kwargs.get("stream", args[0] if args else None)))
            return found(*args, **kwargs)

        return noted if callable(found) else found

    def stream_capturing(self, stream: int) -> bool:
        self.num_asked += 1
        return stream in self.capturing

    def pool_free(self, addr: int, *, stream: int) -> None:
        if stream in self.capturing:
            raise DriverError("pool_free", "INVALID_VALUE", "no memory of this graph")
        self.calls.append(("pool_free", stream))
        self.wrapped.pool_free(addr, stream=stream)


@pytest.fixture
def host():
    driver = HostDriver(16 * MIB, page_bytes=PAGE)
    yield driver
    assert [leak for leak in driver.close() if "pool" not in leak] == []


@pytest.fixture
def recorder(host: HostDriver) -> Recorder:
    return Recorder(host)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(0, 16 * MIB)


@pytest.fixture
def manager(host: HostDriver, ledger: Ledger):
    manager = BufferManager(Stream(Device(host)), ledger=ledger, owner="tests", trim_on_close=True)
    yield manager
    manager.close()


def live(ledger: Ledger) -> tuple[int, int]:
    entries = ledger.snapshot().entries
    return sum(entry.requested_bytes for entry in entries), sum(entry.num_live for entry in entries)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strict_seal_refuses_and_gives_the_memory_back(
    manager: BufferManager, ledger: Ledger, host: HostDriver, kind: MemoryKind
) -> None:
    ledger.seal(strict=True)
    with pytest.raises(LedgerError, match="'tests'"):
        manager.allocate(kind, MIB, line=TABLES)
    manager.trim_to(0)
    assert (host.used_bytes, live(ledger), host.leaks()) == (0, (0, 0), ())


def test_nvls_needs_a_group(manager: BufferManager) -> None:
    with pytest.raises(DriverUnsupported, match="ipc_nvls"):
        manager.allocate(MemoryKind.IPC_NVLS, 1, line=TABLES)


# the ladder


def test_the_pool_is_trimmed_before_plain_memory_is_refused(manager: BufferManager, host: HostDriver) -> None:
    manager.gpu(12 * MIB, line=TABLES).close()
    assert host.used_bytes == 12 * MIB  # the pool keeps it
    buffer = manager.gpu_sync(10 * MIB, line=TABLES)
    assert host.used_bytes == 10 * MIB
    buffer.close()


def test_callbacks_give_memory_and_the_retry_succeeds(manager: BufferManager) -> None:
    cache = [manager.gpu_sync(4 * MIB, line=TABLES) for _ in range(3)]
    asked = []

    def give(need: int) -> int:
        asked.append(need)
        cache.pop().close()
        return 4 * MIB

    manager.stream.device.pressure.register("cache", give)
    buffer = manager.gpu(7 * MIB, line=TABLES)
    assert (asked, len(cache)) == ([7 * MIB], 2)
    for one in (buffer, *cache):
        one.close()


def test_what_did_not_help_is_told(manager: BufferManager, ledger: Ledger) -> None:
    kept = manager.gpu_sync(4 * MIB, line=TABLES)
    ledger.open(owner="others", line=TABLES, memory=MemoryKind.GPU).add(6 * MIB, 6 * MIB)
    ledger.open(owner="host", line=TABLES, memory=MemoryKind.PINNED).add(99 * MIB, 99 * MIB)
    manager.stream.device.pressure.register("stingy", lambda _: 0)
    with pytest.raises(BufferOOM) as caught:
        manager.gpu(13 * MIB, line=TABLES)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.size_bytes, error.used_bytes, error.capacity_bytes) == (13 * MIB, 4 * MIB, 16 * MIB)
    assert (error.owner, error.stream, error.reserved_bytes) == ("tests", 0, 0)
    assert error.top_owners == (("others", 6 * MIB), ("tests", 4 * MIB))
    for rung in ("forgotten buffers", "stream 0x0 synchronised", "our pool gave", "waiting frees", "stingy gave 0",
                 "the retry failed"):  # fmt: skip
        assert rung in str(error)
    assert live(ledger)[1] == 3
    kept.close()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_tried_twice_and_no_more(ledger: Ledger, kind: MemoryKind) -> None:
    if kind is MemoryKind.CPU:
        pytest.skip("not asked of the driver")
    host = HostDriver(16 * MIB, page_bytes=PAGE)
    fault = FaultDriver(host)
    manager = BufferManager(Stream(Device(fault)), ledger=ledger, owner="tests")
    if kind is MemoryKind.GPU:
        manager.gpu(1, line=TABLES).close()
    fault.arm(1)
    manager.allocate(kind, 100, line=TABLES).close()
    assert fault.num_injected == 1
    manager.trim_to(0)
    fault.arm(1, forever=True)
    with pytest.raises(BufferOOM, match="INJECTED"):
        manager.allocate(kind, 100, line=TABLES)
    assert fault.num_injected == (4 if kind is MemoryKind.PINNED_POOL else 2)  # that pool tries a whole chunk first
    assert live(ledger) == (0, 0)


def test_no_host_memory_is_the_same_error(manager: BufferManager, ledger: Ledger) -> None:
    with pytest.raises(BufferOOM, match="locked memory"):
        manager.pinned(2**50, line=TABLES)
    with pytest.raises(BufferOOM, match="host memory") as caught:
        manager.cpu(2**50, line=TABLES)
    assert caught.value.capacity_bytes > 16 * MIB  # the host's, not the device's
    assert live(ledger) == (0, 0)


def test_a_pool_that_cannot_be_made_is_not_tried_again_until_asked(ledger: Ledger, caplog) -> None:
    host = HostDriver(16 * MIB, page_bytes=PAGE)
    fault = FaultDriver(host, error=DriverUnsupported)
    device = Device(fault)
    manager = BufferManager(Stream(device), ledger=ledger, owner="tests")
    fault.arm(1, calls=frozenset({"pool_create"}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            buffer = manager.gpu(100, line=TABLES)
            assert buffer.path == "synchronous"
            buffer.close()
    assert (fault.num_calls, len(caplog.records)) == (1, 1)
    assert "INJECTED" in (device.pool.absent or "")
    device.pool.reset_pool_probe()
    buffer = manager.gpu(100, line=TABLES)
    assert (buffer.path, device.pool.absent) == ("pool", None)
    buffer.close()
    manager.trim_to(0)
    assert host.used_bytes == 0


# the short way, which ``gpu`` goes for bytes on a line that it was asked for before


@pytest.fixture
def warm(manager: BufferManager) -> BufferManager:
    """Has been asked once, so that the next allocation goes the short way."""
    manager.gpu(100, line=TABLES).close()
    return manager


def test_the_short_way_books_what_the_long_way_books(warm: BufferManager, ledger: Ledger) -> None:
    short, tagged = warm.gpu(100, line=TABLES), warm.gpu(50, line=TABLES, tag="other")
    long = warm.allocate(MemoryKind.GPU, 100, line=TABLES)
    for attribute in ("path", "kind", "size_bytes", "capacity_bytes", "physical_bytes", "dtype", "shape", "used_on"):
        assert getattr(short, attribute) == getattr(long, attribute), attribute
    assert (type(short), short.account) == (type(long), long.account)
    assert live(ledger) == (250, 3)
    assert {(entry.tag, entry.physical_bytes) for entry in ledger.snapshot().entries} == {("", 200), ("other", 50)}
    for one in (short, tagged, long):
        one.close()
    assert [event.delta for event in ledger.events()] == [100, -100, 100, 50, 100, -100, -50, -100]
    assert {event.stream for event in ledger.events()} == {0}


def test_the_short_way_is_left_for_a_scope_and_by_a_closed_manager(warm: BufferManager) -> None:
    push_vm("test")
    try:
        buffer = warm.gpu(100, line=TABLES)
    finally:
        pop_vm()
    assert buffer.path == "virtual"
    buffer.close()
    buffer = warm.gpu(100, line=TABLES)
    assert buffer.path == "pool"
    buffer.close()
    warm.close()
    with pytest.raises(ValueError, match="is closed"):
        warm.gpu(100, line=TABLES)


def test_the_short_way_climbs_the_ladder_and_refuses_like_the_long_one(warm: BufferManager, ledger: Ledger) -> None:
    kept = warm.gpu_sync(10 * MIB, line=TABLES)
    warm.stream.device.pressure.register("cache", lambda _: kept.close() or 10 * MIB)
    buffer = warm.gpu(12 * MIB, line=TABLES)
    assert (buffer.path, buffer.size_bytes, live(ledger)) == ("pool", 12 * MIB, (12 * MIB, 1))
    with pytest.raises(BufferOOM, match="the retry failed"):
        warm.gpu(12 * MIB, line=TABLES)
    with pytest.raises(ValueError, match="-1"):
        warm.gpu(-1, line=TABLES)
    assert live(ledger) == (12 * MIB, 1)
    buffer.resize(100)
    buffer.close()
    assert live(ledger) == (0, 0)


def test_a_call_that_a_decorator_puts_in_place_later_is_what_is_called(ledger: Ledger) -> None:
    fault = FaultDriver(HostDriver(16 * MIB, page_bytes=PAGE))
    manager = BufferManager(Stream(Device(fault)), ledger=ledger, owner="tests")
    manager.gpu(100, line=TABLES).close()
    fault.arm(1, calls=frozenset({"pool_alloc"}), error=DriverError)
    with pytest.raises(DriverError, match="INJECTED"):
        manager.gpu(100, line=TABLES)
    assert (fault.num_injected, live(ledger)) == (1, (0, 0))


# buffers that nobody closes, and frees that fail


def test_a_forgotten_buffer_is_closed_by_the_next_call(manager: BufferManager, ledger: Ledger, caplog) -> None:
    for kind in KINDS:
        manager.allocate(kind, 1000, line=TABLES)
    gc.collect()
    with caplog.at_level(logging.WARNING):
        manager.gpu(10, line=TABLES).close()
    assert live(ledger) == (0, 0)
    assert caplog.text.count("was never closed") >= len(KINDS)


def test_a_free_that_fails_leaves_the_buffer_and_finalisers_log_it(ledger: Ledger, caplog) -> None:
    host = HostDriver(16 * MIB, page_bytes=PAGE)
    fault = FaultDriver(host)
    manager = BufferManager(Stream(Device(fault)), ledger=ledger, owner="tests")
    buffer = manager.gpu(1000, line=TABLES)
    for _ in range(2):
        fault.arm(1, calls=frozenset({"pool_free"}))
        with pytest.raises(DriverError):
            buffer.close()
        assert (buffer.size_bytes, live(ledger)) == (1000, (1000, 1))
    fault.arm(1, calls=frozenset({"pool_free"}))
    del buffer
    with caplog.at_level(logging.WARNING):
        manager.stats()
    assert "could not be closed" in caplog.text
    manager.stats()
    assert live(ledger) == (0, 0)


# streams and captures


def test_a_free_is_ordered_behind_the_recorded_streams(recorder: Recorder, ledger: Ledger) -> None:
    device = Device(recorder)  # type: ignore[arg-type]
    own, other = Stream.create(device), Stream.create(device)
    manager = BufferManager(own, ledger=ledger, owner="tests")
    buffer = manager.gpu(100, line=TABLES)
    buffer.record_stream(other)
    buffer.record_stream(own)
    recorder.calls.clear()
    buffer.close()
    names = [name for name, _ in recorder.calls]
    assert names == ["event_create", "event_record", "stream_wait", "event_destroy", "pool_free"]
    assert recorder.calls[1] == ("event_record", other.handle)
    assert recorder.calls[2] == ("stream_wait", own.handle)
    assert recorder.calls[4] == ("pool_free", own.handle)
    manager.trim_to(0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not MemoryKind.CPU])
def test_nothing_is_allocated_or_freed_into_a_capture(recorder: Recorder, ledger: Ledger, kind: MemoryKind) -> None:
    device = Device(recorder)  # type: ignore[arg-type]
    stream = Stream.create(device)
    manager = BufferManager(stream, ledger=ledger, owner="tests")
    before = manager.allocate(kind, 100, line=TABLES)
    manager.set_zero(before)
    before.record_stream(stream)
    recorder.capturing.add(stream.handle)
    if kind is not MemoryKind.PINNED_POOL:
        with pytest.raises(CaptureError, match=f"stream {stream.handle:#x}"):
            manager.allocate(kind, 100, line=TABLES)
    with pytest.raises(CaptureError):
        before.close()
    assert (before.size_bytes, live(ledger)) == (100, (100, 1))
    recorder.capturing.clear()
    before.close()
    manager.trim_to(0)


def test_a_stream_that_nobody_else_knows_is_not_asked_whether_it_is_captured(
    recorder: Recorder, ledger: Ledger
) -> None:
    device = Device(recorder)  # type: ignore[arg-type]
    stream = Stream.create(device)
    manager = BufferManager(stream, ledger=ledger, owner="tests")

    def num_asked() -> int:
        """By three allocations: one of a new account, one as at every step, one of a shape."""
        recorder.num_asked = 0
        for shape in (100, 100, (2, 50)):
            manager.gpu(shape, line=TABLES).close()
        return recorder.num_asked

    assert num_asked() == 0
    _ = stream.handle
    assert num_asked() == 3
    manager = BufferManager(Stream(device, stream.bare_handle), ledger=ledger, owner="tests")
    assert num_asked() == 3  # made from a handle, which others have too
    manager.trim_to(0)


@pytest.mark.parametrize("how", ["a copy waits for an event", "a free waits for a stream"])
def test_a_stream_that_waited_for_another_may_be_captured_with_it(recorder: Recorder, ledger: Ledger, how: str) -> None:
    """So a capture spreads without anybody knowing our handle."""
    device = Device(recorder)  # type: ignore[arg-type]
    stream, other = Stream.create(device), Stream.create(device)
    manager = BufferManager(stream, ledger=ledger, owner="tests")
    buffer, source = manager.gpu(100, line=TABLES), manager.gpu(100, line=TABLES)
    manager.copy(src=source, dst=buffer)
    assert not stream.may_be_captured
    if how.startswith("a copy"):
        event = recorder.event_create()
        recorder.event_record(event, stream=other.bare_handle)
        manager.copy(src=source, dst=buffer, wait=event)
    else:
        buffer.record_stream(other)
        buffer.close()
    assert stream.may_be_captured
    recorder.capturing.add(stream.bare_handle)
    with pytest.raises(CaptureError):
        manager.gpu(100, line=TABLES)
    recorder.capturing.clear()
    for one in (buffer, source):
        one.close()
    manager.trim_to(0)


def test_streams_of_one_handle_are_equal(host: HostDriver) -> None:
    device = Device(host)
    stream = Stream.create(device)
    assert stream == Stream(device, stream.bare_handle)
    assert stream != Stream(device)
    assert stream != Stream(Device(host), stream.bare_handle)
    assert len({stream, Stream(device, stream.bare_handle), Stream(device)}) == 2


def test_graph_memory_is_asked_for_by_name(host: HostDriver, ledger: Ledger) -> None:
    class Capturing(Recorder):
        def pool_free(self, addr: int, *, stream: int) -> None:
            self.wrapped.pool_free(addr, stream=stream)

    driver = Capturing(host)
    device = Device(driver)  # type: ignore[arg-type]
    stream = Stream.create(device)
    manager = BufferManager(stream, ledger=ledger, owner="tests")
    driver.capturing.add(stream.handle)
    with pytest.raises(CaptureError, match="cannot be made now"):
        manager.gpu(100, line=TABLES, graph_memory=True)
    driver.capturing.clear()
    plain = manager.gpu(100, line=TABLES, graph_memory=True)
    assert plain.path == "pool"
    driver.capturing.add(stream.handle)
    buffer = manager.gpu(100, line=TABLES, graph_memory=True)
    assert (buffer.path, live(ledger), ledger.accounted_bytes) == ("graph", (200, 2), 100)
    buffer.close()
    driver.capturing.clear()
    plain.close()
    assert live(ledger) == (0, 0)
    manager.trim_to(0)


def test_a_pinned_block_waits_for_the_copy_that_reads_it(recorder: Recorder, ledger: Ledger) -> None:
    manager = BufferManager(Stream(Device(recorder)), ledger=ledger, owner="tests")  # type: ignore[arg-type]
    pinned, device = manager.pinned_pool(100, line=TABLES), manager.gpu(100, line=TABLES)
    other = manager.cpu(100, line=TABLES)
    manager.copy(src=pinned, dst=other)
    assert pinned.used_on == other.used_on == ()  # between host memories nothing is queued
    manager.copy(src=pinned, dst=device)
    recorder.event_done = lambda _: False  # type: ignore[method-assign]
    pinned.close()
    stats = manager.stream.device.pinned.stats()
    assert (stats.used_bytes, stats.waiting_bytes) == (0, 256)
    del recorder.event_done
    manager.trim_to(0)
    assert manager.stream.device.pinned.stats().reserved_bytes == 0
    for one in (device, other):
        one.close()
    manager.trim_to(0)


def test_copies_with_pageable_memory_are_waited_for(recorder: Recorder, ledger: Ledger) -> None:
    manager = BufferManager(Stream(Device(recorder)), ledger=ledger, owner="tests")  # type: ignore[arg-type]
    pageable, pinned = manager.cpu(100, line=TABLES), manager.pinned(100, line=TABLES)
    device = manager.gpu(100, line=TABLES)
    for host, waits in ((pageable, True), (pinned, False)):
        recorder.calls.clear()
        manager.copy(src=device, dst=host)
        assert ("stream_sync" in [name for name, _ in recorder.calls]) == waits
    for one in (pageable, pinned, device):
        one.close()
    manager.trim_to(0)


def test_managed_memory_goes_through_the_stream_once_a_stream_used_it(recorder: Recorder, ledger: Ledger) -> None:
    manager = BufferManager(Stream(Device(recorder)), ledger=ledger, owner="tests")  # type: ignore[arg-type]
    buffer = manager.managed(100, line=TABLES)
    recorder.calls.clear()
    manager.set_mem(buffer, 5)
    assert recorder.calls == []
    assert ctypes.string_at(buffer.address, 100) == b"\x05" * 100
    buffer.record_stream(manager.stream)
    manager.set_mem(buffer, 6)
    assert recorder.calls == [("fill", 0)]
    buffer.close()


def test_stats_and_trim_do_not_wait_unless_told(recorder: Recorder, ledger: Ledger) -> None:
    manager = BufferManager(Stream(Device(recorder)), ledger=ledger, owner="tests")  # type: ignore[arg-type]
    other = Stream.create(manager.stream.device)
    manager.gpu(100, line=TABLES).close()
    waits: Callable[[], list[object]] = lambda: [on for name, on in recorder.calls if name.endswith("sync")]  # noqa: E731
    recorder.calls.clear()
    manager.stats()
    manager.trim_to(PAGE)
    assert waits() == []
    manager.stats(sync=True)
    assert waits() == [0]
    manager.trim_to(0, sync=True)
    assert waits() == [0, 0, other.handle]


# a model


class ManagerMachine(RuleBasedStateMachine):
    """Buffers against a dictionary of what is in them; the ledger against the buffers; the device never overfull."""

    @initialize(without=st.sets(st.sampled_from(["pools", "vmm", "managed"])))
    def start(self, without: set[str]) -> None:
        self.host = HostDriver(32 * PAGE, page_bytes=PAGE, without=frozenset(without))
        self.without, self.depth = without, 0
        self.ledger = Ledger(0, 32 * PAGE)
        self.device = Device(self.host)
        self.device.pinned.chunk_bytes = PAGE
        self.manager = BufferManager(Stream(self.device), ledger=self.ledger, owner="tests")
        self.buffers: dict[Buffer, bytes] = {}

    def pick(self, index: int) -> Buffer:
        """Not drawn by Hypothesis, which would keep a forgotten buffer alive."""
        return list(self.buffers)[index % len(self.buffers)]

    def may_have(self, kind: MemoryKind) -> bool:
        if kind is MemoryKind.MANAGED:
            return "managed" not in self.without
        return True

    @rule(kind=st.sampled_from(KINDS), size=st.integers(0, 9 * PAGE), byte=st.integers(0, 255))
    def make(self, kind: MemoryKind, size: int, byte: int) -> None:
        try:
            if kind is MemoryKind.GPU:
                buffer = self.manager.gpu(size, line=TABLES)
            else:
                buffer = self.manager.allocate(kind, size, line=TABLES)
        except BufferOOM:
            return
        except DriverUnsupported:
            assert not self.may_have(kind)
            return
        self.manager.set_mem(buffer, byte)
        self.buffers[buffer] = bytes([byte]) * size

    @precondition(lambda self: self.buffers)
    @rule(index=st.integers(0, 99), size=st.integers(0, 9 * PAGE))
    def resize(self, index: int, size: int) -> None:
        buffer = self.pick(index)
        kept, capacity = self.buffers[buffer], buffer.capacity_bytes
        try:
            buffer.resize(size)
        except BufferOOM:
            assert size > capacity
            assert (buffer.address, buffer.size_bytes, buffer.capacity_bytes) == (0, 0, 0)
            self.buffers[buffer] = b""
            return
        if size <= len(kept):
            self.buffers[buffer] = kept[:size]
        else:
            self.manager.set_mem(buffer, 1)
            self.buffers[buffer] = b"\x01" * size

    @precondition(lambda self: self.buffers)
    @rule(index=st.integers(0, 99), kind=st.sampled_from(KINDS))
    def copy(self, index: int, kind: MemoryKind) -> None:
        src = self.pick(index)
        try:
            self.buffers[self.manager.copy_from(src, kind, line=TABLES)] = self.buffers[src]
        except (BufferOOM, DriverUnsupported):
            return

    @precondition(lambda self: self.buffers)
    @rule(index=st.integers(0, 99), forget=st.booleans())
    def close(self, index: int, forget: bool) -> None:
        buffer = self.pick(index)
        del self.buffers[buffer]
        if not forget:
            buffer.close()

    @rule()
    def enter(self) -> None:
        push_vm("test")
        self.depth += 1

    @precondition(lambda self: self.depth)
    @rule()
    def leave(self) -> None:
        pop_vm()
        self.depth -= 1

    @rule(keep=st.integers(0, 20 * PAGE))
    def trim(self, keep: int) -> None:
        before = self.manager.stats().reserved_bytes
        self.manager.trim_to(keep, sync=True)
        assert self.manager.stats().reserved_bytes <= before

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "host"):
            return
        stats = self.manager.stats()  # closes what was forgotten
        self.device.fences.reap()
        for buffer, expected in self.buffers.items():
            assert buffer.size_bytes == len(expected) <= buffer.capacity_bytes
            assert buffer.size_bytes == 0 or ctypes.string_at(buffer.address, buffer.size_bytes) == expected
        held = [buffer for buffer in self.buffers if buffer.capacity_bytes]
        assert live(self.ledger) == (sum(buffer.capacity_bytes for buffer in held), len(held))
        assert stats.reserved_bytes >= stats.used_bytes
        assert self.host.used_bytes <= self.host.capacity_bytes

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for _ in range(self.depth):
            pop_vm()
        for buffer in self.buffers:
            buffer.close()
        self.manager.trim_to(0, sync=True)
        assert live(self.ledger) == (0, 0)
        assert self.host.close() == ()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=30, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_full_device_may_be_asked_for_its_pool_again(ledger: Ledger) -> None:
    host = HostDriver(16 * MIB, page_bytes=PAGE)
    fault = FaultDriver(host, error=DriverOOM)
    device = Device(fault)
    manager = BufferManager(Stream(device), ledger=ledger, owner="tests")
    fault.arm(1, calls=frozenset({"pool_create"}))
    for path in ("synchronous", "pool"):
        buffer = manager.gpu(1, line=TABLES)
        assert (buffer.path, device.pool.absent) == (path, None)
        buffer.close()
    manager.trim_to(0)
    assert host.used_bytes == 0


def test_pinned_memory_that_was_a_tensor_waits_for_every_stream(recorder: Recorder, ledger: Ledger) -> None:
    manager = BufferManager(Stream(Device(recorder)), ledger=ledger, owner="tests")  # type: ignore[arg-type]
    other = Stream.create(manager.stream.device)
    for kind in (MemoryKind.PINNED, MemoryKind.PINNED_POOL):
        buffer = manager.allocate(kind, 100, line=TABLES)
        assert not buffer.exports.is_alive
        recorder.calls.clear()
        buffer.close()
        assert {on for name, on in recorder.calls if name == "event_record"} == {0, other.handle}
    manager.trim_to(0)
