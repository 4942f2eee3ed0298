"""A stand-in for ``cuda.bindings.driver``: functions that return their status first, over real bytes of the host.

It is strict where CUDA is undefined: a handle that does not exist, part of a mapping unmapped, a call without a
current context of the right device fail the test (``AssertionError``) instead of returning a status. So a suite that
passes over it shows that the driver above never asks for such things. Statuses can be scripted per function.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tonnage.device.copies import clash
from tonnage.device.host import HostDriver
from tonnage.errors import DriverError, DriverOOM

PAGE = 64 * 1024
CAPACITY = 64 * PAGE
UUIDS = [UUID(int=2**100 + ordinal) for ordinal in range(8)]

CUresult = IntEnum(
    "CUresult",
    {
        "CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_DEINITIALIZED": 4,
        "CUDA_ERROR_NO_DEVICE": 100, "CUDA_ERROR_INVALID_DEVICE": 101, "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_ECC_UNCORRECTABLE": 214, "CUDA_ERROR_OPERATING_SYSTEM": 304, "CUDA_ERROR_INVALID_HANDLE": 400,
        "CUDA_ERROR_NOT_READY": 600, "CUDA_ERROR_ILLEGAL_ADDRESS": 700, "CUDA_ERROR_CONTEXT_IS_DESTROYED": 709,
        "CUDA_ERROR_HARDWARE_STACK_ERROR": 714, "CUDA_ERROR_LAUNCH_FAILED": 719, "CUDA_ERROR_NOT_PERMITTED": 800,
        "CUDA_ERROR_NOT_SUPPORTED": 801, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": 906, "CUDA_ERROR_UNKNOWN": 999,
    },
)  # fmt: skip

ATTRIBUTES = {
    "MEMORY_POOLS_SUPPORTED": 1, "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED": 1, "MANAGED_MEMORY": 1,
    "CONCURRENT_MANAGED_ACCESS": 1, "MULTICAST_SUPPORTED": 1, "HOST_REGISTER_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
    "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132, "INTEGRATED": 0,
}  # fmt: skip
POOL_ATTRIBUTES = (
    "RELEASE_THRESHOLD", "RESERVED_MEM_CURRENT", "RESERVED_MEM_HIGH", "USED_MEM_CURRENT", "USED_MEM_HIGH"
)  # fmt: skip
#: What CUDA calls unsafe: not for a thread in mode "global" while another captures in that mode.
UNSAFE = frozenset(
    ("cuMemAlloc", "cuMemAllocManaged", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuMemPoolTrimTo",
     "cuMemPoolCreate", "cuMemPoolDestroy", "cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery")
)  # fmt: skip


class Number:
    """As the bindings wrap handles and addresses: not an int, but it can be made one."""

    def __init__(self, value: Any = 0) -> None:
        self._value = int(value)

    def __int__(self) -> int:
        return self._value


def names(prefix: str, *values: str) -> Any:
    return IntEnum(prefix, {f"{prefix}{value}": index for index, value in enumerate(values)})


def record(**fields: Any) -> Callable[[], SimpleNamespace]:
    """A class of the bindings with plain fields; ``location`` holds a type and an id."""
    return lambda: SimpleNamespace(location=SimpleNamespace(type=None, id=None), **fields)


def driver_function(*, needs_context: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Logs the call, answers as scripted, checks the context, and puts the status before what is returned."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: FakeCuda, *args: Any) -> tuple[Any, ...]:
            name = function.__name__
            self.calls.append((name, args))
            num_values = 2 if name == "cuMemGetInfo" else function.__annotations__["return"] != "None"
            status = self.scripted(name)
            if status:
                return CUresult(status), *([None] * num_values)
            if name in UNSAFE and self.is_captured_globally and self.thread_mode() == 0:
                self.broken_by.append(name)
                return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, *([None] * num_values)
            if needs_context and getattr(self.thread, "current", None) is None:
                return CUresult.CUDA_ERROR_INVALID_CONTEXT, *([None] * num_values)
            try:
                value = function(self, *args)
            except DriverOOM:
                return CUresult.CUDA_ERROR_OUT_OF_MEMORY, *([None] * num_values)
            except DriverError as error:
                raise AssertionError(f"{name}{args} is undefined on CUDA: {error}") from error
            return CUresult.CUDA_SUCCESS, *(value if num_values == 2 else [value] * num_values)

        return called

    return decorate


class FakeCuda:
    """The module. ``fail`` scripts statuses; ``attributes`` may be changed; ``calls`` is the log."""

    CUresult = CUresult
    CUstream = CUevent = CUmemoryPool = CUdeviceptr = CUmemGenericAllocationHandle = cuuint64_t = Number
    CUdevice_attribute = names("CU_DEVICE_ATTRIBUTE_", *ATTRIBUTES)
    CUmemPool_attribute = names("CU_MEMPOOL_ATTR_", *POOL_ATTRIBUTES)
    CUmemAllocationType = names("CU_MEM_ALLOCATION_TYPE_", "INVALID", "PINNED")
    CUmemLocationType = names("CU_MEM_LOCATION_TYPE_", "INVALID", "DEVICE")
    CUmemAllocationHandleType = names("CU_MEM_HANDLE_TYPE_", "NONE", "POSIX_FILE_DESCRIPTOR")
    CUmemAccess_flags = names("CU_MEM_ACCESS_FLAGS_PROT_", "NONE", "READ", "READWRITE")
    CUmemAllocationGranularity_flags = names("CU_MEM_ALLOC_GRANULARITY_", "MINIMUM", "RECOMMENDED")
    CUmemAttach_flags = names("CU_MEM_ATTACH_", "NONE", "GLOBAL")
    CUstreamCaptureMode = names("CU_STREAM_CAPTURE_MODE_", "GLOBAL", "THREAD_LOCAL", "RELAXED")
    CUstream_flags = names("CU_STREAM_", "DEFAULT", "NON_BLOCKING")
    CUevent_flags = names("CU_EVENT_", "DEFAULT", "BLOCKING_SYNC", "DISABLE_TIMING")
    CUmemcpySrcAccessOrder = names("CU_MEMCPY_SRC_ACCESS_ORDER_", "INVALID", "STREAM", "DURING_API_CALL", "ANY")
    CUmemcpyAttributes = staticmethod(lambda: SimpleNamespace(srcAccessOrder=None, flags=0))
    CUmemPoolProps = staticmethod(record(allocType=None, handleTypes=None))
    CUmemAccessDesc = staticmethod(record(flags=None))

    def __init__(self, *, num_devices: int = 1, granularity: int = PAGE, capacity_bytes: int = CAPACITY) -> None:
        self.num_devices, self.granularity = num_devices, granularity
        self.attributes = dict(ATTRIBUTES)
        self.host = HostDriver(capacity_bytes, page_bytes=granularity)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.thread = threading.local()
        self.retained: Counter[int] = Counter()
        self.heeds_alignment = True
        self.capturing: set[int] = set()
        self.is_captured_globally = False  # by another thread, on a stream that nobody here knows
        self.broken_by: list[str] = []  # calls that ended that capture with an error
        self._scripts: dict[str, deque[int]] = {}
        self._always: dict[str, int] = {}
        self._numbers = count(0x7F0000000000, 0x100)
        self._streams, self._events = {0, 1, 2}, set()
        self._pools: dict[int, tuple[int, dict[str, int]]] = {}
        self._managed: set[int] = set()
        self._shifted: dict[int, tuple[int, int]] = {}
        self._references: Counter[int] = Counter()
        self._exports: dict[int, int] = {}

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        made = record(type=None, requestedHandleTypes=None)()
        made.allocFlags = SimpleNamespace(gpuDirectRDMACapable=0)
        return made

    # scripts

    def fail(self, name: str, status: int, *, times: int | None = None, after: int = 0) -> None:
        """Function ``name`` returns ``status``, ``times`` times (None: for ever) after ``after`` good calls."""
        self._scripts[name] = deque([0] * after + [status] * (times or 0))
        if times is None:
            self._always[name] = status  # once the script is used up

    def heal(self) -> None:
        self._scripts.clear()
        self._always.clear()

    def scripted(self, name: str) -> int:
        script = self._scripts.get(name)
        return script.popleft() if script else self._always.get(name, 0)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of ``name``."""
        return [args for one, args in self.calls if one == name]

    # opening

    @driver_function(needs_context=False)
    def cuInit(self, flags: int) -> None: ...
    @driver_function(needs_context=False)
    def cuDriverGetVersion(self) -> int:
        return 13000

    @driver_function(needs_context=False)
    def cuDeviceGetCount(self) -> int:
        return self.num_devices

    @driver_function(needs_context=False)
    def cuDeviceGet(self, ordinal: int) -> Number:
        return Number(ordinal)

    @driver_function(needs_context=False)
    def cuDeviceGetName(self, length: int, device: Number) -> bytes:
        return b"NVIDIA Fake\0\0\0"

    @driver_function(needs_context=False)
    def cuDeviceGetUuid(self, device: Number) -> Any:
        return SimpleNamespace(bytes=UUIDS[int(device)].bytes)

    @driver_function(needs_context=False)
    def cuDeviceTotalMem(self, device: Number) -> int:
        return self.host.capacity_bytes

    @driver_function(needs_context=False)
    def cuDeviceGetAttribute(self, attribute: Any, device: Number) -> int:
        return self.attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    @driver_function(needs_context=False)
    def cuDevicePrimaryCtxRetain(self, device: Number) -> Number:
        self.retained[int(device)] += 1
        return Number(0xC0000 + int(device))

    @driver_function(needs_context=False)
    def cuDevicePrimaryCtxRelease(self, device: Number) -> None:
        assert self.retained[int(device)] > 0
        self.retained[int(device)] -= 1

    @driver_function(needs_context=False)
    def cuCtxSetCurrent(self, context: Number | None) -> None:
        self.thread.current = context

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"the words for " + str(int(status)).encode()

    @driver_function()
    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.host.mem_info()

    # virtual memory

    @driver_function()
    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> int:
        return self.granularity

    @driver_function()
    def cuMemAddressReserve(self, size: int, align: int, addr: int, flags: int) -> Number:
        if self.heeds_alignment:
            return Number(self.host.va_reserve(size, align=align))
        base = self.host.va_reserve(size + self.granularity, align=2 * self.granularity)
        self._shifted[base + self.granularity] = base, size + self.granularity  # one page off, whatever was asked
        return Number(base + self.granularity)

    @driver_function()
    def cuMemAddressFree(self, addr: Any, size: int) -> None:
        base, whole = self._shifted.pop(int(addr), (int(addr), size))
        self.host.va_free(base, whole)

    @driver_function()
    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Number:
        handle = self.host.phys_create(size)
        self._references[handle] = 1
        return Number(handle)

    @driver_function()
    def cuMemRelease(self, handle: Any) -> None:
        self._references[int(handle)] -= 1
        if self._references[int(handle)] <= 0:
            self.host.phys_release(int(handle))

    @driver_function()
    def cuMemMap(self, addr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        assert offset == flags == 0
        self.host.map(int(addr), size, int(handle))

    @driver_function()
    def cuMemUnmap(self, addr: Any, size: int) -> None:
        self.host.unmap(int(addr), size)

    @driver_function()
    def cuMemSetAccess(self, addr: Any, size: int, access: list[Any], num_access: int) -> None:
        assert len(access) == num_access
        self.host.set_access(int(addr), size)

    @driver_function()
    def cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> int:
        fd = os.memfd_create("fake-export")
        self._exports[os.fstat(fd).st_ino] = int(handle)
        return fd

    @driver_function()
    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Number:
        handle = self._exports[os.fstat(fd).st_ino]
        self._references[handle] += 1
        return Number(handle)

    # pools and plain allocations

    @driver_function()
    def cuMemPoolCreate(self, properties: Any) -> Number:
        pool = next(self._numbers)
        self._pools[pool] = self.host.pool_create(), {}
        return Number(pool)

    @driver_function()
    def cuMemPoolDestroy(self, pool: Any) -> None:
        self.host.pool_destroy(self._pools.pop(int(pool))[0])

    @driver_function()
    def cuMemPoolSetAttribute(self, pool: Any, attribute: Any, value: Number) -> None:
        assert isinstance(value, Number)
        of, attributes = self._pools[int(pool)]
        attributes[attribute.name.removeprefix("CU_MEMPOOL_ATTR_")] = int(value)
        if attribute.name.endswith("USED_MEM_HIGH"):
            self.host.pool_reset_high(of)

    @driver_function()
    def cuMemPoolGetAttribute(self, pool: Any, attribute: Any) -> Number:
        stats = self.host.pool_stats(self._pools[int(pool)][0])
        return Number(
            {
                "USED_MEM_CURRENT": stats.used_bytes,
                "RESERVED_MEM_CURRENT": stats.reserved_bytes,
                "USED_MEM_HIGH": stats.used_high_bytes,
                "RESERVED_MEM_HIGH": stats.reserved_high_bytes,
            }[attribute.name.removeprefix("CU_MEMPOOL_ATTR_")]
        )

    @driver_function()
    def cuMemPoolTrimTo(self, pool: Any, keep: int) -> None:
        self.host.pool_trim(self._pools[int(pool)][0], keep)

    @driver_function()
    def cuMemAllocFromPoolAsync(self, size: int, pool: Any, stream: Any) -> Number:
        self._require(self._streams, stream)
        own = self._pools[int(pool)][0]
        try:
            return Number(self.host.pool_alloc(own, size, stream=0))
        except DriverOOM:
            self._hoard(own)
            raise

    def _hoard(self, pool: int) -> None:
        """A pool that cannot serve keeps what it took from the device on the way: seen on an H200, all 139 GiB."""
        taken = []
        with suppress(DriverOOM):
            while True:
                taken.append(self.host.pool_alloc(pool, self.host.capabilities().page_bytes, stream=0))
        for addr in taken:
            self.host.pool_free(addr, stream=0)

    @driver_function()
    def cuMemFreeAsync(self, addr: Any, stream: Any) -> None:
        self._require(self._streams, stream)
        self.host.pool_free(int(addr), stream=0)

    @driver_function()
    def cuMemAlloc(self, size: int) -> Number:
        return Number(self.host.mem_alloc(size))

    @driver_function()
    def cuMemFree(self, addr: Any) -> None:
        if int(addr) in self._managed:
            self._managed.remove(int(addr))
            self.host.host_free(int(addr))
        else:
            self.host.mem_free(int(addr))

    @driver_function()
    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        return self.host.host_alloc(size, flags=flags)

    @driver_function()
    def cuMemFreeHost(self, addr: Any) -> None:
        self.host.host_free(int(addr))

    @driver_function()
    def cuMemAllocManaged(self, size: int, flags: int) -> Number:
        assert flags == self.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        addr = self.host.host_alloc(size, flags=0)
        self._managed.add(addr)
        return Number(addr)

    # data, streams, events

    @driver_function()
    def cuMemcpyAsync(self, dst: Any, src: Any, size: int, stream: Any) -> None:
        self._require(self._streams, stream)
        self.host.copy(int(dst), int(src), size, stream=0)

    @driver_function()
    def cuMemcpyBatchAsync(
        self, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, firsts: Any, num_attrs: int, stream: Any
    ) -> None:
        self._require(self._streams - {0, 1}, stream)  # no legacy stream, and none that is captured
        assert int(stream) not in self.capturing
        assert len(dsts) == len(srcs) == len(sizes) == count > 0
        assert all(isinstance(one, Number) for one in (*dsts, *srcs))
        assert (len(attrs), firsts, num_attrs) == (1, [0], 1)
        assert attrs[0].srcAccessOrder == self.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        batch = [(int(dst), int(src), size) for dst, src, size in zip(dsts, srcs, sizes, strict=True)]
        assert clash(batch) is None
        assert all(size > 0 for _, _, size in batch)
        self.host.copy_many(*zip(*batch, strict=True), stream=0)

    @driver_function()
    def cuMemsetD8Async(self, dst: Any, byte: int, size: int, stream: Any) -> None:
        self._require(self._streams, stream)
        self.host.fill(int(dst), byte, size, stream=0)

    @driver_function()
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Number:
        self._streams.add(made := next(self._numbers))
        return Number(made)

    @driver_function()
    def cuStreamDestroy(self, stream: Any) -> None:
        self._require(self._streams, stream)
        self._streams.remove(int(stream))

    @driver_function()
    def cuStreamSynchronize(self, stream: Any) -> None:
        self._require(self._streams, stream)

    @driver_function()
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        self._require(self._streams, stream)
        self._require(self._events, event)

    @driver_function()
    def cuStreamIsCapturing(self, stream: Any) -> int:
        self._require(self._streams, stream)
        return int(int(stream) in self.capturing)

    @driver_function(needs_context=False)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self.thread.mode = self.thread_mode(), mode
        return before

    def thread_mode(self) -> int:
        return getattr(self.thread, "mode", self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    @driver_function()
    def cuEventCreate(self, flags: int) -> Number:
        self._events.add(made := next(self._numbers))
        return Number(made)

    @driver_function()
    def cuEventDestroy(self, event: Any) -> None:
        self._require(self._events, event)
        self._events.remove(int(event))

    @driver_function()
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self._require(self._streams, stream)
        self._require(self._events, event)

    @driver_function()
    def cuEventQuery(self, event: Any) -> None:
        self._require(self._events, event)

    @driver_function()
    def cuEventSynchronize(self, event: Any) -> None:
        self._require(self._events, event)

    @driver_function()
    def cuCtxSynchronize(self) -> None: ...

    def new_foreign_stream(self) -> int:
        """A stream that another library made."""
        self._streams.add(made := next(self._numbers))
        return made

    @staticmethod
    def _require(known: set[int], handle: Any) -> None:
        assert int(handle) in known, f"handle {int(handle):#x} does not exist: undefined on CUDA"
