"""The rows of a step, while they are chosen and when they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.step import Ints, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A step's plan, and the slot of each of its rows."""

    plan: StepPlan
    slots: Ints


@dataclass(slots=True, eq=False)
class Picked:
    """The rows of a step while it is put together: how many tokens of which slot. Decodes come first."""

    slots: Ints
    counts: Ints

    def without(self, slot: int) -> Picked:
        keep = self.slots != slot
        return Picked(self.slots[keep], self.counts[keep])

    def plus(self, slots: list[int], counts: list[int]) -> Picked:
        """With chunks more."""
        return Picked(np.append(self.slots, slots), np.append(self.counts, counts)) if slots else self
