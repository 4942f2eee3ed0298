"""What every driver promises, whatever the device: one suite over the table of drivers.

Sizes are counted in pages of the device. A card is not ours alone and rounds as it likes, so what memory was taken is
read as a difference, with amounts far above ``Bench.slack_bytes``; on simulated devices that slack is zero.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from devices import CAPACITY, DEVICES, PAGE, read, write

from tonnage.device.cuda import CudaDriver
from tonnage.device.driver import Driver
from tonnage.errors import DriverError, DriverOOM, DriverUnsupported
from tonnage.units import GiB, MiB, round_up
from unit.fake_cuda import FakeCuda

DRIVERS = [*DEVICES, pytest.param(lambda: CudaDriver(api=FakeCuda()), id="cuda over a stand-in for the driver's API")]
#: Without the cards: devices that count every byte and that no one else uses.
SIMULATED = [one for one in DRIVERS if not one.marks]
#: Devices that notice when something touches what is not mapped. On a card such a touch ends the context, and all
#: that uses it in this process: see tests/gpu/test_cuda_driver.py for what is left then.
NOTICING = [one for one in DEVICES if not one.marks]


class Bench:
    """A driver, and amounts of memory that can be told apart on its device."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.page = driver, driver.capabilities().page_bytes
        is_card = driver.mem_info()[1] >= GiB
        self.slack_bytes = 32 * MiB if is_card else 0
        #: A size whose taking shows.
        self.much = round_up(384 * MiB, self.page) if is_card else 3 * self.page
        self.free_at_start = self.free_bytes()

    def need(self, *capabilities: str) -> None:
        found = self.driver.capabilities()
        for name in capabilities:
            if not getattr(found, name):
                pytest.skip(f"the device is without {name!r}, on purpose or by nature")

    def free_bytes(self) -> int:
        self.driver.device_sync()
        return self.driver.mem_info()[0]

    def taken_bytes(self) -> int:
        """Since the bench was made, as a round figure if it lies within the slack of one."""
        taken = self.free_at_start - self.free_bytes()
        nearest = round(taken / self.much) * self.much
        return nearest if abs(taken - nearest) <= self.slack_bytes else taken

    def mapped(self, size: int) -> tuple[int, int]:
        """(address, handle) of fresh accessible memory."""
        addr, handle = self.driver.va_reserve(size, align=self.page), self.driver.phys_create(size)
        self.driver.map(addr, size, handle)
        self.driver.set_access(addr, size)
        return addr, handle


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = request.param()
    yield driver
    driver.close()


@pytest.fixture
def bench(driver: Driver) -> Bench:
    return Bench(driver)


everywhere = pytest.mark.parametrize("driver", DRIVERS, indirect=True)
on_simulated_devices = pytest.mark.parametrize("driver", SIMULATED, indirect=True)
where_stray_touches_are_noticed = pytest.mark.parametrize("driver", NOTICING, indirect=True)


@everywhere
def test_it_names_itself(driver: Driver) -> None:
    assert driver.ordinal == 0
    assert driver.kind in ("cuda", "host")
    assert driver.uuid
    assert driver.name
    driver.activate()


@everywhere
def test_capabilities_are_told_again_and_absent_ones_with_a_reason(driver: Driver) -> None:
    found = driver.capabilities()
    driver.probe_again()
    assert driver.capabilities() == found
    assert found.page_bytes > 0
    assert found.page_bytes % os.sysconf("SC_PAGE_SIZE") == 0
    for name in ("pools", "vmm", "managed", "multicast", "host_register", "exportable", "concurrent_managed"):
        assert getattr(found, name) != bool(found.reasons.get(name)), name


@on_simulated_devices
def test_page_and_capacity_are_as_asked(driver: Driver) -> None:
    assert driver.capabilities().page_bytes == PAGE
    assert driver.mem_info() == (CAPACITY, CAPACITY)


@everywhere
def test_free_and_total_follow_creation_and_release(bench: Bench) -> None:
    bench.need("vmm")
    total = bench.driver.mem_info()[1]
    handle = bench.driver.phys_create(bench.much)
    assert bench.taken_bytes() == bench.much
    bench.driver.phys_release(handle)
    assert bench.taken_bytes() == 0
    assert bench.driver.mem_info()[1] == total


