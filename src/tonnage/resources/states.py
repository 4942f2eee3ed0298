"""Recurrent states (Mamba, linear attention, short convolutions): of one size whatever a sequence's length, in slots.

A step reads a sequence's state in one slot and writes the new one into another, and only when the step is committed
does the new one count. So a step that is rolled back, or fails half way, has destroyed nothing and can be run again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tonnage.buffers import Buffer, BufferManager
from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import KVLayout, state_bytes_per_sequence
from tonnage.resources.base import Deferral, Grant, RequestView, StepOutcome
from tonnage.resources.mover import Ids
from tonnage.resources.slots import SlotManager
from tonnage.step import Flags, Ints, StepPlan, Txn
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source
from tonnage.units import round_up

#: Bytes: every slot begins on such a border, which suits any vector load.
ALIGNMENT = 256
#: The slot that rows of padding read and write; it is nobody's.
SENTINEL = 0
NUM_SENTINELS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """Where a step's rows find their states and leave them: int32 slots, one entry a row."""

    reads: Ids
    writes: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    rows: Ints
    epochs: Ints
    slots: StateSlots


class StateManager:
    """States of the layout's STATE groups for the sequences of ``slots``, side by side in one slot.

    The sequence in seat s owns a ring of ``2 + lookahead_steps`` slots from ``NUM_SENTINELS + s * ring`` on: one for
    the state that the last committed step left, and one for each step that may be prepared and not committed::

        slots:  | sentinel | seat 0: front, back | seat 1: front, back | ...

    Each prepared step reads what the one before it writes, so a step ahead needs no wait. Two slots a sequence are the
    least for a step that can be run again: with shared spares a step with every sequence in it needs as many.

    A new sequence starts from zeros, whatever its seat held. A state is no prefix: it cannot be cut, so a sequence that
    comes back is computed from its first token (``admit`` refuses any other), and prefixes are not reused beside one.
    Drafts are refused: the states after each of them would have to be kept until it is known how many count.
    """

    name = "states"
    unit = "state"
    after: frozenset[str] = frozenset({SlotManager.name})
    may_refuse = True
    rerunnable = True

    def __init__(
        self, slots: SlotManager, layout: KVLayout, *, buffers: BufferManager, lookahead_steps: int = 0
    ) -> None:
        self.state_bytes = state_bytes_per_sequence(layout)
        if not self.state_bytes:
            raise ResourceError("a manager of recurrent states for a layout without any")
        self._slots, self._ring = slots, 2 + lookahead_steps
        num_seats = slots.capacity()
        self.slot_bytes = round_up(self.state_bytes, ALIGNMENT)
        self.num_slots = NUM_SENTINELS + num_seats * self._ring
        self._buffer: Buffer | None = buffers.gpu_sync(
            self.num_slots * self.slot_bytes, line=LineKind.KV, tag=self.name
        )
        self._seat_of: dict[str, int] = {}
        self._newest = np.zeros(num_seats, np.int64)  # place in the ring of what the last prepared step writes
        self._pending = np.zeros(num_seats, np.int64)  # steps prepared and not committed
        self._scheduled = np.zeros(num_seats, np.int64)  # tokens that prepared steps have taken in
        self._epoch = np.zeros(num_seats, np.int64)
        self._in_flight: dict[StepPlan, _Prepared] = {}

    def __repr__(self) -> str:
        return f"<StateManager {self.num_slots} slots of {self.slot_bytes:,} bytes, {len(self._seat_of)} in use>"

    # How much there is.

    def capacity(self) -> int:
        return self._slots.capacity()

    def available(self) -> int:
        return self.capacity() - len(self._seat_of)

    def lifetime_need(self, request: RequestView) -> int:  # noqa: ARG002 - one, however long it gets
        return 1

    def remaining(self, request: RequestView) -> int:
        return 0 if request.id in self._seat_of else 1

    def claims(self, limits: Limits) -> Sequence[Claim]:
        """What the layout does not price: it counts one state a sequence; the other slots of the rings are here."""
        num_extra = NUM_SENTINELS + limits.max_batch_size * (1 + limits.lookahead_steps)
        return (
            Claim(
                name="second states",
                owner=self.name,
                line=LineKind.TABLES,
                cost=Fixed(bytes=num_extra * self.slot_bytes),
                lifetime=Lifetime.RESIDENT,
                maker=Maker.DRIVER,
                source=Source.DERIVED,
                ref="tonnage.resources.states",
                reason="a step writes the new state of a sequence beside the old one",
            ),
        )

    def probe(self, stage: str, limits: Limits) -> Sequence[RequestView]:  # noqa: ARG002 - the buffer is all there is
        return ()

    # Where states are.

    @property
    def buffer(self) -> Buffer:
        """All slots: slot i at byte i * ``slot_bytes``."""
        if self._buffer is None:
            raise ResourceError("the recurrent states are closed")
        return self._buffer

    def slots(self, plan: StepPlan) -> StateSlots:
        """Of a prepared plan; rows of padding use ``SENTINEL`` for both."""
        if plan not in self._in_flight:
            raise ResourceError(f"step {plan.id} is not prepared")
        return self._in_flight[plan].slots

    # The hooks of a step.

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """A seat with a state of zeros. Raises ``ResourceError`` for a request that is to start in its middle."""
        buffer = self.buffer
        if request.id in self._seat_of:
            raise ResourceError(f"request {request.id!r} is admitted twice")
        if request.num_computed_tokens:
            raise ResourceError(
                f"request {request.id!r} is to start at token {request.num_computed_tokens}, and its state is not kept"
            )
        seat = self._slots.slot_of(request.id)
        stream = buffer.stream
        offset = int(self._slot(np.array([seat]), np.array([0]))[0]) * self.slot_bytes
        stream.driver.fill(buffer.address + offset, 0, self.slot_bytes, stream=stream.bare_handle)
        self._seat_of[request.id] = seat
        txn.undo(partial(self.free, request.id))
        return Grant(units=1)

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:  # noqa: ARG002 - a seat is all it takes
        return 0

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Fix where each row reads and writes. Raises ``ResourceError`` before it changes anything."""
        _ = self.buffer
        if plan.drafts is not None:
            raise ResourceError("drafts beside recurrent states: the state after each would have to be kept")
        rows = self._rows(plan.request_ids)
        self._check(plan, rows)
        place = self._newest[rows]
        slots = StateSlots(reads=self._slot(rows, place), writes=self._slot(rows, place + 1))
        prepared = _Prepared(rows=rows, epochs=self._epoch[rows], slots=slots)
        self._newest[rows] = (place + 1) % self._ring
        self._pending[rows] += 1
        self._scheduled[rows] = plan.ends
        self._in_flight[plan] = prepared
        txn.undo(partial(self._unprepare, plan, prepared))

    def committed(self) -> None:
        pass

    def loading(self) -> Collection[str]:
        return ()

    def wait_loaded(self) -> None:
        pass

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:  # noqa: ARG002 - tokens make no difference
        """The states that the step wrote count. Who was freed since it was prepared is skipped."""
        prepared = self._in_flight.pop(plan, None)
        if prepared is not None:
            self._pending[prepared.rows[self._still_here(prepared)]] -= 1

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:  # noqa: ARG002 - a state cannot be shared
        seat = self._seat_of.pop(request_id, None)
        if seat is None:
            return
        self._newest[seat] = self._pending[seat] = self._scheduled[seat] = 0
        self._epoch[seat] += 1
        if not self._seat_of:
            self._in_flight.clear()  # who is left in them is gone

    def reset(self) -> None:
        for request_id in list(self._seat_of):
            self.free(request_id)

    def close(self) -> None:
        """Raises ``BufferInUse`` while somebody looks at the buffer; closing again then gives it back."""
        self.reset()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def stats(self) -> Mapping[str, int]:
        used = len(self._seat_of)
        return {
            "capacity": self.capacity(),
            "available": self.capacity() - used,
            "used": used,
            "num_bytes": self.num_slots * self.slot_bytes,
        }

    # Bits.

    def _slot(self, rows: Ints, places: Ints) -> Ids:
        return (NUM_SENTINELS + rows * self._ring + places % self._ring).astype(np.int32)

    def _rows(self, request_ids: Sequence[str]) -> Ints:
        try:
            return np.fromiter(map(self._seat_of.__getitem__, request_ids), np.int64, len(request_ids))
        except KeyError as unknown:
            raise ResourceError(f"request {unknown.args[0]!r} has no state") from None

    def _check(self, plan: StepPlan, rows: Ints) -> None:
        if rows.size and np.bincount(rows).max() > 1:
            raise ResourceError(f"a request is in a step twice: {', '.join(plan.request_ids)}")
        wrong = (plan.starts != self._scheduled[rows]) | (plan.counts < 1)
        if wrong.any():
            at = int(wrong.argmax())
            raise ResourceError(
                f"request {plan.request_ids[at]!r}: tokens from {plan.starts[at]} on, where its state has taken in "
                f"{self._scheduled[rows[at]]}"
            )
        if (self._pending[rows] >= self._ring - 1).any():
            raise ResourceError(f"more than {self._ring - 1} steps are prepared and not committed")

    def _still_here(self, prepared: _Prepared) -> Flags:
        return self._epoch[prepared.rows] == prepared.epochs

    def _unprepare(self, plan: StepPlan, prepared: _Prepared) -> None:
        self._in_flight.pop(plan, None)
        here = self._still_here(prepared)
        rows = prepared.rows[here]
        self._newest[rows] = (self._newest[rows] - 1) % self._ring
        self._pending[rows] -= 1
        self._scheduled[rows] = plan.starts[here]
