"""Prefixes: what is found, what it costs, who waits for whom, and what is left afterwards.

Numbers in comments are those of docs/invariants.md. Slabs remember the text that was written (``kv_cases``).
"""

from __future__ import annotations

from functools import partial

import kv_cases
import pytest
from kv_cases import ask, check_entries, compute, launch, run, serve, state, step

from tonnage.errors import DriverError, ResourceError
from tonnage.resources import prefixes
from tonnage.resources.admission import Optimistic
from tonnage.resources.base import Deferral, Grant
from tonnage.step import Txn, Veto

TEXT = list(range(100, 140))
manager = partial(kv_cases.manager, max_seq_len=40)


def admit(kv, request):
    """The answer of an admission that is final."""
    txn = Txn()
    answer = kv.admit(request, txn)
    txn.commit()
    kv.committed()
    return answer


# -- what is found -----------------------------------------------------------------------------------------------------

# length of the first text, of the second, how much they share -> cached tokens; 4 tokens a block
HITS = [
    (12, 12, 12, 11),  # the last token is computed for its logits: 8 in whole blocks and 3 by copy (5)
    (12, 13, 12, 12),
    (13, 13, 13, 12),
    (14, 16, 14, 14),  # what was released in the middle of a block is found as well
    (12, 16, 9, 9),
    (12, 16, 8, 8),
    (12, 16, 1, 1),
    (12, 16, 0, 0),
    (12, 1, 1, 0),
    (12, 2, 2, 1),
]


@pytest.mark.parametrize(("first", "second", "shared", "cached"), HITS)
def test_the_longest_cached_prefix_is_found_but_for_the_last_token(first, second, shared, cached):
    kv = manager(12)
    serve(kv, ask("a", TEXT[:first]))
    kv.free("a")
    other = ask("b", TEXT[:shared] + [7] * (second - shared), 4)
    grant = serve(kv, other)
    assert grant.cached_tokens == cached
    check_entries(kv, other, second)
    assert kv.watermarks("b").scheduled == second
    stats = kv.stats()
    assert (stats["hit_tokens"], stats["queried_tokens"]) == (cached, first + second)


def test_a_running_sequence_shares_what_it_has_committed():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:10]))
    grant = serve(kv, ask("b", TEXT[:10]))
    assert grant.cached_tokens == 8  # the block in the middle is still being written
    assert kv.block_ids("a")[:2].tolist() == kv.block_ids("b")[:2].tolist()
    assert kv.num_used == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": "x"}, {}),
        ({}, {"adapter_id": 0}),
        ({"adapter_id": 1}, {"adapter_id": 2}),
    ],
)
def test_other_salts_and_adapters_share_nothing(first, second):
    """7."""
    kv = manager(12)
    serve(kv, ask("a", TEXT[:12], **first))
    assert serve(kv, ask("b", TEXT[:12], **second)).cached_tokens == 0
    assert not set(kv.block_ids("a").tolist()) & set(kv.block_ids("b").tolist())
    kv.free("a")
    assert serve(kv, ask("c", TEXT[:12], **first)).cached_tokens == 11


def test_who_wants_no_reuse_reads_nothing_and_leaves_nothing():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:12], reuse=False))
    kv.free("a")
    assert kv.stats()["cached"] == 0
    serve(kv, ask("b", TEXT[:12]))
    assert serve(kv, ask("c", TEXT[:12], reuse=False)).cached_tokens == 0
    assert kv.stats()["queried_tokens"] == 12


def test_log_probabilities_of_the_prompt_are_computed_and_still_leave_its_blocks():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:12], prompt_logprobs=0))
    assert serve(kv, ask("b", TEXT[:12], prompt_logprobs=0)).cached_tokens == 0
    assert serve(kv, ask("c", TEXT[:12])).cached_tokens == 11


def test_without_reuse_nothing_is_cached_and_it_says_so():
    kv = manager(12, reuse=False)
    assert kv.no_reuse == "it is switched off"
    serve(kv, ask("a", TEXT[:12]))
    assert serve(kv, ask("b", TEXT[:12])).cached_tokens == 0
    kv.free("a")
    kv.free("b")
    assert (kv.stats()["cached"], kv.stats()["free"]) == (0, 12)


