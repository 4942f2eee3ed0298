"""What a CUDA device can do: its attribute first, then a real attempt with 2 MiB, undone again.

An attribute alone is not enough: slices of virtualised cards and sandboxes promise what their driver then refuses.
Multicast is the exception and is read from the attribute only: on a shared machine making such an object can put the
GPUs of the whole host out of service.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tonnage.device.cuda_api import DURING_CAPTURE, CudaApi, attribute
from tonnage.device.driver import Capabilities
from tonnage.errors import DeviceLost, DriverError, DriverOOM
from tonnage.units import MiB, round_up

#: Bytes of each attempt.
PROBE_BYTES = 2 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaProbe:
    """What was found: the capabilities, and whether memory is made ready for network cards (GPUDirect RDMA)."""

    capabilities: Capabilities
    rdma: bool


def probe(api: CudaApi, device: Any, ordinal: int) -> CudaProbe:
    """Try everything. The device's context is current. Raises ``DriverOOM`` when not even 2 MiB are to be had, and
    ``DeviceLost``."""
    return _Prober(api, device, ordinal).probe()


def allocation_properties(api: CudaApi, ordinal: int, *, exportable: bool, rdma: bool) -> Any:
    """Physical memory of the device, as every handle of ours is made."""
    cuda = api.module
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    if exportable:
        properties.requestedHandleTypes = file_descriptor(api)
    if rdma:
        properties.allocFlags.gpuDirectRDMACapable = 1
    return properties


def access_to(api: CudaApi, ordinal: int) -> Any:
    """Reading and writing by device ``ordinal``."""
    cuda = api.module
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def make_pool(api: CudaApi, ordinal: int) -> Any:
    """A private pool on the device: it keeps what it has until it is trimmed, and nothing of it can be exported."""
    cuda = api.module
    properties = cuda.CUmemPoolProps()
    properties.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.handleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    pool = api.call("cuMemPoolCreate", properties)
    try:
        # The default, 0, gives everything back at each synchronisation, and the next allocation is a thousand
        # times slower.
        threshold = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        api.call("cuMemPoolSetAttribute", pool, threshold, cuda.cuuint64_t(2**64 - 1))
    except DriverError:
        api.call("cuMemPoolDestroy", pool)
        raise
    return pool


def file_descriptor(api: CudaApi) -> Any:
    """The kind of handle that passes between processes."""
    return api.module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _Prober:
    """One round of attempts; ``_reasons`` collects why what is absent is absent."""

    def __init__(self, api: CudaApi, device: Any, ordinal: int) -> None:
        self._api, self._device, self._ordinal = api, device, ordinal
        self._reasons: dict[str, str] = {}
        self._page_bytes = PROBE_BYTES  # stands where nothing can be mapped: sizes are rounded all the same
        self._rdma = False

    def probe(self) -> CudaProbe:
        pools = self._can("pools", "MEMORY_POOLS_SUPPORTED", self._try_pool)
        vmm = self._can("vmm", "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED", self._find_and_try_pages)
        exportable = vmm and self._can("exportable", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", self._try_export)
        if not vmm:
            self._reasons["exportable"] = f"no virtual memory: {self._reasons['vmm']}"
        capabilities = Capabilities(
            pools=pools,
            vmm=vmm,
            exportable=exportable,
            managed=self._can("managed", "MANAGED_MEMORY", self._try_managed),
            concurrent_managed=self._can("concurrent_managed", "CONCURRENT_MANAGED_ACCESS"),
            multicast=self._can("multicast", "MULTICAST_SUPPORTED"),
            host_register=self._can("host_register", "HOST_REGISTER_SUPPORTED"),
            page_bytes=self._page_bytes,
            reasons=dict(self._reasons),
        )
        return CudaProbe(capabilities=capabilities, rdma=vmm and self._rdma)

    def _can(self, capability: str, asked: str, attempt: Callable[[], None] | None = None) -> bool:
        """Whether the attribute says so and the attempt works; if not, why goes to the reasons."""
        try:
            if not self._attribute(asked):
                self._reasons[capability] = f"CU_DEVICE_ATTRIBUTE_{asked} is 0"
                return False
            if attempt is not None:
                attempt()
        except DriverError as error:
            self._reasons[capability] = self._told(error)
            return False
        return True

    def _attribute(self, name: str) -> int:
        return attribute(self._api, self._device, name)

    def _told(self, error: DriverError) -> str:
        """The reason for an absence; an error that is no answer to the question goes on as it is.

        Want of memory, a lost device or a capture that is going on pass; every other code means that this device, its
        driver or the sandbox around them do not do it. Which codes they use for that differs.
        """
        number = self._api.code_number(error.code)
        if isinstance(error, DriverOOM | DeviceLost) or number in DURING_CAPTURE:
            raise error
        return f"{error.call}: {error.code}" + (f" ({number})" if number is not None else f" ({error.detail})")

    def _try_pool(self) -> None:
        stream = self._api.module.CUstream(0)
        with ExitStack() as undo:
            pool = make_pool(self._api, self._ordinal)
            undo.callback(self._api.call, "cuMemPoolDestroy", pool)
            addr = self._api.call("cuMemAllocFromPoolAsync", PROBE_BYTES, pool, stream)
            undo.callback(self._api.call, "cuStreamSynchronize", stream)
            undo.callback(self._api.call, "cuMemFreeAsync", addr, stream)

    def _find_and_try_pages(self) -> None:
        """With memory that network cards can reach where the attribute promises it; without if that is refused."""
        self._rdma = bool(self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        try:
            self._try_pages()
        except DriverError as error:
            if not self._rdma:
                raise
            self._reasons["rdma"] = self._told(error)
            self._rdma = False
            self._try_pages()

    def _try_pages(self) -> None:
        self._page_bytes = self._granularity(exportable=False)
        size = round_up(PROBE_BYTES, self._page_bytes)
        with ExitStack() as undo:
            addr = self._api.call("cuMemAddressReserve", size, self._page_bytes, 0, 0)
            undo.callback(self._api.call, "cuMemAddressFree", addr, size)
            handle = self._create(size, exportable=False)
            undo.callback(self._api.call, "cuMemRelease", handle)
            self._api.call("cuMemMap", addr, size, 0, handle, 0)
            undo.callback(self._api.call, "cuMemUnmap", addr, size)
            self._api.call("cuMemSetAccess", addr, size, [access_to(self._api, self._ordinal)], 1)

    def _try_export(self) -> None:
        pages = math.lcm(self._page_bytes, self._granularity(exportable=True))
        with ExitStack() as undo:
            handle = self._create(round_up(PROBE_BYTES, pages), exportable=True)
            undo.callback(self._api.call, "cuMemRelease", handle)
            os.close(int(self._api.call("cuMemExportToShareableHandle", handle, file_descriptor(self._api), 0)))
        self._page_bytes = pages  # one size of page, whatever it is made for

    def _try_managed(self) -> None:
        attach = self._api.module.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        addr = self._api.call("cuMemAllocManaged", PROBE_BYTES, int(attach))
        self._api.call("cuMemFree", addr)

    def _granularity(self, *, exportable: bool) -> int:
        """Sizes are valid in multiples of the minimum and fast in multiples of what is recommended: both, and the
        system's page, because the same size is kept on the host."""
        options = self._api.module.CUmemAllocationGranularity_flags
        properties = allocation_properties(self._api, self._ordinal, exportable=exportable, rdma=self._rdma)
        minimum, recommended = (
            int(self._api.call("cuMemGetAllocationGranularity", properties, option))
            for option in (options.CU_MEM_ALLOC_GRANULARITY_MINIMUM, options.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        )
        return math.lcm(minimum, recommended, os.sysconf("SC_PAGE_SIZE"))

    def _create(self, size: int, *, exportable: bool) -> Any:
        properties = allocation_properties(self._api, self._ordinal, exportable=exportable, rdma=self._rdma)
        return self._api.call("cuMemCreate", size, properties, 0)
