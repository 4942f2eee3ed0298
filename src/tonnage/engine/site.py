"""The device an engine is built on: driver, stream, ledger, and what must be given back in the end."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace

from tonnage.buffers import Device, Stream, VaArena
from tonnage.device.fence import is_fenced, lift_fence, raise_fence
from tonnage.device.host import HostDriver
from tonnage.device.machine import host_memory
from tonnage.device.process import process_memory, settle_heap, trim_heap
from tonnage.device.reading import take_reading
from tonnage.errors import (
    BufferInUse,
    DoesNotFit,
    DriverError,
    DriverUnsupported,
    InvalidSetting,
    RangeReferenced,
    UserError,
)
from tonnage.hardware import Card, host_card
from tonnage.ledger import Account, Ledger
from tonnage.resources.host_pool import HostPool
from tonnage.terms import Chip, How, LineKind, MemoryKind, Quantity, Reading, Source
from tonnage.units import MiB, format_bytes, round_up

#: Heap blocks from here on go back to the system when freed; below, page faults would cost more than they save.
HEAP_THRESHOLD_BYTES = 2 * MiB
#: Repeated starts differ by some pages; rounding up makes equal starts give equal plans.
ROUNDING_BYTES = MiB


class Site:
    """The host device, opened. What the process holds at this moment, after its imports, is the host's overhead.

    ``host_kv_bytes`` of slabs of ``slab_bytes`` are taken beside the device, and before it counts what is its own.
    """

    def __init__(
        self,
        memory_bytes: int | None,
        *,
        index: int,
        make_driver: Callable[[int], HostDriver],
        host_kv_bytes: int = 0,
        slab_bytes: int = 1,
    ) -> None:
        if is_fenced():
            raise UserError(
                "Another engine in this process holds a hard cap on all of its memory, and this one would have to live "
                "inside it",
                remedy="close that one first, or start both with fence=False",
            )
        capacity = _checked_capacity(memory_bytes)
        self.driver = make_driver(capacity)
        self.stream = Stream(Device(self.driver))
        self.ledger = Ledger(index, capacity)
        self._closing: list[Callable[[], None]] = []
        self.host_pool = self._host_pool(host_kv_bytes, slab_bytes) if host_kv_bytes else None
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

    def _host_pool(self, host_kv_bytes: int, slab_bytes: int) -> HostPool:
        """Raises ``DoesNotFit`` where the machine has no room for it beside the device."""
        try:
            pool = HostPool(
                self.driver,
                asked_bytes=host_kv_bytes,
                slab_bytes=slab_bytes,
                also_needed_bytes=self.driver.capacity_bytes,
            )
        except BaseException:
            self.driver.close()
            raise
        self._closing.append(pool.close)
        return pool

    def arena(self, owner: str, line: LineKind, *, reserve_bytes: int) -> VaArena:
        arena = VaArena(self.stream, ledger=self.ledger, owner=owner, line=line, reserve_bytes=reserve_bytes)
        self._closing.append(arena.close)
        return arena

    def closing(self, close: Callable[[], None]) -> None:
        """To be called when this is closed, before whatever was made earlier."""
        self._closing.append(close)

    def sampled(self, owner: str, line: LineKind) -> Account:
        return self.ledger.open(owner=owner, line=line, memory=MemoryKind.CPU, how=How.SAMPLED)

    def foreign(self) -> Quantity:
        """What others hold on the device now."""
        free, total = self.driver.mem_info()
        found = max(0, total - free - self.driver.used_bytes)
        return Quantity.exact(found, Source.MEASURED, "the device's total less what is free and what is ours")

    def remainder(self, owner: str, line: LineKind) -> Quantity:
        """What the process holds and no account explains becomes ``owner``'s, measured here and rounded up to a MiB."""
        trim_heap()
        own = self.driver.own_bytes()
        found = 0 if own is None else max(0, own - self.ledger.accounted_bytes)
        self.ledger.open(owner=owner, line=line, memory=MemoryKind.CPU, how=How.REMAINDER).sampled(found)
        return Quantity.exact(
            round_up(found, ROUNDING_BYTES), Source.MEASURED, "held by the process and in no other account"
        )

    def fence(self, cap_bytes: int, *, least_bytes: int) -> None:
        """From here on the heap cannot grow past ``cap_bytes`` of this device; lifted by ``close``.

        ``least_bytes`` of growth are granted in any case: what the plan gives to steps. Where the system has no such
        limit the cap is watched, not enforced.
        """
        trim_heap()
        own = self.driver.own_bytes()
        if own is None:
            return
        try:
            name = raise_fence(max(0, cap_bytes - own), least_bytes=least_bytes)
        except DriverUnsupported:
            return
        self._closing.append(lambda: lift_fence(name))

    def read(self, phase: str) -> Reading:
        """One look; the peak is the process's own since the last ``reset_peak``, less what it held at the baseline."""
        found, process = take_reading(self.driver, phase=phase, ledger=self.ledger), process_memory()
        own, peak = found.own_bytes, None
        if own is not None and process.own_bytes is not None and process.peak_own_bytes is not None:
            peak = max(own, process.peak_own_bytes - (process.own_bytes - own))
        free = max(0, found.free_bytes - self.heap_bytes())
        return replace(found, free_bytes=free, peak_own_bytes=peak)

    def heap_bytes(self) -> int:
        """What this process holds beyond the pages of the device: they know nothing of each other."""
        own = self.driver.own_bytes()
        return 0 if own is None else max(0, own - self.driver.used_bytes)

    def require_available(self, num_bytes: int, what: str) -> None:
        """Raise ``DoesNotFit`` where the machine cannot give ``num_bytes`` more, whatever the cap allows.

        The pages are taken at once: better refused here than killed by the system half way.
        """
        have = host_memory().available_bytes
        if have is not None and num_bytes > have:
            raise DoesNotFit(
                f"The machine has no memory left for {what}",
                need_bytes=num_bytes,
                have_bytes=have,
                need=format_bytes(num_bytes),
                have=f"{format_bytes(have)} available on this machine",
                remedies=("free some memory", "give a smaller --memory"),
                where="host",
            )

    def close(self) -> None:
        """Give everything back, newest first, then the device. Closing again does nothing.

        Memory that somebody still looks at is leaked, with a warning, rather than pulled away from under them; what
        the device does not take back does not keep the rest from being given back.
        """
        gc.collect()  # modules and their hooks form cycles
        kept = []
        while self._closing:
            try:
                self._closing.pop()()
            except (BufferInUse, RangeReferenced, DriverError) as error:
                kept.append(str(error))
        if not kept:
            self.driver.close()
            return
        warnings.warn(f"memory stays mapped: {'; '.join(kept)}", ResourceWarning, stacklevel=3)


def _checked_capacity(asked: int | None) -> int:
    """The size of the device: what was asked, or what the machine has available. Raises ``InvalidSetting``."""
    machine = host_memory()
    if asked is None:
        if machine.available_bytes is None:
            raise InvalidSetting(
                "memory", None, "not given, and this system does not tell", remedy="give --memory 4GiB"
            )
        return machine.available_bytes
    if machine.total_bytes is not None and asked > machine.total_bytes:
        raise InvalidSetting(
            "memory",
            format_bytes(asked),
            f"this machine has {format_bytes(machine.total_bytes)} ({machine.source})",
            remedy=f"give at most --memory {machine.total_bytes // MiB}MiB; `tonnage plan` plans for any size",
        )
    return asked