@everywhere
@pytest.mark.parametrize("num_pages", [1, 8, 512])
def test_reservations_are_aligned_and_take_no_memory(bench: Bench, num_pages: int) -> None:
    bench.need("vmm")
    align, size = num_pages * bench.page, round_up(2 * bench.driver.mem_info()[1], bench.page)
    addr = bench.driver.va_reserve(size, align=align)
    assert addr % align == 0
    assert bench.taken_bytes() == 0
    bench.driver.va_free(addr, size)


@everywhere
def test_bytes_written_are_read_back(bench: Bench) -> None:
    bench.need("vmm")
    addr, _ = bench.mapped(2 * bench.page)
    bench.driver.fill(addr, 7, 2 * bench.page, stream=0)
    write(bench.driver, addr, b"tonnage")
    bench.driver.copy(addr + bench.page, addr, 10, stream=0)
    assert read(bench.driver, addr + bench.page, 11) == b"tonnage\x07\x07\x07\x07"


@everywhere
def test_zero_bytes_are_copied_and_filled_without_a_look_at_the_addresses(driver: Driver) -> None:
    driver.copy(1, 2, 0, stream=0)
    driver.fill(1, 0, 0, stream=0)
    driver.copy_many([1, 3], [2, 4], [0, 0], stream=0)
    driver.copy_many([], [], [], stream=0)


@everywhere
@pytest.mark.parametrize("num_copies", [1, 2, 37])
@pytest.mark.parametrize("is_legacy", [True, False], ids=["legacy stream", "own stream"])
def test_a_batch_of_copies_is_its_copies(bench: Bench, num_copies: int, is_legacy: bool) -> None:
    """Places and sizes of all sorts, some of them nothing, in any order, and in line with the stream's other work."""
    driver, unit, draw = bench.driver, 512, random.Random(num_copies)
    size = 2 * num_copies * unit
    addr = driver.mem_alloc(size)
    data = draw.randbytes(size)
    write(driver, addr, data)
    expected, places = bytearray(data), draw.sample(range(2 * num_copies), 2 * num_copies)
    dsts, srcs, sizes = [], [], []
    for index, (src, dst) in enumerate(zip(places[:num_copies], places[num_copies:], strict=True)):
        length = (unit, 1, 0, 300)[index % 4]
        dsts, srcs, sizes = [*dsts, addr + dst * unit], [*srcs, addr + src * unit], [*sizes, length]
        expected[dst * unit : dst * unit + length] = data[src * unit : src * unit + length]
    stream = 0 if is_legacy else driver.stream_create(priority=0)
    driver.copy_many(dsts, srcs, sizes, stream=stream)
    driver.fill(srcs[0], 7, 1, stream=stream)  # after the batch
    expected[srcs[0] - addr] = 7
    driver.stream_sync(stream)
    assert read(driver, addr, size) == bytes(expected)


@everywhere
def test_a_batch_reaches_the_host_and_comes_back(bench: Bench) -> None:
    driver, page = bench.driver, bench.page
    addr, host, stream = (
        driver.mem_alloc(3 * page),
        driver.host_alloc(3 * page, flags=0),
        driver.stream_create(priority=0),
    )
    for index in range(3):
        driver.fill(addr + index * page, 10 + index, page, stream=stream)
    driver.copy_many([host, host + 2 * page], [addr + 2 * page, addr], [page, page], stream=stream)
    driver.fill(addr, 0, 3 * page, stream=stream)
    driver.copy_many([addr + page, addr], [host, host + 2 * page], [page, 1], stream=stream)
    driver.stream_sync(stream)
    found = read(driver, addr, 2 * page)
    assert found == b"\x0a" + bytes(page - 1) + b"\x0c" * page
    driver.host_free(host)


@everywhere
def test_a_batch_may_cross_from_one_mapping_into_the_next(bench: Bench) -> None:
    """An arena is made of many handles side by side, and a run of its slots may lie in several."""
    bench.need("vmm")
    driver, page = bench.driver, bench.page
    base = driver.va_reserve(6 * page, align=page)
    for index in range(6):
        driver.map(base + index * page, page, driver.phys_create(page))
    driver.set_access(base, 6 * page)
    for index in range(6):
        driver.fill(base + index * page, 20 + index, page, stream=0)
    driver.device_sync()
    stream, half = driver.stream_create(priority=0), page // 2
    driver.copy_many([base + 3 * page, base + 5 * page], [base + half, base], [2 * page, half], stream=stream)
    driver.stream_sync(stream)
    parts = ((20, page), (21, page), (22, page), (20, half), (21, page), (22, half), (20, half), (25, half))
    assert read(driver, base, 6 * page) == b"".join(bytes([value]) * size for value, size in parts)


