"""The cache of blocks against a model that knows tokens: what is where, who holds it, what goes first.

Every device and host slot carries the tokens of the block that was written there, and a mover that copies them, so a
block that is found where it is not, or is overwritten before it was copied, shows as wrong tokens. Numbers in comments
are those of docs/invariants.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.caching import CacheParams
from tonnage.errors import DriverError, ResourceError
from tonnage.layout import KVGroup, KVGroupKind
from tonnage.resources.blocks import NONE, Level
from tonnage.resources.cache import BlockCache
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.mover import CountingMover
from tonnage.resources.transfers import TransferBudget
from tonnage.resources.tree import PrefixTree

B = 4
FULL = KVGroup(name="full", kind=KVGroupKind.FULL, layers=(0,), window=None, block_tokens=B, block_bytes=64, parts=())


PLAIN = CacheParams()


class Carrier(CountingMover):
    """Copies what slots carry; ``fails`` raises at the next call."""

    def __init__(self, num_slots, num_host_slots):
        super().__init__(64, num_slots=num_slots, num_host_slots=num_host_slots)
        self.device, self.host = [None] * num_slots, [None] * num_host_slots
        self.fails = False

    def _carry(self, source, src, target, dst):
        if self.fails:
            self.fails = False
            raise DriverError("copy", "UNKNOWN", "injected")
        values = [source[slot] for slot in src.tolist()]
        for slot, value in zip(dst.tolist(), values, strict=True):
            target[slot] = value

    def move(self, src, dst):
        super().move(src, dst)
        self._carry(self.device, src, self.device, dst)

    def offload(self, slots, host_slots):
        super().offload(slots, host_slots)
        self._carry(self.device, slots, self.host, host_slots)

    def load(self, host_slots, slots):
        load = super().load(host_slots, slots)
        self._carry(self.host, host_slots, self.device, slots)
        return load


@dataclass(eq=False)
class Seq:
    """A sequence as a manager would hold it: its tokens, blocks and nodes."""

    tokens: list[int]
    chain: Chain
    cache_params: CacheParams
    ids: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def parent(self):
        return self.nodes[-1] if self.nodes else PrefixTree.ROOT


class Bench:
    """A cache, the sequences that run over it, and what must be true of both."""

    def __init__(self, *, num_slots=12, head_slots=4, num_host_slots=5, **given):
        self.now = 0.0
        self.mover = Carrier(num_slots, num_host_slots)
        self.cache = BlockCache(
            (FULL,), num_slots=num_slots, head_slots=head_slots, num_host_slots=num_host_slots, mover=self.mover,
            clock=lambda: self.now, **given,
        )  # fmt: skip
        self.seqs: list[Seq] = []
        self.pins: list[list[int]] = []
        self.salt = scope_digest()

    def start(self, tokens, params=PLAIN):
        """A prompt of ``tokens``: claimed, loaded, computed. None where it has to wait."""
        tokens = list(tokens)
        cache, chain = self.cache, Chain(self.salt, tokens, B)
        match = cache.match(chain, max_tokens=len(tokens) - 1)
        num_blocks = -(-len(tokens) // B)
        need = match.num_new_live + num_blocks - match.num_blocks
        if need > cache.num_available:
            return None
        assert match.num_tokens < len(tokens)  # 5
        cache.claim(match)
        cache.retain(match, params)
        cache.load(match.blocks[0])
        cache.wait(match.blocks[0])
        seq = Seq(tokens, chain, params, list(match.blocks[0]), list(match.nodes))
        fresh = cache.allocate(num_blocks - match.num_blocks)
        if match.partial is not None:
            cache.copy_partial(match.partial, fresh[:1])
            carried = self.mover.device[cache.slots[fresh[0]]]
            first = match.num_blocks * B
            assert carried[: match.partial.num_tokens] == tuple(tokens[first : match.num_tokens])  # 6
        seq.ids += fresh.tolist()
        for index in range(match.num_blocks):  # 4, 6: what was matched holds these very tokens
            assert self.carried(seq.ids[index]) == tuple(tokens[index * B : index * B + B])
        for index in range(match.num_blocks, num_blocks):
            self.write(seq, index)
        self.store_full(seq)
        self.seqs.append(seq)
        return seq

    def carried(self, block):
        level, slot = self.cache.blocks.levels[block], self.cache.slots[block]
        return (self.mover.host if level == Level.HOST else self.mover.device)[slot]

    def write(self, seq, index):
        self.mover.device[self.cache.slots[seq.ids[index]]] = tuple(seq.tokens[index * B : index * B + B])

    def store_full(self, seq):
        for index in range(len(seq.nodes), len(seq.tokens) // B):
            node, held = self.cache.store(seq.chain, index, B, seq.parent, [seq.ids[index]], seq.cache_params)
            seq.nodes.append(node)
            seq.ids[index] = held[0]

    def grow(self, seq, token):
        if len(seq.tokens) % B == 0:
            if self.cache.num_available < 1:
                return
            seq.ids += self.cache.allocate(1).tolist()
        seq.tokens.append(token)
        self.write(seq, len(seq.ids) - 1)
        self.store_full(seq)

    def finish(self, seq):
        rest = len(seq.tokens) % B
        if rest:
            _, held = self.cache.store(seq.chain, len(seq.nodes), rest, seq.parent, [seq.ids[-1]], seq.cache_params)
            seq.ids[-1] = held[0]
        self.seqs.remove(seq)
        self.cache.release(seq.ids)

    def pin(self, seq):
        ids = seq.ids[: len(seq.nodes)]
        self.cache.hold(ids)
        self.pins.append(ids)

    def holders(self):
        return Counter(block for ids in [*(seq.ids for seq in self.seqs), *self.pins] for block in ids)

    def check(self):
        cache, blocks, room = self.cache, self.cache.blocks, self.cache.room
        holders = self.holders()
        assert {block: int(blocks.refs[block]) for block in np.flatnonzero(blocks.refs).tolist()} == dict(holders)
        assert cache.num_live == len(holders) <= cache.capacity
        self.check_slots()
        queued = [block for queue in (room.body, room.head, room.host) for block in queue.listed()]
        assert len(queued) == len(set(queued))
        placed = set(np.flatnonzero(blocks.levels != Level.NOWHERE).tolist())
        assert set(queued) == placed - set(holders)  # 1, 2
        for queue, is_its in (
            (room.body, lambda b: blocks.levels[b] == Level.DEVICE and blocks.slots[b] >= cache.head_slots),
            (room.head, lambda b: blocks.levels[b] == Level.DEVICE and blocks.slots[b] < cache.head_slots),
            (room.host, lambda b: blocks.levels[b] == Level.HOST),
        ):
            assert all(is_its(block) for block in queue.listed())
        for seq in self.seqs:
            for index, block in enumerate(seq.ids):
                assert blocks.levels[block] == Level.DEVICE
                assert self.carried(block) == tuple(seq.tokens[index * B : index * B + B])
        self.check_tree(queued)

    def check_slots(self):
        """4: ids and slots are a bijection, and every slot is owned, free or the scratch's."""
        blocks, room = self.cache.blocks, self.cache.room
        for level, owners, stacks in (
            (Level.DEVICE, blocks.owners, (blocks.free_body, blocks.free_head)),
            (Level.HOST, blocks.host_owners, (blocks.free_host,)),
        ):
            here = np.flatnonzero(blocks.levels == level)
            assert sorted(blocks.slots[here].tolist()) == np.flatnonzero(owners != NONE).tolist()
            assert (owners[blocks.slots[here]] == here).all()
            free = sorted(slot for stack in stacks for slot in stack.listed().tolist())
            taken = set(range(room.lent)) if level == Level.DEVICE else set()
            assert sorted({*free, *taken, *np.flatnonzero(owners != NONE).tolist()}) == list(range(owners.size))
            assert len(free) + len(taken) + np.count_nonzero(owners != NONE) == owners.size
        num_placed = np.count_nonzero(blocks.levels != Level.NOWHERE)
        assert len(blocks.free_ids) + num_placed == blocks.num_blocks

    def check_tree(self, queued):
        """Children never outlive or outrank their parents; 3: what is queued is a node's block."""
        blocks, tree, ranks = self.cache.blocks, self.cache.tree, self.cache.room.ranks
        for block in queued:
            node = int(blocks.nodes[block])
            assert tree.block(node, 0) == block
            parent = tree.parent(node)
            if parent == PrefixTree.ROOT:
                continue
            above = tree.block(parent, 0)
            assert above != NONE
            assert tree.num_tokens(parent) == B  # 8
            assert ranks.priorities[above] >= ranks.priorities[block]
            if not blocks.refs[above]:
                assert ranks.ranks[above] > ranks.ranks[block]
                assert (blocks.levels[above], blocks.levels[block]) != (Level.HOST, Level.DEVICE)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
