"""The cache while blocks are on their way from the host, when their waiter has left, and when they do not come; and
what eviction, retention and roll-backs leave behind.

Slabs remember the text that was written (``kv_cases``); those of ``test_kv_late_copies`` get it as late as they may.
"""

from __future__ import annotations

from functools import partial

import kv_cases
import numpy as np
import pytest
from kv_cases import Slabs, ask, check_entries, compute, group, launch, run, serve, state, step, window
from test_kv_late_copies import LateSlabs, injected

from cache_bench import Bench
from tonnage.caching import DEFAULT_PRIORITY
from tonnage.engine import Finish
from tonnage.engine.stub import stub_engine
from tonnage.errors import ResourceError, TransferFailed
from tonnage.resources.base import Deferral, Grant
from tonnage.resources.cache import BlockCache
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.kv import KVManager
from tonnage.resources.transfers import TransferBudget
from tonnage.sampling import SamplingParams
from tonnage.step import Txn

TEXT = list(range(100, 140))
manager = partial(kv_cases.manager, max_seq_len=16, max_batch_size=4)


def admit(kv, request):
    """The answer of an admission that is final."""
    txn = Txn()
    answer = kv.admit(request, txn)
    txn.commit()
    kv.committed()
    return answer


def gone(kv, request):
    """Served, and nothing of it is left."""
    serve(kv, request)
    kv.free(request.id, keep_cached=False)


def match(kv, tokens):
    chain = Chain(scope_digest(), list(tokens), kv.block_tokens)
    return kv.cache.match(chain, max_tokens=len(chain.tokens))


def assert_all_is_back(kv):
    """Nobody holds anything, and no slot and no id is missing or twice there."""
    assert (kv.num_used, kv.available(), kv.stats()["sequences"]) == (0, kv.capacity(), 0)
    Bench.check_slots(kv)  # it looks at the cache alone


# -- who goes with a parent --------------------------------------------------------------------------------------------


def a_child_that_came_after_its_parent_was_let_go():
    """Of two blocks of a text the second lay on the host, and its waiter left before it had come."""
    kv = manager(8, host=1)
    serve(kv, ask("a", TEXT[:8], 1))
    kv.free("a")
    for name, text in (("f", [9] * 16), ("g", [8] * 12)):
        serve(kv, ask(name, text, 1))
    for name in "fg":
        kv.free(name, keep_cached=False)
    assert kv.stats()["host_cached"] == 1
    kv.cache.mover.hold_loads = True
    assert admit(kv, ask("b", TEXT[:9], 1)).is_loading
    kv.free("b")
    kv.cache.mover.finish_loads()
    kv.cache.mover.hold_loads = False
    return kv


def test_live_blocks_never_share_a_slot_though_a_waiter_left_before_its_block_came():
    kv = a_child_that_came_after_its_parent_was_let_go()
    requests = [ask("e", [6] * 8, 1), ask("h", [5] * 12, 1), ask("d", [7] * 12, 1)]
    for request in requests:
        serve(kv, request)
    for request in requests:
        check_entries(kv, request, len(request.token_ids))
    Bench.check_slots(kv)
    for request in requests:
        kv.free(request.id)
    assert_all_is_back(kv)


def test_a_block_that_comes_when_nobody_waits_goes_before_its_parent():
    kv = a_child_that_came_after_its_parent_was_let_go()
    assert not kv.loading()
    tree, cached = kv.cache.tree, kv.cache.room.body.listed()
    assert [tree.depth(int(kv.cache.blocks.nodes[block])) for block in cached] == [1, 0]


