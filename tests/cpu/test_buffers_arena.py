"""Arenas: they grow in place, in few calls, sleep and wake with exactly what they had, and give everything back."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.restore import Restore
from tonnage.buffers.runs import lay_out
from tonnage.device.fault import ALLOCATING, FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import (
    BufferInUse,
    BufferOOM,
    CannotMaterialize,
    CaptureError,
    DriverError,
    DriverOOM,
    ForkedProcess,
    LedgerError,
    NotMaterialized,
    RangePoisoned,
)
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

PAGE = 2**16
#: The page of what looks at every byte after every step: the system's own.
SMALL = os.sysconf("SC_PAGE_SIZE")


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
    assert (arena.path, arena.num_edits) == ("virtual", 0)


def test_it_grows_in_place_and_keeps_what_is_there(arena: VaArena, ledger: Ledger, driver: HostDriver) -> None:
    address = arena.address
    assert arena.commit(10) == PAGE
    ctypes.memset(address, 65, PAGE)
    assert arena.commit(5 * PAGE + 1) == 6 * PAGE
    assert arena.address == address
    assert ctypes.string_at(address, PAGE) == b"A" * PAGE
    ctypes.memset(address + 5 * PAGE, 66, PAGE)
    assert booked(ledger) == (5 * PAGE + 1, 6 * PAGE, 6)
    assert driver.used_bytes == 6 * PAGE


def test_growing_inside_the_last_page_books_what_was_asked(arena: VaArena, ledger: Ledger) -> None:
    arena.commit(10)
    edits = arena.num_edits
    arena.commit(100)
    arena.commit(50)  # less than is there: nothing to do
    assert booked(ledger) == (100, PAGE, 1)
    assert arena.num_edits == edits


@pytest.mark.parametrize(
    ("start", "end", "fine_from", "sizes"),
    [
        (0, 10, 100, [4, 4, 1, 1]),
        (0, 3, 100, [1, 1, 1]),
        (2, 13, 100, [1, 1, 4, 4, 1]),  # a large one begins only at a multiple of its size
        (0, 16, 8, [4, 4] + [1] * 8),
        (0, 16, 9, [4, 4] + [1] * 8),  # a large one would reach into what is fine
        (5, 5, 100, []),
    ],
)
def test_large_handles_where_a_whole_one_fits(start: int, end: int, fine_from: int, sizes: list[int]) -> None:
    found = list(lay_out(start, end, page_bytes=1, bulk_bytes=4, fine_from=fine_from))
    assert [size for _, size in found] == sizes
    assert [offset for offset, _ in found] == [start + sum(sizes[:number]) for number in range(len(sizes))]


def test_a_large_commit_takes_few_handles_and_one_access_call(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, chunk_bytes=16 * PAGE)
    fault.arm(None)
    arena.commit(34 * PAGE)
    assert dict(fault.by_call) == {"phys_create": 4, "map": 4, "set_access": 1}
    assert arena.num_edits == 5
    fault.arm(None, calls=frozenset({"unmap", "phys_release"}))
    arena.decommit(0)
    assert dict(fault.by_call) == {"unmap": 1, "phys_release": 4}
    assert arena.num_edits == 6
    arena.close()


def test_a_decommit_stops_at_a_page_of_the_tail_and_at_a_large_handle(driver: HostDriver, ledger: Ledger) -> None:
    arena = make(driver, ledger, chunk_bytes=4 * PAGE)
    arena.commit(11 * PAGE)
    assert arena.decommit(9 * PAGE) == 2 * PAGE
    assert arena.decommit(5 * PAGE) == PAGE  # the handle of pages 4 to 7 stays
    assert (arena.committed_bytes, driver.used_bytes) == (8 * PAGE, 8 * PAGE)
    assert booked(ledger) == (5 * PAGE, 8 * PAGE, 2)
    assert arena.decommit(0) == 8 * PAGE
    assert booked(ledger) == (0, 0, 0)
    arena.commit(PAGE)
    assert ctypes.string_at(arena.address, 8) == bytes(8)
    arena.close()


def test_where_it_is_fine_a_decommit_stops_anywhere(driver: HostDriver, ledger: Ledger) -> None:
    arena = make(driver, ledger, chunk_bytes=4 * PAGE, fine_from_bytes=8 * PAGE)
    arena.commit(20 * PAGE)
    assert arena.decommit(13 * PAGE) == 7 * PAGE
    assert arena.committed_bytes == 13 * PAGE
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
    assert "Stream 0x0 of host-0" in repr(arena)


def test_every_call_an_arena_makes_is_one_that_the_fault_driver_knows() -> None:
    assert {"va_reserve", "phys_create", "map", "set_access"} <= ALLOCATING


def test_sixty_four_steps_of_growth_move_and_copy_nothing(driver: HostDriver, ledger: Ledger) -> None:
    counting = FaultDriver(driver)
    arena = make(counting, ledger, chunk_bytes=PAGE)
    counting.arm(None, calls=frozenset({"copy", "unmap", "va_reserve", "fill"}))
    address = arena.address
    for step in range(64):
        arena.commit((step + 1) * PAGE)
        assert arena.address == address
        ctypes.memset(address + step * PAGE, step + 1, PAGE)
    assert counting.num_calls == 0
    assert all(ctypes.string_at(address + step * PAGE, PAGE) == bytes([step + 1]) * PAGE for step in range(64))
    entry = ledger.snapshot().entries[0]
    assert entry.high_water_bytes == entry.physical_bytes == driver.used_bytes == 64 * PAGE
    arena.close()


# a reservation that is refused


def test_a_refused_reservation_is_tried_smaller_where_that_is_allowed(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver, 1, calls=frozenset({"va_reserve"}))
    arena = make(fault, ledger, least_reserve_bytes=300 * PAGE)
    assert arena.size_bytes == 500 * PAGE
    arena.close()
    fault.arm(1, forever=True, calls=frozenset({"va_reserve"}))
    with pytest.raises(DriverOOM, match=r"'kv pool' needs 19,660,800 bytes of addresses"):
        make(fault, ledger, least_reserve_bytes=300 * PAGE)
    assert fault.num_calls == 3  # 1000, 500, 300


def test_a_reservation_that_must_be_whole_is_tried_once(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver, 1, calls=frozenset({"va_reserve"}))
    with pytest.raises(DriverOOM, match="addresses"):
        make(fault, ledger)
    assert fault.num_calls == 1


# without virtual memory


@pytest.fixture
def plain():
    driver = HostDriver(64 * PAGE, page_bytes=PAGE, without=frozenset({"vmm"}))
    yield driver
    assert driver.close() == ()


def test_without_virtual_memory_it_is_one_plain_allocation(plain: HostDriver, ledger: Ledger) -> None:
    arena = make(plain, ledger, reserve_bytes=10 * PAGE, tag="kv", zero_ranges=((0, 8),))
    assert (arena.path, arena.committed_bytes, arena.usable_bytes) == ("static", 10 * PAGE, 10 * PAGE)
    assert "static" in repr(arena)
    assert booked(ledger) == (0, 10 * PAGE, 1)
    ctypes.memset(arena.address, 7, 10 * PAGE)
    assert arena.commit(3 * PAGE) == 10 * PAGE
    assert ctypes.string_at(arena.address, 9) == bytes(8) + b"\x07"
    assert booked(ledger) == (3 * PAGE, 10 * PAGE, 1)
    assert arena.decommit(PAGE) == 0
    assert booked(ledger) == (PAGE, 10 * PAGE, 1)
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(11 * PAGE)
    assert arena.num_edits == 0
    arena.close()
    assert (booked(ledger), plain.used_bytes) == ((0, 0, 0), 0)


def test_a_plain_allocation_is_as_large_as_it_may_be(plain: HostDriver, ledger: Ledger) -> None:
    with pytest.raises(BufferOOM, match="kv pool"):
        make(plain, ledger, reserve_bytes=100 * PAGE)
    arena = make(plain, ledger, reserve_bytes=100 * PAGE, least_reserve_bytes=20 * PAGE)
    assert arena.size_bytes == 50 * PAGE
    arena.close()


def test_a_strict_seal_refuses_a_plain_allocation_too(plain: HostDriver, ledger: Ledger) -> None:
    ledger.seal(strict=True)
    with pytest.raises(LedgerError):
        make(plain, ledger, reserve_bytes=PAGE)
    assert plain.used_bytes == 0


# drained points


def test_an_edit_waits_for_the_streams_and_is_refused_while_they_run(
    arena: VaArena, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.commit(4 * PAGE)
    waits: list[float | None] = []

    def wait_idle(*, timeout_s: float | None = None) -> bool:
        waits.append(timeout_s)
        return timeout_s is None

    monkeypatch.setattr(arena.stream.device.fences, "wait_idle", wait_idle)
    for call in (lambda: arena.commit(5 * PAGE, timeout_s=2), lambda: arena.decommit(0, timeout_s=3)):
        with pytest.raises(BufferInUse, match="still running"):
            call()
        assert (arena.committed_bytes, driver.used_bytes) == (4 * PAGE, 4 * PAGE)
    with pytest.raises(BufferInUse):
        arena.close(timeout_s=1)
    assert waits == [2, 3, 1]
    assert arena.decommit(PAGE) == 3 * PAGE
    assert waits[-1] is None


def test_concurrent_growth_does_not_wait(driver: HostDriver, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make(driver, ledger, concurrent_growth=True)
    with monkeypatch.context() as patch:
        patch.setattr(arena.stream.device.fences, "wait_idle", lambda **_: pytest.fail("it waited"))
        arena.commit(3 * PAGE)
    arena.close()


def test_nothing_is_edited_during_a_capture(
    arena: VaArena, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.commit(2 * PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "stream_capturing", lambda _: True)
        for call in (lambda: arena.commit(3 * PAGE), lambda: arena.decommit(0), arena.close):
            with pytest.raises(CaptureError):
                call()
        arena.commit(2 * PAGE)  # nothing to do, so nothing to refuse
    assert (arena.committed_bytes, driver.used_bytes) == (2 * PAGE, 2 * PAGE)


# zeros


def test_new_memory_is_zero_before_it_counts(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, zero_on_commit=True)
    fault.arm(1, calls=frozenset({"fill"}))
    with pytest.raises(BufferOOM):
        arena.commit(2 * PAGE)
    assert (arena.committed_bytes, driver.used_bytes, ledger.accounted_bytes) == (0, 0, 0)
    fault.arm(None, calls=frozenset({"fill"}))
    arena.commit(2 * PAGE)
    ctypes.memset(arena.address, 9, 2 * PAGE)
    arena.commit(4 * PAGE)
    assert fault.num_calls == 2
    assert ctypes.string_at(arena.address, 4 * PAGE) == b"\x09" * (2 * PAGE) + bytes(2 * PAGE)
    arena.close()


def test_zeroing_is_asked_of_the_consumers_stream(driver: HostDriver, ledger: Ledger, monkeypatch) -> None:
    arena = make(driver, ledger, zero_on_commit=True)
    consumer = Stream.create(arena.stream.device)
    seen = []
    monkeypatch.setattr(driver, "fill", lambda *_, stream: seen.append(stream))
    arena.commit(PAGE, stream=consumer)
    assert seen == [consumer.handle]
    arena.close()
    consumer.close()


def test_semaphores_are_zero_after_every_commit_and_wake(driver: HostDriver, ledger: Ledger) -> None:
    arena = make(driver, ledger, tag="kv", restore=Restore.CPU, zero_ranges=((8, 8), (3 * PAGE - 4, 8)))
    virtual = arena.stream.device.virtual
    for num_pages in (1, 2, 3, 5):
        arena.commit(num_pages * PAGE)
        assert ctypes.string_at(arena.address + 8, 8) == bytes(8)
        ctypes.memset(arena.address, 1, num_pages * PAGE)
    virtual.release("kv")
    virtual.materialize("kv").sync()
    expected = bytearray(b"\x01" * (5 * PAGE))
    expected[8:16] = expected[3 * PAGE - 4 : 3 * PAGE + 4] = bytes(8)
    assert ctypes.string_at(arena.address, 5 * PAGE) == expected
    arena.keep_zero(4 * PAGE, 2)
    assert ctypes.string_at(arena.address + 4 * PAGE, 3) == b"\0\0\1"
    arena.decommit(2 * PAGE)
    virtual.release("kv")
    virtual.materialize("kv").sync()  # what is zeroed followed what is committed
    assert ctypes.string_at(arena.address, 2 * PAGE) == expected[: 2 * PAGE]
    with pytest.raises(ValueError, match="has no"):
        arena.keep_zero(999 * PAGE, 2 * PAGE)
    arena.close()
    with pytest.raises(ValueError, match="has no"):
        make(driver, ledger, zero_ranges=((-1, 2),))


# sleep


def test_exactly_what_was_committed_wakes(driver: HostDriver, ledger: Ledger) -> None:
    arena = make(driver, ledger, tag="kv", restore=Restore.CPU, chunk_bytes=4 * PAGE)
    virtual = arena.stream.device.virtual
    arena.commit(10 * PAGE)
    address = arena.address
    ctypes.memset(address, 5, 10 * PAGE)
    assert virtual.release("kv").freed_bytes == 10 * PAGE
    assert (driver.used_bytes, booked(ledger)) == (0, (0, 0, 0))
    assert (arena.is_asleep, arena.usable_bytes, arena.committed_bytes) == (True, 0, 10 * PAGE)
    assert "asleep" in repr(arena)
    for call in (lambda: arena.commit(11 * PAGE), lambda: arena.decommit(0), lambda: arena.keep_zero(0, 1)):
        with pytest.raises(NotMaterialized):
            call()
    driver.foreign_bytes = 55 * PAGE
    with pytest.raises(CannotMaterialize):
        virtual.materialize("kv")
    driver.foreign_bytes = 0
    assert virtual.materialize("kv").num_bytes == 10 * PAGE
    assert ctypes.string_at(address, 10 * PAGE) == b"\x05" * (10 * PAGE)
    assert booked(ledger) == (10 * PAGE, 10 * PAGE, 4)
    arena.close()


def test_closing_while_asleep_gives_only_addresses_back(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, tag="kv")
    arena.commit(3 * PAGE)
    virtual = arena.stream.device.virtual
    virtual.release("kv")
    fault.arm(None, calls=frozenset({"unmap", "phys_release", "va_free"}))
    arena.close()
    assert dict(fault.by_call) == {"va_free": 1}
    assert not virtual.materialize("kv")
    assert booked(ledger) == (0, 0, 0)


# what the driver does not take back


def test_one_that_is_not_unmapped_is_out_of_use_and_the_rest_goes(driver: HostDriver, ledger: Ledger, caplog) -> None:
    arena = make(driver, ledger, chunk_bytes=2 * PAGE)
    arena.commit(9 * PAGE)
    bad = arena.address + 4 * PAGE
    unmap = driver.unmap

    def refusing(addr: int, size: int) -> None:
        if addr <= bad < addr + size:
            raise DriverError("unmap", "STUCK")
        unmap(addr, size)

    driver.unmap = refusing  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "tonnage"):
        assert arena.decommit(0) == 7 * PAGE
    assert arena.poisoned == ((bad, 2 * PAGE),)
    assert f"at {bad:#x} are out of use for good, with handle" in caplog.text
    assert arena.leftover_bytes == ledger.accounted_bytes == driver.used_bytes == 2 * PAGE
    arena.commit(4 * PAGE)
    with pytest.raises(BufferOOM, match="the arena ends at"):
        arena.commit(5 * PAGE)
    assert arena.committed_bytes == 4 * PAGE
    with pytest.raises(DriverError, match="STUCK"):
        arena.close()
    assert ledger.accounted_bytes == driver.used_bytes == 2 * PAGE
    driver.unmap = unmap  # type: ignore[method-assign]
    arena.close()
    assert booked(ledger) == (0, 0, 0)


def test_one_call_that_fails_costs_nothing(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, chunk_bytes=2 * PAGE)
    arena.commit(8 * PAGE)
    fault.arm(1, calls=frozenset({"unmap"}))
    assert arena.decommit(2 * PAGE) == 6 * PAGE
    assert (fault.num_calls, arena.poisoned) == (4, ())  # the run, then three handles
    arena.close()


def test_a_rollback_that_fails_is_not_tried_twice(driver: HostDriver, ledger: Ledger, monkeypatch) -> None:
    arena = make(driver, ledger, chunk_bytes=PAGE)
    arena.commit(PAGE)
    unmap, failing = driver.unmap, iter([True] * 2)  # the run, and its one handle
    map_ = driver.map

    def refusing(addr: int, size: int, handle: int) -> None:
        if addr > arena.address + PAGE:
            raise DriverOOM("map", "FULL")
        map_(addr, size, handle)

    def stuck(addr: int, size: int) -> None:
        if next(failing, False):
            raise DriverError("unmap", "STUCK")
        unmap(addr, size)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "map", refusing)
        patch.setattr(driver, "unmap", stuck)
        with pytest.raises(BufferOOM, match="FULL"):
            arena.commit(4 * PAGE)
    assert arena.poisoned == ((arena.address + PAGE, PAGE),)
    assert (arena.committed_bytes, arena.leftover_bytes) == (PAGE, PAGE)
    assert ledger.accounted_bytes == driver.used_bytes == 2 * PAGE
    arena.close()


@pytest.mark.parametrize("num_times", [3, 4])
def test_a_driver_that_is_not_ready_is_waited_for_a_few_times(
    driver: HostDriver, ledger: Ledger, monkeypatch, num_times: int
) -> None:
    arena = make(driver, ledger)
    set_access, failing = driver.set_access, iter([True] * num_times)

    def busy(*arguments: int, **more: tuple[int, ...]) -> None:
        if next(failing, False):
            raise DriverError("set_access", "NOT_READY")
        set_access(*arguments, **more)

    monkeypatch.setattr(driver, "set_access", busy)
    if num_times < 4:
        assert arena.commit(2 * PAGE) == 2 * PAGE
    else:
        with pytest.raises(DriverError, match="NOT_READY"):
            arena.commit(2 * PAGE)
        assert arena.committed_bytes == driver.used_bytes == ledger.accounted_bytes == 0
    arena.close()


def test_a_handle_that_is_not_taken_back_is_tried_again(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, tag="kv")
    arena.commit(3 * PAGE)
    fault.arm(2, calls=frozenset({"phys_release"}))
    assert arena.decommit(0) == 3 * PAGE  # the one that failed went with the second attempt
    assert ledger.accounted_bytes == driver.used_bytes == 0
    arena.commit(3 * PAGE)
    fault.arm(2, calls=frozenset({"phys_release"}))
    arena.stream.device.virtual.release("kv")
    assert arena.leftover_bytes == ledger.accounted_bytes == driver.used_bytes == PAGE
    arena.stream.device.virtual.materialize("kv")
    arena.commit(4 * PAGE)
    assert (arena.leftover_bytes, ledger.accounted_bytes, driver.used_bytes) == (0, 4 * PAGE, 4 * PAGE)
    arena.close()


def test_a_sleep_that_fails_leaves_an_arena_that_can_only_be_closed(driver: HostDriver, ledger: Ledger) -> None:
    fault = FaultDriver(driver)
    arena = make(fault, ledger, tag="kv")
    arena.commit(3 * PAGE)
    fault.arm(1, forever=True, calls=frozenset({"unmap"}))
    with pytest.raises(DriverError):
        arena.stream.device.virtual.release("kv")
    assert ledger.accounted_bytes == driver.used_bytes == 3 * PAGE
    fault.arm(None)
    with pytest.raises(RangePoisoned):
        arena.commit(PAGE)
    arena.close()
    assert ledger.accounted_bytes == 0


# other processes and the end


def test_a_child_is_told_not_to_use_it(arena: VaArena) -> None:
    arena.commit(PAGE)
    child = os.fork()
    if child == 0:
        good = 0
        for call in (lambda: arena.commit(2 * PAGE), lambda: arena.decommit(0), arena.close):
            try:
                call()
            except ForkedProcess as error:
                good += "spawn" in str(error)
        os._exit(0 if good == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.commit(2 * PAGE)


def test_a_program_that_closes_nothing_ends_in_silence() -> None:
    program = f"""
