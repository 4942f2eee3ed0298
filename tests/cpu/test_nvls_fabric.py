"""Simulated devices that reach each other: memory by descriptor, and multicast objects at the driver's seam."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from tonnage.device.fabric import HostFabric
from tonnage.device.host import HostDriver
from tonnage.errors import DriverError, DriverUnsupported

PAGE = 64 * 1024


@pytest.fixture
def pair() -> Iterator[tuple[HostDriver, HostDriver]]:
    fabric = HostFabric()
    first, second = (HostDriver(16 * PAGE, page_bytes=PAGE, ordinal=ordinal, fabric=fabric) for ordinal in range(2))
    yield first, second
    first.close()
    second.close()


def mapped(driver: HostDriver, handle: int, num_pages: int = 1) -> int:
    addr = driver.va_reserve(num_pages * PAGE, align=PAGE)
    driver.map(addr, num_pages * PAGE, handle)
    driver.set_access(addr, num_pages * PAGE)
    return addr


def passed_on(giver: HostDriver, taker: HostDriver, handle: int, num_pages: int = 1) -> int:
    fd = giver.phys_export(handle)
    try:
        return taker.phys_import(fd, num_pages * PAGE)
    finally:
        os.close(fd)


def test_imported_memory_is_the_same_memory_and_counts_where_it_was_made(pair) -> None:
    first, second = pair
    handle = first.phys_create(2 * PAGE, exportable=True)
    there = mapped(second, passed_on(first, second, handle, 2), 2)
    here = mapped(first, handle, 2)
    first.fill(here, 5, 2 * PAGE, stream=0)
    assert ctypes.string_at(there + 2 * PAGE - 1, 1) == b"\x05"
    second.fill(there, 6, 1, stream=0)
    assert ctypes.string_at(here, 2) == b"\x06\x05"
    assert (first.used_bytes, second.used_bytes) == (2 * PAGE, 0)


def test_it_lives_until_the_last_device_lets_go(pair) -> None:
    first, second = pair
    handle = first.phys_create(PAGE, exportable=True)
    imported = passed_on(first, second, handle)
    there = mapped(second, imported)
    first.phys_release(handle)
    assert first.used_bytes == PAGE  # the other still holds it
    second.phys_release(imported)
    second.fill(there, 7, PAGE, stream=0)
    assert ctypes.string_at(there, 1) == b"\x07"
    assert first.used_bytes == PAGE
    second.unmap(there, PAGE)
    assert first.used_bytes == 0
    assert (first.leaks(), len(second.leaks())) == ((), 1)


def test_it_outlives_the_device_that_made_it(pair) -> None:
    first, second = pair
    handle = first.phys_create(PAGE, exportable=True)
    there = mapped(second, passed_on(first, second, handle))
    assert len(first.close()) == 1
    second.fill(there, 7, PAGE, stream=0)
    assert ctypes.string_at(there, 1) == b"\x07"
    second.unmap(there, PAGE)


def test_a_device_may_import_its_own(pair) -> None:
    first, _ = pair
    handle = first.phys_create(PAGE, exportable=True)
    other = passed_on(first, first, handle)
    here, there = mapped(first, handle), mapped(first, other)
    first.fill(here, 4, PAGE, stream=0)
    assert ctypes.string_at(there, 1) == b"\x04"
    assert first.used_bytes == PAGE


def test_what_cannot_be_passed_on(pair) -> None:
    first, second = pair
    plain, handle = first.phys_create(PAGE), first.phys_create(PAGE, exportable=True)
    with pytest.raises(DriverError, match="not created exportable"):
        first.phys_export(plain)
    fd = first.phys_export(handle)
    with pytest.raises(DriverError, match="has 65,536 bytes"):
        second.phys_import(fd, 2 * PAGE)
    stranger = HostDriver(16 * PAGE, page_bytes=PAGE)
    with pytest.raises(DriverError, match="no memory of this fabric"):
        stranger.phys_import(fd, PAGE)
    stranger.close()
    first.phys_release(handle)
    with pytest.raises(DriverError, match="no memory of this fabric"):
        second.phys_import(fd, PAGE)  # nobody holds it any more
    os.close(fd)
    with pytest.raises(DriverError, match="Bad file descriptor"):
        second.phys_import(fd, PAGE)
    assert second.used_bytes == 0


def test_memory_may_be_made_not_exportable() -> None:
    driver = HostDriver(PAGE, page_bytes=PAGE, without=frozenset({"exportable"}))
    with pytest.raises(DriverUnsupported):
        driver.phys_create(PAGE, exportable=True)
    assert driver.close() == ()


def joined(pair) -> tuple[int, int, int, int]:
    """A multicast object of one page, with all devices added: its handles on both, and exportable memory on both."""
    first, second = pair
    here = first.multicast_create(PAGE, num_devices=2)
    there = passed_on(first, second, here)
    first.multicast_add_device(here)
    second.multicast_add_device(there)
    return here, there, first.phys_create(PAGE, exportable=True), second.phys_create(PAGE, exportable=True)


def test_a_write_goes_to_all_and_nothing_can_be_read(pair) -> None:
    first, second = pair
    here, there, mine, theirs = joined(pair)
    first.multicast_bind(here, mine, PAGE)
    at = mapped(first, here)
    with pytest.raises(DriverError, match="1 of 2 devices"):
        first.fill(at, 1, 1, stream=0)
    second.multicast_bind(there, theirs, PAGE)
    first.fill(at + 10, 3, 5, stream=0)
    for driver, handle in ((first, mine), (second, theirs)):
        assert ctypes.string_at(mapped(driver, handle) + 9, 7) == b"\x00\x03\x03\x03\x03\x03\x00"
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        first.copy(mapped(first, first.phys_create(PAGE)), at, 1, stream=0)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        first.fill(at + PAGE - 2, 1, 4, stream=0)


def test_binding_holds_the_memory_and_unbinding_lets_go(pair) -> None:
    first, second = pair
    here, there, mine, theirs = joined(pair)
    first.multicast_bind(here, mine, PAGE)
    second.multicast_bind(there, theirs, PAGE)
    first.phys_release(mine)
    assert first.used_bytes == PAGE
    first.multicast_unbind(here, PAGE)
    assert first.used_bytes == 0
    second.phys_release(theirs)
    for driver, handle in ((first, here), (second, there)):
        driver.phys_release(handle)  # and the last of these unbinds what is bound
    assert (second.used_bytes, first.leaks(), second.leaks()) == (0, (), ())


WRONG = {
    "one device": lambda d, _: d.multicast_create(PAGE, num_devices=1),
    "part of a page": lambda d, _: d.multicast_create(PAGE + 1, num_devices=2),
    "no such object": lambda d, _: d.multicast_add_device(12345),
    "memory in its place": lambda d, _: d.multicast_add_device(d.phys_create(PAGE)),
    "added twice": lambda d, many: d.multicast_add_device(many),
    "memory of its own kind": lambda d, many: d.multicast_bind(many, many, PAGE),
    "memory that is not exportable": lambda d, many: d.multicast_bind(many, d.phys_create(PAGE), PAGE),
    "more than there is": lambda d, many: d.multicast_bind(many, d.phys_create(PAGE, exportable=True), 2 * PAGE),
    "unbound without being bound": lambda d, many: d.multicast_unbind(many, PAGE),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_raise(pair, wrong) -> None:
    here, *_ = joined(pair)
    with pytest.raises(DriverError) as caught:
        wrong(pair[0], here)
    assert not isinstance(caught.value, MemoryError)


def test_no_device_binds_before_all_are_added(pair) -> None:
    first, _ = pair
    here = first.multicast_create(PAGE, num_devices=2)
    first.multicast_add_device(here)
    with pytest.raises(DriverError, match="1 of 2 devices were added"):
        first.multicast_bind(here, first.phys_create(PAGE, exportable=True), PAGE)
