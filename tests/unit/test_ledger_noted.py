"""``take`` and ``give``: noted without the lock, counted when somebody looks, and the same to whoever looks."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LedgerError
from tonnage.ledger import Account, Ledger
from tonnage.ledger import account as account_module
from tonnage.ledger import journal as journal_module
from tonnage.ledger.journal import MAX_NOTED
from tonnage.terms import LineKind, MemoryKind

#: Where the ledger's own code is, and what enters and leaves its ``with`` blocks.
ROOM = ("ledger/account.py", "ledger/journal.py", "ledger/ledger.py", "ledger/tally.py", "contextlib.py")
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


@pytest.mark.parametrize("where", ["counting", "the clock", "the ring"])
def test_an_interrupt_leaves_the_lock_free(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Raised wherever the ledger calls something with its lock held."""
    ledger = Ledger(0, 1 << 30)
    account = ledger.open(owner="tests", line=LineKind.TABLES, memory=MemoryKind.GPU)
    account.add(1, 1)

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    if where == "counting":
        account.take(10, 0)
        monkeypatch.setattr(journal_module, "tallies_of", interrupt)
    elif where == "the clock":
        monkeypatch.setattr(account_module, "monotonic_ns", interrupt)
    else:
        ledger.journal.append = interrupt
    calls: list[Callable[[], object]] = [lambda: account.add(1, 1), lambda: account.sub(1, 1)]
    if where == "counting":
        calls += [lambda: ledger.accounted_bytes, lambda: account.num_live, lambda: ledger.step(1), ledger.snapshot]
        calls += [lambda: ledger.at_once().__enter__(), lambda: ledger.phase("a").__enter__(), ledger.journal.catch_up]
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert is_free(ledger.journal.lock)


def is_free(lock: Any) -> bool:
    """Whether another thread can take it."""
    took: list[bool] = []

    def take() -> None:
        took.append(lock.acquire(timeout=5))
        if took[0]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return took[0]


def test_ctrl_c_leaves_the_lock_free_wherever_it_is_raised() -> None:
    """Python raises it as a function begins and as a call of one in C returns."""
    ledger = Ledger(0, 1 << 30)
    account = ledger.open(owner="tests", line=LineKind.TABLES, memory=MemoryKind.GPU)

    def use() -> None:
        account.take(10, 0)
        account.add(1, 1)
        account.sub(1, 1)
        account.give(10, 0)
        with ledger.phase("a"), ledger.at_once():
            ledger.step(1)
        ledger.snapshot()

    for num_points in range(1, 2000):
        left = num_points

        def strike(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            left -= event in ("call", "c_return") and frame.f_code.co_filename.endswith(ROOM)
            if not left:
                left = -1
                raise KeyboardInterrupt

        sys.setprofile(strike)
        try:
            use()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert is_free(ledger.journal.lock), num_points
        if left > 0:
            break
    assert 30 < num_points < 1999
