"""Virtual memory under the watch of a driver that knows what is in flight: no edit before the last use is done."""

from __future__ import annotations

import pytest

from tonnage.buffers import Device, Stream
from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.backing import Retain
from tonnage.buffers.restore import Restore
from tonnage.buffers.scopes import ScopeConfig
from tonnage.buffers.virtual import VirtualMemory
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver

PAGE = 2**16
SIZE = 3 * PAGE


class Watched:
    def __init__(self) -> None:
        self.host = HostDriver(64 * PAGE, page_bytes=PAGE)
        self.driver = HazardDriver(self.host, strict=False, reservation_hazard=True)
        self.device = Device(self.driver)
        self.memory = VirtualMemory(self.device)
        self.copies, self.consumer = Stream.create(self.device), Stream.create(self.device)

    def allocate(self, restore: Restore) -> VirtualAllocation:
        config = ScopeConfig(tag="kv", restore=restore)
        return self.memory.allocate(SIZE, config=config, account=None, owner="kv", stream=self.copies)

    def compute(self, made: VirtualAllocation) -> None:
        """A kernel on the consumer's stream reads and writes all of it."""
        span = (made.address, SIZE)
        self.driver.launch(self.consumer.handle, reads=[span], writes=[span], what="a step")


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.device.fences.quiesce()
    assert watched.host.close() == ()


@pytest.mark.parametrize("restore", Restore)
@pytest.mark.parametrize("retain", [Retain.always(), Retain.never()])
def test_a_whole_life_beside_running_work_is_without_hazard(watched: Watched, restore: Restore, retain: Retain) -> None:
    watched.memory.retain = retain
    made = watched.allocate(restore)
    watched.compute(made)
    for _ in range(3):
        watched.memory.release("kv")
        wake = watched.memory.materialize("kv")
        wake.wait(watched.consumer.handle)
        watched.compute(made)
    made.free()
    watched.device.fences.quiesce()
    assert watched.driver.hazards == []
    assert watched.memory.leftovers() == ()


def test_a_consumer_that_does_not_wait_is_caught(watched: Watched) -> None:
    """The control: the watch sees what the event is for."""
    made = watched.allocate(Restore.PINNED)
    watched.memory.release("kv")
    watched.memory.materialize("kv")
    watched.compute(made)
    assert len(watched.driver.hazards) > 0
    made.free(sync=True)


@pytest.mark.parametrize("sync", [False, True])
def test_freed_memory_is_not_unmapped_under_a_running_kernel(
    watched: Watched, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched.allocate(Restore.NONE)
    watched.compute(made)
    if sync:
        made.free(sync=True)
    else:
        monkeypatch.setattr(watched.host, "event_done", lambda _: False)
        made.free()
        other = watched.allocate(Restore.NONE)  # reaps what may go, and nothing may
        assert watched.host.used_bytes == 2 * SIZE
        monkeypatch.undo()
        watched.device.fences.reap()
        assert watched.host.used_bytes == SIZE
        other.free(sync=True)
    assert (watched.host.used_bytes, watched.driver.hazards) == (0, [])


def test_memory_freed_by_hand_under_a_running_kernel_is_caught(watched: Watched) -> None:
    """The control: the watch sees an unmap that waits for nothing."""
    made = watched.allocate(Restore.NONE)
    watched.compute(made)
    watched.driver.unmap(made.address, SIZE)
    assert "IN_USE" in watched.driver.hazards[0]
    made._entry.run.pieces[0].mapped = False  # type: ignore[union-attr]
    made.free(sync=True)


def test_a_wake_that_is_rolled_back_waits_for_its_own_copies(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = watched.allocate(Restore.PINNED), watched.allocate(Restore.PINNED)
    watched.compute(first)
    watched.memory.release("kv")
    real, calls = watched.host.copy, []

    def copy(*args: int, stream: int) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("the second copy")
        real(*args, stream=stream)

    monkeypatch.setattr(watched.host, "copy", copy)
    with pytest.raises(MemoryError, match="second copy"):
        watched.memory.materialize("kv")
    monkeypatch.undo()
    assert (watched.host.used_bytes, watched.driver.hazards) == (0, [])
    watched.memory.materialize("kv").wait(watched.consumer.handle)
    watched.compute(second)
    assert watched.driver.hazards == []
    for made in (first, second):
        made.free(sync=True)
