"""The pages of the host device: physical memory, address space, and what is mapped where.

One memfd is the whole device. A handle of physical memory is an offset in it, never used twice; mapping is
``mmap(MAP_SHARED | MAP_FIXED)`` into a reservation; giving memory back punches a hole. One file costs one descriptor,
and neighbours in it merge, so the system's limit on mappings is far away. Creation takes the pages there and then,
as on a GPU, and ``set_access`` faults them in, so the process's own figures agree with our books. Exportable memory
has a file of its own, which is what its descriptor names.

A handle may be mapped twice (both see the same bytes) and lives until it is released and unmapped, as on CUDA.
"""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tonnage.device import _libc
from tonnage.device.fabric import HostFabric, Multicast, Physical
from tonnage.device.hostforeign import ForeignScript
from tonnage.device.ranges import Range, RangeBook
from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported
from tonnage.units import round_up

_MAX_MAP_COUNT = 65_530  # the kernel's default, where it cannot be read

_alive: weakref.WeakSet[HostPages] = weakref.WeakSet()


@dataclass(slots=True)
class _Handle:
    """One device's hold on memory, its own or another's; let go when released and mapped nowhere."""

    memory: Physical | Multicast
    num_maps: int = 0
    released: bool = False


@dataclass(slots=True)
class _Mapping:
    handle: int
    memory: Physical | Multicast
    accessible: bool = False


