"""Releasing and materialising tagged memory: time each way, transfer rate, and whether the memory is really free.

Mode none moves no bytes: what is timed is the page table, and the driver clearing pages that were given back a moment
before: asleep for ``pause_s`` it does that beside us. Mode pinned is compared with the rate of one large copy measured
in the same run, from the second cycle on (the first pins the host memory). ``given_back`` is what the device says after
the release, ``left`` what this process still holds beyond its state before. torch_memory_saver, where it is installed,
does the same in a process of its own. The bars are for a card; the host runs the same code and is not timed.

    python benchmarks/buffers_sleep.py --device cuda --output benchmarks/results/buffers-sleep.json
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from typing import Any

from buffers_growth import open_driver
from filing import file_away, parser
from tonnage.buffers import BufferManager, Device, Restore, Stream, VaArena
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB

SIZES = {"cuda": {"none": 40 * GiB, "pinned": 16 * GiB, "cpu": 4 * GiB}}
SIZES["host"] = {mode: size // 256 for mode, size in SIZES["cuda"].items()}
NUM_CYCLES = {"none": 8, "pinned": 4, "cpu": 3}
BAR_MS, BAR_RATE = 45.0, 0.85
#: How long the memory sleeps before it is woken, in seconds; the bar is for the last.
PAUSES_S = (0.0, 0.1, 1.0)
NUM_STRIPES, PROBE_BYTES = 64, 4096


class Bench:
    def __init__(self, kind: str) -> None:
        self.kind, self.driver = kind, open_driver(kind)
        self.ledger = Ledger(0, self.driver.mem_info()[1], host_is_device=kind == "host")
        self.stream = Stream.create(Device(self.driver))
        self.manager = BufferManager(self.stream, ledger=self.ledger, owner="bench")

    def arena(self, size_bytes: int, mode: str, handle_mib: int) -> VaArena:
        arena = VaArena(
            self.stream, ledger=self.ledger, owner="kv", line=LineKind.KV, reserve_bytes=size_bytes, tag="kv",
            restore=Restore(mode), chunk_bytes=handle_mib * MiB,
        )  # fmt: skip
        arena.commit(size_bytes)
        return arena

    def paint(self, arena: VaArena) -> None:
        """Another byte in every stripe."""
        stripe = arena.size_bytes // NUM_STRIPES
        for number in range(NUM_STRIPES):
            self.driver.fill(arena.address + number * stripe, number + 1, stripe, stream=self.stream.handle)
        self.stream.sync()

    def num_wrong(self, arena: VaArena) -> int:
        """Stripes whose first, middle or last bytes are not what was painted."""
        stripe, wrong = arena.size_bytes // NUM_STRIPES, 0
        probe = self.manager.cpu(PROBE_BYTES, line=LineKind.TABLES)
        for number in range(NUM_STRIPES):
            for at in (0, stripe // 2, stripe - PROBE_BYTES):
                source = arena.address + number * stripe + at
                self.driver.copy(probe.address, source, PROBE_BYTES, stream=self.stream.handle)
                self.stream.sync()
                wrong += _bytes_at(probe.address) != bytes([number + 1]) * PROBE_BYTES
        probe.close()
        return wrong

    def copy_rate(self, size_bytes: int) -> dict[str, float]:
        """Bytes a second of one large copy each way between pinned and device memory, the best of three."""
        pinned = self.driver.host_alloc(size_bytes, flags=0)
        device = self.driver.mem_alloc(size_bytes)
        self.driver.fill(device, 1, size_bytes, stream=self.stream.handle)
        self.driver.copy(pinned, device, size_bytes, stream=self.stream.handle)
        self.stream.sync()
        rates = {}
        for name, dst, src in (("to_host", pinned, device), ("to_device", device, pinned)):
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                self.driver.copy(dst, src, size_bytes, stream=self.stream.handle)
                self.stream.sync()
                seconds.append(time.perf_counter() - start)
            rates[name] = size_bytes / min(seconds)
        self.driver.mem_free(device)
        self.driver.host_free(pinned)
        return rates

    def own_bytes(self) -> int | None:
        """What this process holds on the card; on the host its heap moves for reasons of its own."""
        return self.driver.own_bytes() if self.kind == "cuda" else None

    def cycles(self, mode: str, size_bytes: int, handle_mib: int, *, pause_s: float = 0.0) -> dict[str, Any]:
        before = self.own_bytes()
        arena = self.arena(size_bytes, mode, handle_mib)
        self.paint(arena)
        virtual, raw = self.stream.device.virtual, []
        for _ in range(NUM_CYCLES[mode]):
            free = self.driver.mem_info()[0]
            start = time.perf_counter()
            released = virtual.release("kv")
            middle = time.perf_counter()
            given_bytes, left = self.driver.mem_info()[0] - free, self.own_bytes()
            time.sleep(pause_s)
            again = time.perf_counter()
            virtual.materialize("kv").sync()
            end = time.perf_counter()
            raw.append({
                "release_ms": (middle - start) * 1e3, "materialize_ms": (end - again) * 1e3,
                "freed_bytes": released.freed_bytes, "given_back_bytes": given_bytes,
                "left_bytes": None if left is None or before is None else left - before,
            })  # fmt: skip
        wrong = None if arena_discards(mode) else self.num_wrong(arena)
        arena.close()
        # the first cycle pays for what is made once
        median = {key: _median([cycle[key] for cycle in raw[1:]]) for key in ("release_ms", "materialize_ms")}
        return {"size_bytes": size_bytes, "handle_mib": handle_mib, **median, "num_wrong_probes": wrong, "raw": raw}


def is_free(found: dict[str, Any]) -> bool:
    """Nothing left in any cycle, and all given back in all but the first, in which pinning takes page tables."""
    is_back = all(cycle["given_back_bytes"] == found["size_bytes"] for cycle in found["raw"][1:])
    return is_back and not any(cycle["left_bytes"] for cycle in found["raw"])


def arena_discards(mode: str) -> bool:
    return Restore(mode).discards


def _bytes_at(address: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, PROBE_BYTES)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


SAVER = """
import json, os, time, torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
size, cycles = {size}, {cycles}
with saver.region(tag="kv", enable_cpu_backup={backup}):
    tensor = torch.ones(size, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
raw = []
for _ in range(cycles):
    t0 = time.perf_counter(); saver.pause("kv"); torch.cuda.synchronize(); t1 = time.perf_counter()
    saver.resume("kv"); torch.cuda.synchronize(); t2 = time.perf_counter()
    raw.append(dict(release_ms=(t1 - t0) * 1e3, materialize_ms=(t2 - t1) * 1e3))
print(json.dumps(raw), flush=True)
os._exit(0)  # at an orderly exit its allocator ends the process with an error
"""


def torch_memory_saver(mode: str, size_bytes: int) -> dict[str, Any]:
    """The same cycles by the other library, or why not."""
    code = SAVER.format(size=size_bytes, cycles=NUM_CYCLES[mode], backup=mode != "none")
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        raw = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return {"not_run": str(told).strip().splitlines()[-1:]}
    median = {key: _median([cycle[key] for cycle in raw[1:]]) for key in ("release_ms", "materialize_ms")}
    return {"size_bytes": size_bytes, **median, "raw": raw}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--handle-mib", type=int, nargs="*", default=[256])
    arguments = options.parse_args()
    bench, sizes = Bench(arguments.device), SIZES[arguments.device]
    figures: dict[str, Any] = {}
    for handle_mib, pause_s in itertools.product(arguments.handle_mib, PAUSES_S):
        found = bench.cycles("none", sizes["none"], handle_mib, pause_s=pause_s)
        figures[f"none, handles of {handle_mib} MiB, asleep for {pause_s} s"] = found
        print(
            f"none, {handle_mib} MiB, {pause_s} s: release {found['release_ms']:.1f} ms, "
            f"materialise {found['materialize_ms']:.1f}"
        )
    rate = figures["copy_rate"] = bench.copy_rate(sizes["pinned"] // 2)
    shares = {}
    for mode in ("pinned", "cpu"):
        found = figures[mode] = bench.cycles(mode, sizes[mode], arguments.handle_mib[0])
        for key, way in (("release_ms", "to_host"), ("materialize_ms", "to_device")):
            shares[mode, way] = sizes[mode] / (found[key] / 1e3) / rate[way]
            found[f"share_of_copy_rate_{way}"] = round(shares[mode, way], 3)
        print(mode, {key: value for key, value in found.items() if key != "raw"})
    if arguments.device == "cuda":
        for mode in ("none", "pinned"):
            figures[f"torch_memory_saver {mode}"] = found = torch_memory_saver(mode, sizes[mode])
            print("torch_memory_saver", mode, {key: value for key, value in found.items() if key != "raw"})
    longest = [figures[f"none, handles of {size} MiB, asleep for {PAUSES_S[-1]} s"] for size in arguments.handle_mib]
    slowest = min(max(one["release_ms"], one["materialize_ms"]) for one in longest)
    met = {
        f"none within {BAR_MS} ms each way": slowest <= BAR_MS,
        f"pinned at {BAR_RATE} of the copy rate": min(shares["pinned", way] for way in rate) >= BAR_RATE,
        "all contents right": figures["pinned"]["num_wrong_probes"] == figures["cpu"]["num_wrong_probes"] == 0,
        "memory really free": all(is_free(one) for one in (*longest, figures["pinned"], figures["cpu"])),
    }
    if arguments.device == "host":
        met = {name: holds for name, holds in met.items() if " ms " not in name and "rate" not in name}
    for name, holds in met.items():
        print(f"{name}: {'met' if holds else 'NOT met'}")
    file_away(arguments.output, {"figures": figures, "met": met}, commit=arguments.commit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
