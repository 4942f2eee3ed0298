"""What our buffers cost beside the driver: allocate and close through a ``BufferManager``, ledger and all, less the
bare driver pair, on the same device, in turns.

On the host device the bare pair is ``pool_alloc`` and ``pool_free`` of the driver; on a card it is the two calls of
``cuda.bindings`` with nothing around them.

    python benchmarks/buffers_overhead.py --device cuda --json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB

SIZES = (4096, MiB, 64 * MiB)
BAR_NS = 2000


def host_pair(driver: HostDriver, pool: int, size: int) -> Callable[[int], None]:
    def pair(num: int) -> None:
        for _ in range(num):
            driver.pool_free(driver.pool_alloc(pool, size, stream=0), stream=0)

    return pair


def cuda_pair(pool: int, size: int, stream: int) -> Callable[[int], None]:
    from cuda.bindings import driver as cuda

    handle, on = cuda.CUmemoryPool(pool), cuda.CUstream(stream)

    def pair(num: int) -> None:
        for _ in range(num):
            _, addr = cuda.cuMemAllocFromPoolAsync(size, handle, on)
            cuda.cuMemFreeAsync(addr, on)

    return pair


def our_pair(manager: BufferManager, size: int) -> Callable[[int], None]:
    def pair(num: int) -> None:
        for _ in range(num):
            manager.gpu(size, line=LineKind.TABLES).close()

    return pair


def time_ns(pair: Callable[[int], None], num: int) -> float:
    start = time.perf_counter_ns()
    pair(num)
    return (time.perf_counter_ns() - start) / num


def measure(device: str, *, repeats: int, num: int, own_stream: bool) -> list[dict[str, Any]]:
    driver: Any
    if device == "host":
        driver = HostDriver(GiB)
    else:
        from tonnage.device.cuda import CudaDriver

        driver = CudaDriver(0)
    tonnage_device = Device(driver)
    stream = Stream.create(tonnage_device) if own_stream else Stream(tonnage_device)
    manager = BufferManager(stream, ledger=Ledger(0, driver.mem_info()[1]), owner="benchmark")
    rows = []
    for size in SIZES:
        manager.gpu(size, line=LineKind.TABLES).close()
        pool = tonnage_device.pool.handle
        if pool is None:
            raise SystemExit(f"{tonnage_device.pool!r}: nothing to measure")
        bare = host_pair(driver, pool, size) if device == "host" else cuda_pair(pool, size, stream.handle)
        ours = our_pair(manager, size)
        bare_ns, ours_ns = [], []
        gc.disable()
        for _ in range(repeats):
            bare_ns.append(time_ns(bare, num))
            ours_ns.append(time_ns(ours, num))
            stream.sync()
        gc.enable()
        low, high = statistics.median(bare_ns), statistics.median(ours_ns)
        rows.append(
            {
                "size_bytes": size,
                "bare_ns": round(low),
                "ours_ns": round(high),
                "over_ns": round(high - low),
                "times": round(high / low, 2),
                "samples_bare_ns": [round(one) for one in bare_ns],
                "samples_ours_ns": [round(one) for one in ours_ns],
            }
        )
    manager.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--own-stream", action="store_true", help="a stream of its own, which may be captured")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--num", type=int, default=2000, help="pairs a sample")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked.device, repeats=asked.repeats, num=asked.num, own_stream=asked.own_stream)
    if asked.json:
        print(json.dumps({"command": sys.argv, "python": platform.python_version(), "bar_ns": BAR_NS, "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['size_bytes']:>12,} bytes: bare {row['bare_ns']:>7,} ns, ours {row['ours_ns']:>7,} ns, "
            f"{row['over_ns']:>6,} ns over, {row['times']} times"
        )


if __name__ == "__main__":
    main()
