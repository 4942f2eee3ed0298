"""For how long what is cached is worth keeping: priorities of blocks, and the time after which they fall back."""

from __future__ import annotations

from tonnage.caching import DEFAULT_PRIORITY, CacheParams
from tonnage.resources.blocks import NONE
from tonnage.resources.room import Room
from tonnage.resources.tree import PrefixTree

#: Above every rank.
HELD = 2**63


class Retention:
    """Sets priorities. No parent counts less than its children, so that leaves are always given up first."""

    def __init__(self, room: Room, *, block_tokens: int) -> None:
        self._room, self._tree, self._blocks, self._ranks = room, room.tree, room.blocks, room.ranks
        self._block_tokens = block_tokens
        self._num_groups = room.num_groups

    def keep(self, node: int, index: int, asked: CacheParams) -> None:
        """What a request asks for the blocks of its position ``index``; one that asks for nothing changes nothing."""
        is_asked = asked.retain_tokens is None or index * self._block_tokens < asked.retain_tokens
        if is_asked and (asked.priority, asked.retain_seconds) != (DEFAULT_PRIORITY, None):
            self._set(node, max(asked.priority, self._least(node)), asked.retain_seconds)
        self._lift_parents(node)

    def refresh(self) -> None:
        """Priorities whose time is over fall back to the default, as the newest of it."""
        for block in self._room.deadlines.passed():
            node = int(self._blocks.nodes[block])
            if node != NONE and self._room.is_offered(block):
                priority, seconds = self._below(node)
                self._set(node, max(DEFAULT_PRIORITY, priority), seconds if priority > DEFAULT_PRIORITY else None)
                self._lift_parents(node)

    def _lift_parents(self, node: int) -> None:
        """Parents go after their children: of no lower priority, and of an equal one no older."""
        while (parent := self._tree.parent(node)) != PrefixTree.ROOT:
            if self._num_groups == 1 and self._is_above(self._tree.block(parent, 0), self._tree.block(node, 0)):
                return
            priority, theirs = self._priority(node), self._priority(parent)
            if theirs < priority:
                self._set(parent, priority, self._seconds(node))
            elif theirs == priority and self._rank(parent) < self._rank(node):
                self._set(parent, theirs, self._seconds(parent))
            else:
                return
            node = parent

    def _is_above(self, parent: int, child: int) -> bool:
        """The usual case, told in a microsecond: somebody holds the parent, and it counts as much as the child."""
        priorities = self._ranks.priorities
        return bool(self._blocks.refs[parent]) and priorities[parent] >= priorities[child]

    def _least(self, node: int) -> int:
        return self._below(node)[0]

    def _below(self, node: int) -> tuple[int, float | None]:
        """The highest priority of its children, and the time of one that has it, which is over no sooner."""
        children = ((self._priority(child), child) for child in self._tree.children(node))
        priority, child = max(children, default=(0, PrefixTree.ROOT))
        return priority, None if child == PrefixTree.ROOT else self._seconds(child)

    def _priority(self, node: int) -> int:
        found = (self._tree.block(node, group) for group in range(self._num_groups))
        return max((self._ranks.priorities[block] for block in found if block != NONE), default=0)

    def _set(self, node: int, priority: int, seconds: float | None) -> None:
        for group in range(self._num_groups):
            block = self._tree.block(node, group)
            if block == NONE:
                continue
            self._ranks.set(block, priority, seconds)
            if self._room.is_offered(block):
                self._room.withdraw(block)
                self._room.let(block)

    def _rank(self, node: int) -> int:
        """Of its block that goes first; one that is held goes after all that are not."""
        found = (self._tree.block(node, group) for group in range(self._num_groups))
        offered = [block for block in found if block != NONE and self._room.is_offered(block)]
        return min((self._ranks.ranks[block] for block in offered), default=HELD)

    def _seconds(self, node: int) -> float | None:
        found = (self._tree.block(node, group) for group in range(self._num_groups))
        return next((self._ranks.seconds[block] for block in found if block != NONE), None)
