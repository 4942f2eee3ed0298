"""The pages of the host device: physical memory, address space, and what is mapped where.

One memfd is the whole device. A handle of physical memory is an offset in it, never used twice; mapping is
``mmap(MAP_SHARED | MAP_FIXED)`` into a reservation; giving memory back punches a hole. One file costs one descriptor,
and neighbours in it merge, so the system's limit on mappings is far away. Creation takes the pages there and then,
as on a GPU, and ``set_access`` faults them in, so the process's own figures agree with our books.

A handle may be mapped twice (both see the same bytes) and lives until it is released and unmapped, as on CUDA.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tonnage.device import _libc
from tonnage.device.ranges import Range, RangeBook
from tonnage.errors import DriverError, DriverOOM, DriverUnsupported
from tonnage.units import round_up

_MAX_MAP_COUNT = 65_530  # the kernel's default, where it cannot be read


@dataclass(slots=True)
class _Handle:
    """Physical memory: ``size`` bytes at an offset of the memfd, freed when released and mapped nowhere."""

    size: int
    num_maps: int = 0
    released: bool = False


@dataclass(slots=True)
class _Mapping:
    handle: int
    accessible: bool = False


class HostPages:
    """Virtual memory calls of ``Driver`` over one memfd of ``capacity_bytes``; see ``HostDriver`` for the arguments."""

    def __init__(self, capacity_bytes: int, *, page_bytes: int, max_mappings: int | None, name: str) -> None:
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
        self._lock = threading.RLock()
        self._closed = False
        self._handles: dict[int, _Handle] = {}
        self._reserved: RangeBook[None] = RangeBook()
        self._mapped: RangeBook[_Mapping] = RangeBook()
        self._used_bytes = 0
        self._next_handle = page_bytes  # not 0, which would read as "no handle"
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)

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
            if exportable:
                raise DriverUnsupported("phys_create", "NOT_SUPPORTED", "host memory cannot be exported")
            self._require_capacity("phys_create", size)
            handle = self._next_handle
            with translated("phys_create"):
                os.posix_fallocate(self._fd, handle, size)
            self._next_handle += size
            self._handles[handle] = _Handle(size)
            self._used_bytes += size
            return handle

    def phys_release(self, handle: int) -> None:
        with self._entered("phys_release"):
            found = self._require_handle("phys_release", handle)
            found.released = True
            try:
                self._free_if_unused("phys_release", handle)
            except DriverError:
                found.released = False
                raise

    def map(self, addr: int, size: int, handle: int) -> None:
        with self._entered("map"):
            found = self._require_handle("map", handle)
            if size != found.size:
                raise DriverError("map", "INVALID_VALUE", f"handle {handle:#x} has {found.size:,} bytes, not {size:,}")
            if addr % self._page_bytes or self._reserved.covering(addr, size) is None:
                raise DriverError("map", "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are not reserved")
            if self._mapped.overlapping(addr, size):
                raise DriverError("map", "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are mapped already")
            if len(self._mapped) >= self._max_mappings:
                raise DriverOOM("map", "OUT_OF_MEMORY", f"{self._max_mappings:,} ranges are mapped, the most allowed")
            flags = _libc.MAP_SHARED | _libc.MAP_FIXED
            with translated("map"):
                _libc.mmap(addr, size, prot=_libc.PROT_NONE, flags=flags, fd=self._fd, offset=handle)
            self._mapped.add(addr, size, _Mapping(handle))
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
                self._free_if_unused("unmap", one.value.handle)

    def set_access(self, addr: int, size: int, *, peers: tuple[int, ...] = ()) -> None:
        with self._entered("set_access"):
            if peers:
                raise DriverUnsupported("set_access", "NOT_SUPPORTED", "the host has no peers")
            found = self._whole_mappings("set_access", addr, size)
            with translated("set_access"):
                _libc.mprotect(addr, size, _libc.PROT_READ_WRITE)
                _libc.populate(addr, size)
            for one in found:
                one.value.accessible = True

    def is_accessible(self, addr: int, size: int) -> bool | None:
        """Whether every byte may be touched; None where none of them lies in a reservation of ours."""
        if not self._reserved.overlapping(addr, size):
            return None
        found = self._mapped.covering(addr, size)
        return found is not None and all(one.value.accessible for one in found)

    @contextmanager
    def _entered(self, call: str) -> Iterator[None]:
        """One call at a time, and none after ``close``."""
        with self._lock:
            if self._closed:
                raise DriverError(call, "DEINITIALIZED", "the device is closed")
            yield

    def _close_pages(self) -> None:
        for one in self._reserved:
            _libc.munmap(one.start, one.size)
        self._reserved, self._mapped = RangeBook(), RangeBook()
        self._handles.clear()
        self._used_bytes = 0
        os.close(self._fd)

    def _leaked_pages(self) -> list[str]:
        handles = [
            f"handle {handle:#x}: {one.size:,} bytes, mapped {one.num_maps} times{', released' * one.released}"
            for handle, one in self._handles.items()
        ]
        return handles + [f"reservation {one.start:#x}: {one.size:,} bytes" for one in self._reserved]

    def _free_if_unused(self, call: str, handle: int) -> None:
        found = self._handles[handle]
        if found.released and not found.num_maps:
            with translated(call):
                _libc.punch_hole(self._fd, handle, found.size)
            del self._handles[handle]
            self._used_bytes -= found.size

    def _whole_mappings(self, call: str, addr: int, size: int) -> list[Range[_Mapping]]:
        found = self._mapped.covering(addr, size)
        if not found or found[0].start != addr or found[-1].end != addr + size:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are not whole mappings")
        return found

    def _require_handle(self, call: str, handle: int) -> _Handle:
        found = self._handles.get(handle)
        if found is None or found.released:
            raise DriverError(call, "INVALID_HANDLE", f"no handle {handle:#x}")
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
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        kind = DriverOOM if error.errno in (errno.ENOMEM, errno.ENOSPC) else DriverError
        raise kind(call, code, f"the system says: {error.strerror}") from error


def _default_max_mappings() -> int:
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        allowed = _MAX_MAP_COUNT
    # A mapping with gaps on both sides costs two areas, and the process needs some itself.
    return allowed // 4
