"""One scenario, every device: the same calls, the same errors, the same bytes.

The driver's part is held against a list written by hand, so that no device is the other's only witness. The part of
the buffers is held against what one device does; on a machine with a card the host and the card face each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from devices import DEVICES, PAGE, cuda, host, read

from tonnage.device.driver import Driver
from tonnage.device.hazard import FRESH, HazardDriver
from tonnage.device.host import HostDriver
from tonnage.device.trace import QUESTIONS, TraceDriver, replay
from tonnage.errors import DeviceLost, DriverError

MANY = 2**19  # pages: more than any device has

EXPECTED = """\
va_reserve(8p, align=1p) -> va0
va_reserve(0, align=1p) -> ! DriverError
phys_create(2p) -> handle0
phys_create(524288p) -> ! DriverOOM
map(va0, 2p, handle0)
map(va0+1p, 2p, handle0) -> ! DriverError
map(va0+7p, 2p, handle0) -> ! DriverError
set_access(va0, 1p) -> ! DriverError
set_access(va0, 2p)
fill(va0, 17, 2p, stream=stream0)
= va0: 17, va0+1p: 17
phys_create(1p) -> handle1
map(va0+2p, 1p, handle1)
set_access(va0+2p, 1p)
phys_release(handle1)
phys_release(handle1) -> ! DriverError
copy(va0+2p, va0, 1p, stream=stream0)
fill(va0, 34, 1p, stream=stream0)
= va0: 34, va0+1p: 17, va0+2p: 17
unmap(va0+1p, 1p) -> ! DriverError
va_free(va0, 8p) -> ! DriverError
unmap(va0, 2p)
map(va0+4p, 2p, handle0)
set_access(va0+4p, 2p)
= va0+4p: 34, va0+5p: 17, va0+2p: 17
phys_create(1p) -> handle2
map(va0, 1p, handle2)
set_access(va0, 1p)
copy(va0, va0+2p, 100, stream=stream0)
= va0: 17
device_sync()
unmap(va0, 1p)
unmap(va0, 1p) -> ! DriverError
unmap(va0+2p, 1p)
unmap(va0+4p, 2p)
phys_release(handle0)
map(va0, 2p, handle0) -> ! DriverError
phys_release(handle2)
va_free(va0, 7p) -> ! DriverError
va_free(va0, 8p)
va_free(va0, 8p) -> ! DriverError
mem_alloc(3p) -> mem0
mem_alloc(0) -> ! DriverError
fill(mem0+1p, 5, 1p, stream=stream0)
= mem0+1p: 5
device_sync()
mem_free(mem0)
mem_free(mem0) -> ! DriverError
stream_create(priority=0) -> stream1
event_create() -> event0
host_alloc(64, flags=0) -> host0
fill(host0, 9, 64, stream=stream1)
event_record(event0, stream=stream1)
stream_wait(stream0, event0)
event_sync(event0)
stream_sync(stream1)
host_free(host0)
host_free(host0) -> ! DriverError
event_destroy(event0)
stream_destroy(stream1)
stream_destroy(stream0) -> ! DriverError
""".splitlines()

EXPECTED_POOLS = """\
pool_create() -> pool0
stream_create(priority=0) -> stream1
pool_alloc(pool0, 2p, stream=stream1) -> block0
pool_alloc(pool0, 0, stream=stream1) -> ! DriverError
pool_alloc(pool0, 100, stream=stream1) -> block1
pool_alloc(pool0, 524288p, stream=stream1) -> ! DriverOOM
fill(block0, 3, 2p, stream=stream1)
fill(block1, 4, 100, stream=stream1)
copy(block0, block1, 100, stream=stream1)
= block0: 4, block0+1p: 3, block1: 4
pool_free(block1, stream=stream1)
pool_free(block1, stream=stream1) -> ! DriverError
pool_destroy(pool0) -> ! DriverError
pool_free(block0, stream=stream1)
stream_sync(stream1)
pool_trim(pool0, 0)
pool_reset_high(pool0)
pool_destroy(pool0)
stream_destroy(stream1)
""".splitlines()


class Scenario:
    """Steps on a traced device; an error is part of the trace, and ``look`` writes down the first bytes of places."""

    def __init__(self, driver: Driver, **arguments: frozenset[str]) -> None:
        self.driver = TraceDriver(driver, **arguments)
        self.page = driver.capabilities().page_bytes

    def may_fail(self, call: Callable[[], object]) -> None:
        """Only what a driver raises on purpose; any other exception ends the test."""
        try:
            call()
        except DriverError:
            pass
        else:
            self.driver.log[-1] += " (no error)"

    def look(self, **places: int) -> None:
        """``name_at_offset`` in pages: ``va0_2=address`` reads ``va0+2p``."""
        seen = []
        for name, addr in places.items():
            base, _, offset = name.partition("_")
            byte = read(self.driver.wrapped, addr, 16)
            assert len(set(byte)) == 1, (name, byte)
            seen.append(f"{base}{f'+{offset}p' if offset else ''}: {byte[0]}")
        self.driver.log.append(f"= {', '.join(seen)}")


def run_driver(driver: Driver) -> list[str]:
    """Virtual memory, plain memory, streams: all that every device with virtual memory has."""
    scenario = Scenario(driver)
    traced, page = scenario.driver, scenario.page
    _virtual(scenario, traced, page)
    plain = traced.mem_alloc(3 * page)
    scenario.may_fail(lambda: traced.mem_alloc(0))
    traced.fill(plain + page, 5, page, stream=0)
    scenario.look(mem0_1=plain + page)
    traced.device_sync()
    traced.mem_free(plain)
    scenario.may_fail(lambda: traced.mem_free(plain))
    stream, event, memory = traced.stream_create(priority=0), traced.event_create(), traced.host_alloc(64, flags=0)
    traced.fill(memory, 9, 64, stream=stream)
    traced.event_record(event, stream=stream)
    traced.stream_wait(0, event)
    traced.event_sync(event)
    traced.stream_sync(stream)
    traced.host_free(memory)
    scenario.may_fail(lambda: traced.host_free(memory))
    traced.event_destroy(event)
    traced.stream_destroy(stream)
    scenario.may_fail(lambda: traced.stream_destroy(0))
    return traced.log


def _virtual(scenario: Scenario, traced: TraceDriver, page: int) -> None:
    base = traced.va_reserve(8 * page, align=page)
    scenario.may_fail(lambda: traced.va_reserve(0, align=page))
    two = traced.phys_create(2 * page)
    scenario.may_fail(lambda: traced.phys_create(MANY * page))
    traced.map(base, 2 * page, two)
    scenario.may_fail(lambda: traced.map(base + page, 2 * page, two))  # over a mapping
    scenario.may_fail(lambda: traced.map(base + 7 * page, 2 * page, two))  # past the reservation
    scenario.may_fail(lambda: traced.set_access(base, page))  # half a mapping
    traced.set_access(base, 2 * page)
    traced.fill(base, 17, 2 * page, stream=0)
    scenario.look(va0=base, va0_1=base + page)
    one = traced.phys_create(page)
    traced.map(base + 2 * page, page, one)
    traced.set_access(base + 2 * page, page)
    traced.phys_release(one)  # the mapping keeps it
    scenario.may_fail(lambda: traced.phys_release(one))
    traced.copy(base + 2 * page, base, page, stream=0)
    traced.fill(base, 34, page, stream=0)
    scenario.look(va0=base, va0_1=base + page, va0_2=base + 2 * page)
    scenario.may_fail(lambda: traced.unmap(base + page, page))  # half a mapping
    scenario.may_fail(lambda: traced.va_free(base, 8 * page))  # still mapped
    _moved(scenario, traced, page, base, two)


def _moved(scenario: Scenario, traced: TraceDriver, page: int, base: int, two: int) -> None:
    """The same memory at another place, then everything given back, some of it twice."""
    traced.unmap(base, 2 * page)
    traced.map(base + 4 * page, 2 * page, two)
    traced.set_access(base + 4 * page, 2 * page)
    scenario.look(va0_4=base + 4 * page, va0_5=base + 5 * page, va0_2=base + 2 * page)
    fresh = traced.phys_create(page)
    traced.map(base, page, fresh)
    traced.set_access(base, page)
    traced.copy(base, base + 2 * page, 100, stream=0)
    scenario.look(va0=base)
    traced.device_sync()
    traced.unmap(base, page)
    scenario.may_fail(lambda: traced.unmap(base, page))
    traced.unmap(base + 2 * page, page)
    traced.unmap(base + 4 * page, 2 * page)
    traced.phys_release(two)
    scenario.may_fail(lambda: traced.map(base, 2 * page, two))
    traced.phys_release(fresh)
    scenario.may_fail(lambda: traced.va_free(base, 7 * page))
    traced.va_free(base, 8 * page)
    scenario.may_fail(lambda: traced.va_free(base, 8 * page))


def run_pools(driver: Driver) -> list[str]:
    scenario = Scenario(driver)
    traced, page = scenario.driver, scenario.page
    pool, stream = traced.pool_create(), traced.stream_create(priority=0)
    large = traced.pool_alloc(pool, 2 * page, stream=stream)
    scenario.may_fail(lambda: traced.pool_alloc(pool, 0, stream=stream))
    small = traced.pool_alloc(pool, 100, stream=stream)
    scenario.may_fail(lambda: traced.pool_alloc(pool, MANY * page, stream=stream))
    traced.fill(large, 3, 2 * page, stream=stream)
    traced.fill(small, 4, 100, stream=stream)
    traced.copy(large, small, 100, stream=stream)
    scenario.look(block0=large, block0_1=large + page, block1=small)
    traced.pool_free(small, stream=stream)
    scenario.may_fail(lambda: traced.pool_free(small, stream=stream))
    scenario.may_fail(lambda: traced.pool_destroy(pool))
    traced.pool_free(large, stream=stream)
    traced.stream_sync(stream)
    traced.pool_trim(pool, 0)
    traced.pool_reset_high(pool)
    traced.pool_destroy(pool)
    traced.stream_destroy(stream)
    return traced.log


@pytest.fixture(params=DEVICES)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = request.param()
    yield driver
    assert driver.close() == ()


def require(driver: Driver, *names: str) -> None:
    for name in names:
        if not getattr(driver.capabilities(), name):
            pytest.skip(f"this device has no {name}")


def test_every_device_with_virtual_memory_does_what_the_list_says(driver: Driver) -> None:
    require(driver, "vmm")
    assert run_driver(driver) == EXPECTED


def test_every_device_with_pools_does_what_the_list_says(driver: Driver) -> None:
    require(driver, "pools")
    assert run_pools(driver) == EXPECTED_POOLS


def test_the_watch_finds_nothing_in_it_and_changes_nothing(driver: Driver) -> None:
    """Fresh memory is painted and allocations are padded below the trace; what was asked and read is the same."""
    watch = HazardDriver(driver, reservation_hazard=True)
    for run, expected, needed in ((run_driver, EXPECTED, "vmm"), (run_pools, EXPECTED_POOLS, "pools")):
        if getattr(driver.capabilities(), needed):
            assert run(watch) == expected
    assert watch.hazards == []


def test_the_watch_catches_the_same_on_every_device(driver: Driver) -> None:
    watch, page = HazardDriver(driver), driver.capabilities().page_bytes
    stream, addr = watch.stream_create(priority=0), watch.mem_alloc(page)
    assert read(driver, addr, 16) == bytes([FRESH]) * 16
    watch.launch(stream, writes=[(addr, page)], what="decode")
    watch.strict = False
    watch.mem_free(addr)
    with pytest.raises(DriverError):
        watch.mem_free(addr)
    small = watch.mem_alloc(100)
    driver.fill(small, 1, 101, stream=0)
    watch.mem_free(small)
    driver.stream_destroy(stream)
    assert [hazard.split(":")[1] for hazard in watch.hazards] == [" IN_USE", " RED_ZONE"]
    watch.strict = True
    kept, gone = watch.mem_alloc(page), watch.mem_alloc(page)
    watch.mem_free(gone)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        watch.launch(0, reads=[(kept, page), (gone, 8)])
    driver.mem_free(kept)


def test_what_one_device_was_asked_another_answers_alike(driver: Driver) -> None:
    """The hand-written list itself, asked of every device in place of the scenario."""
    for expected, needed in ((EXPECTED, "vmm"), (EXPECTED_POOLS, "pools")):
        if getattr(driver.capabilities(), needed):
            asked = [line for line in expected if not line.startswith("=")]
            assert replay(asked, driver) == asked


def run_buffers(driver: Driver) -> list[str]:
    """Buffers of several kinds and an arena, over all of their lives; fences and questions come as they come."""
    from tonnage.buffers import BufferManager, Device, Stream, VaArena
    from tonnage.errors import BufferOOM
    from tonnage.ledger import Ledger
    from tonnage.terms import LineKind, MemoryKind

    fences = frozenset(name for name in vars(Driver) if name.startswith(("event_", "stream_")) or name == "device_sync")
    scenario = Scenario(driver, quiet=QUESTIONS | fences)
    traced, page = scenario.driver, scenario.page
    ledger, stream = Ledger(0, driver.mem_info()[1]), Stream(Device(traced))
    manager = BufferManager(stream, ledger=ledger, owner="trace", trim_on_close=True)
    arena = VaArena(
        stream, ledger=ledger, owner="arena", line=LineKind.KV, reserve_bytes=16 * page, chunk_bytes=2 * page
    )

    def books(what: str) -> None:
        """The state as the ledger has it, in pages and bytes."""
        held = [
            f"{entry.owner} {entry.memory}: {entry.num_live} x {entry.requested_bytes // page}p"
            f"+{entry.requested_bytes % page}"
            for entry in sorted(ledger.snapshot().entries, key=lambda entry: (entry.owner, entry.memory))
        ]
        traced.log.append(f"# {what}: {'; '.join(held)}; committed {arena.committed_bytes // page}p")

    kinds = (MemoryKind.GPU, MemoryKind.GPU_SYNC, MemoryKind.PINNED)
    buffers = [manager.allocate(kind, 3 * page + 100, line=LineKind.TABLES) for kind in kinds]
    books("allocated")
    manager.set_zero(buffers[0])
    manager.copy(dst=buffers[1], src=buffers[0])
    scenario.look(block=buffers[0].address, mem=buffers[1].address)
    for num_pages in (1, 5, 9):
        arena.commit(num_pages * page)
        books(f"committed {num_pages}")
    traced.log.append(f"! {_kind_of(BufferOOM, lambda: manager.gpu_sync(MANY * page, line=LineKind.TABLES))}")
    books("refused")
    arena.decommit(3 * page)
    books("decommitted")
    arena.commit(6 * page)
    books("committed again")
    for buffer in buffers:
        buffer.close()
    arena.close()
    manager.close()
    books("closed")
    return traced.log


def _kind_of(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return type(error).__name__
    return "nothing raised"


def test_buffers_and_arenas_ask_every_device_the_same(driver: Driver) -> None:
    require(driver, "vmm", "pools")
    page = driver.capabilities().page_bytes
    reference = HostDriver(64 * page, page_bytes=page)
    expected = run_buffers(reference)
    assert run_buffers(driver) == expected
    closed = [line for line in expected if line.startswith("# closed")]
    assert closed == ["# closed: arena gpu: 0 x 0p+0; trace gpu: 0 x 0p+0; trace gpu_sync: 0 x 0p+0; "
                      "trace pinned: 0 x 0p+0; committed 0p"]  # fmt: skip
    assert "! BufferOOM" in expected


@pytest.mark.gpu
def test_the_host_and_the_card_leave_equal_traces() -> None:
    card = cuda()
    small, same = host(), HostDriver(64 * card.capabilities().page_bytes, page_bytes=card.capabilities().page_bytes)
    for run in (run_driver, run_pools):
        assert run(card) == run(same) == run(small)
    assert small.capabilities().page_bytes == PAGE
    for device in (card, small, same):
        device.close()
