"""One suite for buffers of every kind, on every path, on every device."""

from __future__ import annotations

import itertools

import pytest
from devices import DEVICES, read, write

from tonnage.buffers import Buffer, BufferManager, Device, Stream
from tonnage.buffers.scopes import scope
from tonnage.device.driver import Driver
from tonnage.errors import BufferInUse, BufferOOM, DriverUnsupported
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

KINDS = [kind for kind in MemoryKind if kind is not MemoryKind.IPC_NVLS]
ON_HOST = {MemoryKind.CPU, MemoryKind.PINNED, MemoryKind.PINNED_POOL}
#: Larger than any device of the suites, and than all addresses of a process: a machine that overcommits grants less.
FAR_TOO_MUCH = 2**50


class Bench:
    """A device, its ledger, a manager, and the buffers that must be closed in the end."""

    def __init__(self, driver: Driver, *, own_stream: bool = False) -> None:
        self.driver, self.device = driver, Device(driver)
        self.device.pinned.chunk_bytes = 1 << 20
        self.page = driver.capabilities().page_bytes
        self.ledger = Ledger(0, driver.mem_info()[1])
        self.stream = Stream.create(self.device) if own_stream else Stream(self.device)
        self.manager = BufferManager(self.stream, ledger=self.ledger, owner="tests")
        self.buffers: list[Buffer] = []

    def make(self, kind: MemoryKind, shape: int | tuple[int, ...], dtype: str = "uint8", *, tag: str = "") -> Buffer:
        buffer = self.manager.allocate(kind, shape, dtype, line=LineKind.TABLES, tag=tag)
        self.buffers.append(buffer)
        return buffer

    def booked(self, kind: MemoryKind) -> tuple[int, int]:
        """Requested bytes and live allocations of a kind."""
        entries = [entry for entry in self.ledger.snapshot().entries if entry.memory is kind]
        return sum(entry.requested_bytes for entry in entries), sum(entry.num_live for entry in entries)

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.manager.trim_to(0, sync=True)  # what waited for a fence is given back too
        for kind in KINDS:
            assert self.booked(kind) == (0, 0)
        if self.device.pool.handle is not None:
            self.driver.pool_destroy(self.device.pool.handle)
        if self.stream.handle:
            self.stream.close()


@pytest.fixture(params=DEVICES)
def driver(request: pytest.FixtureRequest):
    driver = request.param()
    yield driver
    if driver.kind == "host":
        assert driver.close() == ()


@pytest.fixture(params=[False, True], ids=["stream 0", "own stream"])
def bench(driver: Driver, request: pytest.FixtureRequest):
    bench = Bench(driver, own_stream=request.param)
    yield bench
    bench.close()


@pytest.fixture(params=KINDS)
def kind(bench: Bench, request: pytest.FixtureRequest) -> MemoryKind:
    kind: MemoryKind = request.param
    if kind is MemoryKind.MANAGED and not bench.driver.capabilities().managed:
        with pytest.raises(DriverUnsupported):
            bench.manager.managed(1, line=LineKind.TABLES)
        pytest.skip("this device has no managed memory, and says so")
    return kind


def pattern(num_bytes: int, *, seed: int = 1) -> bytes:
    return bytes((index * 31 + seed) % 251 for index in range(num_bytes))


def test_a_buffer_is_real_memory_and_is_booked_until_it_is_closed(bench: Bench, kind: MemoryKind) -> None:
    buffer = bench.make(kind, 5000)
    assert (buffer.size_bytes, buffer.capacity_bytes, buffer.num_elements, buffer.shape) == (5000, 5000, 5000, (5000,))
    assert (buffer.kind, buffer.stream, buffer.usable_bytes) == (kind, bench.stream, 5000)
    assert buffer.address % 256 == 0
    bench.stream.sync()
    write(bench.driver, buffer.address, pattern(5000))
    assert read(bench.driver, buffer.address, 5000) == pattern(5000)
    assert bench.booked(kind) == (5000, 1)
    assert bench.manager.stats().live_bytes[kind] == 5000
    buffer.close()
    buffer.release()
    buffer.close()
    assert (buffer.address, buffer.size_bytes, buffer.capacity_bytes, buffer.shape) == (0, 0, 0, (0,))
    assert bench.booked(kind) == (0, 0)


