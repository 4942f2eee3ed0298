"""Arenas: they grow in place, in few handles, and give everything back."""

from __future__ import annotations

import ctypes

import pytest

from tonnage.buffers import Device, Stream, VaArena
from tonnage.device.fault import ALLOCATING, FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import BufferOOM
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

PAGE = 2**16


@pytest.fixture
def driver():
    driver = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield driver
    assert driver.close() == ()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(0, 64 * PAGE)


@pytest.fixture
def arena(driver: HostDriver, ledger: Ledger):
    arena = make(driver, ledger)
    yield arena
    arena.close()


def make(driver, ledger: Ledger, **arguments) -> VaArena:
    arguments = {"owner": "kv pool", "line": LineKind.KV, "reserve_bytes": 1000 * PAGE - 1, **arguments}
    return VaArena(Stream(Device(driver)), ledger=ledger, **arguments)


def booked(ledger: Ledger) -> tuple[int, int, int]:
    entry = ledger.snapshot().entries[0]
    return entry.requested_bytes, entry.physical_bytes, entry.num_live


def test_reserving_takes_no_memory(arena: VaArena, driver: HostDriver, ledger: Ledger) -> None:
    assert arena.size_bytes == 1000 * PAGE
    assert (arena.committed_bytes, driver.used_bytes, ledger.accounted_bytes) == (0, 0, 0)


def test_it_grows_in_place_and_keeps_what_is_there(arena: VaArena, ledger: Ledger, driver: HostDriver) -> None:
    address = arena.address
    assert arena.commit(10) == PAGE
    ctypes.memset(address, 65, PAGE)
    assert arena.commit(5 * PAGE + 1) == 6 * PAGE
    assert arena.address == address
    assert ctypes.string_at(address, PAGE) == b"A" * PAGE
    ctypes.memset(address + 5 * PAGE, 66, PAGE)
    assert booked(ledger) == (5 * PAGE + 1, 6 * PAGE, 2)
    assert driver.used_bytes == 6 * PAGE


def test_growing_inside_the_last_page_books_what_was_asked(arena: VaArena, ledger: Ledger) -> None:
    arena.commit(10)
    arena.commit(100)
    arena.commit(50)  # less than is there: nothing to do
    assert booked(ledger) == (100, PAGE, 1)


def test_a_large_commit_takes_few_handles_and_one_access_call(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, chunk_bytes=16 * PAGE)
    fault.arm(None)
    arena.commit(40 * PAGE)
    assert dict(fault.by_call) == {"phys_create": 3, "map": 3, "set_access": 1}
    arena.close()


def test_decommit_gives_whole_handles_back(driver: HostDriver, ledger: Ledger) -> None:
    arena = make(driver, ledger, chunk_bytes=4 * PAGE)
    arena.commit(10 * PAGE)
    assert arena.decommit(5 * PAGE) == 2 * PAGE  # the handle of pages 4 to 7 stays
    assert (arena.committed_bytes, driver.used_bytes) == (8 * PAGE, 8 * PAGE)
    assert booked(ledger) == (5 * PAGE, 8 * PAGE, 2)
    assert arena.decommit(0) == 8 * PAGE
    assert booked(ledger) == (0, 0, 0)
    arena.commit(PAGE)
    assert ctypes.string_at(arena.address, 8) == bytes(8)
    arena.close()


def test_closing_twice_and_using_it_afterwards(driver: HostDriver, ledger: Ledger) -> None:
    arena = make(driver, ledger)
    arena.commit(3 * PAGE)
    arena.close()
    arena.close()
    assert (arena.address, arena.committed_bytes, booked(ledger)) == (0, 0, (0, 0, 0))
    for call in (lambda: arena.commit(1), lambda: arena.decommit(0)):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("num_bytes", [-1, 1000 * PAGE + 1])
def test_a_commit_beyond_the_reservation_is_refused(arena: VaArena, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(num_bytes)


def test_beyond_the_capacity_nothing_changes(arena: VaArena, ledger: Ledger, driver: HostDriver) -> None:
    arena.commit(60 * PAGE)
    before = (ledger.snapshot(), driver.leaks())
    with pytest.raises(BufferOOM) as caught:
        arena.commit(65 * PAGE)
    assert (caught.value.size_bytes, caught.value.used_bytes) == (5 * PAGE, 60 * PAGE)
    assert "kv pool" in str(caught.value)
    assert (ledger.snapshot(), driver.leaks()) == before
    arena.commit(64 * PAGE)


def test_it_shows_owner_bytes_and_stream(arena: VaArena) -> None:
    arena.commit(1)
    assert repr(arena).startswith("<VaArena 'kv pool' 65,536 of 65,536,000 bytes at 0x")
    assert "Stream 0 of host-0" in repr(arena)


def test_every_call_an_arena_makes_is_one_that_the_fault_driver_knows() -> None:
    assert {"va_reserve", "phys_create", "map", "set_access"} <= ALLOCATING
