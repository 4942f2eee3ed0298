"""What arenas promise on every device: with virtual memory they grow in place, without it they say so and serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from devices import CAPACITY, DEVICES, host, read, write

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.give_back import give_back, take_back
from tonnage.buffers.restore import Restore
from tonnage.buffers.stable import StableBuffer
from tonnage.device.cuda import CudaDriver
from tonnage.device.driver import Driver
from tonnage.device.hazard import HazardDriver
from tonnage.device.trace import TraceDriver
from tonnage.errors import DeviceLost, DriverUnsupported, GraphRangeUnmapped, NotMaterialized, RangeReferenced
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from unit.fake_cuda import FakeCuda


class Bench:
    """One device, one ledger, and arenas that are closed in the end."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.page = driver, driver.capabilities().page_bytes
        self.virtual = driver.capabilities().vmm
        self.ledger = Ledger(0, CAPACITY)
        self.stream = Stream(Device(driver))
        self.arenas: list[VaArena] = []

    def arena(self, num_pages: int = 32, **arguments: object) -> VaArena:
        arguments = {"owner": "kv", "line": LineKind.KV, "chunk_bytes": 4 * self.page, **arguments}
        arena = VaArena(self.stream, ledger=self.ledger, reserve_bytes=num_pages * self.page, **arguments)  # type: ignore[arg-type]
        self.arenas.append(arena)
        return arena

    def put(self, arena: VaArena, page: int, value: int) -> None:
        write(self.driver, arena.address + page * self.page, bytes([value]) * self.page)

    def holds(self, arena: VaArena, page: int, value: int) -> bool:
        return read(self.driver, arena.address + page * self.page, self.page) == bytes([value]) * self.page

    def need_virtual(self) -> None:
        if not self.virtual:
            pytest.skip("without virtual memory, on purpose")


@pytest.fixture(params=[*DEVICES, pytest.param(lambda: CudaDriver(api=FakeCuda()), id="cuda over a stand-in")])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    driver = request.param()
    bench = Bench(driver)
    yield bench
    for arena in bench.arenas:
        arena.close()
    assert bench.ledger.accounted_bytes == 0
    assert driver.close() == ()


def test_it_says_which_path_it_takes(bench: Bench) -> None:
    arena = bench.arena()
    assert arena.path == ("virtual" if bench.virtual else "static")
    assert ("static" in repr(arena)) == (not bench.virtual)
    assert bench.ledger.accounted_bytes == (0 if bench.virtual else 32 * bench.page)


def test_it_grows_where_it_is_and_keeps_its_bytes(bench: Bench) -> None:
    arena = bench.arena()
    address = arena.address
    for num_pages in (1, 3, 4, 11, 20):
        assert arena.commit(num_pages * bench.page) >= num_pages * bench.page
        assert arena.address == address
        bench.put(arena, num_pages - 1, num_pages)
    assert all(bench.holds(arena, num_pages - 1, num_pages) for num_pages in (1, 3, 4, 11, 20))
    entry = bench.ledger.snapshot().entries[0]
    assert entry.requested_bytes == 20 * bench.page
    assert entry.physical_bytes == entry.high_water_bytes == arena.committed_bytes


def test_it_never_grows_past_what_was_reserved(bench: Bench) -> None:
    arena = bench.arena(8)
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(8 * bench.page + 1)
    assert arena.commit(8 * bench.page) == 8 * bench.page


def test_shrinking_gives_back_what_can_be_given(bench: Bench) -> None:
    arena = bench.arena()
    arena.commit(11 * bench.page)  # handles of 4, 4, 1, 1, 1 pages
    bench.put(arena, 8, 3)
    assert arena.decommit(9 * bench.page) == (2 * bench.page if bench.virtual else 0)
    assert bench.holds(arena, 8, 3)
    assert arena.decommit(5 * bench.page) == (bench.page if bench.virtual else 0)
    assert arena.commit(9 * bench.page) >= 9 * bench.page
    bench.put(arena, 8, 4)
    assert bench.ledger.snapshot().entries[0].requested_bytes == 9 * bench.page


def test_zeros_are_zero(bench: Bench) -> None:
    arena = bench.arena(zero_on_commit=True, zero_ranges=((16, 16),))
    arena.commit(2 * bench.page)
    assert bench.holds(arena, 0, 0)
    assert bench.holds(arena, 1, 0)
    bench.put(arena, 0, 9)
    arena.commit(4 * bench.page)
    first = read(bench.driver, arena.address, 48)
    assert first == b"\x09" * 16 + bytes(16) + b"\x09" * 16
    assert bench.holds(arena, 3, 0)


def test_exactly_what_was_committed_wakes_with_its_bytes(bench: Bench) -> None:
    bench.need_virtual()
    arena = bench.arena(tag="kv", restore=Restore.CPU)
    virtual = bench.stream.device.virtual
    arena.commit(6 * bench.page)
    for page in range(6):
        bench.put(arena, page, page + 1)
    address = arena.address
    assert virtual.release("kv").freed_bytes == 6 * bench.page
    assert (bench.ledger.accounted_bytes, arena.usable_bytes) == (0, 0)
    with pytest.raises(NotMaterialized):
        arena.commit(7 * bench.page)
    wake = virtual.materialize("kv")
    assert wake.num_bytes == 6 * bench.page
    wake.sync()
    assert arena.address == address
    assert all(bench.holds(arena, page, page + 1) for page in range(6))
    arena.commit(7 * bench.page)
    assert bench.ledger.accounted_bytes == 7 * bench.page


