"""The CUDA driver over a stand-in for the API: errors, what is sticky, contexts and threads, and the short paths."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from fake_cuda import CAPACITY, PAGE, CUresult, FakeCuda, Number
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.device.cuda import CudaDriver
from tonnage.device.cuda_pages import ACCESS_ATTEMPTS
from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported

LOSSES = ["ILLEGAL_ADDRESS", "ECC_UNCORRECTABLE", "LAUNCH_FAILED", "HARDWARE_STACK_ERROR", "CONTEXT_IS_DESTROYED"]


def code(name: str) -> CUresult:
    return CUresult[f"CUDA_ERROR_{name}"]


@pytest.fixture
def api() -> FakeCuda:
    return FakeCuda(num_devices=2)


@pytest.fixture
def driver(api: FakeCuda) -> CudaDriver:
    driver = CudaDriver(api=api)
    driver.capabilities()
    return driver


def mapped(driver: CudaDriver, num_pages: int = 1) -> int:
    addr, handle = driver.va_reserve(num_pages * PAGE, align=PAGE), driver.phys_create(num_pages * PAGE)
    driver.map(addr, num_pages * PAGE, handle)
    return addr


# errors


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cuMemCreate", lambda d: d.phys_create(5 * PAGE)),
        ("cuMemAlloc", lambda d: d.mem_alloc(5 * PAGE)),
        ("cuMemHostAlloc", lambda d: d.host_alloc(5 * PAGE, flags=0)),
        ("cuMemAddressReserve", lambda d: d.va_reserve(5 * PAGE, align=PAGE)),
        ("cuMemAllocManaged", lambda d: d.managed_alloc(5 * PAGE)),
        ("cuMemAllocFromPoolAsync", lambda d: d.pool_alloc(d.pool_create(), 5 * PAGE, stream=0)),
    ],
)
def test_want_of_memory_says_asked_free_and_total(api, driver, name, call):
    held = driver.mem_alloc(PAGE)
    api.fail(name, code("OUT_OF_MEMORY"), times=1)
    with pytest.raises(DriverOOM) as caught:
        call(driver)
    assert (caught.value.call, caught.value.code) == (name, "OUT_OF_MEMORY")
    for number in (5 * PAGE, CAPACITY - PAGE, CAPACITY):
        assert f"{number:,}" in caught.value.detail
    driver.mem_free(held)


def test_want_of_memory_is_told_even_where_what_is_free_is_not(api, driver):
    api.fail("cuMemCreate", code("OUT_OF_MEMORY"))
    api.fail("cuMemGetInfo", code("UNKNOWN"))
    with pytest.raises(DriverOOM, match="cannot be told"):
        driver.phys_create(PAGE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NOT_SUPPORTED", DriverUnsupported), ("NOT_PERMITTED", DriverUnsupported), ("INVALID_VALUE", DriverError)],
)
def test_other_codes_have_their_kind_and_are_not_sticky(api, driver, name, kind):
    api.fail("cuMemCreate", code(name), times=1)
    with pytest.raises(DriverError) as caught:
        driver.phys_create(PAGE)
    assert type(caught.value) is kind
    driver.phys_release(driver.phys_create(PAGE))


def everything(driver: CudaDriver) -> list:
    """One call of each kind, with arguments that were good until now."""
    stream, event, pool = driver.stream_create(priority=0), driver.event_create(), driver.pool_create()
    other = driver.stream_create(priority=0)
    held, plain, host = driver.pool_alloc(pool, 8, stream=stream), driver.mem_alloc(8), driver.host_alloc(8, flags=0)
    addr, handle = mapped(driver), driver.phys_create(PAGE, exportable=True)
    return [
        driver.activate, driver.mem_info, driver.device_sync, driver.pool_create, driver.event_create,
        lambda: driver.va_reserve(PAGE, align=PAGE), lambda: driver.va_free(addr, PAGE),
        lambda: driver.phys_create(PAGE),
        lambda: driver.phys_release(handle), lambda: driver.map(addr, PAGE, handle), lambda: driver.unmap(addr, PAGE),
        lambda: driver.set_access(addr, PAGE), lambda: driver.phys_export(handle), lambda: driver.phys_import(0, PAGE),
        lambda: driver.pool_alloc(pool, 8, stream=stream), lambda: driver.pool_alloc(pool, 8, stream=0),
        lambda: driver.pool_free(held, stream=stream), lambda: driver.pool_trim(pool, 0),
        lambda: driver.pool_stats(pool),
        lambda: driver.pool_reset_high(pool), lambda: driver.pool_destroy(pool), lambda: driver.mem_alloc(8),
        lambda: driver.mem_free(plain), lambda: driver.host_alloc(8, flags=0), lambda: driver.host_free(host),
        lambda: driver.managed_alloc(8), lambda: driver.copy(plain, host, 8, stream=stream),
        lambda: driver.copy_many([plain], [host], [8], stream=stream),
        lambda: driver.fill(plain, 0, 8, stream=stream), lambda: driver.stream_create(priority=0),
        lambda: driver.stream_destroy(other), lambda: driver.stream_sync(stream),
        lambda: driver.stream_wait(stream, event), lambda: driver.stream_capturing(stream),
        lambda: driver.event_record(event, stream=stream), lambda: driver.event_done(event),
        lambda: driver.event_sync(event), lambda: driver.event_destroy(event),
        lambda: driver.multicast_create(PAGE, num_devices=2),
    ]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_device_is_lost_for_every_later_call_and_none_reaches_the_driver(api, driver, loss):
    calls = everything(driver)
    api.fail("cuCtxSynchronize", code(loss), times=1)
    with pytest.raises(DeviceLost) as first:
        driver.device_sync()
    assert (first.value.call, first.value.code) == ("cuCtxSynchronize", loss)
    assert driver.is_lost
    num_calls = len(api.calls)
    for call in calls:
        with pytest.raises(DeviceLost, match="cuCtxSynchronize") as later:
            call()
        assert later.value.code == loss
    assert len(api.calls) == num_calls


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cuMemAllocFromPoolAsync", lambda h: h.driver.pool_alloc(h.pool, 8, stream=h.stream)),
        ("cuMemFreeAsync", lambda h: h.driver.pool_free(h.held, stream=h.stream)),
        ("cuStreamIsCapturing", lambda h: h.driver.stream_capturing(h.stream)),
        ("cuEventQuery", lambda h: h.driver.event_done(h.driver.event_create())),
        ("cuCtxSetCurrent", lambda h: h.driver.mem_info()),
        ("cuMemSetAccess", lambda h: h.driver.set_access(mapped(h.driver), PAGE)),
        ("cuMemPoolCreate", lambda h: h.driver.pool_create()),
    ],
)
def test_a_loss_is_noticed_on_every_way_to_the_driver(api, driver, name, call):
    pool, stream = driver.pool_create(), driver.stream_create(priority=0)
    held = driver.pool_alloc(pool, 8, stream=stream)
    api.fail(name, code("ILLEGAL_ADDRESS"))
    with pytest.raises(DeviceLost):
        call(SimpleNamespace(driver=driver, pool=pool, stream=stream, held=held))
    with pytest.raises(DeviceLost):
        driver.pool_alloc(pool, 8, stream=stream)


def test_a_free_that_fails_keeps_the_allocation_in_the_book(api, driver):
    pool = driver.pool_create()
    pooled, plain = driver.pool_alloc(pool, 8, stream=0), driver.mem_alloc(8)
    for name in ("cuMemFreeAsync", "cuMemFree"):
        api.fail(name, code("UNKNOWN"), times=1)
    for call in (lambda: driver.pool_free(pooled, stream=0), lambda: driver.mem_free(plain)):
        with pytest.raises(DriverError):
            call()
        call()
    assert driver.leaks() == ()


# access


@pytest.mark.parametrize("num_failures", range(ACCESS_ATTEMPTS))
def test_access_is_granted_after_the_device_is_drained(api, driver, num_failures):
    addr = mapped(driver)
    api.calls.clear()
    api.fail("cuMemSetAccess", code("NOT_READY"), times=num_failures)
    driver.set_access(addr, PAGE)
    names = [name for name, _ in api.calls if name != "cuCtxSetCurrent"]
    assert names == ["cuMemSetAccess", "cuCtxSynchronize"] * num_failures + ["cuMemSetAccess"]


def test_access_is_refused_after_so_many_attempts_and_may_be_tried_again(api, driver):
    addr = mapped(driver)
    api.calls.clear()
    api.fail("cuMemSetAccess", code("NOT_READY"), times=ACCESS_ATTEMPTS)
    with pytest.raises(DriverError, match="NOT_READY"):
        driver.set_access(addr, PAGE)
    assert len(api.called("cuMemSetAccess")) == ACCESS_ATTEMPTS
    driver.set_access(addr, PAGE)
    driver.unmap(addr, PAGE)
    driver.va_free(addr, PAGE)


def test_owner_and_peers_are_granted_in_one_call(api, driver):
    addr = mapped(driver)
    api.calls.clear()
    driver.set_access(addr, PAGE, peers=(1, 0))
    ((_, _, access, num_access),) = api.called("cuMemSetAccess")
    assert [one.location.id for one in access] == [0, 1]
    assert {one.flags for one in access} == {api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE}
    assert num_access == 2


def test_an_alignment_that_the_driver_ignores_is_had_by_reserving_more(api, driver):
    api.heeds_alignment = False
    addr = driver.va_reserve(3 * PAGE, align=16 * PAGE)
    assert addr % (16 * PAGE) == 0
    handle = driver.phys_create(3 * PAGE)
    driver.map(addr, 3 * PAGE, handle)
    driver.unmap(addr, 3 * PAGE)
    driver.va_free(addr, 3 * PAGE)
    driver.phys_release(handle)
    assert driver.leaks() == ()
    assert not [leak for leak in api.host.leaks() if f"{19 * PAGE:,}" in leak]


def test_an_alignment_that_the_driver_refuses_is_had_in_the_same_way(api, driver):
    api.fail("cuMemAddressReserve", code("INVALID_VALUE"), times=1)
    addr = driver.va_reserve(PAGE, align=8 * PAGE)
    assert addr % (8 * PAGE) == 0
    driver.va_free(addr, PAGE)
    assert api.host.leaks() == ()


def test_memory_imported_twice_is_released_twice(api, driver):
    handle = driver.phys_create(PAGE, exportable=True)
    fd = driver.phys_export(handle)
    assert driver.phys_import(fd, PAGE) == handle  # this stand-in gives the same handle
    os.close(fd)
    driver.phys_release(handle)
    driver.phys_release(handle)
    assert api.host.leaks() == ()
    with pytest.raises(DriverError):
        driver.phys_release(handle)


# contexts and threads


def in_a_thread(call):
    """What it returns or raises in a thread of its own."""
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - handed on
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_the_context_is_made_current_on_a_second_thread(api, driver):
    stream, pool = driver.stream_create(priority=0), driver.pool_create()
    assert in_a_thread(driver.mem_info) == driver.mem_info()
    assert in_a_thread(lambda: in_a_thread(lambda: driver.phys_create(PAGE)))
    held = in_a_thread(lambda: driver.pool_alloc(pool, 8, stream=stream))
    in_a_thread(lambda: driver.pool_free(held, stream=stream))
    held = in_a_thread(lambda: driver.pool_alloc(pool, 8, stream=0))
    in_a_thread(lambda: driver.pool_free(held, stream=0))


def test_a_context_that_others_made_current_is_replaced(api, driver):
    ours = int(api.thread.current)
    pool = driver.pool_create()
    calls = [
        driver.mem_info,
        lambda: driver.va_reserve(PAGE, align=PAGE),
        lambda: driver.stream_capturing(0),
        lambda: driver.event_done(driver.event_create()),
        lambda: driver.pool_alloc(pool, 8, stream=0),
    ]
    for call in calls:
        api.thread.current = Number(0xBAD)
        call()
        assert int(api.thread.current) == ours


def test_the_short_path_leaves_the_current_context_alone_and_asks_again_where_there_is_none(api, driver):
    stream, pool = driver.stream_create(priority=0), driver.pool_create()
    ours = int(api.thread.current)
    api.thread.current = Number(0xBAD)
    held = driver.pool_alloc(pool, 8, stream=stream)
    assert not driver.stream_capturing(stream)
    assert int(api.thread.current) == 0xBAD
    for call in (lambda: driver.stream_capturing(stream), lambda: driver.pool_free(held, stream=stream)):
        api.thread.current = None
        call()
        assert int(api.thread.current) == ours


def test_the_short_path_makes_one_call_of_the_driver(api, driver):
    stream, pool = driver.stream_create(priority=0), driver.pool_create()
    api.calls.clear()
    driver.pool_free(driver.pool_alloc(pool, 8, stream=stream), stream=stream)
    assert not driver.stream_capturing(stream)
    names = [name for name, _ in api.calls]
    assert names == ["cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuStreamIsCapturing"]
    assert not any(isinstance(argument, int) for argument in api.calls[1][1]), "no conversions on the way"


# streams, events, pools


def test_a_destroyed_stream_is_kept_and_handed_out_again(api, driver):
    """So nobody else's stream can have its handle, and a stale one is told from a live one."""
    first = driver.stream_create(priority=-1)
    driver.stream_destroy(first)
    assert not api.called("cuStreamDestroy")
    with pytest.raises(DriverError):
        driver.event_record(driver.event_create(), stream=first)
    assert driver.stream_create(priority=0) != first
    assert driver.stream_create(priority=-1) == first
    driver.stream_sync(first)
    assert [args[1] for args in api.called("cuStreamCreateWithPriority")] == [-1, 0]


