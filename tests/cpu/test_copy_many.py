"""Batches of copies under the decorators and over the CUDA driver; what every device promises is in the contract."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.device.copies import clash
from tonnage.device.cuda import CudaDriver
from tonnage.device.fault import FaultDriver
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver
from tonnage.device.trace import TraceDriver, replay
from tonnage.errors import DeviceLost, DriverError, DriverOOM
from unit.fake_cuda import CUresult, FakeCuda

PAGE = 64 * 1024


@pytest.fixture
def host() -> Iterator[HostDriver]:
    host = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield host
    host.close()


def numbered(driver, num_pages: int = 8) -> int:
    """Memory whose page i reads i + 1."""
    addr = driver.mem_alloc(num_pages * PAGE)
    for index in range(num_pages):
        driver.fill(addr + index * PAGE, index + 1, PAGE, stream=0)
    driver.device_sync()
    return addr


def firsts(addr: int, num_pages: int = 8) -> list[int]:
    return [ctypes.string_at(addr + index * PAGE, 1)[0] for index in range(num_pages)]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 8)), max_size=6)


@given(SPANS)
def test_a_clash_is_a_byte_that_one_writes_and_another_touches(batch: list[tuple[int, int, int]]) -> None:
    """Against the sets of all their bytes. A copy onto itself writes what it reads."""
    writes = [set(range(dst, dst + size)) for dst, _, size in batch]
    reads = [set(range(src, src + size)) for _, src, size in batch]
    meets = any(
        (index != other and writes[index] & writes[other]) or writes[index] & reads[other]
        for index in range(len(batch))
        for other in range(len(batch))
    )
    found = clash(batch)
    assert (found is not None) == meets
    if found is not None:
        assert sum(found in span for span in writes) >= 1
        assert sum(found in span for span in writes + reads) >= 2


def test_a_batch_that_fails_on_the_host_device_copies_nothing(host: HostDriver) -> None:
    addr = numbered(host)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        host.copy_many([addr, 4096], [addr + PAGE, addr + PAGE], [PAGE, 8], stream=0)
    assert firsts(addr) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_log_has_it_and_replays_it(host: HostDriver) -> None:
    driver = TraceDriver(host)
    addr = driver.mem_alloc(8 * PAGE)
    driver.copy_many([addr, addr + 3 * PAGE], (addr + PAGE, addr + 5 * PAGE), [PAGE, 100], stream=0)
    driver.copy_many([], [], [], stream=driver.stream_create(priority=0))
    with pytest.raises(DriverError):
        driver.copy_many([addr], [], [1], stream=0)
    assert driver.log == [
        "mem_alloc(8p) -> mem0",
        "copy_many([mem0, mem0+3p], [mem0+1p, mem0+5p], [1p, 100], stream=stream0)",
        "stream_create(priority=0) -> stream1",
        "copy_many([], [], [], stream=stream1)",
        "copy_many([mem0], [], [1], stream=stream0) -> ! DriverError",
    ]
    other = HostDriver(64 * 4096, page_bytes=4096)
    assert replay(driver.log, other) == driver.log
    other.close()
    with pytest.raises(ValueError, match="replayed"):
        replay(["copy_many([?140000], [?150000], [8], stream=stream0)"], host)


def test_it_can_be_made_to_fail(host: HostDriver) -> None:
    driver = FaultDriver(host, 2, calls=frozenset({"copy_many"}), error=DriverOOM)
    addr = numbered(driver)
    driver.copy_many([addr], [addr + PAGE], [PAGE], stream=0)
    with pytest.raises(DriverOOM):
        driver.copy_many([addr], [addr + 2 * PAGE], [PAGE], stream=0)
    assert firsts(addr)[0] == 2


# races


def test_a_batch_whose_order_would_show_is_a_race(host: HostDriver) -> None:
    driver = HazardDriver(host, poison=False)
    addr = numbered(driver)
    with pytest.raises(DeviceLost, match="no order inside"):
        driver.copy_many([addr, addr + PAGE], [addr + PAGE, addr + 2 * PAGE], [PAGE, PAGE], stream=0)


def test_every_copy_of_a_batch_is_watched(host: HostDriver) -> None:
    driver = HazardDriver(host, poison=False, strict=False)
    addr, stream, other = numbered(driver), driver.stream_create(priority=0), driver.stream_create(priority=0)
    driver.copy_many([addr, addr + PAGE], [addr + 2 * PAGE, addr + 3 * PAGE], [PAGE, PAGE], stream=stream)
    driver.fill(addr + 4 * PAGE, 0, PAGE, stream=other)  # nobody's
    driver.copy(addr + 5 * PAGE, addr + 3 * PAGE, PAGE, stream=other)  # read by both
    assert driver.hazards == []
    driver.fill(addr + PAGE, 0, PAGE, stream=other)
    driver.fill(addr + 2 * PAGE, 0, PAGE, stream=other)
    assert ["RACE" in told and "a batch of 2 copies" in told for told in driver.hazards] == [True, True]


def test_a_captured_batch_runs_when_it_is_replayed(host: HostDriver) -> None:
    driver = HazardDriver(host, poison=False)
    addr, stream = numbered(driver), driver.stream_create(priority=0)
    with driver.capturing(stream) as graph:
        driver.copy_many([addr, addr + PAGE], [addr + 2 * PAGE, addr + 3 * PAGE], [PAGE, PAGE], stream=stream)
    assert firsts(addr)[:2] == [1, 2]
    driver.replay(graph, stream=stream)
    assert firsts(addr)[:2] == [3, 4]


# the driver's own call


@pytest.fixture
def api() -> FakeCuda:
    return FakeCuda(capacity_bytes=64 * PAGE)


def test_a_batch_is_one_call_of_the_driver(api: FakeCuda) -> None:
    driver = CudaDriver(api=api)
    addr, stream = numbered(driver), driver.stream_create(priority=0)
    driver.copy_many([addr, addr + PAGE], [addr + 2 * PAGE, addr + 3 * PAGE], [PAGE, 8], stream=stream)
    assert (len(api.called("cuMemcpyBatchAsync")), len(api.called("cuMemcpyAsync"))) == (1, 0)
    assert driver.batch_refusal == ""
    assert firsts(addr)[:2] == [3, 4]
    driver.copy_many([addr], [addr + 4 * PAGE], [PAGE], stream=stream)  # one copy is no batch
    assert (len(api.called("cuMemcpyBatchAsync")), len(api.called("cuMemcpyAsync"))) == (1, 1)


@pytest.mark.parametrize("why", ["the default stream", "its other name", "a capture", "older bindings"])
def test_where_a_batch_is_not_taken_the_copies_go_one_by_one(api: FakeCuda, monkeypatch, why: str) -> None:
    if why == "older bindings":
        monkeypatch.delattr(FakeCuda, "cuMemcpyBatchAsync")
    driver = CudaDriver(api=api)
    addr, stream = numbered(driver), driver.stream_create(priority=0)
    stream = {"the default stream": 0, "its other name": 1}.get(why, stream)
    if why == "a capture":
        api.capturing.add(stream)
    driver.copy_many([addr, addr + PAGE], [addr + 2 * PAGE, addr + 3 * PAGE], [PAGE, PAGE], stream=stream)
    assert (len(api.called("cuMemcpyBatchAsync")), len(api.called("cuMemcpyAsync"))) == (0, 2)
    assert firsts(addr)[:2] == [3, 4]


@pytest.mark.parametrize(
    ("code", "num_asked"), [("NOT_SUPPORTED", 1), ("INVALID_VALUE", 2)], ids=["for good", "this time"]
)
def test_a_driver_that_refuses_batches_copies_all_the_same(api: FakeCuda, code: str, num_asked: int) -> None:
    driver = CudaDriver(api=api)
    addr, stream = numbered(driver), driver.stream_create(priority=0)
    api.fail("cuMemcpyBatchAsync", CUresult[f"CUDA_ERROR_{code}"], times=1)
    for shift in (2, 4):
        driver.copy_many(
            [addr, addr + PAGE], [addr + shift * PAGE, addr + (shift + 1) * PAGE], [PAGE, PAGE], stream=stream
        )
        assert firsts(addr)[:2] == [shift + 1, shift + 2]
    assert len(api.called("cuMemcpyBatchAsync")) == num_asked
    assert (code in driver.batch_refusal) == (num_asked == 1)


def test_bindings_newer_than_the_library_are_an_older_driver(api: FakeCuda, monkeypatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("Function cuMemcpyBatchAsync not found")

    monkeypatch.setattr(api, "cuMemcpyBatchAsync", missing, raising=False)
    driver = CudaDriver(api=api)
    addr, stream = numbered(driver), driver.stream_create(priority=0)
    driver.copy_many([addr, addr + PAGE], [addr + 2 * PAGE, addr + 3 * PAGE], [PAGE, PAGE], stream=stream)
    assert firsts(addr)[:2] == [3, 4]
    assert "not found" in driver.batch_refusal


def test_other_errors_go_on_and_a_lost_device_is_remembered(api: FakeCuda) -> None:
    driver = CudaDriver(api=api)
    addr, stream = numbered(driver), driver.stream_create(priority=0)
    batch = [addr, addr + PAGE], [addr + 2 * PAGE, addr + 3 * PAGE], [PAGE, PAGE]
    api.fail("cuMemcpyBatchAsync", CUresult.CUDA_ERROR_UNKNOWN, times=1)
    with pytest.raises(DriverError, match="UNKNOWN"):
        driver.copy_many(*batch, stream=stream)
    api.fail("cuMemcpyBatchAsync", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, times=1)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            driver.copy_many(*batch, stream=stream)
    assert api.called("cuMemcpyAsync") == []