class HostPages:
    """Virtual memory calls of ``Driver`` over one memfd of ``capacity_bytes``; see ``HostDriver`` for the arguments."""

    def __init__(
        self, capacity_bytes: int, *, page_bytes: int, max_mappings: int | None, ordinal: int, fabric: HostFabric
    ) -> None:
        system_page = os.sysconf("SC_PAGE_SIZE")
        if capacity_bytes <= 0:
            raise DriverError("open", "INVALID_VALUE", f"a capacity of {capacity_bytes:,} bytes")
        if page_bytes <= 0 or page_bytes % system_page:
            raise DriverError(
                "open", "INVALID_VALUE", f"page_bytes is a multiple of {system_page:,}, not {page_bytes:,}"
            )
        if not hasattr(os, "memfd_create"):
            raise DriverUnsupported("open", "NOT_SUPPORTED", f"the host device needs Linux, not {sys.platform}")
        self.capacity_bytes, self.foreign_bytes, self._page_bytes = capacity_bytes, 0, page_bytes
        self._max_mappings = _default_max_mappings() if max_mappings is None else max_mappings
        self.ordinal, self.foreign = ordinal, ForeignScript(self)
        self._fabric, self._lock = fabric, fabric.lock
        self._exportable = True
        self._closed = self._forked = False
        self._depth = 0  # calls inside calls are not scripted
        self._handles: dict[int, _Handle] = {}
        self._reserved: RangeBook[None] = RangeBook()
        self._mapped: RangeBook[_Mapping] = RangeBook()
        self._used_bytes = self._num_multicasts = 0
        self._next_handle = page_bytes  # not 0, which would read as "no handle"
        self._fd = os.memfd_create(f"tonnage-host-{ordinal}", os.MFD_CLOEXEC)
        # A driver that is dropped without ``close`` keeps no descriptor: a process has a thousand or so.
        self._close_file = weakref.finalize(self, os.close, self._fd)
        _alive.add(self)

    @property
    def used_bytes(self) -> int:
        """Physical bytes created and not yet freed, mapped or not."""
        return self._used_bytes

    def va_reserve(self, size: int, *, align: int) -> int:
        with self._entered("va_reserve"):
            self._require_pages("va_reserve", size)
            if align & (align - 1):
                raise DriverError("va_reserve", "INVALID_VALUE", f"alignment {align} is not a power of two")
            with translated("va_reserve"):
                addr = _libc.reserve(size, align=round_up(max(align, 1), self._page_bytes))
            self._reserved.add(addr, size, None)
            return addr

    def va_free(self, addr: int, size: int) -> None:
        with self._entered("va_free"):
            found = self._reserved.get(addr)
            if found is None or found.size != size:
                raise DriverError("va_free", "INVALID_VALUE", f"no reservation of {size:,} bytes at {addr:#x}")
            if self._mapped.overlapping(addr, size):
                raise DriverError("va_free", "INVALID_VALUE", f"memory is still mapped at {addr:#x}")
            with translated("va_free"):
                _libc.munmap(addr, size)
            self._reserved.remove(addr)

    def phys_create(self, size: int, *, exportable: bool = False) -> int:
        with self._entered("phys_create"):
            self._require_pages("phys_create", size)
            if exportable and not self._exportable:
                raise DriverUnsupported("phys_create", "NOT_SUPPORTED", "memory of this device cannot be exported")
            self._require_capacity("phys_create", size)
            handle = self._next_handle
            with translated("phys_create"):
                memory = self._new_file(size) if exportable else self._new_pages(handle, size)
            self._next_handle += size
            self._handles[handle] = _Handle(memory)
            self._used_bytes += size
            return handle

    def phys_release(self, handle: int) -> None:
        with self._entered("phys_release"):
            found = self._require_handle("phys_release", handle)
            found.released = True
            try:
                self._let_go_if_unused("phys_release", handle)
            except DriverError:
                found.released = False
                raise

    def phys_export(self, handle: int) -> int:
        with self._entered("phys_export"):
            memory = self._require_handle("phys_export", handle).memory
            if not memory.exportable:
                raise DriverError("phys_export", "INVALID_VALUE", f"handle {handle:#x} was not created exportable")
            with translated("phys_export"):
                return self._fabric.export(memory)

    def phys_import(self, fd: int, size: int) -> int:
        """A hold on memory of a device of the same fabric; it counts as used there, not here."""
        with self._entered("phys_import"):
            memory = self._fabric.find(fd, size)
            memory.num_holders += 1
            return self._hold(memory)

    def map(self, addr: int, size: int, handle: int) -> None:
        with self._entered("map"):
            found = self._require_handle("map", handle)
            memory = found.memory
            if size != memory.size:
                raise DriverError("map", "INVALID_VALUE", f"handle {handle:#x} has {memory.size:,} bytes, not {size:,}")
            if addr % self._page_bytes or self._reserved.covering(addr, size) is None:
                raise DriverError("map", "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are not reserved")
            if self._mapped.overlapping(addr, size):
                raise DriverError("map", "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are mapped already")
            if len(self._mapped) >= self._max_mappings:
                raise DriverOOM("map", "OUT_OF_MEMORY", f"{self._max_mappings:,} ranges are mapped, the most allowed")
            if isinstance(memory, Physical):
                flags = _libc.MAP_SHARED | _libc.MAP_FIXED
                with translated("map"):
                    _libc.mmap(addr, size, prot=_libc.PROT_NONE, flags=flags, fd=memory.fd, offset=memory.offset)
            self._mapped.add(addr, size, _Mapping(handle, memory))
            found.num_maps += 1

    def unmap(self, addr: int, size: int) -> None:
        """Unmap one or more whole mappings that lie side by side."""
        with self._entered("unmap"):
            found = self._whole_mappings("unmap", addr, size)
            with translated("unmap"):
                _libc.close_range(addr, size)
            for one in found:
                self._mapped.remove(one.start)
                self._handles[one.value.handle].num_maps -= 1
                self._let_go_if_unused("unmap", one.value.handle)

    def set_access(self, addr: int, size: int, *, peers: tuple[int, ...] = ()) -> None:
        with self._entered("set_access"):
            if peers:
                raise DriverUnsupported("set_access", "NOT_SUPPORTED", "the host has no peers")
            found = self._whole_mappings("set_access", addr, size)
            for one in found:
                if isinstance(one.value.memory, Physical):
                    with translated("set_access"):
                        _libc.mprotect(one.start, one.size, _libc.PROT_READ_WRITE)
                        _libc.populate(one.start, one.size)
                one.value.accessible = True

    def is_accessible(self, addr: int, size: int) -> bool | None:
        """Whether every byte may be touched; None where none of them lies in a reservation of ours."""
        if not self._reserved.overlapping(addr, size):
            return None
        found = self._mapped.covering(addr, size)
        return found is not None and all(
            one.value.accessible and isinstance(one.value.memory, Physical) for one in found
        )

    def multicast_create(self, size: int, *, num_devices: int) -> int:
        with self._entered("multicast_create"):
            self._require_pages("multicast_create", size)
            if num_devices < 2:
                raise DriverError("multicast_create", "INVALID_VALUE", f"a multicast object over {num_devices} devices")
            with translated("multicast_create"):
                fd = os.memfd_create("tonnage-multicast", os.MFD_CLOEXEC)
            return self._hold(Multicast(size, fd, num_devices))

    def multicast_add_device(self, multicast: int) -> None:
        with self._entered("multicast_add_device"):
            self._require_multicast("multicast_add_device", multicast).add(self.ordinal)

    def multicast_bind(self, multicast: int, handle: int, size: int) -> None:
        with self._entered("multicast_bind"):
            found = self._require_multicast("multicast_bind", multicast)
            memory = self._require_handle("multicast_bind", handle).memory
            if not isinstance(memory, Physical):
                raise DriverError("multicast_bind", "INVALID_HANDLE", f"handle {handle:#x} is no memory")
            found.bind(self.ordinal, memory, size)

    def multicast_unbind(self, multicast: int, size: int) -> None:
        with self._entered("multicast_unbind"):
            self._require_multicast("multicast_unbind", multicast).unbind(self.ordinal, size)

    def _multicast_at(self, addr: int, size: int) -> tuple[Multicast, int] | None:
        """The multicast object behind these bytes, with how far into it they start; None where there is none."""
        if not self._num_multicasts:
            return None
        found = self._mapped.covering(addr, size)
        if not found or not found[0].value.accessible or not isinstance(found[0].value.memory, Multicast):
            return None
        return (found[0].value.memory, addr - found[0].start) if len(found) == 1 else None

    @contextmanager
    def _entered(self, call: str) -> Iterator[None]:
        """One call at a time, and none after ``close`` or in a child, where the lock may be a dead thread's."""
        if self._forked:
            raise _lost_by_fork(call)
        with self._lock:
            if self._closed:
                raise DriverError(call, "DEINITIALIZED", "the device is closed")
            if self.foreign.is_armed and not self._depth:
                self.foreign.before(call)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def _after_fork(self) -> None:
        """We are a child, and the pages are the parent's still: what one of us gives back is gone for both."""
        self._forked = True

    def _close_pages(self) -> None:
        for one in self._reserved:
            _libc.munmap(one.start, one.size)
        self._reserved, self._mapped = RangeBook(), RangeBook()
        for handle in self._handles.values():
            handle.memory.drop()
        self._handles.clear()
        self._used_bytes = 0
        self._close_file()

    def _leaked_pages(self) -> list[str]:
        handles = [
            f"handle {handle:#x}: {one.memory.size:,} bytes, mapped {one.num_maps} times{', released' * one.released}"
            for handle, one in self._handles.items()
        ]
        return handles + [f"reservation {one.start:#x}: {one.size:,} bytes" for one in self._reserved]

    def _hold(self, memory: Physical | Multicast) -> int:
        """A handle for memory that lies in no place of our file."""
        handle = self._next_handle
        self._next_handle += self._page_bytes
        self._handles[handle] = _Handle(memory)
        self._num_multicasts += isinstance(memory, Multicast)
        return handle

    def _new_pages(self, offset: int, size: int) -> Physical:
        os.posix_fallocate(self._fd, offset, size)
        return Physical(size, self._fd, offset, self._free_pages)

    def _new_file(self, size: int) -> Physical:
        fd = os.memfd_create(f"tonnage-host-{self.ordinal}-shared", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            raise
        return Physical(size, fd, 0, self._free_file, exportable=True)

    def _free_pages(self, memory: Physical) -> None:
        if not self._closed:
            _libc.punch_hole(memory.fd, memory.offset, memory.size)
            self._used_bytes -= memory.size

    def _free_file(self, memory: Physical) -> None:
        os.close(memory.fd)
        if not self._closed:
            self._used_bytes -= memory.size

    def _let_go_if_unused(self, call: str, handle: int) -> None:
        found = self._handles[handle]
        if found.released and not found.num_maps:
            with translated(call):
                found.memory.drop()
            del self._handles[handle]
            self._num_multicasts -= isinstance(found.memory, Multicast)

    def _whole_mappings(self, call: str, addr: int, size: int) -> list[Range[_Mapping]]:
        found = self._mapped.exactly(addr, size)
        if found is None:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are not whole mappings")
        return found

    def _require_handle(self, call: str, handle: int) -> _Handle:
        found = self._handles.get(handle)
        if found is None or found.released:
            raise DriverError(call, "INVALID_HANDLE", f"no handle {handle:#x}")
        return found

    def _require_multicast(self, call: str, handle: int) -> Multicast:
        found = self._require_handle(call, handle).memory
        if not isinstance(found, Multicast):
            raise DriverError(call, "INVALID_HANDLE", f"handle {handle:#x} is no multicast object")
        return found

    def _require_pages(self, call: str, size: int) -> None:
        if size <= 0 or size % self._page_bytes:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes are not whole pages of {self._page_bytes:,}")

    def _require_capacity(self, call: str, size: int) -> None:
        if self._used_bytes + self.foreign_bytes + size > self.capacity_bytes:
            others = f", {self.foreign_bytes:,} held by others" if self.foreign_bytes else ""
            raise DriverOOM(
                call,
                "OUT_OF_MEMORY",
                f"asked for {size:,} bytes; {self._used_bytes:,} of {self.capacity_bytes:,} in use{others}",
            )


@contextmanager
def translated(call: str) -> Iterator[None]:
    """The system's errors as the driver's."""
    try:
        yield
    except OverflowError as error:  # Python's, before the system was asked
        raise DriverOOM(call, "OUT_OF_MEMORY", f"no system has as much: {error}") from error
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        kind = DriverOOM if error.errno in (errno.ENOMEM, errno.ENOSPC) else DriverError
        raise kind(call, code, f"the system says: {error.strerror}") from error


def _lost_by_fork(call: str) -> DeviceLost:
    return DeviceLost(
        call, "FORKED", "a device does not pass through a fork: start worker processes with the spawn method"
    )


def refuse_forked(call: str, *_: object, **__: object) -> NoReturn:
    raise _lost_by_fork(call)


def _after_fork() -> None:
    for device in list(_alive):
        device._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _default_max_mappings() -> int:
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        allowed = _MAX_MAP_COUNT
    # A mapping with gaps on both sides costs two areas, and the process needs some itself.
    return allowed // 4
