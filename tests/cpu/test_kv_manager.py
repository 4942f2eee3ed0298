"""KV blocks: whole lives are reserved exactly, pages arrive lazily, and a rollback leaves no trace.

How much a policy expects is in test_admission.py; any order of calls, under any policy, in test_kv_manager_machine.py.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from kv_cases import ask, group, manager, run, serve, state, step, window

from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import metadata_bytes_per_block
from tonnage.resources.admission import Optimistic, ReserveAll
from tonnage.resources.base import Deferral, Grant
from tonnage.resources.cache import BlockCache
from tonnage.resources.kv import KVManager
from tonnage.resources.sequences import Watermarks
from tonnage.resources.slots import SlotManager
from tonnage.step import Txn, Veto
from tonnage.terms import Fixed, LineKind, PerBlock


class Guess(ReserveAll):
    """Expects one token more than there is: whatever a sequence then takes is not reserved."""

    may_suspend = True

    def expected_new_tokens(self, generated, most):
        return np.minimum(generated + 1, most)


def request(name: str, prompt: int, new: int):
    """Its tokens are nobody else's."""
    return ask(name, [sum(name.encode())] * prompt, new)


# Whole-life blocks of a prompt of P tokens and M new ones; the "total" column of the reference's arithmetic at 32
# tokens a block, where beams are 1. Where P + M - 1 ends on a block boundary ours is one less: the last sampled token
# is never fed back, so its entries are never written.
WHOLE_LIFE = [
    (100, 60, 32, 5),
    (128, 32, 32, 5),
    (31, 1, 32, 1),
    (100, 61, 32, 5),  # the reference says 6
    (100, 62, 32, 6),
    (32, 1, 32, 1),  # the reference says 2
    (1, 1, 16, 1),
    (16, 2, 16, 2),
    (5, 0, 4, 2),  # nothing is generated, the prompt is still computed
]


@pytest.mark.parametrize(("prompt", "new", "block_tokens", "blocks"), WHOLE_LIFE)
def test_whole_life_blocks(prompt, new, block_tokens, blocks):
    kv = manager(block_tokens=block_tokens, max_seq_len=256)
    assert kv.lifetime_need(request("a", prompt, new)) == blocks


def test_a_life_uses_exactly_its_reservation():
    kv = manager()
    wanted = request("a", 6, 11)
    assert kv.admit(wanted, Txn()) == Grant(cached_tokens=0, units=4)
    run(kv, step(("a", 0, 6)))
    remaining = [kv.remaining(wanted)]
    for position in range(6, 16):
        run(kv, step(("a", position, 1)))
        remaining.append(kv.remaining(wanted))
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[-1] == 0
    with pytest.raises(ResourceError, match="in a life of 4 blocks"):
        kv.prepare(step(("a", 16, 1)), Txn())


def test_blocks_arrive_when_they_are_written():
    kv = manager()
    kv.admit(request("a", 6, 8), Txn())
    assert (kv.available(), kv.num_used) == (4, 0)
    run(kv, step(("a", 0, 4)))
    assert kv.block_ids("a").tolist() == [0]
    run(kv, step(("a", 4, 2)))
    assert kv.block_ids("a").tolist() == [0, 1]
    assert kv.table[kv.row_index("a")].tolist() == [*kv.cache.slots[[0, 1]], 0, 0, 0]
    assert (kv.available(), kv.num_used) == (4, 2)
    assert kv.stats()["reserved"] == 2


def test_a_deferral_says_need_and_have_and_takes_nothing():
    kv = manager()
    kv.admit(request("a", 16, 4), Txn())
    txn = Txn()
    assert kv.admit(request("b", 13, 4), txn) == Deferral(manager="kv", need=4, have=3)
    assert kv.available() == 3
    assert kv.admit(request("c", 12, 1), Txn()) == Grant(cached_tokens=0, units=3)


def test_without_a_row_the_sequence_waits():
    kv = manager(100, max_batch_size=2)
    for name in "ab":
        kv.admit(request(name, 1, 1), Txn())
    assert kv.admit(request("c", 1, 1), Txn()) == Deferral(manager="slots", need=1, have=0)
    assert kv.available() == 98


