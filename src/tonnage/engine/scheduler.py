"""Who computes what in the next step.

Running decodes come first, one token each, so a long prompt never keeps them from their next token. What is left of
the step's tokens goes to prefill chunks, which end on block boundaries: first of the sequences that run, then of
those that wait, in the order of the queue. The queue is strict: if its head must wait, nobody goes before it.

Where the admission policy is optimistic the pool may run short. Then running sequences are suspended: their blocks
are given back, they return to their place in the queue, and their tokens are computed again later. The oldest running
sequence is never suspended, so it finishes, and then the next one is the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tonnage.engine.batch import Batch
from tonnage.engine.options import Chunking
from tonnage.engine.queue import MAX_OVERTAKEN, Turn, WaitingQueue
from tonnage.engine.request import Request
from tonnage.resources.admission import Admission
from tonnage.resources.base import Deferral
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.slots import SlotManager
from tonnage.step import Flags, Ints, StepPlan, Txn
from tonnage.units import round_down


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A step's plan, and the slot of each of its rows."""

    plan: StepPlan
    slots: Ints


@dataclass(slots=True, eq=False)
class _Rows:
    """The rows of a step while it is put together; ``decodes``: which of them decode, the others are chunks."""

    slots: Ints
    counts: Ints
    decodes: Flags

    @property
    def num_decodes(self) -> int:
        return int(np.count_nonzero(self.decodes))

    def without(self, slot: int) -> _Rows:
        keep = self.slots != slot
        return _Rows(self.slots[keep], self.counts[keep], self.decodes[keep])

    def plus(self, slots: list[int], counts: list[int]) -> _Rows:
        """With chunks more."""
        if not slots:
            return self
        decodes = np.append(self.decodes, np.zeros(len(slots), np.bool_))
        return _Rows(np.append(self.slots, slots), np.append(self.counts, counts), decodes)