def test_a_stream_made_elsewhere_is_used_by_its_handle_but_not_destroyed(api, driver):
    foreign, pool = api.new_foreign_stream(), driver.pool_create()
    driver.pool_free(driver.pool_alloc(pool, 8, stream=foreign), stream=foreign)
    driver.stream_sync(foreign)
    with pytest.raises(DriverError):
        driver.stream_destroy(foreign)


def test_captures_are_seen_and_a_capturing_stream_is_not_destroyed(api, driver):
    stream = driver.stream_create(priority=0)
    api.capturing.add(stream)
    assert driver.stream_capturing(stream)
    with pytest.raises(DriverError, match="being captured"):
        driver.stream_destroy(stream)
    api.fail("cuStreamIsCapturing", code("STREAM_CAPTURE_IMPLICIT"), times=1)
    assert driver.stream_capturing(0)
    api.fail("cuStreamIsCapturing", code("INVALID_VALUE"), times=2)
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.stream_capturing(stream)


def test_no_call_breaks_the_capture_of_another_thread_and_the_mode_is_put_back(api, driver):
    """A capture of mode "global", torch's, on a stream that we do not know."""
    stream, event, pool = driver.stream_create(priority=0), driver.event_create(), driver.pool_create()
    api.is_captured_globally = True
    driver.event_record(event, stream=stream)
    assert driver.event_done(event)
    driver.event_sync(event)
    driver.stream_sync(stream)
    driver.mem_free(driver.mem_alloc(PAGE))
    driver.mem_free(driver.managed_alloc(PAGE))
    driver.host_free(driver.host_alloc(PAGE, flags=0))
    driver.pool_free(driver.pool_alloc(pool, 8, stream=stream), stream=stream)
    driver.pool_trim(pool, 0)
    driver.pool_destroy(driver.pool_create())
    assert api.broken_by == []
    assert api.thread_mode() == api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuEventQuery", "cuThreadExchangeStreamCaptureMode"])
