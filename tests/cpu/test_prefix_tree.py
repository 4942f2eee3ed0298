"""The prefix tree against a plain dictionary from texts to blocks.

The model knows every node by (scope, all tokens up to its end). What the tree finds, keeps and forgets is compared with
it after every call, with the true hash and with one that collides all the time. Numbers in comments are those of
docs/invariants.md.
"""

from __future__ import annotations

import gc
import hashlib
import random
import tracemalloc
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import ResourceError
from tonnage.resources import chain as chain_module
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.tree import MAX_SIBLINGS, PrefixTree, node_bytes

B = 3
SCOPES = (scope_digest(), scope_digest(salt="a"))
#: Digests of one of three values: most texts share theirs with others.
WEAK = SimpleNamespace(
    sha256=lambda data: SimpleNamespace(digest=lambda: bytes([hashlib.sha256(data).digest()[0] % 3]) * 32)
)
#: Digests that say no more than the last token.
LAST_TOKEN = SimpleNamespace(sha256=lambda data: SimpleNamespace(digest=lambda: bytes(28) + data[-4:]))
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
#: Two groups of layers: a node stays as long as either has a block.
GROUPS = 2


class Model:
    """A tree, and what it should hold: (scope, tokens) of each node, its number, the block of each group."""

    def __init__(self):
        self.tree = PrefixTree(block_tokens=B, num_groups=GROUPS)
        self.nodes = {}  # (scope, tokens) -> node
        self.blocks = {}  # (scope, tokens) -> [block or -1 by group]
        self.newest = []  # keys by when they were made
        self.next = 0

    def parent_of(self, key):
        scope, tokens = key
        return scope, tokens[: (len(tokens) - 1) // B * B]

    def store(self, scope, text, group):
        """All of the text, its last partial block too, as far as no collision is in the way."""
        chain, parent = Chain(scope, text, B), PrefixTree.ROOT
        for index in range(-(-len(text) // B)):
            end = min(len(text), index * B + B)
            key = (scope, tuple(text[:end]))
            try:
                node = self.tree.insert(parent, chain, index, end - index * B)
            except ResourceError:
                assert key not in self.nodes
                break
            assert self.tree.insert(parent, chain, index, end - index * B) == node
            assert self.nodes.setdefault(key, node) == node
            if key not in self.blocks:
                self.blocks[key] = [-1] * GROUPS
                self.newest.insert(0, key)
            if self.blocks[key][group] == -1:
                self.tree.attach(node, group, self.next)
                self.blocks[key][group], self.next = self.next, self.next + 1
            parent = node

    def drop(self, which, group):
        """One group's block of one node; nodes that are left with nothing go."""
        key = self.newest[which % len(self.newest)]
        node = self.nodes[key]
        self.tree.detach(node, group)
        self.tree.prune(node)
        self.blocks[key][group] = -1
        while key[1] and set(self.blocks[key]) == {-1} and not self.children(key):
            for known in (self.nodes, self.blocks):
                del known[key]
            self.newest.remove(key)
            key = self.parent_of(key)

    def children(self, key):
        return [one for one in self.newest if one[1] and self.parent_of(one) == key]

    def number(self, key):
        return self.nodes[key] if key[1] else PrefixTree.ROOT

    def check(self):
        tree = self.tree
        assert tree.num_nodes == len(self.nodes) == len(set(self.nodes.values()))
        for (scope, tokens), node in self.nodes.items():
            first = (len(tokens) - 1) // B * B
            assert (tree.scope(node), tree.token_ids(node)) == (scope, tokens[first:])  # 6, 7
            assert (tree.num_tokens(node), tree.depth(node)) == (len(tokens) - first, first // B)
            parent = self.parent_of((scope, tokens))
            assert tree.parent(node) == self.number(parent)
            assert tree.parent(node) == PrefixTree.ROOT or tree.num_tokens(tree.parent(node)) == B  # 8
            assert [tree.block(node, group) for group in range(GROUPS)] == self.blocks[scope, tokens]
            assert tree.children(node) == [self.nodes[one] for one in self.children((scope, tokens))]
            below = tree.subtree(node)
            assert set(below) == {n for (s, t), n in self.nodes.items() if s == scope and self.is_under(t, tokens)}
            assert all(below.index(one) < below.index(tree.parent(one)) for one in below if one != node)
        firsts = [self.nodes[one] for scope in SCOPES for one in self.children((scope, ()))]
        assert sorted(tree.children(PrefixTree.ROOT)) == sorted(firsts)

    @staticmethod
    def is_under(tokens, above):
        return tokens == above or (len(above) % B == 0 and tokens[: len(above)] == above)

    def look(self, scope, text):
        """Every walk of the text, and from each end the best child."""
        chain, tree = Chain(scope, text, B), self.tree
        ends = range(B, len(text) + 1, B)
        path = [self.nodes[scope, tuple(text[:end])] for end in takewhile(self.has(scope, text), ends)]
        for most in range(len(text) // B + 1):
            assert tree.walk(chain, most) == path[:most]
        for index in range(min(len(path), (len(text) - 1) // B) + 1):
            key = (scope, tuple(text[: index * B]))
            for most in range(1, B + 1):
                assert tree.best_child(self.number(key), chain, index, most) == self.best(key, text, most)

    def has(self, scope, text):
        return lambda end: (scope, tuple(text[:end])) in self.nodes

    def best(self, key, text, most):
        """Of the children that share most with the text the newest."""
        first = len(key[1])
        wanted = text[first : first + most]
        found = None
        for one in self.children(key)[:MAX_SIBLINGS]:
            pairs = zip(one[1][first:], wanted, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if common > (found[1] if found else 0):
                found = self.nodes[one], common
        return found


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(SCOPES), TEXTS, st.integers(0, GROUPS - 1)),
        st.tuples(st.just("drop"), st.integers(0, 99), st.integers(0, GROUPS - 1)),
        st.tuples(st.just("look"), st.sampled_from(SCOPES), TEXTS),
    ),
    max_size=25,
)


def run(acts):
    model = Model()
    for act in acts:
        match act:
            case "store", scope, text, group:
                model.store(scope, text, group)
            case "drop", which, group if model.newest:
                model.drop(which, group)
            case "look", scope, text:
                model.look(scope, text)
        model.check()
    for key in sorted(model.newest):  # parents before their children: they stay without blocks until the last goes
        for group in range(GROUPS):
            if key in model.newest:
                model.drop(model.newest.index(key), group)
        model.check()
    return model


@settings(max_examples=80)
@given(ACTS)
def test_the_tree_is_what_the_texts_say(acts):
    model = run(acts)
    assert (model.tree.num_nodes, model.tree.num_bytes) == (0, 0)
    assert model.tree.children(PrefixTree.ROOT) == []


@settings(max_examples=80)
@given(ACTS)
def test_a_hash_that_collides_finds_nothing_that_is_not_there(acts):
    """6: digests lead to a node, tokens, parent and scope decide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_module, "hashlib", WEAK)
        run(acts)


@given(st.lists(TEXTS, max_size=12))
def test_scopes_share_no_node(texts):
    """7: what one scope has stored is found in no other, in full or in part."""
    tree = PrefixTree(block_tokens=B, num_groups=1)
    seen = []
    for scope in SCOPES:
        nodes = set()
        for text in texts:
            parent, chain = PrefixTree.ROOT, Chain(scope, text, B)
            assert tree.walk(chain, len(text) // B) == [] or nodes
            for index in range(len(text) // B):
                parent = tree.insert(parent, chain, index, B)
                nodes.add(parent)
        seen.append(nodes)
    assert not seen[0] & seen[1]
    assert len(seen[0]) == len(seen[1])
    stranger = scope_digest(salt="b")
    for text in texts:
        chain = Chain(stranger, text, B)
        assert tree.walk(chain, len(text) // B) == []
        assert tree.best_child(PrefixTree.ROOT, chain, 0, B) is None


def stored(tree, text, *, scope=SCOPES[0], num_blocks=None):
    """Nodes of the text's full blocks, each with a block."""
    chain, nodes = Chain(scope, text, B), []
    for index in range(len(text) // B if num_blocks is None else num_blocks):
        nodes.append(tree.insert(nodes[-1] if nodes else PrefixTree.ROOT, chain, index, B))
        tree.attach(nodes[-1], 0, 7)
    return nodes


def test_what_is_no_place_for_a_block_is_refused():
    """8, and no block hangs on a node that its chain does not lead to."""
    tree = PrefixTree(block_tokens=B, num_groups=1)
    text = [1] * 9
    chain, nodes = Chain(SCOPES[0], text, B), stored(tree, text, num_blocks=1)
    part = tree.insert(nodes[0], chain, 1, 2)
    other = stored(tree, [2] * 3)[0]
    before = tree.num_nodes
    for parent, index in ((part, 2), (part, 1), (other, 1), (nodes[0], 2), (PrefixTree.ROOT, 1), (nodes[0], 0)):
        if (parent, index) == (nodes[0], 0):
            with pytest.raises(ResourceError, match="one digest"):  # it is there, under the root
                tree.insert(parent, chain, index, B)
        else:
            with pytest.raises(ResourceError, match="not the full one before it"):
                tree.insert(parent, chain, index, B)
    assert tree.num_nodes == before
    tree.detach(other, 0)
    tree.prune(other)
    with pytest.raises(ResourceError):
        tree.insert(other, Chain(SCOPES[0], [2] * 6, B), 1, B)


def test_a_partial_parent_is_refused_though_its_digest_is_right(monkeypatch):
    """8: a collision gives a partial node no children either."""
    monkeypatch.setattr(chain_module, "hashlib", LAST_TOKEN)
    tree = PrefixTree(block_tokens=B, num_groups=1)
    part = tree.insert(PrefixTree.ROOT, Chain(SCOPES[0], [5, 9], B), 0, 2)
    chain = Chain(SCOPES[0], [1, 1, 9, 4, 4, 7], B)
    assert chain.digest(0) == tree.digest(part)
    with pytest.raises(ResourceError, match="not the full one before it"):
        tree.insert(part, chain, 1, B)
    assert (tree.num_nodes, tree.children(part)) == (1, [])


def test_a_block_of_the_same_tokens_after_another_text_is_not_found(monkeypatch):
    """6: where digests collide the tokens of one block are not enough, its parent must be the one before."""
    monkeypatch.setattr(chain_module, "hashlib", LAST_TOKEN)
    tree = PrefixTree(block_tokens=B, num_groups=1)
    stored(tree, [1, 1, 9, 4, 4, 7])
    (first,) = stored(tree, [2, 2, 8])
    chain = Chain(SCOPES[0], [2, 2, 8, 4, 4, 7], B)
    assert tree.walk(chain, 2) == [first]
    with pytest.raises(ResourceError, match="one digest"):
        tree.insert(first, chain, 1, B)


def test_only_the_newest_siblings_are_looked_at():
    """Of so many no more than the newest: a tree of many first blocks costs a miss no more than a small one."""
    tree = PrefixTree(block_tokens=B, num_groups=1)
    nodes = [stored(tree, [number, 0, 0])[0] for number in range(MAX_SIBLINGS + 1)]
    wanted = [Chain(SCOPES[0], [number, 0, 1], B) for number in (0, 1)]
    assert tree.best_child(PrefixTree.ROOT, wanted[0], 0, B) is None
    assert tree.best_child(PrefixTree.ROOT, wanted[1], 0, B) == (nodes[1], 2)
    assert tree.best_child(PrefixTree.ROOT, wanted[1], 0, 1) == (nodes[1], 1)


def test_a_node_without_blocks_stays_as_long_as_it_leads_somewhere():
    tree = PrefixTree(block_tokens=B, num_groups=1)
    top, middle, leaf = stored(tree, [1] * 9)
    for node in (top, middle):
        tree.detach(node, 0)
        tree.prune(node)
    assert (tree.num_nodes, tree.block(top, 0)) == (3, -1)
    assert tree.walk(Chain(SCOPES[0], [1] * 9, B), 3) == [top, middle, leaf]
    tree.detach(leaf, 0)
    tree.prune(leaf)
    assert (tree.num_nodes, tree.num_bytes) == (0, 0)


def test_numbers_of_nodes_that_went_are_used_again():
    """No garbage: ten thousand texts that come and go leave no more than one of them."""
    tree = PrefixTree(block_tokens=B, num_groups=1)
    highest = 0
    for number in range(10_000):
        nodes = stored(tree, [number] * 9, scope=SCOPES[number % 2])
        highest = max(highest, *nodes)
        for node in nodes[::-1]:
            tree.detach(node, 0)
            tree.prune(node)
    assert (tree.num_nodes, highest) == (0, 2)


def test_clearing_leaves_nothing():
    tree = PrefixTree(block_tokens=B, num_groups=1)
    stored(tree, [1] * 9)
    tree.clear()
    assert (tree.num_nodes, tree.children(PrefixTree.ROOT)) == (0, [])
    assert stored(tree, [1] * 3) == [0]


@pytest.mark.parametrize(("block_tokens", "num_groups", "text_blocks"), [(16, 1, 250), (32, 2, 10), (64, 4, 50)])
def test_the_heap_grows_by_what_a_node_is_said_to_take(block_tokens, num_groups, text_blocks):
    """Within 15 %. Chains are gone by then, so that digests and tokens are the tree's own."""
    made, num_nodes = random.Random(0), 6000
    texts = [
        [made.randrange(10**5) for _ in range(block_tokens * text_blocks)] for _ in range(num_nodes // text_blocks)
    ]
    block = 1000  # beyond the numbers that Python has ready
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tree = PrefixTree(block_tokens=block_tokens, num_groups=num_groups)
        for text in texts:
            chain, node = Chain(SCOPES[0], text, block_tokens), PrefixTree.ROOT
            for index in range(text_blocks):
                node = tree.insert(node, chain, index, block_tokens)
                for group in range(num_groups):
                    block += 1
                    tree.attach(node, group, block)
        del chain
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert tree.num_bytes == num_nodes * node_bytes(block_tokens=block_tokens, num_groups=num_groups)
    assert taken == pytest.approx(tree.num_bytes, rel=0.15)
