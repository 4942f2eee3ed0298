"""The device an engine is built on: driver, stream, ledger, and what must be given back in the end."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable

from tonnage.buffers import Stream, VirtualArena
from tonnage.device.host import HostDriver
from tonnage.device.machine import host_memory
from tonnage.device.process import fence, process_memory, settle_heap, trim_heap, unfence
from tonnage.errors import BufferInUse, DriverUnsupported, InvalidSetting
from tonnage.hardware import Card, host_card
from tonnage.ledger import Account, Ledger
from tonnage.terms import Chip, How, LineKind, MemoryKind, Quantity, Reading, Source
from tonnage.units import MiB, round_up

#: Heap blocks from here on go back to the system when freed; below, page faults would cost more than they save.
HEAP_THRESHOLD_BYTES = 2 * MiB
#: Repeated starts differ by some pages; rounding up makes equal starts give equal plans.
ROUNDING_BYTES = MiB


class Site:
    """The host device, opened. What the process holds at this moment, after its imports, is the host's overhead."""

    def __init__(self, memory_bytes: int | None, *, index: int, make_driver: Callable[[int], HostDriver]) -> None:
        capacity = memory_bytes or _available_memory()
        self.driver = make_driver(capacity)
        self.stream = Stream(self.driver)
        self.ledger = Ledger(index, capacity)
        self._closing: list[Callable[[], None]] = []
        # Earlier work may have left free heap: give it back first, or it would hide what we take.
        settle_heap(HEAP_THRESHOLD_BYTES)
        trim_heap()
        self.driver.set_baseline()

    @property
    def card(self) -> Card:
        return host_card(self.driver.capacity_bytes, page_bytes=self.driver.capabilities().page_bytes)

    @property
    def chip(self) -> Chip:
        return self.card.chip

    def arena(self, owner: str, line: LineKind, *, reserve_bytes: int) -> VirtualArena:
        arena = VirtualArena(self.stream, ledger=self.ledger, owner=owner, line=line, reserve_bytes=reserve_bytes)
        self._closing.append(arena.close)
        return arena

    def sampled(self, owner: str, line: LineKind) -> Account:
        return self.ledger.open(owner=owner, line=line, memory=MemoryKind.CPU, how=How.SAMPLED)

    def remainder(self, owner: str, line: LineKind) -> Quantity:
        """What the process holds and no account explains becomes ``owner``'s, measured here and rounded up to a MiB."""
        trim_heap()
        own = self.driver.own_bytes()
        found = 0 if own is None else max(0, own - self.ledger.accounted_bytes)
        self.sampled(owner, line).sampled(found)
        return Quantity.exact(
            round_up(found, ROUNDING_BYTES), Source.MEASURED, "held by the process and in no other account"
        )

    def fence(self, cap_bytes: int) -> None:
        """From here on the heap cannot grow past ``cap_bytes`` of this device; lifted by ``close``.

        Where the system has no such limit the cap is watched, not enforced.
        """
        own = self.driver.own_bytes()
        if own is None:
            return
        try:
            before = fence(process_memory().data_bytes + max(0, cap_bytes - own))
        except DriverUnsupported:
            return
        self._closing.append(lambda: unfence(before))

    def read(self, phase: str) -> Reading:
        """One look; the peak is the process's own since the last ``reset_peak``, less what it held at the baseline."""
        free, total = self.driver.mem_info()
        own, process = self.driver.own_bytes(), process_memory()
        peak = None
        if own is not None and process.own_bytes is not None and process.peak_own_bytes is not None:
            peak = max(own, process.peak_own_bytes - (process.own_bytes - own))
        return Reading(
            phase=phase,
            at_ns=time.monotonic_ns(),
            total_bytes=total,
            free_bytes=free,
            own_bytes=own,
            own_source="anonymous + shared memory since the imports",
            peak_own_bytes=peak,
            arena_bytes=self.ledger.accounted_bytes,
        )

    def close(self) -> None:
        """Give everything back, newest first, then the device. Closing again does nothing.

        Memory that somebody still looks at is leaked, with a warning, rather than pulled away from under them.
        """
        gc.collect()  # modules and their hooks form cycles
        in_use = []
        while self._closing:
            try:
                self._closing.pop()()
            except BufferInUse as error:
                in_use.append(str(error))
        if not in_use:
            self.driver.close()
            return
        warnings.warn(f"memory stays mapped: {'; '.join(in_use)}", ResourceWarning, stacklevel=3)


def _available_memory() -> int:
    """Host memory that can be taken now, in bytes. Raises ``InvalidSetting`` where the system does not tell."""
    found = host_memory().available_bytes
    if found is None:
        raise InvalidSetting("memory", None, "not given, and this system does not tell", remedy="give --memory 4GiB")
    return found
