"""Beside another process on one card: what is told apart, what is refused, and that nothing is lost.

1. foreign   a second process takes 3 GiB at a moment that nobody announces; the sampler watches
2. wake      the second process holds what the sleeping memory needs: a clean refusal, then a wake when it is gone
3. cycles    100 times asleep and awake: what is free and what the ledger holds return to where they were
4. steady    allocations, frees and copies as a server makes them, step after step: no page-table edit

    python benchmarks/buffers_neighbours.py --device cuda --output benchmarks/results/buffers-neighbours.json
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from buffers_growth import open_driver
from buffers_sleep import Bench
from filing import file_away, parser
from tonnage.buffers import BufferManager, Device, Stream, VaArena
from tonnage.device.cuda import CudaDriver
from tonnage.device.fault import FaultDriver
from tonnage.device.reading import Sampler, take_reading
from tonnage.errors import CannotMaterialize
from tonnage.ledger import Ledger
from tonnage.terms import How, LineKind, MemoryKind
from tonnage.units import GiB, MiB

TAKEN_BYTES, TOLERANCE_BYTES, ACCOUNTS_TOLERANCE_BYTES = 3 * GiB, 32 * MiB, 64 * MiB
NUM_CYCLES, NUM_STEPS = 100, 1000
EDITS = frozenset({"va_reserve", "va_free", "phys_create", "phys_release", "map", "unmap", "set_access"})

NEIGHBOUR = """
import sys, time
from tonnage.device.cuda import CudaDriver
driver = CudaDriver(0)
print("ready", flush=True)
held = []
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word == "take":
        time.sleep(float(number.split()[1]))
        held.append(driver.mem_alloc(int(number.split()[0])))
    elif word == "drop":
        while held:
            driver.mem_free(held.pop())
    print("done", flush=True)
"""


class Neighbour:
    """A process of its own with a context of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )
        self._answer()

    def take(self, num_bytes: int, *, after_s: float = 0.0, wait: bool = True) -> None:
        self._say(f"take {num_bytes} {after_s}")
        if wait:
            self._answer()

    def drop(self) -> None:
        self._say("drop")
        self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the second process has died")


def foreign(neighbour: Neighbour) -> dict[str, Any]:
    driver = open_driver("cuda")
    ledger = Ledger(0, driver.mem_info()[1], host_is_device=False)
    context = ledger.open(owner="context", line=LineKind.CONTEXT, memory=MemoryKind.GPU, how=How.REMAINDER)
    context.sampled(driver.own_bytes() or 0)
    stream = Stream.create(Device(driver))
    manager = BufferManager(stream, ledger=ledger, owner="engine")
    arena = VaArena(stream, ledger=ledger, owner="kv", line=LineKind.KV, reserve_bytes=8 * GiB)
    arena.commit(8 * GiB)
    buffers = [manager.gpu(size, line=LineKind.TABLES) for size in (MiB, 300 * MiB, 7 * MiB + 3)]

    def read() -> Any:
        return take_reading(driver, phase="sampled", ledger=ledger, pool=stream.device.pool)

    ledger.sample(read())
    before = ledger.snapshot()
    with Sampler(driver, ledger, interval_s=0.1, read=read):
        neighbour.take(TAKEN_BYTES, after_s=random.uniform(0.3, 1.5), wait=False)
        time.sleep(3)
        neighbour._answer()
    after = ledger.snapshot()
    neighbour.drop()
    for one in [*buffers, arena]:
        one.close()
    assert before.own is not None
    assert after.own is not None
    assert after.unattributed is not None
    return {
        "own_source": after.own_source,
        "foreign_growth_bytes": after.foreign - before.foreign,
        "foreign_error_bytes": after.foreign - before.foreign - TAKEN_BYTES,
        "own_change_bytes": after.own - before.own,
        "accounts_against_nvml_bytes": -after.unattributed,
        "met": {
            "foreign within 32 MiB": abs(after.foreign - before.foreign - TAKEN_BYTES) <= TOLERANCE_BYTES,
            "own unchanged": after.own == before.own,
            "accounts within 64 MiB of NVML": abs(after.unattributed) <= ACCOUNTS_TOLERANCE_BYTES,
        },
    }


