"""Recurrent states (Mamba, linear attention, short convolutions): of one size whatever a sequence's length, in slots.

A layer with a state reads what it kept of all tokens so far and leaves it changed, so a step that fails half way would
have spoilt its own input. Here it cannot: a row reads the *front* slot of its sequence and writes the *back* slot, and
once the step's transaction is committed the two change places. A step that is rolled back, or fails in its launch, is
run again from the same front.

Two slots are needed and two are enough. A step may hold every sequence, so there are as many backs as fronts. Steps are
launched in order on one stream: one that is prepared while the step before it still computes reads what that one
writes, and writes what that one reads, after it. However many steps are under way, the two take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from tonnage.buffers import Buffer, BufferManager
from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, state_bytes_per_sequence
from tonnage.resources.base import Deferral, Grant, ProbeRequest, RequestView, StepOutcome
from tonnage.resources.mover import Ids
from tonnage.resources.slots import SlotManager
from tonnage.step import Flags, Ints, StepPlan, Txn
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source
from tonnage.units import round_up

if TYPE_CHECKING:
    import torch

#: Bytes: every slot, and every group of layers in it, begins on such a border, which suits any vector load.
ALIGNMENT = 256
#: The slot that rows of padding read and write; it is nobody's.
SENTINEL = 0
NUM_SENTINELS = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateSlots:
    """Where a step's rows find their states and where they leave them: int32 slots, one entry a row.

    A row writes the whole state: what its slot held before means nothing. No row writes what another reads, the
    sentinel apart.
    """

    reads: Ids
    writes: Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """A step between ``prepare`` and the end of its transaction: its rows, whose they were, where they end."""

    txn: Txn
    slots: StateSlots
    seats: Ints
    epochs: Ints
    ends: Ints


class StateManager:
    """States of the layout's STATE groups for the sequences of ``slots``, group after group in one slot.

    ::

        slots:  | sentinel | seat 0: two that take turns | seat 1: two | ...

    A new sequence starts from zeros, whatever its seat held: they are written on assignment, in stream order, so
    ``buffers`` must be those of the stream on which steps are launched. A state is no prefix: it cannot be cut, and
    none is kept of those who leave. So a sequence that comes back is computed from its first token, and what a prefix
    cache grants is refused (``admit``, ``prepare``).

    The memory is taken here, for good: raises ``BufferOOM``, and ``ResourceError`` for a layout without states.
    """

    name = "states"
    unit = "state"
    after: frozenset[str] = frozenset({SlotManager.name})
    may_refuse = True
    rerunnable = True

    def __init__(self, slots: SlotManager, layout: KVLayout, *, buffers: BufferManager) -> None:
        self.state_bytes = state_bytes_per_sequence(layout)
        if not self.state_bytes:
            raise ResourceError("a manager of recurrent states for a layout without any")
        groups = [group for group in layout.groups if group.kind is KVGroupKind.STATE]
        *offsets, self.slot_bytes = accumulate((round_up(g.block_bytes, ALIGNMENT) for g in groups), initial=0)
        self._groups: Mapping[str, tuple[KVGroup, int]] = {
            group.name: (group, offset) for group, offset in zip(groups, offsets, strict=True)
        }
        self._slots, num_seats = slots, slots.capacity()
        self.num_slots = num_state_slots(num_seats)
        self._seat_of: dict[str, int] = {}
        self._front = np.zeros(num_seats, np.int64)  # 0 or 1: which slot of a seat final steps have left their state in
        self._taken_in = np.zeros(num_seats, np.int64)  # tokens that this state has seen
        self._is_open = np.zeros(num_seats, np.bool_)  # in a step whose transaction is
        self._epoch = np.zeros(num_seats, np.int64)  # how many have left the seat: tells its owner from those before
        self._open: dict[StepPlan, _Step] = {}
        self._num_zeroed = 0
        self._buffer: Buffer | None = buffers.gpu_sync(
            self.num_slots * self.slot_bytes, line=LineKind.KV, tag=self.name
        )
        try:
            self._zero(SENTINEL)
        except BaseException:
            self._buffer.close()
            raise

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
        """What the layout does not price: it counts one state a sequence and a spare one, without alignment."""
        num_bytes = num_state_slots(limits.max_batch_size) * self.slot_bytes
        return (
            Claim(
                name="second states",
                owner=self.name,
                line=LineKind.TABLES,
                cost=Fixed(bytes=num_bytes - (limits.max_batch_size + NUM_SENTINELS) * self.state_bytes),
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

    def tensor(self, group: str, part: str) -> torch.Tensor:
        """``[num_slots, *part.shape]``, one array of a group by the layout's names, of all slots: the memory itself, so
        ``close`` needs it gone. Raises ``ResourceError`` for an unknown name."""
        import torch

        from tonnage.buffers.torch_view import as_tensor

        found, offset = self._groups.get(group, (None, 0))
        array = next((one for one in found.parts if one.name == part), None) if found is not None else None
        if array is None:
            raise ResourceError(f"no group {group!r} keeps {part!r} as a recurrent state")
        first = offset + array.offset_bytes
        with torch.inference_mode(False):  # else nobody could change it outside of one
            slots = as_tensor(self.buffer).view(self.num_slots, self.slot_bytes)
            typed = slots[:, first : first + array.num_bytes].view(getattr(torch, array.dtype))
            return typed.unflatten(1, array.shape)

    def slots(self, plan: StepPlan, num_rows: int | None = None) -> StateSlots:
        """Of a step that is prepared and whose transaction is open; with ``num_rows``, padded to so many by rows of
        the sentinel. Raises ``ResourceError`` for any other step, and for fewer rows than it has."""
        step = self._open.get(plan)
        if step is None:
            raise ResourceError(f"step {plan.id} is not prepared")
        num_pads = 0 if num_rows is None else num_rows - len(plan)
        if num_pads < 0:
            raise ResourceError(f"step {plan.id} has {len(plan)} rows, more than {num_rows}")
        if not num_pads:
            return step.slots
        pads = np.full(num_pads, SENTINEL, np.int32)
        return StateSlots(reads=np.append(step.slots.reads, pads), writes=np.append(step.slots.writes, pads))

    def front(self, request_id: str) -> int:
        """The slot with the state that final steps have left of a sequence, once the stream has come so far."""
        self._settle()
        seats = self._seats((request_id,))
        return int(self._slot(seats, self._front[seats])[0])

    # The hooks of a step.

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """A seat with a state of zeros. Raises ``ResourceError``, with nothing taken, for a request that is to start in
        its middle; a stand-in of a probe may, its past is made up anyway."""
        _ = self.buffer
        if request.id in self._seat_of:
            raise ResourceError(f"request {request.id!r} is admitted twice")
        taken_in = request.num_computed_tokens
        if taken_in and not isinstance(request, ProbeRequest):
            raise ResourceError(f"request {request.id!r} is to start at token {taken_in}, and its state is not kept")
        seat = self._slots.slot_of(request.id)
        # The front stays where it is: an open step of whoever sat here may still be going to write the other slot.
        self._zero(int(self._slot(seat, self._front[seat])))
        self._seat_of[request.id] = seat
        self._taken_in[seat] = taken_in
        txn.undo(partial(self._unadmit, request.id, int(self._epoch[seat])))
        return Grant(units=1)

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:  # noqa: ARG002 - a seat is all it takes
        return 0

    def held_back(self) -> str:
        return ""

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Fix where each row reads and writes. Raises ``ResourceError`` before it changes anything: for a row that does
        not go on where its state stands, and for drafts, since the state after each of them would have to be kept
        until it is known how many count."""
        _ = self.buffer
        self._settle()
        if plan.drafts is not None and plan.drafts.any():
            raise ResourceError(f"step {plan.id} has drafts, and states of drafts are not kept: it must run without")
        seats = self._seats(plan.request_ids)
        self._check(plan, seats)
        front = self._front[seats]
        slots = StateSlots(reads=self._slot(seats, front), writes=self._slot(seats, 1 - front))
        self._open[plan] = _Step(txn=txn, slots=slots, seats=seats, epochs=self._epoch[seats], ends=plan.ends)
        self._is_open[seats] = True
        txn.undo(partial(self._unprepare, plan))

    def committed(self) -> None:
        self._settle()

    def loading(self) -> Collection[str]:
        return ()

    def wait_loaded(self) -> None:
        pass

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:  # noqa: ARG002 - tokens make no difference
        """A step that has landed is final, if it was not already."""
        self._settle()
        if plan in self._open:
            self._flip(plan)

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:  # noqa: ARG002 - a state cannot be shared
        """Steps under way may still write the seat's slots: the zeros of the next owner come after them."""
        seat = self._seat_of.pop(request_id, None)
        if seat is not None:
            self._is_open[seat] = False
            self._epoch[seat] += 1

    def reset(self) -> None:
        for request_id in list(self._seat_of):
            self.free(request_id)
        self._open.clear()

    def close(self) -> None:
        """Raises ``BufferInUse`` while somebody keeps a ``tensor``; closing again then gives the memory back."""
        self.reset()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def stats(self) -> Mapping[str, int]:
        """Counts of seats, of slots zeroed so far, of steps whose transaction is open; ``num_bytes`` of all slots."""
        self._settle()
        used = len(self._seat_of)
        return {
            "capacity": self.capacity(),
            "available": self.capacity() - used,
            "used": used,
            "zeroed": self._num_zeroed,
            "open_steps": len(self._open),
            "num_bytes": self.num_slots * self.slot_bytes,
        }

    # What becomes of a transaction.

    def _settle(self) -> None:
        """Steps whose transaction is closed are final: a rollback would have taken them out of here."""
        for plan in [plan for plan, step in self._open.items() if not step.txn.is_open]:
            self._flip(plan)

    def _flip(self, plan: StepPlan) -> None:
        step, here = self._end(plan)
        seats = step.seats[here]
        self._front[seats] ^= 1
        self._taken_in[seats] = step.ends[here]

    def _unprepare(self, plan: StepPlan) -> None:
        if plan in self._open:
            self._end(plan)

    def _end(self, plan: StepPlan) -> tuple[_Step, Flags]:
        """Forget the step; which of its rows' sequences are still here."""
        step = self._open.pop(plan)
        here = self._epoch[step.seats] == step.epochs
        self._is_open[step.seats[here]] = False
        return step, here

    def _unadmit(self, request_id: str, epoch: int) -> None:
        """Nothing if the sequence has left since, though one of its name may be here again."""
        seat = self._seat_of.get(request_id)
        if seat is not None and self._epoch[seat] == epoch:
            self.free(request_id)

    # Bits.

    def _slot(self, seats: Ints | int, which: Ints) -> Ids:
        return np.asarray(NUM_SENTINELS + 2 * seats + which, np.int32)

    def _zero(self, slot: int) -> None:
        buffer = self.buffer
        buffer.require_usable()
        stream, address = buffer.stream, buffer.address + slot * self.slot_bytes
        stream.driver.fill(address, 0, self.slot_bytes, stream=stream.bare_handle)
        self._num_zeroed += 1

    def _seats(self, request_ids: Sequence[str]) -> Ints:
        try:
            return np.fromiter(map(self._seat_of.__getitem__, request_ids), np.int64, len(request_ids))
        except KeyError as unknown:
            raise ResourceError(f"request {unknown.args[0]!r} has no state") from None

    def _check(self, plan: StepPlan, seats: Ints) -> None:
        if seats.size and np.bincount(seats).max() > 1:
            raise ResourceError(f"a request is in a step twice: {', '.join(plan.request_ids)}")
        if self._is_open[seats].any():
            at = int(self._is_open[seats].argmax())
            raise ResourceError(f"request {plan.request_ids[at]!r} is in another step whose transaction is open")
        wrong = (plan.starts != self._taken_in[seats]) | (plan.counts < 1)
        if wrong.any():
            at = int(wrong.argmax())
            raise ResourceError(
                f"request {plan.request_ids[at]!r}: {plan.counts[at]} tokens from {plan.starts[at]} on, and its state "
                f"has taken in {self._taken_in[seats[at]]}"
            )


def num_state_slots(num_sequences: int) -> int:
    """Two for each sequence, and the sentinel."""
    return NUM_SENTINELS + 2 * num_sequences
