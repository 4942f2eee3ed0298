"""A small device with virtual memory, its ledger, and a ready way to allocate: shared by the tests of releases."""

from __future__ import annotations

import ctypes
from typing import Any

from tonnage.buffers import Device, Stream
from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.chunk import State
from tonnage.buffers.restore import Restore
from tonnage.buffers.scopes import ScopeConfig
from tonnage.buffers.virtual import VirtualMemory
from tonnage.device.fault import ALLOCATING, RELEASING, FaultDriver
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

PAGE = 2**16
CAPACITY = 64 * PAGE
#: Every call that a release or a materialise makes and that may fail, one way or the other.
EVERYTHING = ALLOCATING | RELEASING | {"copy", "fill", "event_record", "stream_sync", "stream_wait"}


class Bench:
    """Allocations under tags over a fault driver that fails nothing until it is armed."""

    def __init__(self) -> None:
        self.host = HostDriver(CAPACITY, page_bytes=PAGE)
        self.fault = FaultDriver(self.host)
        self.device = Device(self.fault)
        self.stream = Stream(self.device)
        self.memory = VirtualMemory(self.device)
        self.ranges = self.device.graphs
        self.ledger = Ledger(0, CAPACITY)
        self.made: list[VirtualAllocation] = []

    def allocate(
        self, num_pages: int, tag: str, restore: Restore = Restore.NONE, *, owner: str = "", **arguments: Any
    ) -> VirtualAllocation:
        """All but ten bytes of so many pages, filled with a pattern of its own."""
        owner = owner or tag
        account = self.ledger.open(owner=owner, line=LineKind.KV, memory=MemoryKind.GPU, tag=tag)
        config = ScopeConfig(tag=tag, restore=restore, stream=arguments.pop("restore_stream", None))
        made = self.memory.allocate(
            num_pages * PAGE - 10, config=config, account=account, owner=owner, stream=self.stream, **arguments
        )
        self.made.append(made)
        write(made)
        return made

    def books(self) -> dict[str, tuple[int, int, int]]:
        """By owner: requested, physical, live."""
        entries = self.ledger.snapshot().entries
        return {one.owner: (one.requested_bytes, one.physical_bytes, one.num_live) for one in entries}

    def states(self) -> list[State]:
        return [one.state for one in self.made]

    def require_balance(self) -> None:
        """The ledger and the device agree to the byte."""
        assert self.ledger.accounted_bytes == self.host.used_bytes

    def close(self) -> None:
        """Free everything, and show that nothing is left anywhere."""
        self.fault.arm(None)
        for one in self.made:
            one.free()
        self.device.fences.quiesce()
        self.memory.sweep()
        assert self.memory.leftovers() == ()
        assert self.memory.backings.held_bytes == 0
        assert self.ledger.accounted_bytes == 0
        assert self.device.fences.num_waiting == 0
        assert len(self.host._events) == 0
        assert self.host.close() == ()


def pattern(made: VirtualAllocation) -> bytes:
    seed = made.address // PAGE % 251
    return bytes((seed + number) % 256 for number in range(64))


def write(made: VirtualAllocation) -> None:
    """The pattern at both ends."""
    for at in (0, made.size_bytes - 64):
        ctypes.memmove(made.address + at, pattern(made), 64)


def ends(made: VirtualAllocation) -> tuple[bytes, bytes]:
    return ctypes.string_at(made.address, 64), ctypes.string_at(made.address + made.size_bytes - 64, 64)


def is_intact(made: VirtualAllocation) -> bool:
    return ends(made) == (pattern(made), pattern(made))