@everywhere
def test_a_handle_outlives_its_release_while_mapped(bench: Bench) -> None:
    bench.need("vmm")
    addr, handle = bench.mapped(bench.much)
    bench.driver.phys_release(handle)
    bench.driver.fill(addr, 1, bench.much, stream=0)
    assert bench.taken_bytes() == bench.much
    bench.driver.unmap(addr, bench.much)
    assert bench.taken_bytes() == 0


@everywhere
def test_a_handle_keeps_its_bytes_while_unmapped(bench: Bench) -> None:
    bench.need("vmm")
    addr, handle = bench.mapped(bench.page)
    write(bench.driver, addr, b"kept")
    bench.driver.unmap(addr, bench.page)
    bench.driver.map(addr, bench.page, handle)
    bench.driver.set_access(addr, bench.page)
    assert read(bench.driver, addr, 4) == b"kept"


@everywhere
def test_two_mappings_of_a_handle_are_the_same_memory(bench: Bench) -> None:
    bench.need("vmm")
    first, handle = bench.mapped(bench.much)
    second = bench.driver.va_reserve(bench.much, align=bench.page)
    bench.driver.map(second, bench.much, handle)
    bench.driver.set_access(second, bench.much)
    write(bench.driver, first, b"same")
    assert read(bench.driver, second, 4) == b"same"
    assert bench.taken_bytes() == bench.much


@everywhere
def test_one_grant_and_one_unmap_may_span_mappings_side_by_side(bench: Bench) -> None:
    bench.need("vmm")
    page = bench.page
    base = bench.driver.va_reserve(3 * page, align=page)
    for index in range(3):
        handle = bench.driver.phys_create(page)
        bench.driver.map(base + index * page, page, handle)
        bench.driver.phys_release(handle)
    bench.driver.set_access(base, 3 * page)
    write(bench.driver, base + page - 2, b"over")
    assert read(bench.driver, base + page - 2, 4) == b"over"
    bench.driver.unmap(base, 2 * page)
    assert read(bench.driver, base + 2 * page, 1) is not None
    bench.driver.unmap(base + 2 * page, page)
    bench.driver.va_free(base, 3 * page)


@everywhere
def test_exported_memory_is_the_same_memory(bench: Bench) -> None:
    bench.need("exportable")
    page = bench.page
    addr, handle = bench.driver.va_reserve(page, align=page), bench.driver.phys_create(page, exportable=True)
    bench.driver.map(addr, page, handle)
    bench.driver.set_access(addr, page)
    descriptor = bench.driver.phys_export(handle)
    imported = bench.driver.phys_import(descriptor, page)
    os.close(descriptor)
    second = bench.driver.va_reserve(page, align=page)
    bench.driver.map(second, page, imported)
    bench.driver.set_access(second, page)
    write(bench.driver, addr, b"shared")
    assert read(bench.driver, second, 6) == b"shared"
    for where in (addr, second):
        bench.driver.unmap(where, page)
        bench.driver.va_free(where, page)
    bench.driver.phys_release(handle)
    bench.driver.phys_release(imported)


