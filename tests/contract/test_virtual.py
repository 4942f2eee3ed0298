"""Virtual memory means the same on every device: the same calls, the same states, the same errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from devices import DEVICES, read, write

from tonnage.buffers import Device, Stream
from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.chunk import State
from tonnage.buffers.restore import Restore
from tonnage.buffers.scopes import current, preserve_contents, scope
from tonnage.errors import BufferOOM, CannotMaterialize, DriverUnsupported, NotMaterialized
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

#: Devices that have no virtual memory: they refuse, and that is all there is to test.
WITHOUT = {"host without virtual memory", "host with plain memory only"}
ASLEEP, AWAKE = State.RELEASED, State.MATERIALIZED


class Setup:
    """A device, its virtual memory and a ledger; allocations go into the scope that is open."""

    def __init__(self, driver) -> None:
        self.driver = driver
        self.device = Device(driver)
        self.stream = Stream.create(self.device)
        self.memory = self.device.virtual
        self.page = driver.capabilities().page_bytes
        self.ledger = Ledger(0, driver.mem_info()[1])
        self.made: list[VirtualAllocation] = []

    def allocate(self, num_pages: int) -> VirtualAllocation:
        """All but 10 bytes of so many pages."""
        config = current()
        assert config is not None
        account = self.ledger.open(owner=config.tag, line=LineKind.KV, memory=MemoryKind.GPU, tag=config.tag)
        made = self.memory.allocate(
            num_pages * self.page - 10, config=config, account=account, owner=config.tag, stream=self.stream
        )
        self.made.append(made)
        return made

    def close(self) -> None:
        for one in self.made:
            one.free(sync=True)
        assert (self.memory.leftovers(), self.ledger.accounted_bytes) == ((), 0)
        assert self.memory.backings.held_bytes == 0
        self.stream.close()


@contextmanager
def opened(driver) -> Iterator[Setup]:
    setup = Setup(driver)
    yield setup
    setup.close()
    if driver.kind == "host":
        assert driver.close() == ()


@pytest.fixture(params=DEVICES)
def any_device(request: pytest.FixtureRequest):
    with opened(request.param()) as setup:
        yield setup


@pytest.fixture(params=[one for one in DEVICES if one.id not in WITHOUT])
def device(request: pytest.FixtureRequest):
    with opened(request.param()) as setup:
        assert setup.driver.capabilities().vmm
        yield setup


def bytes_of(number: int, size: int) -> bytes:
    return bytes((number * 37 + at) % 256 for at in range(256)) * (size // 256 + 1)


def fill(device: Setup, made: VirtualAllocation, number: int = 1) -> bytes:
    data = bytes_of(number, made.size_bytes)[: made.size_bytes]
    write(device.driver, made.address, data)
    return data


def test_a_device_without_it_refuses(any_device: Setup) -> None:
    if any_device.driver.capabilities().vmm:
        with scope("kv"):
            assert any_device.allocate(1).state is AWAKE
        return
    assert any_device.driver.capabilities().reasons["vmm"]
    for call in (
        lambda: any_device.allocate(1),
        lambda: any_device.memory.release("kv"),
        lambda: any_device.memory.materialize("kv"),
    ):
        with scope("kv"), pytest.raises(DriverUnsupported):
            call()


@pytest.mark.parametrize("restore", Restore)
def test_three_cycles_at_one_address(device: Setup, restore: Restore) -> None:
    with scope("kv", restore=restore):
        made = device.allocate(3)
    address, data = made.address, fill(device, made)
    for _ in range(3):
        before = device.driver.mem_info()[0]
        done = device.memory.release("kv")
        assert (done.num_chunks, done.freed_bytes) == (1, 3 * device.page)
        assert device.driver.mem_info()[0] - before >= (3 * device.page if device.driver.kind == "host" else 0)
        assert (made.state, device.ledger.accounted_bytes, device.memory.leftovers()) == (ASLEEP, 0, ())
        with pytest.raises(NotMaterialized):
            made.require_materialized()
        assert not device.memory.release("kv")
        wake = device.memory.materialize("kv")
        wake.wait(0)
        wake.sync()
        assert (wake.num_chunks, wake.num_bytes, made.address) == (1, 3 * device.page, address)
        assert not device.memory.materialize("kv")
        if restore is Restore.MEMSET:
            assert read(device.driver, made.address, made.size_bytes) == bytes(made.size_bytes)
        elif not restore.discards:
            assert read(device.driver, made.address, made.size_bytes) == data
        assert device.ledger.accounted_bytes == 3 * device.page


def test_small_tables_keep_their_bytes_inside_a_scope_that_discards(device: Setup) -> None:
    with scope("kv"):
        pool = device.allocate(2)
        with preserve_contents():
            table = device.allocate(1)
    fill(device, pool)
    data = fill(device, table, 2)
    assert device.memory.release("kv").num_chunks == 2
    device.memory.materialize("kv").sync()
    assert read(device.driver, table.address, table.size_bytes) == data


def test_tags_apart_and_together(device: Setup) -> None:
    with scope("a", restore=Restore.PINNED):
        first = device.allocate(2)
    with scope("b", restore=Restore.CPU):
        second = device.allocate(1)
    data = fill(device, first, 1), fill(device, second, 2)
    device.memory.release("a")
    assert (first.state, second.state) == (ASLEEP, AWAKE)
    assert device.memory.release("a", "b").num_chunks == 1
    assert device.memory.materialize("b").num_chunks == 1
    assert (first.state, second.state) == (ASLEEP, AWAKE)
    device.memory.materialize("a", "b").sync()
    for made, expected in zip((first, second), data, strict=True):
        assert read(device.driver, made.address, made.size_bytes) == expected


def test_zeros_where_they_are_declared(device: Setup) -> None:
    with scope("kv", restore=Restore.PINNED):
        made = device.allocate(1)
    data = fill(device, made)
    made.keep_zero(100, 50)
    write(device.driver, made.address + 90, b"\x05" * 70)
    device.memory.release("kv")
    device.memory.materialize("kv").sync()
    assert read(device.driver, made.address, 200) == data[:90] + b"\x05" * 10 + bytes(50) + b"\x05" * 10 + data[160:200]


def test_too_much_is_refused_and_nothing_is_left(device: Setup) -> None:
    _, total = device.driver.mem_info()
    with scope("kv"), pytest.raises(BufferOOM):
        device.allocate(total // device.page + 1)
    assert device.memory.leftovers() == ()


def test_a_wake_without_enough_memory_is_refused_and_repeated(device: Setup) -> None:
    with scope("kv", restore=Restore.CPU):
        made = device.allocate(2)
    data = fill(device, made)
    device.memory.release("kv")
    device.memory.margin_bytes = device.driver.mem_info()[1]  # more than is ever free
    for _ in range(2):
        with pytest.raises(CannotMaterialize, match="nothing was lost"):
            device.memory.materialize("kv")
        assert (made.state, device.ledger.accounted_bytes) == (ASLEEP, 0)
    device.memory.margin_bytes = 0
    device.memory.materialize("kv").sync()
    assert read(device.driver, made.address, made.size_bytes) == data


def test_what_sleeps_is_freed_at_once(device: Setup) -> None:
    with scope("kv", restore=Restore.PINNED):
        made = device.allocate(2)
    device.memory.release("kv")
    made.free()
    made.free()
    assert not device.memory.materialize("kv")
    assert device.memory.backings.held_bytes == 0


def test_addresses_that_the_caller_keeps(device: Setup) -> None:
    page = device.memory.granule_bytes
    address = device.driver.va_reserve(4 * page, align=page)
    with scope("comm", restore=Restore.CPU) as config:
        made = device.memory.map_at(
            address + page, 2 * page, config=config, account=None, owner="comm", stream=device.stream
        )
    data = fill(device, made)
    device.memory.release("comm")
    device.memory.materialize("comm").sync()
    assert read(device.driver, made.address, made.size_bytes) == data
    device.memory.unmap(made.address)
    device.driver.va_free(address, 4 * page)


def test_twenty_cycles_leave_the_device_as_it_was(device: Setup) -> None:
    for restore in Restore:
        with scope("kv", restore=restore), suppress(DriverUnsupported):
            device.allocate(1)
    device.memory.release("kv")
    free = device.driver.mem_info()[0]
    for _ in range(20):
        device.memory.materialize("kv")
        device.memory.release("kv")
    if device.driver.kind == "host":  # a card is shared: tests/gpu looks at this process's own figure there
        assert device.driver.mem_info()[0] == free
    assert device.memory.leftovers() == ()
