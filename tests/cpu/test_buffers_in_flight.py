"""Buffers while something is going on: work on other streams, captures, Ctrl-C, and nobody left to close them."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tonnage.buffers import Buffer, BufferManager, Device, Stream
from tonnage.buffers.ladder import relieve
from tonnage.buffers.scopes import scope
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver
from tonnage.errors import BufferOOM, CaptureError, DriverError, LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

MIB = 2**20
TABLES = LineKind.TABLES
KINDS = [kind for kind in MemoryKind if kind is not MemoryKind.IPC_NVLS]


class World:
    """A device on which a hazard is an error, and its ledger."""

    def __init__(self) -> None:
        self.host = HostDriver(16 * MIB, page_bytes=2**16)
        self.driver = HazardDriver(self.host)
        self.device = Device(self.driver)
        self.ledger = Ledger(0, 16 * MIB)

    def manager(self, owner: str = "tests", *, stream: Stream | None = None) -> BufferManager:
        return BufferManager(stream or Stream.create(self.device), ledger=self.ledger, owner=owner)

    @contextmanager
    def noting(self, *calls: str) -> Iterator[list[str]]:
        """The calls of the driver by these names that are made inside."""
        noted: list[str] = []
        for call in calls:
            vars(self.driver)[call] = self._noting(call, noted)
        yield noted
        for call in calls:
            del vars(self.driver)[call]

    def _noting(self, call: str, noted: list[str]) -> Callable[..., Any]:
        found = getattr(self.driver, call)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            noted.append(call)
            return found(*args, **kwargs)

        return wrapped


@pytest.fixture
def world():
    world = World()
    yield world
    world.device.fences.quiesce()
    world.device.pinned.trim()
    world.device.pool.trim(0)
    assert (world.ledger.accounted_bytes, world.driver.hazards) == (0, [])
    assert world.host.leaks() == ()


@pytest.fixture
def manager(world: World) -> BufferManager:
    return world.manager()


# other streams


@pytest.mark.parametrize("kind", [MemoryKind.GPU, MemoryKind.GPU_SYNC, MemoryKind.PINNED, MemoryKind.PINNED_POOL])
def test_memory_that_was_a_tensor_outlives_what_any_stream_does_with_it(
    world: World, manager: BufferManager, kind: MemoryKind
) -> None:
    consumer = Stream.create(world.device)
    buffer = manager.allocate(kind, 4096, line=TABLES)
    manager.stream.sync()
    assert not buffer.exports.is_alive
    world.driver.launch(consumer.bare_handle, writes=[(buffer.address, 4096)])
    buffer.close()
    after = manager.allocate(kind, 4096, line=TABLES)
    manager.set_zero(after)
    after.close()


def test_a_closed_stream_is_not_waited_for(world: World, manager: BufferManager) -> None:
    consumer = Stream.create(world.device)
    buffer = manager.gpu(4096, line=TABLES)
    buffer.record_stream(consumer)
    consumer.close()
    buffer.close()


def test_a_buffer_outlives_its_own_stream(world: World, manager: BufferManager) -> None:
    consumer = Stream.create(world.device)
    plain, used = manager.gpu(4096, line=TABLES), manager.gpu(4096, line=TABLES)
    used.record_stream(consumer)
    manager.stream.close()
    for buffer in (plain, used):
        buffer.close()


def test_a_copy_between_managers_comes_after_one_and_before_the_other(world: World, manager: BufferManager) -> None:
    other = world.manager("other")
    src, dst = manager.gpu(4096, line=TABLES), other.gpu(4096, line=TABLES)
    manager.set_mem(src, 7)
    other.copy(src=src, dst=dst)  # reads what is still being filled
    assert src.used_on == (other.stream.bare_handle,)
    src.close()  # still being read
    into = manager.gpu(4096, line=TABLES)
    other.copy(src=dst, dst=into)  # still being made
    into.close()
    dst.close()


def test_a_pinned_buffer_that_another_stream_fills_is_copied_afterwards(world: World, manager: BufferManager) -> None:
    other = world.manager("other")
    src, dst = manager.gpu(4096, line=TABLES), other.gpu(4096, line=TABLES)
    pinned = manager.pinned(4096, line=TABLES)
    manager.set_mem(src, 7)
    manager.copy(src=src, dst=pinned)
    other.copy(src=pinned, dst=dst)
    back = other.cpu(4096, line=TABLES)
    other.copy(src=dst, dst=back)
    for buffer in (back, pinned, src, dst):
        buffer.close()


def test_host_memory_that_no_stream_had_is_not_waited_for(world: World, manager: BufferManager) -> None:
    other = world.manager("other")
    dst, pinned = manager.gpu(4096, line=TABLES), other.pinned(4096, line=TABLES)
    with world.noting("event_record", "stream_wait") as noted:
        manager.copy(src=pinned, dst=dst)
    assert noted == []
    for buffer in (pinned, dst):
        buffer.close()


def test_the_host_waits_between_two_devices(world: World, manager: BufferManager) -> None:
    elsewhere = World()
    pinned, dst = elsewhere.manager().pinned(4096, line=TABLES), manager.gpu(4096, line=TABLES)
    manager.copy(src=pinned, dst=dst)
    assert pinned.used_on == ()
    pinned.close()
    dst.close()


# captures


def test_a_copy_is_refused_while_the_other_stream_is_captured(world: World, manager: BufferManager) -> None:
    other = world.manager("other")
    src, dst = manager.gpu(4096, line=TABLES), other.gpu(4096, line=TABLES)
    with (
        world.driver.capturing(manager.stream.handle) as capture,
        world.noting("event_record", "stream_wait", "copy") as noted,
    ):
        with pytest.raises(CaptureError, match="while its stream is being captured"):
            other.copy(src=src, dst=dst)
        assert (noted, src.used_on, capture.works) == ([], (), [])
        manager.copy(src=dst, dst=src)  # of the graph: who replays it sees to the order
        assert (noted, len(capture.works)) == (["copy"], 1)
    for buffer in (src, dst):
        buffer.close()


@pytest.mark.parametrize("captured", ["own", "other"])
@pytest.mark.parametrize("how", ["recorded", "exported"])
def test_a_free_into_a_capture_is_refused_with_nothing_asked(
    world: World, manager: BufferManager, captured: str, how: str
) -> None:
    other = Stream.create(world.device)
    buffer = manager.gpu(4096, line=TABLES)
    if how == "recorded":
        buffer.record_stream(other)
    else:
        assert not buffer.exports.is_alive
    stream = manager.stream if captured == "own" else other
    with world.driver.capturing(stream.handle), world.noting("event_record", "stream_wait", "pool_free") as noted:
        with pytest.raises(CaptureError, match=f"stream {stream.handle:#x} is being captured"):
            buffer.close()
        assert noted == []
    assert buffer.size_bytes == 4096
    buffer.close()


@pytest.mark.parametrize("announced", [False, True])
def test_forgotten_buffers_wait_until_a_capture_is_over(world: World, manager: BufferManager, announced: bool) -> None:
    kept = manager.gpu(64, line=TABLES)
    forgotten = [manager.allocate(kind, 4096, line=TABLES) for kind in KINDS]
    forgotten.clear()
    gc.collect()
    assert len(world.device.orphans) == len(KINDS)
    capture: Any = world.driver.capturing(Stream.create(world.device).handle)
    with world.device.graphs.capture("step") if announced else capture:
        for _ in range(2):
            if announced:
                with pytest.raises(CaptureError):
                    manager.gpu(64, line=TABLES)
            else:
                manager.gpu(64, line=TABLES).close()
        manager.stats()
        assert len(world.device.orphans) == len(KINDS)
    kept.close()
    manager.gpu(64, line=TABLES).close()
    assert (len(world.device.orphans), world.ledger.accounted_bytes) == (0, 0)


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_announced_capture_is_heeded_by_streams_that_nobody_knows(
    world: World, manager: BufferManager, is_warm: bool
) -> None:
    if is_warm:
        manager.gpu(64, line=TABLES).close()
    with world.device.graphs.capture("step"), pytest.raises(CaptureError, match="graph 'step' is being captured"):
        manager.gpu(64, line=TABLES)
    manager.gpu(64, line=TABLES).close()


@pytest.mark.parametrize("is_warm", [False, True])
def test_stream_0_counts_as_captured_with_those_that_it_waits_for(world: World, is_warm: bool) -> None:
    """As ``CudaDriver`` says of it, where the driver answers that the capture is implicit."""
    manager = world.manager(stream=Stream(world.device))
    if is_warm:
        manager.gpu(64, line=TABLES).close()
    with world.driver.capturing(0), world.noting("pool_alloc") as noted:
        with pytest.raises(CaptureError, match="stream 0x0 is being captured"):
            manager.gpu(64, line=TABLES)
        with pytest.raises(CaptureError, match="ask for graph memory on that one"):
            manager.gpu(64, line=TABLES, graph_memory=True)
        assert noted == []
    manager.gpu(64, line=TABLES).close()


# nobody left to close them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_buffer_that_outlives_its_manager_is_closed_by_another(
    world: World, kind: MemoryKind, is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    manager, other = world.manager(), world.manager("other")
    other.gpu(64, line=TABLES).close()
    buffer = manager.allocate(kind, 4096, line=TABLES)
    if is_closed:
        manager.close()
    del manager, buffer
    gc.collect()
    with caplog.at_level(logging.WARNING):
        other.gpu(64, line=TABLES).close()
    assert "was never closed" in caplog.text
    assert sum(entry.num_live for entry in world.ledger.snapshot().entries) == 0


def test_whoever_climbs_the_ladder_closes_them(world: World, manager: BufferManager) -> None:
    buffer = manager.gpu_sync(4096, line=TABLES)
    manager.close()
    del buffer
    gc.collect()
    assert next(relieve(world.device, 1)) == "1 forgotten buffers closed"
    assert world.host.used_bytes == 0


# Ctrl-C, raised where Python would: as a call of the driver returns


def interrupt_after(driver: Any, call: str) -> None:
    found = getattr(driver, call)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found(*args, **kwargs)
        del vars(driver)[call]
        raise KeyboardInterrupt

    vars(driver)[call] = interrupted


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (MemoryKind.GPU, "pool_free"),
        (MemoryKind.GPU_SYNC, "mem_free"),
        (MemoryKind.PINNED, "host_free"),
        (MemoryKind.MANAGED, "mem_free"),
    ],
)
def test_a_free_that_is_cut_short_is_finished(world: World, kind: MemoryKind, call: str) -> None:
    manager = world.manager()
    manager.gpu(64, line=TABLES).close()
    buffer = manager.allocate(kind, 4096, line=TABLES)
    interrupt_after(world.driver, call)
    with pytest.raises(KeyboardInterrupt):
        buffer.close()
    assert sum(entry.num_live for entry in world.ledger.snapshot().entries) == 0
    with world.noting(call) as noted:
        buffer.close()
    assert (noted, buffer.address, buffer.capacity_bytes) == ([], 0, 0)


def test_a_free_that_is_cut_before_it_began_and_then_refused_can_be_repeated(world: World) -> None:
    manager = world.manager()
    buffer, errors = manager.gpu_sync(4096, line=TABLES), [KeyboardInterrupt(), DriverError("mem_free", "BUSY")]

    def refuse(_: int) -> None:
        raise errors.pop(0)

    vars(world.driver)["mem_free"] = refuse
    with pytest.raises(KeyboardInterrupt):
        buffer.close()
    del vars(world.driver)["mem_free"]
    assert (buffer.size_bytes, world.ledger.accounted_bytes) == (4096, 4096)
    buffer.close()


def signal_after(driver: Any, call: str) -> None:
    """A real signal, sent from inside the call."""
    found = getattr(driver, call)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        made = found(*args, **kwargs)
        del vars(driver)[call]
        os.kill(os.getpid(), signal.SIGINT)
        return made

    vars(driver)[call] = signalled


@pytest.mark.parametrize(
    ("kind", "alloc", "free"),
    [
        (MemoryKind.GPU_SYNC, "mem_alloc", "mem_free"),
        (MemoryKind.PINNED, "host_alloc", "host_free"),
        (MemoryKind.MANAGED, "managed_alloc", "mem_free"),
    ],
)
def test_a_signal_waits_until_the_books_are_right(world: World, kind: MemoryKind, alloc: str, free: str) -> None:
    manager = world.manager()

    def num_live() -> int:
        return sum(entry.num_live for entry in world.ledger.snapshot().entries)

    kept = manager.allocate(kind, 64, line=TABLES)
    signal_after(world.driver, alloc)
    with pytest.raises(KeyboardInterrupt):
        manager.allocate(kind, 4096, line=TABLES)
    gc.collect()
    assert (num_live(), len(world.device.orphans)) == (2, 1)
    manager.stats()
    assert num_live() == 1
    signal_after(world.driver, free)
    with pytest.raises(KeyboardInterrupt):
        kept.close()
    assert (kept.base, num_live()) == (0, 0)


# what cannot be meant


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size_bytes", [2**57, 2**62, 2**63, 2**64, 2**70])
def test_more_than_there_can_be_is_the_same_error(
    world: World, manager: BufferManager, kind: MemoryKind, size_bytes: int
) -> None:
    manager.gpu(64, line=TABLES).close()
    ask: Callable[..., Buffer] = getattr(manager, kind.value)
    with pytest.raises(BufferOOM, match=f"asked for {size_bytes:,} bytes") as caught:
        ask(size_bytes, line=TABLES)
    assert (caught.value.owner, caught.value.size_bytes) == ("tests", size_bytes)
    with scope("tests"), pytest.raises(BufferOOM):
        ask(size_bytes, line=TABLES)
    empty = manager.empty(kind, line=TABLES)
    with pytest.raises(BufferOOM):
        empty.resize(size_bytes)


@pytest.mark.parametrize("size", [2.5, "12", None, (2, 2.5), object()])
def test_sizes_are_integers(manager: BufferManager, size: Any) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="sizes are integers"):
            manager.gpu(size, line=TABLES)
        manager.gpu(64, line=TABLES).close()
    with manager.cpu(64, line=TABLES) as buffer, pytest.raises(ValueError, match="sizes are integers"):
        buffer.resize(size)


def test_integers_of_numpy_are_sizes(manager: BufferManager) -> None:
    numpy = pytest.importorskip("numpy")
    for size, shape in ((numpy.int32(6), (6,)), (numpy.array([2, 3]), (2, 3)), ((numpy.int8(100), 100), (100, 100))):
        with manager.gpu(size, line=TABLES) as buffer:
            assert (buffer.shape, type(buffer.size_bytes)) == (shape, int)


def test_kinds_and_lines_may_be_named(manager: BufferManager) -> None:
    with manager.allocate("gpu", 64, line="tables") as buffer:  # type: ignore[arg-type]
        assert (buffer.kind, buffer.path, buffer.account.line) == (MemoryKind.GPU, "pool", TABLES)
        assert buffer.kind is MemoryKind.GPU
        assert buffer.account.line is TABLES
    with pytest.raises(ValueError, match=r"no kind 'vram': one of gpu, "):
        manager.allocate("vram", 64, line=TABLES)  # type: ignore[arg-type]
    for line in (None, 5, "none such"):
        with pytest.raises(ValueError, match=r"no line .*: one of .*tables"):
            manager.gpu(64, line=line)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a tag is a string"):
        manager.gpu(64, line=TABLES, tag=5)  # type: ignore[arg-type]


def test_with_closes(world: World) -> None:
    with world.manager() as manager, manager.gpu(64, line=TABLES) as buffer:
        assert buffer.address
    assert not buffer.address
    with pytest.raises(ValueError, match="is closed"):
        manager.gpu(64, line=TABLES)


def test_ranges_that_cannot_be_are_refused_before_they_are_touched(manager: BufferManager) -> None:
    host, gpu = MemoryKind.PINNED, MemoryKind.GPU
    with manager.pinned(64, line=TABLES) as buffer:
        at = buffer.address
        for kind in (host, gpu):
            for address, size in ((at, -1), (0, 8), (-8, 8), (2**64 - 4, 8), (at, 2**64)):
                with pytest.raises(ValueError, match="bytes at"):
                    manager.set_bytes(address, 0, size, kind=kind)
                for src, dst in ((address, at), (at, address)):
                    with pytest.raises(ValueError, match="bytes at"):
                        manager.copy_bytes(src=src, dst=dst, size_bytes=size, src_kind=kind, dst_kind=kind)
        manager.set_bytes(0, 0, 0, kind=host)
        manager.copy_bytes(src=0, dst=0, size_bytes=0, src_kind=host, dst_kind=host)


def test_fractions_of_bytes_are_not_booked(world: World) -> None:
    account = world.ledger.open(owner="tests", line=TABLES, memory=MemoryKind.GPU)
    account.add(4, 8)
    for call in (account.add, account.sub):
        for wrong in ((1.5, 2), (1, 2.0), (-1, 2), (1, -2)):
            with pytest.raises(LedgerError):
                call(*wrong)  # type: ignore[arg-type]
    assert (account.requested_bytes, account.physical_bytes, account.num_live) == (4, 8, 1)
    account.sub(4, 8)
