"""The log of what a device was asked: names instead of numbers, replay on another device, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.device.trace import TraceDriver, replay
from tonnage.errors import DriverError, DriverOOM

PAGE = 64 * 1024


@pytest.fixture
def host() -> Iterator[HostDriver]:
    host = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield host
    host.close()


@pytest.fixture
def driver(host: HostDriver) -> TraceDriver:
    return TraceDriver(host)


def test_ranges_and_handles_are_named_in_the_order_they_appear(driver: TraceDriver) -> None:
    first, second = driver.va_reserve(4 * PAGE, align=PAGE), driver.va_reserve(2 * PAGE, align=2 * PAGE)
    handle = driver.phys_create(PAGE)
    driver.map(second + PAGE, PAGE, handle)
    driver.set_access(second + PAGE, PAGE, peers=())
    driver.fill(second + PAGE + 100, 7, 8, stream=0)
    driver.va_free(first, 4 * PAGE)
    assert driver.log == [
        "va_reserve(4p, align=1p) -> va0",
        "va_reserve(2p, align=2p) -> va1",
        "phys_create(1p) -> handle0",
        "map(va1+1p, 1p, handle0)",
        "set_access(va1+1p, 1p)",
        f"fill(va1+{PAGE + 100}, 7, 8, stream=stream0)",
        "va_free(va0, 4p)",
    ]
    assert driver.text() == "\n".join(driver.log)


def test_every_kind_of_memory_has_its_own_names(driver: TraceDriver) -> None:
    stream, event, pool = driver.stream_create(priority=-1), driver.event_create(), driver.pool_create()
    block = driver.pool_alloc(pool, 100, stream=stream)
    plain, managed, host = driver.mem_alloc(100), driver.managed_alloc(2 * PAGE), driver.host_alloc(5, flags=1)
    driver.copy(dst=plain, src=block, size=100, stream=stream)
    driver.event_record(event, stream=stream)
    driver.pool_free(block, stream=stream)
    for addr in (managed, plain):
        driver.mem_free(addr)
    driver.host_free(host)
    driver.pool_destroy(pool)
    assert driver.log == [
        "stream_create(priority=-1) -> stream1",
        "event_create() -> event0",
        "pool_create() -> pool0",
        "pool_alloc(pool0, 100, stream=stream1) -> block0",
        "mem_alloc(100) -> mem0",
        "managed_alloc(2p) -> managed0",
        "host_alloc(5, flags=1) -> host0",
        "copy(mem0, block0, 100, stream=stream1)",
        "event_record(event0, stream=stream1)",
        "pool_free(block0, stream=stream1)",
        "mem_free(managed0)",
        "mem_free(mem0)",
        "host_free(host0)",
        "pool_destroy(pool0)",
    ]


def test_errors_are_logged_by_kind_and_go_on(driver: TraceDriver) -> None:
    with pytest.raises(DriverOOM):
        driver.phys_create(1000 * PAGE)
    with pytest.raises(DriverError):
        driver.phys_release(77)
    addr = driver.mem_alloc(1)
    driver.mem_free(addr)
    with pytest.raises(DriverError):
        driver.mem_free(addr)
    assert driver.log == [
        "phys_create(1000p) -> ! DriverOOM",
        "phys_release(handle?77) -> ! DriverError",
        "mem_alloc(1) -> mem0",
        "mem_free(mem0)",
        "mem_free(mem0) -> ! DriverError",
    ]


def test_an_address_given_out_again_has_a_new_name(driver: TraceDriver) -> None:
    pool = driver.pool_create()
    addresses = []
    for _ in range(2):
        addresses.append(driver.pool_alloc(pool, 100, stream=0))
        driver.pool_free(addresses[-1], stream=0)
    assert addresses[0] == addresses[1]
    assert driver.log[-1] == "pool_free(block1, stream=stream0)"


def test_questions_are_not_logged_and_sizes_can_stay_bytes(host: HostDriver) -> None:
    driver = TraceDriver(host, in_pages=False)
    driver.mem_info()
    driver.capabilities()
    assert driver.log == []
    addr = driver.va_reserve(2 * PAGE, align=PAGE)
    driver.map(addr + PAGE, PAGE, driver.phys_create(PAGE))
    assert driver.log == [
        "va_reserve(0x20000, align=0x10000) -> va0",
        "phys_create(0x10000) -> handle0",
        "map(va0+0x10000, 0x10000, handle0)",
    ]


def test_streams_made_elsewhere_are_named_when_they_appear(driver: TraceDriver) -> None:
    for handle in (0xABC, 0xDEF, 0xABC):
        with pytest.raises(DriverError):
            driver.stream_sync(handle)
    driver.stream_create(priority=0)
    names = [line.partition("(")[2].partition(")")[0] for line in driver.log[:3]]
    assert names == ["stream1", "stream2", "stream1"]
    assert driver.log[-1].endswith("-> stream3")


def test_a_log_can_be_replayed_on_a_device_with_other_pages(driver: TraceDriver) -> None:
    base = driver.va_reserve(4 * PAGE, align=PAGE)
    handles = [driver.phys_create(PAGE, exportable=True) for _ in range(2)]
    for index, handle in enumerate(handles):
        driver.map(base + index * PAGE, PAGE, handle)
    driver.set_access(base, 2 * PAGE)
    driver.fill(base + 8, 3, 100, stream=driver.stream_create(priority=0))
    with pytest.raises(DriverError):
        driver.va_free(base, 4 * PAGE)
    driver.unmap(base, 2 * PAGE)
    with pytest.raises(DriverError):
        driver.mem_free(12345)
    other = HostDriver(64 * 4096, page_bytes=4096)
    assert replay(driver.log, other) == driver.log
    assert other.used_bytes == 2 * 4096
    assert len(other.close()) == 3  # the log released neither its handles nor its reservation


def test_a_replay_shows_where_another_device_answers_otherwise(driver: TraceDriver) -> None:
    driver.phys_create(10 * PAGE)
    driver.phys_create(PAGE)
    small = HostDriver(5 * PAGE, page_bytes=PAGE)
    assert replay(driver.log, small) == ["phys_create(10p) -> ! DriverOOM", "phys_create(1p) -> handle0"]
    small.close()


@pytest.mark.parametrize(
    "line", ["nonsense", "reboot()", "phys_release(handle7)", "fill(?140000, 0, 8, stream=stream0)"]
)
def test_what_cannot_be_replayed_is_refused(host: HostDriver, line: str) -> None:
    with pytest.raises(ValueError, match=r"replayed|made by no line"):
        replay([line], host)


def test_it_sees_what_is_injected_below_it_and_not_above(host: HostDriver) -> None:
    below = TraceDriver(FaultDriver(host, 1))
    with pytest.raises(DriverOOM):
        below.mem_alloc(1)
    assert below.log == ["mem_alloc(1) -> ! DriverOOM"]
    trace = TraceDriver(host)
    with pytest.raises(DriverOOM):
        FaultDriver(trace, 1).mem_alloc(1)
    assert trace.log == []


SIZES = st.integers(1, 3)
STEPS = st.one_of(
    st.tuples(st.just("alloc"), st.integers(1, 3 * PAGE)),
    st.tuples(st.just("free"), st.integers(0, 5)),
    st.tuples(st.just("create"), SIZES),
    st.tuples(st.just("release"), st.integers(0, 5)),
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30).flatmap(lambda size: st.lists(STEPS, min_size=size, max_size=size)))
def test_whatever_was_done_replays_to_the_same_log(steps: list[tuple[str, int]]) -> None:
    host, other = HostDriver(16 * PAGE, page_bytes=PAGE), HostDriver(16 * PAGE, page_bytes=PAGE)
    driver = TraceDriver(host)
    addresses, handles = [], []
    for name, number in steps:
        try:
            if name == "alloc":
                addresses.append(driver.mem_alloc(number))
            elif name == "create":
                handles.append(driver.phys_create(number * PAGE))
            elif name == "free":
                driver.mem_free(addresses[number % len(addresses)] if addresses else 0)
            else:
                driver.phys_release(handles[number % len(handles)] if handles else 0)
        except DriverError:
            pass
    assert replay(driver.log, other) == driver.log
    assert (other.used_bytes, len(other.leaks())) == (host.used_bytes, len(host.leaks()))
    host.close()
    other.close()
