"""The host device beyond the contract: real pages, stable addresses, limits, leaks."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tonnage.device.fabric import HostFabric
from tonnage.device.fault import ALLOCATING, RELEASING, FaultDriver
from tonnage.device.host import CALLS_BEHIND, HostDriver
from tonnage.device.hostpages import HostPages
from tonnage.device.ranges import RangeBook
from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported

PAGE = 2 * 2**20


@pytest.fixture
def driver():
    driver = HostDriver(32 * PAGE)
    yield driver
    driver.close()


def allocated_bytes(driver: HostDriver) -> int:
    """What the system keeps for the device's file."""
    return os.fstat(driver._fd).st_blocks * 512


def map_new(driver: HostDriver, addr: int, num_pages: int = 1) -> int:
    handle = driver.phys_create(num_pages * PAGE)
    driver.map(addr, num_pages * PAGE, handle)
    driver.set_access(addr, num_pages * PAGE)
    return handle


def test_creation_takes_real_pages_and_release_gives_them_back(driver: HostDriver) -> None:
    first, second = driver.phys_create(3 * PAGE), driver.phys_create(2 * PAGE)
    assert allocated_bytes(driver) == driver.used_bytes == 5 * PAGE
    driver.phys_release(first)
    assert allocated_bytes(driver) == driver.used_bytes == 2 * PAGE
    driver.phys_release(second)
    assert allocated_bytes(driver) == driver.used_bytes == 0


def test_own_bytes_agrees_with_the_books_before_anything_is_touched(driver: HostDriver) -> None:
    driver.set_baseline()
    map_new(driver, driver.va_reserve(16 * PAGE, align=PAGE), 16)
    own = driver.own_bytes()
    assert own is not None
    assert abs(own - 16 * PAGE) < 4 * 2**20


def test_a_baseline_leaves_out_no_device_memory(driver: HostDriver) -> None:
    map_new(driver, driver.va_reserve(16 * PAGE, align=PAGE), 16)
    driver.set_baseline()
    own = driver.own_bytes()
    assert own is not None
    assert abs(own - 16 * PAGE) < 4 * 2**20


def test_the_heap_counts_as_own_but_takes_no_page(driver: HostDriver) -> None:
    driver.set_baseline()
    # New pages for sure: the heap may still hold, resident, what an earlier test of the process gave back to it.
    heap = mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    heap.write(b"\1" * len(heap))
    own = driver.own_bytes()
    assert own is not None
    assert own > 7 * 2**20
    assert driver.used_bytes == 0
    heap.close()


def test_foreign_bytes_shrink_what_is_free_and_what_can_be_taken(driver: HostDriver) -> None:
    driver.foreign_bytes = 30 * PAGE
    assert driver.mem_info() == (2 * PAGE, 32 * PAGE)
    with pytest.raises(DriverOOM, match="held by others"):
        driver.phys_create(3 * PAGE)
    driver.foreign_bytes = 40 * PAGE
    assert driver.mem_info()[0] == 0


def test_the_address_is_stable_while_pages_come_and_go(driver: HostDriver) -> None:
    base = driver.va_reserve(8 * PAGE, align=PAGE)
    for round_number in range(3):
        handle = map_new(driver, base)
        ctypes.memset(base, round_number + 1, PAGE)
        assert ctypes.string_at(base + PAGE - 1, 1) == bytes([round_number + 1])
        driver.unmap(base, PAGE)
        driver.phys_release(handle)
    map_new(driver, base)
    assert ctypes.string_at(base, 4) == bytes(4)  # new pages read zero


def test_neighbouring_mappings_can_be_unmapped_together(driver: HostDriver) -> None:
    base = driver.va_reserve(4 * PAGE, align=PAGE)
    handles = [map_new(driver, base + index * PAGE) for index in range(3)]
    with pytest.raises(DriverError):
        driver.unmap(base, 4 * PAGE)
    driver.unmap(base, 3 * PAGE)
    for handle in handles:
        driver.phys_release(handle)
    driver.va_free(base, 4 * PAGE)
    assert driver.leaks() == ()