@pytest.mark.parametrize(
    ("groups", "kept"),
    [([window(5), group()], {}), ([group(), window(5)], {"priority": 50, "retain_seconds": 1.0})],
    ids=["window first", "priorities that fall back"],
)
def test_a_victim_that_went_with_a_dropped_parent_is_not_offloaded(groups, kept):
    """The link takes one block a step: of two victims at one node one is dropped, and the other goes with it."""
    now = [0.0]
    cache = BlockCache(
        groups,
        num_slots=6,
        num_host_slots=8,
        mover=Slabs(6, 8),
        budget=TransferBudget(slab_bytes=64, bytes_per_second=64, slice_s=1.0),
        clock=lambda: now[0],
    )
    kv = KVManager(cache, block_tokens=4, max_seq_len=12, max_batch_size=2)
    serve(kv, ask("a", TEXT[:4], 1, **kept))
    kv.free("a")
    now[0] = 2.0
    cache.begin_step()
    request = ask("d", [7] * 12, 1)
    admit(kv, request)
    plan = step(("d", 0, 12))
    launch(kv, plan)
    compute(kv, plan, {"d": request})
    check_entries(kv, request, 12)
    Bench.check_slots(kv)
    assert (cache.stats()["offloaded"], cache.tree.num_nodes) == (0, 0)
    kv.free("d")
    assert_all_is_back(kv)


# -- transfers whose waiter has left -----------------------------------------------------------------------------------


def on_host(num_slots, *, num_tokens=8, late=False, **fields):
    """A manager whose cached text, of whole blocks, lies on the host. ``late``: what comes from there comes late."""
    fields = {"max_seq_len": 32} | fields
    kv = manager(num_slots, host=8, **fields)
    if late:
        kv.cache.mover = kv.cache.room.mover = LateSlabs(num_slots, 8)
    serve(kv, ask("a", TEXT[:num_tokens], 1))
    kv.free("a")
    gone(kv, ask("f", [9] * 4 * num_slots, 0))
    assert kv.stats()["host_cached"] == num_tokens // 4
    kv.cache.mover.hold_loads = True
    return kv


def test_admission_counts_what_a_transfer_held_that_has_just_ended():
    """Its waiter has left: the blocks that come in that moment are cached, and whoever claims them pays for them."""
    kv = on_host(4)
    assert admit(kv, ask("b", TEXT[:9], 1)).is_loading
    kv.free("b")
    kv.cache.mover.finish_loads()
    assert admit(kv, ask("x", [5] * 4, 5, reuse=False)) == Grant(cached_tokens=0, units=2)
    other, txn = ask("y", TEXT[:9], 4), Txn()
    assert kv.lifetime_need(other) == 3
    assert isinstance(kv.admit(other, txn), Deferral)
    for start, count in ((0, 4), (4, 4)):
        run(kv, step(("x", start, count)))


def engine_with_a_transfer_nobody_waits_for(max_tokens, **fields):
    """ "r" runs; "b", which loads, is cancelled. A load takes three steps."""
    engine = stub_engine(
        **{"kv_tokens": 96, "max_seq_len": 96, "max_batch_size": 4, "max_num_tokens": 64, **fields},
        prefix_caching=True,
        host_kv_tokens=256,
        checks_contents=True,
    )
    prompt = list(range(1, 34))
    for number in range(100):  # an optimistic policy expects short answers from now on
        submit(engine, f"s{number}", [99] * 4, max_tokens=2)
        drain(engine)
    for name, tokens in (("a", prompt), ("f", [99] * 90)):
        submit(engine, name, tokens, max_tokens=1)
        drain(engine)
    engine._runtime.mover._load_steps = lambda: 3
    submit(engine, "r", [55] * 8, max_tokens=max_tokens)
    engine.step()
    submit(engine, "b", prompt, max_tokens=1)
    engine.step()
    assert engine.progress().num_loading == 1
    engine.cancel("b")
    return engine


def submit(engine, name, tokens, *, max_tokens, prompt_logprobs=None, **cache):
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        prompt_logprobs=prompt_logprobs,
        cache=kv_cases.CacheParams(**cache),
    )
    engine.submit(engine.request(name, params, token_ids=tokens))


def drain(engine, *, most=200):
    done = {}
    for _ in range(most):
        if not engine.has_work:
            return done
        done |= {one.request_id: one for one in engine.step()}
    raise AssertionError(f"still at work after {most} steps: {engine.progress()}")


def test_who_runs_short_has_what_an_abandoned_transfer_held_as_soon_as_it_has_ended():
    """Alone, it looks nothing up, and nobody else does."""
    engine = engine_with_a_transfer_nobody_waits_for(80)
    done = drain(engine)
    assert (done["b"].finish_reason, done["r"].finish_reason) == (Finish.CANCELLED, Finish.LENGTH)
    assert len(done["r"].token_ids) == 80
    assert engine._runtime.shadow.told == []


