"""Failures that come now and then by a seed: of launches, of copies, of allocations. For engines under test."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tonnage.device.driver import Driver
from tonnage.device.fault import FaultDriver
from tonnage.errors import DriverError, DriverOOM
from tonnage.step import Veto

#: What a request that fails of one of these is told, in part.
INJECTED = "injected"
NOT_FINITE = "the model's logits are not finite numbers"
#: So many of the first calls that allocate fail: an engine makes few.
_FAILED_ALLOCATIONS = 4


class Mishaps:
    """``probability`` of a failure at each launch, of a row that is no number, and at each batch of copies.

    ``counts`` by what failed. ``on_copy`` is called before a copy raises. ``is_on`` may be switched at any time.
    """

    def __init__(
        self, *, probability: float, seed: int = 0, on_copy: Callable[[], None] = lambda: None, is_on: bool = True
    ) -> None:
        self.probability, self.on_copy, self.is_on = probability, on_copy, is_on
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed ^ 0x1005E)
        self._drivers: list[FaultDriver] = []

    @property
    def num_out_of_memory(self) -> int:
        """Failures for want of memory, which are tried again unless they are second ones."""
        return self.counts["out of memory"] + sum(driver.num_injected for driver in self._drivers)

    def driver(self, driver: Driver) -> Driver:
        """The same, whose first allocations fail."""
        faulty = FaultDriver(driver)
        faulty.arm(1, times=_FAILED_ALLOCATIONS, calls=frozenset({"pool_alloc", "mem_alloc"}), code=INJECTED)
        self._drivers.append(faulty)
        return faulty

    def before_launch(self) -> None:
        """A step is about to end well: or not."""
        if not self._strikes():
            return
        kind = self._rng.choice(("veto", "veto", "out of memory", "launch"))
        self.counts[kind] += 1
        if kind == "veto":
            raise Veto("mishaps", INJECTED)
        raise DriverOOM("launch", INJECTED) if kind == "out of memory" else DriverError("launch", INJECTED)

    def before_copy(self, call: str) -> None:
        if not self._strikes():
            return
        self.on_copy()
        if self._rng.random() < 0.5:
            self.counts["out of memory"] += 1
            raise DriverOOM(call, INJECTED)
        self.counts[call] += 1
        raise DriverError(call, INJECTED)

    def spoils_row(self) -> bool:
        """Whether a row of this step comes out as no number."""
        spoils = self._strikes()
        self.counts["not finite"] += spoils
        return spoils

    def explains(self, error: str | None) -> bool:
        """Whether a request that failed with ``error`` may have done so because of one of these."""
        return error is not None and (INJECTED in error or NOT_FINITE in error or "penalties" in error)

    def _strikes(self) -> bool:
        return self.is_on and self._rng.random() < self.probability
