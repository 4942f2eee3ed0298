"""Groups of layers: what sees everything keeps everything, what has a window keeps what the window shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import ask, check_entries, compute, group, launch, manager, run, serve, step, window

from tonnage.errors import ResourceError
from tonnage.layout import KVGroupKind, group_blocks, window_blocks
from tonnage.resources.base import Grant
from tonnage.step import Txn

TEXT = list(range(100, 164))


def decode(kv, request, token):
    """One more token, computed."""
    request.token_ids.append(token)
    start = kv.watermarks(request.id).scheduled
    advance(kv, request, start, len(request.token_ids) - start)


def advance(kv, request, start, count):
    plan = step((request.id, start, count))
    launch(kv, plan)
    compute(kv, plan, {request.id: request})
    kv.update(plan, None)


def test_every_group_has_blocks_and_a_table_of_its_own():
    kv = manager(8, groups=[group("full-1"), group("full-2")])
    request = ask("a", TEXT[:6], 3)
    assert kv.lifetime_need(request) == 4
    assert serve(kv, request) == Grant(cached_tokens=0, units=4)
    assert (kv.num_used, kv.available()) == (4, 4)
    assert not set(kv.block_ids("a").tolist()) & set(kv.block_ids("a", group=1).tolist())
    assert kv.table is not kv.tables[1]
    kv.free("a")
    other = ask("b", TEXT[:6], 3)
    assert serve(kv, other).cached_tokens == 5
    check_entries(kv, other, 6)


def test_no_group_loses_all_before_another_loses_one():
    kv = manager(8, groups=[group("full-1"), group("full-2")])
    serve(kv, ask("a", TEXT[:16], 0))
    kv.free("a")
    serve(kv, ask("b", [7] * 4, 0))
    kv.free("b", keep_cached=False)
    assert serve(kv, ask("c", TEXT[:16], 0)).cached_tokens == 12


@pytest.mark.parametrize("tokens", [5, 6, 8, 9])
def test_a_window_gives_up_what_it_does_not_show(tokens):
    kv = manager(40, groups=[window(tokens)], max_seq_len=64)
    request = ask("a", TEXT[:3], 50)
    serve(kv, request)
    for token in range(40):
        decode(kv, request, token)
        computed = len(request.token_ids)
        first = max(0, computed - tokens + 1) // 4
        row = kv.table[kv.row_index("a")]
        assert kv.block_ids("a").size == -(-computed // 4) - first
        assert not row[:first].any()
        assert not row[-(-computed // 4) :].any()
        assert kv.num_used <= group_blocks(kv.cache.groups[0], computed) <= window_blocks(tokens, 4)


def test_what_fell_out_of_the_window_stays_cached():
    """A neighbour finds the prefix as far as its window needs; out of the window nothing is claimed."""
    kv = manager(40, groups=[window(6)], max_seq_len=64)
    serve(kv, ask("a", TEXT[:24], 8))
    assert (kv.num_used, kv.stats()["cached"]) == (2, 4)
    other = ask("b", TEXT[:17], 8)
    grant = serve(kv, other)
    assert grant.cached_tokens == 16
    assert kv.table[kv.row_index("b")][:2].tolist() == [0, 0]
    check_entries(kv, other, 17)


def test_windows_beside_full_layers_are_found_together():
    kv = manager(40, groups=[group(), window(6)], max_seq_len=64)
    serve(kv, ask("a", TEXT[:20], 8))
    kv.free("a")
    other = ask("b", TEXT[:19], 8)
    assert serve(kv, other).cached_tokens == 18
    check_entries(kv, other, 19)
    assert (kv.block_ids("b").size, kv.block_ids("b", group=1).size) == (5, 2)


def test_the_need_of_a_window_is_what_it_shows_and_what_is_under_way():
    asked = ask("a", TEXT[:32], 17)  # 48 tokens are written: 12 positions
    assert manager(40, groups=[window(6)], max_seq_len=64).lifetime_need(asked) == 12
    kv = manager(40, groups=[group(), window(6)], max_seq_len=64, max_pending_tokens=8)
    assert kv.lifetime_need(asked) == 12 + window_blocks(6, 4, extra_tokens=7)
    assert serve_in_chunks(kv, asked, 8) == [16, 16, 16, 16]
    # Past the prompt two steps of a token each may be under way.
    assert kv.stats()["reserved"] == 12 - 8 + max(0, window_blocks(6, 4, extra_tokens=1) - 2)


def serve_in_chunks(kv, request, size):
    """Blocks that are held or expected after each chunk."""
    assert kv.admit(request, Txn()).units == kv.lifetime_need(request)
    found = []
    for start in range(0, len(request.token_ids), size):
        assert kv.stats()["reserved"] + kv.num_used <= kv.lifetime_need(request)
        plan = step((request.id, start, size))
        launch(kv, plan)
        compute(kv, plan, {request.id: request})
        found.append(kv.num_used + kv.stats()["reserved"])
        kv.update(plan, None)
    return found


def to_the_end(kv, requests):
    """One token after the other of each, side by side; nobody may be short of a block."""
    while requests:
        for request in list(requests):
            if len(request.token_ids) + 1 == request.max_total_tokens:
                kv.free(request.id)
                requests.remove(request)
            else:
                decode(kv, request, len(request.token_ids))


#: With a window of 6 a decode of one text holds 3 blocks at most, with one of 9 there are 4, and the whole text has 7.
TWO = {
    "one window": ((window(6),), 3 + 3),
    "two windows": ((window(6), window(9)), 3 + 3 + 4 + 4),
    "beside full": ((group(), window(6)), 7 + 4 + 3 + 3),
}


@pytest.mark.parametrize("few", range(4))
@pytest.mark.parametrize("layers", TWO)
def test_who_shares_blocks_of_a_window_is_not_short_when_one_moves_on(layers, few):
    """Both begin with the same blocks, and each needs blocks of its own before the other lets go of any. The second is
    let in where both lives fit, and not before."""
    groups, need = TWO[layers]
    kv = manager(need - few, groups=list(groups), max_seq_len=64, max_pending_tokens=4)
    first, second, txn = ask("a", TEXT[:12], 14), ask("b", TEXT[:13], 14), Txn()
    assert isinstance(kv.admit(first, txn), Grant)
    txn.commit()
    for start in range(0, 12, 4):
        advance(kv, first, start, 4)
    running, answer = [first], kv.admit(second, txn := Txn())
    assert isinstance(answer, Grant) == (few == 0)
    if isinstance(answer, Grant):
        assert answer.cached_tokens == 12
        txn.commit()
        advance(kv, second, 12, 1)
        running.append(second)
    to_the_end(kv, running)
    assert (kv.num_used, kv.available()) == (0, kv.capacity())


def test_a_shared_block_of_a_window_counts_for_each_but_one_who_holds_it():
    kv = manager(40, groups=[group(), window(6)], max_seq_len=64)
    serve(kv, ask("a", TEXT[:12], 8))
    before = kv.num_used, kv.available()
    pin = kv.pin("a")  # 3 blocks of the full layers, 2 that the window shows
    assert (kv.cache.num_shared, kv.num_used, kv.available()) == (2, before[0], before[1] - 2)
    pin.close()
    assert (kv.cache.num_shared, kv.num_used, kv.available()) == (0, *before)


def test_who_is_alone_with_a_pin_takes_what_the_pin_leaves():
    """It is let in whenever it fits: what it will need is counted to the block."""
    for num_slots in range(4, 12):
        kv = manager(num_slots, groups=[window(6)], max_seq_len=64, max_pending_tokens=4)
        if not isinstance(kv.admit(first := ask("a", TEXT[:8], 0), Txn()), Grant):
            continue
        for start in (0, 4):
            advance(kv, first, start, 4)
        pin = kv.free(first.id, pin_on_release=True)
        need = kv.lifetime_need(request := ask("b", TEXT[:9], 12))
        answer = kv.admit(request, txn := Txn())
        # It begins with both pinned blocks and leaves them behind, so in the end it holds a window of its own.
        assert isinstance(answer, Grant) == (len(pin.ids) + need <= num_slots), num_slots
        if isinstance(answer, Grant):
            txn.commit()
            advance(kv, request, 8, 1)
            to_the_end(kv, [request])


def test_a_step_that_landed_cannot_be_taken_back_past_its_window():
    kv = manager(40, groups=[window(6)], max_seq_len=64)
    kv.admit(ask("a", TEXT[:24], 8), Txn())
    plan, txn = step(("a", 0, 24)), Txn()
    kv.prepare(plan, txn)
    kv.update(plan, None)
    with pytest.raises(ResourceError, match="out of the window"):
        txn.rollback()


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([group(), group("state", kind=KVGroupKind.STATE, block_tokens=0)], "recurrent state"),
        ([group(), window(4)], "no longer than a block of 4"),
    ],
)
def test_where_nothing_can_be_shared_it_says_so(groups, reason):
    kv = manager(16, groups=groups)
    assert reason in kv.no_reuse
    serve_plain(kv, ask("a", TEXT[:12], 4))
    kv.free("a")
    assert kv.admit(ask("b", TEXT[:12], 4), Txn()).cached_tokens == 0
    assert kv.stats()["cached"] == 0


def serve_plain(kv, request):
    kv.admit(request, Txn())
    run(kv, step((request.id, 0, len(request.token_ids))))


def test_states_take_no_blocks_here():
    kv = manager(16, groups=[group("state", kind=KVGroupKind.STATE, block_tokens=0), group()])
    serve_plain(kv, ask("a", TEXT[:12], 4))
    assert (kv.num_used, list(kv.tables), kv.block_ids("a", group=1).size) == (3, [1], 3)
    assert kv.table.shape[0] == 3


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([group(), group("cross", kind=KVGroupKind.CROSS)], "cross-attention"),
        ([group(), group("other", block_tokens=8)], "8 tokens a block, not 4"),
        ([group("state", kind=KVGroupKind.STATE, block_tokens=0)], "no group of layers keeps tokens"),
    ],
)
def test_groups_that_cannot_be_served_are_refused(groups, reason):
    with pytest.raises(ResourceError, match=reason):
        manager(16, groups=groups)


LAYERS = st.sampled_from(
    [
        (group(),),
        (window(5),),
        (window(9), window(6)),
        (group(), window(7)),
        (group("latent", kind=KVGroupKind.LATENT), window(6), group()),
    ]
)


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    groups=LAYERS,
    extra=st.sampled_from([0, 3]),
    pending=st.sampled_from([None, 4, 9]),
    shape=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 14), st.integers(1, 16)), min_size=2, max_size=5),
)
def test_texts_that_share_beginnings_are_computed_right_and_never_run_short(data, groups, extra, pending, shape):
    """4, 5, 6, 16, 19: chunks of any size, one step under way beside the next, in a pool that just holds one life."""
    requests = [ask(f"r{i}", [*TEXT[:shared], *([i] * own)], new) for i, (shared, own, new) in enumerate(shape)]
    trial = manager(1, groups=list(groups), max_seq_len=64, extra_tokens=extra, max_pending_tokens=pending)
    most = max(trial.lifetime_need(request) for request in requests)
    kv = manager(most, groups=list(groups), max_seq_len=64, extra_tokens=extra, max_pending_tokens=pending)
    for request in requests:
        run_to_its_end(kv, request, data, pending=pending)
    assert (kv.num_used, kv.available()) == (0, most)


def run_to_its_end(kv, request, data, *, pending):
    end, txn = request.max_total_tokens - 1, Txn()
    grant = kv.admit(request, txn)
    txn.commit()
    assert grant.cached_tokens < len(request.token_ids)
    # What is copied from stays held until it is.
    assert grant.units <= kv.lifetime_need(request) + len(kv.cache.groups) * (grant.cached_tokens % 4 > 0)
    start, landing, to_come = grant.cached_tokens, None, []
    while start < end:
        rest = min(len(request.token_ids) - start, (pending or 99) // 2)
        count = data.draw(st.integers(1, rest), label="chunk")
        plan = step((request.id, start, count))
        assert kv.short_of((request.id,), np.array([start + count])) == 0
        launch(kv, plan)
        compute(kv, plan, {request.id: request})
        to_come.append(kv.remaining(request) + sum(kv.block_ids(request.id, group=g).size for g in kv.tables))
        if landing is not None:
            kv.update(landing, None)
        landing, start = plan, start + count
        if start == len(request.token_ids) and start < end:
            request.token_ids.append(start)
    if landing is not None:
        kv.update(landing, None)
    assert max(to_come, default=0) <= kv.lifetime_need(request)
    kv.free(request.id)