@pytest.mark.parametrize("fields", [{"reuse": False}, {"prompt_logprobs": 0}], ids=["no reuse", "prompt logprobs"])
@pytest.mark.parametrize("admission", ["optimistic", "reserve_all"])
def test_who_waits_for_the_whole_pool_has_what_an_abandoned_transfer_held(admission, fields):
    """It matches nothing, so that it never looks at what is on its way."""
    engine = engine_with_a_transfer_nobody_waits_for(6, admission=admission)
    submit(engine, "n", [77] * 92, max_tokens=4, **fields)
    done = drain(engine)
    assert done["n"].finish_reason is Finish.LENGTH
    assert engine.stats()["kv.live"] == 0
    assert engine._runtime.shadow.told == []


# -- who computes what another loads -----------------------------------------------------------------------------------


def overtaken(num_computed):
    """ "l" loads 8 tokens while "n", which wants log-probabilities of its prompt, computes ``num_computed`` of them."""
    kv = on_host(8, late=True)
    loader, other = ask("l", [*TEXT[:8], 1], 1), ask("n", TEXT[:num_computed], 1, prompt_logprobs=0)
    assert admit(kv, loader).is_loading
    assert admit(kv, other).cached_tokens == 0
    plan = step(("n", 0, num_computed))
    launch(kv, plan)
    compute(kv, plan, {"n": other})
    kv.update(plan, None)
    assert len(kv.cache.mover.under_way) == 1, "nobody has waited for it"
    return kv, loader, other


def read_on(kv, request):
    """Its last token, computed on what it has found."""
    plan = step((request.id, 8, 1))
    launch(kv, plan)
    compute(kv, plan, {request.id: request})
    kv.update(plan, None)
    check_entries(kv, request, 9)


@pytest.mark.parametrize("ending", ["arrive", "lose"])
def test_who_computes_all_that_another_loads_takes_its_place_in_the_tree(ending):
    """Both go on at once, on the same blocks; how the transfer ends is nobody's affair any more."""
    kv, loader, other = overtaken(8)
    assert not kv.loading()
    assert kv.block_ids("l").tolist() == kv.block_ids("n").tolist()
    check_entries(kv, other, 8)
    getattr(kv.cache.mover, ending)()
    read_on(kv, loader)
    check_entries(kv, other, 8)
    if ending == "lose":
        with pytest.raises(TransferFailed):
            kv.loading()
    assert not kv.loading()
    assert kv.num_used == 3
    for name in "nl":
        kv.free(name)
    assert_all_is_back(kv)
    found = ask("z", [*TEXT[:8], 2], 1)
    assert serve(kv, found).cached_tokens == 8
    check_entries(kv, found, 9)


def test_who_computes_a_part_of_what_another_loads_leaves_it_to_wait_for_the_rest():
    kv, loader, other = overtaken(4)
    assert list(kv.loading()) == ["l"]
    check_entries(kv, other, 4)
    kv.cache.mover.arrive()
    assert not kv.loading()
    read_on(kv, loader)
    check_entries(kv, other, 4)
    assert kv.num_used == 3
    for name in "nl":
        kv.free(name)
    assert_all_is_back(kv)


def test_what_was_computed_stays_where_the_rest_of_a_transfer_does_not_come():
    kv, _, other = overtaken(4)
    kv.cache.mover.lose()
    with pytest.raises(TransferFailed):
        kv.loading()
    kv.free("l")
    check_entries(kv, other, 4)
    kv.free("n")
    assert_all_is_back(kv)
    assert match(kv, TEXT[:8]).num_tokens == 4


# -- loads that fail ---------------------------------------------------------------------------------------------------


def test_blocks_that_do_not_come_are_out_of_the_cache_and_counted():
    kv = on_host(8, late=True)
    assert admit(kv, ask("c", [*TEXT[:8], 1], 3)).is_loading
    kv.cache.mover.lose()
    with pytest.raises(TransferFailed, match=r"2 blocks did not come from the host .*injected"):
        kv.loading()
    assert kv.stats()["lost"] == 2
    assert match(kv, TEXT[:8]).num_tokens == 0
    kv.free("c")
    assert not kv.loading(), "it is told once"
    assert_all_is_back(kv)
    assert kv.stats()["host_free"] == 8
    request = ask("d", [*TEXT[:8], 1], 3)
    assert serve(kv, request).cached_tokens == 0
    check_entries(kv, request, 9)


