"""Blocks on their way from the host: held by their transfer until they are there, or are given up."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tonnage.errors import TransferFailed
from tonnage.resources.blocks import NONE, Level
from tonnage.resources.mover import Ids, Load
from tonnage.resources.room import Room
from tonnage.resources.tree import PrefixTree


@dataclass(slots=True, eq=False)
class _Loading:
    """Blocks on their way to the device, and the host slots that they leave free once they have come."""

    load: Load
    ids: Ids
    host_slots: Ids


class Incoming:
    """The transfers into the body of ``room`` that are under way, oldest first."""

    def __init__(self, room: Room) -> None:
        self._room, self._blocks, self._tree = room, room.blocks, room.tree
        self._loading: list[_Loading] = []
        self._failed: TransferFailed | None = None

    def load(self, ids: Ids) -> None:
        """Held blocks of the host begin to come to the body; a transfer holds them until they are there."""
        ids = ids[self._blocks.levels[ids] == Level.HOST]
        if not ids.size:
            return
        try:
            load, slots, host_slots = self._begin(ids)
        except Exception as error:
            raise TransferFailed(f"{ids.size} blocks cannot be loaded from the host ({error})") from error
        self._room.tell("removed", ids, Level.HOST)
        self._blocks.host_owners[host_slots] = NONE
        self._blocks.place(ids, Level.DEVICE, slots)
        self._blocks.hold(ids)
        self._room.tell("stored", ids, Level.DEVICE)
        self._loading.append(_Loading(load, ids, host_slots))
        self._room.counts["loaded"] += ids.size
        self._room.version += 1
        self._room.num_to_count += ids.size

    def _begin(self, ids: Ids) -> tuple[Load, Ids, Ids]:
        """The copy into slots of the body, those slots, and those of the host."""
        self._room.make(ids.size)
        slots, host_slots = self._blocks.free_body.pop(ids.size), self._blocks.slots[ids]
        try:
            return self._room.mover.load(host_slots, slots), slots, host_slots
        except BaseException:
            self._blocks.free_body.push(slots)
            raise

    @property
    def num(self) -> int:
        """Blocks on their way, as far as anybody has looked."""
        return sum(one.ids.size for one in self._loading)

    def ids(self) -> set[int]:
        """Blocks that nobody has seen to have come. Only ``look`` and ``wait`` see: whoever asks in the middle of
        something finds the books as they were."""
        return {block for one in self._loading for block in one.ids.tolist()}

    def look(self) -> None:
        """What has come is let go by its transfer, and what has failed is gone. Raises ``TransferFailed``, once, if
        blocks did not come since this was asked last."""
        for one in list(self._loading):
            try:
                if one.load.is_done:
                    self._arrived(one)
            except Exception as error:  # noqa: BLE001 - whatever the driver says of a copy that ran
                self._lost(one, error)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def wait(self, ids: Ids | None = None) -> None:
        """Until all of ``ids`` have come; None: until the transfer that was asked for first has."""
        for one in list(self._loading):
            if ids is None or np.isin(one.ids, ids).any():
                try:
                    one.load.wait()
                except Exception as error:  # noqa: BLE001 - as in ``look``
                    self._lost(one, error)
                else:
                    self._arrived(one)
                if ids is None:
                    return

    def wait_all(self) -> None:
        while self._loading:
            self.wait()

    def _arrived(self, one: _Loading) -> None:
        self._loading.remove(one)
        self._blocks.free_host.push(one.host_slots)
        idle = self._blocks.let_go(one.ids)[::-1].tolist()
        for block in idle:
            self._room.let(block)
        # Who asked for them has left, and what leads to them was let go before: it must not be given up before them.
        nodes = {int(self._blocks.nodes[block]) for block in idle}
        for node in sorted(nodes - {NONE}, key=self._tree.depth, reverse=True):
            if self._tree.parent(node) not in nodes:
                self._lift_above(node)

    def _lift_above(self, node: int) -> None:
        while (node := self._tree.parent(node)) != PrefixTree.ROOT:
            for group in range(self._room.num_groups):
                block = self._tree.block(node, group)
                if block != NONE and self._room.is_offered(block):
                    self._room.withdraw(block)
                    self._room.let(block)

    def _lost(self, one: _Loading, error: Exception) -> None:
        """It did not come: nobody knows what is in its slots, so nobody may find it."""
        self._loading.remove(one)
        with suppress(Exception):
            self._room.mover.sync()  # nothing of it may be written later, over what takes its slots
        self._blocks.free_host.push(one.host_slots)
        self._room.drop(one.ids.tolist())
        idle = self._blocks.let_go(one.ids)
        self._blocks.free(idle)
        self._room.counts["lost"] += one.ids.size
        failed = TransferFailed(f"{one.ids.size} blocks did not come from the host ({error})")
        failed.__cause__ = error
        self._failed = self._failed or failed

    def overtake(self, heir: int, block: int) -> None:
        """A private block holds, just computed, what is on its way to a block of the tree: they change places, and
        holders. The tree's one can be read at once, and the other is the transfer's until that has ended."""
        one = next(one for one in self._loading if heir in one.ids)
        pair = np.array([heir, block], np.int32)
        self._blocks.slots[pair] = self._blocks.slots[pair[::-1]]
        self._blocks.owners[self._blocks.slots[pair]] = pair
        one.ids[one.ids == heir] = block
        self._room.version += 1