def test_entries_that_nobody_computed_are_not_shared():
    """A stand-in that says it has computed tokens; what its blocks hold is anything."""
    kv = manager(12)
    probe = ask("probe", TEXT[:8])
    probe.num_computed_tokens = 7
    kv.admit(probe, Txn())
    run(kv, step(("probe", 7, 1)))
    kv.free("probe")
    assert kv.stats()["cached"] == 0


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_claim_costs_what_nobody_holds_yet():
    """20: what is shared with somebody who runs is for nothing; what was only cached is not free any more."""
    kv = manager(12)
    assert admit(kv, ask("a", TEXT[:9], 4)) == Grant(cached_tokens=0, units=3)
    plan = step(("a", 0, 9))
    launch(kv, plan)
    kv.update(plan, None)
    assert kv.available() == 9
    assert admit(kv, ask("b", TEXT[:9], 4)) == Grant(cached_tokens=8, units=1)
    assert kv.available() == 8
    kv.free("a")
    kv.free("b")
    assert kv.available() == 12
    assert admit(kv, ask("c", TEXT[:9], 4)) == Grant(cached_tokens=8, units=3)
    assert kv.available() == 9


def test_a_deferral_counts_what_is_shared_and_takes_nothing():
    kv = manager(4)
    serve(kv, ask("a", TEXT[:9], 4))
    before = state(kv)
    assert kv.admit(ask("b", [7] * 9, 4), Txn()) == Deferral(manager="kv", need=3, have=1)
    assert state(kv) == before
    assert admit(kv, ask("c", TEXT[:9], 4)) == Grant(cached_tokens=8, units=1)


def test_the_block_to_copy_from_is_done_without_where_it_does_not_fit():
    """The source must stay until it is copied: with it the request needs 4 blocks, without it 3."""
    kv = manager(3)
    serve(kv, ask("a", TEXT[:7], 1))
    kv.free("a")
    assert kv.admit(ask("b", TEXT[:6] + [7] * 3, 4), Txn()) == Grant(cached_tokens=4, units=3)
    kv.free("b")
    assert kv.admit(ask("c", [*TEXT[:6], 7], 1), Txn()) == Grant(cached_tokens=6, units=3)


def test_an_admission_taken_back_leaves_no_trace():
    """13, 11: to the age of what it had claimed."""
    kv = manager(12)
    for name, text in (("a", TEXT[:11]), ("b", [7] * 9)):
        serve(kv, ask(name, text))
        kv.free(name)
    before, txn = state(kv), Txn()
    assert kv.admit(ask("c", TEXT[:10]), txn).cached_tokens == 9
    assert state(kv) != before
    txn.rollback()
    assert state(kv) == before


def test_claims_of_a_batch_survive_what_the_batch_allocates():
    """12: the first claims, then both allocate: nothing that was claimed is evicted."""
    kv = manager(6)
    for name, text in (("a", TEXT[:8]), ("b", [7] * 8)):
        serve(kv, ask(name, text, 1))
        kv.free(name)
    requests = {"c": ask("c", [*TEXT[:8], 1], 1), "d": ask("d", [5] * 12, 1)}
    txn = Txn()
    assert kv.admit(requests["c"], txn).cached_tokens == 8
    assert kv.admit(requests["d"], txn).cached_tokens == 0
    plan = step(("d", 0, 12), ("c", 8, 1))
    kv.prepare(plan, txn)
    compute(kv, plan, requests)
    check_entries(kv, requests["c"], 9)


# -- partial reuse -----------------------------------------------------------------------------------------------------


def test_a_step_that_copied_can_be_taken_back_and_prepared_again():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:11]))
    kv.free("a")
    request, txn = ask("b", [*TEXT[:10], 7]), Txn()
    assert admit(kv, request) == Grant(cached_tokens=10, units=6)
    before, plan = state(kv), step(("b", 10, 1))
    kv.prepare(plan, txn)
    txn.rollback()
    assert state(kv) == before
    again = Txn()
    kv.prepare(plan, again)
    compute(kv, plan, {"b": request})
    again.commit()
    assert kv.stats()["live"] == 4  # the source stays while the step may be taken back
    kv.committed()
    assert kv.stats()["live"] == 3
    kv.update(plan, None)
    check_entries(kv, request, 11)


