"""The cache of blocks: any order of calls keeps books and bytes, and each rule of it by an example. Numbers in comments
are those of docs/invariants.md."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_bench import ACTS, INJECTED, B, Bench, Seq, act, every_kind_of_copy, settle
from tonnage.caching import CacheParams
from tonnage.errors import DriverError, ResourceError
from tonnage.resources.blocks import NONE
from tonnage.resources.chain import Chain
from tonnage.resources.transfers import TransferBudget


@settings(max_examples=120)
@given(ACTS)
def test_any_order_of_calls_keeps_the_books_and_the_bytes(acts):
    bench = Bench()
    for one in acts:
        act(bench, one)
        bench.check()
    for seq in list(bench.seqs):
        bench.finish(seq)
    while bench.pins:
        bench.cache.release(bench.pins.pop())
    bench.check()
    bench.cache.lend()
    bench.cache.clear()
    assert bench.cache.num_free == bench.cache.num_slots  # 15
    assert bench.cache.stats()["host_free"] == bench.cache.num_host_slots
    assert bench.cache.tree.num_nodes == 0


@settings(max_examples=80)
@given(ACTS, st.integers(1, 30))
def test_a_copy_that_fails_changes_nothing_that_anybody_holds(acts, fail_at):
    """13: the books balance after an injected failure, and every sequence still finds its tokens."""
    bench = Bench()
    for number, one in enumerate(acts):
        bench.mover.fails = INJECTED if number == fail_at else None
        try:
            act(bench, one)
        except DriverError:
            settle(bench)
        bench.mover.fails = None
        bench.check()


def test_blocks_are_copied_in_every_way():
    assert every_kind_of_copy(Bench()) > 0


def fill(bench, *prompts):
    """Each prompt computed and released, so that all of it is cached."""
    for tokens in prompts:
        bench.finish(bench.start(list(tokens)))


def cached_tokens(bench, tokens):
    return bench.cache.match(Chain(bench.salt, list(tokens), B), max_tokens=len(tokens)).num_tokens


def test_the_oldest_goes_first_and_tails_before_heads():
    """9, and leaves first: of a prompt of three blocks the last is given up before the first."""
    bench = Bench(num_slots=6, head_slots=0, num_host_slots=0)
    first, second = range(12), range(20, 32)
    fill(bench, first, second)
    bench.start(list(range(40, 44)))
    assert (cached_tokens(bench, first), cached_tokens(bench, second)) == (8, 12)
    bench.start(list(range(50, 54)))
    assert (cached_tokens(bench, first), cached_tokens(bench, second)) == (4, 12)
    bench.start(list(range(60, 68)))
    assert (cached_tokens(bench, first), cached_tokens(bench, second)) == (0, 8)


def test_a_lower_priority_goes_before_an_older_block():
    """9: no block goes while one of a lower priority is there."""
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=0)
    bench.finish(bench.start([1] * 4 + [2] * 4, CacheParams(priority=80)))
    bench.finish(bench.start([3] * 4 + [4] * 4, CacheParams(priority=10)))
    bench.start([5] * 8)
    assert cached_tokens(bench, [1] * 4 + [2] * 4) == 8
    assert cached_tokens(bench, [3] * 4 + [4] * 4) == 0


def test_a_priority_runs_out_after_so_long_without_use():
    """10: then it is the newest of the default priority; use in between starts the time anew."""
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=0)
    kept = [1] * 4
    bench.finish(bench.start(kept, CacheParams(priority=80, retain_seconds=10)))
    fill(bench, [2] * 4)
    bench.now = 9.0
    bench.finish(bench.start([*kept, 9], CacheParams()))
    bench.now = 15.0
    bench.cache.begin_step()
    ranks = bench.cache.room.ranks
    block = bench.cache.tree.block(bench.cache.tree.walk(Chain(bench.salt, kept, B), 1)[0], 0)
    assert ranks.priorities[block] == 80
    bench.now = 19.5
    bench.cache.begin_step()
    assert ranks.priorities[block] == 35
    assert bench.cache.room.body.listed()[-1] == block


def test_what_is_pinned_is_not_evicted_and_unpinning_brings_the_queue_back():
    """11."""
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=0)
    seq = bench.start([1] * 8)
    bench.pin(seq)
    bench.finish(seq)
    before = bench.cache.num_cached
    with pytest.raises(ResourceError):
        bench.cache.allocate(3)
    bench.start([2] * 8)
    assert cached_tokens(bench, [1] * 8) == 8
    bench.cache.release(bench.pins.pop())
    assert (before, bench.cache.num_cached, bench.cache.num_available) == (0, 2, 2)


def test_worthy_blocks_go_to_the_host_and_come_back_on_a_match():
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=2)
    fill(bench, [1] * 8, [2] * 8)
    bench.start([3] * 8)
    assert bench.cache.stats()["offloaded"] == 2
    match = bench.cache.match(Chain(bench.salt, [1] * 8, B), max_tokens=8)
    assert (match.num_tokens, len(match.host_blocks), match.num_new_live) == (8, 2, 2)
    bench.finish(bench.seqs[0])
    bench.start([1] * 8 + [9])
    assert bench.cache.stats()["loaded"] == 2
    bench.check()


def test_unworthy_blocks_are_dropped_and_the_host_keeps_its_newest():
    bench = Bench(num_slots=2, head_slots=0, num_host_slots=1)
    bench.finish(bench.start([1] * 8, CacheParams(priority=29)))
    bench.finish(bench.start([2] * 8))
    assert bench.cache.stats()["offloaded"] == 0
    bench.finish(bench.start([3] * 8))
    # Of the two blocks the one that leads to the other is worth keeping: it is of use by itself.
    assert (bench.cache.stats()["offloaded"], cached_tokens(bench, [2] * 8)) == (1, 4)
    bench.finish(bench.start([4] * 8))
    assert (cached_tokens(bench, [2] * 8), cached_tokens(bench, [3] * 8)) == (0, 4)


def test_no_more_blocks_go_to_the_host_than_the_step_allows():
    budget = TransferBudget(slab_bytes=64, bytes_per_second=64, slice_s=1.0)
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=4, budget=budget)
    fill(bench, [1] * 8, [2] * 8)
    bench.cache.begin_step()
    bench.start([3] * 16)
    assert bench.cache.stats()["offloaded"] == 1
    assert cached_tokens(bench, [2] * 8) == 4


def test_a_load_in_flight_holds_its_blocks_and_is_seen_when_it_is_done():
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=4)
    fill(bench, [1] * 8, [2] * 8)
    bench.finish(bench.start([3] * 16))
    cache, chain = bench.cache, Chain(bench.salt, [2] * 8, B)
    bench.mover.hold_loads = True
    match = cache.match(chain, max_tokens=8)
    assert len(match.host_blocks) == 2
    cache.claim(match)
    cache.load(match.blocks[0])
    assert not cache.is_loaded(match.blocks[0])
    second = cache.match(chain, max_tokens=8)
    assert second.host_blocks == match.blocks[0]  # on their way: whoever matches them waits as well
    cache.unclaim(match)  # the request goes away, the transfer still writes there
    assert cache.num_live == 2
    with pytest.raises(ResourceError):
        cache.allocate(3)
    bench.mover.finish_loads()
    assert not cache.is_loaded(match.blocks[0])  # nobody has looked
    cache.look_at_loads()
    assert cache.is_loaded(match.blocks[0])
    assert (cache.num_live, cache.stats()["host_free"]) == (0, 4 - cache.stats()["host_cached"])
    bench.check()


def test_of_two_that_compute_the_same_one_block_stays():
    bench = Bench(num_slots=8, head_slots=0, num_host_slots=0)
    cache = bench.cache
    seqs = []
    for _ in range(2):
        ids = cache.allocate(1)
        seqs.append(Seq([1] * 4, Chain(bench.salt, [1] * 4, B), CacheParams(), ids.tolist()))
        bench.write(seqs[-1], 0)
    bench.seqs = seqs
    for seq in seqs:
        bench.store_full(seq)
    assert seqs[0].ids == seqs[1].ids
    assert (cache.num_live, cache.num_free) == (1, 7)
    bench.check()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_what_is_computed_again_replaces_its_copy_on_the_host(is_claimed):
    bench = Bench(num_slots=4, head_slots=0, num_host_slots=2)
    cache = bench.cache
    fill(bench, [1] * 4)
    bench.finish(bench.start([3] * 16))
    chain = Chain(bench.salt, [1] * 4, B)
    match = cache.match(chain, max_tokens=4)
    assert match.host_blocks
    if is_claimed:
        cache.claim(match)
    seq = Seq([1] * 4, chain, CacheParams(), cache.allocate(1).tolist())
    bench.write(seq, 0)
    bench.store_full(seq)
    assert seq.ids == match.blocks[0]
    assert cache.stats()["host_cached"] + cache.stats()["host_free"] == 2
    cache.load(match.blocks[0])  # nothing is left to load
    assert cache.is_loaded(match.blocks[0])
    if is_claimed:
        cache.release(match.blocks[0])
    bench.seqs = [seq]
    bench.check()


def test_the_head_is_lent_to_cached_blocks_and_taken_back_from_held_ones():
    bench = Bench(num_slots=6, head_slots=2, num_host_slots=0)
    fill(bench, [1] * 8, [2] * 8)
    fill(bench, [3] * 8)  # the body has four slots: the oldest moved into the head
    assert cached_tokens(bench, [1] * 8) == 8
    seq = bench.start([1] * 8 + [7])  # claimed where they lie, in the head
    in_head = [block for block in seq.ids if bench.cache.blocks.is_in_head(block)]
    assert len(in_head) == 2
    version = bench.cache.layout_version
    assert bench.cache.take_back() is None
    assert bench.cache.layout_version > version
    assert not any(bench.cache.blocks.is_in_head(block) for block in seq.ids)
    assert (bench.cache.blocks.owners[:2] == NONE).all()
    bench.check()
    bench.grow(seq, 7)
    bench.check()
    bench.cache.lend()
    assert bench.cache.num_free >= 2


def test_taking_back_keeps_what_ranks_highest():
    bench = Bench(num_slots=4, head_slots=2, num_host_slots=0)
    fill(bench, [1] * 4, [2] * 4, [3] * 4, [4] * 4)
    assert sum(cached_tokens(bench, [token] * 4) for token in (1, 2, 3, 4)) == 16
    assert bench.cache.take_back() is None
    assert [cached_tokens(bench, [token] * 4) for token in (1, 2, 3, 4)] == [0, 0, 4, 4]
    bench.check()


def test_the_head_is_part_of_the_pool_only_for_what_can_be_given_up():
    """Held blocks are at most the body, so that taking the head back can always be met."""
    bench = Bench(num_slots=6, head_slots=2, num_host_slots=0)
    assert (bench.cache.capacity, bench.cache.num_available) == (4, 4)
    bench.start([1] * 16)
    assert bench.cache.num_available == 0
    assert bench.start([2] * 4) is None
    assert bench.cache.take_back() is None


def test_batched_claims_keep_their_prefixes():
    """12: what a batch claimed is not lost while the batch allocates."""
    bench = Bench(num_slots=6, head_slots=0, num_host_slots=0)
    fill(bench, [1] * 8, [2] * 8)
    matches = [bench.cache.match(Chain(bench.salt, [token] * 9, B), max_tokens=8) for token in (1, 2)]
    for match in matches:
        bench.cache.claim(match)
    bench.cache.allocate(2)
    for token, match in zip((1, 2), matches, strict=True):
        assert [bench.carried(block) for block in match.blocks[0]] == [(token,) * 4] * 2


def test_unclaiming_gives_every_block_its_place_in_the_queue_back():
    bench = Bench(num_slots=6, head_slots=0, num_host_slots=0)
    fill(bench, [1] * 8, [2] * 8, [3] * 8)
    before = bench.cache.room.body.listed()
    match = bench.cache.match(Chain(bench.salt, [1] * 7, B), max_tokens=6)
    assert match.partial is not None
    bench.cache.claim(match)
    assert bench.cache.room.body.listed() != before
    bench.cache.unclaim(match)
    assert bench.cache.room.body.listed() == before


def test_misuse_is_found_before_anything_changes():
    bench = Bench()
    ids = bench.cache.allocate(2)
    for call in (
        lambda: bench.cache.release([ids[0], ids[0]]),
        lambda: bench.cache.release([11]),
        lambda: bench.cache.release([99]),
        lambda: bench.cache.allocate(9),
        lambda: bench.cache.take_back(5),
    ):
        with pytest.raises(ResourceError):
            call()
    assert bench.cache.num_live == 2


def test_switched_off_nothing_is_found_or_kept():
    bench = Bench(reuse=False)
    seq = bench.start([1] * 8)
    bench.seqs.remove(seq)
    bench.cache.release(seq.ids)
    assert cached_tokens(bench, [1] * 8) == 0
    assert bench.cache.num_free == bench.cache.num_slots
