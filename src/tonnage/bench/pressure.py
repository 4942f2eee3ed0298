"""What a soak does to the KV pool beside its requests: it pins, and takes the scratch back and lends it again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tonnage.bench import inside
from tonnage.bench.rules import Act
from tonnage.errors import DriverError, InputError

if TYPE_CHECKING:
    from tonnage.engine import Engine
    from tonnage.resources.pins import PinHandle

#: Of a step: that somebody takes the scratch back, gives it, or pins a request.
SCRATCH_CHANCE, PIN_CHANCE = 0.1, 0.03
PIN_STEPS = (1, 5, 20, 100)


class Pressure:
    """Changes the pool between steps, by a seed. ``tell`` hears of pins, ``on_break`` of broken rules.

    Pins never take so much that the longest sequence would not fit beside them.
    """

    def __init__(
        self, engine: Engine, seed: int, *, tell: Callable[[Act], None], on_break: Callable[[str, str], None]
    ) -> None:
        self._engine, self._tell, self._break = engine, tell, on_break
        self._rng = random.Random(seed ^ 0x9E55)
        self._pins: dict[str, tuple[int, PinHandle]] = {}  # by request: when it is over
        self._num_steps = 0
        limits = inside.oracle_limits(engine)
        self._may_pin = limits.num_blocks - limits.most_blocks(limits.max_seq_len)
        self.counts = Counter(pins=0, deferred=0)

    def change(self, request_ids: Sequence[str]) -> None:
        """Before each step; ``request_ids`` are there."""
        self._num_steps += 1
        for request_id in [name for name, (until, _) in self._pins.items() if until <= self._num_steps]:
            self._unpin(request_id)
        if request_ids and self._rng.random() < PIN_CHANCE:
            self._pin(self._rng.choice(request_ids))
        if inside.head_slots(self._engine):
            if self._rng.random() < SCRATCH_CHANCE:
                self._change_scratch()
            if num_blocks := inside.num_in_scratch(self._engine):
                self._break("scratch", f"{num_blocks} blocks lie where the scratch is")

    def ease(self) -> None:
        """Nothing is pinned any more, and what is on its way comes."""
        for request_id in list(self._pins):
            self._unpin(request_id)
        inside.settle(self._engine)

    def _pin(self, request_id: str) -> None:
        if request_id in self._pins:
            return
        try:
            pin = self._engine.pin(request_id)
        except InputError:
            return  # it waits
        if len(pin.ids) + sum(len(other.ids) for _, other in self._pins.values()) > self._may_pin:
            pin.close()
            return
        self._tell(Act("pin", request_id))
        self._pins[request_id] = self._num_steps + self._rng.choice(PIN_STEPS), pin
        self.counts["pins"] += 1

    def _unpin(self, request_id: str) -> None:
        self._tell(Act("unpin", request_id))
        self._pins.pop(request_id)[1].close()

    def _change_scratch(self) -> None:
        if self._rng.random() < 0.3:
            inside.lend(self._engine)
            return
        try:
            no = inside.take_back(self._engine, self._rng.randint(0, inside.head_slots(self._engine)))
        except DriverError:
            return  # a copy was made to fail: it is as if nobody had asked
        if no is not None:
            self.counts["deferred"] += 1
            if no.need <= no.have:
                self._break("scratch", f"{no.need} slots are not given back with {no.have} at hand")
