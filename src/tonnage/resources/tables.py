"""Page tables: which block, and so which slot, holds which tokens of each running sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tonnage.resources.cache import BlockCache
from tonnage.resources.mover import Ids
from tonnage.step import Ints

#: Places in one table: rows and columns of equal length.
Places = tuple[Ints, Ints]


def entries(rows: Ints, first: Ints, counts: Ints) -> Places:
    """Columns [first[i], first[i] + counts[i]) of rows[i], row after row."""
    some = np.flatnonzero(counts)  # in a decode step few rows begin a block
    rows, first, counts = rows[some], first[some], counts[some]
    before = np.cumsum(counts) - counts
    columns = np.arange(counts.sum()) + np.repeat(first - before, counts)
    return np.repeat(rows, counts), columns


class PageTables:
    """Two int32 tables ``[num_groups, num_rows, width]``: ``ids`` of blocks, and ``slots``, where they lie.

    Kernels read slots; everything else goes by ids, which stay. Entries without a block are ``no_block`` in the one
    and 0 in the other: a valid index, so that a padded read stays inside the pool.
    """

    def __init__(self, cache: BlockCache, groups: Sequence[int], *, num_rows: int, width: int) -> None:
        self._cache, self._groups = cache, tuple(groups)
        shape = (len(self._groups), num_rows, width)
        self.ids: npt.NDArray[np.int32] = np.full(shape, cache.no_block, np.int32)
        self.slots: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self._version = cache.layout_version

    @property
    def width(self) -> int:
        return self.ids.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.slots.nbytes

    def refresh(self, num_columns: int) -> None:
        """Slots as they are now, if blocks have moved; no row has a block beyond ``num_columns``."""
        if self._version != self._cache.layout_version:
            self._version = self._cache.layout_version
            self.slots[:, :, :num_columns] = self._cache.slots[self.ids[:, :, :num_columns]]

    def grow(self, places: Places) -> None:
        """A new block of each group at every place; all of them or none."""
        num = places[0].size
        taken: list[Ids] = []
        try:
            taken.extend(self._cache.allocate(num, group=group) for group in self._groups)
        except BaseException:
            for ids in reversed(taken):
                self._cache.release(ids)
            raise
        for group, ids in enumerate(taken):
            self.ids[group][places] = ids
            self.slots[group][places] = self._cache.slots[ids]

    def cut(self, places: Places) -> None:
        """Let go of the blocks at the places, the exact opposite of ``grow``."""
        for group in reversed(range(len(self._groups))):
            ids = self.ids[group][places]
            # One call, in the order they were taken, puts the free stack back as it was.
            self._cache.release(ids[ids != self._cache.no_block])
            self._blank(group, places)

    def cut_front(self, group: int, row: int, columns: slice) -> None:
        """Let go of what fell out of one row's window."""
        ids = self.ids[group, row, columns]
        self._cache.release(ids[ids != self._cache.no_block])
        self._blank(group, (row, columns))

    def set(self, row: int, first: int, ids: Sequence[Sequence[int]]) -> None:
        """Blocks of each group from column ``first`` on; -1: none."""
        for group, blocks in enumerate(ids):
            columns = slice(first, first + len(blocks))
            given = np.array(blocks, np.int32)
            given[given < 0] = self._cache.no_block
            self.ids[group, row, columns] = given
            self.slots[group, row, columns] = self._cache.slots[given]

    def columns(self, row: int, first: int, last: int) -> list[list[int]]:
        """The block of each group at each of the columns [first, last); -1: none."""
        found = self.ids[:, row, first:last].T
        blocks: list[list[int]] = np.where(found == self._cache.no_block, -1, found).tolist()
        return blocks

    def row(self, row: int, first: int, last: int) -> Ids:
        """Blocks of the columns [first, last) in token order, those of all groups side by side.

        Released in this order, from the back, no group loses all its blocks before another loses one.
        """
        found = self.ids[:, row, first:last].T.reshape(-1)
        return found[found != self._cache.no_block]

    def blank(self, row: int, num_columns: int) -> None:
        self.ids[:, row, :num_columns] = self._cache.no_block
        self.slots[:, row, :num_columns] = 0

    def _blank(self, group: int, places: Places | tuple[int, slice]) -> None:
        self.ids[group][places] = self._cache.no_block
        self.slots[group][places] = 0