def test_graphs_hold_what_they_replay_over(bench: Bench) -> None:
    bench.need_virtual()
    graphs = bench.stream.device.graphs
    buffer = StableBuffer(bench.arena(tag="kv"), num_bytes=4 * bench.page)
    with graphs.capture("g"):
        buffer.address  # noqa: B018
    buffer.grow(6 * bench.page)
    with pytest.raises(RangeReferenced):
        buffer.shrink(3 * bench.page)
    assert buffer.shrink(4 * bench.page) == 2 * bench.page
    assert graphs.launch("g", lambda: "replayed") == "replayed"
    bench.stream.device.virtual.release("kv")
    with pytest.raises(GraphRangeUnmapped, match="'g'"):
        graphs.check("g")
    bench.stream.device.virtual.materialize("kv").sync()
    graphs.check("g")
    graphs.destroy("g")


def test_the_tail_goes_and_comes_back(bench: Bench) -> None:
    arena = bench.arena(fine_from_bytes=0)
    arena.commit(10 * bench.page)
    bench.put(arena, 5, 5)
    given = give_back(arena, 4 * bench.page, deadline_s=30, vacate=lambda keep: keep)
    assert given.given_bytes == (4 * bench.page if bench.virtual else 0)
    assert bool(given.reason) == (not bench.virtual)
    if bench.virtual:
        assert take_back(arena, 4 * bench.page) == 10 * bench.page
    assert bench.holds(arena, 5, 5)


def test_growth_takes_no_copy_and_a_steady_state_no_edit() -> None:
    driver = TraceDriver(host())
    bench = Bench(driver)
    arena = bench.arena(64, chunk_bytes=bench.page)
    for num_pages in range(1, 65):
        arena.commit(num_pages * bench.page)
    calls = [line.partition("(")[0] for line in driver.log]
    assert not {"copy", "fill", "unmap", "va_free"} & set(calls)
    assert calls.count("va_reserve") == 1
    assert calls.count("phys_create") == calls.count("map") == calls.count("set_access") == 64
    assert arena.num_edits == 128 == bench.stream.device.graphs.num_edits * 2
    num_calls = len(driver.log)
    for _ in range(100):
        arena.commit(64 * bench.page)
        arena.decommit(64 * bench.page)
    assert driver.log[num_calls:] == []
    assert arena.num_edits == 128
    arena.close()
    assert driver.close() == ()


@pytest.fixture
def watched() -> Iterator[Bench]:
    """A device that notices edits under work which still runs, even of other pages of the same reservation."""
    driver = HazardDriver(host(), reservation_hazard=True)
    bench = Bench(driver)
    yield bench
    if driver.lost is None:
        for arena in bench.arenas:
            arena.close()
        assert driver.close() == ()


def test_every_edit_is_drained_first(watched: Bench) -> None:
    arena, page = watched.arena(tag="kv"), watched.page
    side = Stream.create(watched.stream.device)
    arena.commit(6 * page)

    def run() -> None:
        for number, stream in enumerate((watched.stream, side)):
            watched.driver.launch(stream.handle, writes=[(arena.address + number * page, page)])  # type: ignore[attr-defined]

    for edit in (
        lambda: arena.commit(8 * page),
        lambda: arena.decommit(6 * page),
        lambda: arena.decommit(4 * page, timeout_s=5),
        lambda: watched.stream.device.virtual.release("kv"),
    ):
        run()
        edit()
    watched.stream.device.virtual.materialize("kv").sync()
    run()
    arena.close()
    assert watched.driver.hazards == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("edit", ["commit", "decommit"])
def test_the_watch_would_have_noticed(watched: Bench, edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, page = watched.arena(), watched.page
    arena.commit(6 * page)
    watched.driver.launch(0, writes=[(arena.address, page)])  # type: ignore[attr-defined]
    monkeypatch.setattr(watched.stream.device.fences, "wait_idle", lambda **_: True)
    with pytest.raises(DeviceLost):
        getattr(arena, edit)((8 if edit == "commit" else 4) * page)


def test_peers_are_given_access_or_nothing_is_committed(watched: Bench) -> None:
    arena = watched.arena(peers=(1,))
    with pytest.raises(DriverUnsupported, match="peers"):
        arena.commit(watched.page)
    assert arena.committed_bytes == watched.ledger.accounted_bytes == 0
    assert watched.driver.wrapped.used_bytes == 0  # type: ignore[attr-defined]


def test_zero_ranges_are_zero_to_their_last_byte_however_they_are_cut(watched: Bench) -> None:
    """Fresh memory of this device is not zero."""
    page = watched.page
    arena = watched.arena(tag="kv", zero_ranges=((page - 3, 5), (2 * page - 1, 1)))
    arena.commit(page)
    assert read(watched.driver, arena.address + page - 4, 4) == b"\xa5\0\0\0"
    arena.commit(2 * page)
    for _ in range(2):
        assert read(watched.driver, arena.address + page - 4, 7) == b"\xa5" + bytes(5) + b"\xa5"
        assert read(watched.driver, arena.address + 2 * page - 2, 2) == b"\xa5\0"
        watched.stream.device.virtual.release("kv")
        watched.stream.device.virtual.materialize("kv").sync()
