"""Scratch for one step at a time, bounded by what its backends declared.

The arena has room for the worst step that the limits admit, and in each step hands out no more than the declaration
says for that step's shape. So a backend that declares too little fails in its first test, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tonnage.buffers import Memory, VaArena
from tonnage.buffers.torch_view import as_tensor, typed_view
from tonnage.config import Limits
from tonnage.errors import DeclarationExceeded
from tonnage.terms import Chip, Scratch, StepShape, worst_bytes
from tonnage.units import round_up

if TYPE_CHECKING:
    import torch

#: Written over what a step used, where the arena is told to: no number that a kernel would make.
POISON = 0xAA


class StepScratch:
    """The scratch of one step: pieces one behind the other, all valid until the step ends."""

    def __init__(self, arena: ScratchArena, *, backend: str, declared_bytes: int, shape: StepShape) -> None:
        self._arena, self._backend, self._shape = arena, backend, shape
        self.declared_bytes, self.used_bytes = declared_bytes, 0

    def take(self, num_bytes: int, *, alignment: int | None = None) -> int:
        """The offset in the arena of ``num_bytes`` more, aligned as declared; add ``address`` for a pointer.

        Raises ``DeclarationExceeded`` when this step would then use more than was declared for its shape; the piece
        is not taken.
        """
        if num_bytes == 0:
            return 0  # nothing, wherever: it must not fail for want of alignment
        offset = round_up(self.used_bytes, alignment or self._arena.alignment)
        if offset + num_bytes > self.declared_bytes:
            raise DeclarationExceeded(
                backend=self._backend,
                asked_bytes=offset + num_bytes,
                declared_bytes=self.declared_bytes,
                shape=self._shape,
            )
        self.used_bytes = offset + num_bytes
        self._arena.high_water_bytes = max(self._arena.high_water_bytes, self.used_bytes)
        return offset

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A piece as a tensor; its contents are whatever was there. Raises ``DeclarationExceeded`` as ``take`` does."""
        offset = self.take(math.prod(shape) * dtype.itemsize)
        return typed_view(self._arena.bytes_tensor(), offset, shape, str(dtype).removeprefix("torch."))

    @property
    def address(self) -> int:
        return self._arena.address


class ScratchArena:
    """One scratch memory for all ``declarations``, which use it in turn (they have one ``share``).

    The bytes are ``worst_bytes(declarations, limits, chip)``: a ``VaArena`` is committed to them, a buffer must
    have them (``DeclarationExceeded``). The memory stays the caller's to close, after ``close`` here. ``poison``
    overwrites what a step used when it ends, and is refused for a backend that keeps state there.
    """

    def __init__(
        self, memory: Memory, declarations: tuple[Scratch, ...], *, limits: Limits, chip: Chip, poison: bool = False
    ) -> None:
        self._memory, self._chip, self._poison = memory, chip, poison
        self.declarations = _servable(declarations, poison=poison)
        self.size_bytes = worst_bytes(self.declarations, limits, chip)
        self.alignment = max((one.alignment for one in self.declarations), default=1)
        self.high_water_bytes = 0
        self._zeroed_bytes = max((one.zeroed_bytes for one in self.declarations), default=0)
        self._tensor: torch.Tensor | None = None
        self._is_busy = False
        if isinstance(memory, VaArena):
            memory.commit(self.size_bytes)
        elif memory.usable_bytes < self.size_bytes:
            raise DeclarationExceeded(
                backend=self._names(), asked_bytes=self.size_bytes, declared_bytes=memory.usable_bytes
            )
        if self._zeroed_bytes and isinstance(memory, VaArena):
            memory.keep_zero(0, self._zeroed_bytes)  # after a sleep too
        elif self._zeroed_bytes:
            self._fill(0, 0, self._zeroed_bytes)

    def __repr__(self) -> str:
        return f"<ScratchArena {self._names()} {self.size_bytes:,} bytes, at most {self.high_water_bytes:,} used>"

    @property
    def address(self) -> int:
        return self._memory.address

    @contextmanager
    def step(self, shape: StepShape) -> Iterator[StepScratch]:
        """The scratch of a step of ``shape``, empty at the start. One step at a time.

        Raises ``DeclarationExceeded`` for a shape beyond the limits.
        """
        assert not self._is_busy, "a step is open"
        declared, backend = max(
            ((one.bytes_at(shape, self._chip), one.backend) for one in self.declarations), default=(0, "none")
        )
        if declared > self.size_bytes:
            raise DeclarationExceeded(
                backend=backend, asked_bytes=declared, declared_bytes=self.size_bytes, shape=shape
            )
        scratch = StepScratch(self, backend=backend, declared_bytes=declared, shape=shape)
        try:
            self._is_busy = True
            yield scratch
        finally:
            self._is_busy = False
            if self._poison and scratch.used_bytes > self._zeroed_bytes:
                self._fill(POISON, self._zeroed_bytes, scratch.used_bytes)

    def bytes_tensor(self) -> torch.Tensor:
        """All of the memory as a uint8 tensor, made once."""
        if self._tensor is None:
            self._tensor = as_tensor(self._memory)
        return self._tensor

    def close(self) -> None:
        """Let go of the memory. Closing again does nothing."""
        self._tensor = None

    def _fill(self, byte: int, start: int, end: int) -> None:
        stream = self._memory.stream
        stream.driver.fill(self._memory.address + start, byte, end - start, stream=stream.bare_handle)

    def _names(self) -> str:
        return ", ".join(sorted({one.backend for one in self.declarations})) or "none"


def _servable(declarations: tuple[Scratch, ...], *, poison: bool) -> tuple[Scratch, ...]:
    """Those that an arena hands out; what a library allocates by itself is audited elsewhere."""
    served = tuple(one for one in declarations if one.served)
    if len({one.share for one in served}) > 1:
        raise ValueError(f"one arena cannot serve several shares: {sorted({one.share for one in served})}")
    keeping = [one.backend for one in served if one.keeps_state]
    if poison and keeping:
        raise ValueError(f"{', '.join(keeping)} keeps state in its scratch between steps: it cannot be poisoned")
    return served