def test_rows_are_the_sequence_slots():
    slots = SlotManager(3)
    kv = manager(slots=slots)
    assert kv.after == {"slots"}
    for name in "ab":
        slots.admit(request(name, 4, 1), Txn())
    kv.admit(request("b", 4, 1), Txn())
    assert kv.row_index("b") == slots.slot_of("b") == 1
    kv.free("b")
    assert slots.slot_of("b") == 1


def test_more_slots_than_rows_is_refused():
    with pytest.raises(ResourceError):
        manager(max_batch_size=2, slots=SlotManager(3))


def test_watermarks_follow_the_steps():
    kv = manager()
    kv.admit(request("a", 6, 8), Txn())
    first, second = step(("a", 0, 6)), step(("a", 6, 1))
    for plan in (first, second):
        kv.prepare(plan, Txn())
    assert kv.watermarks("a") == Watermarks(scheduled=7, computed=0, committed=0)
    kv.update(first, None)
    assert kv.watermarks("a") == Watermarks(scheduled=7, computed=6, committed=4)
    kv.update(second, None)
    assert kv.watermarks("a") == Watermarks(scheduled=7, computed=7, committed=4)


def test_a_prepared_step_can_be_taken_back():
    kv = manager()
    kv.admit(request("a", 6, 8), Txn())
    kv.admit(request("b", 6, 8), Txn())
    run(kv, step(("a", 0, 3)))
    before = state(kv)
    txn = Txn()
    kv.prepare(step(("a", 3, 3), ("b", 0, 6)), txn)
    txn.rollback()
    assert state(kv) == before
    run(kv, step(("a", 3, 3), ("b", 0, 6)))


def test_a_step_whose_update_fails_elsewhere_can_still_be_taken_back():
    """Another manager raises after this one was updated; whoever drives them rolls the step back."""
    kv, txn = manager(), Txn()
    kv.admit(request("a", 6, 8), Txn())
    run(kv, step(("a", 0, 3)))
    before = state(kv)
    plan = step(("a", 3, 3))
    kv.prepare(plan, txn)
    kv.update(plan, None)
    txn.rollback()
    assert state(kv) == before


def test_a_sequence_freed_before_the_rollback_stays_freed():
    kv = manager()
    kv.admit(request("a", 6, 8), Txn())
    kv.admit(request("b", 6, 8), Txn())
    txn = Txn()
    kv.prepare(step(("a", 0, 6), ("b", 0, 6)), txn)
    kv.free("a")
    txn.rollback()
    assert (kv.num_used, kv.available()) == (0, 4)
    kv.free("b")
    assert kv.available() == 8


@pytest.mark.parametrize(
    "items",
    [
        [("a", 1, 2)],  # leaves a hole
        [("a", 0, 0)],  # computes nothing
        [("a", 0, 14)],  # past the reservation
        [("a", 0, 3), ("nobody", 0, 1)],
        [("a", 0, 3), ("a", 0, 3)],  # the same request twice
    ],
)
def test_a_wrong_step_is_refused_before_anything_changes(items):
    kv = manager()
    kv.admit(request("a", 5, 3), Txn())
    with pytest.raises(ResourceError):
        kv.prepare(step(*items), Txn())
    assert (kv.num_used, kv.watermarks("a").scheduled) == (0, 0)


def test_a_step_that_lacks_blocks_is_told_before_and_vetoed_if_it_comes_all_the_same():
    kv = manager(4, admission=Guess())
    for name in "ab":
        assert kv.admit(request(name, 6, 10), Txn()) == Grant(cached_tokens=0, units=2)
        run(kv, step((name, 0, 6)))
    # Both grow into a third block; none is free.
    assert kv.short_of(("a",), np.array([8])) == 0
    assert kv.short_of(("a", "b"), np.array([1, 9])) == 1  # what a holds beyond that helps nobody
    assert kv.short_of(("a", "b"), np.array([9, 8])) == 1
    assert kv.short_of(("a", "b"), np.array([9, 9])) == 2
    before = (kv.table.tolist(), kv.watermarks("a"))
    with pytest.raises(Veto, match="kv: the step needs 1 blocks and 0 are free"):
        kv.prepare(step(("a", 6, 3), ("b", 6, 2)), Txn())
    assert (kv.table.tolist(), kv.watermarks("a")) == before
    kv.free("b")
    run(kv, step(("a", 6, 3)))
    assert (kv.block_ids("a").size, kv.cache.num_available) == (3, 1)


