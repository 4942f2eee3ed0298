"""A stateful model of the ledger: the sum of all accounts always equals a plain list of live allocations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tonnage.errors import LedgerError
from tonnage.ledger import Account, Ledger
from tonnage.terms import How, LineKind, MemoryKind, Reading

SIZES = st.integers(min_value=0, max_value=2**40)


class LedgerModel(RuleBasedStateMachine):
    accounts = Bundle("accounts")
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(0, 2**50, num_events=8)
        self.held: dict[Account, list[tuple[int, int]]] = {}
        self.sample: dict[Account, int] = {}
        self.own: int | None = None

    @rule(target=accounts, owner=st.sampled_from("abc"), line=st.sampled_from([LineKind.KV, LineKind.SCRATCH]))
    def open(self, owner: str, line: LineKind) -> Account:
        account = self.ledger.open(owner=owner, line=line, memory=MemoryKind.GPU)
        self.held.setdefault(account, [])
        return account

    @rule(owner=st.sampled_from("xy"), num_bytes=SIZES)
    def sampled(self, owner: str, num_bytes: int) -> None:
        account = self.ledger.open(owner=owner, line=LineKind.TRANSIENT, memory=MemoryKind.GPU, how=How.SAMPLED)
        account.sampled(num_bytes)
        self.sample[account] = num_bytes

    @rule(target=live, account=accounts, requested=SIZES, padding=st.integers(0, 4096))
    def add(self, account: Account, requested: int, padding: int) -> tuple[Account, tuple[int, int]]:
        account.add(requested, requested + padding)
        self.held[account].append((requested, requested + padding))
        return account, (requested, requested + padding)

    @rule(one=consumes(live))
    def sub(self, one: tuple[Account, tuple[int, int]]) -> None:
        account, sizes = one
        account.sub(*sizes)
        self.held[account].remove(sizes)

    @rule(account=accounts)
    def sub_too_much(self, account: Account) -> None:
        with pytest.raises(LedgerError):
            account.sub(0, account.physical_bytes + 1)

    @rule(num_bytes=SIZES)
    def read(self, num_bytes: int) -> None:
        self.own = num_bytes
        self.ledger.sample(
            Reading(phase="", at_ns=0, total_bytes=2**50, free_bytes=0, own_bytes=num_bytes, own_source="test")
        )

    @invariant()
    def books_equal_the_model(self) -> None:
        for account, sizes in self.held.items():
            assert account.num_live == len(sizes)
            assert account.requested_bytes == sum(size[0] for size in sizes)
            assert account.physical_bytes == sum(size[1] for size in sizes)
            assert account.high_water_bytes >= account.physical_bytes
        total = sum(size[1] for sizes in self.held.values() for size in sizes) + sum(self.sample.values())
        assert self.ledger.accounted_bytes == total
        assert sum(row.actual_bytes or 0 for row in self.ledger.audit()[:-1]) == total
        shot = self.ledger.snapshot()
        assert shot.unattributed == (None if self.own is None else self.own - total)
        assert len(self.ledger.events()) <= 8


LedgerModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLedgerModel = LedgerModel.TestCase
