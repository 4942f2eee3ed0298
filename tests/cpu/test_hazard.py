"""The watch over a device: every hazard it knows is caught, with both parties by name, and nothing else is."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

import pytest

from tonnage.device.fault import FaultDriver
from tonnage.device.hazard import FREED, FRESH, HazardDriver
from tonnage.device.host import HostDriver
from tonnage.errors import DeviceLost, DriverError, DriverOOM

PAGE = 64 * 1024


@pytest.fixture
def driver() -> Iterator[HazardDriver]:
    host = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield HazardDriver(host)
    host.close()


def mapped(driver: HazardDriver, num_pages: int = 1, *, reserve: int = 8) -> int:
    """The address of ``num_pages`` accessible pages at the start of a reservation."""
    addr = driver.va_reserve(reserve * PAGE, align=PAGE)
    for index in range(num_pages):
        handle = driver.phys_create(PAGE)
        driver.map(addr + index * PAGE, PAGE, handle)
        driver.phys_release(handle)
    if num_pages:
        driver.set_access(addr, num_pages * PAGE)
    return addr


def bytes_at(addr: int, size: int) -> bytes:
    return ctypes.string_at(addr, size)


# what is in flight


def stream_sync(driver: HazardDriver, stream: int) -> None:
    driver.stream_sync(stream)


def device_sync(driver: HazardDriver, stream: int) -> None:
    driver.device_sync()


def event_sync(driver: HazardDriver, stream: int) -> None:
    event = driver.event_create()
    driver.event_record(event, stream=stream)
    driver.event_sync(event)


def event_done(driver: HazardDriver, stream: int) -> None:
    event = driver.event_create()
    driver.event_record(event, stream=stream)
    assert driver.event_done(event)


def chain(driver: HazardDriver, stream: int) -> None:
    """The host waits for another stream, which waited for this one."""
    other, first = driver.stream_create(priority=0), driver.event_create()
    driver.event_record(first, stream=stream)
    driver.stream_wait(other, first)
    driver.stream_sync(other)


FENCES = [stream_sync, device_sync, event_sync, event_done, chain]


def unmap(driver: HazardDriver) -> tuple[int, Callable[[], None]]:
    addr = mapped(driver)
    return addr, lambda: driver.unmap(addr, PAGE)


def set_access(driver: HazardDriver) -> tuple[int, Callable[[], None]]:
    addr = mapped(driver)
    return addr, lambda: driver.set_access(addr, PAGE)


def mem_free(driver: HazardDriver) -> tuple[int, Callable[[], None]]:
    addr = driver.mem_alloc(PAGE)
    return addr, lambda: driver.mem_free(addr)


def managed_free(driver: HazardDriver) -> tuple[int, Callable[[], None]]:
    addr = driver.managed_alloc(PAGE)
    return addr, lambda: driver.mem_free(addr)


def host_free(driver: HazardDriver) -> tuple[int, Callable[[], None]]:
    addr = driver.host_alloc(PAGE, flags=0)
    return addr, lambda: driver.host_free(addr)


def pool_free(driver: HazardDriver) -> tuple[int, Callable[[], None]]:
    """Freed on stream 0, which does not wait for the stream that uses it."""
    addr = driver.pool_alloc(driver.pool_create(), PAGE, stream=0)
    return addr, lambda: driver.pool_free(addr, stream=0)


RELEASES = [unmap, set_access, mem_free, managed_free, host_free, pool_free]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("declare", ["launch", "fill", "copy"])
def test_memory_with_work_in_flight_is_not_taken_away(driver: HazardDriver, release, declare: str) -> None:
    stream = driver.stream_create(priority=0)
    addr, take_away = release(driver)
    other = mapped(driver)
    if declare == "launch":
        driver.launch(stream, reads=[(addr, 8)], what="decode")
    elif declare == "fill":
        driver.fill(addr, 1, 8, stream=stream)
    else:
        driver.copy(other, addr, 8, stream=stream)
    with pytest.raises(DeviceLost) as caught:
        take_away()
    assert caught.value.code == "IN_USE"
    work = {"launch": "decode", "fill": "a fill", "copy": "a copy"}[declare]
    assert re.search(rf"{work}.* on stream {stream:#x}, declared at call \d+", str(caught.value))
    assert f"{addr:#x}" in str(caught.value)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("fence", FENCES)
def test_behind_a_fence_it_may_go(driver: HazardDriver, release, fence) -> None:
    stream = driver.stream_create(priority=0)
    addr, take_away = release(driver)
    driver.launch(stream, writes=[(addr, 8)])
    fence(driver, stream)
    take_away()
    assert driver.hazards == []


def test_a_fence_covers_only_what_was_queued_before_it(driver: HazardDriver) -> None:
    stream, event = driver.stream_create(priority=0), driver.event_create()
    addr = mapped(driver)
    driver.launch(stream, reads=[(addr, 8)])
    driver.event_record(event, stream=stream)
    driver.launch(stream, reads=[(addr, 8)])
    driver.event_sync(event)
    with pytest.raises(DeviceLost):
        driver.unmap(addr, PAGE)


def test_a_fence_on_another_stream_is_none(driver: HazardDriver) -> None:
    used, waited = driver.stream_create(priority=0), driver.stream_create(priority=0)
    addr = mapped(driver)
    driver.launch(used, reads=[(addr, 8)])
    driver.stream_sync(waited)
    driver.stream_sync(0)
    with pytest.raises(DeviceLost):
        driver.unmap(addr, PAGE)


def test_work_that_is_being_queued_is_in_flight_whatever_is_waited_for(driver: HazardDriver) -> None:
    addr = mapped(driver)
    stream = driver.stream_create(priority=0)
    with driver.work(stream, reads=[(addr, PAGE)], what="a forward pass"):
        driver.device_sync()
        driver.strict = False
        driver.set_access(addr, PAGE)
    assert "a forward pass" in driver.hazards[0]
    driver.strict = True
    with pytest.raises(DeviceLost):  # its last kernel may still run
        driver.unmap(addr, PAGE)


def test_a_neighbour_may_be_unmapped_unless_the_whole_reservation_counts() -> None:
    for reservation_hazard in (False, True):
        host = HostDriver(64 * PAGE, page_bytes=PAGE)
        driver = HazardDriver(host, reservation_hazard=reservation_hazard)
        addr = mapped(driver, 2)
        driver.launch(0, reads=[(addr, 8)])
        if reservation_hazard:
            with pytest.raises(DeviceLost) as caught:
                driver.unmap(addr + PAGE, PAGE)
            assert caught.value.code == "RESERVATION_IN_USE"
        else:
            driver.unmap(addr + PAGE, PAGE)
        host.close()


def test_mapping_into_a_reservation_in_use_is_an_edit_too() -> None:
    host = HostDriver(64 * PAGE, page_bytes=PAGE)
    driver = HazardDriver(host, reservation_hazard=True)
    addr, elsewhere = mapped(driver), mapped(driver)
    driver.launch(0, reads=[(elsewhere, 8)])
    driver.map(addr + PAGE, PAGE, driver.phys_create(PAGE))  # another reservation: no matter
    driver.launch(0, reads=[(addr, 8)])
    with pytest.raises(DeviceLost, match="map failed: RESERVATION_IN_USE"):
        driver.map(addr + 2 * PAGE, PAGE, driver.phys_create(PAGE))
    host.close()


# what may be touched


def reserved_only(driver: HazardDriver) -> int:
    return driver.va_reserve(PAGE, align=PAGE)


def without_access(driver: HazardDriver) -> int:
    addr = driver.va_reserve(PAGE, align=PAGE)
    driver.map(addr, PAGE, driver.phys_create(PAGE))
    return addr


def unmapped(driver: HazardDriver) -> int:
    addr = mapped(driver)
    driver.unmap(addr, PAGE)
    return addr


def past_the_end(driver: HazardDriver) -> int:
    return driver.mem_alloc(100) + 97


def across_the_border(driver: HazardDriver) -> int:
    return mapped(driver) + PAGE - 4


def freed_to_a_pool(driver: HazardDriver) -> int:
    addr = driver.pool_alloc(driver.pool_create(), PAGE, stream=0)
    driver.pool_free(addr, stream=0)
    return addr


def freed(driver: HazardDriver) -> int:
    keep, addr = driver.mem_alloc(100), driver.mem_alloc(100)  # one page between them: it stays mapped
    assert abs(keep - addr) < PAGE
    driver.mem_free(addr)
    return addr


BAD = [reserved_only, without_access, unmapped, past_the_end, across_the_border, freed_to_a_pool, freed]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("access", ["launch", "fill", "copy from", "copy to"])
def test_touching_what_may_not_be_touched_kills_the_context(driver: HazardDriver, bad, access: str) -> None:
    good, addr = mapped(driver), bad(driver)
    touch = {
        "launch": lambda: driver.launch(0, reads=[(addr, 8)]),
        "fill": lambda: driver.fill(addr, 0, 8, stream=0),
        "copy from": lambda: driver.copy(good, addr, 8, stream=0),
        "copy to": lambda: driver.copy(addr, good, 8, stream=0),
    }[access]
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        touch()
    for call in (driver.device_sync, driver.mem_info, lambda: driver.mem_alloc(1), touch):
        with pytest.raises(DeviceLost, match=r"the context is dead since: .*ILLEGAL_ADDRESS"):
            call()


def test_a_kernel_over_nobodys_memory_must_say_whose_it_is(driver: HazardDriver) -> None:
    buffer = ctypes.create_string_buffer(100)
    addr = ctypes.addressof(buffer)
    driver.copy(addr, mapped(driver), 10, stream=0)  # the driver can judge this itself
    driver.adopt(addr, 100)
    driver.launch(0, reads=[(addr, 100)])
    driver.disown(addr)
    with pytest.raises(DeviceLost, match="nobody's memory"):
        driver.launch(0, reads=[(addr, 100)])


def test_what_the_driver_itself_calls_illegal_is_sticky(driver: HazardDriver) -> None:
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        driver.fill(4096, 0, 8, stream=0)
    with pytest.raises(DeviceLost):
        driver.stream_create(priority=0)


def test_other_errors_of_the_driver_are_not(driver: HazardDriver) -> None:
    with pytest.raises(DriverOOM):
        driver.phys_create(1000 * PAGE)
    with pytest.raises(DriverError) as caught:
        driver.unmap(PAGE, PAGE)
    assert not isinstance(caught.value, DeviceLost)
    driver.mem_free(driver.mem_alloc(1))


def test_memory_that_was_given_out_again_may_be_touched_again(driver: HazardDriver) -> None:
    pool = driver.pool_create()
    first = driver.pool_alloc(pool, PAGE, stream=0)
    driver.pool_free(first, stream=0)
    half = driver.pool_alloc(pool, PAGE // 2, stream=0)
    assert half == first
    driver.launch(0, writes=[(half, PAGE // 2)])
    with pytest.raises(DeviceLost, match="freed by pool_free"):
        driver.launch(0, reads=[(half + PAGE // 2, 8)])


# order of streams


def test_two_streams_over_the_same_bytes_race(driver: HazardDriver) -> None:
    addr = mapped(driver)
    a, b = driver.stream_create(priority=0), driver.stream_create(priority=0)
    driver.launch(a, reads=[(addr, 100)], what="reader")
    driver.launch(b, reads=[(addr, 100)])  # two readers do not
    driver.launch(b, writes=[(addr + 200, 8)])  # nor does another place
    with pytest.raises(DeviceLost) as caught:
        driver.launch(b, writes=[(addr + 99, 8)], what="writer")
    assert caught.value.code == "RACE"
    assert re.search(rf"writer on stream {b:#x} does not wait for reader on stream {a:#x}", str(caught.value))


def test_an_event_puts_them_in_order(driver: HazardDriver) -> None:
    addr = mapped(driver)
    a, b, event = driver.stream_create(priority=0), driver.stream_create(priority=0), driver.event_create()
    driver.launch(a, writes=[(addr, 100)])
    driver.event_record(event, stream=a)
    driver.stream_wait(b, event)
    driver.launch(b, reads=[(addr, 100)])
    driver.stream_sync(b)  # covers a's work too
    driver.unmap(addr, PAGE)


def test_a_copy_on_stream_0_does_not_wait_for_a_non_blocking_stream(driver: HazardDriver) -> None:
    addr, out = mapped(driver), driver.host_alloc(100, flags=0)
    stream = driver.stream_create(priority=0)
    driver.launch(stream, writes=[(addr, 100)])
    with pytest.raises(DeviceLost, match="RACE"):
        driver.copy(out, addr, 100, stream=0)


def test_a_copy_on_stream_0_waits_for_a_blocking_stream_and_the_other_way_round(driver: HazardDriver) -> None:
    addr, out = mapped(driver), driver.host_alloc(100, flags=0)
    stream = driver.stream_create(priority=0)
    driver.blocking(stream)
    driver.launch(stream, writes=[(addr, 100)])
    driver.copy(out, addr, 100, stream=0)
    driver.launch(stream, writes=[(addr, 100)])
    driver.stream_sync(stream)
    driver.unmap(addr, PAGE)


def test_a_pool_orders_who_frees_before_who_gets(driver: HazardDriver) -> None:
    pool = driver.pool_create()
    a, b = driver.stream_create(priority=0), driver.stream_create(priority=0)
    first = driver.pool_alloc(pool, PAGE, stream=a)
    driver.launch(a, writes=[(first, PAGE)])
    driver.pool_free(first, stream=a)
    assert driver.pool_alloc(pool, PAGE, stream=b) == first
    driver.launch(b, writes=[(first, PAGE)])
    assert driver.hazards == []


# captures


def test_a_capture_shows_and_ends(driver: HazardDriver) -> None:
    stream = driver.stream_create(priority=0)
    with driver.capturing(stream):
        assert driver.stream_capturing(stream)
        assert not driver.stream_capturing(0)
    assert not driver.stream_capturing(stream)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d, addr: d.unmap(addr, PAGE),
        lambda d, addr: d.set_access(addr, PAGE),
        lambda d, _: d.mem_alloc(1),
        lambda d, _: d.device_sync(),
    ],
    ids=["unmap", "set_access", "mem_alloc", "device_sync"],
)
def test_no_page_table_is_edited_while_a_stream_is_captured(driver: HazardDriver, edit) -> None:
    addr, stream = mapped(driver), driver.stream_create(priority=0)
    with driver.capturing(stream, what="the decode graph"), pytest.raises(DeviceLost, match="decode graph") as caught:
        edit(driver, addr)
    assert caught.value.code == "CAPTURE"


def test_pool_memory_and_waits_on_a_captured_stream_are_caught(driver: HazardDriver) -> None:
    stream, pool = driver.stream_create(priority=0), driver.pool_create()
    driver.strict = False
    with driver.capturing(stream):
        driver.pool_alloc(pool, 100, stream=stream)
        driver.stream_sync(stream)
    assert [hazard.split(":")[0] for hazard in driver.hazards] == ["pool_alloc", "stream_sync"]


def test_captured_work_runs_when_it_is_replayed_and_is_checked_each_time(driver: HazardDriver) -> None:
    addr, stream = mapped(driver), driver.stream_create(priority=0)
    driver.fill(addr, 1, 8, stream=stream)
    driver.stream_sync(stream)
    with driver.capturing(stream) as graph:
        driver.fill(addr, 2, 8, stream=stream)
        driver.launch(stream, reads=[(addr, 8)], what="sum")
    assert bytes_at(addr, 1) == b"\x01"
    driver.replay(graph, stream=stream)
    assert bytes_at(addr, 1) == b"\x02"
    driver.strict = False
    driver.set_access(addr, PAGE)
    assert "of a graph on stream" in driver.hazards[0]
    driver.strict = True
    driver.stream_sync(stream)
    driver.unmap(addr, PAGE)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        driver.replay(graph, stream=stream)


def test_a_stream_that_waits_for_a_captured_event_is_captured_too(driver: HazardDriver) -> None:
    main, side, event = driver.stream_create(priority=0), driver.stream_create(priority=0), driver.event_create()
    with driver.capturing(main):
        driver.event_record(event, stream=main)
        driver.stream_wait(side, event)
        assert driver.stream_capturing(side)
    assert not driver.stream_capturing(side)


# patterns


def test_fresh_memory_never_reads_zero(driver: HazardDriver) -> None:
    pool = driver.pool_create()
    for addr in (
        mapped(driver),
        driver.mem_alloc(100),
        driver.managed_alloc(100),
        driver.host_alloc(100, flags=0),
        driver.pool_alloc(pool, 100, stream=0),
    ):
        assert bytes_at(addr, 100) == bytes([FRESH]) * 100


def test_freed_memory_reads_as_freed(driver: HazardDriver) -> None:
    addr = driver.pool_alloc(driver.pool_create(), 100, stream=0)
    driver.fill(addr, 7, 100, stream=0)
    driver.pool_free(addr, stream=0)
    assert bytes_at(addr, 100) == bytes([FREED]) * 100


def test_a_handle_is_fresh_only_once(driver: HazardDriver) -> None:
    addr, handle = driver.va_reserve(PAGE, align=PAGE), driver.phys_create(PAGE)
    for _ in range(2):
        driver.map(addr, PAGE, handle)
        driver.set_access(addr, PAGE)
        seen = bytes_at(addr, 1)
        ctypes.memset(addr, 3, PAGE)
        driver.unmap(addr, PAGE)
    assert seen == b"\x03"


def test_imported_memory_is_not_painted_over() -> None:
    host = HostDriver(8 * PAGE, page_bytes=PAGE)
    driver = HazardDriver(host)
    addr, handle = driver.va_reserve(2 * PAGE, align=PAGE), driver.phys_create(PAGE, exportable=True)
    driver.map(addr, PAGE, handle)
    driver.set_access(addr, PAGE)
    driver.fill(addr, 9, PAGE, stream=0)
    driver.device_sync()
    fd = driver.phys_export(handle)
    driver.map(addr + PAGE, PAGE, driver.phys_import(fd, PAGE))
    driver.set_access(addr + PAGE, PAGE)
    assert bytes_at(addr + PAGE, 1) == b"\x09"
    host.close()


@pytest.mark.parametrize("kind", ["pool", "mem", "host"])
def test_writing_past_the_end_is_found_when_it_is_freed(driver: HazardDriver, kind: str) -> None:
    pool = driver.pool_create()
    alloc, free = {
        "pool": (lambda: driver.pool_alloc(pool, 100, stream=0), lambda addr: driver.pool_free(addr, stream=0)),
        "mem": (lambda: driver.mem_alloc(100), driver.mem_free),
        "host": (lambda: driver.host_alloc(100, flags=0), driver.host_free),
    }[kind]
    addr = alloc()
    ctypes.memset(addr, 0, 100)
    free(addr)
    addr = alloc()
    ctypes.memset(addr, 0, 103)
    with pytest.raises(DeviceLost, match=r"3 bytes were written past the 100 .*from byte 100 on") as caught:
        free(addr)
    assert caught.value.code == "RED_ZONE"


def test_without_poison_nothing_is_painted() -> None:
    host = HostDriver(8 * PAGE, page_bytes=PAGE)
    driver = HazardDriver(host, poison=False)
    addr = driver.mem_alloc(100)
    assert bytes_at(addr, 100) == bytes(100)
    ctypes.memset(addr, 1, 200)
    driver.mem_free(addr)
    assert host.close() == ()


# notes instead of errors, and nesting


def test_a_watch_that_only_notes_goes_on(driver: HazardDriver) -> None:
    driver.strict = False
    addr = mapped(driver)
    driver.launch(0, reads=[(addr, 8)])
    driver.unmap(addr, PAGE)
    assert len(driver.hazards) == 1
    assert driver.lost is None
    driver.mem_free(driver.mem_alloc(1))


@pytest.mark.parametrize("order", ["hazard over fault", "fault over hazard"])
def test_decorators_nest_in_any_order(order: str) -> None:
    host = HostDriver(64 * PAGE, page_bytes=PAGE)
    if order == "hazard over fault":
        fault = FaultDriver(host)
        driver = hazard = HazardDriver(fault)
    else:
        hazard = HazardDriver(host)
        driver = fault = FaultDriver(hazard)
    fault.arm(2, calls=frozenset({"phys_create"}))
    driver.phys_release(driver.phys_create(PAGE))
    with pytest.raises(DriverOOM):
        driver.phys_create(PAGE)
    addr = driver.mem_alloc(100)
    driver.launch(0, reads=[(addr, 100)])
    with pytest.raises(DeviceLost):
        driver.mem_free(addr)
    assert (driver.uuid, driver.capacity_bytes) == ("host-0", 64 * PAGE)
    assert hazard.lost is not None
    driver.foreign_bytes = PAGE
    assert host.foreign_bytes == PAGE
    driver.close()
    assert host.close() == ()