def test_expectations_that_rise_leave_nothing_and_never_less():
    policy = Optimistic()
    for _ in range(99):
        policy.finished(1)
    kv = manager(admission=policy)
    for name in "ab":
        assert kv.admit(request(name, 6, 15), Txn()) == Grant(cached_tokens=0, units=2)
    assert kv.available() == 4
    for _ in range(4):
        policy.suspended()
    assert (kv.stats()["reserved"], kv.available()) == (10, 0)
    assert kv.admit(request("c", 1, 1), Txn()) == Deferral(manager="kv", need=1, have=0)


def test_only_admitted_requests_can_be_short():
    with pytest.raises(ResourceError, match="'nobody' holds no KV blocks"):
        manager().short_of(("nobody",), np.array([1]))


def test_a_suspended_request_comes_back_with_its_output():
    kv = manager(admission=Guess())
    back = request("a", 5, 15)
    back.token_ids += [1] * 7
    # 7 are generated and one more is expected: 12 tokens are written. From the prompt alone it would be 5.
    assert kv.admit(back, Txn()) == Grant(cached_tokens=0, units=3)
    assert kv.watermarks("a") == Watermarks(scheduled=0, computed=0, committed=0)
    run(kv, step(("a", 0, 8)))
    assert kv.stats()["reserved"] == 1
    run(kv, step(("a", 8, 4)))
    assert kv.stats()["reserved"] == 1  # the 13th token starts a block
    assert kv.remaining(back) == 2


def test_extra_tokens_are_reserved_beyond_the_end():
    limits = Limits(max_seq_len=20, max_batch_size=3, max_num_tokens=64, max_logits_rows=3)
    kv = manager(extra_tokens=3)
    assert kv.table.shape == (3, 6)
    assert kv.claims(limits)[0].cost == Fixed(bytes=2 * kv.table.nbytes)
    wanted = request("a", 6, 11)  # 16 tokens are written, and 3 more may be tried
    assert kv.lifetime_need(wanted) == 5
    assert kv.admit(wanted, Txn()) == Grant(cached_tokens=0, units=5)
    run(kv, step(("a", 0, 6)))
    run(kv, step(("a", 6, 13)))
    assert kv.remaining(wanted) == 0


def test_a_request_longer_than_the_table_is_our_defect():
    with pytest.raises(ResourceError, match="a sequence has 5"):
        manager(100).admit(request("a", 20, 2), Txn())


def test_the_update_of_a_freed_sequence_is_skipped():
    kv = manager()
    kv.admit(request("a", 5, 3), Txn())
    plan = step(("a", 0, 5))
    kv.prepare(plan, Txn())
    kv.free("a")
    kv.free("a")
    kv.update(plan, None)
    assert kv.cache.num_available == 8
    with pytest.raises(ResourceError, match="holds no KV blocks"):
        kv.block_ids("a")


def test_the_update_of_an_earlier_owner_of_the_name_is_skipped():
    kv = manager()
    kv.admit(request("a", 5, 3), Txn())
    plan = step(("a", 0, 5))
    kv.prepare(plan, Txn())
    kv.free("a")
    kv.admit(request("a", 5, 3), Txn())
    kv.update(plan, None)
    assert kv.watermarks("a") == Watermarks(scheduled=0, computed=0, committed=0)


def test_the_update_of_an_earlier_life_is_skipped_even_if_the_new_one_is_scheduled_as_far():
    kv = manager()
    for name in "ab":
        kv.admit(request(name, 5, 3), Txn())
    late = step(("a", 0, 5), ("b", 0, 3))
    kv.prepare(late, Txn())
    kv.free("a")
    kv.admit(request("a", 5, 3), Txn())
    kv.prepare(step(("a", 0, 5)), Txn())
    kv.update(late, None)
    assert kv.watermarks("a") == Watermarks(scheduled=5, computed=0, committed=0)
    assert kv.watermarks("b") == Watermarks(scheduled=3, computed=3, committed=0)


