"""Virtual memory of a CUDA device: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess and their inverses.

The driver leaves much of their misuse undefined (part of a mapping unmapped, a reservation freed by another size), so
small books of what is alive check every call first. One lock keeps books and driver in step; none of these calls is
on a hot path.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tonnage.device.cuda_context import CudaContext, describe
from tonnage.device.cuda_probe import CudaProbe, access_to, allocation_properties, file_descriptor, probe
from tonnage.device.driver import Capabilities
from tonnage.device.ranges import Range, RangeBook
from tonnage.errors import DriverError, DriverUnsupported
from tonnage.units import round_up

#: How often an access grant is tried again after the device was drained; work queued in between makes it fail anew.
ACCESS_ATTEMPTS = 4


@dataclass(slots=True)
class _Handle:
    """Physical memory of ``size`` bytes; importing the same memory again may give the same handle once more."""

    size: int
    is_exportable: bool
    num_references: int = 1


@dataclass(frozen=True, slots=True)
class _Reservation:
    """What the driver gave: wider than what was asked where it did not heed the alignment."""

    base: int
    size: int


class CudaPages(CudaContext):
    """Virtual memory calls of ``Driver``; see ``CudaDriver``."""

    def __init__(self, ordinal: int, *, api: Any = None) -> None:
        super().__init__(ordinal, api=api)
        self._probed: CudaProbe | None = None
        self._handles: dict[int, _Handle] = {}
        self._reserved: RangeBook[_Reservation] = RangeBook()
        self._mapped: RangeBook[int] = RangeBook()  # value: the handle
        self._properties: dict[bool, Any] = {}
        self._access: dict[tuple[int, ...], list[Any]] = {}

    def capabilities(self) -> Capabilities:
        """Raises ``DriverOOM`` when 2 MiB for the attempts are not to be had; nothing is remembered then."""
        return self._probe().capabilities

    def probe_again(self) -> None:
        """Forget what was found; the next question tries everything again."""
        with self._lock:
            self._probed = None
            self._properties.clear()

    def va_reserve(self, size: int, *, align: int) -> int:
        self._check("va_reserve")
        self._require_pages("va_reserve", size)
        if align < 0 or align & (align - 1):
            raise DriverError("va_reserve", "INVALID_VALUE", f"alignment {align} is not a power of two")
        align = max(align, self._page_bytes)
        with self._lock:
            addr, found = self._reserve(size, align)
            self._reserved.add(addr, size, found)
            return addr

    def va_free(self, addr: int, size: int) -> None:
        self._check("va_free")
        with self._lock:
            found = self._reserved.get(addr)
            if found is None or found.size != size:
                raise DriverError("va_free", "INVALID_VALUE", f"no reservation of {size:,} bytes at {addr:#x}")
            if self._mapped.overlapping(addr, size):
                raise DriverError("va_free", "INVALID_VALUE", f"memory is still mapped at {addr:#x}")
            self._call("cuMemAddressFree", found.value.base, found.value.size)
            self._reserved.remove(addr)

    def phys_create(self, size: int, *, exportable: bool = False) -> int:
        self._check("phys_create")
        self._require_pages("phys_create", size)
        if exportable:
            self._require("exportable", "phys_create")
        with self._lock:
            made = self._call_for(
                describe(size), "cuMemCreate", size, self._memory_properties(exportable=exportable), 0
            )
            return self._book_handle(made, size, is_exportable=exportable)

    def phys_release(self, handle: int) -> None:
        self._check("phys_release")
        with self._lock:
            found = self._require_handle("phys_release", handle)
            self._call("cuMemRelease", handle)
            found.num_references -= 1
            if not found.num_references:
                del self._handles[handle]

    def map(self, addr: int, size: int, handle: int) -> None:
        self._check("map")
        with self._lock:
            found = self._require_handle("map", handle)
            if size != found.size:
                raise DriverError("map", "INVALID_VALUE", f"handle {handle:#x} has {found.size:,} bytes, not {size:,}")
            if addr % self._page_bytes or self._reserved.covering(addr, size) is None:
                raise DriverError("map", "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are not reserved")
            if self._mapped.overlapping(addr, size):
                raise DriverError("map", "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are mapped already")
            self._call_for(f"{size:,} bytes to be mapped", "cuMemMap", addr, size, 0, handle, 0)
            self._mapped.add(addr, size, handle)

    def unmap(self, addr: int, size: int) -> None:
        """Unmap one or more whole mappings that lie side by side. Does not wait for work that uses them."""
        self._check("unmap")
        with self._lock:
            found = self._whole_mappings("unmap", addr, size)
            self._call("cuMemUnmap", addr, size)
            for one in found:
                self._mapped.remove(one.start)

    def set_access(self, addr: int, size: int, *, peers: tuple[int, ...] = ()) -> None:
        """Open whole mappings side by side to this device and to the devices ``peers``, all in one call.

        Where work that is queued gets in the way, the device is drained and the call tried again, a few times.
        """
        self._check("set_access")
        with self._lock:
            self._whole_mappings("set_access", addr, size)
            access = self._access_of(peers)
            for attempt in range(1, ACCESS_ATTEMPTS + 1):
                try:
                    self._grant(addr, size, access)
                    return
                except DriverError as error:
                    if error.code != "NOT_READY" or attempt == ACCESS_ATTEMPTS:
                        raise
                self.device_sync()

    def phys_export(self, handle: int) -> int:
        self._check("phys_export")
        with self._lock:
            if not self._require_handle("phys_export", handle).is_exportable:
                raise DriverError("phys_export", "INVALID_VALUE", f"handle {handle:#x} was not created exportable")
            return int(self._call("cuMemExportToShareableHandle", handle, file_descriptor(self._api), 0))

    def phys_import(self, fd: int, size: int) -> int:
        """``fd`` stays the caller's to close; ``size`` is what it was created with, which cannot be asked of it."""
        self._check("phys_import")
        self._require_pages("phys_import", size)
        try:
            os.fstat(fd)  # the driver takes any number for a descriptor
        except OSError as error:
            raise DriverError("phys_import", "INVALID_HANDLE", f"descriptor {fd}: {error.strerror}") from error
        with self._lock:
            made = self._call("cuMemImportFromShareableHandle", fd, file_descriptor(self._api))
            return self._book_handle(made, size, is_exportable=False)

    @property
    def _page_bytes(self) -> int:
        return self._probe().capabilities.page_bytes

    def _probe(self) -> CudaProbe:
        found = self._probed
        if found is None:
            self._enter("capabilities")
            with self._lock:
                found = self._probed = self._guarded(probe, self._api, self._device, self._ordinal)
        return found

    def _require(self, capability: str, call: str) -> None:
        """``DriverUnsupported`` with the reason where the device lacks the capability."""
        capabilities = self.capabilities()
        if not getattr(capabilities, capability):
            raise DriverUnsupported(call, "NOT_SUPPORTED", capabilities.reasons.get(capability, capability))

    def _reserve(self, size: int, align: int) -> tuple[int, _Reservation]:
        """(address, reservation). An alignment that the driver refuses or ignores is had by reserving more."""
        what = describe(size, "address space")
        try:
            base = int(self._call_for(what, "cuMemAddressReserve", size, align, 0, 0))
        except DriverError as error:
            if error.code != "INVALID_VALUE" or align == self._page_bytes:
                raise
        else:
            if base % align == 0:
                return base, _Reservation(base, size)
            self._call("cuMemAddressFree", base, size)
        wide = size + align
        base = int(self._call_for(what, "cuMemAddressReserve", wide, self._page_bytes, 0, 0))
        return round_up(base, align), _Reservation(base, wide)

    def _memory_properties(self, *, exportable: bool) -> Any:
        found = self._properties.get(exportable)
        if found is None:
            rdma = self._probe().rdma
            found = allocation_properties(self._api, self._ordinal, exportable=exportable, rdma=rdma)
            self._properties[exportable] = found
        return found

    def _access_of(self, peers: tuple[int, ...]) -> list[Any]:
        found = self._access.get(peers)
        if found is None:
            ordinals = dict.fromkeys((self._ordinal, *peers))
            found = self._access[peers] = [access_to(self._api, ordinal) for ordinal in ordinals]
        return found

    def _grant(self, addr: int, size: int, access: list[Any]) -> None:
        self._call_for(f"access to {size:,} bytes", "cuMemSetAccess", addr, size, access, len(access))

    def _book_handle(self, made: Any, size: int, *, is_exportable: bool) -> int:
        handle = int(made)
        known = self._handles.get(handle)
        if known is None:
            self._handles[handle] = _Handle(size, is_exportable)
        else:
            known.num_references += 1
        return handle

    def _whole_mappings(self, call: str, addr: int, size: int) -> list[Range[int]]:
        found = self._mapped.exactly(addr, size)
        if found is None:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes at {addr:#x} are not whole mappings")
        return found

    def _require_handle(self, call: str, handle: int) -> _Handle:
        found = self._handles.get(handle)
        if found is None:
            raise DriverError(call, "INVALID_HANDLE", f"no handle {handle:#x}")
        return found

    def _require_pages(self, call: str, size: int) -> None:
        self._require("vmm", call)
        page = self._page_bytes
        if size <= 0 or size % page:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes are not whole pages of {page:,}")

    def _leaked_pages(self) -> list[str]:
        num_maps = Counter(one.value for one in self._mapped)
        handles = [
            f"handle {handle:#x}: {one.size:,} bytes, mapped {num_maps[handle]} times"
            for handle, one in self._handles.items()
        ]
        released = [
            f"mapping {one.start:#x}: {one.size:,} bytes of a released handle"
            for one in self._mapped
            if one.value not in self._handles
        ]
        return handles + released + [f"reservation {one.start:#x}: {one.size:,} bytes" for one in self._reserved]
