"""The OOM loop over every public operation of the buffers: each driver call that it makes fails in turn.

Whatever fails, the operation succeeds or raises one of our exceptions, the books agree with what is held, the operation
can be repeated, and in the end nothing is left. There are at least as many points as the operation makes calls.

once      one call fails, whichever it is
for ever  from one call on the device gives nothing and does nothing, but takes back
dead      from one call on everything fails: what could not be given back is poisoned or kept, and goes in the end
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tonnage.buffers import (
    Buffer,
    BufferManager,
    Device,
    Restore,
    StableBuffer,
    Stream,
    VaArena,
    give_back,
    scope,
    take_back,
)
from tonnage.device.driver import Driver
from tonnage.device.fault import ALLOCATING, RELEASING, FaultDriver
from tonnage.errors import DriverError, DriverOOM, TonnageError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from devices import cuda, host
from loop import EVERY_CALL, num_points

PAGES = 8
MODES = {"once": (EVERY_CALL, False), "for ever": (EVERY_CALL - RELEASING, True), "dead": (EVERY_CALL, True)}


class AnyCall(FaultDriver):
    """What allocates fails for want of memory, everything else as a driver fails."""

    def _inject(self, call: str, which: str, error: type[DriverError]) -> None:
        super()._inject(call, which, DriverOOM if call in ALLOCATING else DriverError)


class Bench:
    """A device whose calls can fail, with everything that was made on it."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.fault = driver, AnyCall(driver)
        self.before = set(driver.leaks())  # type: ignore[attr-defined]
        self.page = driver.capabilities().page_bytes
        self.ledger = Ledger(0, driver.mem_info()[1])
        self.device = Device(self.fault)
        self.stream = Stream(self.device)
        self.manager = BufferManager(self.stream, ledger=self.ledger, owner="engine")
        self.kept: list[Any] = []

    def keep(self, thing: Any) -> Any:
        self.kept.append(thing)
        return thing

    def buffer(self, kind: MemoryKind, num_pages: int = 1) -> Buffer:
        return self.keep(self.manager.allocate(kind, num_pages * self.page, line=LineKind.TABLES))

    def arena(self, num_pages: int = 0, **arguments: Any) -> VaArena:
        arena = VaArena(
            self.stream, ledger=self.ledger, owner="kv", line=LineKind.KV, reserve_bytes=PAGES * self.page,
            chunk_bytes=2 * self.page, **arguments,
        )  # fmt: skip
        self.keep(arena).commit(num_pages * self.page)
        return arena

    def asleep(self, restore: Restore) -> VaArena:
        arena = self.arena(5, tag="kv", restore=restore)
        with scope("kv", restore=restore):
            self.buffer(MemoryKind.GPU, 2)
        self.device.virtual.release("kv")
        return arena

    def awake(self, restore: Restore) -> VaArena:
        arena = self.arena(5, tag="kv", restore=restore)
        with scope("kv", restore=restore):
            self.buffer(MemoryKind.GPU, 2)
        return arena

    def held_bytes(self) -> int:
        """Physical bytes of all that is held, counted by ourselves."""
        return sum(_held(thing) for thing in self.kept)

    def finish(self) -> None:
        self.fault.arm(None)
        self.device.virtual.sweep()
        for thing in self.kept:
            thing.close()
        self.device.fences.quiesce()
        self.manager.trim_to(0, sync=True)
        self.device.virtual.sweep()
        assert self.ledger.accounted_bytes == 0
        for entry in self.ledger.snapshot().entries:
            assert (entry.requested_bytes, entry.num_live) == (0, 0), entry
        if self.device.pool.handle is not None:
            self.driver.pool_destroy(self.device.pool.handle)
        assert set(self.driver.leaks()) <= self.before  # type: ignore[attr-defined]


def _held(thing: Any) -> int:
    if isinstance(thing, Buffer):
        return thing.physical_bytes if thing.base else 0
    arena = thing.arena if isinstance(thing, StableBuffer) else thing
    return 0 if arena.is_asleep else arena.committed_bytes + arena.leftover_bytes


@dataclass(frozen=True)
class Operation:
    """``prepare`` makes what is needed, undisturbed; ``act`` is what fails, and may be called again after it did.

    ``booked``: whether the ledger must hold at every moment exactly what the bench holds. Memory under a tag is in
    quarantine between free and unmap, and booked until it is gone; so is what could not even be given back.
    """

    act: Callable[[Bench, Any], Any]
    prepare: Callable[[Bench], Any] = lambda bench: None
    booked: bool = True


def _tensors_of(kind: MemoryKind) -> dict[str, Operation]:
    return {
        f"{kind}: allocate": Operation(lambda bench, _: bench.buffer(kind)),
        f"{kind}: close": Operation(lambda bench, one: one.close(), lambda bench: bench.buffer(kind)),
        f"{kind}: resize": Operation(
            lambda bench, one: one.resize(3 * bench.page), lambda bench: bench.buffer(kind)
        ),
        f"{kind}: set_zero": Operation(
            lambda bench, one: bench.manager.set_zero(one), lambda bench: bench.buffer(kind)
        ),
        f"{kind}: copy to the device": Operation(
            lambda bench, pair: bench.manager.copy(src=pair[0], dst=pair[1]),
            lambda bench: (bench.buffer(kind), bench.buffer(MemoryKind.GPU)),
        ),
        f"{kind}: copy_from": Operation(
            lambda bench, one: bench.keep(bench.manager.copy_from(one, kind, line=LineKind.TABLES)),
            lambda bench: bench.buffer(MemoryKind.GPU),
            booked=False,
        ),
    }  # fmt: skip