from tonnage.buffers import Device, Stream, VaArena
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

class Loud(HostDriver):
    def unmap(self, addr, size):
        print("the driver was called")

arena = VaArena(Stream(Device(Loud(2**22, page_bytes={PAGE}))), ledger=Ledger(0, 2**22), owner="kv",
                line=LineKind.KV, reserve_bytes=2**22, tag="kv")
arena.commit({3 * PAGE})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class ArenaMachine(RuleBasedStateMachine):
    """An arena against lists: what is committed, what is written there, whether it sleeps, where it ends."""

    BULK, PAGES, CAPACITY = 3, 30, 40

    @initialize(restore=st.sampled_from([Restore.CPU, Restore.MEMSET]), fine_from=st.sampled_from([None, 0, 7]))
    def start(self, restore: Restore, fine_from: int | None) -> None:
        self.host = HostDriver(self.CAPACITY * SMALL, page_bytes=SMALL)
        self.fault = FaultDriver(self.host)
        self.ledger = Ledger(0, self.CAPACITY * SMALL)
        self.restore, self.fine_from = restore, fine_from
        self.arena = make(
            self.fault,
            self.ledger,
            reserve_bytes=self.PAGES * SMALL,
            chunk_bytes=self.BULK * SMALL,
            fine_from_bytes=None if fine_from is None else fine_from * SMALL,
            tag="kv",
            restore=restore,
        )
        self.address = self.arena.address
        self.bytes: list[int | None] = []  # what each committed page holds; None: anything
        self.handles: list[int] = []  # their pages, in order
        self.asleep = False
        self.end = self.PAGES  # no page from here on is ever used again
        self.lost = 0  # pages that are out of use and yet ours

    def naive_handles(self, num_pages: int) -> list[int]:
        found, at = [], len(self.bytes)
        last = self.PAGES if self.fine_from is None else self.fine_from
        while at < num_pages:
            bulk = at % self.BULK == 0 and at + self.BULK <= num_pages and at + self.BULK <= last
            found.append(self.BULK if bulk else 1)
            at += found[-1]
        return found

    @precondition(lambda self: not self.asleep)
    @rule(num_pages=st.integers(0, 30), fails=st.sampled_from([None, None, 1, 2, 5, 9]), forever=st.booleans())
    def commit(self, num_pages: int, fails: int | None, forever: bool) -> None:
        new = self.naive_handles(num_pages)
        self.fault.arm(fails, forever=forever)
        edits = self.arena.num_edits
        try:
            self.arena.commit(num_pages * SMALL)
        except BufferOOM:
            assert self.refused(fails, forever, new) or num_pages > self.end or self.full(sum(new))
        else:
            assert not new or (num_pages <= self.end and not self.full(sum(new)))
            assert not self.refused(fails, forever, new)
            assert new or self.arena.num_edits == edits
            self.handles += new
            self.bytes += [None] * sum(new)
        self.fault.arm(None)

    def full(self, num_new: int) -> bool:
        return num_new + len(self.bytes) + self.lost + self.host.foreign_bytes // SMALL > self.CAPACITY

    def refused(self, fails: int | None, forever: bool, handles: list[int]) -> bool:
        """Memory that is refused once is asked for again; mapping it is not."""
        return self.fault.num_injected > 0 and (forever or fails > len(handles))

    @precondition(lambda self: not self.asleep)
    @rule(num_pages=st.integers(0, 30), stuck=st.sampled_from([None, None, None, 0, 4, 9]))
    def decommit(self, num_pages: int, stuck: int | None) -> None:
        """``stuck``: the page whose unmapping fails, however it is asked."""
        gone = 0
        keep = list(self.handles)
        while keep and sum(keep) - keep[-1] >= num_pages:
            gone += keep.pop()
        kept_pages = sum(keep)
        bad = 0
        if stuck is not None and kept_pages <= stuck < len(self.bytes):
            at = 0
            for size in self.handles:
                if at <= stuck < at + size:
                    bad, self.end = size, min(self.end, at)
                at += size
        with self._stuck(stuck):
            assert self.arena.decommit(num_pages * SMALL) == (gone - bad) * SMALL
        self.lost += bad
        self.handles, self.bytes = keep, self.bytes[:kept_pages]

    @contextmanager
    def _stuck(self, page: int | None):
        unmap, bad = self.host.unmap, self.address + (page or 0) * SMALL

        def refusing(addr: int, size: int) -> None:
            if page is not None and addr <= bad < addr + size:
                raise DriverError("unmap", "STUCK")
            unmap(addr, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.host, "unmap", refusing)
            yield

    @precondition(lambda self: self.bytes and not self.asleep)
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        page = data.draw(st.integers(0, len(self.bytes) - 1))
        ctypes.memset(self.address + page * SMALL, value, SMALL)
        self.bytes[page] = value

    @precondition(lambda self: not self.asleep)
    @rule()
    def sleep(self) -> None:
        self.arena.stream.device.virtual.release("kv")
        self.asleep = True

    @precondition(lambda self: self.asleep)
    @rule(fails=st.sampled_from([None, None, 1, 2, 4, 7]), forever=st.booleans())
    def wake(self, fails: int | None, forever: bool) -> None:
        self.fault.arm(fails, forever=forever)
        try:
            self.arena.stream.device.virtual.materialize("kv")
        except (BufferOOM, DriverError):
            assert self.refused(fails, forever, self.handles) or self.full(0)
        else:
            assert not self.refused(fails, forever, self.handles)
            self.asleep = False
            if self.restore is Restore.MEMSET:
                self.bytes = [0] * len(self.bytes)
        self.fault.arm(None)

    @precondition(lambda self: self.asleep)
    @rule()
    def sleepers_are_not_edited(self) -> None:
        for call in (self.arena.commit, self.arena.decommit):
            with pytest.raises(NotMaterialized):
                call(SMALL)

    @rule(num_pages=st.integers(0, 20))
    def others_take(self, num_pages: int) -> None:
        self.host.foreign_bytes = num_pages * SMALL

    @invariant()
    def the_books_agree(self) -> None:
        physical = ((0 if self.asleep else len(self.bytes)) + self.lost) * SMALL
        assert self.arena.committed_bytes == len(self.bytes) * SMALL
        assert self.arena.is_asleep == self.asleep
        assert self.host.used_bytes == self.ledger.accounted_bytes == physical
        assert sum(size for _, size in self.arena.poisoned) == self.lost * SMALL
        assert self.arena.address == self.address

    @invariant()
    def every_byte_is_where_it_was(self) -> None:
        if not self.asleep:
            for page, value in enumerate(self.bytes):
                if value is not None:
                    assert ctypes.string_at(self.address + page * SMALL, SMALL) == bytes([value]) * SMALL

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            assert self.ledger.accounted_bytes == 0
            assert self.host.close() == ()


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
