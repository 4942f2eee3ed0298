"""The pool of KV blocks: which are free, and how many hold each of the others. It knows ids, not memory."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.errors import ResourceError

#: Block ids: int32, one dimension.
Ids: TypeAlias = npt.NDArray[np.int32]


class BlockPool:
    """``num_blocks`` blocks with ids ``[0, num_blocks)``, kept as two arrays: a stack of free ids and reference counts.

    A block is on the stack if and only if its count is 0. The stack is last in, first out, so that the block freed
    last, still warm in the caches, is handed out next; a ``free`` right after an ``allocate`` restores it exactly.
    Every call checks before it changes anything and raises ``ResourceError`` on misuse.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ResourceError(f"a block pool of {num_blocks} blocks")
        self._num_blocks = num_blocks
        self._refs = np.zeros(num_blocks, np.int32)
        # [0, num_free) is the stack, its top at the end: block 0 goes first.
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference; a shared block counts once."""
        return self._num_blocks - self._num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of the two arrays: what the claim for block metadata pays for."""
        return self._refs.nbytes + self._stack.nbytes

    def allocate(self, num_blocks: int) -> Ids:
        """Ids of ``num_blocks`` free blocks, each now referenced once; all of them or none."""
        if not 0 <= num_blocks <= self._num_free:
            raise ResourceError(f"asked for {num_blocks} blocks with {self._num_free} of {self._num_blocks} free")
        top = self._num_free
        ids = self._stack[top - num_blocks : top][::-1].copy()
        self._num_free -= num_blocks
        self._refs[ids] = 1
        return ids

    def share(self, ids: npt.ArrayLike) -> None:
        """One more reference to each block, which must be in use."""
        self._refs[self._checked(ids, "shared")] += 1

    def free(self, ids: npt.ArrayLike) -> None:
        """One reference less; a block that loses its last one is free again."""
        held = self._checked(ids, "freed")
        self._refs[held] -= 1
        # Pushed in reverse, so that the first id ends up on top.
        idle = held[self._refs[held] == 0][::-1]
        self._stack[self._num_free : self._num_free + idle.size] = idle
        self._num_free += idle.size

    def ref_counts(self, ids: npt.ArrayLike) -> Ids:
        return self._refs[self._known(ids)]

    def free_ids(self) -> Ids:
        """A copy of the stack; the last entry is handed out next."""
        return self._stack[: self._num_free].copy()

    def reset(self) -> None:
        """Every block free, in the order of a new pool."""
        self._refs[:] = 0
        self._stack[:] = np.arange(self._num_blocks - 1, -1, -1)
        self._num_free = self._num_blocks

    def _known(self, ids: npt.ArrayLike) -> Ids:
        asked = np.asarray(ids, dtype=np.int32).reshape(-1)
        if asked.size:
            _check_range(int(asked.min()), int(asked.max()), self._num_blocks)
        return asked

    def _checked(self, ids: npt.ArrayLike, verb: str) -> Ids:
        """``ids``, all of them in use and none twice."""
        asked = np.asarray(ids, dtype=np.int32).reshape(-1)
        if not asked.size:
            return asked
        # Sorted once, the ends of the range and what is there twice both show, for a fraction of np.unique's cost.
        ordered = np.sort(asked)
        _check_range(int(ordered[0]), int(ordered[-1]), self._num_blocks)
        if (ordered[1:] == ordered[:-1]).any():
            raise ResourceError(f"a block is {verb} twice in one call: {asked.tolist()}")
        if not self._refs[asked].all():
            idle = asked[self._refs[asked] == 0]
            raise ResourceError(f"block {idle[0]} is {verb} but nothing holds it")
        return asked


def _check_range(least: int, largest: int, num_blocks: int) -> None:
    if least < 0 or largest >= num_blocks:
        raise ResourceError(f"block {least if least < 0 else largest} is not one of the pool's {num_blocks}")
