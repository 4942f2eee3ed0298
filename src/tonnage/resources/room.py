"""Room on the device: what is evicted, what goes to the host, and what is lent the head of the arena.

Bytes move first and the books follow: where a copy cannot be asked for, nobody's blocks are lost but those cached ones
that had to make way for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from tonnage.resources.base import Deferral
from tonnage.resources.blocks import NONE, Blocks, Level, Stack, as_ids
from tonnage.resources.cache_events import CacheEvents
from tonnage.resources.eviction import Deadlines, EvictionQueue, Ranks
from tonnage.resources.mover import Ids, Mover
from tonnage.resources.transfers import TransferBudget
from tonnage.resources.tree import PrefixTree


class Room:
    """Moves blocks between body, head and host so that held ones always find a slot in the body.

    ``lent``: head slots from this one on are lent to cached blocks; those below are the scratch's. ``version`` counts
    how often a held block changed its slot: whoever keeps slots of held blocks must look again.
    """

    def __init__(
        self,
        blocks: Blocks,
        tree: PrefixTree,
        ranks: Ranks,
        events: CacheEvents,
        mover: Mover,
        budget: TransferBudget,
        clock: Callable[[], float],
        *,
        keeps_node: Sequence[bool],
        offload_priority: int,
    ) -> None:
        self.blocks, self.tree, self.ranks, self.events = blocks, tree, ranks, events
        self.mover, self.budget = mover, budget
        self.body, self.head, self.host = (EvictionQueue(ranks) for _ in range(3))
        self.deadlines = Deadlines(ranks, clock)
        self.lent = 0
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._keeps_node, self._offload_priority = tuple(keeps_node), offload_priority
        self.num_to_count = 0  # loads of which the budget does not know yet

    @property
    def num_groups(self) -> int:
        return len(self._keeps_node)

    def begin_step(self) -> None:
        """The step's share of the link to the host. Loads begin once a step is final, and so they count in the next:
        who waits gets all of it, and what is evicted has to make do with the rest."""
        self.budget.begin_step()
        self.budget.take(self.num_to_count)
        self.num_to_count = 0

    # -- the queues ----------------------------------------------------------------------------------------------

    def _queue(self, block: int) -> EvictionQueue:
        if self.blocks.levels[block] == Level.HOST:
            return self.host
        return self.head if self.blocks.is_in_head(block) else self.body

    def offer(self, block: int) -> None:
        """Nobody holds it any more: it may be evicted."""
        self._queue(block).push(block)

    def offer_all(self, blocks: Sequence[int]) -> None:
        """``offer`` each; of many the places are looked up at once."""
        ids, head_slots = as_ids(blocks), self.blocks.head_slots
        for block, level, slot in zip(
            blocks, self.blocks.levels[ids].tolist(), self.blocks.slots[ids].tolist(), strict=True
        ):
            queue = self.host if level == Level.HOST else self.head if slot < head_slots else self.body
            queue.push(block)

    def withdraw(self, block: int) -> None:
        self._queue(block).discard(block)

    def withdraw_all(self, blocks: Sequence[int]) -> None:
        for queue in (self.body, self.head, self.host):
            if len(queue):
                for block in blocks:
                    queue.discard(block)

    def is_offered(self, block: int) -> bool:
        return block in self._queue(block)

    # -- slots for new blocks ------------------------------------------------------------------------------------

    def make(self, num_slots: int) -> None:
        """See to it that so many slots of the body are free. The caller has made sure that it can be done.

        The lowest ranks go, wherever they lie, as many as the free slots of the head do not make up for; then the
        lowest that are left in the body move into the head.
        """
        short = num_slots - len(self.blocks.free_body)
        if short > 0:
            self._evict_lowest(max(0, short - len(self.blocks.free_head)))
            self._into_head(num_slots - len(self.blocks.free_body))

    def _into_head(self, num: int) -> None:
        """The lowest cached blocks of the body move into free slots of the head."""
        moved = [self.body.pop() for _ in range(num)]
        self._move(as_ids(moved), self.blocks.free_head)

    def _move(self, ids: Ids, free: Stack) -> None:
        """One copy for all: blocks that are in no queue now into ``free`` slots of the device."""
        if not ids.size:
            return
        idle = [block for block in ids.tolist() if not self.blocks.refs[block]]
        slots = free.pop(ids.size)
        try:
            self.mover.move(self.blocks.slots[ids], slots)
        except BaseException:
            free.push(slots)
            self.offer_all(idle)
            raise
        self.blocks.leave(ids)
        self.blocks.place(ids, Level.DEVICE, slots)
        self.counts["moved"] += ids.size
        self.version += len(idle) < ids.size
        self.offer_all(idle)

    # -- eviction ------------------------------------------------------------------------------------------------

    def _evict_lowest(self, num: int) -> None:
        """So many of the device's cached blocks, wherever they lie: to the host if they are worth it, or away."""
        victims = [self._pop_lowest() for _ in range(num)]
        kept = self._worth_keeping(victims)
        chosen = set(kept)
        self.drop([block for block in victims if block not in chosen])
        self._offload(self._in_tree(kept))

    def _worth_keeping(self, victims: list[int]) -> list[int]:
        """The highest of them for which the host has room, or holds something lower."""
        if not self.blocks.num_host_slots:
            return []
        found = [block for block in victims if self.ranks.priorities[block] >= self._offload_priority]
        found = found[len(found) - min(len(found), self.budget.num_left) :]
        short = len(found) - len(self.blocks.free_host)
        given_up: list[int] = []
        while short > len(given_up):
            lowest = self.host.lowest()
            if lowest is None or lowest > self.ranks.ranks[found[short - len(given_up) - 1]]:
                break
            given_up.append(self.host.pop())
        self.drop(given_up)
        found = self._in_tree(found)
        return found[max(0, len(found) - len(self.blocks.free_host)) :]

    def _in_tree(self, blocks: list[int]) -> list[int]:
        """Those that did not go with a parent of theirs that was dropped."""
        return [block for block in blocks if self.blocks.nodes[block] != NONE]

    def _pop_lowest(self) -> int:
        in_body, in_head = self.body.lowest(), self.head.lowest()
        if in_body is None or (in_head is not None and in_head < in_body):
            return self.head.pop()
        return self.body.pop()

    def _offload(self, kept: list[int]) -> None:
        if not kept:
            return
        ids = as_ids(kept)
        slots = self.blocks.free_host.pop(ids.size)
        try:
            self.mover.offload(self.blocks.slots[ids], slots)
        except BaseException:
            self.blocks.free_host.push(slots)
            self.offer_all(kept)
            raise
        self.tell("removed", ids, Level.DEVICE)
        self.blocks.leave(ids)
        self.blocks.place(ids, Level.HOST, slots)
        self.tell("stored", ids, Level.HOST)
        self.counts["offloaded"] += ids.size
        self.budget.take(ids.size)
        self.offer_all(kept)

    def drop(self, blocks: Iterable[int]) -> None:
        """Out of the tree, and with them what cannot be found without them; what nobody holds becomes free."""
        gone: list[int] = []
        for block in blocks:
            node = int(self.blocks.nodes[block])
            if node == NONE:  # it went with its parent
                continue
            group = int(self.blocks.groups[block])
            if not self._keeps_node[group] or (self.num_groups == 1 and not self.tree.has_children(node)):
                gone.append(self._detached(block, node, group))
                continue
            for each in self.tree.subtree(node):
                found = ((self.tree.block(each, other), other) for other in range(self.num_groups))
                gone += [self._detached(one, each, other) for one, other in list(found) if one != NONE]
        if gone:
            self.withdraw_all(gone)
            ids = as_ids(gone)
            self.blocks.free(ids[self.blocks.refs[ids] == 0])
            self.counts["evicted"] += len(gone)

    def _detached(self, block: int, node: int, group: int) -> int:
        """The block, which is private now; its node goes with its last block and child."""
        if self.events.has_subscribers:
            self.tell("removed", as_ids([block]), int(self.blocks.levels[block]))
        self.blocks.nodes[block] = NONE
        self.ranks.forget(block)
        self.tree.detach(node, group)
        self.tree.prune(node)
        return block

    def inherit(self, heir: int, block: int) -> None:
        """A private block holds, just computed, what a block of the tree holds on the host: that one takes its slot
        and its holder, and the private one is free."""
        self.withdraw(heir)
        ids = as_ids([heir])
        self.tell("removed", ids, Level.HOST)
        self.version += bool(self.blocks.refs[heir])
        self.blocks.leave(ids)
        self.blocks.inherit(heir, block)
        self.tell("stored", ids, Level.DEVICE)

    def tell(self, kind: Literal["stored", "removed"], ids: Ids, level: int) -> None:
        if ids.size and self.events.has_subscribers:
            where: Literal["device", "host"] = "host" if level == Level.HOST else "device"
            nodes = zip(self.blocks.nodes[ids].tolist(), self.blocks.groups[ids].tolist(), strict=True)
            self.events.note_nodes(kind, where, self.tree, nodes)

    def vacate(self) -> None:
        """Every cached block leaves the device: to the host, as many of the highest as it has room for, or away."""
        self._evict_lowest(len(self.body) + len(self.head))

    # -- blocks that nobody holds any more -----------------------------------------------------------------------

    def let(self, block: int) -> None:
        """Nobody holds it: it is evictable as the newest of its priority, or free if the tree does not know it."""
        if self.blocks.nodes[block] == NONE:
            self.blocks.free(as_ids([block]))
        else:
            self.let_all([block])

    def let_all(self, blocks: Sequence[int]) -> None:
        """Blocks of the tree that nobody holds any more are evictable, the first of them first."""
        for block in blocks:
            self.ranks.touch(block)
            self.deadlines.start(block)
        self.offer_all(blocks)

    # -- the head ------------------------------------------------------------------------------------------------

    def take_back(self, num_slots: int, *, manager: str) -> Deferral | None:
        """Empty the head's first ``num_slots`` slots, which are lent no more: what lies there is evicted or moves.

        Held blocks go to the body, in place of lower ranks if need be; of the cached ones the highest stay, as many as
        there is room for. A deferral where the body has no slot for a held one; nothing has changed then.
        """
        if num_slots <= self.lent:
            self._lend_from(num_slots, until=self.lent)
            self.lent = num_slots
            return None
        inside = self.blocks.living_in_head(num_slots)
        num_held = int(np.count_nonzero(self.blocks.refs[inside]))
        have = len(self.blocks.free_body) + len(self.body)
        if num_held > have:
            return Deferral(manager=manager, need=num_held, have=have)
        try:
            self._empty(num_slots)
        except BaseException:
            self._lend_from(self.lent, until=num_slots)
            raise
        self.lent = num_slots
        self.counts["taken_back"] += 1
        return None

    def _empty(self, num_slots: int) -> None:
        """Evict until the rest has room outside: one that lies outside frees a slot there, one inside need not move.

        Held blocks may only go to the body, so cached ones make way for them into the rest of the head.
        """
        free_head, free_body = self.blocks.free_head, self.blocks.free_body
        free_head.remove(num_slots)
        num_outside = len(free_body) + len(free_head)
        self._evict_lowest(max(0, self.blocks.living_in_head(num_slots).size - num_outside))
        free_head.remove(num_slots)
        inside = self.blocks.living_in_head(num_slots)
        is_held = self.blocks.refs[inside] > 0
        held, cached = inside[is_held], inside[~is_held]
        self._into_head(max(0, held.size - len(free_body)))
        self._move(held, free_body)
        free_head.remove(num_slots)
        for block in cached.tolist():
            self.head.discard(block)
        first, second = np.split(cached, [min(cached.size, len(free_head))])
        try:
            self._move(first, free_head)
        except BaseException:
            self.offer_all(second.tolist())
            raise
        self._move(second, free_body)
        free_head.remove(num_slots)

    def lend(self) -> None:
        """The scratch is idle: all of the head is lent again."""
        self._lend_from(0, until=self.lent)
        self.lent = 0

    def _lend_from(self, first: int, *, until: int) -> None:
        """Slots [first, until) that nobody owns are free for cached blocks."""
        self.blocks.free_head.remove(until)
        owners = self.blocks.owners[first:until]
        self.blocks.free_head.push((first + np.flatnonzero(owners == NONE)).astype(np.int32))
