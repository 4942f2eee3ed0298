"""What of a prompt the cache has: nodes of the tree, and of each group of layers the blocks that it takes to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tonnage.layout import KVGroup, KVGroupKind, window_blocks
from tonnage.resources.blocks import NONE, Level, as_ids
from tonnage.resources.chain import Chain
from tonnage.resources.incoming import Incoming
from tonnage.resources.mover import Ids
from tonnage.resources.room import Room
from tonnage.resources.tree import PrefixTree

#: Groups of which every block from the start is needed; of windows only the last ones are.
WHOLE = (KVGroupKind.FULL, KVGroupKind.LATENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A cached block that begins with the next ``num_tokens`` tokens: one block of each group, NONE where none is
    needed. They are copied, never shared."""

    num_tokens: int
    sources: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Match:
    """What of a chain is cached. Nothing is held before ``BlockCache.claim``.

    num_tokens    of the full blocks and the partial one; num_blocks: full ones
    nodes         of the full blocks in the tree
    blocks        by group and position; NONE where the group does not need it: out of its window
    num_new_live  blocks that nobody holds yet: what claiming takes of the pool. It counts sources of the partial one
                  and blocks of the host, which need a slot
    num_shared    blocks that others hold, of layers with a window: who leaves one first leaves it to the others
    host_blocks   those that must be loaded first, or are on their way
    """

    num_tokens: int = 0
    num_blocks: int = 0
    nodes: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    partial: Partial | None = None
    num_new_live: int = 0
    num_shared: int = 0
    host_blocks: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)  # what claiming took out of the queues

    def ids(self) -> Ids:
        """All blocks that claiming holds, sources of the partial one too."""
        found: list[int] = []
        for row in self.blocks if self.partial is None else [*self.blocks, self.partial.sources]:
            found += row if NONE not in row else [block for block in row if block != NONE]
        return as_ids(found)


class Matcher:
    """Finds matches; changes nothing."""

    def __init__(self, groups: Sequence[KVGroup], room: Room, incoming: Incoming, *, block_tokens: int) -> None:
        self._incoming, self._tree, self._blocks = incoming, room.tree, room.blocks
        self._num_groups, self._block_tokens = len(groups), block_tokens
        self._whole = [index for index, group in enumerate(groups) if group.kind in WHOLE]
        # Full blocks before a border that the next token still sees: one less than a window can touch.
        self._windows = {
            index: window_blocks(group.window, block_tokens) - 1
            for index, group in enumerate(groups)
            if group.window is not None and group.kind is KVGroupKind.WINDOW
        }

    def match(self, chain: Chain, *, max_tokens: int) -> Match:
        """The longest cached prefix of at most ``max_tokens`` tokens."""
        nodes = self._tree.walk(chain, max_tokens // self._block_tokens)
        rows = [self._tree.blocks(nodes, group) for group in range(self._num_groups)]
        num_blocks = self._usable_depth(rows)
        found = Match(
            num_tokens=num_blocks * self._block_tokens,
            num_blocks=num_blocks,
            nodes=nodes[:num_blocks],
            blocks=[self._needed(group, row[:num_blocks]) for group, row in enumerate(rows)],
        )
        found.partial = self._partial(chain, found, max_tokens)
        if found.partial is not None:
            found.num_tokens += found.partial.num_tokens
        self._weigh(found)
        return found

    def _usable_depth(self, rows: Sequence[Sequence[int]]) -> int:
        """The most blocks with everything that each group needs to go on after them."""
        depth = len(rows[0])
        for group in self._whole:
            if NONE in rows[group]:
                depth = min(depth, rows[group].index(NONE))
        if not self._windows:
            return depth
        runs, best = dict.fromkeys(self._windows, 0), 0
        for end in range(1, depth + 1):
            for group in self._windows:
                runs[group] = runs[group] + 1 if rows[group][end - 1] != NONE else 0
            if all(runs[group] >= min(end, self._windows[group]) for group in self._windows):
                best = end
        return best

    def _needed(self, group: int, row: list[int]) -> list[int]:
        if group not in self._windows:
            return row
        num_gone = max(0, len(row) - self._windows[group])
        return [NONE] * num_gone + row[num_gone:]

    def _partial(self, chain: Chain, found: Match, max_tokens: int) -> Partial | None:
        """A block that begins as the chain goes on, if all of it lies on the device."""
        most = min(self._block_tokens - 1, max_tokens - found.num_tokens)
        if most < 1:
            return None
        last = found.nodes[-1] if found.nodes else PrefixTree.ROOT
        best = self._tree.best_child(last, chain, found.num_blocks, most)
        if best is None:
            return None
        node, num_tokens = best
        sources = tuple(self._tree.block(node, group) for group in range(self._num_groups))
        is_here = all(block != NONE and self._blocks.levels[block] == Level.DEVICE for block in sources)
        if not is_here or not self._incoming.ids().isdisjoint(sources):
            return None
        return Partial(num_tokens=num_tokens, sources=sources)

    def _weigh(self, found: Match) -> None:
        ids = found.ids()
        is_live = self._blocks.refs[ids] > 0
        found.num_new_live = int(np.count_nonzero(~is_live))
        found.num_shared = self._blocks.num_moving(ids[is_live])
        loading = self._incoming.ids()
        on_host = ids[self._blocks.levels[ids] == Level.HOST].tolist()
        found.host_blocks = on_host + [block for block in ids.tolist() if block in loading] if loading else on_host

    def without_partial(self, match: Match) -> Match:
        """The same without its last, partial block."""
        if match.partial is None:
            return match
        less = Match(
            num_tokens=match.num_blocks * self._block_tokens,
            num_blocks=match.num_blocks,
            nodes=match.nodes,
            blocks=match.blocks,
        )
        self._weigh(less)
        return less