WRONG = {
    "reserve nothing": lambda b: b.driver.va_reserve(0, align=b.page),
    "reserve part of a page": lambda b: b.driver.va_reserve(b.page + 1, align=b.page),
    "reserve at an odd alignment": lambda b: b.driver.va_reserve(b.page, align=3 * b.page),
    "free what is not reserved": lambda b: b.driver.va_free(b.page, b.page),
    "free part of a reservation": lambda b: b.driver.va_free(b.driver.va_reserve(2 * b.page, align=b.page), b.page),
    "free what is mapped": lambda b: b.driver.va_free(b.mapped(b.page)[0], b.page),
    "create nothing": lambda b: b.driver.phys_create(0),
    "create part of a page": lambda b: b.driver.phys_create(b.page - 1),
    "release an unknown handle": lambda b: b.driver.phys_release(12345),
    "export what is not exportable": lambda b: b.driver.phys_export(b.driver.phys_create(b.page)),
    "import from no descriptor": lambda b: b.driver.phys_import(1_000_000, b.page),
    "map outside": lambda b: b.driver.map(b.page, b.page, b.driver.phys_create(b.page)),
    "map over a mapping": lambda b: b.driver.map(b.mapped(b.page)[0], b.page, b.driver.phys_create(b.page)),
    "map another size": lambda b: b.driver.map(
        b.driver.va_reserve(2 * b.page, align=b.page), 2 * b.page, b.driver.phys_create(b.page)
    ),
    "map between pages": lambda b: b.driver.map(
        b.driver.va_reserve(2 * b.page, align=b.page) + 4096, b.page, b.driver.phys_create(b.page)
    ),
    "unmap what is not mapped": lambda b: b.driver.unmap(b.driver.va_reserve(b.page, align=b.page), b.page),
    "unmap half a mapping": lambda b: b.driver.unmap(b.mapped(2 * b.page)[0], b.page),
    "open what is not mapped": lambda b: b.driver.set_access(b.driver.va_reserve(b.page, align=b.page), b.page),
    "free an unknown allocation": lambda b: b.driver.mem_free(b.page),
    "free unknown host memory": lambda b: b.driver.host_free(b.page),
    "free to an unknown pool": lambda b: b.driver.pool_free(b.page, stream=0),
    "allocate nothing": lambda b: b.driver.mem_alloc(0),
    "allocate no host memory": lambda b: b.driver.host_alloc(0, flags=0),
    "allocate nothing from a pool": lambda b: b.driver.pool_alloc(b.driver.pool_create(), 0, stream=0),
    "allocate from an unknown pool": lambda b: b.driver.pool_alloc(99, 1, stream=0),
    "destroy an unknown pool": lambda b: b.driver.pool_destroy(99),
    "an unknown stream": lambda b: b.driver.stream_sync(99),
    "an unknown event": lambda b: b.driver.event_sync(99),
    "destroy an unknown event": lambda b: b.driver.event_destroy(99),
    "destroy the default stream": lambda b: b.driver.stream_destroy(0),
    "copy on an unknown stream": lambda b: b.driver.copy(b.driver.mem_alloc(8), b.driver.mem_alloc(8), 1, stream=99),
    "copies on an unknown stream": lambda b: b.driver.copy_many([b.driver.mem_alloc(8)], [b.page], [1], stream=99),
    "more sources than sizes": lambda b: b.driver.copy_many([b.page], [b.page, b.page], [1], stream=0),
    "a negative size in a batch": lambda b: b.driver.copy_many([b.page] * 2, [b.page] * 2, [0, -1], stream=0),
    "a negative size": lambda b: b.driver.fill(b.driver.mem_alloc(8), 0, -1, stream=0),
    "a multicast object of no size": lambda b: b.driver.multicast_create(0, num_devices=1),
}


@everywhere
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_raise_a_driver_error_and_do_no_harm(bench: Bench, wrong) -> None:
    with pytest.raises(DriverError) as caught:
        wrong(bench)
    assert not isinstance(caught.value, MemoryError)
    addr = bench.driver.mem_alloc(8)
    write(bench.driver, addr, b"still ok")
    assert read(bench.driver, addr, 8) == b"still ok"


@everywhere
def test_what_is_released_is_gone(bench: Bench) -> None:
    bench.need("vmm")
    handle = bench.driver.phys_create(bench.page)
    bench.driver.phys_release(handle)
    with pytest.raises(DriverError):
        bench.driver.phys_release(handle)


@where_stray_touches_are_noticed
@pytest.mark.parametrize("reach", ["reserved only", "mapped without access", "past the end", "nobody's"])
def test_touching_what_is_not_mapped_raises(bench: Bench, reach: str) -> None:
    bench.need("vmm")
    driver, page = bench.driver, bench.page
    base = driver.va_reserve(4 * page, align=page)
    driver.map(base, page, driver.phys_create(page))
    if reach != "mapped without access":
        driver.set_access(base, page)
    at = {"reserved only": base + 2 * page, "past the end": base + page - 4, "nobody's": 4096}.get(reach, base)
    good, _ = bench.mapped(page)
    for call in (
        lambda: driver.fill(at, 0, 8, stream=0),
        lambda: driver.copy(at, good, 8, stream=0),
        lambda: driver.copy(good, at, 8, stream=0),
        lambda: driver.copy_many([good, at], [good + 16, good + 16], [8, 8], stream=0),
        lambda: driver.copy_many([good, good + 8], [good + 16, at], [8, 8], stream=0),
    ):
        with pytest.raises(DriverError):
            call()


