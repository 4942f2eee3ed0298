"""What every driver promises, whatever the device: one suite over the table of drivers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tonnage.device.driver import Driver
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import DriverError, DriverOOM, DriverUnsupported

PAGE = 64 * 1024
CAPACITY = 64 * PAGE


def _host() -> HostDriver:
    return HostDriver(CAPACITY, page_bytes=PAGE)


DRIVERS = {
    "host": _host,
    "host under a fault driver that fails nothing": lambda: FaultDriver(_host()),
}


@pytest.fixture(params=DRIVERS.values(), ids=DRIVERS.keys())
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = request.param()
    yield driver
    driver.close()


def mapped(driver: Driver, num_pages: int = 1) -> tuple[int, int]:
    """(address, handle) of fresh accessible memory."""
    size = num_pages * PAGE
    addr, handle = driver.va_reserve(size, align=PAGE), driver.phys_create(size)
    driver.map(addr, size, handle)
    driver.set_access(addr, size)
    return addr, handle


def test_it_names_itself(driver: Driver) -> None:
    assert driver.ordinal == 0
    assert driver.uuid
    assert driver.capabilities().page_bytes == PAGE
    driver.activate()


def test_free_and_total_follow_creation_and_release(driver: Driver) -> None:
    assert driver.mem_info() == (CAPACITY, CAPACITY)
    handle = driver.phys_create(3 * PAGE)
    assert driver.mem_info() == (CAPACITY - 3 * PAGE, CAPACITY)
    driver.phys_release(handle)
    assert driver.mem_info() == (CAPACITY, CAPACITY)


@pytest.mark.parametrize("align", [PAGE, 8 * PAGE, 2**30])
def test_reservations_are_aligned_and_take_no_memory(driver: Driver, align: int) -> None:
    addr = driver.va_reserve(1000 * CAPACITY, align=align)
    assert addr % align == 0
    assert driver.mem_info()[0] == CAPACITY
    driver.va_free(addr, 1000 * CAPACITY)


def test_bytes_written_are_read_back(driver: Driver) -> None:
    addr, _ = mapped(driver, 2)
    driver.fill(addr, 7, 2 * PAGE, stream=0)
    driver.copy(addr + PAGE, addr, 10, stream=0)
    assert ctypes.string_at(addr + PAGE, 3) == b"\x07\x07\x07"


def test_a_handle_outlives_its_release_while_mapped(driver: Driver) -> None:
    addr, handle = mapped(driver)
    driver.phys_release(handle)
    driver.fill(addr, 1, PAGE, stream=0)
    assert driver.mem_info()[0] == CAPACITY - PAGE
    driver.unmap(addr, PAGE)
    assert driver.mem_info()[0] == CAPACITY


def test_a_handle_keeps_its_bytes_while_unmapped(driver: Driver) -> None:
    addr, handle = mapped(driver)
    driver.fill(addr, 9, PAGE, stream=0)
    driver.unmap(addr, PAGE)
    driver.map(addr, PAGE, handle)
    driver.set_access(addr, PAGE)
    assert ctypes.string_at(addr, 1) == b"\x09"


def test_two_mappings_of_a_handle_are_the_same_memory(driver: Driver) -> None:
    first, handle = mapped(driver)
    second = driver.va_reserve(PAGE, align=PAGE)
    driver.map(second, PAGE, handle)
    driver.set_access(second, PAGE)
    driver.fill(first, 5, PAGE, stream=0)
    assert ctypes.string_at(second, 1) == b"\x05"
    assert driver.mem_info()[0] == CAPACITY - PAGE


WRONG = {
    "reserve nothing": lambda d: d.va_reserve(0, align=PAGE),
    "reserve part of a page": lambda d: d.va_reserve(PAGE + 1, align=PAGE),
    "reserve at an odd alignment": lambda d: d.va_reserve(PAGE, align=3 * PAGE),
    "free what is not reserved": lambda d: d.va_free(PAGE, PAGE),
    "free part of a reservation": lambda d: d.va_free(d.va_reserve(2 * PAGE, align=PAGE), PAGE),
    "free what is mapped": lambda d: d.va_free(mapped(d)[0], PAGE),
    "create part of a page": lambda d: d.phys_create(PAGE - 1),
    "release an unknown handle": lambda d: d.phys_release(12345),
    "map outside": lambda d: d.map(PAGE, PAGE, d.phys_create(PAGE)),
    "map over a mapping": lambda d: d.map(mapped(d)[0], PAGE, d.phys_create(PAGE)),
    "map another size": lambda d: d.map(d.va_reserve(2 * PAGE, align=PAGE), 2 * PAGE, d.phys_create(PAGE)),
    "unmap what is not mapped": lambda d: d.unmap(d.va_reserve(PAGE, align=PAGE), PAGE),
    "unmap half a mapping": lambda d: d.unmap(mapped(d, 2)[0], PAGE),
    "open what is not mapped": lambda d: d.set_access(d.va_reserve(PAGE, align=PAGE), PAGE),
    "free an unknown allocation": lambda d: d.mem_free(PAGE),
    "free to an unknown pool": lambda d: d.pool_free(PAGE, stream=0),
    "allocate nothing": lambda d: d.mem_alloc(0),
    "allocate from an unknown pool": lambda d: d.pool_alloc(99, 1, stream=0),
    "an unknown stream": lambda d: d.stream_sync(99),
    "an unknown event": lambda d: d.event_sync(99),
    "destroy the default stream": lambda d: d.stream_destroy(0),
    "copy on an unknown stream": lambda d: d.copy(mapped(d)[0], mapped(d)[0], 1, stream=99),
    "a negative size": lambda d: d.fill(mapped(d)[0], 0, -1, stream=0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_raise_a_driver_error(driver: Driver, wrong) -> None:
    with pytest.raises(DriverError) as caught:
        wrong(driver)
    assert not isinstance(caught.value, MemoryError)


def test_what_is_released_is_gone(driver: Driver) -> None:
    handle = driver.phys_create(PAGE)
    driver.phys_release(handle)
    with pytest.raises(DriverError):
        driver.phys_release(handle)


@pytest.mark.parametrize("reach", ["reserved only", "mapped without access", "past the end", "nobody's"])
def test_touching_what_is_not_mapped_raises(driver: Driver, reach: str) -> None:
    base = driver.va_reserve(4 * PAGE, align=PAGE)
    driver.map(base, PAGE, driver.phys_create(PAGE))
    if reach != "mapped without access":
        driver.set_access(base, PAGE)
    at = {"reserved only": base + 2 * PAGE, "past the end": base + PAGE - 4, "nobody's": 4096}.get(reach, base)
    good, _ = mapped(driver)
    for call in (
        lambda: driver.fill(at, 0, 8, stream=0),
        lambda: driver.copy(at, good, 8, stream=0),
        lambda: driver.copy(good, at, 8, stream=0),
    ):
        with pytest.raises(DriverError):
            call()


def test_beyond_the_capacity_says_asked_used_and_capacity(driver: Driver) -> None:
    driver.phys_create(60 * PAGE)
    pool = driver.pool_create()
    for call in (driver.phys_create, driver.mem_alloc, lambda size: driver.pool_alloc(pool, size, stream=0)):
        with pytest.raises(DriverOOM) as caught:
            call(5 * PAGE)
        assert isinstance(caught.value, MemoryError)
        for number in (5 * PAGE, 60 * PAGE, CAPACITY):
            assert f"{number:,}" in str(caught.value)
    assert driver.mem_info()[0] == 4 * PAGE


def test_plain_allocations_do_not_overlap_and_come_back(driver: Driver) -> None:
    sizes = [1, 511, 513, PAGE, 3 * PAGE + 5]
    addresses = [driver.mem_alloc(size) for size in sizes]
    ends = sorted(zip(addresses, sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ends))
    for addr, size in ends:
        driver.fill(addr, 1, size, stream=0)
    for addr in addresses:
        driver.mem_free(addr)
    assert driver.mem_info()[0] == CAPACITY


def test_a_pool_keeps_memory_until_it_is_trimmed(driver: Driver) -> None:
    if not driver.capabilities().pools:
        pytest.skip("this device has no pools")
    pool = driver.pool_create()
    first = driver.pool_alloc(pool, PAGE, stream=0)
    second = driver.pool_alloc(pool, PAGE, stream=0)
    driver.pool_free(first, stream=0)
    stats = driver.pool_stats(pool)
    assert (stats.used_bytes, stats.reserved_bytes) == (PAGE, 2 * PAGE)
    assert driver.pool_alloc(pool, 100, stream=0) == first
    driver.pool_free(first, stream=0)
    driver.pool_trim(pool, 2 * PAGE)
    assert driver.pool_stats(pool).reserved_bytes == 2 * PAGE
    driver.pool_trim(pool, 0)
    assert driver.pool_stats(pool).reserved_bytes == PAGE
    with pytest.raises(DriverError):
        driver.pool_destroy(pool)
    driver.pool_free(second, stream=0)
    assert driver.pool_stats(pool).used_high_bytes == 2 * PAGE
    driver.pool_destroy(pool)
    assert driver.mem_info()[0] == CAPACITY


def test_a_pool_joins_neighbouring_holes(driver: Driver) -> None:
    pool = driver.pool_create()
    pieces = [driver.pool_alloc(pool, PAGE // 4, stream=0) for _ in range(4)]
    for index in (0, 2, 1, 3):
        driver.pool_free(pieces[index], stream=0)
    assert driver.pool_alloc(pool, PAGE, stream=0) == min(pieces)
    assert driver.pool_stats(pool).reserved_bytes == PAGE


def test_host_memory_takes_no_capacity_and_can_be_copied(driver: Driver) -> None:
    addr = driver.host_alloc(5000, flags=0)
    assert driver.mem_info()[0] == CAPACITY
    there, _ = mapped(driver)
    driver.fill(addr, 3, 5000, stream=0)
    driver.copy(there, addr, 5000, stream=0)
    assert ctypes.string_at(there + 4999, 1) == b"\x03"
    driver.host_free(addr)
    with pytest.raises(DriverError):
        driver.host_free(addr)


def test_managed_memory_is_refused_where_there_is_none(driver: Driver) -> None:
    if driver.capabilities().managed:
        pytest.skip("this device has managed memory")
    with pytest.raises(DriverUnsupported):
        driver.managed_alloc(PAGE)


def test_streams_and_events(driver: Driver) -> None:
    stream, event = driver.stream_create(priority=0), driver.event_create()
    driver.event_record(event, stream=stream)
    driver.stream_wait(0, event)
    driver.event_sync(event)
    driver.stream_sync(stream)
    assert driver.event_done(event)
    assert not driver.stream_capturing(stream)
    driver.device_sync()
    driver.event_destroy(event)
    driver.stream_destroy(stream)
    with pytest.raises(DriverError):
        driver.stream_sync(stream)


def test_own_bytes_is_a_number_or_unknown(driver: Driver) -> None:
    own = driver.own_bytes()
    assert own is None or isinstance(own, int)
