"""Scratch that grows with what a step attends to, for plans made by hand."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.terms import Chip, Scratch, StepShape


@dataclass(frozen=True, kw_only=True)
class Gather(Scratch):
    """``rate`` bytes for each attended token, on top of ``base``."""

    backend: str = "test"
    name: str = "gather"
    share: str = "attention"
    source: str = "test"
    rate: int
    base: int = 0

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        return self.base + self.rate * shape.attended_tokens
