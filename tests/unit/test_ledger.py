"""The ledger: accounts, phases, the seal, the audit and the remainder."""

from __future__ import annotations

import threading

import pytest

from tonnage.errors import LedgerError
from tonnage.ledger import FIRST_PHASE, Ledger
from tonnage.terms import How, LineKind, MemoryKind, Reading

MIB = 2**20


def open_account(ledger: Ledger, owner: str = "weights", line: LineKind = LineKind.WEIGHTS, how: How = How.COUNTED):
    return ledger.open(owner=owner, line=line, memory=MemoryKind.GPU, how=how)


def reading(own: int | None, *, free: int = 0, total: int = 100 * MIB) -> Reading:
    return Reading(phase="x", at_ns=0, total_bytes=total, free_bytes=free, own_bytes=own, own_source="test")


def test_an_account_counts_requested_physical_live_and_released() -> None:
    account = open_account(Ledger(0, 100 * MIB))
    account.add(3, 10)
    account.add(4, 20)
    account.sub(3, 10)
    assert (account.requested_bytes, account.physical_bytes, account.num_live) == (4, 20, 1)
    assert (account.high_water_bytes, account.released_bytes) == (30, 10)


def test_opening_again_gives_the_same_account_and_another_how_is_refused() -> None:
    ledger = Ledger(0, 1)
    assert open_account(ledger) is open_account(ledger)
    with pytest.raises(LedgerError, match="cannot also be sampled"):
        open_account(ledger, how=How.SAMPLED)


def test_a_remainder_is_set_not_counted_and_says_so() -> None:
    ledger = Ledger(0, 100)
    account = open_account(ledger, "context", how=How.REMAINDER)
    account.sampled(30)
    with pytest.raises(LedgerError, match="remainder"):
        account.add(1, 1)
    (entry,) = ledger.snapshot().entries
    assert (entry.how, entry.physical_bytes) == (How.REMAINDER, 30)


def test_a_declared_owner_may_start_after_the_seal() -> None:
    ledger = Ledger(0, 100)
    ledger.seal(strict=True, declared=["late"])
    open_account(ledger, "late").add(1, 1)
    assert ledger.snapshot().first_uses == ()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda account: account.sub(0, 21),
        lambda account: account.sub(11, 20),
        lambda account: account.sub(-1, 0),
        lambda account: account.add(-1, 5),
        lambda account: account.add(1, -5),
        lambda account: account.sampled(5),
        lambda account: account.adjust_requested(-11),
    ],
)
def test_wrong_use_is_refused_and_changes_nothing(wrong) -> None:
    ledger = Ledger(0, 100)
    account = open_account(ledger)
    account.add(10, 20)
    before = ledger.snapshot()
    with pytest.raises(LedgerError, match="weights"):
        wrong(account)
    assert ledger.snapshot() == before


def test_more_frees_than_allocations_are_refused() -> None:
    account = open_account(Ledger(0, 100))
    account.add(0, 20)
    account.sub(0, 10)
    with pytest.raises(LedgerError):
        account.sub(0, 10)


def test_a_sampled_account_follows_its_samples() -> None:
    ledger = Ledger(0, 100)
    account = open_account(ledger, how=How.SAMPLED)
    for num_bytes in (10, 50, 20):
        account.sampled(num_bytes)
    assert (account.physical_bytes, account.high_water_bytes, account.num_live) == (20, 50, 1)
    assert account.released_bytes == 30
    with pytest.raises(LedgerError, match="sampled"):
        account.add(1, 1)


def test_phases_nest_and_the_high_water_remembers_its_phase() -> None:
    ledger = Ledger(0, 100)
    account = open_account(ledger)
    with ledger.phase("load"):
        account.add(5, 5)
        with ledger.phase("probe"):
            account.add(5, 5)
            account.sub(5, 5)
        account.add(1, 1)
    entry = ledger.snapshot().entries[0]
    assert (entry.first_phase, entry.high_water_phase) == ("load", "load/probe")
    assert ledger.snapshot().phase == FIRST_PHASE


def test_a_phase_ends_when_its_body_fails() -> None:
    ledger = Ledger(0, 100)
    with pytest.raises(ValueError), ledger.phase("load"):
        raise ValueError("x")
    assert ledger.snapshot().phase == FIRST_PHASE


def test_events_are_a_bounded_ring_with_steps() -> None:
    ledger = Ledger(0, 100, num_events=3)
    account = open_account(ledger)
    for number in range(5):
        ledger.step(number)
        account.add(number, number)
    assert [(event.step, event.delta) for event in ledger.events()] == [(2, 2), (3, 3), (4, 4)]
    assert all(event.owner == "weights" and not event.sealed for event in ledger.events())


