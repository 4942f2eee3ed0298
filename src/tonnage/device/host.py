"""The host as a device: real bytes at stable addresses, with a capacity that is enforced.

Small and eager: copies are done when the call returns, and a copy that would touch memory which is not mapped
raises ``DriverError`` instead of ending the process. What a device may lack can be switched off, and other processes
and other devices can be played.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from tonnage.device import _libc
from tonnage.device.copies import copies
from tonnage.device.driver import Capabilities, PoolStats
from tonnage.device.fabric import HostFabric
from tonnage.device.hostpages import HostPages, refuse_forked, translated
from tonnage.device.hostpool import HostPool
from tonnage.device.process import process_memory
from tonnage.device.ranges import RangeBook
from tonnage.device.streams import EagerStreams
from tonnage.errors import DriverError, DriverOOM, DriverUnsupported
from tonnage.units import MiB, format_bytes

#: The allocation granularity of CUDA devices, so that rounding to pages is the same code with the same numbers.
DEFAULT_PAGE_BYTES = 2 * MiB

#: By the name of a capability, the calls that a device without it refuses.
CALLS_BEHIND = {
    "pools": ("pool_create", "pool_destroy", "pool_alloc", "pool_free", "pool_trim", "pool_stats", "pool_reset_high"),
    "vmm": ("va_reserve", "va_free", "phys_create", "phys_release", "map", "unmap", "set_access"),
    "managed": ("managed_alloc",),
    "exportable": ("phys_export", "phys_import"),
    "multicast": ("multicast_create", "multicast_add_device", "multicast_bind", "multicast_unbind"),
    "concurrent_managed": (),
    "host_register": (),
}
#: What falls with a capability.
_NEEDED_BY = {"vmm": ("exportable", "multicast"), "exportable": ("multicast",), "managed": ("concurrent_managed",)}


class HostDriver(HostPages, EagerStreams):
    """Implements ``Driver`` with ``capacity_bytes`` of this machine's memory. Linux only (``DriverUnsupported``).

    ``page_bytes`` is the granularity of virtual memory, a multiple of the system's page. ``max_mappings`` bounds the
    ranges mapped at once; by default they take at most half of what the kernel allows a process, because at its
    limit even unmapping fails. ``foreign_bytes`` may be set to play another process on the device, and ``foreign``
    is its script. ``host_capacity_bytes`` bounds pinned host memory. Capabilities named in ``without`` are absent:
    their calls raise ``DriverUnsupported``. Devices of one ``fabric`` import each other's memory and have multicast.
    Addresses die with ``close``: whoever made tensors over them has dropped them before. In a process forked from this
    one every call raises ``DeviceLost``, because both would have the same pages.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        page_bytes: int = DEFAULT_PAGE_BYTES,
        ordinal: int = 0,
        max_mappings: int | None = None,
        host_capacity_bytes: int | None = None,
        without: frozenset[str] = frozenset(),
        fabric: HostFabric | None = None,
    ) -> None:
        if unknown := without - CALLS_BEHIND.keys():
            raise DriverError("open", "INVALID_VALUE", f"no capabilities {sorted(unknown)}: {sorted(CALLS_BEHIND)}")
        HostPages.__init__(
            self,
            capacity_bytes,
            page_bytes=page_bytes,
            max_mappings=max_mappings,
            ordinal=ordinal,
            fabric=fabric or HostFabric(),
        )
        EagerStreams.__init__(self)
        self.host_capacity_bytes, self._host_used_bytes = host_capacity_bytes, 0
        self._baseline_bytes = 0
        self._host: RangeBook[None] = RangeBook()
        self._pools: dict[int, HostPool] = {}
        self._plain = self._make_pool(keep_bytes=0)
        self._reasons = _reasons(without, alone=fabric is None)
        self._exportable = "exportable" not in self._reasons
        present = {name: name not in self._reasons for name in CALLS_BEHIND}
        self._capabilities = Capabilities(page_bytes=page_bytes, reasons=self._reasons, **present)
        for name, reason in self._reasons.items():
            for call in CALLS_BEHIND[name]:
                setattr(self, call, partial(_refuse, call, reason))

    def __repr__(self) -> str:
        return f"<HostDriver {self.uuid} {format_bytes(self.capacity_bytes)}, {self.used_bytes:,} bytes used>"

    @property
    def uuid(self) -> str:
        return f"host-{self.ordinal}"

    @property
    def kind(self) -> str:
        return "host"

    @property
    def name(self) -> str:
        return f"host memory of {format_bytes(self.capacity_bytes)}"

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def probe_again(self) -> None:
        """A simulated device is what it was made to be."""

    def activate(self) -> None:
        with self._entered("activate"):
            pass

    def mem_info(self) -> tuple[int, int]:
        """(free, total) by our own books: memory that is created counts, mapped or not."""
        with self._entered("mem_info"):
            return max(0, self.capacity_bytes - self.used_bytes - self.foreign_bytes), self.capacity_bytes

    def set_baseline(self) -> None:
        """From now on ``own_bytes`` leaves out what the process holds now (imports), but no memory of this device."""
        with self._entered("set_baseline"):
            own = process_memory().own_bytes
            self._baseline_bytes = 0 if own is None else own - self.used_bytes

    def own_bytes(self) -> int | None:
        """Anonymous and shared memory of this process beyond the baseline, so torch's heap counts too.

        Never less than the device's own pages: a heap that gave back more than it took since the baseline (what earlier
        work of this process had left there) makes them nobody else's. None where the system does not tell.
        """
        own = process_memory().own_bytes
        return None if own is None else max(self.used_bytes, own - self._baseline_bytes)

    def close(self) -> tuple[str, ...]:
        """Give everything back; returns what was still alive, one sentence each. Closing again does nothing.

        A child that was forked closes nothing: all of it is its parent's.
        """
        if self._forked:
            return self._leaks()
        with self._lock:
            if self._closed:
                return ()
            leaks = self._leaks()
            self._closed = True
            for one in self._host:
                _libc.munmap(one.start, one.size)
            self._close_pages()
            return leaks

    def leaks(self) -> tuple[str, ...]:
        """What is alive now, one sentence each: allocations, host memory, handles, reservations."""
        if self._forked:  # the lock may be held by a thread that the fork left behind
            return self._leaks()
        with self._lock:
            return self._leaks()

    def _leaks(self) -> tuple[str, ...]:
        pools = [("plain", self._plain), *((f"pool {number}", pool) for number, pool in self._pools.items())]
        allocations = [
            f"allocation {addr:#x}: {size:,} bytes, {name}"
            for name, pool in pools
            for addr, (_, size) in pool.live.items()
        ]
        host = [f"host memory {one.start:#x}: {one.size:,} bytes" for one in self._host]
        return (*allocations, *host, *self._leaked_pages())

    def _after_fork(self) -> None:
        super()._after_fork()
        for call in vars(EagerStreams):  # they ask nobody
            if not call.startswith("_"):
                setattr(self, call, partial(refuse_forked, call))

    # pools and plain allocations

    def pool_create(self) -> int:
        with self._entered("pool_create"):
            self._pools[number := next(self._numbers)] = self._make_pool(keep_bytes=None)
            return number

    def pool_destroy(self, pool: int) -> None:
        with self._entered("pool_destroy"):
            found = self._require_pool("pool_destroy", pool)
            if found.live:
                raise DriverError("pool_destroy", "INVALID_VALUE", f"{len(found.live)} allocations are alive in it")
            found.trim(0)
            del self._pools[pool]

    def pool_alloc(self, pool: int, size: int, *, stream: int) -> int:
        with self._entered("pool_alloc"):
            self._require_stream("pool_alloc", stream)
            return self._alloc("pool_alloc", self._require_pool("pool_alloc", pool), size)

    def pool_free(self, addr: int, *, stream: int) -> None:
        with self._entered("pool_free"):
            self._require_stream("pool_free", stream)
            for pool in self._pools.values():
                if addr in pool.live:
                    return pool.free(addr)
            raise DriverError("pool_free", "INVALID_VALUE", f"no allocation at {addr:#x}")

    def pool_trim(self, pool: int, keep: int) -> None:
        with self._entered("pool_trim"):
            self._require_pool("pool_trim", pool).trim(keep)

    def pool_reset_high(self, pool: int) -> None:
        with self._entered("pool_reset_high"):
            self._require_pool("pool_reset_high", pool).reset_high()

    def pool_stats(self, pool: int) -> PoolStats:
        with self._entered("pool_stats"):
            return self._require_pool("pool_stats", pool).stats()

    def mem_alloc(self, size: int) -> int:
        with self._entered("mem_alloc"):
            return self._alloc("mem_alloc", self._plain, size)

    def mem_free(self, addr: int) -> None:
        with self._entered("mem_free"):
            if addr not in self._plain.live:
                raise DriverError("mem_free", "INVALID_VALUE", f"no allocation at {addr:#x}")
            self._plain.free(addr)

    def host_alloc(self, size: int, *, flags: int) -> int:
        """Host memory beside the device: it takes none of its capacity."""
        with self._entered("host_alloc"):
            _require_size("host_alloc", size)
            limit = self.host_capacity_bytes
            if limit is not None and self._host_used_bytes + size > limit:
                taken = f"{self._host_used_bytes:,} of {limit:,} bytes of host memory in use"
                raise DriverOOM("host_alloc", "OUT_OF_MEMORY", f"asked for {size:,} bytes; {taken}")
            with translated("host_alloc"):
                flags = _libc.MAP_PRIVATE | _libc.MAP_ANONYMOUS
                addr = _libc.mmap(0, size, prot=_libc.PROT_READ_WRITE, flags=flags)
            self._host.add(addr, size, None)
            self._host_used_bytes += size
            return addr

    def host_free(self, addr: int) -> None:
        with self._entered("host_free"):
            found = self._host.get(addr)
            if found is None:
                raise DriverError("host_free", "INVALID_VALUE", f"no allocation at {addr:#x}")
            with translated("host_free"):
                _libc.munmap(addr, found.size)
            self._host.remove(addr)
            self._host_used_bytes -= found.size

    def managed_alloc(self, size: int) -> int:
        """Memory that the host may touch too, as all of this device; ``mem_free`` frees it."""
        with self._entered("managed_alloc"):
            return self._alloc("managed_alloc", self._plain, size)

    # data

    def copy(self, dst: int, src: int, size: int, *, stream: int) -> None:
        with self._entered("copy"):
            self._require_stream("copy", stream)
            self._require_copyable("copy", dst, src, size)
            self._do_copy(dst, src, size)

    def copy_many(self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], *, stream: int) -> None:
        """All of them or none."""
        with self._entered("copy_many"):
            self._require_stream("copy_many", stream)
            batch = copies(dsts, srcs, sizes)
            for one in batch:
                self._require_copyable("copy_many", *one)
            for one in batch:
                self._do_copy(*one)

    def fill(self, dst: int, byte: int, size: int, *, stream: int) -> None:
        with self._entered("fill"):
            self._require_stream("fill", stream)
            if many := self._multicast_at(dst, size):
                many[0].write(bytes([byte]) * size, many[1])
            else:
                self._require_touchable("fill", dst, size, access="w")
                ctypes.memset(dst, byte, size)

    def _alloc(self, call: str, pool: HostPool, size: int) -> int:
        _require_size(call, size)
        return pool.alloc(size)

    def _make_pool(self, *, keep_bytes: int | None) -> HostPool:
        return HostPool(
            page_bytes=self._page_bytes, keep_bytes=keep_bytes, grow=self._new_segment, shrink=self._drop_segment
        )

    def _new_segment(self, size: int) -> int:
        """Mapped memory of whole pages, all or nothing. A device without virtual memory has it inside all the same."""
        handle = HostPages.phys_create(self, size)
        addr = 0
        try:
            addr = HostPages.va_reserve(self, size, align=self._page_bytes)
            HostPages.map(self, addr, size, handle)
            HostPages.set_access(self, addr, size)
        except DriverError:
            if addr:
                self._drop_segment(addr, size)
            HostPages.phys_release(self, handle)
            raise
        HostPages.phys_release(self, handle)  # the mapping keeps it alive
        return addr

    def _drop_segment(self, addr: int, size: int) -> None:
        if self._mapped.get(addr):
            HostPages.unmap(self, addr, size)
        HostPages.va_free(self, addr, size)

    def _require_pool(self, call: str, pool: int) -> HostPool:
        found = self._pools.get(pool)
        if found is None:
            raise DriverError(call, "INVALID_HANDLE", f"no pool {pool}")
        return found

    def _require_copyable(self, call: str, dst: int, src: int, size: int) -> None:
        self._require_touchable(call, src, size, access="r")
        if not self._multicast_at(dst, size):
            self._require_touchable(call, dst, size, access="w")

    def _do_copy(self, dst: int, src: int, size: int) -> None:
        if many := self._multicast_at(dst, size):
            many[0].write(ctypes.string_at(src, size), many[1])
        else:
            ctypes.memmove(dst, src, size)

    def _require_touchable(self, call: str, addr: int, size: int, *, access: str) -> None:
        """Raise instead of letting the copy end the process."""
        if size < 0:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes")
        if size == 0:
            return
        ours = self.is_accessible(addr, size)
        if ours is None:
            ours = self._host.covering(addr, size) is not None or _process_allows(addr, size, access=access)
        if not ours:
            raise DriverError(call, "ILLEGAL_ADDRESS", f"{size:,} bytes at {addr:#x} are not all mapped with access")


