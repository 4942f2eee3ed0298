"""Pools, plain allocations and host memory of a CUDA device.

Allocating from a pool and freeing to it are the calls made at every step, so they go straight to the bound functions
with objects that were made before; everything else goes the common way.
"""

from __future__ import annotations

from typing import Any

from tonnage.device.cuda_api import INVALID_CONTEXT, INVALID_VALUE, OUT_OF_MEMORY
from tonnage.device.cuda_context import describe
from tonnage.device.cuda_probe import make_pool
from tonnage.device.cuda_streams import CudaStreams
from tonnage.device.driver import PoolStats
from tonnage.errors import DriverError, DriverOOM


class CudaMemory(CudaStreams):
    """Allocation calls of ``Driver``; see ``CudaDriver``."""

    # An attribute in a slot is found in a tenth of the time: these are read at every allocation.
    __slots__ = ("_alloc_async", "_free_async", "_pooled", "_pools")

    def __init__(self, ordinal: int, *, api: Any = None) -> None:
        super().__init__(ordinal, api=api)
        self._pools: dict[int, Any] = {}  # handle -> the driver's object
        self._pooled: dict[int, tuple[Any, int, int]] = {}  # address -> (the driver's object, pool, bytes)
        self._plain: dict[int, int] = {}  # address -> bytes, managed memory too
        self._host: dict[int, int] = {}
        self._alloc_async = self._api.function("cuMemAllocFromPoolAsync")
        self._free_async = self._api.function("cuMemFreeAsync")

    def pool_create(self) -> int:
        self._enter("pool_create")
        self._require("pools", "pool_create")
        made = self._guarded(self._relaxed, make_pool, self._api, self._ordinal)
        self._pools[int(made)] = made
        return int(made)

    def pool_destroy(self, pool: int) -> None:
        self._check("pool_destroy")
        found = self._pool(pool)
        num_live = sum(of == pool for _, of, _ in list(self._pooled.values()))
        if num_live:
            raise DriverError("pool_destroy", "INVALID_VALUE", f"{num_live} allocations are alive in it")
        del self._pools[pool]
        self._call("cuMemPoolDestroy", found)

    def pool_alloc(self, pool: int, size: int, *, stream: int) -> int:
        if size <= 0:
            raise DriverError("pool_alloc", "INVALID_VALUE", f"{size:,} bytes")
        try:
            on, of = self._known_streams[stream], self._pools[pool]
        except KeyError:
            on, of = self._streams[stream], self._pool(pool)
        status, made = self._alloc_async(size, of, on)
        if status:
            status, made = self._again(status, "cuMemAllocFromPoolAsync", size, of, on)
        addr = int(made)
        self._pooled[addr] = made, pool, size
        return addr

    def pool_free(self, addr: int, *, stream: int) -> None:
        try:
            on = self._known_streams[stream]
        except KeyError:
            on = self._streams[stream]
        live = self._pooled.pop(addr, None)  # before the call: after it, another thread may be given this address
        if live is None:
            raise DriverError("pool_free", "INVALID_VALUE", f"no allocation at {addr:#x}")
        (status,) = self._free_async(live[0], on)
        if status:
            try:
                self._again(status, "cuMemFreeAsync", live[0], on)
            except DriverError:
                self._pooled[addr] = live
                raise

    def pool_trim(self, pool: int, keep: int) -> None:
        self._check("pool_trim")
        if keep < 0:
            raise DriverError("pool_trim", "INVALID_VALUE", f"{keep:,} bytes")
        self._call("cuMemPoolTrimTo", self._pool(pool), keep)

    def pool_stats(self, pool: int) -> PoolStats:
        """Four questions, so the figures may tear; none of them waits for the device."""
        self._check("pool_stats")
        return PoolStats(
            used_bytes=self._pool_attribute(pool, "USED_MEM_CURRENT"),
            reserved_bytes=self._pool_attribute(pool, "RESERVED_MEM_CURRENT"),
            used_high_bytes=self._pool_attribute(pool, "USED_MEM_HIGH"),
            reserved_high_bytes=self._pool_attribute(pool, "RESERVED_MEM_HIGH"),
        )

    def pool_reset_high(self, pool: int) -> None:
        """The highest figures start again from what there is now."""
        self._check("pool_reset_high")
        cuda = self._api.module
        for name in ("USED_MEM_HIGH", "RESERVED_MEM_HIGH"):
            attribute = getattr(cuda.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
            self._call("cuMemPoolSetAttribute", self._pool(pool), attribute, cuda.cuuint64_t(0))

    def mem_alloc(self, size: int) -> int:
        """Waits for the device when it has to; ``mem_free`` always does."""
        self._require_size("mem_alloc", size)
        addr = int(self._call_for(describe(size), "cuMemAlloc", size))
        self._plain[addr] = size
        return addr

    def mem_free(self, addr: int) -> None:
        """For ``mem_alloc`` and ``managed_alloc``. A global stall: the driver waits for all work of the device."""
        self._free("mem_free", "cuMemFree", self._plain, addr)

    def host_alloc(self, size: int, *, flags: int) -> int:
        """Pinned memory of the host; ``flags`` are CUDA's CU_MEMHOSTALLOC_*: 1 portable, 2 mapped, 4 write-combined."""
        self._require_size("host_alloc", size)
        addr = int(self._call_for(describe(size, "pinned host memory"), "cuMemHostAlloc", size, flags))
        self._host[addr] = size
        return addr

    def host_free(self, addr: int) -> None:
        self._free("host_free", "cuMemFreeHost", self._host, addr)

    def managed_alloc(self, size: int) -> int:
        """Memory that moves between host and device, freed by ``mem_free``.

        More than is free on the device now is refused (``DriverOOM``): the driver would grant it and move pages to
        and fro, and on a card that others use too that can hang them all.
        """
        self._require_size("managed_alloc", size)
        self._require("managed", "managed_alloc")
        free, total = self.mem_info()
        if size > free:
            raise DriverOOM(
                "managed_alloc",
                "OUT_OF_MEMORY",
                f"asked for {describe(size, 'managed memory')}; {free:,} of {total:,} bytes are free on {self.name}, "
                "and managed memory beyond that is not taken",
            )
        attach = self._api.module.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        addr = int(self._call_for(describe(size, "managed memory"), "cuMemAllocManaged", size, int(attach)))
        self._plain[addr] = size
        return addr

    def _again(self, status: Any, name: str, *args: Any) -> Any:
        """Once more with our context current, where the lack of one may be what was wrong; else, and then, raise."""
        if int(status) in (INVALID_CONTEXT, INVALID_VALUE):
            self._enter(name)
            status, *values = self._api.function(name)(*args)
            if not status:
                return status, *values
        if name != "cuMemAllocFromPoolAsync":
            raise self._failed(name, status, "nothing")
        if int(status) == OUT_OF_MEMORY:
            # A pool that could not serve keeps what it took from the device on the way: all of it (measured).
            self._call("cuMemPoolTrimTo", args[1], 0)
        raise self._failed(name, status, describe(args[0], "pool memory"))

    def _free(self, call: str, name: str, book: dict[int, int], addr: int) -> None:
        self._check(call)
        size = book.pop(addr, None)
        if size is None:
            raise DriverError(call, "INVALID_VALUE", f"no allocation at {addr:#x}")
        try:
            self._call(name, addr)
        except DriverError:
            book[addr] = size
            raise

    def _pool(self, pool: int) -> Any:
        found = self._pools.get(pool)
        if found is None:
            raise DriverError("pool", "INVALID_HANDLE", f"no pool {pool:#x}")
        return found

    def _pool_attribute(self, pool: int, name: str) -> int:
        attribute = getattr(self._api.module.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
        return int(self._call("cuMemPoolGetAttribute", self._pool(pool), attribute))

    def _require_size(self, call: str, size: int) -> None:
        self._check(call)
        if size <= 0:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes")

    def _leaked_memory(self) -> list[str]:
        pooled = [
            f"allocation {addr:#x}: {size:,} bytes, pool {pool:#x}" for addr, (_, pool, size) in self._pooled.items()
        ]
        plain = [f"allocation {addr:#x}: {size:,} bytes, plain" for addr, size in self._plain.items()]
        return [*pooled, *plain, *(f"host memory {addr:#x}: {size:,} bytes" for addr, size in self._host.items())]
