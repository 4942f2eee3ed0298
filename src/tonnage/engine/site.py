"""The device an engine is built on: driver, stream, ledger, and what must be given back in the end."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.buffers import Restore, Stream, VaArena
from tonnage.device.driver import Driver
from tonnage.engine.collector import settle, thaw
from tonnage.errors import BufferInUse, DoesNotFit, DriverError, RangeReferenced, UserError
from tonnage.hardware import Card
from tonnage.ledger import Account, Ledger
from tonnage.resources.host_pool import HostPool
from tonnage.terms import Chip, How, LineKind, MemoryKind, Quantity, Reading, Source
from tonnage.units import MiB, format_bytes, round_up

if TYPE_CHECKING:
    import torch

    from tonnage.engine.watch import Watch

#: Tags of arenas, by which they are put to sleep.
WEIGHTS, KV = "weights", "kv"
#: Repeated starts differ by some pages; rounding up makes equal starts give equal plans.
ROUNDING_BYTES = MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeak:
    """What one step took beyond what was there: bytes of tensors alive at the peak, and bytes by which what the
    device gave grew, with what kernels take inside themselves and allocators waste; and how that was seen."""

    tensor_bytes: int
    grown_bytes: int
    tensors_told: str
    grown_told: str


class Site(ABC):
    """One device, opened, and what an engine must know of it; ``HostSite`` and ``CudaSite`` are the kinds.

    ``capacity_bytes`` is its size, ``torch_device`` where tensors over its memory live, and ``peak_own_bytes`` the
    most that this process has held there at any look.
    """

    memory: MemoryKind
    torch_device: torch.device
    #: Whether the cap on steps is what they have used: all kinds of them run before it is set.
    is_capped_by_use = False

    def __init__(self, driver: Driver, stream: Stream, ledger: Ledger, *, capacity_bytes: int) -> None:
        self.driver, self.stream, self.ledger, self.capacity_bytes = driver, stream, ledger, capacity_bytes
        self.host_pool: HostPool | None = None
        self.peak_own_bytes: int | None = None
        self._arenas: list[VaArena] = []
        #: Sentences for the report about how the device was found.
        self.told: list[str] = []
        self.watch: Watch | None = None
        self._closing: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def card(self) -> Card: ...

    @property
    def chip(self) -> Chip:
        return self.card.chip

    def active(self) -> AbstractContextManager[object]:
        """Around whatever asks torch for something: its work then goes to our device and stream."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[object]:
        """As ``active``, around captures: what they need is not a step's."""
        return self.active()

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """What of the device the figures of a start depend on, by name."""

    # -- memory --------------------------------------------------------------------------------------------------

    def open_host_pool(self, *, asked_bytes: int, slab_bytes: int, also_needed_bytes: int) -> None:
        """Take host memory for evicted blocks. Raises ``DoesNotFit`` where the machine has no room for it."""
        self.host_pool = HostPool(
            self.driver, asked_bytes=asked_bytes, slab_bytes=slab_bytes, also_needed_bytes=also_needed_bytes
        )
        self._closing.append(self.host_pool.close)

    def arena(
        self, owner: str, line: LineKind, *, reserve_bytes: int, tag: str, restore: Restore = Restore.NONE
    ) -> VaArena:
        """``tag``: what it is released by, and ``restore`` what becomes of its contents then."""
        arena = VaArena(
            self.stream,
            ledger=self.ledger,
            owner=owner,
            line=line,
            reserve_bytes=reserve_bytes,
            tag=tag,
            restore=restore,
        )
        self._closing.append(arena.close)
        self._arenas.append(arena)
        return arena

    def require_sleepable(self) -> None:
        """Raises ``UserError`` on a device without virtual memory."""
        if not self.driver.capabilities().vmm:
            raise UserError(
                f"This engine cannot sleep: {self.driver.name} has no virtual memory to give back",
                remedy="close the engine, and start it again later",
            )

    def release(self, tags: Collection[str]) -> dict[str, int]:
        """Give back the memory of the arenas with these tags, at their addresses; returns the bytes of each tag.

        Raises what ``VirtualMemory.release`` raises.
        """
        freed = {tag: sum(arena.usable_bytes for arena in self._arenas if arena.tag == tag) for tag in tags}
        self.finish()
        self.stream.device.virtual.release(*tags)
        return freed

    def materialize(self, tags: Collection[str]) -> None:
        """Bring it back, contents too as far as they were kept. Raises ``CannotMaterialize``; nothing has changed."""
        self.stream.device.virtual.materialize(*tags).sync()

    @abstractmethod
    def remember_steps(self) -> None:
        """Steps of every kind have run, the largest first: what is kept for them is to be so again after a sleep."""

    def dropped(self, clear: Callable[[], None]) -> int:
        """Run ``clear``, which drops what ``captured`` made; returns the bytes that are free by it."""
        raise NotImplementedError

    def closing(self, close: Callable[[], None]) -> None:
        """To be called when this is closed, before whatever was made earlier."""
        self._closing.append(close)

    def sampled(self, owner: str, line: LineKind) -> Account:
        return self.ledger.open(owner=owner, line=line, memory=self.memory, how=How.SAMPLED)

    @abstractmethod
    def own_bytes(self) -> int | None:
        """What this process holds on the device; None where nothing tells."""

    @abstractmethod
    def foreign(self) -> Quantity:
        """What others hold on the device now."""

    @abstractmethod
    def beyond_accounts_bytes(self) -> int:
        """What is gone of the device and in no account of ours: others' bytes, and whatever of ours nobody saw."""

    def remainder(self, owner: str, line: LineKind) -> Quantity:
        """What the process holds and no account explains becomes ``owner``'s, measured here and rounded up to a MiB."""
        self.trim()
        own = self.own_bytes()
        found = 0 if own is None else max(0, own - self.ledger.accounted_bytes)
        self.ledger.open(owner=owner, line=line, memory=self.memory, how=How.REMAINDER).sampled(found)
        return Quantity.exact(
            round_up(found, ROUNDING_BYTES), Source.MEASURED, "held by the process and in no other account"
        )

    def free_bytes(self) -> int:
        """What is free on the device now, as a reading tells it."""
        return self.driver.mem_info()[0]

    @abstractmethod
    def available_bytes(self) -> int | None:
        """What can be had now, whatever the plan allows; None where nothing tells."""

    def require_available(self, num_bytes: int, what: str) -> None:
        """Raise ``DoesNotFit`` where ``num_bytes`` more cannot be had: better here than half way."""
        have = self.available_bytes()
        if have is not None and num_bytes > have:
            raise self.no_room(what, need_bytes=num_bytes, have_bytes=have)

    @abstractmethod
    def no_room(self, what: str, *, need_bytes: int, have_bytes: int) -> DoesNotFit:
        """The error that says so."""

    # -- looking -------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, phase: str) -> Reading:
        """One look, with the peak since the last ``reset_peak`` where the device tells it."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def trim(self) -> None:
        """Give back what allocators keep though nobody uses it, where that costs little."""

    def finish(self) -> None:
        """Wait until everything asked for is done; of a closed device there is nothing."""
        if self._closing:
            self.driver.device_sync()

    def drain(self) -> None:
        """The same, and give back what nobody holds, after a step that failed for want of memory."""
        self.finish()

    @abstractmethod
    def settle(self, phase: str) -> None:
        """Look at the device between steps and tell the ledger."""

    @abstractmethod
    def measured(self, run: Callable[[], object], known: Sequence[torch.Tensor]) -> StepPeak:
        """Run a step and tell what it took; ``known`` tensors were there before. ``begin_measuring`` comes first."""

    @abstractmethod
    def begin_measuring(self) -> None: ...

    def captured(self, capture: Callable[[], None]) -> Quantity:
        """Run ``capture`` and tell what the graphs that it makes keep."""
        raise NotImplementedError

    def route_steps(self, *, step_bytes: int, try_out: Callable[[], None]) -> None:  # noqa: B027
        """Steps get their memory from an arena of the planned size where the device's allocator can do that;
        ``try_out`` runs steps of every kind. On a host it cannot, and nothing is done."""

    @abstractmethod
    def close_boundary(self, *, total_bytes: int | None, step_bytes: int) -> tuple[str, ...]:
        """From here on steps cannot take more than was planned for them; returns what the report should say of it.

        ``total_bytes``: the cap on all that the engine takes, if one was asked; ``step_bytes``: what the plan gives
        to steps. Lifted by ``close``.
        """

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back, newest first, then the device. Closing again does nothing.

        Memory that somebody still looks at is leaked, with a warning, rather than pulled away from under them; what
        the device does not take back does not keep the rest from being given back.
        """
        if self.watch is not None:
            self.watch.close()
        thaw(self)
        gc.collect()  # modules and their hooks form cycles
        settle()
        kept = []
        while self._closing:
            try:
                self._closing.pop()()
            except (BufferInUse, RangeReferenced, DriverError) as error:
                kept.append(str(error))
        if not kept:
            self._close_driver()
            return
        warnings.warn(f"memory stays mapped: {'; '.join(kept)}", ResourceWarning, stacklevel=3)

    @abstractmethod
    def _close_driver(self) -> None: ...


def no_memory_left(what: str, where: str, *, need_bytes: int, have_bytes: int, remedies: Sequence[str]) -> DoesNotFit:
    """``where`` as in "the machine"."""
    return DoesNotFit(
        f"{where[0].upper()}{where[1:]} has no memory left for {what}",
        need_bytes=need_bytes,
        have_bytes=have_bytes,
        need=format_bytes(need_bytes),
        have=f"{format_bytes(have_bytes)} available on {where.replace('the ', 'this ')}",
        remedies=tuple(remedies),
        where="host" if "machine" in where else "device",
    )