def test_the_number_of_mappings_has_a_margin() -> None:
    driver = HostDriver(32 * PAGE, max_mappings=2)
    base = driver.va_reserve(8 * PAGE, align=PAGE)
    map_new(driver, base)
    map_new(driver, base + 2 * PAGE)
    handle = driver.phys_create(PAGE)
    with pytest.raises(DriverOOM, match="2 ranges are mapped"):
        driver.map(base + 4 * PAGE, PAGE, handle)
    driver.unmap(base, PAGE)
    driver.map(base + 4 * PAGE, PAGE, handle)
    driver.close()


def test_hundreds_of_scattered_mappings_are_no_trouble() -> None:
    page = 4096 * 4
    driver = HostDriver(2000 * page, page_bytes=page)
    base = driver.va_reserve(2000 * page, align=page)
    for index in range(0, 2000, 2):
        handle = driver.phys_create(page)
        driver.map(base + index * page, page, handle)
        driver.set_access(base + index * page, page)
        driver.phys_release(handle)
    assert driver.used_bytes == 1000 * page
    for index in range(0, 2000, 2):
        driver.unmap(base + index * page, page)
    assert driver.used_bytes == 0
    driver.close()


def test_a_copy_to_and_from_memory_that_is_not_the_devices(driver: HostDriver) -> None:
    base = driver.va_reserve(PAGE, align=PAGE)
    map_new(driver, base)
    ours = ctypes.create_string_buffer(b"hello", 100)
    driver.copy(base, ctypes.addressof(ours), 5, stream=0)
    back = ctypes.create_string_buffer(100)
    driver.copy(ctypes.addressof(back), base, 5, stream=0)
    assert back.value == b"hello"
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        driver.copy(base, ctypes.addressof(ours), PAGE * 10, stream=0)


def test_memory_that_may_only_be_read_is_not_written(driver: HostDriver) -> None:
    text = ctypes.cast(ctypes.pythonapi.Py_GetVersion, ctypes.c_void_p).value  # code: readable, not writable
    assert text
    base = driver.va_reserve(PAGE, align=PAGE)
    map_new(driver, base)
    driver.copy(base, text, 16, stream=0)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        driver.fill(text, 0, 1, stream=0)


def test_close_tells_what_was_alive_and_is_final(driver: HostDriver) -> None:
    addr = driver.va_reserve(2 * PAGE, align=PAGE)
    handle = map_new(driver, addr)
    plain, host = driver.mem_alloc(100), driver.host_alloc(100, flags=0)
    leaks = "\n".join(driver.close())
    for number in (addr, handle, plain, host):
        assert f"{number:#x}" in leaks
    assert driver.close() == ()
    for call in (driver.activate, driver.mem_info, lambda: driver.phys_create(PAGE)):
        with pytest.raises(DriverError, match="closed"):
            call()


def test_close_with_nothing_alive_reports_nothing() -> None:
    assert HostDriver(PAGE).close() == ()


@pytest.mark.parametrize("arguments", [{"page_bytes": 1000}, {"page_bytes": 0}])
def test_odd_pages_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(DriverError, match="page_bytes"):
        HostDriver(PAGE, **arguments)


def test_an_empty_device_is_refused() -> None:
    with pytest.raises(DriverError, match="capacity"):
        HostDriver(0)


def test_what_a_host_cannot_do(driver: HostDriver) -> None:
    with pytest.raises(DriverUnsupported):
        driver.set_access(PAGE, PAGE, peers=(1,))


def test_a_system_without_memfd_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(DriverUnsupported, match="needs Linux"):
        HostDriver(PAGE)