def _sleeping(restore: Restore) -> dict[str, Operation]:
    return {
        f"release, {restore}": Operation(
            lambda bench, _: bench.device.virtual.release("kv"), lambda bench: bench.awake(restore), booked=False
        ),
        f"materialize, {restore}": Operation(
            lambda bench, _: bench.device.virtual.materialize("kv").sync(),
            lambda bench: bench.asleep(restore),
            booked=False,
        ),
    }


def _recorded(bench: Bench) -> Buffer:
    buffer = bench.buffer(MemoryKind.GPU)
    buffer.record_stream(Stream.create(bench.device))
    return buffer


def _in_scope(bench: Bench, _: Any) -> None:
    with scope("adapters", restore=Restore.CPU):
        bench.buffer(MemoryKind.GPU, 3)


def _stable(bench: Bench, num_pages: int) -> StableBuffer:
    return bench.keep(
        StableBuffer.make(
            bench.stream, ledger=bench.ledger, owner="scratch", line=LineKind.SCRATCH, most_bytes=PAGES * bench.page,
            num_bytes=num_pages * bench.page, chunk_bytes=2 * bench.page,
        )
    )  # fmt: skip


def _given(bench: Bench) -> VaArena:
    arena = bench.arena(7)
    give_back(arena, 4 * bench.page, deadline_s=5, vacate=lambda keep: keep)
    return arena


OPERATIONS: dict[str, Operation] = {
    **{name: one for kind in MemoryKind if kind is not MemoryKind.IPC_NVLS for name, one in _tensors_of(kind).items()},
    **{name: one for restore in Restore for name, one in _sleeping(restore).items()},
    "scope: allocate": Operation(_in_scope, booked=False),
    "scope: close": Operation(
        lambda bench, _: bench.kept[-1].close(), lambda bench: _in_scope(bench, None), booked=False
    ),
    "close with a recorded stream": Operation(lambda bench, one: one.close(), _recorded),
    "stats with sync": Operation(lambda bench, _: bench.manager.stats(sync=True)),
    "trim": Operation(
        lambda bench, _: bench.manager.trim_to(0, sync=True),
        lambda bench: [bench.buffer(kind).close() for kind in (MemoryKind.GPU, MemoryKind.PINNED_POOL)],
    ),
    "manager: close with trim": Operation(
        lambda bench, manager: manager.close(),
        lambda bench: BufferManager(bench.stream, ledger=bench.ledger, owner="engine", trim_on_close=True),
    ),
    "arena: make and commit": Operation(lambda bench, _: bench.arena(5)),
    "arena: make with zeros": Operation(lambda bench, _: bench.arena(3, zero_on_commit=True, zero_ranges=((0, 512),))),
    "arena: commit more": Operation(lambda bench, one: one.commit(7 * bench.page), lambda bench: bench.arena(1)),
    "arena: decommit": Operation(lambda bench, one: one.decommit(2 * bench.page), lambda bench: bench.arena(7)),
    "arena: close": Operation(lambda bench, one: one.close(), lambda bench: bench.arena(7)),
    "stable: grow": Operation(lambda bench, one: one.grow(7 * bench.page), lambda bench: _stable(bench, 1)),
    "stable: shrink": Operation(lambda bench, one: one.shrink(bench.page), lambda bench: _stable(bench, 7)),
    "give back": Operation(
        lambda bench, one: give_back(one, 4 * bench.page, deadline_s=5, vacate=lambda keep: keep),
        lambda bench: bench.arena(7),
    ),
    "take back": Operation(lambda bench, one: take_back(one, 4 * bench.page), _given),
    "fences: mark and wait": Operation(lambda bench, _: _mark(bench)),
    "fences: quiesce": Operation(lambda bench, _: bench.device.fences.quiesce(timeout_s=5)),
}


def _mark(bench: Bench) -> None:
    mark = bench.device.fences.mark()
    try:
        mark.wait()
    finally:
        mark.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(host, id="host"), pytest.param(cuda, id="cuda", marks=pytest.mark.gpu)],
)
def open_driver(request: pytest.FixtureRequest) -> Iterator[Callable[[], Driver]]:
    """A fresh host every time; one card for all, whose context is dear."""
    if request.param is host:
        yield host
    else:
        driver = cuda()
        yield lambda: driver
        driver.close()  # type: ignore[attr-defined]


def num_calls(operation: Operation, driver: Driver, calls: frozenset[str]) -> int:
    bench = Bench(driver)
    state = operation.prepare(bench)
    bench.fault.arm(None, calls=calls)
    operation.act(bench, state)
    made = bench.fault.num_calls
    bench.finish()
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_call_of_an_operation_may_fail(open_driver: Callable[[], Driver], name: str, mode: str) -> None:
    operation, (calls, forever) = OPERATIONS[name], MODES[mode]
    made = num_calls(operation, open_driver(), calls)

    def attempt(nth: int) -> int:
        bench = Bench(open_driver())
        state = operation.prepare(bench)
        bench.fault.arm(nth, forever=forever, calls=calls)
        told = _told(_raised_by(lambda: operation.act(bench, state)))
        assert not told or "INJECTED" in told
        injected = bench.fault.num_injected
        bench.fault.arm(None)
        if mode != "dead":
            if operation.booked:
                assert bench.ledger.accounted_bytes == bench.held_bytes()
            operation.act(bench, state)
        bench.finish()
        return injected

    reached = num_points(attempt)
    print(f"\n  {name}, {mode}: {reached} points, {made} calls", end="")
    assert reached >= made


def _raised_by(act: Callable[[], Any]) -> TonnageError | None:
    try:
        act()
    except TonnageError as error:
        return error
    return None


def _told(error: BaseException | None) -> str:
    told = ""
    while error is not None:
        told, error = f"{told} {error}", error.__cause__ or error.__context__
    return told
