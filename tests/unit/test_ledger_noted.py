"""``take`` and ``give``: noted without the lock, counted when somebody looks, and the same to whoever looks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LedgerError
from tonnage.ledger import Account, Ledger
from tonnage.ledger import journal as journal_module
from tonnage.ledger.journal import MAX_NOTED
from tonnage.terms import LineKind, MemoryKind

LINES = (LineKind.KV, LineKind.KV, LineKind.SCRATCH)


def accounts_of(ledger: Ledger) -> list[Account]:
    """Two on one line, one on another."""
    return [ledger.open(owner=f"owner {number}", line=line, memory=MemoryKind.GPU) for number, line in enumerate(LINES)]


def book(ledger: Ledger, steps: list[tuple[str, int, int]], *, noted: bool) -> None:
    """Play the steps; ``look`` reads, everything else books."""
    accounts, live = accounts_of(ledger), [[], [], []]
    for step, (what, which, num_bytes) in enumerate(steps):
        account, sizes = accounts[which], live[which]
        ledger.step(step)
        if what == "take":
            account.take(num_bytes, which) if noted else account.add(num_bytes, num_bytes, stream=which)
            sizes.append(num_bytes)
        elif what == "give" and sizes:
            size = sizes.pop(num_bytes % len(sizes))
            account.give(size, which) if noted else account.sub(size, size, stream=which)
        elif what == "add":
            account.add(0, num_bytes)
        elif what == "look":
            ledger.snapshot()
        elif what == "phase":
            with ledger.phase(f"phase {step}"):
                account.take(num_bytes, 9) if noted else account.add(num_bytes, num_bytes, stream=9)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "give", "take", "give", "add", "look", "phase"]),
            st.integers(0, 2),
            st.integers(1, 1000),
        ),
        max_size=60,
    )
)
def test_noted_changes_count_as_checked_ones_do(steps: list[tuple[str, int, int]]) -> None:
    """Figures, high-water marks and their phases, lines, events: all but the time."""
    noted, checked = Ledger(0, 2**40), Ledger(0, 2**40)
    book(noted, steps, noted=True)
    book(checked, steps, noted=False)
    assert noted.snapshot() == checked.snapshot()
    assert noted.audit() == checked.audit()
    without_time = [[dataclasses.replace(event, at_ns=0) for event in one.events()] for one in (noted, checked)]
    assert without_time[0] == without_time[1]
    for line in set(LINES):
        assert [held for _, held in noted.timeline(line)] == [held for _, held in checked.timeline(line)]


def test_the_highest_is_found_between_two_looks() -> None:
    """By hand: 30 and 50 together at one moment, and neither before nor after."""
    ledger = Ledger(0, 2**40)
    first, second, _ = accounts_of(ledger)
    for account, num_bytes in ((first, 30), (second, 50), (second, -50), (first, -30), (second, 60)):
        account.take(num_bytes, 0) if num_bytes > 0 else account.give(-num_bytes, 0)
    assert (first.high_water_bytes, second.high_water_bytes) == (30, 60)
    row = ledger.audit()[0]
    assert (row.line, row.actual_bytes, row.high_water_bytes) == (LineKind.KV, 60, 80)
    assert (first.num_takes, first.num_frees, first.released_bytes, first.num_live) == (1, 1, 30, 0)


def test_what_is_noted_is_bounded() -> None:
    ledger = Ledger(0, 2**40, num_events=10)
    account = accounts_of(ledger)[0]
    for _ in range(3 * MAX_NOTED):
        account.take(8, 0)
        account.give(8, 0)
        assert len(ledger.journal.noted) <= MAX_NOTED
    assert (account.physical_bytes, account.num_takes) == (0, 3 * MAX_NOTED)
    assert ledger.num_lost_events == 6 * MAX_NOTED - 10


def test_more_given_than_taken_shows_in_every_reading() -> None:
    ledger = Ledger(0, 2**40)
    account = accounts_of(ledger)[0]
    account.take(8, 0)
    for _ in range(2):
        account.give(8, 0)
    assert (account.physical_bytes, account.num_live, ledger.accounted_bytes) == (-8, -1, -8)
    with pytest.raises(LedgerError):
        account.sub(0, 0)


def test_a_strict_seal_refuses_what_would_be_noted() -> None:
    ledger = Ledger(0, 2**40)
    early, late, _ = accounts_of(ledger)
    early.take(8, 0)
    ledger.seal(strict=True)
    early.take(8, 0)
    with pytest.raises(LedgerError, match=r"'owner 1'.*sealed"):
        late.take(8, 0)
    assert ([one.owner for one in ledger.snapshot().first_uses], ledger.accounted_bytes) == (["owner 1"], 16)


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (lambda account: account.take(100, 0), (105, 105, 3)),
        (lambda account: account.sub(5, 5), (0, 5, 1)),
        (lambda account: account.add(100, 100), (105, 105, 3)),
        (lambda account: account.physical_bytes, (5, 5, 2)),
    ],
    ids=["takes", "subtracts", "adds", "looks"],
)
def test_counting_may_be_interrupted_on_its_own_thread(meanwhile, expected, monkeypatch) -> None:
    """A finaliser runs in the middle, with the lock held: nothing is counted twice, nothing is lost."""
    ledger = Ledger(0, 2**40)
    account = accounts_of(ledger)[0]
    account.add(0, 0)
    account.take(5, 0)
    tallies_of, interruptions = journal_module.tallies_of, [meanwhile]

    def interrupted(*args):
        made = tallies_of(*args)
        if interruptions:
            interruptions.pop()(account)
        return made

    monkeypatch.setattr(journal_module, "tallies_of", interrupted)
    ledger.snapshot()
    assert not interruptions
    assert (account.physical_bytes, account.high_water_bytes, account.num_live) == expected
    assert sum(event.delta for event in ledger.events()) == account.physical_bytes
    assert ledger.audit()[0].high_water_bytes == account.high_water_bytes
