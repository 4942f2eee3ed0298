"""Drafts: what is rejected is given back, exactly; and a target and a draft cache keep step with each other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import ask, check_entries, compute, entry, launch, manager, outcome, places, run, serve, state, step

from tonnage.errors import ResourceError
from tonnage.resources.base import Deferral
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.sequences import Watermarks
from tonnage.resources.slots import SlotManager
from tonnage.step import Txn, Veto

TEXT = list(range(100, 164))


def test_rejected_drafts_are_not_computed_and_their_blocks_go_back():
    kv = manager(8)
    serve(kv, ask("a", TEXT[:6], 14))
    plan = step(("a", 6, 9), drafts=[8])
    launch(kv, plan)
    assert (kv.block_ids("a").size, kv.watermarks("a").scheduled) == (4, 15)
    kv.update(plan, outcome(plan, [1]))
    assert kv.watermarks("a") == Watermarks(scheduled=8, computed=8, committed=8)
    assert (kv.block_ids("a").size, kv.num_used, kv.stats()["reserved"]) == (2, 2, 3)
    run(kv, step(("a", 8, 1)))


def test_a_step_that_sampled_nothing_accepts_nothing():
    kv = manager(8)
    serve(kv, ask("a", TEXT[:6], 14))
    run(kv, step(("a", 6, 4), drafts=[3]))
    assert kv.watermarks("a").computed == 7


@pytest.mark.parametrize(("drafts", "accepted"), [([3], [4]), ([3], [-1]), ([4], [0])])
def test_an_outcome_that_cannot_be_changes_nothing(drafts, accepted):
    kv = manager(8)
    serve(kv, ask("a", TEXT[:6], 14))
    plan = step(("a", 6, 4), drafts=drafts)
    launch(kv, plan)
    before = state(kv)
    with pytest.raises(ResourceError, match="drafts were accepted"):
        kv.update(plan, outcome(plan, accepted))
    assert state(kv) == before


def test_a_step_on_top_of_guesses_is_a_defect():
    kv = manager(8)
    serve(kv, ask("a", TEXT[:6], 14))
    first, second = step(("a", 6, 3), drafts=[2]), step(("a", 9, 1))
    launch(kv, first)
    launch(kv, second)
    with pytest.raises(ResourceError, match="before it was known"):
        kv.update(first, outcome(first, [1]))


def test_drafts_of_a_sequence_that_has_left_are_nobodys():
    kv = manager(8)
    for name, text in (("a", TEXT[:6]), ("b", [7] * 6)):
        serve(kv, ask(name, text, 6))
    plan = step(("a", 6, 3), ("b", 6, 3), drafts=[2, 2])
    launch(kv, plan)
    kv.free("a")
    kv.update(plan, outcome(plan, [0, 2]))
    assert kv.watermarks("b").computed == 9


def test_guesses_never_get_into_the_tree():
    """What was written for a rejected draft is overwritten before its block is whole."""
    kv = manager(12)
    request = ask("a", TEXT[:6], 12)
    serve(kv, request)
    request.token_ids.append(1)
    plan = step(("a", 6, 5), drafts=[4])
    launch(kv, plan)
    compute(kv, plan, {"a": request}, {"a": [*request.token_ids, 50, 51, 52, 53]})
    request.token_ids += [50, 9]  # one is kept, and 9 was drawn instead of 51
    kv.update(plan, outcome(plan, [1]))
    kv.free("a")
    other = ask("b", [*request.token_ids, 3], 4)
    assert serve(kv, other).cached_tokens == 8
    check_entries(kv, other, 10)


@pytest.mark.parametrize(("extra", "most", "rounds"), [(0, 3, 100), (3, 3, 500), (2, 6, 100)])
def test_ten_thousand_steps_of_drafts_leave_exactly_what_counts(extra, most, rounds):
    """14: blocks of the kept tokens and of the extra ones, no more and no fewer, and no drift."""
    draw = random.Random(extra * 10 + most)
    kv = manager(48, max_seq_len=180, extra_tokens=extra)
    for round_ in range(rounds):
        request = ask(f"r{round_}", [draw.randrange(3) for _ in range(draw.randrange(1, 9))], 160)
        end = kv.kv_tokens(request)
        grant = serve(kv, request)
        kept, held = len(request.token_ids), -(-len(request.token_ids) // 4)
        assert grant.cached_tokens < kept
        for _ in range(20):
            request.token_ids.append(draw.randrange(3))
            drafts = draw.randrange(0, most + 1)
            guesses = [draw.randrange(3) for _ in range(drafts)]
            accepted = draw.randrange(0, drafts + 1)
            plan = step((request.id, kept, 1 + drafts), drafts=[drafts])
            assert kept + 1 + drafts <= end
            launch(kv, plan)
            compute(kv, plan, {request.id: request}, {request.id: request.token_ids + guesses})
            request.token_ids += guesses[:accepted]
            kv.update(plan, outcome(plan, [accepted]))
            held = max(held, -(-(kept + 1 + drafts) // 4))
            kept += 1 + accepted
            if accepted < drafts:
                held = min(held, -(-(kept + extra) // 4))
            assert kv.watermarks(request.id).computed == kv.watermarks(request.id).scheduled == kept
            assert kv.block_ids(request.id).size == held == kv.num_used
            assert -(-kept // 4) <= held <= -(-(kept + max(extra, drafts - accepted)) // 4)
        check_entries(kv, request, kept)
        kv.free(request.id)
        assert (kv.num_used, kv.available()) == (0, 48)


# -- a target and a draft cache ----------------------------------------------------------------------------------------


class Saboteur(SlotManager):
    """The last in line: says no when it is told to."""

    name = "saboteur"
    after = frozenset({"kv", "draft"})
    says_no = False

    def admit(self, request, txn):
        return Deferral(manager=self.name, need=1, have=0) if self.says_no else super().admit(request, txn)

    def prepare(self, plan, txn):
        if self.says_no:
            raise Veto(self.name, "no")
        super().prepare(plan, txn)


class Pair:
    def __init__(self):
        self.slots, self.saboteur = SlotManager(3), Saboteur(3)
        self.target = manager(20, max_seq_len=40, slots=self.slots, extra_tokens=2)
        draft = manager(14, max_seq_len=40).cache
        self.draft = KVManager(
            draft, block_tokens=4, max_seq_len=40, max_batch_size=3, slots=self.slots, extra_tokens=2, name="draft"
        )
        self.dispatcher = Dispatcher([self.saboteur, self.draft, self.target, self.slots])

    def check(self, names):
        """46."""
        assert set(self.target._row_of) == set(self.draft._row_of) == set(self.slots._owned) == set(names)
        for name in names:
            assert self.target.row_index(name) == self.draft.row_index(name)
            assert self.target.watermarks(name) == self.draft.watermarks(name)

    def state(self):
        return state(self.target), state(self.draft), self.slots.stats()

    def is_as(self, before):
        """Exactly, or, where something was evicted meanwhile, but for what is cached."""
        for now, then in zip(self.state()[:2], before[:2], strict=True):
            if now[-1]["evicted"] == then[-1]["evicted"]:
                assert now == then
            else:
                assert now[3:5] == then[3:5]
                assert now[-1]["available"] == then[-1]["available"]
        assert self.slots.stats() == before[2]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), calls=st.lists(st.sampled_from("aaasssscvvf"), min_size=10, max_size=30))
def test_target_and_draft_hold_the_same_sequences(data, calls):
    """46, 13: whatever is deferred, vetoed, rolled back, cancelled in the middle or ends."""
    pair, live, number = Pair(), {}, 0
    for call in calls:
        pair.saboteur.says_no = call == "v"
        txn, before = Txn(), pair.state()
        joins = None
        if call in "av":
            number += 1
            joins = ask(f"r{number}", TEXT[: data.draw(st.integers(1, 9))], 12)
            if isinstance(pair.dispatcher.admit(joins, txn), Deferral):
                pair.is_as(before)
                joins = None
            elif pair.target.watermarks(joins.id) != pair.draft.watermarks(joins.id):
                # The smaller cache forgot what the other still has; the step begins where both have all before it.
                txn.rollback()
                pair.is_as(before)
                txn, joins = Txn(), None
            else:
                live[joins.id] = joins
        if call == "f" and live:
            gone = data.draw(st.sampled_from(sorted(live)))
            pair.dispatcher.free(gone)
            del live[gone]
        elif call in "asvc":
            finishes = step_of_all(pair, live, txn, data, cancels=call == "c")
            if not finishes:
                if joins is not None:
                    del live[joins.id]
                pair.is_as(before)
        pair.check(live)
    for name in list(live):
        pair.dispatcher.free(name)
    assert (pair.target.num_used, pair.draft.num_used) == (0, 0)


def step_of_all(pair, live, txn, data, *, cancels):
    """One step with drafts for everybody; whether it went through."""
    items, drafts = [], []
    for name, request in live.items():
        start = pair.target.watermarks(name).scheduled
        rest = len(request.token_ids) - start
        guesses = min(data.draw(st.integers(0, 2)), request.max_total_tokens + 1 - start - rest)
        items.append((name, start, rest + guesses))
        drafts.append(guesses)
    plan = step(*items, drafts=drafts)
    try:
        pair.dispatcher.prepare(plan, txn)
    except Veto:
        txn.rollback()
        return False
    if cancels and live:
        name = data.draw(st.sampled_from(sorted(live)))
        pair.dispatcher.free(name)
        del live[name]
    txn.commit()
    pair.dispatcher.committed()
    accepted = [data.draw(st.integers(0, guesses)) for guesses in drafts]
    pair.dispatcher.update(plan, outcome(plan, accepted))
    for (name, _, _), kept in zip(items, accepted, strict=True):
        if name in live:
            request = live[name]
            request.token_ids += [kept] * (kept + 1)
            if len(request.token_ids) >= request.max_total_tokens:
                pair.dispatcher.free(name)
                del live[name]
    return True


def test_places_and_entries_of_the_tests_agree():
    """The checks themselves: an entry written elsewhere is seen."""
    kv = manager(8)
    request = ask("a", TEXT[:6], 3)
    serve(kv, request)
    slot, offset = places(kv, request, 0, 5, 6)[0]
    assert kv.cache.mover.device[slot][offset] == entry(request, 5)
    kv.cache.mover.device[slot][offset] = entry(request, 4)
    with pytest.raises(AssertionError):
        check_entries(kv, request, 6)
    assert np.count_nonzero(kv.table[kv.row_index("a")]) <= 2