def test_paths_are_scope_then_pool_then_plain(bench: Bench) -> None:
    capabilities = bench.driver.capabilities()
    without_scope = bench.make(MemoryKind.GPU, 100)
    assert without_scope.path == ("pool" if capabilities.pools else "synchronous")
    assert bench.make(MemoryKind.GPU_SYNC, 100).path == "synchronous"
    assert bench.make(MemoryKind.CPU, 100).path == "host"
    with scope("test"):
        inside = [bench.make(kind, 100) for kind in (MemoryKind.GPU, MemoryKind.GPU_SYNC)]
        assert bench.make(MemoryKind.PINNED, 100).path == "host"
    plain = [without_scope.path, "synchronous"]
    assert [buffer.path for buffer in inside] == (["virtual"] * 2 if capabilities.vmm else plain)
    assert bench.make(MemoryKind.GPU, 100).path == without_scope.path
    # Made inside, closed outside: the way it is freed was fixed when it was made.
    write(bench.driver, inside[0].address, pattern(100))
    assert read(bench.driver, inside[0].address, 100) == pattern(100)
    for buffer in inside:
        buffer.close()


def test_the_stream_is_in_what_people_read(bench: Bench, kind: MemoryKind) -> None:
    buffer = bench.make(kind, 1234)
    handle = f"<Stream {bench.stream.handle:#x} of "
    assert repr(buffer).startswith(f"<Buffer {kind} 1,234 bytes ({buffer.path}) at {buffer.address:#x} on {handle}")
    assert handle in repr(bench.manager)
    assert bench.ledger.events()[-1].stream == bench.stream.handle
    with pytest.raises(BufferOOM, match=f"on stream {bench.stream.handle:#x}") as caught:
        bench.make(kind, FAR_TOO_MUCH)
    assert caught.value.stream == bench.stream.handle


def test_zero_elements_take_nothing(bench: Bench, kind: MemoryKind) -> None:
    buffer = bench.make(kind, (3, 0), "float32")
    assert (buffer.address, buffer.size_bytes, buffer.shape, bench.booked(kind)) == (0, 0, (3, 0), (0, 0))
    bench.manager.set_zero(buffer)
    bench.manager.copy(src=buffer, dst=buffer)
    assert bench.manager.empty(kind, line=LineKind.TABLES).address == 0
    for wrong in (-1, (2, -3)):
        with pytest.raises(ValueError):
            bench.make(kind, wrong)
    with pytest.raises(ValueError, match="no dtype"):
        bench.make(kind, 1, "complex")


def test_resize_keeps_within_capacity_and_loses_beyond(bench: Bench, kind: MemoryKind) -> None:
    buffer = bench.make(kind, 1000, "int32")
    address = buffer.address
    bench.stream.sync()
    write(bench.driver, address, pattern(4000))
    buffer.resize(10)
    assert (buffer.size_bytes, buffer.capacity_bytes, buffer.address) == (40, 4000, address)
    buffer.resize(0)
    assert (buffer.address, buffer.capacity_bytes) == (0, 4000)
    buffer.reshape((10, 100))
    assert (buffer.shape, buffer.address) == ((10, 100), address)
    assert read(bench.driver, address, 4000) == pattern(4000)
    assert bench.booked(kind) == (4000, 1)
    buffer.resize(5000)
    assert (buffer.size_bytes, buffer.capacity_bytes, buffer.shape) == (20_000, 20_000, (5000,))
    assert bench.booked(kind) == (20_000, 1)
    bench.stream.sync()
    write(bench.driver, buffer.address, pattern(20_000))
    with pytest.raises(ValueError):
        buffer.reshape((-1, 2))
    assert buffer.size_bytes == 20_000


def test_a_resize_that_fails_leaves_an_empty_buffer_that_can_be_used_again(bench: Bench, kind: MemoryKind) -> None:
    buffer = bench.make(kind, 1000)
    with pytest.raises(BufferOOM):
        buffer.resize(FAR_TOO_MUCH)
    assert (buffer.address, buffer.size_bytes, buffer.capacity_bytes) == (0, 0, 0)
    assert bench.booked(kind) == (0, 0)
    buffer.resize(2000)
    assert bench.booked(kind) == (2000, 1)
    bench.manager.set_mem(buffer, 9)
    assert read(bench.driver, buffer.address, 2000) == b"\x09" * 2000
    with pytest.raises(BufferOOM):
        buffer.resize(FAR_TOO_MUCH)
    buffer.close()  # nothing to free twice