def wake(neighbour: Neighbour) -> dict[str, Any]:
    bench = Bench("cuda")
    size_bytes = 4 * GiB
    arena = bench.arena(size_bytes, "pinned", 256)
    bench.paint(arena)
    virtual = bench.stream.device.virtual
    virtual.release("kv")
    free = bench.driver.mem_info()[0]
    neighbour.take(free - size_bytes // 2)
    refused = ""
    try:
        virtual.materialize("kv")
    except CannotMaterialize as error:
        refused = str(error)
    asleep = arena.is_asleep
    neighbour.drop()
    virtual.materialize("kv").sync()
    wrong = bench.num_wrong(arena)
    arena.close()
    return {
        "refusal": refused,
        "num_wrong_probes": wrong,
        "met": {"refused cleanly": bool(refused) and asleep, "woken later with its contents": wrong == 0},
    }


def cycles(neighbour: Neighbour) -> dict[str, Any]:
    """Every tenth wake is first tried while the neighbour holds too much."""
    bench = Bench("cuda")
    size_bytes = 2 * GiB
    arena = bench.arena(size_bytes, "pinned", 256)
    bench.paint(arena)
    virtual = bench.stream.device.virtual
    virtual.release("kv")
    virtual.materialize("kv").sync()
    free, fds, num_refused = bench.driver.mem_info()[0], len(os.listdir("/proc/self/fd")), 0
    accounted = bench.ledger.accounted_bytes
    for number in range(NUM_CYCLES):
        virtual.release("kv")
        if number % 10 == 0:
            neighbour.take(bench.driver.mem_info()[0] - size_bytes // 2)
            try:
                virtual.materialize("kv")
            except CannotMaterialize:
                num_refused += 1
            neighbour.drop()
        virtual.materialize("kv").sync()
    leaked_bytes = free - bench.driver.mem_info()[0]
    result = {
        "num_cycles": NUM_CYCLES,
        "num_refused": num_refused,
        "leaked_bytes": leaked_bytes,
        "leaked_fds": len(os.listdir("/proc/self/fd")) - fds,
        "num_wrong_probes": bench.num_wrong(arena),
    }
    same_books = bench.ledger.accounted_bytes == accounted
    arena.close()
    clean = leaked_bytes == 0 and result["leaked_fds"] == 0 and result["num_wrong_probes"] == 0
    return {**result, "met": {"no leak in 100 cycles": clean and same_books and num_refused == NUM_CYCLES // 10}}


def steady(kind: str = "cuda") -> dict[str, Any]:
    driver = open_driver(kind)
    counting = FaultDriver(driver, calls=EDITS)
    ledger = Ledger(0, driver.mem_info()[1])
    stream = Stream.create(Device(counting))
    manager = BufferManager(stream, ledger=ledger, owner="engine")
    arena = VaArena(stream, ledger=ledger, owner="kv", line=LineKind.KV, reserve_bytes=256 * MiB)
    arena.commit(256 * MiB)
    generator, live = random.Random(5), []
    pinned = manager.pinned_pool(64 * 1024, line=LineKind.TABLES)
    mirror = manager.gpu(64 * 1024, line=LineKind.TABLES)

    def step() -> None:
        live.append(manager.gpu(generator.choice((4096, 65_536, 1_000_000)), line=LineKind.TRANSIENT))
        manager.copy(src=pinned, dst=mirror)
        if len(live) > 8:
            live.pop(generator.randrange(8)).close()

    _repeat(step, 100)
    stream.sync()
    counting.arm(None, calls=EDITS)
    _repeat(step, NUM_STEPS)
    stream.sync()
    edits = counting.num_calls
    for one in [*live, pinned, mirror, arena]:
        one.close()
    return {
        "num_steps": NUM_STEPS,
        "num_edits": edits,
        "us_a_look": _median_us(lambda: driver.mem_info()),
        "us_a_reading": _median_us(lambda: take_reading(driver, phase="steady", ledger=ledger)),
        "us_a_graph_check": _graph_check_us(stream),
        "met": {"no page-table edit": edits == 0},
    }


def _graph_check_us(stream: Stream) -> float:
    """What asking whether all that a graph replays over is mapped adds to its launch."""
    graphs = stream.device.graphs
    ledger = Ledger(0, GiB)
    arenas = [
        VaArena(stream, ledger=ledger, owner=f"arena {number}", line=LineKind.KV, reserve_bytes=2 * MiB)
        for number in range(8)
    ]
    for arena in arenas:
        arena.commit(2 * MiB)
    with graphs.capture("decode") as capture:
        for arena in arenas:
            capture.touch(arena.address, 2 * MiB)
    found = _median_us(lambda: graphs.check("decode"))
    graphs.destroy("decode")
    for arena in arenas:
        arena.close()
    return found


def _median_us(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(500):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return sorted(samples)[len(samples) // 2] / 1e3


def _repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def main() -> int:
    arguments = parser(__doc__).parse_args()
    figures: dict[str, Any] = {}
    if arguments.device == "cuda":
        CudaDriver(0)
        neighbour = Neighbour()
        for part in (foreign, wake, cycles):
            figures[part.__name__] = part(neighbour)
        neighbour.close()
    figures["steady"] = steady(arguments.device)
    for name, found in figures.items():
        print(name, found)
    file_away(arguments.output, figures, commit=arguments.commit)
    return 0 if all(all(found["met"].values()) for found in figures.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
