"""Single buffers: kinds, books, copies, and what happens when there is no memory."""

from __future__ import annotations

import ctypes

import pytest

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.device.host import HostDriver
from tonnage.errors import BufferOOM, DriverUnsupported, LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

MIB = 2**20
KINDS = (MemoryKind.GPU_SYNC, MemoryKind.CPU)


@pytest.fixture
def driver():
    driver = HostDriver(16 * MIB)
    yield driver
    assert driver.close() == ()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(0, 16 * MIB)


@pytest.fixture
def manager(driver: HostDriver, ledger: Ledger) -> BufferManager:
    return BufferManager(Stream(Device(driver)), ledger=ledger, owner="tests")


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_is_real_memory_and_is_booked_until_closed(
    manager: BufferManager, ledger: Ledger, kind: MemoryKind
) -> None:
    buffer = manager.allocate(kind, 5000, line=LineKind.TABLES, tag="t")
    manager.set_zero(buffer)
    assert ctypes.string_at(buffer.address, 5000) == bytes(5000)
    entry = ledger.snapshot().entries[0]
    assert (entry.owner, entry.line, entry.tag, entry.memory) == ("tests", LineKind.TABLES, "t", kind)
    assert (entry.requested_bytes, entry.physical_bytes, entry.num_live) == (5000, 5000, 1)
    buffer.close()
    buffer.close()
    assert (buffer.address, buffer.size_bytes) == (0, 0)
    assert (ledger.accounted_bytes, ledger.snapshot().entries[0].num_live) == (0, 0)


def test_it_shows_kind_size_and_stream(manager: BufferManager) -> None:
    buffer = manager.gpu_sync(1234, line=LineKind.TABLES)
    assert repr(buffer).startswith("<Buffer gpu_sync 1,234 bytes at 0x")
    assert "Stream 0 of host-0" in repr(buffer)
    assert "'tests'" in repr(manager)
    buffer.close()


def test_copies_between_kinds(manager: BufferManager) -> None:
    host, device = manager.cpu(100, line=LineKind.TABLES), manager.gpu_sync(200, line=LineKind.TABLES)
    ctypes.memset(host.address, 65, 100)
    manager.copy(device, host)
    assert ctypes.string_at(device.address, 100) == b"A" * 100
    with pytest.raises(ValueError, match="does not fit"):
        manager.copy(host, device)
    host.close()
    device.close()


def test_an_empty_buffer_takes_nothing(manager: BufferManager, ledger: Ledger) -> None:
    buffer = manager.gpu_sync(0, line=LineKind.TABLES)
    manager.set_zero(buffer)
    manager.copy(buffer, buffer)
    assert (buffer.address, ledger.accounted_bytes) == (0, 0)
    buffer.close()


def test_no_memory_says_size_used_capacity_and_owner(manager: BufferManager, ledger: Ledger) -> None:
    kept = manager.gpu_sync(4 * MIB, line=LineKind.TABLES)
    with pytest.raises(BufferOOM) as caught:
        manager.gpu_sync(13 * MIB, line=LineKind.TABLES)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.size_bytes, error.used_bytes, error.capacity_bytes) == (13 * MIB, 4 * MIB, 16 * MIB)
    assert error.owner == "tests"
    assert ledger.accounted_bytes == 4 * MIB
    kept.close()


def test_no_host_memory_is_the_same_error(manager: BufferManager, ledger: Ledger) -> None:
    with pytest.raises(BufferOOM, match="host memory"):
        manager.cpu(2**62, line=LineKind.TABLES)
    assert ledger.accounted_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_strict_seal_refuses_and_gives_the_memory_back(
    manager: BufferManager, ledger: Ledger, driver: HostDriver, kind: MemoryKind
) -> None:
    ledger.seal(strict=True)
    with pytest.raises(LedgerError, match="'tests'"):
        manager.allocate(kind, MIB, line=LineKind.TABLES)
    assert (driver.used_bytes, ledger.accounted_bytes) == (0, 0)


def test_kinds_without_a_room_are_refused(manager: BufferManager) -> None:
    with pytest.raises(DriverUnsupported, match="pinned"):
        manager.allocate(MemoryKind.PINNED, 1, line=LineKind.TABLES)
    with pytest.raises(ValueError):
        manager.gpu_sync(-1, line=LineKind.TABLES)


def test_streams_are_made_and_destroyed(driver: HostDriver) -> None:
    stream = Stream.create(driver)
    assert stream.handle != 0
    stream.sync()
    stream.close()
