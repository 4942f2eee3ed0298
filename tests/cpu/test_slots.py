"""Sequence slots: stable for life, lowest first, never two owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import ResourceError
from tonnage.resources.base import Deferral, Grant, ProbeRequest
from tonnage.resources.slots import SlotManager
from tonnage.step import StepItem, StepPlan, Txn


def request(name: str) -> ProbeRequest:
    return ProbeRequest(id=name, num_prompt_tokens=1, max_total_tokens=2)


def test_the_lowest_free_slot_is_taken():
    slots = SlotManager(3)
    for name in "abc":
        assert slots.admit(request(name), Txn()) == Grant(units=1)
    assert slots.admit(request("d"), Txn()) == Deferral(manager="slots", need=1, have=0)
    slots.free("c")
    slots.free("a")
    slots.free("a")
    slots.admit(request("d"), Txn())
    assert (slots.slot_of("d"), slots.slot_of("b"), slots.available()) == (0, 1, 1)


def test_a_rollback_gives_the_slot_back():
    slots, txn = SlotManager(2), Txn()
    slots.admit(request("a"), txn)
    assert slots.remaining(request("a")) == 0
    txn.rollback()
    assert (slots.available(), slots.remaining(request("a"))) == (2, 1)
    with pytest.raises(ResourceError, match="has no slot"):
        slots.slot_of("a")


def test_misuse_is_refused():
    slots = SlotManager(2)
    slots.admit(request("a"), Txn())
    with pytest.raises(ResourceError, match="admitted twice"):
        slots.admit(request("a"), Txn())
    with pytest.raises(ResourceError, match="has no slot"):
        slots.prepare(StepPlan.of(0, (StepItem(request_id="b", start=0, count=1, samples=True),)), Txn())
    with pytest.raises(ResourceError):
        SlotManager(0)


def test_a_step_names_the_one_without_a_slot():
    slots = SlotManager(2)
    slots.admit(request("a"), Txn())
    rows = [StepItem(request_id=name, start=0, count=1, samples=True) for name in "ab"]
    slots.prepare(StepPlan.of(0, rows[:1]), Txn())
    with pytest.raises(ResourceError, match="'b' has no slot"):
        slots.prepare(StepPlan.of(0, rows), Txn())


def test_an_undo_leaves_one_of_the_same_name_alone():
    """It left and came back before the transaction of its first admission was rolled back."""
    slots, txn = SlotManager(2), Txn()
    slots.admit(request("a"), txn)
    slots.free("a")
    slots.admit(request("a"), Txn())
    txn.rollback()
    assert (slots.slot_of("a"), slots.available()) == (0, 1)


def test_after_a_reset_or_a_close_every_slot_is_free():
    """15: and what is undone later takes nothing from anybody."""
    slots, txn = SlotManager(3), Txn()
    for name in "abc":
        slots.admit(request(name), txn)
    slots.free("b")
    slots.reset()
    assert (slots.available(), slots.stats()["used"]) == (3, 0)
    slots.admit(request("b"), Txn())
    txn.rollback()
    assert (slots.slot_of("b"), slots.available()) == (0, 2)
    slots.close()
    slots.close()
    slots.free("b")
    assert slots.available() == slots.capacity() == 3
    with pytest.raises(ResourceError, match="closed"):
        slots.admit(request("a"), Txn())
    with pytest.raises(ResourceError, match="closed"):
        slots.prepare(StepPlan.of(0, ()), Txn())


@given(st.lists(st.integers(0, 9)))
def test_slots_stay_distinct_and_stable(toggles):
    """Each number is a request that arrives, or leaves if it is there."""
    slots, owned = SlotManager(4), {}
    for name in map(str, toggles):
        if name in owned:
            assert slots.slot_of(name) == owned.pop(name)
            slots.free(name)
        elif isinstance(slots.admit(request(name), Txn()), Grant):
            owned[name] = slots.slot_of(name)
        assert len(set(owned.values())) == len(owned) == 4 - slots.available()
