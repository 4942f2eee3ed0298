"""A cache of blocks under sequences that know their tokens: what is where, who holds it, what goes first.

Every device and host slot carries the tokens of the block that was written there, and a mover that copies them, so a
block that is found where it is not, or is overwritten before it was copied, shows as wrong tokens. Numbers in comments
are those of docs/invariants.md.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tonnage.caching import CacheParams
from tonnage.errors import DriverError
from tonnage.layout import KVGroup, KVGroupKind
from tonnage.resources.blocks import NONE, Level
from tonnage.resources.cache import BlockCache
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.mover import CountingMover
from tonnage.resources.tree import PrefixTree

B = 4
FULL = KVGroup(name="full", kind=KVGroupKind.FULL, layers=(0,), window=None, block_tokens=B, block_bytes=64, parts=())
INJECTED = DriverError("copy", "UNKNOWN", "injected")

PLAIN = CacheParams()


class Carrier(CountingMover):
    """Copies what slots carry; ``fails`` is raised at the next call."""

    def __init__(self, num_slots, num_host_slots=0, *, hold_loads=False):
        super().__init__(64, num_slots=num_slots, num_host_slots=num_host_slots, hold_loads=hold_loads)
        self.device, self.host = [None] * num_slots, [None] * num_host_slots
        self.fails = None

    def _carry(self, source, src, target, dst):
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        values = [copy.copy(source[slot]) for slot in src.tolist()]
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
        self.mover = self.make_mover(num_slots, num_host_slots)
        self.cache = BlockCache(
            (FULL,), num_slots=num_slots, head_slots=head_slots, num_host_slots=num_host_slots, mover=self.mover,
            clock=lambda: self.now, **given,
        )  # fmt: skip
        self.seqs: list[Seq] = []
        self.pins: list[list[int]] = []
        self.salt = scope_digest()

    def make_mover(self, num_slots, num_host_slots):
        return Carrier(num_slots, num_host_slots)

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
            carried, first = self.carried(fresh[0]), match.num_blocks * B
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


def every_kind_of_copy(bench):
    """Acts after which blocks have moved in every way there is; the least of the counts."""
    for turn in range(3):
        for number in range(5):
            bench.finish(bench.start([number] * 8 + [turn]))
            bench.check()
        # Some have gone to the host meanwhile: one of them is wanted again.
        texts = [[number] * 8 + [turn, 9] for number in range(5)]
        gone = [text for text in texts if bench.cache.match(Chain(bench.salt, text, B), max_tokens=8).host_blocks]
        bench.finish(bench.start(gone[-1]))
        bench.finish(bench.start([4] * 6 + [7]))  # ends in the middle of a block that is there
        bench.cache.take_back()
        bench.check()
        bench.cache.lend()
    done = bench.cache.stats()
    return min(done[name] for name in ("offloaded", "loaded", "moved", "partial_copies", "taken_back", "evicted"))
