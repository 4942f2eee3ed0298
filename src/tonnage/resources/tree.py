"""The prefix tree: which texts begin alike, block by block, and the KV block of each group of layers at each node."""

from __future__ import annotations

import struct

from tonnage.errors import ResourceError
from tonnage.resources.chain import Chain

#: So many children of a node are looked at for a partial match, the newest first.
MAX_SIBLINGS = 32
#: So many places for nodes are made at once: cheaper than one by one.
_PLACES = 256
#: Bytes that the Python objects of a node take beside its tokens and its blocks: half its digest and the headers of
#: two byte strings, the rest its number, entries of lists and one of a dictionary, which is half full on average.
NODE_BYTES = 230
#: An entry of a list, and the number in it.
GROUP_BYTES = 36


class PrefixTree:
    """Nodes by number, as lists side by side. ``ROOT`` is above the first nodes of all scopes and is no node itself.

    A full node has ``block_tokens`` tokens and may have children; a partial one, the end of a text, has fewer and none.
    A node is found by its digest and then by its tokens and its parent, so a collision finds nothing. It stays as
    long as it has a block or a child. Children are a chain of siblings, newest first.
    """

    ROOT = -1

    def __init__(self, *, block_tokens: int, num_groups: int) -> None:
        self.block_tokens, self.num_groups = block_tokens, num_groups
        self.clear()

    def clear(self) -> None:
        """No nodes."""
        self._by_digest: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self._tokens: list[bytes] = []
        self._scopes: list[bytes] = []
        self._parents: list[int] = []
        self._first: list[int] = []  # child, or -1
        self._next: list[int] = []  # sibling, older
        self._before: list[int] = []  # sibling, newer
        self._blocks: list[list[int]] = [[] for _ in range(self.num_groups)]
        self._roots: dict[bytes, int] = {}  # scope -> its newest first node
        self._unused: list[int] = []

    @property
    def num_nodes(self) -> int:
        return len(self._by_digest)

    @property
    def num_bytes(self) -> int:
        """About what the nodes take of the heap."""
        return self.num_nodes * node_bytes(block_tokens=self.block_tokens, num_groups=self.num_groups)

    # -- finding -------------------------------------------------------------------------------------------------

    def walk(self, chain: Chain, num_blocks: int) -> list[int]:
        """Nodes of the chain's first full blocks from the root on, at most ``num_blocks``, up to the first gap."""
        find, tokens, parents = self._by_digest.get, self._tokens, self._parents
        nodes: list[int] = []
        last = self.ROOT
        for digest, packed in chain.blocks(num_blocks):
            node = find(digest)
            if node is None or parents[node] != last or tokens[node] != packed:
                break
            nodes.append(node)
            last = node
        if nodes and self._scopes[nodes[0]] != chain.scope:
            return []
        chain.share([self._digests[node] for node in nodes], [self._tokens[node] for node in nodes])
        return nodes

    def best_child(self, node: int, chain: Chain, index: int, max_tokens: int) -> tuple[int, int] | None:
        """The child that shares most leading tokens with block ``index`` of the chain, and how many: 1 to
        ``max_tokens``. Of equal ones the newest; only the newest ``MAX_SIBLINGS`` are looked at."""
        wanted = chain.leading(index, min(max_tokens, self.block_tokens))
        best, most, first = -1, 0, wanted[:4]
        child, num_seen = self._first_child(node, chain.scope), 0
        while child != -1 and num_seen < MAX_SIBLINGS:
            tokens = self._tokens[child]
            if first and tokens.startswith(first) and (common := _num_common(tokens, wanted)) > most:
                best, most = child, common
            child, num_seen = self._next[child], num_seen + 1
        return None if not most else (best, most)

    # -- growing and shrinking -----------------------------------------------------------------------------------

    def insert(self, parent: int, chain: Chain, index: int, num_tokens: int) -> int:
        """The node of the first ``num_tokens`` tokens of block ``index`` under ``parent``, new if there is none.

        Raises ``ResourceError`` for a parent that is partial, gone, or not the chain's node before that block, and for
        a collision: another text of the same digest.
        """
        is_full = num_tokens == self.block_tokens
        digest, packed = chain.full(index) if is_full else chain.partial(index, num_tokens)
        found = self._by_digest.get(digest)
        if found is not None:
            if (self._parents[found], self._tokens[found], self._scopes[found]) != (parent, packed, chain.scope):
                raise ResourceError("two texts have one digest")
            return found
        if (parent == self.ROOT) != (index == 0) or not self._may_have_child(parent, chain.digest(index - 1)):
            raise ResourceError(f"block {index} under node {parent}, which is not the full one before it")
        return self._added(parent, digest, packed, chain.scope)

    def attach(self, node: int, group: int, block: int) -> None:
        self._blocks[group][node] = block

    def detach(self, node: int, group: int) -> None:
        self._blocks[group][node] = -1

    def prune(self, node: int) -> None:
        """Remove a node that has neither blocks nor children, and then its parent if it is left like that."""
        while node != self.ROOT and self._first[node] == -1 and all(row[node] == -1 for row in self._blocks):
            parent = self._parents[node]
            self._unlink(node, parent)
            del self._by_digest[self._digests[node]]
            self._digests[node] = self._tokens[node] = self._scopes[node] = b""
            self._unused.append(node)
            node = parent

    # -- looking -------------------------------------------------------------------------------------------------

    def block(self, node: int, group: int) -> int:
        """-1: the node has none of this group."""
        return self._blocks[group][node]

    def blocks(self, nodes: list[int], group: int) -> list[int]:
        """``block`` of each."""
        row = self._blocks[group]
        return [row[node] for node in nodes]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def digest(self, node: int) -> bytes:
        return self._digests[node]

    def scope(self, node: int) -> bytes:
        return self._scopes[node]

    def num_tokens(self, node: int) -> int:
        return len(self._tokens[node]) // 4

    def token_ids(self, node: int) -> tuple[int, ...]:
        """The node's own tokens."""
        return struct.unpack(f"<{self.num_tokens(node)}i", self._tokens[node])

    def depth(self, node: int) -> int:
        """Nodes above it."""
        depth = 0
        while (node := self._parents[node]) != self.ROOT:
            depth += 1
        return depth

    def has_children(self, node: int) -> bool:
        return self._first[node] != -1

    def children(self, node: int) -> list[int]:
        """Newest first; of ``ROOT`` the first nodes of all scopes, by scope."""
        found = []
        for child in self._roots.values() if node == self.ROOT else (self._first[node],):
            while child != -1:
                found.append(child)
                child = self._next[child]
        return found

    def subtree(self, node: int) -> list[int]:
        """The node and all below it, every child before its parent."""
        found = [node]
        for one in found:  # grows while it is read
            found += self.children(one)
        return found[::-1]

    # -- bits ----------------------------------------------------------------------------------------------------

    def _added(self, parent: int, digest: bytes, packed: bytes, scope: bytes) -> int:
        older = self._first_child(parent, scope)
        if not self._unused:
            self._make_places()
        node = self._unused.pop()
        self._digests[node], self._tokens[node], self._scopes[node] = digest, packed, scope
        self._parents[node], self._first[node], self._next[node], self._before[node] = parent, -1, older, -1
        if older != -1:
            self._before[older] = node
        self._set_first(parent, scope, node)
        self._by_digest[digest] = node
        return node

    def _make_places(self) -> None:
        first = len(self._digests)
        for texts in (self._digests, self._tokens, self._scopes):
            texts += [b""] * _PLACES
        for row in (self._parents, self._first, self._next, self._before, *self._blocks):
            row += [-1] * _PLACES
        self._unused += range(first + _PLACES - 1, first - 1, -1)

    def _may_have_child(self, parent: int, digest: bytes) -> bool:
        """It is there, full, and the node of ``digest``."""
        if parent == self.ROOT:
            return True
        return self._digests[parent] == digest and self.num_tokens(parent) == self.block_tokens

    def _first_child(self, node: int, scope: bytes) -> int:
        return self._roots.get(scope, -1) if node == self.ROOT else self._first[node]

    def _set_first(self, parent: int, scope: bytes, node: int) -> None:
        if parent != self.ROOT:
            self._first[parent] = node
        elif node != -1:
            self._roots[scope] = node
        else:
            del self._roots[scope]

    def _unlink(self, node: int, parent: int) -> None:
        newer, older = self._before[node], self._next[node]
        if older != -1:
            self._before[older] = newer
        if newer != -1:
            self._next[newer] = older
        else:
            self._set_first(parent, self._scopes[node], older)


def node_bytes(*, block_tokens: int, num_groups: int) -> int:
    """Bytes of the heap that a node takes: its objects, its tokens, and an entry for the block of each group."""
    return NODE_BYTES + 4 * block_tokens + GROUP_BYTES * num_groups


def _num_common(first: bytes, second: bytes) -> int:
    """Leading tokens that both have, of 4 bytes each."""
    least, most = 0, min(len(first), len(second)) // 4
    while least < most:
        middle = (least + most + 1) // 2
        if first[4 * least : 4 * middle] == second[4 * least : 4 * middle]:
            least = middle
        else:
            most = middle - 1
    return least
