"""Tables of which tokens a sequence has, for repetition, presence and frequency penalties: a row a sequence slot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tonnage.buffers import Buffer, BufferManager
from tonnage.buffers.torch_copies import upload_one
from tonnage.buffers.torch_view import as_tensor, typed_view
from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import DTYPE_BYTES, PENALTY_TABLES, penalty_table_bytes
from tonnage.resources.base import Deferral, Grant, RequestView, StepOutcome
from tonnage.resources.slots import SlotManager
from tonnage.step import Ints, StepPlan, Txn
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source


class PenaltyTensors(NamedTuple):
    """``counts`` int32 [slots, V]: how often each token is in the output. ``seen`` bool: whether it is in the prompt.

    Rows of slots whose sequences have no penalties hold what their last owner left.
    """

    counts: torch.Tensor
    seen: torch.Tensor


class PenaltyTables:
    """One row for each of ``num_slots`` slots, for requests with penalties; others cost nothing.

    The bytes are claimed from the start and allocated when the first such request is admitted: a table for every slot
    and the whole vocabulary is too much to hold for a feature that may never be used, and too much to be found
    missing hours later. They stay until ``close``. Not ``enabled``: no capacity, so such requests are refused on
    arrival.
    """

    name = "penalties"
    unit = "row"
    after = frozenset({SlotManager.name})
    may_refuse = True
    rerunnable = True

    def __init__(
        self, slots: SlotManager, *, vocab_size: int, num_slots: int, buffers: BufferManager, enabled: bool = True
    ) -> None:
        if slots.capacity() > num_slots:
            raise ResourceError(f"{slots.capacity()} slots for penalty tables of {num_slots} rows")
        self._slots, self._buffers = slots, buffers
        self._vocab_size, self._num_slots = vocab_size, num_slots
        self._capacity = num_slots if enabled else 0
        self._rows: dict[str, int] = {}  # of live requests with penalties
        self._buffer: Buffer | None = None
        self._tensors: PenaltyTensors | None = None
        self._closed = False

    def tables(self) -> PenaltyTensors | None:
        """None until the first request with penalties. Not to be kept: ``close`` needs them gone."""
        return self._tensors

    def capacity(self) -> int:
        return self._capacity

    def available(self) -> int:
        return self._capacity - len(self._rows)

    def lifetime_need(self, request: RequestView) -> int:
        return int(request.params.has_penalties)

    def remaining(self, request: RequestView) -> int:
        return 0 if request.id in self._rows else self.lifetime_need(request)

    def claims(self, limits: Limits) -> Sequence[Claim]:
        num_bytes = penalty_table_bytes(max_batch_size=limits.max_batch_size, vocab_size=self._vocab_size)
        return (
            Claim(
                name=PENALTY_TABLES,
                owner=self.name,
                line=LineKind.TABLES,
                cost=Fixed(bytes=num_bytes),
                lifetime=Lifetime.LAZY,
                maker=Maker.DRIVER,
                source=Source.DERIVED,
                ref="tonnage.layout",
                reason="token counts of each sequence, allocated by the first request with penalties",
                can_disable=True,
            ),
        )

    def probe(self, stage: str, limits: Limits) -> Sequence[RequestView]:  # noqa: ARG002 - the claim says it all
        return ()

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """A row that holds what the request has so far. Raises ``BufferOOM``, with nothing taken, if the tables are
        needed for the first time and there is no memory."""
        self._check_open()
        if request.id in self._rows:
            raise ResourceError(f"request {request.id!r} is admitted twice")
        if not request.params.has_penalties:
            return Grant()
        if self.available() < 1:
            return Deferral(manager=self.name, need=1, have=self.available())
        row = self._slots.slot_of(request.id)
        self._fill(self._allocated(), row, request)
        self._rows[request.id] = row
        txn.undo(lambda: self.free(request.id))
        return Grant(units=1)

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:  # noqa: ARG002 - a row is for life
        return 0

    def held_back(self) -> str:
        return ""

    def prepare(self, plan: StepPlan, txn: Txn) -> None:  # noqa: ARG002 - nothing changes before tokens are drawn
        self._check_open()

    def committed(self) -> None:
        pass

    def loading(self) -> Collection[str]:
        return ()

    def wait_loaded(self) -> None:
        pass

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:
        """Nothing: a step counts what it draws itself, where it draws it (``engine.sampling.count``)."""

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:  # noqa: ARG002 - nothing is cached
        self._rows.pop(request_id, None)

    def reset(self) -> None:
        """Every row free; the tables stay."""
        self._rows.clear()

    def give_back(self) -> None:
        """The tables go until a request needs them again. Raises ``ResourceError`` while one does, ``BufferInUse``
        while somebody keeps ``tables()``."""
        if self._rows:
            raise ResourceError(f"{len(self._rows)} requests have rows in the penalty tables")
        self._tensors = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def close(self) -> None:
        """Raises ``BufferInUse`` while somebody keeps ``tables()``; closing again then gives the memory back."""
        self.reset()
        self._closed, self._tensors = True, None
        if self._buffer is not None:
            self._buffer.close()

    def stats(self) -> Mapping[str, int]:
        """Counts of rows, and the bytes allocated for all of them."""
        num_bytes = 0 if self._buffer is None else self._buffer.size_bytes
        return {
            "capacity": self._capacity,
            "available": self.available(),
            "used": len(self._rows),
            "num_bytes": num_bytes,
        }

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceError("the penalty tables are closed")

    def _allocated(self) -> PenaltyTensors:
        if self._tensors is None:
            num_bytes = penalty_table_bytes(max_batch_size=self._num_slots, vocab_size=self._vocab_size)
            self._buffer = self._buffers.gpu_sync(num_bytes, line=LineKind.TABLES, tag=self.name)
            self._tensors = self._views(self._buffer)
        return self._tensors

    # Tensors made in inference mode could not be changed outside of it.
    @torch.inference_mode(False)
    def _views(self, buffer: Buffer) -> PenaltyTensors:
        flat, shape = as_tensor(buffer), (self._num_slots, self._vocab_size)
        counts = typed_view(flat, 0, shape, "int32")
        seen = typed_view(flat, counts.numel() * DTYPE_BYTES["int32"], shape, "bool")
        return PenaltyTensors(counts=counts, seen=seen)

    def _fill(self, tables: PenaltyTensors, row: int, request: RequestView) -> None:
        ids = np.asarray(request.token_ids, np.int64)
        counts, seen = tables.counts[row].zero_(), tables.seen[row].zero_()
        parts = np.split(ids, [request.num_prompt_tokens])
        prompt, output = (upload_one(self._known(part), counts.device) for part in parts)
        seen[prompt] = True
        counts.index_add_(0, output, counts.new_ones(len(output)))

    def _known(self, ids: Ints) -> Ints:
        """Ids of the vocabulary: placeholders of images and the like have no logit to change."""
        return ids[(ids >= 0) & (ids < self._vocab_size)]