def test_a_rollback_spares_who_took_the_row_since():
    kv, txn = manager(max_batch_size=2), Txn()
    for name in "ab":
        kv.admit(request(name, 4, 4), Txn())
    kv.prepare(step(("a", 0, 4), ("b", 0, 4)), txn)
    kv.free("a")
    kv.admit(request("c", 8, 1), Txn())
    run(kv, step(("c", 0, 8)))
    txn.rollback()
    assert kv.row_index("c") == 0
    assert (kv.block_ids("b").size, kv.block_ids("c").size, kv.num_used) == (0, 2, 2)
    assert kv.watermarks("c") == Watermarks(scheduled=8, computed=8, committed=8)


def test_steps_that_never_land_are_forgotten_with_their_sequences():
    """An engine that fails a step's requests does not update the step."""
    kv = manager()
    for round_ in range(3):
        kv.admit(request(f"r{round_}", 5, 3), Txn())
        plan, txn = step((f"r{round_}", 0, 5)), Txn()
        kv.prepare(plan, txn)
        watched = weakref.ref(plan.counts)
        txn.commit()
        kv.free(f"r{round_}")
        del plan
        assert watched() is None


@pytest.mark.parametrize("call", ["admit", "prepare"])
def test_a_closed_manager_refuses_use(call):
    kv = manager()
    kv.admit(request("a", 5, 3), Txn())
    kv.close()
    kv.close()
    assert kv.cache.num_available == 8
    with pytest.raises(ResourceError, match="closed"):
        getattr(kv, call)(step() if call == "prepare" else request("b", 1, 1), Txn())


@pytest.mark.parametrize("groups", [[group()], [group(), window(6), group("more")]], ids=["one group", "three"])
def test_claims_are_what_it_allocates(groups):
    """A table of block ids and one of slots for each group; what is kept for each block of the pool."""
    limits = Limits(max_seq_len=20, max_batch_size=3, max_num_tokens=64, max_logits_rows=3)
    kv = manager(16, groups=groups)
    table, metadata = kv.claims(limits)
    assert table.cost == Fixed(bytes=len(groups) * 2 * 3 * 5 * 4)
    assert metadata.cost == PerBlock(bytes_per_block=metadata_bytes_per_block())
    # One entry of the slots stands for no block.
    assert kv.num_bytes == table.cost.bytes + 16 * metadata_bytes_per_block() + 4
    assert {table.line, metadata.line} == {LineKind.TABLES}


# max_num_tokens, max_seq_len, max_batch_size -> prompt lengths
PREFILL_PROBES = [
    (100, 41, 8, [40, 40, 20]),
    (80, 41, 8, [40, 40]),
    (30, 41, 8, [30]),
    (100, 41, 2, [40, 40]),  # no more sequences than may run at once
    (4, 1, 8, [1, 1, 1, 1]),
]


@pytest.mark.parametrize(("num_tokens", "seq_len", "batch_size", "lengths"), PREFILL_PROBES)
def test_the_prefill_probe_fills_one_step(num_tokens, seq_len, batch_size, lengths):
    limits = Limits(
        max_seq_len=seq_len, max_batch_size=batch_size, max_num_tokens=num_tokens, max_logits_rows=batch_size
    )
    probes = manager().probe("prefill", limits)
    assert [probe.num_prompt_tokens for probe in probes] == lengths
    assert len({probe.id for probe in probes}) == len(lengths)


def test_the_decode_probe_runs_as_it_is():
    limits = Limits(max_seq_len=20, max_batch_size=3, max_num_tokens=64, max_logits_rows=3)
    kv = manager()
    probes = kv.probe("decode", limits)
    assert len(probes) == 3
    for probe in probes:
        assert kv.admit(probe, Txn()) == Grant(cached_tokens=0, units=1)
    run(kv, step(*((probe.id, 1, 1) for probe in probes)))
    assert np.unique(np.concatenate([kv.block_ids(probe.id) for probe in probes])).size == 3
    assert kv.probe("encoder", limits) == ()


def test_beams_are_refused_clearly():
    class Beams(type(request("a", 4, 4))):
        num_beams = 4

    wanted = Beams(id="a", token_ids=[1], num_prompt_tokens=1, max_total_tokens=3)
    kv = manager()
    for ask_for in (kv.lifetime_need, lambda one: kv.admit(one, Txn())):
        with pytest.raises(ResourceError, match="'a' asks for 4 beams; beam search is not supported"):
            ask_for(wanted)