class Scheduler:
    """The queue and the running sequences. ``schedule`` belongs to a transaction: its rollback undoes admissions.

    A request that a manager named in ``memory_managers`` kept waiting is marked as having waited.
    ``on_admit`` and ``on_suspend`` hear of every request that starts to run or gives its memory up.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        slots: SlotManager,
        admission: Admission,
        *,
        max_num_tokens: int,
        block_tokens: int,
        chunking: Chunking,
        memory_managers: frozenset[str],
        on_admit: Callable[[Request], None] = lambda _: None,
        on_suspend: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.batch = Batch(slots.capacity())
        self.num_suspensions = 0
        #: Whose admission is under way: to blame if it raises.
        self.admitting: Request | None = None
        self._dispatcher, self._slots, self._admission = dispatcher, slots, admission
        self._max_num_tokens, self._block_tokens, self._chunking = max_num_tokens, block_tokens, chunking
        self._memory_managers = memory_managers
        self._on_admit, self._on_suspend = on_admit, on_suspend
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._num_arrived = self._num_deferrals = self._next_step = 0

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Mapping[str, Request]:
        """The running requests by id, live."""
        return self._running

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrived
        request.deferrals_before = self._num_deferrals
        self._num_arrived += 1
        self._waiting.push(request)

    def head(self) -> Request | None:
        """Who is next to be admitted, or else the oldest running request."""
        return self._waiting.peek() or self._oldest()

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
        request = self._running.get(request_id)
        if request is None:
            return
        self._stop(request)
        request.num_computed_tokens = 0
        request.num_suspended += 1
        request.waited = True
        self.num_suspensions += 1
        self._admission.suspended()  # so that it does not let in too many again at once
        self._waiting.push(request)
        self._on_suspend(request)

    def _stop(self, request: Request) -> None:
        del self._running[request.id]
        self.batch.remove(request)
        request.slot = -1
        self._dispatcher.free(request.id)

    def _oldest(self) -> Request | None:
        return min(self._running.values(), key=lambda request: request.arrival, default=None)

    def _note_wait(self, request: Request) -> None:
        request.waited = request.waited or self._num_deferrals > request.deferrals_before

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self, txn: Txn, *, max_tokens: int | None = None) -> Scheduled | None:
        """The next step, of at most ``max_tokens`` where that is less than the limit; None if nothing is due.

        Suspensions are complete in themselves and stay when ``txn`` is rolled back; admissions do not.
        """
        self.admitting = None
        budget = min(self._max_num_tokens, max_tokens or self._max_num_tokens)
        live = self.batch.live_slots()
        is_decode = self.batch.decoding(live)
        rows = self._make_room(self._decodes(live[is_decode], budget))
        if prefills := self._prefills(live[~is_decode]):
            rows = self._continue_prefills(rows, prefills, budget, txn)
        rows = self._admit(rows, budget, txn)
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

    def _decodes(self, slots: Ints, budget: int) -> _Rows:
        """One token for every sequence that decodes: the oldest ones, where a step that is retried is smaller."""
        if slots.size > budget:
            slots = np.array(sorted(slots.tolist(), key=lambda slot: self._at(slot).arrival)[:budget], np.int64)
        return _Rows(slots, np.ones(slots.size, np.int64), np.ones(slots.size, np.bool_))

    def _prefills(self, slots: Ints) -> list[Request]:
        """Those of the sequences in ``slots`` that still run, in the order of the queue, its bound included."""
        found = [request for slot in slots.tolist() if (request := self.batch.requests[slot]) is not None]
        found.sort(key=lambda request: (request.num_overtaken < MAX_OVERTAKEN, -request.priority, request.arrival))
        return found

    def _continue_prefills(self, rows: _Rows, prefills: list[Request], budget: int, txn: Txn) -> _Rows:
        """Chunks of running prompts. A waiting request of a higher priority than all of them goes first.

        A prompt that gets no tokens is passed once more, as in the queue: after so many times it is its turn.
        """
        first = prefills[0]
        if first.num_overtaken < MAX_OVERTAKEN:
            rows = self._admit(rows, budget, txn, above=first.priority)
        slots, counts = self._chunks(prefills, self._prefill_tokens(rows, budget))
        oldest = min(prefills, key=lambda request: request.arrival)
        oldest.num_overtaken += oldest.slot not in slots
        return self._make_room(rows.plus(slots, counts))

    def _prefill_tokens(self, rows: _Rows, budget: int) -> int:
        """Tokens of prefill that still fit into a step of ``rows``."""
        num_decodes, num_tokens = rows.num_decodes, int(rows.counts.sum())
        left = budget - num_tokens
        if self._chunking.beside_decodes is None or not num_decodes:
            return left
        return min(left, self._chunking.beside_decodes - (num_tokens - num_decodes))

    def _chunks(self, prefills: list[Request], left: int) -> tuple[list[int], list[int]]:
        slots: list[int] = []
        counts: list[int] = []
        for request in prefills:
            count = self._chunk(request, left, must_move=not slots)
            if count == 0:
                break
            slots.append(request.slot)
            counts.append(count)
            left -= count
        return slots, counts

    def _chunk(self, request: Request, left: int, *, must_move: bool) -> int:
        """Tokens of the request's next chunk out of ``left``: the whole rest, or up to a block boundary.

        ``must_move``: with less than a block left, progress beats alignment; the next chunk ends on a boundary again.
        """
        start = request.num_computed_tokens if request.slot < 0 else int(self.batch.computed[request.slot])
        rest = len(request.token_ids) - start
        if not self._chunking.is_on and rest <= self._max_num_tokens:
            return rest if rest <= left else 0
        count = min(rest, max(0, left), self._chunking.max_tokens or rest)
        if count == rest:
            return count
        aligned = max(0, round_down(start + count, self._block_tokens) - start)
        return aligned or (count if must_move else 0)

    def _at(self, slot: int) -> Request:
        request = self.batch.requests[slot]
        assert request is not None
        return request

    # -- memory --------------------------------------------------------------------------------------------------

    def _make_room(self, rows: _Rows) -> _Rows:
        """Suspend until what is left of the step finds its blocks."""
        while rows.slots.size:
            ends = self.batch.computed[rows.slots] + rows.counts
            if self._dispatcher.short_of(self.batch.ids(rows.slots), ends) is None:
                break
            victim = next(self._victims(), None)
            assert victim is not None, "one sequence alone always fits: others were refused when they arrived"
            slot = victim.slot
            self.suspend(victim.id)
            rows = rows.without(slot)
        return rows

    def _victims(self) -> Iterator[Request]:
        """The lowest priority first, of equal ones the youngest; the oldest of all is spared."""
        oldest = self._oldest()
        others = (request for request in self._running.values() if request is not oldest)
        return iter(sorted(others, key=lambda request: (request.priority, -request.arrival)))

    def _admit(self, rows: _Rows, budget: int, txn: Txn, *, above: int | None = None) -> _Rows:
        """Let in who waits, in turn, while the step has tokens for a chunk; only priorities ``above``, if given."""
        left = self._prefill_tokens(rows, budget)
        has_prefill = rows.slots.size > rows.num_decodes
        slots: list[int] = []
        counts: list[int] = []
        while (request := self._waiting.peek()) is not None and (above is None or request.priority > above):
            count = self._chunk(request, left, must_move=not has_prefill and not slots)
            if count <= 0 or not self._admitted(request, txn):
                break
            slots.append(request.slot)
            counts.append(count)
            left -= count
        return rows.plus(slots, counts)

    def _admitted(self, request: Request, txn: Txn) -> bool:
        self.admitting = request
        answer = self._dispatcher.admit(request, txn)
        self.admitting = None
        if isinstance(answer, Deferral):
            # The whole queue waits with its head; for a slot it waits as well, but not for memory.
            self._num_deferrals += answer.manager in self._memory_managers
            return False
        turn = self._waiting.pop()
        assert turn.request is request
        self._note_wait(request)
        request.slot = self._slots.slot_of(request.id)
        self._running[request.id] = request
        self.batch.add(request)
        txn.undo(lambda: self._unadmit(turn))
        self._on_admit(request)
        return True

    def _unadmit(self, turn: Turn) -> None:
        if self._running.pop(turn.request.id, None) is not None:
            self.batch.remove(turn.request)
            turn.request.slot = -1
            self._waiting.undo(turn)