@pytest.mark.parametrize("moment", ["admitted", "prepared", "final"])
def test_whoever_leaves_gives_the_source_back(moment):
    kv = manager(12)
    serve(kv, ask("a", TEXT[:11]))
    kv.free("a")
    admit(kv, ask("b", [*TEXT[:10], 7]))
    if moment != "admitted":
        txn = Txn()
        kv.prepare(step(("b", 10, 1)), txn)
        txn.commit()
    if moment == "final":
        kv.committed()
    kv.free("b")
    kv.committed()
    assert (kv.stats()["live"], kv.available()) == (0, 12)
    assert serve(kv, ask("c", TEXT[:11])).cached_tokens == 10


def test_a_copy_that_fails_is_taken_back():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:11]))
    kv.free("a")
    admit(kv, ask("b", [*TEXT[:10], 7]))
    before, txn = state(kv), Txn()
    kv.cache.mover.fails = DriverError("copy", "UNKNOWN", "injected")
    with pytest.raises(DriverError):
        kv.prepare(step(("b", 10, 1)), txn)
    txn.rollback()
    assert state(kv) == before
    run(kv, step(("b", 10, 1)))


# -- what is left ------------------------------------------------------------------------------------------------------


def test_two_that_compute_the_same_go_on_with_one():
    kv = manager(12)
    same = {name: ask(name, TEXT[:9]) for name in "ab"}
    for request in same.values():
        request.params = ask("x", [1], prompt_logprobs=0).params  # neither waits for the other
        admit(kv, request)
    plan = step(("a", 0, 9), ("b", 0, 9))
    launch(kv, plan)
    compute(kv, plan, same)
    assert kv.num_used == 6
    kv.update(plan, None)
    assert kv.num_used == 4
    assert kv.block_ids("a")[:2].tolist() == kv.block_ids("b")[:2].tolist()
    for request in same.values():
        check_entries(kv, request, 9)


def test_nothing_stays_of_one_that_is_not_to_be_kept():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:8]))
    kv.free("a")
    serve(kv, ask("b", TEXT[:8] + [7] * 6))
    kv.free("b", keep_cached=False)
    assert serve(kv, ask("c", TEXT[:8] + [7] * 6)).cached_tokens == 8  # what was there before stays


def test_what_others_hold_stays_for_them():
    kv = manager(12)
    serve(kv, ask("a", TEXT[:9]))
    serve(kv, ask("b", TEXT[:9]))
    kv.free("a", keep_cached=False)
    assert kv.stats()["cached"] == 0
    kv.free("b")
    assert serve(kv, ask("c", TEXT[:9])).cached_tokens == 8


def test_leaves_go_before_what_they_hang_on():
    """9: a sequence is given up from its end."""
    kv = manager(6)
    serve(kv, ask("a", TEXT[:16], 1))
    kv.free("a")
    serve(kv, ask("b", [7] * 16, 1))  # takes 4 of 6: two of a's are left, its first
    kv.free("b")
    found = ask("c", TEXT[:16], 1)
    assert serve(kv, found).cached_tokens == 8
    check_entries(kv, found, 16)


def test_a_suspended_request_finds_what_it_had():
    kv = manager(8)
    request = ask("a", TEXT[:6], 10)
    serve(kv, request)
    for token in range(5):
        request.token_ids.append(token)
        plan = step(("a", 6 + token, 1))
        launch(kv, plan)
        compute(kv, plan, {"a": request})
        kv.update(plan, None)
    kv.free("a")
    request.token_ids.append(9)
    assert serve(kv, request) == Grant(cached_tokens=11, units=5)  # 4 blocks of its life, and the one to copy from
    check_entries(kv, request, 12)


# -- pins --------------------------------------------------------------------------------------------------------------


def test_pinned_blocks_are_live_and_outlast_everything():
    """11."""
    kv = manager(6)
    serve(kv, ask("a", TEXT[:9], 1))
    pin = kv.free("a", pin_on_release=True)
    assert (len(pin.ids), kv.num_used, kv.available()) == (3, 3, 3)
    serve(kv, ask("b", [7] * 12, 1))
    kv.free("b")
    assert serve(kv, ask("c", TEXT[:9], 1)).cached_tokens == 8
    kv.free("c")
    pin.close()
    pin.close()
    assert not pin.is_open
    assert (kv.num_used, kv.available()) == (0, 6)


def test_pin_and_unpin_restore_everything():
    kv = manager(8)
    serve(kv, ask("a", TEXT[:10]))
    before = state(kv)
    with kv.pin("a") as pin:
        assert len(pin.ids) == 2  # whole blocks
        assert state(kv) != before
        assert kv.available() == before[-1]["available"]
    assert state(kv) == before


