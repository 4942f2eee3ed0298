"""Host memory for blocks that the device has no room for: as many whole slabs as were asked for, and no byte more.

What takes a multiple of what was asked (a size applied to each pool, sizes rounded up to powers of two, a second copy
in pageable memory) is killed by the system long after start. So it is one allocation of exactly the slabs' bytes, and
what it needs is checked before anything is taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

from tonnage.device.driver import Driver
from tonnage.device.locking import lockable_bytes
from tonnage.device.machine import HostMemory, host_memory
from tonnage.errors import DeviceLost, DoesNotFit, DriverError, ResourceError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import GiB, format_bytes

KNOB = "host_kv_bytes"
#: Of the machine's memory this part stays free, at most so many bytes: for the heap, page tables, and everybody else.
HEADROOM_SHARE, MAX_HEADROOM_BYTES = 16, 2 * GiB


class HostPool:
    """``num_slots`` slabs of ``slab_bytes`` in a row from ``address`` on, at most ``asked_bytes`` in all.

    used_bytes      what is taken: whole slabs; ``rounding_bytes`` of what was asked are none and are not taken
    is_pinned       the driver locked the pages, so that transfers run beside the host; else it is plain memory
    warnings        sentences for the user: nothing is wrong yet

    also_needed_bytes  host memory that the caller is about to take beside this (a host device's capacity, say)
    ledger             books it under ``owner``, line KV, kind PINNED. On a host device host memory is the device's:
                       book it there only if it is taken after the device's baseline, which leaves out what was before

    Refused with ``DoesNotFit``, which says what is needed, what there is and by which limit, with nothing taken: less
    than one slab, more than the machine or the control group has available beyond a headroom, more than the driver
    gives. The limit on locked memory (RLIMIT_MEMLOCK) is not the driver's own as far as is known, so where it is too
    small that is a warning, and the reason named if the driver then refuses. Shared memory (/dev/shm) plays no part:
    neither this memory nor a host device's comes from there.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        asked_bytes: int,
        slab_bytes: int,
        ledger: Ledger | None = None,
        owner: str = "kv host tier",
        also_needed_bytes: int = 0,
        machine: Callable[[], HostMemory] = host_memory,
        lockable: Callable[[], int | None] = lockable_bytes,
    ) -> None:
        if slab_bytes < 1:
            raise ResourceError(f"slabs of {slab_bytes} bytes")
        self.asked_bytes, self.slab_bytes, self.num_slots = asked_bytes, slab_bytes, asked_bytes // slab_bytes
        self.used_bytes = self.num_slots * slab_bytes
        self.is_pinned = driver.kind == "cuda"
        self._driver = driver
        self._lockable_bytes = lockable() if self.is_pinned else None
        self.warnings: tuple[str, ...] = ()
        _require_a_slab(asked_bytes, slab_bytes)
        _require_available(self.used_bytes, slab_bytes, also_needed_bytes, machine())
        if self._lockable_bytes is not None and self.used_bytes > self._lockable_bytes:
            self.warnings = (self._lock_warning(self._lockable_bytes),)
        self._address = self._taken()
        self._account = None
        if ledger is not None:
            try:
                self._account = ledger.open(owner=owner, line=LineKind.KV, memory=MemoryKind.PINNED)
                self._account.add(self.used_bytes, self.used_bytes)
            except BaseException:
                driver.host_free(self._address)
                raise

    def __repr__(self) -> str:
        return f"<HostPool {self.told()}>"

    @property
    def address(self) -> int:
        """The first byte of slot 0; 0 once closed."""
        return self._address

    @property
    def rounding_bytes(self) -> int:
        return self.asked_bytes - self.used_bytes

    def told(self) -> str:
        """What it is, for people."""
        kind = "pinned host memory" if self.is_pinned else "host memory"
        rest = f"; {self.rounding_bytes:,} bytes of what was asked are no whole block" if self.rounding_bytes else ""
        each, used, asked = (format_bytes(size) for size in (self.slab_bytes, self.used_bytes, self.asked_bytes))
        return f"the host tier has {self.num_slots:,} blocks of {each}: {used} of {kind}, {asked} asked{rest}"

    def close(self) -> None:
        """Give the memory back: nothing is being copied to it or from it any more. Closing again does nothing.

        A lost device has taken it back already.
        """
        if not self._address:
            return
        with suppress(DeviceLost):
            self._driver.host_free(self._address)
        self._address = 0
        if self._account is not None:
            self._account.sub(self.used_bytes, self.used_bytes)

    def _taken(self) -> int:
        """The memory, every page of it really there: a page that cannot be had is a refusal now, not a kill later."""
        try:
            address = self._driver.host_alloc(self.used_bytes, flags=0)
        except DeviceLost:
            raise
        except DriverError as error:
            raise self._refused(error) from error
        if not self.is_pinned:  # pinned pages are there as soon as they are locked
            ctypes.memset(address, 0, self.used_bytes)
        return address

    def _refused(self, error: DriverError) -> DoesNotFit:
        limit = self._lockable_bytes
        is_limited = limit is not None and self.used_bytes > limit
        have = f"the driver refuses it: {error}"
        if is_limited:
            have += f"; this process may lock {format_bytes(limit or 0)} (RLIMIT_MEMLOCK)"
        return DoesNotFit(
            f"{KNOB} of {format_bytes(self.asked_bytes)} cannot be had",
            need_bytes=self.used_bytes,
            have_bytes=(limit or 0) if is_limited else 0,
            need=f"{self.used_bytes:,} bytes of {'pinned ' * self.is_pinned}host memory in one piece",
            have=have,
            remedies=(*(["raise the limit: ulimit -l unlimited"] if is_limited else []), f"give a smaller {KNOB}"),
            where="host",
        )

    def _lock_warning(self, limit: int) -> str:
        return (
            f"the limit on locked memory (RLIMIT_MEMLOCK) is {format_bytes(limit)} and {KNOB} pins "
            f"{format_bytes(self.used_bytes)}: should the driver refuse that, run with ulimit -l unlimited"
        )


