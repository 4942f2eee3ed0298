"""Which memory a compiled function uses again, as Inductor plans it in the code around its kernels.

A buffer that nobody reads any more is not given back where a later one of equal size and dtype can have its place: it
stays until then. The last one that died is taken first. It must not make the function need more than it does anyhow, by
Inductor's own estimate: what its kernels make, each from the one that makes it to the last that reads it. Where these
two kernels are neighbours nothing is asked. (``codegen/wrapper.py`` of torch 2.11 to 2.13, ``AllocateLine`` and
``FreeIfNotReusedLine``.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

#: What must be equal: bytes and dtype.
Key: TypeAlias = tuple[int, torch.dtype]


@dataclass(frozen=True, slots=True)
class Life:
    """Bytes that are there from the kernel ``first`` to the last one that reads them, both counted; None: for good."""

    num_bytes: int
    first: int
    last: int | None


@dataclass(slots=True, eq=False)
class Dead:
    """A buffer after the kernel ``number``, which was the last to read it; ``event``: where it is given back."""

    slot: int
    number: int
    event: int


class Pool:
    """Dead buffers that wait for one of their kind."""

    def __init__(self, lives: Sequence[Life], num_kernels: int) -> None:
        changes = [0] * (num_kernels + 1)
        for life in lives:
            changes[life.first] += life.num_bytes
            if life.last is not None:
                changes[life.last + 1] -= life.num_bytes
        self._memory = list(accumulate(changes))
        self._most = max(self._memory)
        self._dead: dict[Key, list[Dead]] = defaultdict(list)

    def give(self, key: Key, dead: Dead) -> None:
        self._dead[key].append(dead)

    def take(self, key: Key, number: int) -> Dead | None:
        """The one whose place a buffer of the kernel ``number`` gets, if any."""
        if not (waiting := self._dead[key]):
            return None
        between = range(waiting[-1].number + 1, number)
        if max((self._memory[each] for each in between), default=0) + key[0] > self._most and between:
            return None
        for each in between:
            self._memory[each] += key[0]
        return waiting.pop()