def test_the_seal_names_an_owner_that_had_nothing_once() -> None:
    ledger = Ledger(0, 100)
    open_account(ledger).add(1, 1)
    late = open_account(ledger, "late library", LineKind.LIBRARIES)
    ledger.seal()
    open_account(ledger).add(1, 1)
    late.add(3, 4)
    late.add(3, 4)
    assert [(event.owner, event.delta) for event in ledger.snapshot().first_uses] == [("late library", 4)]
    assert ledger.is_sealed
    assert late.num_live == 2


@pytest.mark.parametrize("how", [How.COUNTED, How.SAMPLED])
def test_a_strict_seal_refuses_and_books_nothing(how: How) -> None:
    ledger = Ledger(0, 100)
    late = open_account(ledger, "late", how=how)
    ledger.seal(strict=True)
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"'late'.*sealed"):
            late.sampled(4) if how is How.SAMPLED else late.add(4, 4)
    assert (late.num_live, ledger.accounted_bytes) == (0, 0)
    assert len(ledger.snapshot().first_uses) == 1


def test_the_remainder_is_own_minus_accounts_and_may_be_negative() -> None:
    ledger = Ledger(0, 100)
    open_account(ledger).add(30, 40)
    assert ledger.snapshot().unattributed is None
    ledger.sample(reading(55, free=20, total=100))
    shot = ledger.snapshot()
    assert (shot.own, shot.unattributed, shot.foreign, shot.free) == (55, 15, 25, 20)
    ledger.sample(reading(10, free=95, total=100))
    assert (ledger.snapshot().unattributed, ledger.snapshot().foreign) == (-30, 0)


def test_an_unreadable_device_leaves_the_remainder_unknown() -> None:
    ledger = Ledger(0, 100)
    ledger.sample(reading(None, free=90, total=100))
    assert ledger.snapshot().unattributed is None
    assert ledger.audit()[-1].error_bytes is None


def test_the_audit_covers_the_plan_the_accounts_and_the_remainder() -> None:
    ledger = Ledger(0, 100)
    ledger.expect({LineKind.WEIGHTS: 50, LineKind.KEEP_FREE: 7, LineKind.FOREIGN: 3})
    weights = open_account(ledger)
    weights.add(60, 60)
    weights.add(1, 1)
    ledger.open(owner="other", line=LineKind.TABLES, memory=MemoryKind.CPU).add(2, 2)
    ledger.sample(reading(70, free=25, total=100))
    rows = {row.line: row for row in ledger.audit()}
    assert list(rows)[-1] is LineKind.UNATTRIBUTED
    assert set(rows) == {LineKind(kind) for kind in ("weights", "keep_free", "foreign", "tables", "unattributed")}
    assert (rows[LineKind.WEIGHTS].actual_bytes, rows[LineKind.WEIGHTS].error_bytes) == (61, 11)
    assert (rows[LineKind.KEEP_FREE].actual_bytes, rows[LineKind.KEEP_FREE].error_bytes) == (0, -7)
    assert rows[LineKind.FOREIGN].actual_bytes == 5
    assert rows[LineKind.TABLES].planned_bytes == 0
    assert rows[LineKind.UNATTRIBUTED].actual_bytes == 70 - 63


def test_the_line_high_water_is_of_one_moment_not_a_sum_of_peaks() -> None:
    ledger = Ledger(0, 100)
    first, second = open_account(ledger, "a"), open_account(ledger, "b")
    first.add(10, 10)
    first.sub(10, 10)
    second.add(8, 8)
    row = ledger.audit()[0]
    assert (row.actual_bytes, row.high_water_bytes) == (8, 10)
    assert (row.error_bytes, row.high_error_bytes) == (8, 10)


def test_entries_carry_the_device_and_the_planned_line() -> None:
    ledger = Ledger(3, 100)
    ledger.expect({LineKind.WEIGHTS: 50})
    open_account(ledger).add(1, 2)
    entry = ledger.snapshot().entries[0]
    assert (entry.device, entry.planned_bytes, entry.how) == (3, 50, How.COUNTED)


@pytest.mark.parametrize("noted", [False, True], ids=["add and sub", "take and give"])
def test_threads_do_not_lose_bytes(noted: bool) -> None:
    ledger = Ledger(0, 100)

    def work(number: int) -> None:
        account = open_account(ledger, f"owner {number % 2}")
        for _ in range(500):
            if noted:
                account.take(3, 7)
                account.take(1, 7)
                account.give(3, 7)
                account.sub(0, 0)
            else:
                account.add(1, 3)
                account.sub(1, 2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.accounted_bytes == 4 * 500
    assert sum(entry.num_live for entry in ledger.snapshot().entries) == 0