def test_copies_between_all_kinds_carry_the_bytes(bench: Bench, kind: MemoryKind) -> None:
    others = [one for one in KINDS if one is not MemoryKind.MANAGED or bench.driver.capabilities().managed]
    for index, other in enumerate(others):
        src, dst = bench.make(kind, 3000), bench.make(other, 3000)
        bench.stream.sync()
        write(bench.driver, src.address, pattern(3000, seed=index))
        bench.manager.copy(src=src, dst=dst)
        bench.stream.sync()
        assert read(bench.driver, dst.address, 3000) == pattern(3000, seed=index)
        made = bench.manager.copy_from(dst, kind, line=LineKind.TABLES)
        bench.stream.sync()
        assert read(bench.driver, made.address, 3000) == pattern(3000, seed=index)
        for one in (src, dst, made):
            one.close()


def test_a_copy_of_another_size_or_type_is_refused(bench: Bench, kind: MemoryKind) -> None:
    src = bench.make(kind, 100)
    for shape, dtype in ((101, "uint8"), (99, "uint8"), (100, "int8"), (25, "int32")):
        with pytest.raises(ValueError, match="must match"):
            bench.manager.copy(src=src, dst=bench.make(kind, shape, dtype))


def test_fills_and_raw_addresses(bench: Bench, kind: MemoryKind) -> None:
    buffer, manager = bench.make(kind, 1000), bench.manager
    manager.set_mem(buffer, 7)
    assert read(bench.driver, buffer.address, 1000) == b"\x07" * 1000
    manager.set_zero(buffer)
    assert read(bench.driver, buffer.address, 1000) == bytes(1000)
    manager.set_bytes(buffer.address + 10, 3, 5, kind=kind)
    assert read(bench.driver, buffer.address, 20) == bytes(10) + b"\x03" * 5 + bytes(5)
    manager.copy_bytes(src=buffer.address + 10, dst=buffer.address, size_bytes=5, src_kind=kind, dst_kind=kind)
    assert read(bench.driver, buffer.address, 5) == b"\x03" * 5
    for byte in (-1, 256):
        with pytest.raises(ValueError, match="no byte"):
            manager.set_mem(buffer, byte)


def test_copies_wait_for_an_event(bench: Bench, kind: MemoryKind) -> None:
    driver, other = bench.driver, Stream.create(bench.device)
    src, dst = bench.make(kind, 1 << 16), bench.make(kind, 1 << 16)
    bench.stream.sync()
    event = driver.event_create()
    driver.fill(src.address, 5, 1 << 16, stream=other.handle) if kind not in ON_HOST else bench.manager.set_mem(src, 5)
    driver.event_record(event, stream=other.handle)
    bench.manager.copy(src=src, dst=dst, wait=event)
    assert read(driver, dst.address, 1 << 16) == b"\x05" * (1 << 16)
    driver.event_destroy(event)
    other.close()


def test_pool_statistics(bench: Bench) -> None:
    manager, page = bench.manager, bench.page
    before = manager.stats(sync=True)
    first = bench.make(MemoryKind.GPU, 3 * page)
    held = manager.stats()
    if not bench.driver.capabilities().pools:
        assert held.reserved_bytes == held.used_bytes == held.free_bytes == held.used_high_bytes == 0
        assert manager.trim_to(0, sync=True) == 0
        return
    assert held.used_bytes >= before.used_bytes + 3 * page
    assert held.reserved_bytes >= held.used_bytes
    second = bench.make(MemoryKind.GPU, page)
    most = manager.stats()
    assert most.used_bytes >= held.used_bytes + page
    second.close()
    first.close()
    after = manager.stats(sync=True)
    assert after.used_bytes == before.used_bytes
    assert after.reserved_bytes <= most.reserved_bytes
    assert after.free_bytes == after.reserved_bytes - after.used_bytes
    assert after.used_high_bytes >= most.used_bytes
    assert after.reserved_high_bytes >= most.reserved_bytes
    given = manager.trim_to(0, sync=True)
    assert (given, manager.stats().reserved_bytes) == (after.reserved_bytes, 0)
    assert manager.trim_to(0) == 0


