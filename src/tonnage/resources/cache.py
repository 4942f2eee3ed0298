"""The cache of KV blocks: what a prefix finds, what a sequence holds, and what is kept of it afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tonnage.caching import DEFAULT_PRIORITY, OFFLOAD_PRIORITY, CacheParams
from tonnage.errors import ResourceError
from tonnage.layout import KVGroup
from tonnage.resources.base import Deferral
from tonnage.resources.blocks import NONE, Blocks, Level, as_ids
from tonnage.resources.cache_events import CacheEvents
from tonnage.resources.chain import Chain
from tonnage.resources.eviction import Ranks
from tonnage.resources.incoming import Incoming
from tonnage.resources.match import WHOLE, Match, Matcher, Partial
from tonnage.resources.mover import CountingMover, Ids, Mover
from tonnage.resources.retention import Retention
from tonnage.resources.room import Room
from tonnage.resources.transfers import TransferBudget
from tonnage.resources.tree import PrefixTree

_DEFAULTS = CacheParams()
#: What ``stats`` counts since the start.
COUNTS = ("evicted", "offloaded", "loaded", "lost", "moved", "partial_copies", "taken_back")


class BlockCache:
    """``num_slots`` slabs on the device, the first ``head_slots`` of them lent while the scratch that lies there is
    idle, and ``num_host_slots`` on the host.

    A block is *held* (by sequences, pins, transfers), *cached* (in the tree, held by nobody, evictable) or free. Held
    blocks are at most ``capacity``, the slots of the body, so that the head can always be taken back from them.
    ``budget`` bounds what goes over the link to the host in a step (None: nothing does).
    ``reuse`` False: nothing is matched or stored. ``clock`` tells seconds, for retention.

    Every call checks before it changes anything; what is asked for in vain is a ``ResourceError``, and what a copy
    raises costs nobody blocks but those cached ones that had to make way for it.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        num_slots: int,
        head_slots: int = 0,
        num_host_slots: int = 0,
        mover: Mover | None = None,
        budget: TransferBudget | None = None,
        reuse: bool = True,
        offload_priority: int = OFFLOAD_PRIORITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups, self.reuse = tuple(groups), reuse
        self.block_tokens = max(group.block_tokens for group in self.groups)
        moving = [group.window is not None for group in self.groups]
        self.blocks = Blocks(num_slots=num_slots, head_slots=head_slots, num_host_slots=num_host_slots, moving=moving)
        self.mover: Mover = mover or CountingMover(max(group.block_bytes for group in self.groups))
        self.events = CacheEvents()
        self.tree = PrefixTree(block_tokens=self.block_tokens, num_groups=len(self.groups))
        ranks = Ranks(self.blocks.num_blocks, default_priority=DEFAULT_PRIORITY)
        self.room = Room(
            self.blocks,
            self.tree,
            ranks,
            self.events,
            self.mover,
            budget or _unlimited(self.mover),
            clock,
            keeps_node=[group.kind in WHOLE for group in self.groups],
            offload_priority=offload_priority,
        )
        self.incoming = Incoming(self.room)
        self._matcher = Matcher(self.groups, self.room, self.incoming, block_tokens=self.block_tokens)
        self._retention = Retention(self.room, block_tokens=self.block_tokens)

    # -- how much there is ---------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return self.blocks.num_slots

    @property
    def head_slots(self) -> int:
        return self.blocks.head_slots

    @property
    def num_host_slots(self) -> int:
        return self.blocks.num_host_slots

    @property
    def capacity(self) -> int:
        """Slots of the body: blocks that may be held at once."""
        return self.blocks.num_slots - self.blocks.head_slots

    @property
    def num_live(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks.num_held

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated or claimed, evicting what is cached."""
        return self.capacity - self.blocks.num_held

    @property
    def num_shared(self) -> int:
        """Blocks more that holders of the same block will need as they move on: one for each but the last. Of layers
        with a window; others hold what they hold until they end."""
        return self.blocks.num_shared

    @property
    def num_free(self) -> int:
        """Slots of the device that hold nothing, of the head those that are lent."""
        return len(self.blocks.free_body) + len(self.blocks.free_head)

    @property
    def num_cached(self) -> int:
        """Evictable blocks on the device."""
        return len(self.room.body) + len(self.room.head)

    @property
    def slots(self) -> Ids:
        """Slot by block id, int32 [num_blocks + 1]; 0 for ``no_block``. Look again when ``layout_version`` changed."""
        return self.blocks.slots

    @property
    def no_block(self) -> int:
        """The id that stands for none in tables of ids."""
        return self.blocks.num_blocks

    @property
    def layout_version(self) -> int:
        """Counts up whenever a held block changed its slot."""
        return self.room.version

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays over blocks and slots; the tree tells its own."""
        return self.blocks.num_bytes

    # -- prefixes ------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, max_tokens: int) -> Match:
        """The longest cached prefix of at most ``max_tokens`` tokens."""
        if not self.reuse or max_tokens < 1:
            return Match(blocks=[[] for _ in self.groups])
        return self._matcher.match(chain, max_tokens=max_tokens)

    def without_partial(self, match: Match) -> Match:
        """The same without its last, partial block."""
        return self._matcher.without_partial(match)

    def claim(self, match: Match) -> None:
        """Hold every block of it. Raises ``ResourceError`` where they are more than are available."""
        if match.num_new_live > self.num_available:
            raise ResourceError(f"a claim of {match.num_new_live} blocks with {self.num_available} available")
        match.offered = self.blocks.hold(match.ids()).tolist()
        self.room.withdraw_all(match.offered)

    def retain(self, match: Match, asked: CacheParams) -> None:
        """What a request that claims ``match`` asks for its blocks: the last who asks for anything has it."""
        if asked != _DEFAULTS:
            for index, node in reversed(list(enumerate(match.nodes))):
                self._retention.keep(node, index, asked)

    def unclaim(self, match: Match) -> None:
        """As before that claim; what it took out of the queues keeps its age."""
        cached, offered = self._cached(self.blocks.let_go(match.ids())), set(match.offered)
        self.room.offer_all([block for block in cached if block in offered])
        self.room.let_all([block for block in cached if block not in offered])

    def _cached(self, idle: Ids) -> list[int]:
        """Blocks that nobody holds any more, last first; those that the tree does not know are freed."""
        is_private = self.blocks.nodes[idle] == NONE
        self.blocks.free(idle[is_private])
        found: list[int] = idle[~is_private][::-1].tolist()
        return found

    def copy_partial(self, partial: Partial, ids: npt.ArrayLike) -> None:
        """The contents of the claimed sources into private blocks ``ids``, one a group, and the sources let go."""
        pairs = [(src, dst) for src, dst in zip(partial.sources, np.asarray(ids).tolist(), strict=True) if src != NONE]
        src, dst = (as_ids(list(side)) for side in zip(*pairs, strict=True))
        self.mover.move(self.blocks.slots[src], self.blocks.slots[dst])
        self.room.counts["partial_copies"] += src.size
        self.release(src)

    # -- blocks --------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, *, group: int = 0) -> Ids:
        """Private blocks in slots of the body, held once; what is cached makes way."""
        if not 0 <= num_blocks <= self.num_available:
            raise ResourceError(f"asked for {num_blocks} blocks with {self.num_available} of {self.capacity} available")
        self.room.make(num_blocks)
        return self.blocks.take(num_blocks, group)

    def hold(self, ids: npt.ArrayLike) -> None:
        """One holder more for blocks that are held already."""
        self.blocks.hold(self.blocks.checked(ids, "held"))

    def release(self, ids: npt.ArrayLike) -> None:
        """One holder less, for blocks in the order of their tokens: the last becomes the oldest and is evicted first.
        Blocks that nobody holds and the tree does not know are free."""
        self.room.let_all(self._cached(self.blocks.let_go(self.blocks.checked(ids, "released"))))

    def store(
        self,
        chain: Chain,
        index: int,
        num_tokens: int,
        parent: int,
        ids: Sequence[int],
        retention: CacheParams = _DEFAULTS,
    ) -> tuple[int, list[int]]:
        """Computed blocks of position ``index``, one a group (NONE: none), into the tree under ``parent``.

        Returns the node and the blocks that the sequence holds now: where the tree had one of the same tokens, that
        one, and ours is released. With ``reuse`` off nothing is stored: (NONE, ids).
        """
        if not self.reuse:
            return NONE, list(ids)
        node = self.tree.insert(parent, chain, index, num_tokens)
        held = [self._stored(node, group, block) for group, block in enumerate(ids)]
        self._retention.keep(node, index, retention)
        return node, held

    def _stored(self, node: int, group: int, block: int) -> int:
        if block == NONE:
            return NONE
        there = self.tree.block(node, group)
        if there == block:
            return block
        if there == NONE:
            self.tree.attach(node, group, block)
            self.blocks.nodes[block] = node
            if self.events.has_subscribers:
                self.room.tell("stored", as_ids([block]), Level.DEVICE)
            return block
        if self.blocks.levels[there] == Level.HOST:
            self.room.inherit(there, block)
            return there
        if there in self.incoming.ids():
            self.incoming.overtake(there, block)
            return there
        for idle in self.blocks.hold(as_ids([there])).tolist():
            self.room.withdraw(idle)
        self.release([block])
        return there

    def forget(self, ids: npt.ArrayLike) -> None:
        """Cached blocks among ``ids`` that nobody holds leave the tree, and what cannot be found without them."""
        asked = np.asarray(ids, np.int32).reshape(-1)
        self.room.drop(asked[(self.blocks.nodes[asked] != NONE) & (self.blocks.refs[asked] == 0)].tolist())

    # -- the host and the head -----------------------------------------------------------------------------------

    def load(self, ids: npt.ArrayLike) -> None:
        """Claimed blocks begin to come from the host; those on the device, or on their way, are left alone."""
        self.incoming.load(np.asarray(ids, np.int32).reshape(-1))

    def is_loaded(self, ids: npt.ArrayLike) -> bool:
        """Whether work that is asked for now may read all of them, as ``look_at_loads`` saw it."""
        asked = np.asarray(ids, np.int32).reshape(-1)
        on_device = bool((self.blocks.levels[asked] == Level.DEVICE).all())
        return on_device and self.incoming.ids().isdisjoint(asked.tolist())

    def wait(self, ids: npt.ArrayLike | None = None) -> None:
        """Until all of ``ids`` have come, of those that were asked for; None: until the oldest transfer is done."""
        self.incoming.wait(None if ids is None else np.asarray(ids, np.int32).reshape(-1))

    def look_at_loads(self) -> None:
        """What has come is let go by its transfer. Raises ``TransferFailed``, once, where something did not come:
        those blocks are out of the cache, and who holds them must not read them."""
        self.incoming.look()

    def distrust(self, ids: npt.ArrayLike, *, also: Sequence[tuple[int, bytes]] = ()) -> None:
        """Nobody may find these blocks any more, held though they be; those that others hold too are theirs.

        ``also``: blocks that were looked at and let go, with the digests they had then; what became of them since is
        spared.
        """
        asked = np.asarray(ids, np.int32).reshape(-1)
        doubted = asked[self.blocks.refs[asked] == 1].tolist()
        doubted += [block for block, digest in also if not self.blocks.refs[block] and self.digest(block) == digest]
        self.room.drop(doubted)

    def digest(self, block: int) -> bytes | None:
        """What the tree knows the block by; None: it does not."""
        node = int(self.blocks.nodes[block])
        return None if node == NONE else self.tree.digest(node)

    def take_back(self, num_slots: int | None = None, *, manager: str = "kv") -> Deferral | None:
        """Empty the first ``num_slots`` slots of the head (None: all), by eviction or by one stream-ordered copy.

        A deferral where held blocks find no place in the body, pins or transfers being in the way; nothing has
        changed then. Who keeps slots looks at ``layout_version``.
        """
        num_slots = self.head_slots if num_slots is None else num_slots
        if not 0 <= num_slots <= self.head_slots:
            raise ResourceError(f"{num_slots} slots of a head that has {self.head_slots}")
        answer = self.room.take_back(num_slots, manager=manager)
        if answer is None:
            self.flush()  # what is evicted may still be read on its way to the host
        return answer

    def lend(self) -> None:
        """The scratch is idle: all of the head is lent to cached blocks."""
        self.room.lend()

    # -- a step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Priorities whose time is over fall back, and the step gets its share of the link to the host. What sequences
        wait for comes in any case and counts first; what is left is for evicted blocks, and others are dropped."""
        self.room.begin_step()
        self._retention.refresh()

    def flush(self) -> None:
        """Before a launch: the step's kernels come after the transfers whose slots they overwrite."""
        self.mover.before_launch()

    # -- the whole -----------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Blocks by what they are, and what has been done so far, in blocks."""
        return {
            "free": self.num_free,
            "cached": self.num_cached,
            "live": self.num_live,
            "lent": self.head_slots - self.room.lent,
            "host_capacity": self.num_host_slots,
            "host_cached": len(self.room.host),
            "host_free": len(self.blocks.free_host),
            **{name: self.room.counts[name] for name in COUNTS},
        }

    def clear(self) -> None:
        """Nothing is cached any more but what is held: that stays, and can be found."""
        self.incoming.wait_all()
        for queue in (self.room.body, self.room.head, self.room.host):
            self.room.drop(queue.listed())

    def vacate(self) -> None:
        """The device's memory is about to go: what is cached there moves to the host, however long that takes, or is
        dropped. Raises ``ResourceError``, with nothing changed, while blocks of the device are held."""
        self.incoming.wait_all()
        if self.num_live:
            raise ResourceError(f"{self.num_live} blocks are held while the device is vacated")
        budget, self.room.budget = self.room.budget, _unlimited(self.mover)
        try:
            self.room.vacate()
        finally:
            self.room.budget = budget
        self.flush()  # what comes next on the execution stream comes after the copies

    def reset(self) -> None:
        """As new, whoever held what: the counts stay."""
        self.incoming.wait_all()
        held = np.flatnonzero(self.blocks.refs).astype(np.int32)
        self.blocks.refs[held] = 0
        self.blocks.num_held = self.blocks.num_shared = 0
        for block in held.tolist():
            self.room.let(block)
        self.clear()

    def close(self) -> None:
        """Wait for transfers and let go of the mover. Closing again does nothing."""
        self.incoming.wait_all()
        self.mover.close()


def _unlimited(mover: Mover) -> TransferBudget:
    return TransferBudget(slab_bytes=mover.slab_bytes, bytes_per_second=math.inf, slice_s=1.0)
