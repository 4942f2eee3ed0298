"""The host as a device: memory of this process, with a capacity, and a heap that is watched and fenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tonnage.buffers import Device, Stream
from tonnage.device.fence import is_fenced, lift_fence, raise_fence
from tonnage.device.host import HostDriver
from tonnage.device.machine import host_memory
from tonnage.device.process import process_memory, reset_peak, settle_heap, trim_heap
from tonnage.device.reading import take_reading
from tonnage.engine.site import ROUNDING_BYTES, Site, StepPeak, no_memory_left
from tonnage.errors import DoesNotFit, DriverUnsupported, InvalidSetting, UserError
from tonnage.hardware import Card, host_card
from tonnage.ledger import Account, Ledger
from tonnage.terms import LineKind, MemoryKind, Quantity, Reading, Source
from tonnage.units import MiB, format_bytes, round_up

if TYPE_CHECKING:
    import torch

#: Heap blocks from here on go back to the system when freed; below, page faults would cost more than they save.
HEAP_THRESHOLD_BYTES = 2 * MiB
#: Owner of what comes and goes inside steps.
STEPS = "forward"


class HostSite(Site):
    """What the process holds at this moment, after its imports, is the host's overhead and no part of the device.

    ``memory_bytes`` None: what the machine has available. ``host_kv_bytes`` of slabs of ``slab_bytes`` are taken
    beside the device, and before it counts what is its own.
    """

    memory = MemoryKind.CPU
    driver: HostDriver

    def __init__(
        self,
        memory_bytes: int | None,
        *,
        index: int,
        make_driver: Callable[[int], HostDriver],
        host_kv_bytes: int = 0,
        slab_bytes: int = 1,
    ) -> None:
        import torch

        if is_fenced():
            raise UserError(
                "Another engine in this process holds a hard cap on all of its memory, and this one would have to live "
                "inside it",
                remedy="close that one first, or start both with fence=False",
            )
        capacity = _checked_capacity(memory_bytes)
        driver = make_driver(capacity)
        super().__init__(driver, Stream(Device(driver)), Ledger(index, capacity), capacity_bytes=driver.capacity_bytes)
        self.torch_device = torch.device("cpu")
        if host_kv_bytes:
            try:
                self.open_host_pool(asked_bytes=host_kv_bytes, slab_bytes=slab_bytes, also_needed_bytes=capacity)
            except BaseException:
                driver.close()
                raise
        # Earlier work may have left free heap: give it back first, or it would hide what we take.
        settle_heap(HEAP_THRESHOLD_BYTES)
        trim_heap()
        driver.set_baseline()
        self._before = process_memory()
        self._transient: Account | None = None

    @property
    def card(self) -> Card:
        return host_card(self.driver.capacity_bytes, page_bytes=self.driver.capabilities().page_bytes)

    def identity(self) -> dict[str, str]:
        """Torch's kernels keep buffers for each of their threads."""
        import torch

        threads = str(torch.get_num_threads())
        return {"device": "host", "device_bytes": str(self.driver.capacity_bytes), "threads": threads}

    def own_bytes(self) -> int | None:
        return self.driver.own_bytes()

    def foreign(self) -> Quantity:
        free, total = self.driver.mem_info()
        found = max(0, total - free - self.driver.used_bytes)
        return Quantity.exact(found, Source.MEASURED, "the device's total less what is free and what is ours")

    def beyond_accounts_bytes(self) -> int:
        return self.foreign().bytes

    def free_bytes(self) -> int:
        """What this process has on its heap is taken from the device's size, though not from its pages."""
        return max(0, super().free_bytes() - self._heap_bytes(self.driver.own_bytes()))

    def available_bytes(self) -> int | None:
        return host_memory().available_bytes

    def no_room(self, what: str, *, need_bytes: int, have_bytes: int) -> DoesNotFit:
        remedies = ("free some memory", "give a smaller --memory")
        return no_memory_left(what, "the machine", need_bytes=need_bytes, have_bytes=have_bytes, remedies=remedies)

    def read(self, phase: str) -> Reading:
        """One look; the peak is the process's own since the last ``reset_peak``, less what it held at the baseline."""
        found, process = take_reading(self.driver, phase=phase, ledger=self.ledger), process_memory()
        own, peak = found.own_bytes, None
        if own is not None and process.own_bytes is not None and process.peak_own_bytes is not None:
            peak = max(own, process.peak_own_bytes - (process.own_bytes - own))
        # By what was own at that very look: the heap may grow before it is asked again.
        free = max(0, found.free_bytes - self._heap_bytes(own))
        return replace(found, free_bytes=free, peak_own_bytes=peak)

    def reset_peak(self) -> None:
        reset_peak()

    def trim(self) -> None:
        trim_heap()

    def remember_steps(self) -> None:
        """Nothing: the heap serves steps in any order."""

    def settle(self, phase: str) -> None:
        """Look, make the heap give back what it keeps, look again; tell the ledger.

        What the process held at its peak and no longer holds came and went inside steps; what the heap gives back
        when asked was free memory it had kept of that, the allocator's overhead and not a leak. Both are one account:
        from outside, tensors and what the heap adds to them cannot be told apart.
        """
        self._transient = self._transient or self.sampled(STEPS, LineKind.TRANSIENT)
        before = self.read(phase)
        trim_heap()
        after = self.read(phase)
        if before.own_bytes is not None and after.own_bytes is not None and before.peak_own_bytes is not None:
            self.peak_own_bytes = max(self.peak_own_bytes or 0, before.peak_own_bytes)
            kept = max(0, before.own_bytes - after.own_bytes)
            self._transient.sampled(before.peak_own_bytes - before.own_bytes + kept)
            self._transient.sampled(kept)
        self.ledger.sample(before)
        self._transient.sampled(0)
        self.ledger.sample(after)

    def begin_measuring(self) -> None:
        trim_heap()
        self._before = process_memory()

    def measured(self, run: Callable[[], object], known: Sequence[torch.Tensor]) -> StepPeak:
        """A CPU build of torch has no statistics: tensors are tracked one by one, and growth is the process's own."""
        from tonnage.engine.tracker import StorageTracker

        tracker = StorageTracker(known)
        can_reset = reset_peak()
        with tracker:
            run()
        after, before = process_memory(), self._before
        tracked = round_up(tracker.peak_bytes, ROUNDING_BYTES)
        grown = tracked
        if can_reset and after.supported:
            # File pages touched for the first time are the page cache's, not ours.
            new_file_bytes = max(0, after.file_bytes - before.file_bytes)
            grown = max(tracked, round_up(after.peak_bytes - before.resident_bytes - new_file_bytes, ROUNDING_BYTES))
        return StepPeak(
            tensor_bytes=tracked,
            grown_bytes=grown,
            tensors_told="tensors alive at the peak",
            grown_told="growth of the process",
        )

    def close_boundary(self, *, total_bytes: int | None, step_bytes: int) -> tuple[str, ...]:
        """The heap cannot grow past the cap, of the device or of what the engine may take; ``step_bytes`` of growth
        are granted in any case. Where the system has no such limit the cap is watched, not enforced."""
        trim_heap()
        own = self.driver.own_bytes()
        if own is None:
            return ()
        cap = min(self.capacity_bytes, self.capacity_bytes if total_bytes is None else total_bytes)
        try:
            name = raise_fence(max(0, cap - own), least_bytes=step_bytes)
        except DriverUnsupported:
            return ()
        self.closing(lambda: lift_fence(name))
        return ()

    def _heap_bytes(self, own: int | None) -> int:
        """What this process holds beyond the pages of the device: they know nothing of each other."""
        return 0 if own is None else max(0, own - self.driver.used_bytes)

    def _close_driver(self) -> None:
        self.driver.close()


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