PARAMS = st.builds(
    CacheParams, priority=st.sampled_from([0, 30, 35, 80]), retain_seconds=st.sampled_from([None, 1.0, 3.0]),
    retain_tokens=st.sampled_from([None, 4, 8]),
)  # fmt: skip
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), TOKENS, st.one_of(st.just(CacheParams()), PARAMS)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("pin"), st.integers(0, 9)),
        st.tuples(st.just("unpin")),
        st.tuples(st.just("take back"), st.integers(0, 4)),
        st.tuples(st.just("lend")),
        st.tuples(st.just("later"), st.sampled_from([0.5, 2.0])),
        st.tuples(st.just("clear")),
    ),
    max_size=40,
)


def act(bench, act):
    match act:
        case "start", tokens, params:
            bench.start(list(tokens), params)
        case "grow", which, token if bench.seqs:
            bench.grow(bench.seqs[which % len(bench.seqs)], token)
        case "finish", which if bench.seqs:
            bench.finish(bench.seqs[which % len(bench.seqs)])
        case "pin", which if bench.seqs and bench.seqs[which % len(bench.seqs)].nodes:
            bench.pin(bench.seqs[which % len(bench.seqs)])
        case ("unpin",) if bench.pins:
            bench.cache.release(bench.pins.pop())
        case "take back", num_slots:
            bench.cache.take_back(num_slots)
        case ("lend",):
            bench.cache.lend()
        case "later", seconds:
            bench.now += seconds
            bench.cache.begin_step()
        case ("clear",):
            bench.cache.clear()


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
        bench.mover.fails = number == fail_at
        try:
            act(bench, one)
        except DriverError:
            settle(bench)
        bench.mover.fails = False
        bench.check()


def settle(bench):
    """What the failed call had claimed or allocated for a sequence that never began is let go, as an undo would: from
    the back."""
    blocks, tree = bench.cache.blocks, bench.cache.tree
    held = Counter({block: int(blocks.refs[block]) for block in np.flatnonzero(blocks.refs).tolist()})

    def depth(block):
        node = int(blocks.nodes[block])
        return 0 if node == NONE else 1 + next(d for d in range(99) if above(tree, node, d) == PrefixTree.ROOT)

    for block in sorted((held - bench.holders()).elements(), key=depth, reverse=True):
        bench.cache.release([block])


def above(tree, node, num_steps):
    for _ in range(num_steps):
        node = tree.parent(node)
    return node


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
