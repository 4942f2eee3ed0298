"""What happened: history, timeline, and the ring that forgets the oldest."""

from __future__ import annotations

import pytest

from tonnage.ledger import OTHERS, Account, Ledger
from tonnage.terms import How, LineKind, MemoryKind, Reading

MIB = 2**20


def account_of(ledger: Ledger, owner: str, line: LineKind = LineKind.KV, tag: str = "") -> Account:
    return ledger.open(owner=owner, line=line, memory=MemoryKind.GPU, tag=tag)


def reading(own: int, *, free: int, total: int = 100 * MIB) -> Reading:
    return Reading(phase="x", at_ns=0, total_bytes=total, free_bytes=free, own_bytes=own, own_source="nvml")


def test_an_event_says_who_what_where_and_when() -> None:
    ledger = Ledger(0, 100)
    with ledger.phase("load"):
        account_of(ledger, "weights", LineKind.WEIGHTS, "layer 0").add(3, 4, stream=0x7F)
    ledger.seal()
    ledger.step(12)
    account_of(ledger, "weights", LineKind.WEIGHTS, "layer 0").sub(3, 4, stream=None)
    first, second = ledger.events()
    told = [(e.owner, e.line, e.tag, e.delta, e.stream, e.phase, e.step, e.sealed) for e in (first, second)]
    assert told == [
        ("weights", LineKind.WEIGHTS, "layer 0", 4, 0x7F, "load", 0, False),
        ("weights", LineKind.WEIGHTS, "layer 0", -4, None, "start", 12, True),
    ]
    assert second.at_ns >= first.at_ns > 0


def test_a_first_use_after_the_seal_says_its_stream_line_and_tag() -> None:
    ledger = Ledger(0, 100)
    ledger.seal()
    account_of(ledger, "late", LineKind.LIBRARIES, "nccl").add(5, 8, stream=9)
    (event,) = ledger.snapshot().first_uses
    assert (event.owner, event.line, event.tag, event.delta, event.stream) == ("late", LineKind.LIBRARIES, "nccl", 8, 9)


def test_history_is_of_an_owner_a_line_or_both() -> None:
    ledger = Ledger(0, 100)
    account_of(ledger, "a", LineKind.KV).add(1, 1)
    account_of(ledger, "a", LineKind.SCRATCH).add(2, 2)
    account_of(ledger, "b", LineKind.KV).add(3, 3)
    assert [event.delta for event in ledger.history()] == [1, 2, 3]
    assert [event.delta for event in ledger.history(owner="a")] == [1, 2]
    assert [event.delta for event in ledger.history(line=LineKind.KV)] == [1, 3]
    assert [event.delta for event in ledger.history(owner="a", line=LineKind.KV)] == [1]
    assert ledger.history(owner="nobody") == ()


def test_a_timeline_is_right_although_the_ring_forgot_how_it_began() -> None:
    ledger = Ledger(0, 100, num_events=3)
    account = account_of(ledger, "a")
    for physical in (10, 20, 30):
        account.add(physical, physical)
    account.sub(10, 10)
    assert [held for _, held in ledger.timeline(LineKind.KV)] == [30, 60, 50]
    assert (len(ledger.events()), ledger.num_lost_events) == (3, 1)


def test_a_timeline_counts_only_the_device() -> None:
    ledger = Ledger(0, 100, host_is_device=False)
    account_of(ledger, "a").add(1, 7)
    ledger.open(owner="a", line=LineKind.KV, memory=MemoryKind.PINNED).add(1, 50)
    assert [held for _, held in ledger.timeline(LineKind.KV)] == [7]
    assert len(ledger.history(line=LineKind.KV)) == 2


def test_others_have_a_history_and_a_timeline() -> None:
    ledger = Ledger(0, 100 * MIB)
    for foreign in (5, 5, 37, 2):
        ledger.sample(reading(10 * MIB, free=(90 - foreign) * MIB))
    events = ledger.history(owner=OTHERS)
    assert [event.delta for event in events] == [5 * MIB, 32 * MIB, -35 * MIB]
    assert [held for _, held in ledger.timeline(LineKind.FOREIGN)] == [5 * MIB, 37 * MIB, 2 * MIB]
    shot = ledger.snapshot()
    assert (shot.foreign, shot.foreign_low, shot.foreign_high) == (2 * MIB, 2 * MIB, 37 * MIB)
    assert shot.entries == ()  # none of it is ours


def test_others_may_come_after_a_strict_seal() -> None:
    ledger = Ledger(0, 100 * MIB)
    ledger.seal(strict=True)
    ledger.sample(reading(0, free=70 * MIB))
    assert (ledger.snapshot().foreign, ledger.snapshot().first_uses) == (30 * MIB, ())


def test_the_audit_of_the_foreign_line_remembers_its_most() -> None:
    ledger = Ledger(0, 100 * MIB)
    ledger.expect({LineKind.FOREIGN: 3 * MIB})
    for foreign in (3, 9, 4):
        ledger.sample(reading(0, free=(100 - foreign) * MIB))
    row = next(row for row in ledger.audit() if row.line is LineKind.FOREIGN)
    assert (row.actual_bytes, row.high_water_bytes, row.error_bytes) == (4 * MIB, 9 * MIB, MIB)


def test_samples_are_events_too() -> None:
    ledger = Ledger(0, 100)
    account = ledger.open(owner="torch", line=LineKind.TRANSIENT, memory=MemoryKind.GPU, how=How.SAMPLED)
    for num_bytes in (10, 4, 4):
        account.sampled(num_bytes)
    assert [event.delta for event in ledger.events()] == [10, -6, 0]
    assert ledger.num_lost_events == 0


@pytest.mark.parametrize("num_events", [0, 1, 5])
def test_the_ring_knows_what_it_lost(num_events: int) -> None:
    ledger = Ledger(0, 100, num_events=num_events)
    account = account_of(ledger, "a")
    for _ in range(4):
        account.add(1, 1)
        account.sub(1, 1)
    assert len(ledger.events()) == num_events
    assert ledger.num_lost_events == 8 - num_events


def test_a_look_in_the_middle_of_a_step_tells_of_others_and_of_nothing_else() -> None:
    ledger = Ledger(0, 100 * MIB, host_is_device=False)
    ledger.sample(reading(own=10 * MIB, free=90 * MIB))
    before = ledger.snapshot()
    ledger.see_others(reading(own=40 * MIB, free=20 * MIB))
    shot = ledger.snapshot()
    assert (shot.foreign, shot.foreign_high, shot.free_low) == (40 * MIB, 40 * MIB, 20 * MIB)
    assert (shot.own, shot.free, shot.unattributed) == (before.own, before.free, before.unattributed)
    assert ledger.foreign_of(reading(own=95 * MIB, free=10 * MIB)) == 0
