"""The money of a plan: what the device has, what is set aside, and what is left for the pool."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The money, in bytes: device - foreign - keep_free = room; cap = min(room, total_bytes);
    rest = cap - fixed; pool = floor(kv_fraction * rest)."""

    device: int
    foreign: int
    keep_free: int
    total_bytes: int | None
    fixed: int
    fraction: Fraction

    @property
    def room(self) -> int:
        return self.device - self.foreign - self.keep_free

    @property
    def cap(self) -> int:
        return self.room if self.total_bytes is None else min(self.room, self.total_bytes)

    @property
    def rest(self) -> int:
        return self.cap - self.fixed

    @property
    def pool(self) -> int:
        return int(self.rest * self.fraction) if self.rest > 0 else 0