def test_a_system_that_has_no_more_memory_reads_as_out_of_memory(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DriverOOM, match="ENOSPC"):
        driver.phys_create(PAGE)
    with pytest.raises(DriverOOM):
        driver.mem_alloc(1)
    assert (driver.used_bytes, driver.leaks()) == (0, ())


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_plain_allocation_that_fails_half_way_leaves_nothing(
    driver: HostDriver, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("phys_create", "va_reserve", "map", "set_access")
    failing = FaultDriver(None, nth)  # type: ignore[arg-type] - counts alone
    for call in steps:
        monkeypatch.setattr(HostPages, call, _first_failing(failing, call, getattr(HostPages, call)))
    with pytest.raises(DriverOOM):
        driver.mem_alloc(100)
    assert driver.leaks() == ()
    driver.mem_free(driver.mem_alloc(100))


def _first_failing(fault: FaultDriver, call: str, real):
    def method(*args: object, **kwargs: object) -> object:
        fault.count(call)
        return real(*args, **kwargs)

    return method


def test_threads_share_a_device(driver: HostDriver) -> None:
    def work(_: int) -> None:
        for _ in range(20):
            driver.mem_free(driver.mem_alloc(1000))
            driver.phys_release(driver.phys_create(PAGE))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what a thread raised
    assert (driver.used_bytes, driver.leaks()) == (0, ())


def test_a_fault_driver_fails_the_nth_call_once_or_from_then_on(driver: HostDriver) -> None:
    fault = FaultDriver(driver, 2)
    kept = [fault.mem_alloc(1)]
    with pytest.raises(DriverOOM, match="INJECTED"):
        fault.mem_alloc(1)
    kept.append(fault.mem_alloc(1))
    assert (fault.num_calls, fault.num_injected, fault.by_call["mem_alloc"]) == (3, 1, 3)
    fault.arm(1, forever=True)
    for _ in range(3):
        with pytest.raises(DriverOOM):
            fault.phys_create(PAGE)
    fault.arm(None)
    for addr in kept:
        fault.mem_free(addr)  # frees do not count
    assert (fault.num_calls, driver.used_bytes) == (0, 0)


def test_every_call_that_can_fail_exists() -> None:
    assert all(callable(getattr(HostDriver, name)) for name in ALLOCATING | RELEASING)
    with pytest.raises(ValueError, match="reboot"):
        FaultDriver(HostDriver(PAGE), 1, calls=frozenset({"reboot"}))


def outcomes(call: Callable[[], object], times: int) -> str:
    """A letter per call: "." for a success, "x" for a failure."""

    def one() -> str:
        try:
            call()
        except DriverError:
            return "x"
        return "."

    return "".join(one() for _ in range(times))


def test_a_fault_driver_fails_a_few_times_with_a_code_of_its_own(driver: HostDriver) -> None:
    fault = FaultDriver(driver)
    addr = fault.va_reserve(PAGE, align=PAGE)
    fault.map(addr, PAGE, fault.phys_create(PAGE))
    fault.arm(2, times=3, calls=frozenset({"set_access"}), error=DriverError, code="NOT_READY")
    assert outcomes(lambda: fault.set_access(addr, PAGE), 7) == ".xxx..."
    fault.arm(1, calls=frozenset({"set_access"}), error=DriverError, code="NOT_READY")
    with pytest.raises(DriverError) as caught:
        fault.set_access(addr, PAGE)
    assert (caught.value.call, caught.value.code) == ("set_access", "NOT_READY")
    assert not isinstance(caught.value, DriverOOM)


def test_a_fault_driver_fails_at_random_and_again_the_same(driver: HostDriver) -> None:
    fault = FaultDriver(driver)

    def run(seed: int, probability: float) -> str:
        fault.arm_random(probability, seed=seed)
        found = outcomes(lambda: driver.mem_free(fault.mem_alloc(1)), 60)
        assert (fault.num_calls, fault.num_injected) == (60, found.count("x"))
        return found

    assert run(1, 0.3) == run(1, 0.3) != run(2, 0.3)
    assert 5 < run(1, 0.3).count("x") < 40
    assert (run(1, 0.0), run(1, 1.0)) == ("." * 60, "x" * 60)


def test_a_fault_driver_fails_inside_the_roll_back_too(driver: HostDriver) -> None:
    fault = FaultDriver(driver)
    handle = fault.phys_create(PAGE)
    fault.arm(1, in_rollback=True)
    fault.mem_free(driver.mem_alloc(1))  # no failure yet, so this is no roll-back
    with pytest.raises(DriverOOM):
        fault.va_reserve(PAGE, align=PAGE)
    with pytest.raises(DriverError, match="first call of the roll-back") as caught:
        fault.phys_release(handle)
    assert not isinstance(caught.value, DriverOOM)
    fault.phys_release(handle)
    assert (fault.num_injected, driver.used_bytes) == (2, 0)


def test_an_error_may_come_late(driver: HostDriver) -> None:
    fault = FaultDriver(driver)
    addr = fault.mem_alloc(10)
    fault.arm(1, calls=frozenset({"fill"}), error=DeviceLost, code="ILLEGAL_ADDRESS", late=True)
    fault.fill(addr, 3, 10, stream=0)
    assert ctypes.string_at(addr, 1) == b"\x03"
    with pytest.raises(DeviceLost, match="fill, call 1 of those that can fail") as caught:
        fault.stream_sync(0)
    assert caught.value.call == "stream_sync"
    fault.device_sync()
    assert (fault.num_calls, fault.num_injected) == (1, 1)


def test_decorators_pass_everything_on_and_set_what_is_the_devices(driver: HostDriver) -> None:
    inner = FaultDriver(driver)
    outer = FaultDriver(inner, 1)
    assert (outer.uuid, outer.kind, outer.capacity_bytes) == (driver.uuid, "host", driver.capacity_bytes)
    outer.foreign_bytes = PAGE
    assert driver.foreign_bytes == PAGE
    with pytest.raises(DriverOOM):
        outer.mem_alloc(1)
    assert (outer.num_calls, inner.num_calls) == (1, 0)
    inner.arm(1)
    outer.arm(None)
    with pytest.raises(DriverOOM):
        outer.mem_alloc(1)
    assert (outer.num_injected, inner.num_injected) == (0, 1)
    with pytest.raises(AttributeError):
        _ = outer.no_such_thing
    assert repr(outer) == f"<FaultDriver over <FaultDriver over {driver!r}>>"


def test_a_method_replaced_below_a_decorator_is_seen(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FaultDriver(driver)
    fault.mem_free(fault.mem_alloc(1))
    monkeypatch.setattr(driver, "mem_alloc", lambda size: size + 1)
    assert fault.mem_alloc(41) == 42


# what can be switched off


@pytest.mark.parametrize("name", CALLS_BEHIND)
def test_what_is_switched_off_is_refused_with_a_reason(name: str) -> None:
    driver = HostDriver(8 * PAGE, without=frozenset({name}), fabric=HostFabric())
    found = driver.capabilities()
    assert not getattr(found, name)
    assert "NOT_SUPPORTED" in found.reasons[name]
    for call in CALLS_BEHIND[name]:
        with pytest.raises(DriverUnsupported) as caught:
            getattr(driver, call)(PAGE)
        assert (caught.value.call, caught.value.code) == (call, "NOT_SUPPORTED")
    driver.mem_free(driver.mem_alloc(PAGE))  # plain memory is always there
    assert driver.close() == ()


def test_what_needs_another_capability_falls_with_it() -> None:
    found = HostDriver(PAGE, without=frozenset({"vmm", "managed"}), fabric=HostFabric()).capabilities()
    assert (found.exportable, found.multicast, found.concurrent_managed) == (False, False, False)
    assert "needs 'vmm'" in found.reasons["exportable"]
    assert found.pools
    with pytest.raises(DriverError, match=r"no capabilities \['wings'\]"):
        HostDriver(PAGE, without=frozenset({"wings"}))


def test_every_capability_that_is_absent_has_a_reason_and_no_other(driver: HostDriver) -> None:
    found = driver.capabilities()
    driver.probe_again()
    assert driver.capabilities() == found
    assert {name for name in CALLS_BEHIND if not getattr(found, name)} == set(found.reasons)
    assert set(found.reasons) == {"multicast", "host_register"}


def test_managed_memory_takes_capacity_and_is_freed_like_plain_memory(driver: HostDriver) -> None:
    addr = driver.managed_alloc(3 * PAGE - 5)
    assert driver.used_bytes == 3 * PAGE
    ctypes.memset(addr, 7, 3 * PAGE - 5)  # the host may touch it
    driver.copy(addr, addr + 100, 10, stream=0)
    driver.mem_free(addr)
    assert (driver.used_bytes, driver.leaks()) == (0, ())
    with pytest.raises(DriverOOM):
        driver.managed_alloc(33 * PAGE)


def test_pinned_memory_may_have_a_limit_of_its_own() -> None:
    driver = HostDriver(PAGE, host_capacity_bytes=1000)
    addr = driver.host_alloc(600, flags=0)
    with pytest.raises(DriverOOM, match="asked for 401 bytes; 600 of 1,000 bytes of host memory in use"):
        driver.host_alloc(401, flags=0)
    driver.host_free(addr)
    driver.host_free(driver.host_alloc(1000, flags=0))
    assert driver.close() == ()


def test_a_pools_high_marks_can_start_again(driver: HostDriver) -> None:
    pool = driver.pool_create()
    first, second = (driver.pool_alloc(pool, PAGE, stream=0) for _ in range(2))
    driver.pool_free(first, stream=0)
    driver.pool_reset_high(pool)
    stats = driver.pool_stats(pool)
    assert (stats.used_high_bytes, stats.reserved_high_bytes) == (PAGE, 2 * PAGE)
    driver.pool_free(second, stream=0)
    driver.pool_trim(pool, 0)
    driver.pool_reset_high(pool)
    stats = driver.pool_stats(pool)
    assert (stats.used_high_bytes, stats.reserved_high_bytes, stats.reserved_bytes) == (0, 0, 0)


def test_a_pool_fragments(driver: HostDriver) -> None:
    pool = driver.pool_create()
    pieces = [driver.pool_alloc(pool, PAGE // 4, stream=0) for _ in range(8)]
    for piece in pieces[::2]:
        driver.pool_free(piece, stream=0)
    assert driver.pool_stats(pool).used_bytes == PAGE
    driver.pool_alloc(pool, PAGE // 2, stream=0)  # a page is free, in four places
    assert driver.pool_stats(pool).reserved_bytes == 3 * PAGE


# another process


def test_another_process_takes_memory_between_the_look_and_the_call(driver: HostDriver) -> None:
    driver.foreign.holds(30 * PAGE, at="phys_create", nth=2)
    driver.phys_release(driver.phys_create(PAGE))
    assert driver.mem_info()[0] == 32 * PAGE
    with pytest.raises(DriverOOM, match="held by others"):
        driver.phys_create(3 * PAGE)
    assert not driver.foreign.is_armed
    assert driver.mem_info()[0] == 2 * PAGE


def test_its_moves_come_after_any_number_of_calls(driver: HostDriver) -> None:
    driver.foreign.holds(5 * PAGE, nth=3)
    driver.foreign.holds(0, nth=5)
    seen = [driver.mem_info()[0] // PAGE for _ in range(6)]
    assert seen == [32, 32, 27, 27, 32, 32]
    with pytest.raises(ValueError, match="neither"):
        driver.foreign.holds(-1)


def test_a_hook_hears_the_calls_from_outside_alone(driver: HostDriver) -> None:
    heard: list[str] = []
    driver.foreign.hook = heard.append
    driver.mem_free(driver.mem_alloc(PAGE))
    driver.foreign.hook = None
    driver.mem_info()
    assert heard == ["mem_alloc", "mem_free"]


def test_two_processes_share_one_card() -> None:
    """Each sees what the other took, as soon as it asks."""
    ours, theirs = HostDriver(32 * PAGE), HostDriver(32 * PAGE)
    for one, other in ((ours, theirs), (theirs, ours)):
        one.foreign.hook = lambda _, one=one, other=other: setattr(one, "foreign_bytes", other.used_bytes)
    handle = ours.phys_create(20 * PAGE)
    assert theirs.mem_info()[0] == 12 * PAGE
    with pytest.raises(DriverOOM):
        theirs.phys_create(13 * PAGE)
    ours.phys_release(handle)
    theirs.phys_release(theirs.phys_create(13 * PAGE))
    assert ours.close() == theirs.close() == ()


def test_small_calls_are_quick(driver: HostDriver, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar is 50,000 calls a second; a machine that is busy with other things gets a fifth of that."""
    pool = driver.pool_create()
    driver.pool_alloc(pool, 1000, stream=0)  # so that the pool has a page
    num_pairs = 5_000
    start = time.perf_counter()
    for _ in range(num_pairs):
        driver.pool_free(driver.pool_alloc(pool, 1000, stream=0), stream=0)
    rate = 2 * num_pairs / (time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{rate:,.0f} pool calls a second on the simulated device")
    assert rate > 10_000


def test_a_book_of_ranges_finds_overlaps_and_gaps() -> None:
    book: RangeBook[str] = RangeBook()
    for start, name in ((10, "a"), (30, "c"), (20, "b")):
        book.add(start, 10, name)
    assert [one.value for one in book.overlapping(19, 2)] == ["a", "b"]
    assert [one.value for one in book.overlapping(0, 10)] == []
    assert book.covering(12, 20) is not None
    assert book.covering(12, 30) is None
    assert book.covering(5, 10) is None
    book.remove(20)
    assert (len(book), book.covering(12, 20)) == (2, None)
    assert [one.start for one in book] == [10, 30]


# forks, and sizes that no machine has

FORK = """
import ctypes, os, sys
from tonnage.device.host import HostDriver
from tonnage.errors import DeviceLost

page = 2**21
driver = HostDriver(16 * page)
addr = driver.va_reserve(2 * page, align=page)
handle = driver.phys_create(page)
driver.map(addr, page, handle)
driver.set_access(addr, page)
plain, pinned, stream = driver.mem_alloc(100), driver.host_alloc(100, flags=0), driver.stream_create(priority=0)
kept = driver.mem_free
for start, size in ((addr, page), (plain, 100), (pinned, 100)):
    ctypes.memset(start, 7, size)
if not os.fork():
    calls = [
        lambda: kept(plain), lambda: driver.mem_alloc(1), lambda: driver.unmap(addr, page), lambda: driver.mem_info(),
        lambda: driver.phys_release(handle), lambda: driver.fill(addr, 0, page, stream=0), lambda: driver.activate(),
        lambda: driver.host_free(pinned), lambda: driver.stream_sync(stream), lambda: driver.event_create(),
        lambda: driver.stream_create(priority=0), lambda: driver.device_sync(),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except DeviceLost as error:
            assert error.code == "FORKED" and "spawn" in str(error), error
        else:
            os._exit(10 + number)
    os._exit(0 if driver.close() == driver.close() == driver.leaks() != () else 50)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
for start, size in ((addr, page), (plain, 100), (pinned, 100)):
    assert ctypes.string_at(start, size) == bytes([7]) * size
driver.mem_free(plain)
assert len(driver.close()) == 3
"""


def test_a_forked_child_is_refused_and_its_parent_keeps_every_byte() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("size", [2**63, 2**64, 2**64 + PAGE, 2**70])
def test_sizes_beyond_all_addresses_are_out_of_memory(size: int) -> None:
    driver = HostDriver(2**80)  # so that nothing else refuses them first
    for call in (
        lambda: driver.va_reserve(size, align=PAGE),
        lambda: driver.phys_create(size),
        lambda: driver.phys_create(size, exportable=True),
        lambda: driver.mem_alloc(size),
        lambda: driver.host_alloc(size, flags=0),
    ):
        with pytest.raises(DriverOOM):
            call()
    with pytest.raises(DriverOOM, match=f"{size + PAGE:,} bytes are more than there can be addresses"):
        driver.va_reserve(size, align=PAGE)
    assert driver.close() == ()


def test_a_driver_that_is_dropped_keeps_no_file_open():
    """A process has a thousand or so; whoever makes many drivers and closes none must not run out of them."""

    def num_open():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for _ in range(20):
        HostDriver(PAGE, page_bytes=PAGE)
    assert num_open() <= before  # what other tests left behind may go meanwhile
