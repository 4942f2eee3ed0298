"""Sequence slots: a stable row number for each live sequence, for every table that has a row per sequence."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.resources.base import Deferral, Grant, RequestView, StepOutcome
from tonnage.step import Ints, StepPlan, Txn
from tonnage.terms import Claim


class SlotManager:
    """Slots ``[0, num_slots)``; the lowest free one is taken, so the rows in use stay close together.

    A slot belongs to its sequence from ``admit`` to ``free``. Whoever keeps a row per slot must initialise it when the
    slot is taken: its last owner's values are still there.
    """

    name = "slots"
    unit = "slot"
    after: frozenset[str] = frozenset()
    may_refuse = True
    rerunnable = True

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ResourceError(f"{num_slots} sequence slots")
        self._num_slots = num_slots
        self._closed = False
        self._owned: dict[str, int] = {}
        self._free = list(range(num_slots))
        self._num_left = [0] * num_slots  # owners that have left each slot: tells its owner from those before

    def capacity(self) -> int:
        return self._num_slots

    def available(self) -> int:
        return len(self._free)

    def lifetime_need(self, request: RequestView) -> int:  # noqa: ARG002 - every sequence needs one
        return 1

    def remaining(self, request: RequestView) -> int:
        return 0 if request.id in self._owned else 1

    def slot_of(self, request_id: str) -> int:
        """The slot of a live sequence; ``ResourceError`` for any other."""
        if request_id not in self._owned:
            raise ResourceError(f"request {request_id!r} has no slot")
        return self._owned[request_id]

    def claims(self, limits: Limits) -> Sequence[Claim]:  # noqa: ARG002 - the tables with a row per slot claim it
        return ()

    def probe(self, stage: str, limits: Limits) -> Sequence[RequestView]:  # noqa: ARG002 - slots cost no memory
        return ()

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        if self._closed or request.id in self._owned:
            raise ResourceError(
                f"request {request.id!r}: " + ("slots are closed" if self._closed else "admitted twice")
            )
        if not self._free:
            return Deferral(manager=self.name, need=1, have=0)
        slot = self._owned[request.id] = heapq.heappop(self._free)
        txn.undo(partial(self._unadmit, request.id, slot, self._num_left[slot]))
        return Grant(units=1)

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:  # noqa: ARG002 - a slot is all a sequence needs
        return 0

    def held_back(self) -> str:
        return ""

    def prepare(self, plan: StepPlan, txn: Txn) -> None:  # noqa: ARG002 - nothing changes from step to step
        if self._closed:
            raise ResourceError("the sequence slots are closed")
        if not all(map(self._owned.__contains__, plan.request_ids)):
            for request_id in plan.request_ids:
                self.slot_of(request_id)

    def committed(self) -> None:
        pass

    def loading(self) -> Collection[str]:
        return ()

    def wait_loaded(self) -> None:
        pass

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:
        pass

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:  # noqa: ARG002 - nothing is cached
        slot = self._owned.pop(request_id, None)
        if slot is not None:
            self._num_left[slot] += 1
            heapq.heappush(self._free, slot)

    def reset(self) -> None:
        """Every slot free."""
        for request_id in list(self._owned):
            self.free(request_id)

    def close(self) -> None:
        self.reset()
        self._closed = True

    def stats(self) -> Mapping[str, int]:
        return {"capacity": self._num_slots, "available": len(self._free), "used": len(self._owned)}

    def _unadmit(self, request_id: str, slot: int, num_left: int) -> None:
        """Nothing if the sequence has left since, though one of its name may be here again."""
        if self._owned.get(request_id) == slot and self._num_left[slot] == num_left:
            self.free(request_id)
