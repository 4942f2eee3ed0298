"""Fences: announced captures, streams that are closed, actions that fail, and finalisers in the middle of it all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from finalisers import at_every_step, within_seconds

from tonnage.buffers.device import Device
from tonnage.buffers.fences import Fences
from tonnage.buffers.manager import BufferManager
from tonnage.buffers.scopes import ScopeConfig
from tonnage.buffers.stream import Stream
from tonnage.device.decorator import DriverDecorator
from tonnage.device.fault import FaultDriver
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver
from tonnage.errors import CaptureError, DeviceLost, DriverError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

PAGE = 2**16
TABLES = LineKind.TABLES
PLAIN = (MemoryKind.GPU_SYNC, MemoryKind.PINNED, MemoryKind.PINNED_POOL, MemoryKind.MANAGED)


class Interrupted(DriverDecorator):
    """Runs what a finaliser would, once, in the middle of a call."""

    call: str
    finaliser: Callable[[], object] | None

    def __init__(self, driver: HostDriver, call: str) -> None:
        super().__init__(driver)
        self.call, self.finaliser = call, None

    def _around(self, call: str) -> Callable[..., Any] | None:
        if call != self.call:
            return None

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            finaliser, self.finaliser = self.finaliser, None
            if finaliser is not None:
                finaliser()
            return getattr(self.wrapped, call)(*args, **kwargs)

        return interrupted


@pytest.fixture
def host():
    driver = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield driver
    driver.close()


def manager_of(device: Device, stream: Stream | None = None) -> BufferManager:
    return BufferManager(stream or Stream.create(device), ledger=Ledger(0, 64 * PAGE), owner="tests")


def virtual(device: Device, stream: Stream) -> Any:
    return device.virtual.allocate(PAGE, config=ScopeConfig(tag="kv"), account=None, owner="kv", stream=stream)


# captures on streams that nobody registered


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_memory_is_neither_got_nor_freed_while_an_unknown_stream_is_captured(host, kind) -> None:
    driver = HazardDriver(host, strict=False)
    device = Device(driver)
    manager, foreign = manager_of(device), driver.stream_create(priority=0)
    held = manager.allocate(kind, 4096, line=TABLES)
    held.record_stream(manager.stream)
    with device.graphs.capture("decode"), driver.capturing(foreign):
        with pytest.raises(CaptureError, match="'decode'"):
            manager.allocate(kind, 4096, line=TABLES)
        with pytest.raises(CaptureError, match="'decode'"):
            held.close()
    assert driver.hazards == []
    held.close()
    manager.allocate(kind, 4096, line=TABLES).close()


def test_nothing_waits_or_edits_while_an_unknown_stream_is_captured(host) -> None:
    driver = HazardDriver(host, strict=False)
    device = Device(driver)
    stream, foreign = Stream.create(device), driver.stream_create(priority=0)
    made = virtual(device, stream)
    calls: list[Callable[[], object]] = [
        device.fences.mark,
        device.fences.wait_idle,
        device.fences.quiesce,
        lambda: device.fences.quiesce(timeout_s=1),
        lambda: virtual(device, stream),
        lambda: device.virtual.release("kv"),
        lambda: made.free(sync=True),
        stream.close,
    ]
    with device.graphs.capture("decode"), driver.capturing(foreign):
        for call in calls:
            with pytest.raises(CaptureError, match="'decode'"):
                call()
    assert driver.hazards == []
    device.graphs.destroy("decode")
    for call in calls:
        call()


def test_a_capture_that_stream_0_would_wait_for_is_heeded(host, monkeypatch) -> None:
    """The driver says of stream 0 alone that a stream nobody registered, of the kind that it waits for, is captured."""
    device = Device(host)
    captured, alloc, num_asked = False, host.pool_alloc, [0]
    monkeypatch.setattr(host, "stream_capturing", lambda stream: captured and stream == 0)
    monkeypatch.setattr(host, "pool_alloc", lambda *args, **kw: num_asked.append(1) or alloc(*args, **kw))
    manager = manager_of(device, Stream(device))
    manager.gpu(64, line=TABLES).close()
    captured = True
    with pytest.raises(CaptureError, match="stream 0x0"):
        manager.gpu(64, line=TABLES)
    assert sum(num_asked) == 1, "asking the driver would end the capture"
    with pytest.raises(CaptureError, match="stream 0x0"):
        manager.allocate(MemoryKind.GPU_SYNC, 64, line=TABLES)
    with pytest.raises(CaptureError, match="stream 0x0"):
        device.fences.quiesce()


# streams that are closed


def test_a_stream_is_closed_after_its_work(host) -> None:
    driver = HazardDriver(host, strict=False)
    device = Device(driver)
    home, side = Stream.create(device), Stream.create(device)
    made = virtual(device, home)
    driver.launch(side.handle, writes=[(made.address, PAGE)], what="a step")
    side.close()
    made.free(sync=True)
    assert driver.hazards == []
    assert side.bare_handle not in device.fences.streams


@pytest.mark.parametrize("call", ["stream_sync", "stream_destroy"])
def test_a_stream_that_is_not_closed_stays_registered(host, call) -> None:
    fault = FaultDriver(host)
    device = Device(fault)
    stream = Stream.create(device)
    fault.arm(1, calls=frozenset({call}))
    with pytest.raises(DriverError):
        stream.close()
    assert stream.bare_handle in device.fences.streams
    stream.close()
    assert stream.bare_handle not in device.fences.streams


@pytest.mark.parametrize("kind", PLAIN)
def test_what_was_recorded_on_a_closed_stream_is_freed(host, kind) -> None:
    device = Device(host)
    manager, side = manager_of(device), Stream.create(device)
    made = manager.allocate(kind, 4096, line=TABLES)
    made.record_stream(side)
    side.close()
    made.close()
    assert made.base == 0


def test_a_stream_that_was_forgotten_is_asked_for_nothing_when_its_owner_destroyed_it(host) -> None:
    device = Device(host)
    manager, foreign = manager_of(device), host.stream_create(priority=0)
    manager.gpu_sync(64, line=TABLES).record_stream(foreign)
    device.fences.forget(foreign)
    host.stream_destroy(foreign)
    assert device.fences.quiesce(timeout_s=1)
    assert device.fences.mark().passed
    manager.trim_to(0, sync=True)
    manager.gpu_sync(64, line=TABLES).close()


def test_a_closed_stream_counts_as_stream_0(host) -> None:
    """So a mark for memory whose stream is gone stands behind what is asked of stream 0 in its place."""
    driver = HazardDriver(host, strict=False)
    device = Device(driver)
    stream = Stream.create(device)
    assert device.fences.usable(stream.bare_handle) == stream.bare_handle
    stream.close()
    assert device.fences.usable(stream.bare_handle) == 0
    address = driver.mem_alloc(PAGE)
    driver.launch(0, writes=[(address, PAGE)], what="a restore")
    mark = device.fences.mark(stream.bare_handle, 0)
    assert mark.wait(timeout_s=5)
    driver.mem_free(address)
    assert driver.hazards == []


# actions that fail


class Passed:
    passed = True


def test_an_action_that_failed_runs_again_and_is_dropped_when_it_fails_twice(host, caplog) -> None:
    fences, ran = Fences(host), []

    def fails() -> None:
        ran.append("bad")
        raise DriverError("event_destroy", "INVALID_HANDLE", "no event 0x5")

    fences.after(Passed(), fails)  # type: ignore[arg-type]
    fences.after(Passed(), lambda: ran.append("good"))  # type: ignore[arg-type]
    with pytest.raises(DriverError, match="no event"):
        fences.reap()
    assert (ran, fences.num_waiting) == (["bad"], 2)
    assert fences.reap() == 1
    assert (ran, fences.num_waiting) == (["bad", "bad", "good"], 0)
    assert "given up" in caplog.text
    assert "no event 0x5" in caplog.text


def test_a_failure_that_passes_costs_nothing(host) -> None:
    fault = FaultDriver(host)
    fences = Fences(fault)
    address = fault.mem_alloc(PAGE)
    fences.after(fences.mark(), lambda: fault.mem_free(address))
    fault.arm(1, calls=frozenset({"mem_free"}))
    with pytest.raises(DriverError):
        fences.reap()
    assert fences.reap() == 1
    assert host.leaks() == ()


def test_an_interrupt_is_nobodys_failure(host) -> None:
    fences, left = Fences(host), [KeyboardInterrupt, KeyboardInterrupt, KeyboardInterrupt]

    def interrupted() -> None:
        if left:
            raise left.pop()

    fences.after(fences.mark(), interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            fences.reap()
        assert fences.num_waiting == 1
    assert fences.reap() == 1


def test_on_a_lost_device_nothing_is_tried_twice(host) -> None:
    fences, ran = Fences(host), []

    def lost() -> None:
        ran.append(1)
        raise DeviceLost("mem_free", "ILLEGAL_ADDRESS", "gone")

    fences.after(Passed(), lost)  # type: ignore[arg-type]
    with pytest.raises(DeviceLost):
        fences.reap()
    assert (fences.reap(), fences.num_waiting, ran) == (0, 0, [1])


# finalisers


@pytest.mark.parametrize("call", ["event_done", "event_destroy"])
def test_a_finaliser_may_free_and_reap_in_the_middle_of_reap(host, call) -> None:
    driver = Interrupted(host, call)
    device = Device(driver)
    stream = Stream.create(device)
    first, second = virtual(device, stream), virtual(device, stream)
    first.free()

    def finaliser() -> None:
        second.free()
        device.fences.reap()
        virtual(device, stream).free(sync=True)

    driver.finaliser = finaliser
    within_seconds(device.fences.reap)
    assert driver.finaliser is None
    device.fences.reap()
    assert (device.fences.num_waiting, host.used_bytes) == (0, 0)


def test_a_finaliser_may_free_and_reap_anywhere_inside_the_fences(host) -> None:
    """Without an event that is not passed yet, and with one: a not yet passed mark goes back in line."""
    fences = Fences(host)

    def scenario() -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
        ran: list[str] = []
        early, late = Passed(), Passed()
        late.passed = False
        fences.after(early, lambda: ran.append("early"))  # type: ignore[arg-type]
        fences.after(late, lambda: ran.append("late"))  # type: ignore[arg-type]

        def work() -> None:
            fences.register(stream)
            fences.quiesce(timeout_s=5)
            fences.forget(stream)

        def finaliser() -> None:
            fences.after(fences.mark(), lambda: ran.append("freed"))
            fences.reap()
            late.passed = True

        def check() -> None:
            fences.reap()
            assert (sorted(ran), fences.num_waiting) == (["early", "freed", "late"], 0)
            assert fences.streams == (0,)
            assert host._events == set()

        stream = host.stream_create(priority=0)
        return work, finaliser, check

    assert at_every_step("buffers/fences.py", scenario) > 100


def test_a_finaliser_that_allocates_gets_the_pool_that_is_just_being_made(host, monkeypatch) -> None:
    made: set[int] = set()
    create, destroy = host.pool_create, host.pool_destroy
    monkeypatch.setattr(host, "pool_create", lambda: made.add(pool := create()) or pool)
    monkeypatch.setattr(host, "pool_destroy", lambda pool: made.remove(pool) or destroy(pool))
    driver = Interrupted(host, "pool_create")
    device = Device(driver)
    found: list[int | None] = []
    driver.finaliser = lambda: found.append(device.pool.ensure())
    within_seconds(lambda: found.append(device.pool.ensure()))
    assert len(set(found)) == 1
    assert [*made] == found[:1], "one pool, and the other is given back"


def test_a_finaliser_gets_the_part_that_is_just_being_made(host, monkeypatch) -> None:
    from tonnage.buffers import pool

    device, found = Device(host), []
    init = pool.DevicePool.__init__

    def interrupted(self: pool.DevicePool, driver: HostDriver) -> None:
        monkeypatch.setattr(pool.DevicePool, "__init__", init)
        found.append(device.pool)
        init(self, driver)

    monkeypatch.setattr(pool.DevicePool, "__init__", interrupted)
    found.append(device.pool)
    assert found[0] is found[1] is device.pool


def test_threads_that_reap_at_once_run_every_action_once(host) -> None:
    fences, ran = Fences(host), []
    for number in range(500):
        fences.after(fences.mark(), lambda number=number: ran.append(number))
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(fences.reap())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fences.reap()
    assert sorted(ran) == list(range(500))
