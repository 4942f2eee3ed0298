"""A buffer that grows in place against torch's ``resize_``: time, addresses, bytes copied, and the most memory held.

64 MiB to 8 GiB in steps of 64 MiB on a card, 1 MiB to 128 MiB in steps of 1 MiB on the host. ``peak`` is the most the
device had in use beyond what it had before, seen after every step; for torch it is what its allocator reserved.

    python benchmarks/buffers_growth.py --device cuda --output benchmarks/results/buffers-growth.json
"""

from __future__ import annotations

import time
from typing import Any

from filing import file_away, parser
from tonnage.buffers import Device, StableBuffer, Stream
from tonnage.device.driver import Driver
from tonnage.device.fault import FaultDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB

NUM_STEPS = 128
STEP_BYTES = {"cuda": 64 * MiB, "host": MiB}
WATCHED = frozenset({"copy", "fill", "phys_create", "map", "set_access", "unmap", "phys_release"})


def open_driver(kind: str) -> Driver:
    if kind == "cuda":
        from tonnage.device.cuda import CudaDriver

        return CudaDriver(0)
    from tonnage.device.host import HostDriver

    return HostDriver(GiB, page_bytes=64 * 1024)


def in_place(driver: Driver, step_bytes: int) -> dict[str, Any]:
    counting = FaultDriver(driver, calls=WATCHED)
    most_bytes = NUM_STEPS * step_bytes
    ledger = Ledger(0, driver.mem_info()[1])
    stream = Stream(Device(counting))
    before_bytes = driver.mem_info()[0]
    buffer = StableBuffer.make(stream, ledger=ledger, owner="growth", line=LineKind.SCRATCH, most_bytes=most_bytes)
    addresses, peak_bytes, step_us = {buffer.address}, 0, []
    for number in range(1, NUM_STEPS + 1):
        start = time.perf_counter_ns()
        buffer.grow(number * step_bytes)
        step_us.append((time.perf_counter_ns() - start) / 1e3)
        addresses.add(buffer.address)
        peak_bytes = max(peak_bytes, before_bytes - driver.mem_info()[0])
    calls = dict(counting.by_call)
    buffer.close()
    return {
        "num_addresses": len(addresses),
        "num_copies": calls.get("copy", 0),
        "final_bytes": most_bytes,
        "peak_bytes": peak_bytes,
        "peak_over_final": round(peak_bytes / most_bytes, 4),
        "us_a_step": {"median": sorted(step_us)[len(step_us) // 2], "most": max(step_us)},
        "ms": sum(step_us) / 1e3,
        "driver_calls": calls,
        "raw_step_us": [round(us, 1) for us in step_us],
    }


def with_torch(step_bytes: int, kind: str) -> dict[str, Any]:
    """``resize_`` keeps the contents: a new allocation, a copy, and the old one is given to the cache."""
    import torch

    device = "cuda" if kind == "cuda" else "cpu"
    tensor = torch.empty(step_bytes, dtype=torch.uint8, device=device)
    addresses, copied_bytes, step_us = {tensor.data_ptr()}, 0, []
    for number in range(2, NUM_STEPS + 1):
        before = tensor.data_ptr()
        start = time.perf_counter_ns()
        tensor.resize_(number * step_bytes)
        if kind == "cuda":
            torch.cuda.synchronize()
        step_us.append((time.perf_counter_ns() - start) / 1e3)
        if tensor.data_ptr() != before:
            copied_bytes += (number - 1) * step_bytes
        addresses.add(tensor.data_ptr())
    most_bytes = NUM_STEPS * step_bytes
    found: dict[str, Any] = {
        "num_addresses": len(addresses),
        "copied_bytes": copied_bytes,
        "ms": sum(step_us) / 1e3,
        "us_a_step": {"median": sorted(step_us)[len(step_us) // 2], "most": max(step_us)},
    }
    if kind == "cuda":
        found["reserved_peak_bytes"] = torch.cuda.max_memory_reserved()
        found["reserved_peak_over_final"] = round(torch.cuda.max_memory_reserved() / most_bytes, 4)
        found["allocated_peak_over_final"] = round(torch.cuda.max_memory_allocated() / most_bytes, 4)
    return found


def main() -> int:
    arguments = parser(__doc__).parse_args()
    step_bytes = STEP_BYTES[arguments.device]
    ours = in_place(open_driver(arguments.device), step_bytes)
    torchs = with_torch(step_bytes, arguments.device)
    holds = ours["num_addresses"] == 1 and ours["num_copies"] == 0 and ours["peak_bytes"] == ours["final_bytes"]
    for name, found in (("in place", ours), ("torch resize_", torchs)):
        print(name, {key: value for key, value in found.items() if not key.startswith("raw")})
    print("no address change, no copy, peak = final:", "met" if holds else "NOT met")
    file_away(arguments.output, {"step_bytes": step_bytes, "ours": ours, "torch": torchs}, commit=arguments.commit)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