def allocators(driver: Driver) -> dict[str, object]:
    """Every way to take memory of the device that it has."""
    found = driver.capabilities()
    ways = {"plain": driver.mem_alloc}
    if found.vmm:
        ways["physical"] = driver.phys_create
    if found.pools:
        pool = driver.pool_create()
        ways["pool"] = lambda size: driver.pool_alloc(pool, size, stream=0)
    if found.managed:
        ways["managed"] = driver.managed_alloc
    return ways


@everywhere
def test_more_than_there_is_says_asked_and_total_and_takes_nothing(bench: Bench) -> None:
    total = bench.driver.mem_info()[1]
    asked = round_up(total, bench.page) + bench.page
    for way, call in allocators(bench.driver).items():
        with pytest.raises(DriverOOM) as caught:
            call(asked)
        assert isinstance(caught.value, MemoryError)
        assert f"{asked:,}" in str(caught.value), way
        assert f"{total:,}" in str(caught.value), way
    taken = bench.taken_bytes()
    # Asked for all there is, a card's driver may give back what it kept of earlier work (seen: 124 MiB).
    assert taken == 0 or (taken < 0 and bench.driver.kind == "cuda")


@on_simulated_devices
def test_more_than_is_left_is_refused(bench: Bench) -> None:
    held = bench.driver.mem_alloc(60 * PAGE)
    for way, call in allocators(bench.driver).items():
        with pytest.raises(DriverOOM):
            call(5 * PAGE)
        assert bench.taken_bytes() == 60 * PAGE, way
    bench.driver.mem_free(held)
    assert bench.taken_bytes() == 0


@everywhere
def test_plain_allocations_do_not_overlap_and_come_back(bench: Bench) -> None:
    driver, page = bench.driver, bench.page
    sizes = [1, 511, 513, page, 3 * page + 5]
    addresses = [driver.mem_alloc(size) for size in sizes]
    ends = sorted(zip(addresses, sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ends))
    for number, (addr, size) in enumerate(ends):
        driver.fill(addr, number, size, stream=0)
    for number, (addr, size) in enumerate(ends):
        assert read(driver, addr, size) == bytes([number]) * size
    for addr in addresses:
        driver.mem_free(addr)
    assert bench.taken_bytes() == 0


@everywhere
def test_a_pool_keeps_memory_until_it_is_trimmed(bench: Bench) -> None:
    bench.need("pools")
    driver = bench.driver
    pool = driver.pool_create()
    first = driver.pool_alloc(pool, bench.much, stream=0)
    second = driver.pool_alloc(pool, bench.page, stream=0)
    both = driver.pool_stats(pool)
    assert both.used_bytes == bench.much + bench.page <= both.reserved_bytes
    driver.pool_free(first, stream=0)
    driver.device_sync()
    freed = driver.pool_stats(pool)
    assert (freed.used_bytes, freed.reserved_bytes) == (bench.page, both.reserved_bytes)
    driver.pool_trim(pool, both.reserved_bytes)
    assert driver.pool_stats(pool).reserved_bytes == both.reserved_bytes
    driver.pool_trim(pool, 0)
    trimmed = driver.pool_stats(pool)
    assert bench.page <= trimmed.reserved_bytes <= both.reserved_bytes - bench.much // 2
    assert (trimmed.used_high_bytes, trimmed.reserved_high_bytes) == (both.used_bytes, both.reserved_bytes)
    driver.pool_reset_high(pool)
    assert driver.pool_stats(pool).used_high_bytes == bench.page
    with pytest.raises(DriverError):
        driver.pool_destroy(pool)
    driver.pool_free(second, stream=0)
    driver.device_sync()
    driver.pool_destroy(pool)
    assert bench.taken_bytes() == 0