def test_the_mode_is_put_back_when_a_call_fails_and_a_thread_keeps_its_own(api, driver, name):
    mine = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    api.thread.mode = mine
    event = driver.event_create()
    api.fail(name, code("UNKNOWN"))
    for call in (lambda: driver.mem_alloc(PAGE), lambda: driver.event_done(event)):
        with suppress(DriverError):
            call()
        assert api.thread_mode() == mine


def test_events_carry_no_time_and_know_when_they_are_not_ready(api, driver):
    event = driver.event_create()
    assert api.called("cuEventCreate") == [(2,)]
    api.fail("cuEventQuery", code("NOT_READY"), times=1)
    assert not driver.event_done(event)
    assert driver.event_done(event)


def test_the_pool_is_private_pinned_on_the_device_unexported_and_keeps_what_it_has(api, driver):
    driver.pool_create()
    (properties,) = api.called("cuMemPoolCreate")[-1]
    assert properties.allocType == api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert properties.handleTypes == api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    assert (properties.location.type.name, properties.location.id) == ("CU_MEM_LOCATION_TYPE_DEVICE", 0)
    _, attribute, value = api.called("cuMemPoolSetAttribute")[-1]
    assert attribute.name == "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD"
    assert int(value) == 2**64 - 1


def test_more_managed_memory_than_is_free_is_never_asked_of_the_driver(api, driver):
    held = driver.mem_alloc(CAPACITY - 10 * PAGE)
    num_asked = len(api.called("cuMemAllocManaged"))
    with pytest.raises(DriverOOM, match="managed memory beyond that is not taken"):
        driver.managed_alloc(11 * PAGE)
    assert len(api.called("cuMemAllocManaged")) == num_asked
    driver.managed_alloc(10 * PAGE)
    driver.mem_free(held)


