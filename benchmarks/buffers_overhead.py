"""What our buffers cost beside the driver: ``manager.gpu(...)`` and ``close`` of a ``BufferManager``, ledger and all,
less the bare driver pair, on the same device, in turns; and what other allocators cost in the same run.

    none   a driver that does nothing: the layers of Python above it, nothing else
    host   the simulated device; the bare pair is its ``pool_alloc`` and ``pool_free``
    cuda   the bare pair is ``cuMemAllocFromPoolAsync`` and ``cuMemFreeAsync`` of ``cuda.bindings`` with nothing around

The bar is for a stream of our own (``Stream.create``), whose handle nobody else has: others are asked at every
allocation whether they are being captured. The collector is off while it runs. Every sample has ``--num`` pairs, so it
has its part of the counting that the ledger puts off. The samples are filed, so that others can be computed.

    python benchmarks/buffers_overhead.py --device cuda --output benchmarks/results/buffers-overhead.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from filing import file_away, parser
from tonnage.buffers import BufferManager, Device, Stream
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB

SIZES = (4096, MiB, 64 * MiB)
BAR_NS = 2000
#: Plain allocations wait for the device: so many fewer pairs a sample.
SLOW = 50

#: Allocates and frees so many times.
Pairs: TypeAlias = Callable[[int], None]


class NullDriver(HostDriver):
    """Its pool takes nothing and gives the same address."""

    def pool_alloc(self, pool: int, size: int, *, stream: int) -> int:  # noqa: ARG002
        return 4096

    def pool_free(self, addr: int, *, stream: int) -> None: ...


def open_driver(device: str) -> Any:
    if device == "none":
        return NullDriver(GiB)
    if device == "host":
        return HostDriver(GiB)
    from tonnage.device.cuda import CudaDriver

    return CudaDriver(0)


def driver_pairs(driver: Any, pool: int, size: int, stream: int) -> Pairs:
    def pairs(num: int) -> None:
        for _ in range(num):
            driver.pool_free(driver.pool_alloc(pool, size, stream=stream), stream=stream)

    return pairs


def bare_pairs(pool: int, size: int, stream: int) -> Pairs:
    from cuda.bindings import driver as cuda

    handle, on = cuda.CUmemoryPool(pool), cuda.CUstream(stream)

    def pairs(num: int) -> None:
        for _ in range(num):
            _, addr = cuda.cuMemAllocFromPoolAsync(size, handle, on)
            cuda.cuMemFreeAsync(addr, on)

    return pairs


def our_pairs(manager: BufferManager, size: int) -> Pairs:
    line = LineKind.TABLES

    def pairs(num: int) -> None:
        for _ in range(num):
            manager.gpu(size, line=line).close()

    return pairs


def call_pairs(alloc: Callable[[], Any], free: Callable[[Any], object] | None = None) -> Pairs:
    """``free`` None: it is enough to drop what ``alloc`` returns."""

    def pairs(num: int) -> None:
        if free is None:
            for _ in range(num):
                alloc()
        else:
            for _ in range(num):
                free(alloc())

    return pairs


def others(size: int) -> Iterator[tuple[str, Pairs]]:
    """What else there is on a card, as far as it is installed; each on its own default stream."""
    from cuda.bindings import driver as cuda

    yield "plain cuMemAlloc, cuMemFree", call_pairs(lambda: cuda.cuMemAlloc(size)[1], cuda.cuMemFree)
    try:
        import torch
    except ImportError:
        print("no torch", file=sys.stderr)
    else:
        device = torch.device("cuda", 0)
        torch.cuda.init()
        raw, delete = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
        yield "torch caching_allocator_alloc, _delete", call_pairs(lambda: raw(size), delete)
        yield "torch.empty", call_pairs(lambda: torch.empty(size, dtype=torch.uint8, device=device))
    try:
        import cupy
    except ImportError:
        print("no CuPy", file=sys.stderr)
    else:
        pool, stream_pool = cupy.cuda.MemoryPool(), cupy.cuda.MemoryAsyncPool()
        yield "CuPy MemoryPool", call_pairs(lambda: pool.malloc(size))
        yield "CuPy MemoryAsyncPool", call_pairs(lambda: stream_pool.malloc(size))
    try:
        import rmm
    except ImportError:
        print("no RMM", file=sys.stderr)
    else:
        made = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=4 * max(SIZES))
        stream_ordered = rmm.mr.CudaAsyncMemoryResource()
        for name, one in (("PoolMemoryResource", made), ("CudaAsyncMemoryResource", stream_ordered)):
            yield (
                f"RMM {name}",
                call_pairs(lambda one=one: one.allocate(size), lambda addr, one=one: one.deallocate(addr, size)),
            )


class Contest:
    """Everything that is compared, on one device. ``own`` is a stream of ours, ``foreign`` one by its handle."""

    def __init__(self, device: str) -> None:
        self.driver, self.name = open_driver(device), device
        self.device = Device(self.driver)
        self.own = Stream.create(self.device)
        self.foreign = Stream(self.device, self.driver.stream_create(priority=0))
        self.ledger = Ledger(0, self.driver.mem_info()[1])
        streams = {"own stream": self.own, "stream 0": Stream(self.device), "foreign stream": self.foreign}
        self.managers = {name: self._manager(name, stream) for name, stream in streams.items()}
        pool = self.device.pool.handle
        if pool is None:
            raise SystemExit(f"{self.device.pool!r}: nothing to measure")
        self.pool = pool

    def _manager(self, name: str, stream: Stream) -> BufferManager:
        made = BufferManager(stream, ledger=self.ledger, owner=name)
        made.gpu(1, line=LineKind.TABLES).close()
        return made

    def entries(self, size: int) -> dict[str, Pairs]:
        """The bare pair first."""
        on = self.own.bare_handle
        through = driver_pairs(self.driver, self.pool, size, on)
        found = {"bare": bare_pairs(self.pool, size, on) if self.name == "cuda" else through}
        if self.name == "cuda":
            found["our driver alone"] = through
        found |= {f"ours, {name}": our_pairs(manager, size) for name, manager in self.managers.items()}
        if self.name == "cuda":
            found |= dict(others(size))
        return found

    def settle(self) -> None:
        self.driver.device_sync()


def time_ns(pairs: Pairs, num: int) -> float:
    start = time.perf_counter_ns()
    pairs(num)
    return (time.perf_counter_ns() - start) / num


def measure(contest: Contest, size: int, *, repeats: int, num: int) -> list[dict[str, Any]]:
    """One row an entry: median, least, and the median of what each round has over its own bare pair."""
    entries = contest.entries(size)
    nums = {name: max(1, num // SLOW) if name.startswith("plain") else num for name in entries}
    samples: dict[str, list[float]] = {name: [] for name in entries}
    for name, pairs in entries.items():
        pairs(nums[name])  # warm
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, pairs in entries.items():
                contest.settle()
                samples[name].append(time_ns(pairs, nums[name]))
    finally:
        gc.enable()
    bare = samples["bare"]
    return [
        {
            "name": name,
            "size_bytes": size,
            "median_ns": round(statistics.median(taken)),
            "least_ns": round(min(taken)),
            "over_ns": round(statistics.median(one - other for one, other in zip(taken, bare, strict=True))),
            "over_least_ns": round(min(taken) - min(bare)),
            "samples_ns": [round(one) for one in taken],
        }
        for name, taken in samples.items()
    ]


def scale(num: int = 20_000) -> dict[str, float]:
    """What small things cost on this machine, ns each: every figure above is made of them. The least of 21."""

    def empty() -> None: ...

    def calls(num: int) -> None:
        for _ in range(num):
            empty()

    def clocks(num: int) -> None:
        for _ in range(num):
            time.monotonic_ns()

    def locks(num: int) -> None:
        for _ in range(num):
            with lock:
                pass

    lock = threading.Lock()
    kinds = {"an empty call": calls, "monotonic_ns": clocks, "a lock": locks}
    return {name: round(min(time_ns(one, num) for _ in range(21)), 1) for name, one in kinds.items()}


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{rows[0]['size_bytes']:,} bytes{'':24} median      least   over the bare pair (least over least), ns a pair"
    )
    for row in rows:
        over = "" if row["name"] == "bare" else f"{row['over_ns']:>10,} ({row['over_least_ns']:,})"
        print(f"  {row['name']:38}{row['median_ns']:>8,} {row['least_ns']:>10,} {over}")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[parser(None)],
        conflict_handler="resolve",  # ``--device`` has one choice more here
    )
    options.add_argument("--device", choices=("none", "host", "cuda"), default="host")
    options.add_argument("--repeats", type=int, default=41)
    options.add_argument("--num", type=int, default=2000, help="pairs a sample")
    asked = options.parse_args()
    contest, small = Contest(asked.device), scale()
    print(", ".join(f"{name} {cost} ns" for name, cost in small.items()))
    rows = []
    for size in SIZES:
        found = measure(contest, size, repeats=asked.repeats, num=asked.num)
        show(found)
        rows += found
    worst = max(row["over_ns"] for row in rows if row["name"] == "ours, own stream")
    print(f"\nat most {worst:,} ns over the bare pair on a stream of our own; the bar is {BAR_NS:,} ns")
    figures = {"device": asked.device, "bar_ns": BAR_NS, "worst_over_ns": worst, "met": worst <= BAR_NS}
    file_away(asked.output, {**figures, "num": asked.num, "scale_ns": small, "rows": rows}, commit=asked.commit)


if __name__ == "__main__":
    main()