def headroom_bytes(machine: HostMemory) -> int:
    """What a host pool leaves free of the memory that ``machine`` has."""
    return min(MAX_HEADROOM_BYTES, (machine.total_bytes or 0) // HEADROOM_SHARE)


def _require_a_slab(asked_bytes: int, slab_bytes: int) -> None:
    if asked_bytes >= slab_bytes:
        return
    raise DoesNotFit(
        f"{KNOB} of {format_bytes(asked_bytes)} holds not one block of the KV cache",
        need_bytes=slab_bytes,
        have_bytes=asked_bytes,
        need=f"{slab_bytes:,} bytes for a block",
        have=f"{asked_bytes:,} bytes",
        remedies=(f"set {KNOB} to at least {slab_bytes} bytes", f"leave {KNOB} out"),
        where="host",
    )


def _require_available(used_bytes: int, slab_bytes: int, also_needed_bytes: int, machine: HostMemory) -> None:
    """Raise ``DoesNotFit`` where the machine or its control group has too little; unknown is taken as enough."""
    if machine.available_bytes is None:
        return
    headroom = headroom_bytes(machine)
    have = max(0, machine.available_bytes - headroom - also_needed_bytes)
    if used_bytes <= have:
        return
    beside = f" and {format_bytes(also_needed_bytes)} for the device" if also_needed_bytes else ""
    most = have // slab_bytes * slab_bytes
    raise DoesNotFit(
        f"{KNOB} takes {format_bytes(used_bytes)}, more than this machine has left",
        need_bytes=used_bytes,
        have_bytes=have,
        need=f"{format_bytes(used_bytes)} of host memory",
        have=(
            f"{format_bytes(have)}: {format_bytes(machine.available_bytes)} available by {machine.available_source}, "
            f"less {format_bytes(headroom)} that stay free{beside}"
        ),
        remedies=(
            *([f"set {KNOB} to at most {most} bytes ({format_bytes(most)})"] if most else [f"leave {KNOB} out"]),
            "free memory of this machine, or raise the limit of its control group",
        ),
        where="host",
    )
