"""Fail every allocation of a scenario in turn, once and for ever: it succeeds or reports, and the books balance."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count

import pytest

from tonnage.buffers import Buffer, BufferManager, Device, Stream, VaArena
from tonnage.device.fault import ALLOCATING, RELEASING, FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import BufferOOM, DriverError, LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

PAGE = 2**16
CAPACITY = 64 * PAGE


class Bench:
    """A small device with failures, its ledger, and what a scenario made of them."""

    def __init__(self) -> None:
        self.host = HostDriver(CAPACITY, page_bytes=PAGE)
        self.fault = FaultDriver(self.host)
        self.ledger = Ledger(0, CAPACITY)
        self.stream = Stream(Device(self.fault))
        self.manager = BufferManager(self.stream, ledger=self.ledger, owner="manager")
        self.buffers: list[Buffer] = []
        self.arenas: list[VaArena] = []

    def arena(self, owner: str) -> VaArena:
        arena = VaArena(
            self.stream, ledger=self.ledger, owner=owner, line=LineKind.KV, reserve_bytes=CAPACITY, chunk_bytes=4 * PAGE
        )
        self.arenas.append(arena)
        return arena

    def close(self) -> None:
        """Close everything and show that nothing is left, on the device or in the books."""
        self.fault.arm(None)
        for one in [*self.buffers, *self.arenas]:
            one.close()
        assert self.host.leaks() == ()
        assert self.ledger.accounted_bytes == 0
        for entry in self.ledger.snapshot().entries:
            assert (entry.requested_bytes, entry.num_live) == (0, 0)
        assert self.host.close() == ()

    def check(self) -> None:
        """The device's books and the ledger agree on arenas; buffers are rounded up to pages by the device."""
        arenas = sum(arena.committed_bytes for arena in self.arenas)
        buffers = sum(buffer.size_bytes for buffer in self.buffers)
        assert self.ledger.accounted_bytes == arenas + buffers
        assert arenas + buffers <= self.host.used_bytes


def scenario(bench: Bench) -> None:
    """Everything a start and some growth ask for: arenas that grow, shrink and grow, and single buffers."""
    weights, kv = bench.arena("weights"), bench.arena("kv")
    weights.commit(10 * PAGE)
    ctypes.memset(weights.address, 1, 10 * PAGE)
    for size in (100, 3 * PAGE):
        bench.buffers.append(bench.manager.gpu_sync(size, line=LineKind.TABLES))
    for num_pages in (1, 6, 20):
        kv.commit(num_pages * PAGE)
        ctypes.memset(kv.address, 2, num_pages * PAGE)
    kv.decommit(4 * PAGE)
    kv.commit(13 * PAGE)
    bench.buffers.pop(0).close()


def points(forever: bool, run: Callable[[Bench, int], bool]) -> int:
    """Call ``run`` with failure 1, 2, 3 ... until it says that none was injected; the number of points reached."""
    for nth in count(1):
        bench = Bench()
        bench.fault.arm(nth, forever=forever)
        injected = run(bench, nth)
        bench.close()
        if not injected:
            return nth - 1
    raise AssertionError("unreachable")


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
def test_every_allocation_may_fail(forever: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def run(bench: Bench, nth: int) -> bool:
        caught: Exception | None = None
        try:
            scenario(bench)
        except (BufferOOM, DriverError) as error:
            caught = error
        injected = bench.fault.num_injected > 0
        assert injected or caught is None
        # Single buffers ask a second time, so that one failure among theirs is none.
        assert caught is not None or not injected or not forever
        assert caught is None or (isinstance(caught, MemoryError) and "INJECTED" in str(caught))
        bench.check()
        return injected

    reached = points(forever, run)
    with capsys.disabled():
        print(f"\n  allocations failed in turn, {'for ever' if forever else 'once'}: {reached} points", end="")
    assert reached > 25


@pytest.mark.parametrize("fails", sorted({"phys_create", "map", "set_access"}))
def test_a_failed_commit_changes_nothing_and_can_be_repeated(fails: str) -> None:
    for nth in count(1):
        bench = Bench()
        arena = bench.arena("kv")
        arena.commit(3 * PAGE)
        ctypes.memset(arena.address, 5, 3 * PAGE)
        before = (bench.ledger.snapshot(), bench.host.leaks(), arena.committed_bytes, arena.address)
        # a want of memory is tried twice
        bench.fault.arm(nth, times=2 if fails == "phys_create" else 1, calls=frozenset({fails}))
        failed = False
        try:
            arena.commit(15 * PAGE)
        except BufferOOM:
            failed = True
            assert (bench.ledger.snapshot(), bench.host.leaks(), arena.committed_bytes, arena.address) == before
            arena.commit(15 * PAGE)
        assert arena.committed_bytes == 15 * PAGE
        assert ctypes.string_at(arena.address, 3 * PAGE) == b"\x05" * (3 * PAGE)
        bench.close()
        if not failed:
            break
    assert nth > 1


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
def test_giving_back_may_fail_and_nothing_is_forgotten(forever: bool) -> None:
    def run(bench: Bench, nth: int) -> bool:
        bench.fault.arm(None)
        arena = bench.arena("kv")
        arena.commit(14 * PAGE)
        bench.fault.arm(nth, forever=forever, calls=RELEASING)
        try:
            arena.decommit(2 * PAGE)
            arena.close()
        except DriverError:
            held = bench.host.used_bytes
            assert bench.ledger.accounted_bytes >= held  # booked until it is really gone
        injected = bench.fault.num_injected > 0
        bench.fault.arm(None)
        if arena.address:
            arena.commit(usable(arena, 9 * PAGE))  # the same addresses are usable again
            ctypes.memset(arena.address, 1, arena.committed_bytes)
            assert bench.ledger.accounted_bytes == bench.host.used_bytes
            assert bench.host.used_bytes == arena.committed_bytes + arena.leftover_bytes
        return injected

    assert points(forever, run) > 5


def test_a_rollback_that_fails_too_keeps_the_books_true() -> None:
    for nth in range(2, 14):
        bench = Bench()
        arena = bench.arena("kv")
        bench.fault.arm(nth, forever=True, calls=ALLOCATING | RELEASING)
        with pytest.raises((BufferOOM, DriverError)):
            _commit_and_close(arena)
        assert bench.ledger.accounted_bytes == bench.host.used_bytes
        assert arena.committed_bytes in (0, 20 * PAGE)
        bench.fault.arm(None)
        arena.commit(usable(arena, 20 * PAGE))
        assert bench.ledger.accounted_bytes == bench.host.used_bytes == arena.committed_bytes + arena.leftover_bytes
        bench.close()


def usable(arena: VaArena, num_bytes: int) -> int:
    """As much of it as lies before the first address that the driver would not unmap: from there on nothing is used."""
    return min([num_bytes, *(addr - arena.address for addr, _ in arena.poisoned)])


def _commit_and_close(arena: VaArena) -> None:
    arena.commit(20 * PAGE)
    arena.close()


def test_a_strict_seal_undoes_the_commit() -> None:
    bench = Bench()
    arena = bench.arena("late")
    bench.ledger.seal(strict=True)
    with pytest.raises(LedgerError, match="'late'"):
        arena.commit(9 * PAGE)
    assert (bench.host.used_bytes, arena.committed_bytes, bench.ledger.accounted_bytes) == (0, 0, 0)
    bench.close()