def test_flags_of_host_memory_are_passed_on(api, driver):
    driver.host_alloc(100, flags=5)
    assert api.called("cuMemHostAlloc") == [(100, 5)]


STEPS = st.tuples(st.sampled_from(["alloc", "free", "fail"]), st.integers(0, 20))


@settings(max_examples=40)
@given(st.integers(0, 30).flatmap(lambda size: st.lists(STEPS, min_size=size, max_size=size)))
def test_the_books_agree_with_the_driver_whatever_fails(steps):
    """What ``leaks`` tells is exactly what the driver holds for us."""
    api = FakeCuda()
    driver = CudaDriver(api=api)
    pool, stream, live = driver.pool_create(), driver.stream_create(priority=0), []
    for step, number in steps:
        if step == "fail":
            api.fail("cuMemAllocFromPoolAsync", code("UNKNOWN"), times=1)
            api.fail("cuMemFreeAsync", code("UNKNOWN"), times=1)
        try:
            if step == "free" and live:
                driver.pool_free(live[number % len(live)], stream=stream)
                live.pop(number % len(live))
            elif step == "alloc":
                live.append(driver.pool_alloc(pool, 1 + number * 1000, stream=stream))
        except DriverError:
            pass
    used = driver.pool_stats(pool).used_bytes
    assert len(driver.leaks()) == len(live)
    assert (used > 0) == bool(live)
    api.heal()
    for addr in live:
        driver.pool_free(addr, stream=stream)
    assert driver.pool_stats(pool).used_bytes == 0
    driver.close()