def test_pins_end_with_the_manager():
    kv = manager(8)
    serve(kv, ask("a", TEXT[:10]))
    pin = kv.pin("a")
    kv.reset()
    assert (pin.is_open, kv.num_used, kv.available()) == (False, 0, 8)
    with pytest.raises(ResourceError, match="holds no KV blocks"):
        kv.pin("a")
    assert kv.free("a", pin_on_release=True) is None


def test_a_block_that_was_never_shared_can_be_pinned_too():
    kv = manager(8, reuse=False)
    serve(kv, ask("a", TEXT[:6]))
    pin = kv.free("a", pin_on_release=True)
    assert kv.num_used == 2
    pin.close()
    assert kv.stats()["free"] == 8


# -- a neighbour is computing it ---------------------------------------------------------------------------------------


def test_it_waits_while_a_neighbour_computes_its_prefix():
    kv = manager(20, max_seq_len=40)
    admit(kv, ask("a", TEXT[:16]))
    other = ask("b", TEXT[:16])
    wait = Deferral(manager="kv", need=0, have=0, waits_for="a")
    assert kv.admit(other, Txn()) == wait
    run(kv, step(("a", 0, 8)))
    assert kv.admit(other, Txn()) == wait
    run(kv, step(("a", 8, 8)))
    assert kv.admit(other, Txn()) == Grant(cached_tokens=15, units=3)  # the last one by copy


def test_it_does_not_wait_for_one_that_stands_still():
    kv = manager(20)
    admit(kv, ask("a", TEXT[:16], 2))
    other = ask("b", TEXT[:16], 2)
    assert isinstance(kv.admit(other, Txn()), Deferral)
    assert kv.admit(other, Txn()) == Grant(cached_tokens=0, units=5)


@pytest.mark.parametrize("end", ["free", "rollback", "compute"])
def test_it_does_not_wait_for_what_will_not_come(end):
    kv = manager(20)
    txn = Txn()
    kv.admit(ask("a", TEXT[:16], 2), txn)
    if end == "free":
        txn.commit()
        kv.free("a")
    elif end == "rollback":
        txn.rollback()
    else:
        txn.commit()
        run(kv, step(("a", 0, 16)))
    assert not isinstance(kv.admit(ask("b", TEXT[:16], 2), Txn()), Deferral)


@pytest.mark.parametrize("fields", [{"reuse": False}, {"prompt_logprobs": 0}, {"salt": "x"}, {"adapter_id": 3}])
def test_who_could_not_use_it_does_not_wait(fields):
    kv = manager(20)
    admit(kv, ask("a", TEXT[:16], 2))
    assert admit(kv, ask("b", TEXT[:16], 2, **fields)) == Grant(cached_tokens=0, units=5)


def test_nobody_waits_for_the_block_of_its_last_token():
    kv = manager(20)
    admit(kv, ask("a", TEXT[:16], 2))
    assert admit(kv, ask("b", TEXT[:4], 2)) == Grant(cached_tokens=0, units=2)
    assert isinstance(kv.admit(ask("c", TEXT[:5], 2), Txn()), Deferral)


def test_who_asks_again_is_not_hashed_again(monkeypatch):
    kv = manager(5)
    admit(kv, ask("a", [7] * 16, 2))
    made, chain = [], prefixes.Chain
    monkeypatch.setattr(prefixes, "Chain", lambda *args: made.append(args) or chain(*args))
    request = ask("b", TEXT[:16], 2)
    for _ in range(5):
        assert isinstance(kv.admit(request, Txn()), Deferral)
    assert len(made) == 1
    for i in range(3 * prefixes.MAX_REMEMBERED):
        kv.admit(ask(f"r{i}", TEXT[:16], 2), Txn())
    assert len(kv._prefixes._remembered) == prefixes.MAX_REMEMBERED


# -- the host ----------------------------------------------------------------------------------------------------------


def offloaded(num_tokens=12):
    """A manager of 4 blocks whose cached text has gone to the host."""
    kv = manager(4, host=8, max_seq_len=16)
    serve(kv, ask("a", TEXT[:num_tokens], 1))
    kv.free("a")
    serve(kv, ask("b", [7] * 16, 0))
    kv.free("b", keep_cached=False)
    assert kv.stats()["offloaded"] == num_tokens // 4
    return kv