def _reasons(without: frozenset[str], *, alone: bool) -> dict[str, str]:
    """Why each absent capability is absent."""
    reasons = dict.fromkeys(without, "NOT_SUPPORTED: switched off on this simulated device")
    reasons.setdefault("host_register", "NOT_SUPPORTED: a simulated device reaches all host memory as it is")
    if alone:
        reasons.setdefault("multicast", "NOT_SUPPORTED: this simulated device has no fabric that links it to others")
    for name, fallen in _NEEDED_BY.items():
        if name in reasons:
            for other in fallen:
                reasons.setdefault(other, f"NOT_SUPPORTED: needs {name!r}, which is absent")
    return reasons


def _refuse(call: str, reason: str, *_: object, **__: object) -> NoReturn:
    code, detail = reason.split(": ", 1)
    raise DriverUnsupported(call, code, detail)


def _require_size(call: str, size: int) -> None:
    if size <= 0:
        raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes")


def _process_allows(addr: int, size: int, *, access: str) -> bool:
    """Whether memory that is not the device's (a tensor's, say) may be read ("r") or written ("w") throughout."""
    reached = addr
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            bounds, allowed = line.split(maxsplit=2)[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if end <= reached:
                continue
            if start > reached or access not in allowed:
                return False
            reached = end
            if reached >= addr + size:
                return True
    return False
