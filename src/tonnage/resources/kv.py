"""KV blocks of sequences: a request is admitted once its whole life is reserved, and pages arrive step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import blocks_per_sequence, metadata_bytes_per_block, table_bytes
from tonnage.resources.base import Deferral, Grant, ProbeRequest, RequestView
from tonnage.resources.block_pool import BlockPool, Ids
from tonnage.resources.slots import SlotManager
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, PerBlock, Source
from tonnage.units import ceil_div, round_down


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """How far a sequence is, in tokens: ``scheduled`` >= ``computed`` >= ``committed``.

    scheduled  prepared steps write up to here; computed: finished steps wrote up to here;
    committed  whole blocks that nothing writes any more, the only ones a cache may share
    """

    scheduled: int
    computed: int
    committed: int


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One live sequence: its page-table row, blocks reserved for life, blocks it has, and how far it is."""

    row: int
    num_reserved: int
    num_blocks: int = 0
    scheduled: int
    computed: int


class KVManager:
    """Blocks of ``block_tokens`` tokens from ``pool``, reserved for a request's whole life when it is admitted.

    The pool splits into blocks that sequences have, blocks reserved for them, and the rest, which is ``available``::

        |<- allocated ->|<- reserved, not yet allocated ->|<- available ->|

    Admission takes from the right part only and ``prepare`` moves blocks from the middle to the left, so a running
    request never fails to get its next block.

    ``slots`` gives each sequence its row of the page table; without it the manager keeps slots of its own.
    """

    name = "kv"
    unit = "block"
    may_refuse = True
    rerunnable = True

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_seq_len: int,
        max_batch_size: int,
        slots: SlotManager | None = None,
    ) -> None:
        if slots is not None and slots.capacity() > max_batch_size:
            raise ResourceError(f"{slots.capacity()} slots for a page table of {max_batch_size} rows")
        self.pool = pool
        self.block_tokens = block_tokens
        self.after = frozenset({slots.name}) if slots is not None else frozenset()
        self._slots = slots if slots is not None else SlotManager(max_batch_size)
        self._owns_slots = slots is None
        # Entries without a block stay 0: a valid index, so that a padded read stays inside the pool.
        self._table = np.zeros((max_batch_size, blocks_per_sequence(max_seq_len, block_tokens)), np.int32)
        self._live: dict[str, _Sequence] = {}
        self._num_pending = 0
        self._high_water = 0
        self._closed = False

    # How much there is, and how much a request needs.

    def capacity(self) -> int:
        return self.pool.num_blocks

    def available(self) -> int:
        """Blocks that are neither allocated nor reserved; never negative."""
        return self.pool.num_free - self._num_pending

    def kv_tokens(self, request: RequestView) -> int:
        """Tokens whose KV entries are ever written: all but the last, which is sampled and never fed back."""
        return max(request.num_prompt_tokens, request.max_total_tokens - 1)

    def lifetime_need(self, request: RequestView) -> int:
        return ceil_div(self.kv_tokens(request), self.block_tokens)

    def remaining(self, request: RequestView) -> int:
        sequence = self._live.get(request.id)
        return self.lifetime_need(request) if sequence is None else sequence.num_reserved - sequence.num_blocks

    def claims(self, limits: Limits) -> Sequence[Claim]:
        """The page table and the pool's bookkeeping, by the formulas of ``layout``."""
        table = table_bytes(
            max_batch_size=limits.max_batch_size, max_seq_len=limits.max_seq_len, block_tokens=self.block_tokens
        )
        return (
            _claim("page table", Fixed(bytes=table), "which block holds which tokens of each running sequence"),
            _claim(
                "block metadata",
                PerBlock(bytes_per_block=metadata_bytes_per_block()),
                "free stack and reference count of each block",
            ),
        )

    def probe(self, stage: str, limits: Limits) -> Sequence[RequestView]:
        """Stand-ins for one full step of prefill or of decode; admit and free them like any other request."""
        if stage == "prefill":
            return _prefill_probe(limits)
        if stage == "decode":
            return tuple(
                ProbeRequest(id=f"probe-{i}", num_prompt_tokens=1, num_computed_tokens=1, max_total_tokens=3)
                for i in range(limits.max_batch_size)
            )
        return ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the page table and the pool's bookkeeping: what ``claims`` said."""
        return self._table.nbytes + self.pool.num_bytes

    # The page table.

    @property
    def table(self) -> Ids:
        """int32 ``[max_batch_size, blocks_per_sequence]``, edited in place by ``prepare``: copy it before an
        asynchronous transfer."""
        return self._table

    def row_index(self, request_id: str) -> int:
        return self._sequence(request_id).row

    def row(self, request_id: str) -> Ids:
        """The sequence's row, a view; entries past its blocks are 0."""
        return self._table[self._sequence(request_id).row]

    def block_ids(self, request_id: str) -> Ids:
        """Blocks of the sequence in token order, a copy."""
        sequence = self._sequence(request_id)
        return self._table[sequence.row, : sequence.num_blocks].copy()

    def watermarks(self, request_id: str) -> Watermarks:
        sequence = self._sequence(request_id)
        committed = round_down(sequence.computed, self.block_tokens)
        return Watermarks(scheduled=sequence.scheduled, computed=sequence.computed, committed=committed)

    # The hooks of a step.

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """Reserve the whole life, or say how many blocks are missing and take nothing."""
        need = self._checked_need(request)
        if need > self.available():
            return Deferral(manager=self.name, need=need, have=self.available())
        if self._owns_slots and isinstance(no_slot := self._slots.admit(request, txn), Deferral):
            return no_slot
        start = request.num_computed_tokens
        row = self._slots.slot_of(request.id)
        self._live[request.id] = _Sequence(row=row, num_reserved=need, scheduled=start, computed=start)
        self._num_pending += need
        txn.undo(lambda: self.free(request.id))
        return Grant(units=need)

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Blocks for every token the step writes, from the reservations. Raises before it changes anything."""
        self._check_open()
        rows = [(item, self._checked_item(item)) for item in plan.items]
        blocks = [max(sequence.num_blocks, self._blocks(item.end)) for item, sequence in rows]
        ids = self.pool.allocate(sum(blocks) - sum(sequence.num_blocks for _, sequence in rows))
        before = [(item.request_id, sequence, sequence.num_blocks, sequence.scheduled) for item, sequence in rows]
        txn.undo(lambda: self._unprepare(before))
        self._num_pending -= ids.size
        taken = 0
        for (item, sequence), num_blocks in zip(rows, blocks, strict=True):
            first, taken = taken, taken + num_blocks - sequence.num_blocks
            self._table[sequence.row, sequence.num_blocks : num_blocks] = ids[first:taken]
            sequence.num_blocks, sequence.scheduled = num_blocks, item.end
        self._high_water = max(self._high_water, self.pool.num_used)

    def update(self, plan: StepPlan, outcome: object) -> None:  # noqa: ARG002 - no drafts to take back yet
        """The step's tokens are computed. Sequences freed since it was launched are skipped."""
        for item in plan.items:
            sequence = self._live.get(item.request_id)
            if sequence is not None and item.end <= sequence.scheduled:
                sequence.computed = max(sequence.computed, item.end)

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:  # noqa: ARG002 - nothing is cached yet
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return
        row = self._table[sequence.row]
        self.pool.free(row[: sequence.num_blocks])
        row[: sequence.num_blocks] = 0
        self._num_pending -= sequence.num_reserved - sequence.num_blocks
        if self._owns_slots:
            self._slots.free(request_id)

    def reset(self) -> None:
        for request_id in list(self._live):
            self.free(request_id)

    def close(self) -> None:
        self.reset()
        self._closed = True

    def stats(self) -> Mapping[str, int]:
        """Counts of blocks, and of live sequences."""
        return {
            "capacity": self.pool.num_blocks,
            "available": self.available(),
            "allocated": self.pool.num_used,
            "reserved": self._num_pending,
            "high_water": self._high_water,
            "sequences": len(self._live),
        }

    def _blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceError("the KV manager is closed")

    def _sequence(self, request_id: str) -> _Sequence:
        if request_id not in self._live:
            raise ResourceError(f"request {request_id!r} holds no KV blocks")
        return self._live[request_id]

    def _checked_need(self, request: RequestView) -> int:
        self._check_open()
        need = self.lifetime_need(request)
        if request.id in self._live:
            raise ResourceError(f"request {request.id!r} is admitted twice")
        if need > self._table.shape[1]:
            raise ResourceError(f"request {request.id!r} needs {need} blocks; a sequence has {self._table.shape[1]}")
        return need

    def _checked_item(self, item: StepItem) -> _Sequence:
        """The item's sequence; its tokens follow those scheduled before and stay inside its reservation."""
        sequence = self._sequence(item.request_id)
        if item.start != sequence.scheduled or item.count < 1:
            raise ResourceError(
                f"request {item.request_id!r}: tokens [{item.start}, {item.end}) after {sequence.scheduled} scheduled"
            )
        if self._blocks(item.end) > sequence.num_reserved:
            raise ResourceError(
                f"request {item.request_id!r} writes token {item.end} past its {sequence.num_reserved} blocks"
            )
        return sequence

    def _unprepare(self, before: Sequence[tuple[str, _Sequence, int, int]]) -> None:
        """Blocks and watermarks as ``before``; what was freed in the meantime has given its blocks back already."""
        taken = []
        for request_id, sequence, num_blocks, scheduled in before:
            if self._live.get(request_id) is not sequence:
                continue
            grown = self._table[sequence.row, num_blocks : sequence.num_blocks]
            taken.append(grown.copy())
            grown[:] = 0
            sequence.num_blocks, sequence.scheduled = num_blocks, scheduled
        # One call, in the order they were taken, puts the free stack back as it was.
        ids = np.concatenate([np.zeros(0, np.int32), *taken])
        self._num_pending += ids.size
        self.pool.free(ids)


def _claim(name: str, cost: Fixed | PerBlock, reason: str) -> Claim:
    return Claim(
        name=name,
        owner=KVManager.name,
        line=LineKind.TABLES,
        cost=cost,
        lifetime=Lifetime.RESIDENT,
        maker=Maker.LIBRARY,
        source=Source.DERIVED,
        reason=reason,
        ref="tonnage.layout",
    )


def _prefill_probe(limits: Limits) -> tuple[ProbeRequest, ...]:
    """Prompts that fill ``max_num_tokens``, one token short of the longest so that each may sample; the last is
    shorter. No more of them than sequences run at once."""
    longest = max(1, min(limits.max_num_tokens, limits.max_seq_len - 1))
    total = min(limits.max_num_tokens, limits.max_batch_size * longest)
    lengths = [min(longest, total - start) for start in range(0, total, longest)]
    return tuple(
        ProbeRequest(id=f"probe-{i}", num_prompt_tokens=length, max_total_tokens=length + 1)
        for i, length in enumerate(lengths)
    )