def test_what_lies_below_a_block_that_did_not_come_cannot_be_found_either():
    """On the device or on the host: nothing leads there any more, and its slots are free."""
    kv = on_host(8, num_tokens=12, late=True)
    assert admit(kv, ask("c", TEXT[:8], 1)).is_loading  # its first block: the second has its last token
    kv.cache.mover.lose()
    with pytest.raises(TransferFailed):
        kv.loading()
    kv.free("c")
    assert kv.stats()["host_cached"] == kv.cache.tree.num_nodes == 0
    assert_all_is_back(kv)


def test_a_load_that_cannot_be_asked_for_leaves_its_blocks_on_the_host():
    kv = on_host(8)
    kv.cache.mover.fails = injected()
    with pytest.raises(TransferFailed, match="2 blocks cannot be loaded from the host"):
        admit(kv, ask("c", [*TEXT[:8], 1], 3))
    kv.free("c")
    assert (kv.stats()["host_cached"], kv.stats()["lost"]) == (2, 0)
    assert_all_is_back(kv)
    assert serve(kv, ask("d", [*TEXT[:8], 1], 3)).cached_tokens == 8


def test_a_manager_closes_though_a_load_does_not_come():
    kv = on_host(8, late=True)
    assert admit(kv, ask("c", [*TEXT[:8], 1], 3)).is_loading
    kv.cache.mover.lose()
    kv.close()
    assert_all_is_back(kv)
    kv.cache.close()


class FailsLater:
    """A load that is under way for some looks, and then has failed."""

    def __init__(self, num_looks):
        self.num_looks = num_looks

    @property
    def is_done(self):
        self.num_looks -= 1
        if self.num_looks < 0:
            raise injected()
        return False

    def wait(self):
        raise injected()


def loading_what_will_fail(num_looks):
    kv = on_host(8)
    assert admit(kv, ask("l", [*TEXT[:8], 1], 1)).is_loading
    kv.cache.incoming._loading[0].load = FailsLater(num_looks)
    return kv


def look_until_it_fails(kv):
    for _ in range(6):
        kv.loading()


@pytest.mark.parametrize("num_looks", range(4))
def test_nobody_is_told_to_run_on_blocks_that_did_not_come(num_looks):
    """Whenever it is noticed: between two looks of one call, too."""
    kv = loading_what_will_fail(num_looks)
    for _ in range(6):
        try:
            assert list(kv.loading()) == ["l"]
        except TransferFailed:
            break
    else:
        pytest.fail("nobody was told")


@pytest.mark.parametrize("num_looks", range(4))
def test_nobody_finds_blocks_that_turn_out_not_to_have_come(num_looks):
    """Their waiter has left; that they failed is seen when the next request looks its prefix up."""
    kv = loading_what_will_fail(num_looks)
    kv.free("l")
    grant = admit(kv, ask("x", [*TEXT[:8], 1], 1))
    assert grant.is_loading == (grant.cached_tokens > 0)
    held = kv.block_ids("x")
    assert (kv.cache.blocks.nodes[held] >= 0).all(), "it holds what the tree has given up"
    kv.free("x")
    with pytest.raises(TransferFailed):
        look_until_it_fails(kv)
    assert_all_is_back(kv)


@pytest.mark.parametrize("num_looks", range(4))
def test_who_computes_blocks_that_turn_out_not_to_have_come_stores_its_own(num_looks):
    """That the load failed is seen while the block takes its place in the tree."""
    kv = loading_what_will_fail(num_looks)
    other = ask("n", TEXT[:9], 1, prompt_logprobs=0)
    admit(kv, other)
    plan = step(("n", 0, 9))
    launch(kv, plan)
    compute(kv, plan, {"n": other})
    kv.update(plan, None)
    check_entries(kv, other, 9)
    kv.free("l")
    kv.free("n")
    with pytest.raises(TransferFailed):
        look_until_it_fails(kv)
    assert_all_is_back(kv)
    assert match(kv, TEXT[:9]).num_tokens == 9