@everywhere
def test_a_pool_hands_out_again_what_was_freed(bench: Bench) -> None:
    bench.need("pools")
    driver, piece = bench.driver, bench.much // 4
    pool = driver.pool_create()
    pieces = [driver.pool_alloc(pool, piece, stream=0) for _ in range(4)]
    before = driver.pool_stats(pool)
    for index in (0, 2, 1, 3):
        driver.pool_free(pieces[index], stream=0)
    driver.device_sync()
    for _ in range(4):
        driver.pool_alloc(pool, piece, stream=0)
    assert driver.pool_stats(pool) == before, "from the same reserve, and never more than before"


@on_simulated_devices
def test_a_pool_joins_neighbouring_holes(bench: Bench) -> None:
    bench.need("pools")
    driver = bench.driver
    pool = driver.pool_create()
    pieces = [driver.pool_alloc(pool, PAGE // 4, stream=0) for _ in range(4)]
    for index in (0, 2, 1, 3):
        driver.pool_free(pieces[index], stream=0)
    assert driver.pool_alloc(pool, PAGE, stream=0) == min(pieces)
    assert driver.pool_stats(pool).reserved_bytes == PAGE


@everywhere
def test_a_pool_is_refused_where_there_are_none(driver: Driver) -> None:
    found = driver.capabilities()
    if found.pools:
        assert driver.pool_create()
    else:
        with pytest.raises(DriverUnsupported) as caught:
            driver.pool_create()
        assert str(caught.value)


@everywhere
def test_host_memory_takes_no_capacity_and_can_be_copied(bench: Bench) -> None:
    driver = bench.driver
    addr = driver.host_alloc(bench.much, flags=0)
    assert bench.taken_bytes() == 0
    there = driver.mem_alloc(5000)
    driver.fill(there, 3, 5000, stream=0)
    driver.copy(addr, there, 5000, stream=0)
    assert read(driver, addr, 5000) == b"\x03" * 5000
    driver.host_free(addr)
    with pytest.raises(DriverError):
        driver.host_free(addr)


@everywhere
def test_managed_memory_or_a_refusal(bench: Bench) -> None:
    driver = bench.driver
    if not driver.capabilities().managed:
        with pytest.raises(DriverUnsupported):
            driver.managed_alloc(bench.page)
        return
    addr = driver.managed_alloc(bench.page)
    driver.fill(addr, 5, bench.page, stream=0)
    assert read(driver, addr + bench.page - 1, 1) == b"\x05"
    driver.mem_free(addr)
    with pytest.raises(DriverError):
        driver.mem_free(addr)


@everywhere
def test_streams_and_events(driver: Driver) -> None:
    stream, event = driver.stream_create(priority=0), driver.event_create()
    assert stream != 0
    driver.event_record(event, stream=stream)
    driver.stream_wait(0, event)
    driver.event_sync(event)
    driver.stream_sync(stream)
    assert driver.event_done(event)
    assert not driver.stream_capturing(stream)
    assert not driver.stream_capturing(0)
    driver.device_sync()
    driver.event_destroy(event)
    driver.stream_destroy(stream)
    for gone in (
        lambda: driver.stream_sync(stream),
        lambda: driver.stream_destroy(stream),
        lambda: driver.event_done(event),
    ):
        with pytest.raises(DriverError):
            gone()


@everywhere
def test_own_bytes_is_a_number_or_unknown(driver: Driver) -> None:
    own = driver.own_bytes()
    assert own is None or isinstance(own, int)


@everywhere
def test_closing_tells_what_was_alive_and_gives_it_back(bench: Bench) -> None:
    driver = bench.driver
    plain, host = driver.mem_alloc(1000), driver.host_alloc(2000, flags=0)
    expected = [f"{plain:#x}", f"{host:#x}"]
    if driver.capabilities().pools:
        expected.append(f"{driver.pool_alloc(driver.pool_create(), 3000, stream=0):#x}")
    if driver.capabilities().vmm:
        expected += [f"{number:#x}" for number in bench.mapped(bench.page)]
    leaks = driver.close()
    assert len(leaks) >= len(expected)
    for number in expected:
        assert any(number in leak for leak in leaks), number
    assert driver.close() == ()
    for call in (driver.mem_info, lambda: driver.mem_alloc(1), lambda: driver.host_alloc(1, flags=0)):
        with pytest.raises(DriverError):
            call()