def test_what_lies_on_the_host_comes_back_once_the_admission_is_final():
    kv = offloaded()
    kv.cache.mover.hold_loads = True
    request, txn = ask("c", [*TEXT[:12], 1], 3), Txn()
    assert kv.admit(request, txn) == Grant(cached_tokens=12, units=4, is_loading=True)
    assert kv.stats()["loaded"] == 0
    txn.commit()
    kv.committed()
    assert (kv.stats()["loaded"], list(kv.loading())) == (3, ["c"])
    with pytest.raises(ResourceError, match="its blocks are loading"):
        kv.prepare(step(("c", 12, 1)), Txn())
    kv.cache.mover.finish_loads()
    assert not kv.loading()
    plan = step(("c", 12, 1))
    launch(kv, plan)
    compute(kv, plan, {"c": request})
    kv.update(plan, None)
    check_entries(kv, request, 13)


def test_waiting_for_a_load_ends():
    kv = offloaded()
    kv.wait_loaded()
    kv.cache.mover.hold_loads = True
    admit(kv, ask("c", [*TEXT[:12], 1], 3))
    assert list(kv.loading()) == ["c"]
    kv.wait_loaded()
    assert not kv.loading()


def test_two_wait_for_one_load():
    kv = manager(6, host=8, max_seq_len=24)
    serve(kv, ask("a", TEXT[:12], 1))
    kv.free("a")
    serve(kv, ask("b", [7] * 24, 0))
    kv.free("b", keep_cached=False)
    kv.cache.mover.hold_loads = True
    admit(kv, ask("c", [*TEXT[:12], 1], 1))
    assert admit(kv, ask("d", [*TEXT[:12], 2], 1)) == Grant(cached_tokens=12, units=1, is_loading=True)
    assert (sorted(kv.loading()), kv.stats()["loaded"]) == (["c", "d"], 3)
    kv.free("c")
    assert list(kv.loading()) == ["d"]
    kv.cache.mover.finish_loads()
    assert not kv.loading()


@pytest.mark.parametrize("moment", ["asked", "begun"])
def test_a_loading_sequence_that_leaves_gives_everything_back(moment):
    kv = offloaded()
    kv.cache.mover.hold_loads = True
    txn = Txn()
    kv.admit(ask("c", [*TEXT[:12], 1], 3), txn)
    txn.commit()
    if moment == "begun":
        kv.committed()
    kv.free("c")
    kv.committed()
    kv.cache.mover.finish_loads()
    assert not kv.loading()
    assert (kv.num_used, kv.available()) == (0, 4)
    kv.cache.mover.hold_loads = False
    assert serve(kv, ask("d", [*TEXT[:12], 1], 3)).cached_tokens == 12


def test_an_admission_that_would_load_is_taken_back_without_a_load():
    kv = offloaded()
    before, txn = state(kv), Txn()
    kv.admit(ask("c", [*TEXT[:12], 1], 3), txn)
    txn.rollback()
    kv.committed()
    assert state(kv) == before
    assert kv.stats()["loaded"] == 0


# -- slots move --------------------------------------------------------------------------------------------------------


def test_tables_follow_blocks_that_move():
    """4: the head is lent, its blocks are claimed by a sequence, and then it is taken back."""
    kv = manager(6, head=3, max_seq_len=24)
    serve(kv, ask("a", TEXT[:24], 0))
    kv.free("a")
    serve(kv, ask("b", [7] * 12, 0))  # a's blocks make way into the head
    kv.free("b", keep_cached=False)
    request = ask("c", TEXT[:24], 0)
    serve(kv, request)
    assert (kv.table[kv.row_index("c")][:6] < 3).any()
    before = kv.table.copy()
    assert kv.cache.take_back() is None
    assert (kv.table[kv.row_index("c")][:6] >= 3).all()
    assert not (kv.table == before).all()
    check_entries(kv, request, 24)


def test_a_step_that_lacks_blocks_is_vetoed_though_some_are_pinned():
    policy = Optimistic()
    for _ in range(99):
        policy.finished(1)
    kv = manager(6, admission=policy)
    serve(kv, ask("a", TEXT[:7], 10))
    with kv.pin("a"):
        serve(kv, ask("b", [7] * 4, 9))
        run(kv, step(("b", 4, 8)))
        before = state(kv)
        with pytest.raises(Veto, match="needs 2 blocks and 1 are free"):
            kv.prepare(step(("a", 7, 9)), Txn())
        assert state(kv) == before
