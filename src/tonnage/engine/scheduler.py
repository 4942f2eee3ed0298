"""Who computes what in the next step.

Running decodes come first, one token each, so a long prompt never keeps them from their next token. What is left of
the step's tokens goes to prefill chunks, which end on block boundaries: first of the sequences that run, then of
those that wait, in the order of the queue. The queue is strict: if its head must wait, nobody goes before it. What a
step may take beside tokens is counted by the gate (``resources.gate``).

Admission is exact: a request first claims what the cache holds of it and then pays for the rest. If no token of that
fits into the step, the claim is given back. Where some of it lies on the host, the request is admitted and loads; it
takes part in steps once that has come.

Where the admission policy is optimistic the pool may run short. Then running sequences are suspended: their blocks
are given back, they return to their place in the queue, and their tokens are computed again later. The oldest running
sequence is never suspended, so it finishes, and then the next one is the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tonnage.engine.batch import Batch
from tonnage.engine.events import EventKind
from tonnage.engine.options import Chunking
from tonnage.engine.picked import Picked, Scheduled
from tonnage.engine.queue import MAX_OVERTAKEN, Turn, WaitingQueue
from tonnage.engine.refusals import held_back
from tonnage.engine.request import Request
from tonnage.errors import ResourceError
from tonnage.resources.admission import Admission
from tonnage.resources.base import Deferral
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.gate import Chunk, Gate, Room, Rows
from tonnage.resources.slots import SlotManager
from tonnage.step import Ints, MustLand, StepPlan, Txn
from tonnage.units import round_down


class Scheduler:
    """The queue and the running sequences. ``schedule`` belongs to a transaction: its rollback undoes admissions.

    ``gate`` says what a step may take, of at most ``max_num_tokens`` tokens. A request that a manager named in
    ``memory_managers`` kept waiting is marked as having waited. ``on_event`` hears of every request that
    is admitted, gives its memory up, or waits again because its admission was rolled back.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        slots: SlotManager,
        admission: Admission,
        gate: Gate,
        *,
        max_num_tokens: int,
        block_tokens: int,
        chunking: Chunking,
        memory_managers: frozenset[str],
        on_event: Callable[[EventKind, Request], None] = lambda *_: None,
    ) -> None:
        self.batch = Batch(slots.capacity())
        #: Whose admission is under way: to blame if it raises.
        self.admitting: Request | None = None
        self._put_off: Request | None = None
        self._is_ahead = False
        self._dispatcher, self._slots, self._admission, self._gate = dispatcher, slots, admission, gate
        self._max_num_tokens, self._block_tokens, self._chunking = max_num_tokens, block_tokens, chunking
        self._memory_managers, self._on_event = memory_managers, on_event
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        # A decode computes one token and draws one; no encoder runs for it.
        self._ones, self._zeros = np.ones(slots.capacity(), np.int64), np.zeros(slots.capacity(), np.int64)
        self.num_suspensions = self._num_arrived = self._num_deferrals = self._next_step = 0

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Mapping[str, Request]:
        """The admitted requests by id, live: those that load are among them."""
        return self._running

    @property
    def loading(self) -> Mapping[str, Request]:
        """The admitted requests that take part in no step yet, live."""
        return self._loading

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrived
        request.deferrals_before = self._num_deferrals
        self._num_arrived += 1
        self._waiting.push(request)

    def head(self) -> Request | None:
        """Who is next to be admitted, or else the oldest running request."""
        return self._waiting.peek() or self._oldest()

    def find(self, request_id: str) -> Request | None:
        """The request wherever it stands; None if it is not here."""
        return self._running.get(request_id) or self._waiting.find(request_id)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out wherever it stands and give back what it holds; None if it is not here."""
        request = self._running.get(request_id)
        if request is not None:
            self._stop(request)
            return request
        request = self._waiting.remove(request_id)
        if request is not None:
            self._note_wait(request)
        return request

    def suspend(self, request_id: str) -> None:
        """Give a running request's memory back and let it wait for its turn again. Anything else is left as it is."""
        if request_id in self._running:
            self._admission.suspended()  # so that it does not let in too many again at once
            self._requeue(request_id).waited = True

    def suspend_all(self) -> None:
        """Every running request gives its memory up and waits for its turn. No step is under way."""
        for request_id in list(self._running):
            self._requeue(request_id)

    def give_up_loading(self, request_id: str) -> None:
        """What the cache holds of a request did not come: it waits for its turn again and computes all by itself."""
        if request_id in self._loading:
            request = self._requeue(request_id)
            request.num_cached_tokens = 0
            request.params = replace(request.params, cache=replace(request.params.cache, reuse=False))

    def start_loaded(self) -> None:
        """Those whose blocks have come take part in steps from now on. Also asked for where nobody waits: what has come
        is then let go."""
        still = self._dispatcher.loading()
        for request in [request for request in self._loading.values() if request.id not in still]:
            del self._loading[request.id]
            self.batch.start(request.slot)

    def _requeue(self, request_id: str) -> Request:
        request = self._running[request_id]
        try:
            self._stop(request)
        finally:
            request.num_computed_tokens = 0
            request.num_suspended += 1
            self.num_suspensions += 1
            self._waiting.push(request)
            self._on_event(EventKind.SUSPENDED, request)
        return request

    def _stop(self, request: Request) -> None:
        self._leave(request)
        self._dispatcher.free(request.id)

    def _leave(self, request: Request) -> None:
        del self._running[request.id]
        self._loading.pop(request.id, None)
        self.batch.remove(request)
        request.slot = -1

    def _oldest(self) -> Request | None:
        return min(self._running.values(), key=lambda request: request.arrival, default=None)

    def _note_wait(self, request: Request) -> None:
        request.waited = request.waited or self._num_deferrals > request.deferrals_before

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self, txn: Txn, *, max_tokens: int | None = None, is_ahead: bool = False) -> Scheduled | None:
        """The next step, of at most ``max_tokens`` where that is less than the limit; None if nothing can be computed,
        though somebody who loads may have been admitted. ``is_ahead``: steps before it have not landed.

        Suspensions are complete in themselves and stay when ``txn`` is rolled back; admissions do not. None are made
        ahead of steps: raises ``MustLand``.
        """
        self.admitting = self._put_off = None
        self._is_ahead = is_ahead
        due = self.batch.due_slots()
        is_decode = self.batch.decoding(due)
        rows = self._make_room(self._decodes(due[is_decode], max_tokens))
        prefills = self._prefills(due[~is_decode])
        if prefills or self._waiting:
            room = self._gate.room(self._charged(rows.slots), max_tokens=max_tokens)
            if prefills:
                rows = self._continue_prefills(rows, prefills, room, txn)
            if not self._starves(prefills, rows):
                rows = self._admit(rows, room, txn)
        if not rows.slots.size:
            return None
        starts = self.batch.computed[rows.slots]
        plan = StepPlan.build(
            self._next_step,
            self.batch.ids(rows.slots),
            starts=starts,
            counts=rows.counts,
            samples=starts + rows.counts == self.batch.known[rows.slots],
        )
        self._next_step += 1
        return Scheduled(plan, rows.slots)

    def _decodes(self, slots: Ints, max_tokens: int | None) -> Picked:
        """One token for every sequence that decodes: the oldest ones, where the step cannot take them all."""
        kept = self._gate.num_within(self._charged(slots), num_decodes=slots.size, max_tokens=max_tokens)
        if kept < slots.size:
            slots = np.array(sorted(slots.tolist(), key=lambda slot: self._at(slot).arrival)[:kept], np.int64)
        return Picked(slots, self._ones[: slots.size])

    def _charged(self, slots: Ints) -> Rows[Ints]:
        """Decodes as the gate counts them."""
        ones, zeros = self._ones[: slots.size], self._zeros[: slots.size]
        return Rows(self.batch.computed[slots], ones, ones, zeros)

    def _prefills(self, slots: Ints) -> list[Request]:
        """Those of the sequences in ``slots`` that still run, in the order of the queue, its bound included."""
        found = [request for slot in slots.tolist() if (request := self.batch.requests[slot]) is not None]
        found.sort(key=lambda request: (request.num_overtaken < MAX_OVERTAKEN, -request.priority, request.arrival))
        return found

    def _continue_prefills(self, rows: Picked, prefills: list[Request], room: Room, txn: Txn) -> Picked:
        """Chunks of running prompts. A waiting request of a higher priority than all of them goes first.

        A prompt that gets no tokens is passed once more, as in the queue: after so many times it is its turn.
        """
        first = prefills[0]
        if first.num_overtaken < MAX_OVERTAKEN:
            rows = self._admit(rows, room, txn, above=first.priority)
        slots: list[int] = []
        counts: list[int] = []
        for request in prefills:
            count = self._take(self._rest(request), room, must_move=not slots)
            if count == 0:
                break
            slots.append(request.slot)
            counts.append(count)
        rows, oldest = self._make_room(rows.plus(slots, counts)), min(prefills, key=lambda one: one.arrival)
        oldest.num_overtaken += oldest.slot not in slots
        return rows

    def _starves(self, prefills: list[Request], rows: Picked) -> bool:
        """Whether a running prompt was passed too often and got nothing again: it may be too long for what is left of a
        step as long as others come in, so nobody does until it has had its turn."""
        return any(one.num_overtaken >= MAX_OVERTAKEN and one.slot not in rows.slots for one in prefills)

    def may_be_cut(self, request_id: str) -> bool:
        """Whether what is left of a running prompt may come in pieces."""
        request = self._running.get(request_id)
        return request is not None and (self._chunking.is_on or self._rest(request).rest > self._max_num_tokens)

    def _rest(self, request: Request) -> Chunk:
        """All that is to be computed of a running sequence."""
        start = int(self.batch.computed[request.slot])
        return Chunk(start, len(request.token_ids) - start)

    def _take(self, chunk: Chunk, room: Room, *, must_move: bool) -> int:
        """Tokens of the chunk that come into the step, counted against ``room``; 0: none."""
        count = self._cut(chunk, room.tokens_for(chunk), must_move=must_move)
        if count:
            room.take(chunk, count)
        return count

    def _cut(self, chunk: Chunk, fitting: int, *, must_move: bool) -> int:
        """Of ``fitting`` tokens: the whole rest, or up to a block boundary.

        ``must_move``: with less than a block left, progress beats alignment; the next chunk ends on a boundary again.
        """
        if not self._chunking.is_on and chunk.rest <= self._max_num_tokens:
            return chunk.rest if chunk.rest <= fitting else 0
        count = min(fitting, self._chunking.max_tokens or fitting)
        if count == chunk.rest:
            return count
        aligned = max(0, round_down(chunk.start + count, self._block_tokens) - chunk.start)
        return aligned or (count if must_move else 0)

    def _at(self, slot: int) -> Request:
        request = self.batch.requests[slot]
        assert request is not None
        return request

    # -- memory

    def _make_room(self, rows: Picked) -> Picked:
        """Suspend until what is left of the step finds its blocks."""
        while rows.slots.size:
            ends = self.batch.computed[rows.slots] + rows.counts
            short = self._dispatcher.short_of(self.batch.ids(rows.slots), ends)
            if short is None:
                break
            if self._is_ahead:
                raise MustLand
            victim = self._victim()
            if victim is None:
                return self._alone_and_short(rows, short)
            slot = victim.slot
            self.suspend(victim.id)
            rows = rows.without(slot)
        return rows

    def _alone_and_short(self, rows: Picked, short: Deferral) -> Picked:
        """One sequence alone always fits, but for what nobody here can take back: pins are the caller's to close, and
        it would wait for ever. Anything else comes back by itself, transfers that are under way."""
        oldest = self._oldest()
        assert oldest is not None
        if short.held_back:
            self.admitting = oldest
            raise held_back(oldest, short, "needs another")
        return rows.without(oldest.slot)

    def _victim(self) -> Request | None:
        """The lowest priority, of equal ones the youngest; the oldest of all is spared."""
        oldest = self._oldest()
        others = (request for request in self._running.values() if request is not oldest)
        return min(others, key=lambda request: (request.priority, -request.arrival), default=None)

    def _admit(self, rows: Picked, room: Room, txn: Txn, *, above: int | None = None) -> Picked:
        """Let in who waits, in turn, while the step has tokens for a chunk; only priorities ``above``, if given."""
        slots: list[int] = []
        counts: list[int] = []
        while (request := self._waiting.peek()) is not None and (above is None or request.priority > above):
            # Nobody is asked twice in a step: to wait for a neighbour's next tokens means to wait for the next step.
            if room.is_full or request is self._put_off:
                break
            self.admitting = request
            count = self._admitted(request, room, txn)
            self.admitting = None
            if count is None:
                self._put_off = request
                break
            if count:
                slots.append(request.slot)
                counts.append(count)
        return rows.plus(slots, counts)

    def _admitted(self, request: Request, room: Room, txn: Txn) -> int | None:
        """Tokens of its first chunk, 0 for one that loads before; None: it waits, and holds nothing."""
        claim = Txn()
        answer = self._dispatcher.admit(request, claim)
        txn.undo(claim.rollback)
        if isinstance(answer, Deferral):
            if answer.held_back and not self._running:
                raise held_back(request, answer, "needs")
            self._note_deferral(answer)
            return None
        grants = answer.values()
        found = {grant.cached_tokens for grant in grants if grant.cached_tokens is not None}
        if len(found) > 1:
            raise ResourceError(f"managers begin {request.id!r} at different tokens: {sorted(found)}")
        cached = max(found, default=0)
        is_loading = any(grant.is_loading for grant in grants)
        if cached >= len(request.token_ids):
            raise ResourceError(f"{cached} of the {len(request.token_ids)} tokens of {request.id!r} are cached")
        chunk = Chunk(cached, len(request.token_ids) - cached, request.num_encoder_tokens)
        count = 0 if is_loading else self._take(chunk, room, must_move=not room.num_chunks)
        if not count and not is_loading:
            claim.rollback()
            return None
        self._enter(request, txn, cached=cached, is_loading=is_loading)
        return count

    def _note_deferral(self, answer: Deferral) -> None:
        """The whole queue waits with its head; for a slot or a neighbour's tokens as well, but not for memory.

        While it waits for a neighbour nobody else is let in before it, and what runs comes to an end: it cannot
        starve, as long as somebody runs who computes what it waits for.
        """
        if answer.waits_for is None:
            self._num_deferrals += answer.manager in self._memory_managers
        elif answer.waits_for not in self._running:
            raise ResourceError(f"{answer.manager}: waits for {answer.waits_for!r}, which does not run")

    def _enter(self, request: Request, txn: Txn, *, cached: int, is_loading: bool) -> None:
        turn = self._waiting.pop()
        assert turn.request is request
        self._note_wait(request)
        request.num_computed_tokens = cached
        if not request.num_suspended:
            request.num_cached_tokens = cached
        request.slot = self._slots.slot_of(request.id)
        self._running[request.id] = request
        if is_loading:
            self._loading[request.id] = request
        self.batch.add(request, is_loading=is_loading)
        txn.undo(lambda: self._unadmit(turn))
        self._on_event(EventKind.ADMITTED, request)

    def _unadmit(self, turn: Turn) -> None:
        request = turn.request
        if self._running.get(request.id) is request:
            self._leave(request)
            request.num_computed_tokens = 0
            self._waiting.undo(turn)
            self._on_event(EventKind.WITHDRAWN, request)