def test_trimming_keeps_what_is_asked_and_what_lives(bench: Bench) -> None:
    if not bench.driver.capabilities().pools:
        pytest.skip("no pool to trim")
    kept = bench.make(MemoryKind.GPU, bench.page)
    write(bench.driver, kept.address, pattern(1000))
    for buffer in [bench.make(MemoryKind.GPU, 4 * bench.page) for _ in range(3)]:
        buffer.close()
    held = bench.manager.stats(sync=True).reserved_bytes
    assert bench.manager.trim_to(held, sync=True) == 0
    bench.manager.trim_to(6 * bench.page, sync=True)
    assert 6 * bench.page <= bench.manager.stats().reserved_bytes <= held
    bench.manager.trim_to(0, sync=True)
    assert bench.manager.stats().reserved_bytes >= bench.page
    assert read(bench.driver, kept.address, 1000) == pattern(1000)


def test_trimming_reaches_the_pinned_pool(bench: Bench) -> None:
    buffer = bench.make(MemoryKind.PINNED_POOL, 1000)
    pinned = bench.manager.stats().pinned
    assert pinned is not None
    assert (pinned.used_bytes, pinned.reserved_bytes) == (1024, 1 << 20)
    buffer.close()
    assert bench.manager.trim_to(0, sync=True) >= 1 << 20
    assert bench.device.pinned.stats().reserved_bytes == 0


def test_trim_on_close_empties_the_pool(bench: Bench) -> None:
    manager = BufferManager(bench.stream, ledger=bench.ledger, owner="other", trim_on_close=True)
    manager.gpu(3 * bench.page, line=LineKind.TABLES).close()
    manager.close()
    manager.close()
    assert bench.manager.stats().reserved_bytes == 0
    with pytest.raises(ValueError, match="is closed"):
        manager.gpu(1, line=LineKind.TABLES)


@pytest.mark.parametrize("kind", [MemoryKind.GPU, MemoryKind.GPU_SYNC])
def test_out_of_memory_leaves_the_books_as_the_buffers_are(bench: Bench, kind: MemoryKind) -> None:
    if bench.driver.kind == "cuda":
        pytest.skip("a card that others use is not filled")
    size = 5 * bench.page
    for _ in itertools.count():
        try:
            bench.make(kind, size)
        except BufferOOM as error:
            caught = error
            break
    live = [buffer for buffer in bench.buffers if buffer.size_bytes]
    assert bench.booked(kind) == (sum(buffer.size_bytes for buffer in live), len(live))
    assert (caught.size_bytes, caught.owner) == (size, "tests")
    assert caught.used_bytes <= caught.capacity_bytes == bench.driver.mem_info()[1]
    assert caught.top_owners == (("tests", size * len(live)),)
    assert f"stream {bench.stream.handle:#x} synchronised" in str(caught)
    assert "the retry failed" in str(caught)
    if kind is MemoryKind.GPU and bench.driver.capabilities().pools:
        assert caught.reserved_bytes == bench.manager.stats().reserved_bytes
    live[0].close()
    bench.make(kind, size)  # what was given back can be had again


def test_recorded_streams_are_waited_for(bench: Bench, kind: MemoryKind) -> None:
    other = Stream.create(bench.device)
    buffer = bench.make(kind, 1 << 20)
    buffer.record_stream(other)
    buffer.record_stream(other.handle)
    assert buffer.used_on == (other.handle,)
    assert other.handle in bench.device.fences.streams
    if kind not in ON_HOST:
        bench.stream.sync()
        bench.driver.fill(buffer.address, 1, 1 << 20, stream=other.handle)
    buffer.close()
    again = bench.make(kind, 1 << 20)
    bench.manager.set_mem(again, 2)
    assert read(bench.driver, again.address, 1 << 20) == b"\x02" * (1 << 20)
    other.sync()
    other.close()


def test_exports_refuse_close_and_resize(bench: Bench, kind: MemoryKind) -> None:
    torch = pytest.importorskip("torch")
    buffer = bench.make(kind, (4, 5), "float32")
    bench.manager.set_zero(buffer)
    bench.stream.sync()
    tensor = torch.from_dlpack(buffer)
    assert (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) == (buffer.address, (4, 5), torch.float32)
    tensor += 1.0
    for change in (buffer.close, lambda: buffer.resize(1000)):
        with pytest.raises(BufferInUse, match="a tensor of 80 bytes"):
            change()
    assert float(tensor.sum()) == 20.0
    del tensor
    buffer.close()
