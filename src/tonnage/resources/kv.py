"""KV blocks of sequences: a request is admitted when the pool has room for it, and pages arrive step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import blocks_per_sequence, metadata_bytes_per_block, table_bytes
from tonnage.resources.admission import Admission, ReserveAll
from tonnage.resources.base import Deferral, Grant, ProbeRequest, RequestView, StepOutcome
from tonnage.resources.block_pool import BlockPool, Ids
from tonnage.resources.sequences import Sequences, Watermarks
from tonnage.resources.slots import SlotManager
from tonnage.step import Flags, Ints, StepPlan, Txn, Veto
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, PerBlock, Source
from tonnage.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A step between ``prepare`` and ``update``: its rows, whose they were, and the blocks they held before."""

    rows: Ints
    epochs: Ints
    held: Ints


class KVManager:
    """Blocks of ``block_tokens`` tokens from ``pool``, admitted to as ``admission`` expects them to be needed.

    The pool splits into blocks that sequences hold, blocks they are still expected to take, and the rest, which is
    ``available``::

        |<- held ->|<- expected, not yet taken ->|<- available ->|

    Admission takes from the right part only and ``prepare`` moves blocks from the middle to the left. A policy that
    expects whole lives (``ReserveAll``) thereby never lets a running sequence run short. Under any other, ``short_of``
    tells before a step how many blocks are missing, and sequences are suspended (``free``) until none is.

    ``extra_tokens`` beyond its end are reserved for each sequence: drafts that may be rejected, look-ahead.
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
        admission: Admission | None = None,
        extra_tokens: int = 0,
    ) -> None:
        if slots is not None and slots.capacity() > max_batch_size:
            raise ResourceError(f"{slots.capacity()} slots for a page table of {max_batch_size} rows")
        self.pool = pool
        self.block_tokens, self.extra_tokens = block_tokens, extra_tokens
        self.admission = admission if admission is not None else ReserveAll()
        self.after = frozenset({slots.name}) if slots is not None else frozenset()
        self._slots = slots if slots is not None else SlotManager(max_batch_size)
        self._owns_slots = slots is None
        width = blocks_per_sequence(max_seq_len, block_tokens, extra_tokens=extra_tokens)
        # Entries without a block stay 0: a valid index, so that a padded read stays inside the pool.
        self._table = np.zeros((max_batch_size, width), np.int32)
        self._row_of: dict[str, int] = {}
        self._live = Sequences(max_batch_size)
        self._in_flight: dict[StepPlan, _Prepared] = {}
        self._high_water = 0
        self._closed = False

    # How much there is, and how much a request needs.

    def capacity(self) -> int:
        return self.pool.num_blocks

    def available(self) -> int:
        """Free blocks that no running sequence is expected to take; never negative."""
        return max(0, self.pool.num_free - self._num_expected())

    def kv_tokens(self, request: RequestView) -> int:
        """Tokens whose KV entries are ever written, ``extra_tokens`` included."""
        return int(self._written(request.num_prompt_tokens, request.max_total_tokens - request.num_prompt_tokens))

    def lifetime_need(self, request: RequestView) -> int:
        return ceil_div(self.kv_tokens(request), self.block_tokens)

    def remaining(self, request: RequestView) -> int:
        """Blocks between what it holds and what its whole life may need, under any policy."""
        row = self._row_of.get(request.id)
        return self.lifetime_need(request) if row is None else int(self._live.lifetime[row] - self._live.held[row])

    def claims(self, limits: Limits) -> Sequence[Claim]:
        """The page table and the pool's bookkeeping, by the formulas of ``layout``."""
        table = table_bytes(
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
            block_tokens=self.block_tokens,
            extra_tokens=self.extra_tokens,
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
        if request_id not in self._row_of:
            raise ResourceError(f"request {request_id!r} holds no KV blocks")
        return self._row_of[request_id]

    def row(self, request_id: str) -> Ids:
        """The sequence's row, a view; entries past its blocks are 0."""
        return self._table[self.row_index(request_id)]

    def block_ids(self, request_id: str) -> Ids:
        """Blocks of the sequence in token order, a copy."""
        row = self.row_index(request_id)
        return self._table[row, : self._live.held[row]].copy()

    def watermarks(self, request_id: str) -> Watermarks:
        return self._live.watermarks(self.row_index(request_id), block_tokens=self.block_tokens)

    # The hooks of a step.

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """Count on what the request is expected to need, or say how many blocks that is and take nothing."""
        lifetime = self._checked_lifetime(request)
        need, have = self._expected_need(request), self.available()
        if need > have:
            return Deferral(manager=self.name, need=need, have=have)
        if self._owns_slots and isinstance(no_slot := self._slots.admit(request, txn), Deferral):
            return no_slot
        row = self._row_of[request.id] = self._slots.slot_of(request.id)
        self._live.enter(row, request, lifetime=lifetime)
        txn.undo(partial(self.free, request.id))
        return Grant(units=need)

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:
        grown = self._blocks(ends) - self._live.held[self._rows(request_ids)]
        return max(0, int(np.maximum(grown, 0).sum()) - self.pool.num_free)

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Blocks for every token the step writes. Raises before it changes anything: ``Veto`` if they are not there."""
        self._check_open()
        rows, ends = self._rows(plan.request_ids), plan.ends
        num_blocks = self._blocks(ends)
        self._check_step(plan, rows, num_blocks)
        held = self._live.held[rows]
        grown = num_blocks - held
        num_new = int(grown.sum())
        if num_new > self.pool.num_free:
            raise Veto(self.name, f"the step needs {num_new} blocks and {self.pool.num_free} are free")
        if num_new:
            self._table[_entries(rows, held, grown)] = self.pool.allocate(num_new)
            self._live.held[rows] = held + grown
            self._high_water = max(self._high_water, self.pool.num_used)
        self._live.scheduled[rows] = ends
        prepared = self._in_flight[plan] = _Prepared(rows=rows, epochs=self._live.epoch[rows], held=held)
        txn.undo(partial(self._unprepare, plan, prepared))

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:  # noqa: ARG002 - no drafts to take back yet
        """The step's tokens are computed. Sequences freed since it was prepared are skipped."""
        prepared = self._in_flight.pop(plan, None)
        if prepared is not None:
            here = self._still_here(prepared)
            self._live.computed[prepared.rows[here]] = plan.ends[here]

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:  # noqa: ARG002 - nothing is cached yet
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        held = self._table[row, : self._live.held[row]]
        self.pool.free(held)
        held[:] = 0
        self._live.leave(row)
        if not self._row_of:
            # Steps still in flight have nothing left to say, and some never land.
            self._in_flight.clear()
        if self._owns_slots:
            self._slots.free(request_id)

    def reset(self) -> None:
        for request_id in list(self._row_of):
            self.free(request_id)

    def close(self) -> None:
        self.reset()
        self._closed = True

    def stats(self) -> Mapping[str, int]:
        """Counts of blocks, and of live sequences; ``reserved`` are the blocks they are still expected to take."""
        return {
            "capacity": self.pool.num_blocks,
            "available": self.available(),
            "allocated": self.pool.num_used,
            "reserved": self._num_expected(),
            "high_water": self._high_water,
            "sequences": len(self._row_of),
        }

    # Arithmetic, over all rows at once.

    def _written(self, prompt: Ints | int, new: Ints | int) -> Ints:
        """Tokens whose entries are written for ``new`` generated ones: the last is sampled and never fed back."""
        return prompt + np.maximum(np.subtract(new, 1), 0) + self.extra_tokens

    def _blocks(self, num_tokens: Ints) -> Ints:
        return (num_tokens + (self.block_tokens - 1)) // self.block_tokens

    def _expected_need(self, request: RequestView) -> int:
        """Blocks of the request's whole life as the policy expects it, from nothing held."""
        alone = Sequences(1)
        alone.enter(0, request, lifetime=self.lifetime_need(request))
        return int(self._expected(alone)[0])

    def _num_expected(self) -> int:
        """Blocks that the live sequences are expected to take beyond those they hold."""
        return int((self._expected(self._live) - self._live.held).sum())

    def _expected(self, sequences: Sequences) -> Ints:
        """Blocks that each sequence holds in the end, as the policy expects; 0 for a row without one.

        Never less than it holds: a policy expects at least one token more than there is.

        A token is drawn by each step that reaches past the prompt, so a sequence scheduled up to s has generated
        s + 1 - prompt by then; one that came back and computes its output again knew more than that.
        """
        drawn = np.maximum(sequences.returned, sequences.scheduled + 1 - sequences.prompt)
        new = self.admission.expected_new_tokens(np.minimum(drawn, sequences.most), sequences.most)
        return np.minimum(self._blocks(self._written(sequences.prompt, new)), sequences.lifetime)

    # Checks, and what undoes a step.

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceError("the KV manager is closed")

    def _checked_lifetime(self, request: RequestView) -> int:
        self._check_open()
        lifetime = self.lifetime_need(request)
        if request.id in self._row_of:
            raise ResourceError(f"request {request.id!r} is admitted twice")
        if lifetime > self._table.shape[1]:
            raise ResourceError(
                f"request {request.id!r} needs {lifetime} blocks; a sequence has {self._table.shape[1]}"
            )
        return lifetime

    def _rows(self, request_ids: Sequence[str]) -> Ints:
        try:
            return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64, len(request_ids))
        except KeyError as unknown:
            raise ResourceError(f"request {unknown.args[0]!r} holds no KV blocks") from None

    def _check_step(self, plan: StepPlan, rows: Ints, num_blocks: Ints) -> None:
        """Each row goes on where its sequence stands, stays inside its life, and is there once."""
        scheduled, lifetime = self._live.scheduled[rows], self._live.lifetime[rows]
        wrong = (plan.starts != scheduled) | (plan.counts < 1) | (num_blocks > lifetime)
        if wrong.any():
            at = int(wrong.argmax())
            raise ResourceError(
                f"request {plan.request_ids[at]!r}: tokens [{plan.starts[at]}, {plan.ends[at]}) after {scheduled[at]} "
                f"scheduled, in a life of {lifetime[at]} blocks"
            )
        if rows.size and np.bincount(rows).max() > 1:
            raise ResourceError(f"a request is in a step twice: {', '.join(plan.request_ids)}")

    def _still_here(self, prepared: _Prepared) -> Flags:
        return self._live.epoch[prepared.rows] == prepared.epochs

    def _unprepare(self, plan: StepPlan, prepared: _Prepared) -> None:
        """Blocks and watermarks as before; what was freed in the meantime has given its blocks back already."""
        self._in_flight.pop(plan, None)
        here = self._still_here(prepared)
        rows, held = prepared.rows[here], prepared.held[here]
        taken = _entries(rows, held, self._live.held[rows] - held)
        # One call, in the order they were taken, puts the free stack back as it was.
        self.pool.free(self._table[taken])
        self._table[taken] = 0
        starts = plan.starts[here]
        self._live.held[rows], self._live.scheduled[rows] = held, starts
        self._live.computed[rows] = np.minimum(self._live.computed[rows], starts)


def _entries(rows: Ints, first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Places in the page table, row after row: columns [first[i], first[i] + counts[i]) of rows[i]."""
    some = np.flatnonzero(counts)  # in a decode step few rows begin a block
    rows, first, counts = rows[some], first[some], counts[some]
    before = np.cumsum(counts) - counts
    columns = np.arange(counts.sum()) + np.repeat(first - before, counts)
    return np.repeat(rows, counts), columns


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
