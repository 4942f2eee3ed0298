"""Where every KV block lies and who holds it: ids that stay, slots that change, one array a property."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tonnage.errors import ResourceError
from tonnage.resources.mover import Ids

#: Stands for no node and no owner.
NONE = -1


class Level:
    """Where a block's bytes are. NOWHERE: the id is free. Plain ints: they are compared with entries of an array,
    which takes ten times as long with members of an enumeration."""

    NOWHERE = 0
    DEVICE = 1
    HOST = 2


class Stack:
    """Free numbers, last in, first out: what was freed last, still warm in the caches, is handed out next."""

    def __init__(self, numbers: npt.ArrayLike) -> None:
        self._numbers = np.array(numbers, np.int32)[::-1].copy()
        self._size = self._numbers.size

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes

    def pop(self, num: int) -> Ids:
        assert 0 <= num <= self._size
        taken = self._numbers[self._size - num : self._size][::-1].copy()
        self._size -= num
        return taken

    def push(self, numbers: Ids) -> None:
        """Pushed in reverse, so that pushing what was just popped puts the stack back as it was."""
        self._numbers[self._size : self._size + numbers.size] = numbers[::-1]
        self._size += numbers.size

    def remove(self, below: int) -> Ids:
        """Take every number under ``below`` out, wherever it is."""
        inside = self._numbers[: self._size]
        taken, kept = inside[inside < below], inside[inside >= below]
        self._numbers[: kept.size] = kept
        self._size = kept.size
        return taken

    def listed(self) -> Ids:
        """A copy; the last entry goes next."""
        return self._numbers[: self._size].copy()


class Blocks:
    """``num_slots + num_host_slots`` blocks over as many slots; ``[0, head_slots)`` of the device are the head.

    Arrays by id: ``refs`` holders, ``levels``, ``slots`` (of its level), ``nodes`` of the prefix tree (NONE: private),
    ``groups``. ``slots`` has one entry more, 0, for the id ``num_blocks`` that stands for no block. ``owners`` and
    ``host_owners`` lead from a slot back to its block. A block of level NOWHERE has no slot, no holder and no node.
    ``num_held`` counts blocks with a holder, wherever they are; ``num_shared`` the holders beyond the first, of blocks
    of the ``moving`` groups, whose holders move on and take new blocks while the others keep the old one.
    """

    def __init__(
        self, *, num_slots: int, head_slots: int = 0, num_host_slots: int = 0, moving: Sequence[bool] = ()
    ) -> None:
        if num_slots < 1 or not 0 <= head_slots < num_slots or num_host_slots < 0:
            raise ResourceError(f"a pool of {num_slots} slots, {head_slots} in its head, {num_host_slots} on the host")
        self.num_slots, self.head_slots, self.num_host_slots = num_slots, head_slots, num_host_slots
        self.num_blocks = num_slots + num_host_slots
        self.refs = np.zeros(self.num_blocks, np.int32)
        self.levels = np.zeros(self.num_blocks, np.int8)
        self.slots = np.zeros(self.num_blocks + 1, np.int32)
        self.nodes = np.full(self.num_blocks, NONE, np.int32)
        self.groups = np.zeros(self.num_blocks, np.int8)
        self.owners = np.full(num_slots, NONE, np.int32)
        self.host_owners = np.full(num_host_slots, NONE, np.int32)
        self.free_ids = Stack(np.arange(self.num_blocks))
        self.free_body = Stack(np.arange(head_slots, num_slots))
        self.free_head = Stack(np.arange(head_slots))
        self.free_host = Stack(np.arange(num_host_slots))
        self.num_held = self.num_shared = 0
        self._moving = np.array(moving, bool) if any(moving) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays and stacks."""
        arrays = (self.refs, self.levels, self.slots, self.nodes, self.groups, self.owners, self.host_owners)
        stacks = (self.free_ids, self.free_body, self.free_head, self.free_host)
        return sum(one.nbytes for one in arrays) + sum(one.num_bytes for one in stacks)

    def checked(self, ids: npt.ArrayLike, verb: str) -> Ids:
        """``ids`` as an array, all of them held and none twice; ``ResourceError`` before anything is changed."""
        asked = np.asarray(ids, np.int32).reshape(-1)
        if not asked.size:
            return asked
        ordered = np.sort(asked)
        if ordered[0] < 0 or ordered[-1] >= self.num_blocks:
            wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
            raise ResourceError(f"block {wrong} is not one of the pool's {self.num_blocks}")
        if (ordered[1:] == ordered[:-1]).any():
            raise ResourceError(f"a block is {verb} twice in one call: {asked.tolist()}")
        if not self.refs[asked].all():
            idle = asked[self.refs[asked] == 0]
            raise ResourceError(f"block {idle[0]} is {verb} but nothing holds it")
        return asked

    def take(self, num: int, group: int) -> Ids:
        """New private blocks in free slots of the body, held once each."""
        ids, slots = self.free_ids.pop(num), self.free_body.pop(num)
        self.levels[ids], self.slots[ids], self.groups[ids], self.refs[ids] = Level.DEVICE, slots, group, 1
        self.owners[slots] = ids
        self.num_held += num
        return ids

    def hold(self, ids: Ids) -> Ids:
        """One holder more; returns those that had none."""
        is_idle = self.refs[ids] == 0
        idle = ids[is_idle]
        self.refs[ids] += 1
        self.num_held += idle.size
        self.num_shared += self.num_moving(ids[~is_idle])
        return idle

    def let_go(self, ids: Ids) -> Ids:
        """One holder less; returns those that have none now."""
        self.refs[ids] -= 1
        is_idle = self.refs[ids] == 0
        idle = ids[is_idle]
        self.num_held -= idle.size
        self.num_shared -= self.num_moving(ids[~is_idle])
        return idle

    def num_moving(self, ids: Ids) -> int:
        """How many are of moving groups."""
        return 0 if self._moving is None or not ids.size else int(np.count_nonzero(self._moving[self.groups[ids]]))

    def free(self, ids: Ids) -> None:
        """Blocks without holders and nodes give up slot and id."""
        assert not self.refs[ids].any()
        self.leave(ids)
        self.levels[ids], self.nodes[ids] = Level.NOWHERE, NONE
        self.free_ids.push(ids)

    def leave(self, ids: Ids) -> None:
        """Give the slots back; the blocks must then be placed elsewhere, or freed."""
        on_host = self.levels[ids] == Level.HOST
        slots, host_slots = self.slots[ids[~on_host]], self.slots[ids[on_host]]
        self.owners[slots], self.host_owners[host_slots] = NONE, NONE
        in_head = slots < self.head_slots
        self.free_body.push(slots[~in_head])
        self.free_head.push(slots[in_head])
        self.free_host.push(host_slots)

    def place(self, ids: Ids, level: int, slots: Ids) -> None:
        """Blocks that have left lie in ``slots`` of ``level`` now, taken from the free ones by the caller."""
        self.levels[ids], self.slots[ids] = level, slots
        (self.owners if level == Level.DEVICE else self.host_owners)[slots] = ids

    def inherit(self, heir: int, block: int) -> None:
        """``heir``, which has left its place, takes the slot and the one holder of ``block``, whose id is free then."""
        assert self.refs[block] == 1
        ids, slot = np.array([block], np.int32), self.slots[[block]]
        self.let_go(ids)
        self.levels[block] = Level.NOWHERE
        self.free_ids.push(ids)
        self.place(np.array([heir], np.int32), Level.DEVICE, slot)
        self.hold(np.array([heir], np.int32))

    def is_in_head(self, block: int) -> bool:
        return self.levels[block] == Level.DEVICE and bool(self.slots[block] < self.head_slots)

    def living_in_head(self, num_slots: int) -> Ids:
        """Blocks in the head's first ``num_slots`` slots."""
        owners = self.owners[:num_slots]
        return owners[owners != NONE]


def as_ids(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, np.int32)
