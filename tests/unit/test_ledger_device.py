"""Device and host memory in one ledger, and a ledger that many threads, and finalisers, write at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from tonnage.errors import LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind, Reading

HOST = {MemoryKind.CPU, MemoryKind.PINNED, MemoryKind.PINNED_POOL}


def reading(own: int) -> Reading:
    return Reading(phase="x", at_ns=0, total_bytes=1000, free_bytes=400, own_bytes=own, own_source="nvml")


@pytest.mark.parametrize("memory", list(MemoryKind))
@pytest.mark.parametrize("host_is_device", [True, False])
def test_memory_counts_on_the_device_where_it_lies(memory: MemoryKind, host_is_device: bool) -> None:
    ledger = Ledger(0, 1000, host_is_device=host_is_device)
    ledger.expect({LineKind.KV: 100})
    ledger.open(owner="a", line=LineKind.KV, memory=memory).add(60, 64)
    ledger.sample(reading(own=500))
    beside = memory in HOST and not host_is_device
    shot, row = ledger.snapshot(), ledger.audit()[0]
    assert ledger.accounted_bytes == (0 if beside else 64)
    assert (ledger.host_bytes, shot.host) == ((64, 64) if beside else (0, 0))
    assert shot.unattributed == (500 if beside else 436)
    assert (row.line, row.actual_bytes) == (LineKind.KV, 0 if beside else 60)
    assert any(row.line is LineKind.ROUNDING for row in ledger.audit()) is not beside
    # Whose it is can be read in any case; what a plan gives to the device's line is not said of it.
    (entry,) = shot.entries
    assert (entry.physical_bytes, entry.planned_bytes) == (64, None if beside else 100)


def test_host_memory_beside_the_device_does_not_make_a_line() -> None:
    ledger = Ledger(0, 1000, host_is_device=False)
    ledger.open(owner="a", line=LineKind.TABLES, memory=MemoryKind.CPU).add(60, 64)
    assert [row.line for row in ledger.audit()] == [LineKind.UNATTRIBUTED]


def test_a_declared_account_surprises_nobody() -> None:
    ledger = Ledger(0, 100)
    ledger.seal(strict=True)
    ledger.open(owner="a", line=LineKind.KV, memory=MemoryKind.GPU, declared=True).add(1, 1)
    assert ledger.snapshot().first_uses == ()


def test_the_highest_remainder_is_remembered_even_at_zero() -> None:
    ledger = Ledger(0, 1000)
    ledger.open(owner="a", line=LineKind.KV, memory=MemoryKind.GPU).add(60, 60)
    for own in (50, 60, 20):
        ledger.sample(reading(own))
    assert (ledger.audit()[-1].actual_bytes, ledger.audit()[-1].high_water_bytes) == (-40, 0)


@pytest.mark.parametrize("noted", [False, True], ids=["add and sub", "take and give"])
def test_snapshots_are_of_one_moment(noted: bool) -> None:
    """Each thread keeps its account full or empty as a whole: no snapshot may show anything between."""
    ledger, stop = Ledger(0, 1000, num_events=64), threading.Event()
    accounts = [ledger.open(owner=f"o{n}", line=LineKind.KV, memory=MemoryKind.GPU) for n in range(3)]

    def work(number: int) -> None:
        while not stop.is_set():
            if noted:
                accounts[number].take(8, 0)
                accounts[number].give(8, 0)
            else:
                accounts[number].add(3, 8)
                accounts[number].sub(3, 8)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            shot = ledger.snapshot()
            held = {(e.requested_bytes, e.physical_bytes, e.num_live) for e in shot.entries}
            assert held <= {(0, 0, 0), (8 if noted else 3, 8, 1)}
            points = [held for _, held in ledger.timeline(LineKind.KV)]
            assert all(0 <= held <= 24 and held % 8 == 0 for held in points)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ledger.accounted_bytes == 0
    assert ledger.audit()[0].high_water_bytes in ((8, 16, 24) if noted else (3, 6, 9))
    assert sum(account.num_changes for account in accounts) == ledger.num_lost_events + len(ledger.events())


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("noted", [False, True], ids=["add and sub", "take and give"])
def test_a_finaliser_may_give_memory_back_at_any_moment(eager_collector: None, noted: bool) -> None:
    """The collector runs inside ``add`` and ``sub`` too, and while noted changes are counted, on this thread, with the
    lock held."""
    ledger = Ledger(0, 10**6, num_events=50)
    account = ledger.open(owner="a", line=LineKind.KV, memory=MemoryKind.GPU)

    class Holder:
        def __init__(self) -> None:
            account.add(1, 2)
            self.cycle = self

        def __del__(self) -> None:
            account.sub(1, 2)

    for _ in range(300):
        Holder()
        if noted:
            account.take(4, 0)
            account.give(4, 0)
        else:
            account.add(3, 4)
            account.sub(3, 4)
    gc.collect()
    assert (account.requested_bytes, account.physical_bytes, account.num_live) == (0, 0, 0)
    assert (account.num_takes, account.released_bytes) == (600, 300 * 2 + 300 * 4)
    assert ledger.timeline(LineKind.KV)[-1][1] == 0


def test_a_wrong_call_leaves_the_lock_free() -> None:
    ledger = Ledger(0, 100)
    account = ledger.open(owner="a", line=LineKind.KV, memory=MemoryKind.GPU)
    for wrong in (lambda: account.add(-1, 1), lambda: account.sub(1, 1)):
        with pytest.raises(LedgerError):
            wrong()
    thread = threading.Thread(target=account.add, args=(1, 1))
    thread.start()
    thread.join(timeout=10)
    assert account.num_live == 1