# -- retention ---------------------------------------------------------------------------------------------------------


def priorities(kv):
    """(priority, seconds) of cached blocks by their depth in the tree."""
    ranks, blocks, tree = kv.cache.room.ranks, kv.cache.blocks, kv.cache.tree
    found = {}
    for block in kv.cache.room.body.listed():
        found.setdefault(tree.depth(int(blocks.nodes[block])), set()).add(
            (ranks.priorities[block], ranks.seconds[block])
        )
    return found


def test_a_parent_that_expires_before_its_child_falls_back_after_it():
    now = [0.0]
    kv = manager(8, clock=lambda: now[0])
    for name, tokens, seconds in (("b", TEXT[:8], 10.0), ("a", [*TEXT[:4], 9], 5.0)):
        serve(kv, ask(name, tokens, 1, priority=80, retain_seconds=seconds))
        kv.free(name)
    default = (DEFAULT_PRIORITY, None)
    for then, parents, children in (
        (6.0, {(80, 10.0)}, {(80, 10.0), default}),
        (11.0, {(80, 10.0)}, {default}),
        (17.0, {default}, {default}),
    ):
        now[0] = then
        kv.cache.begin_step()
        assert priorities(kv) == {0: parents, 1: children}, then
        order = [kv.cache.tree.depth(int(kv.cache.blocks.nodes[block])) for block in kv.cache.room.body.listed()]
        assert order == sorted(order, reverse=True), "the parent goes last"


def test_an_admission_taken_back_leaves_priorities_as_they_were():
    now = [0.0]
    kv = manager(8, clock=lambda: now[0])
    serve(kv, ask("a", TEXT[:8], 1))
    kv.free("a")
    before, kept = state(kv), priorities(kv)
    txn = Txn()
    assert kv.admit(ask("b", TEXT[:9], 1, priority=0, retain_seconds=1.0), txn).cached_tokens == 8
    txn.rollback()
    assert (state(kv), priorities(kv)) == (before, kept)
    now[0] = 100.0
    kv.cache.begin_step()
    assert (state(kv), priorities(kv)) == (before, kept)
    admit(kv, ask("b", TEXT[:9], 1, priority=0, retain_seconds=1.0))
    kv.free("b")
    assert priorities(kv) == {0: {(0, 1.0)}, 1: {(0, 1.0)}}, "one that is final does ask"


def test_deadlines_of_blocks_that_were_used_again_do_not_pile_up():
    kv = manager(8, clock=lambda: 0.0)
    for number in range(500):
        name = f"a{number}"
        serve(kv, ask(name, [*TEXT[:8], number], 1, priority=80, retain_seconds=86400.0))
        kv.free(name)
    assert kv.cache.num_cached == 8
    assert len(kv.cache.room.deadlines._heap) < 1100  # those that count no more are let be up to a thousand


# -- a step that has landed is taken back ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "is_refused"), [(1, False), (3, True), (4, True), (8, True)])
def test_a_landed_step_is_taken_back_only_while_the_window_shows_what_it_began_with(count, is_refused):
    """Nine tokens are computed; a token at 9 sees those from 5 on, in the second block."""
    kv = manager(16, groups=[group(), window(5)], max_seq_len=40)
    request = ask("a", TEXT[:24], 4)
    admit(kv, request)
    plan = step(("a", 0, 9))
    launch(kv, plan)
    compute(kv, plan, {"a": request})
    kv.update(plan, None)
    check_entries(kv, request, 9)
    plan, txn = step(("a", 9, count)), Txn()
    kv.prepare(plan, txn)
    compute(kv, plan, {"a": request})
    kv.update(plan, None)
    if is_refused:
        with pytest.raises(ResourceError, match="out of the window"):
            txn.rollback()
        kv.free("a")
        assert np.count_nonzero(kv.cache.blocks.refs) == 0
        return
    txn.rollback()
    assert kv.watermarks("a").scheduled == 9
    check_entries(kv, request, 9)
    run(kv, step(("a", 9, 1)))
