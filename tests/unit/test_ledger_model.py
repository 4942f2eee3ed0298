"""A stateful model of the ledger: the sum of all accounts always equals a plain list of live allocations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tonnage.errors import LedgerError
from tonnage.ledger import Account, Ledger
from tonnage.terms import How, LineKind, MemoryKind, Reading

TOTAL = 2**50
SIZES = st.integers(min_value=0, max_value=2**40)


class LedgerModel(RuleBasedStateMachine):
    accounts = Bundle("accounts")
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(0, TOTAL, host_is_device=False, num_events=8)
        self.held: dict[Account, list[tuple[int, int]]] = {}
        self.sample: dict[Account, int] = {}
        self.own: int | None = None
        self.foreign: list[int] = []
        self.highs: dict[Account, int] = {}
        self.trail: dict[LineKind, list[int]] = {}  # physical bytes of a line after each change, by our own sums
        self.num_changes = 0

    def changed(self, account: Account) -> None:
        self.num_changes += 1
        if account.memory is MemoryKind.GPU:
            held = sum(
                physical for one, sizes in self.held.items() if on_line(one, account.line) for _, physical in sizes
            )
            held += sum(num_bytes for one, num_bytes in self.sample.items() if on_line(one, account.line))
            self.trail.setdefault(account.line, []).append(held)

    @rule(
        target=accounts,
        owner=st.sampled_from("abc"),
        line=st.sampled_from([LineKind.KV, LineKind.SCRATCH]),
        memory=st.sampled_from([MemoryKind.GPU, MemoryKind.PINNED]),
    )
    def open(self, owner: str, line: LineKind, memory: MemoryKind) -> Account:
        account = self.ledger.open(owner=owner, line=line, memory=memory)
        self.held.setdefault(account, [])
        return account

    @rule(owner=st.sampled_from("xy"), num_bytes=SIZES)
    def sampled(self, owner: str, num_bytes: int) -> None:
        account = self.ledger.open(owner=owner, line=LineKind.TRANSIENT, memory=MemoryKind.GPU, how=How.SAMPLED)
        account.sampled(num_bytes)
        self.sample[account] = num_bytes
        self.changed(account)

    @rule(target=live, account=accounts, requested=SIZES, padding=st.integers(0, 4096))
    def add(self, account: Account, requested: int, padding: int) -> tuple[Account, tuple[int, int]]:
        account.add(requested, requested + padding)
        self.held[account].append((requested, requested + padding))
        self.changed(account)
        return account, (requested, requested + padding)

    @rule(target=live, account=accounts, num_bytes=st.integers(1, 2**40))
    def take(self, account: Account, num_bytes: int) -> tuple[Account, tuple[int, int]]:
        account.take(num_bytes, 7)
        self.held[account].append((num_bytes, num_bytes))
        self.changed(account)
        return account, (num_bytes, num_bytes)

    @rule(one=consumes(live))
    def give(self, one: tuple[Account, tuple[int, int]]) -> None:
        """What ``take`` took; what ``add`` added goes back by ``sub``, and either way of giving fits a ``take``."""
        account, sizes = one
        account.give(sizes[0], 7) if sizes[0] == sizes[1] > 0 else account.sub(*sizes)
        self.held[account].remove(sizes)
        self.changed(account)

    @rule(one=consumes(live))
    def sub(self, one: tuple[Account, tuple[int, int]]) -> None:
        account, sizes = one
        account.sub(*sizes)
        self.held[account].remove(sizes)
        self.changed(account)

    @rule(account=accounts)
    def sub_too_much(self, account: Account) -> None:
        with pytest.raises(LedgerError):
            account.sub(0, account.physical_bytes + 1)

    @rule(own=SIZES, foreign=SIZES)
    def read(self, own: int, foreign: int) -> None:
        free = TOTAL - own - foreign
        self.num_changes += foreign != (self.foreign[-1] if self.foreign else 0)
        self.own = own
        self.foreign.append(foreign)
        self.ledger.sample(
            Reading(phase="", at_ns=0, total_bytes=TOTAL, free_bytes=free, own_bytes=own, own_source="test")
        )

    @invariant()
    def accounts_equal_the_model(self) -> None:
        for account, sizes in self.held.items():
            assert account.num_live == len(sizes)
            assert account.requested_bytes == sum(size[0] for size in sizes)
            assert account.physical_bytes == sum(size[1] for size in sizes)
            # Highest is what it says, and never falls.
            assert account.high_water_bytes == max(self.highs.get(account, 0), account.physical_bytes)
            self.highs[account] = account.high_water_bytes

    @invariant()
    def sums_equal_the_model(self) -> None:
        held = {account: sum(size[1] for size in sizes) for account, sizes in self.held.items()}
        total = sum(held[one] for one in held if one.memory is MemoryKind.GPU) + sum(self.sample.values())
        shot = self.ledger.snapshot()
        assert self.ledger.accounted_bytes == total
        assert self.ledger.host_bytes == shot.host == sum(held[one] for one in held if one.memory is MemoryKind.PINNED)
        assert (
            sum(row.actual_bytes or 0 for row in self.ledger.audit()[:-1] if row.line is not LineKind.FOREIGN) == total
        )
        assert shot.unattributed == (None if self.own is None else self.own - total)
        assert all(min(one.physical_bytes, one.requested_bytes, one.num_live) >= 0 for one in shot.entries)

    @invariant()
    def what_others_hold_is_their_last_least_and_most(self) -> None:
        shot = self.ledger.snapshot()
        assert shot.foreign == (self.foreign[-1] if self.foreign else 0)
        assert shot.foreign_low == min(self.foreign, default=None)
        assert shot.foreign_high == max(self.foreign, default=None)

    @invariant()
    def the_ring_reproduces_the_levels(self) -> None:
        events = self.ledger.events()
        assert len(events) == min(8, self.num_changes)
        assert self.ledger.num_lost_events == self.num_changes - len(events)
        for line, trail in self.trail.items():
            points = [held for _, held in self.ledger.timeline(line)]
            assert points == trail[len(trail) - len(points) :]
        times = [event.at_ns for event in events]
        assert times == sorted(times)


def on_line(account: Account, line: LineKind) -> bool:
    return account.line is line and account.memory is MemoryKind.GPU


LedgerModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLedgerModel = LedgerModel.TestCase