def test_a_manager_of_another_name_says_it_everywhere():
    kv = KVManager(BlockCache([group()], num_slots=4), block_tokens=4, max_seq_len=20, max_batch_size=3, name="draft")
    limits = Limits(max_seq_len=20, max_batch_size=3, max_num_tokens=64, max_logits_rows=3)
    assert {claim.owner for claim in kv.claims(limits)} == {"draft"}
    assert kv.admit(request("a", 16, 4), Txn()) == Deferral(manager="draft", need=5, have=4)


def test_an_allocation_that_fails_in_a_later_group_takes_nothing(monkeypatch):
    """13."""
    kv = manager(16, groups=[group(), group("more")])
    kv.admit(request("a", 6, 3), Txn())
    before, allocate = state(kv), kv.cache.allocate

    def failing(num_blocks, *, group=0):
        if group:
            raise MemoryError
        return allocate(num_blocks, group=group)

    monkeypatch.setattr(kv.cache, "allocate", failing)
    txn = Txn()
    with pytest.raises(MemoryError):
        kv.prepare(step(("a", 0, 6)), txn)
    txn.rollback()
    assert state(kv) == before


def test_a_step_of_many_decodes_touches_only_rows_that_begin_or_end_a_block(monkeypatch):
    """The others are arithmetic on arrays: no call into the cache for them."""
    kv = manager(100, max_batch_size=16, max_seq_len=40)
    for i in range(16):
        kv.admit(request(chr(65 + i), 4 + i % 4, 12), Txn())
        run(kv, step((chr(65 + i), 0, 4 + i % 4)))
    calls = []
    for name in ("allocate", "store", "release", "hold"):
        known = getattr(kv.cache, name)
        monkeypatch.setattr(
            kv.cache, name, lambda *args, known=known, name=name, **kw: (calls.append(name), known(*args, **kw))[1]
        )
    rows = [(chr(65 + i), 4 + i % 4, 1) for i in range(16)]
    # The stand-ins' texts do not grow: nothing past the prompt can be stored.
    run(kv, step(*rows))
    assert calls == ["allocate"]


@pytest.mark.parametrize("how", ["runs", "pinned", "ended"])
def test_what_is_generated_is_found_from_four_blocks_on_or_when_its_sequence_is_pinned_or_ends(how):
    kv = manager(40, max_batch_size=2, max_seq_len=80)
    first = ask("a", list(range(10)), 60)
    kv.admit(first, Txn())

    def found():
        """Of a text that begins as all of the first goes so far; it takes nothing."""
        txn = Txn()
        grant = kv.admit(ask("b", [*first.token_ids, 99], 1), txn)
        txn.rollback()
        return grant.cached_tokens // kv.block_tokens

    run(kv, step(("a", 0, 10)))
    assert found() == 2  # the prompt's whole blocks, at once
    seen = []
    for position in range(10, 45):
        first.token_ids.append(position)
        run(kv, step(("a", position, 1)))
        seen.append(found())
    assert seen == [2] * 5 + [4] * 16 + [8] * 14
    kv.pin("a") if how == "pinned" else kv.free("a") if how == "ended" else None
    assert found() == (8 if how == "runs" else 11)


def test_a_window_is_stored_block_by_block_before_it_moves_on():
    kv = manager(40, max_batch_size=2, max_seq_len=80, groups=[group(), window(8)])
    first = ask("a", list(range(10)), 60)
    kv.admit(first, Txn())
    run(kv, step(("a", 0, 10)))
    for position in range(10, 30):
        first.token_ids.append(position)
        run(kv, step(("a", position, 1)))
        txn = Txn()
        grant = kv.admit(ask("b", [*first.token_ids, 99], 1), txn)
        txn.rollback()
        assert grant.cached_tokens // kv.block_tokens == (position + 1) // kv.block_tokens


def test_reset_forgets_everything():
    kv = manager()
    serve(kv, request("a", 8, 2))
    kv.free("a")
    assert kv.stats()["cached"] == 2
    kv.reset()
    assert (kv.stats()["cached"], kv.stats()["free"]) == (0, 8)
