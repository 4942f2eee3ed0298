"""KV blocks of sequences: what a prefix finds is claimed, the rest is counted on, and pages arrive step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np

from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.layout import blocks_per_sequence
from tonnage.resources.admission import Admission, ReserveAll
from tonnage.resources.base import Deferral, Grant, RequestView, StepOutcome
from tonnage.resources.cache import BlockCache
from tonnage.resources.drafts import rejected_drafts
from tonnage.resources.holdings import Holdings
from tonnage.resources.loads import Loads
from tonnage.resources.match import Match
from tonnage.resources.mover import Ids
from tonnage.resources.needs import Needs, token_groups, why_no_reuse
from tonnage.resources.pins import Guard, PinHandle
from tonnage.resources.prefixes import Prefixes, Text
from tonnage.resources.prices import kv_claims, kv_probe
from tonnage.resources.sequences import Prepared, Watermarks, rows_of
from tonnage.resources.slots import SlotManager
from tonnage.step import Ints, StepPlan, Txn, Veto
from tonnage.terms import Claim


class KVManager:
    """Blocks of ``block_tokens`` tokens out of ``cache``, admitted to as ``admission`` expects them to be needed.

    The pool splits into blocks that somebody holds, blocks that sequences are still expected to take, and the rest,
    which is ``available`` (cached blocks, which make way, are in the two right parts)::

        |<- held ->|<- expected, not yet taken ->|<- available ->|

    Admission claims what is cached of a text and takes from the right part only what nobody holds yet; ``prepare``
    moves blocks from the middle to the left. A policy that expects whole lives (``ReserveAll``) thereby never lets a
    running sequence run short. Under any other, ``short_of`` tells before a step how many blocks are missing, and
    sequences are suspended (``free``) until none is.

    ``extra_tokens`` beyond its end are reserved for each sequence: drafts that may be rejected, look-ahead.
    ``slots`` gives each sequence its row of the page table; without it the manager keeps slots of its own.
    ``max_pending_tokens``: the most tokens of one sequence that are scheduled and not computed, which layers with a
    window keep beside it; None: as many as the text has. ``name``: several may stand behind one dispatcher.
    """

    unit = "block"
    may_refuse = True
    rerunnable = True

    def __init__(
        self,
        cache: BlockCache,
        *,
        block_tokens: int,
        max_seq_len: int,
        max_batch_size: int,
        slots: SlotManager | None = None,
        admission: Admission | None = None,
        extra_tokens: int = 0,
        max_pending_tokens: int | None = None,
        name: str = "kv",
    ) -> None:
        if slots is not None and slots.capacity() > max_batch_size:
            raise ResourceError(f"{slots.capacity()} slots for a page table of {max_batch_size} rows")
        self.cache, self.name = cache, name
        self.block_tokens, self.extra_tokens = block_tokens, extra_tokens
        self.admission = admission if admission is not None else ReserveAll()
        self.after = frozenset({slots.name}) if slots is not None else frozenset()
        self._slots = slots if slots is not None else SlotManager(max_batch_size)
        self._owns_slots = slots is None
        self._groups = token_groups(cache.groups, block_tokens)
        #: Why nothing is shared between sequences; None: it is.
        self.no_reuse = why_no_reuse(cache.groups, block_tokens) if cache.reuse else "it is switched off"
        self._prefixes = Prefixes(cache, block_tokens=block_tokens, is_on=self.no_reuse is None)
        self._needs = Needs(
            [cache.groups[group] for group in self._groups],
            block_tokens=block_tokens,
            extra_tokens=extra_tokens,
            max_pending_tokens=max_pending_tokens,
            admission=self.admission,
        )
        width = blocks_per_sequence(max_seq_len, block_tokens, extra_tokens=extra_tokens)
        self._holdings = Holdings(
            cache, self._prefixes, self._groups, block_tokens=block_tokens, num_rows=max_batch_size, width=width
        )
        self._tables, self._live = self._holdings.tables, self._holdings.live
        self._row_of: dict[str, int] = {}
        self._loads = Loads(cache)
        self._in_flight: dict[StepPlan, Prepared] = {}
        self._closed = False

    def capacity(self) -> int:
        return self.cache.capacity

    def available(self) -> int:
        """Blocks that nobody holds and no running sequence is expected to take; never negative."""
        return max(0, self.cache.num_available - self._num_expected())

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; a shared one counts once."""
        return self.cache.num_live

    def kv_tokens(self, request: RequestView) -> int:
        """Tokens whose KV entries are ever written, ``extra_tokens`` included."""
        return self._needs.tokens(request)

    def lifetime_need(self, request: RequestView) -> int:
        """The most it holds at once, whatever is cached. Raises ``ResourceError`` for beams."""
        if (num_beams := getattr(request, "num_beams", 1)) > 1:
            raise ResourceError(
                f"request {request.id!r} asks for {num_beams} beams; beam search is not supported: a sequence has one"
            )
        return self._needs.whole_life(request)

    def remaining(self, request: RequestView) -> int:
        """Blocks between what it holds and what its whole life may need, under any policy."""
        row = self._row_of.get(request.id)
        if row is None:
            return self.lifetime_need(request)
        return int(self._needs.to_take(self._live, self._live.lifetime)[row])

    def claims(self, limits: Limits) -> Sequence[Claim]:
        """The page tables and the cache's bookkeeping, by the formulas of ``layout``."""
        return kv_claims(
            limits,
            owner=self.name,
            num_groups=len(self._groups),
            block_tokens=self.block_tokens,
            extra_tokens=self.extra_tokens,
        )

    def probe(self, stage: str, limits: Limits) -> Sequence[RequestView]:
        """Stand-ins for one full step of prefill or of decode; admit and free them like any other request."""
        return kv_probe(stage, limits)

    @property
    def num_bytes(self) -> int:
        """Bytes of the page tables and the cache's bookkeeping: what ``claims`` said."""
        return self._tables.num_bytes + self.cache.num_bytes

    @property
    def tables(self) -> Mapping[int, Ids]:
        """By group: int32 ``[max_batch_size, blocks_per_sequence]`` slots, edited in place by the hooks: copy it
        before an asynchronous transfer."""
        self._tables.refresh(int(self._live.held.max()))
        return {group: self._tables.slots[i] for i, group in enumerate(self._groups)}

    @property
    def table(self) -> Ids:
        """That of the first group."""
        return self.tables[self._groups[0]]

    def row_index(self, request_id: str) -> int:
        """Its row in every table; entries without a block are 0 there."""
        if request_id not in self._row_of:
            raise ResourceError(f"request {request_id!r} holds no KV blocks")
        return self._row_of[request_id]

    def block_ids(self, request_id: str, *, group: int = 0) -> Ids:
        """Ids of the blocks of the sequence in token order, those out of the window left out; a copy."""
        row, at = self.row_index(request_id), self._groups.index(group)
        return self._tables.ids[at, row, self._live.front[at, row] : self._live.held[row]].copy()

    def watermarks(self, request_id: str) -> Watermarks:
        return self._live.watermarks(self.row_index(request_id), block_tokens=self.block_tokens)

    # Admission.

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """Claim what is cached of it and count on what it is expected to take beyond, or take nothing and say why."""
        self._check_new(request)
        text = self._prefixes.text(request)
        match = self._prefixes.match(text)
        if (neighbour := self._prefixes.neighbour(text, match.num_blocks, self._progress)) is not None:
            self._prefixes.remember(text)
            return Deferral(manager=self.name, need=0, have=0, waits_for=neighbour)
        need, have = self._need(text, match), self.available()
        if need > have and match.partial is not None:
            # The block it would be copied from must stay until it is; without it the request may fit.
            match = self.cache.without_partial(match)
            need = self._need(text, match)
        if (answer := self._short(need, have) or self._slot(request, txn)) is not None:
            self._prefixes.remember(text)
            return answer
        self._enter(text, match, txn)
        return Grant(cached_tokens=match.num_tokens, units=need, is_loading=bool(match.host_blocks))

    def _short(self, need: int, have: int) -> Deferral | None:
        if need <= have:
            return None
        return Deferral(manager=self.name, need=need, have=have, held_back=self.held_back(), unit=self.unit)

    def _need(self, text: Text, match: Match) -> int:
        """What becomes held, and what the policy expects it to take after that."""
        return match.num_new_live + self._needs.at_admission(text.request, self._holdings.start(text, match))

    def _progress(self, request_id: str) -> tuple[int, int]:
        row = self._row_of[request_id]
        return int(self._live.scheduled[row]), int(self._live.computed[row])

    def _slot(self, request: RequestView, txn: Txn) -> Deferral | None:
        answer = self._slots.admit(request, txn) if self._owns_slots else None
        return answer if isinstance(answer, Deferral) else None

    def _enter(self, text: Text, match: Match, txn: Txn) -> None:
        request_id = text.request.id
        row = self._slots.slot_of(request_id)
        self.cache.claim(match)
        self._row_of[request_id] = row
        txn.undo(partial(self._unadmit, text, match, row, int(self._live.epoch[row])))
        self._holdings.enter(row, text, match, lifetime=self._needs.positions(text.request))
        if match.host_blocks:
            self._loads.ask(request_id, match.host_blocks)
        self._prefixes.count(text, match, 1)

    def _unadmit(self, text: Text, match: Match, row: int, epoch: int) -> None:
        """As before ``_enter``, to the age of what was claimed; nothing if the sequence has left since."""
        if self._live.epoch[row] != epoch:
            return
        self._prefixes.count(text, match, -1)
        self.cache.unclaim(match)
        self._leave(text.request.id, row)
        self._prefixes.remember(text)

    # The hooks of a step.

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:
        grown = self._needs.blocks(ends) - self._live.held[rows_of(self._row_of, request_ids)]
        return max(0, self._num_blocks(np.maximum(grown, 0)) - self.cache.num_available)

    def held_back(self) -> str:
        """Open pins, and how many blocks they hold; nothing while transfers hold some, which end by themselves."""
        return "" if self.cache.incoming.num else self._holdings.pins_told()

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Blocks for every token the step writes. Raises before it changes anything: ``Veto`` if they are not there."""
        self._check_open()
        rows, ends = rows_of(self._row_of, plan.request_ids), plan.ends
        num_blocks = self._needs.blocks(ends)
        self._live.check(plan, rows, num_blocks)
        self._loads.check(plan.request_ids)
        held = self._live.held[rows]
        grown = np.maximum(num_blocks - held, 0)
        num_new, num_available = self._num_blocks(grown), self.cache.num_available
        if num_new > num_available:
            raise Veto(self.name, f"the step needs {num_new} blocks and {num_available} are free")
        prepared = Prepared(rows=rows, epochs=self._live.epoch[rows], held=held)
        txn.undo(partial(self._unprepare, plan, prepared))
        if num_new:
            self._holdings.grow(rows, grown)
        self._live.scheduled[rows] = ends
        self._holdings.copy_partials(rows)
        self._in_flight[plan] = prepared
        self.cache.flush()

    def committed(self) -> None:
        """What was copied needs its sources no more, admitted requests have what they ask of the cache, and what lies
        on the host begins to come."""
        self._holdings.copies_are_final()
        self._holdings.retain_claimed()
        self._loads.begin()

    def loading(self) -> Collection[str]:
        return self._loads.waiting()

    def wait_loaded(self) -> None:
        self._loads.wait()

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:
        """The step's tokens are computed, but for rejected drafts. Who was freed since it was prepared is skipped."""
        prepared = self._in_flight.get(plan)
        if prepared is None:
            return
        here = self._live.still_has(prepared)
        rows, ends = prepared.rows[here], plan.ends[here]
        if plan.drafts is not None:
            rejected = rejected_drafts(plan, outcome)[here]
            self._holdings.reject(rows, ends, rejected, extra_tokens=self.extra_tokens)
            ends = ends - rejected
        del self._in_flight[plan]
        self._live.computed[rows] = ends
        self._holdings.store_due(rows)
        for group, window in self._needs.windows:
            self._holdings.cut_window(group, window, rows)

    def abandon(self, plan: StepPlan) -> None:
        """The step never lands: who is in it is freed."""
        self._in_flight.pop(plan, None)

    def free(self, request_id: str, *, keep_cached: bool = True, pin_on_release: bool = False) -> PinHandle | None:
        """Give everything back, whatever it raises. What was computed stays in the cache, the last partial block too.

        keep_cached False: what nobody else holds is forgotten. pin_on_release: what was computed is pinned first.
        """
        row = self._row_of.get(request_id)
        if row is None:
            return None
        pin = None
        try:
            if keep_cached:
                self._keep(row)
            if pin_on_release:
                pin = self._holdings.pin(row, -(-int(self._live.computed[row]) // self.block_tokens))
        finally:
            self._holdings.release(row, keep_cached=keep_cached)
            self._leave(request_id, row)
        return pin

    def _keep(self, row: int) -> None:
        """What cannot be stored for want of memory is not: a request that ends is worth more than what it leaves."""
        with suppress(MemoryError):
            self._holdings.store(row, with_partial=True)

    def distrust(self, request_id: str) -> None:
        """What the sequence holds gives no numbers: nobody may find it, what it began with included."""
        self._holdings.distrust(self.row_index(request_id))

    def pin(self, request_id: str, *, guard: Guard = nullcontext) -> PinHandle:
        """Pin the whole blocks that are computed; the sequence runs on. ``guard`` is entered to close the handle."""
        row = self.row_index(request_id)
        self._holdings.store(row)
        return self._holdings.pin(row, int(self._live.computed[row]) // self.block_tokens, guard=guard)

    def reset(self) -> None:
        for request_id in list(self._row_of):
            self.free(request_id, keep_cached=False)
        for pin in list(self._holdings.pins):
            pin.close()
        self.cache.clear()

    def close(self) -> None:
        self.reset()
        self._closed = True

    def stats(self) -> Mapping[str, int]:
        """Counts of blocks, tokens and live sequences; ``reserved`` blocks are those they are still expected to take,
        ``hit_tokens`` the part of ``queried_tokens`` that admitted requests found cached. And the cache's own."""
        return {
            **self.cache.stats(),
            "capacity": self.cache.capacity,
            "available": self.available(),
            "allocated": self.cache.num_live,
            "reserved": self._num_expected(),
            "sequences": len(self._row_of),
            "loading": len(self._loads),
            "pins": len(self._holdings.pins),
            "high_water": self._holdings.high_water,
            **self._prefixes.counts,
        }

    # Sums, checks, and what undoes a step.

    def _leave(self, request_id: str, row: int) -> None:
        del self._row_of[request_id]
        self._loads.drop(request_id)
        self._holdings.leave(row)
        if not self._row_of:
            # Steps still in flight have nothing left to say, and some never land.
            self._in_flight.clear()
        if self._owns_slots:
            self._slots.free(request_id)

    def _num_blocks(self, positions: Ints) -> int:
        return int(positions.sum()) * len(self._groups)

    def _num_expected(self) -> int:
        """Blocks that the live sequences are expected to take beyond those they hold, or that they share."""
        return int(self._needs.expected(self._live).sum()) + self.cache.num_shared * bool(self._row_of)

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceError("the KV manager is closed")

    def _check_new(self, request: RequestView) -> None:
        self._check_open()
        self.lifetime_need(request)
        positions = self._needs.positions(request)
        if request.id in self._row_of:
            raise ResourceError(f"request {request.id!r} is admitted twice")
        if positions > self._tables.width:
            raise ResourceError(f"request {request.id!r} needs {positions} blocks; a sequence has {self._tables.width}")

    def _unprepare(self, plan: StepPlan, prepared: Prepared) -> None:
        """Blocks and watermarks as before; what was freed in the meantime has given its blocks back already."""
        self._in_flight.pop(plan, None)
        here = self._live.still_has(prepared)
        rows, starts, held = prepared.rows[here], plan.starts[here], prepared.held[here]
        if self._needs.has_left(self._live.front[:, rows], starts):
            raise ResourceError("a step that has landed has given blocks up that are out of the window now")
        self._holdings.unstore(rows, starts)
        self._holdings.cut(rows, held)
        self._live.scheduled[rows] = starts
        self._live.computed[rows] = np.minimum(self._live.computed[rows], starts)
        self._holdings.uncopy_partials(rows)
