"""Who computes what in the next step: running sequences first, then the queue in its order.

A request enters only when every manager has granted its whole life, so a running sequence never stops for want of
memory. The queue is strict: if its head must wait, nobody overtakes it. A prompt that does not fit the step's
tokens is computed in chunks that end on block boundaries.
"""

from __future__ import annotations

from collections import deque

from tonnage.engine.request import Request
from tonnage.resources.base import Deferral
from tonnage.resources.dispatcher import Dispatcher
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.units import round_down


class Scheduler:
    """The queue and the running sequences. ``schedule`` belongs to a transaction: its rollback undoes admissions.

    A request that a manager named in ``memory_managers`` kept waiting is marked as having waited.
    """

    def __init__(
        self, dispatcher: Dispatcher, *, max_num_tokens: int, block_tokens: int, memory_managers: frozenset[str]
    ) -> None:
        self._dispatcher = dispatcher
        self._max_num_tokens = max_num_tokens
        self._block_tokens = block_tokens
        self._memory_managers = memory_managers
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._next_step = 0
        self._num_deferrals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self, request_id: str) -> Request:
        return self._running[request_id]

    def add(self, request: Request) -> None:
        request.deferrals_before = self._num_deferrals
        self._waiting.append(request)

    def head(self) -> Request | None:
        """Who is next to be admitted, or else the oldest running request."""
        return self._waiting[0] if self._waiting else next(iter(self._running.values()), None)

    def finished(self) -> list[Request]:
        """Running requests that have ended and still hold what they were given."""
        return [request for request in self._running.values() if request.finish is not None]

    def remove(self, request_id: str) -> Request | None:
        """Take a request out wherever it stands and give back what it holds; None if it is not here."""
        request = self._running.pop(request_id, None)
        if request is not None:
            self._dispatcher.free(request_id)
            return request
        for waiting in self._waiting:
            if waiting.id == request_id:
                self._waiting.remove(waiting)
                self._note_wait(waiting)
                return waiting
        return None

    def schedule(self, txn: Txn) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        items = self._continue_running()
        self._admit(items, txn)
        if not items:
            return None
        plan = StepPlan.of(self._next_step, tuple(items))
        self._next_step += 1
        return plan

    def _continue_running(self) -> list[StepItem]:
        """Decodes before prefill chunks, so that a long prompt never keeps a running sequence from its token."""
        items: list[StepItem] = []
        budget = self._max_num_tokens
        for request in sorted(self._running.values(), key=lambda request: request.num_to_compute > 1):
            if item := self._item(request, budget):
                items.append(item)
                budget -= item.count
        return items

    def _admit(self, items: list[StepItem], txn: Txn) -> None:
        budget = self._max_num_tokens - sum(item.count for item in items)
        while self._waiting and (item := self._item(self._waiting[0], budget)):
            answer = self._dispatcher.admit(self._waiting[0], txn)
            if isinstance(answer, Deferral):
                # The whole queue waits with its head; for a slot it waits as well, but not for memory.
                self._num_deferrals += answer.manager in self._memory_managers
                return
            request = self._waiting.popleft()
            self._note_wait(request)
            self._running[request.id] = request
            txn.undo(lambda request=request: self._unadmit(request))  # type: ignore[misc]
            items.append(item)
            budget -= item.count

    def _note_wait(self, request: Request) -> None:
        request.waited = request.waited or self._num_deferrals > request.deferrals_before

    def _unadmit(self, request: Request) -> None:
        if self._running.pop(request.id, None) is not None:
            self._waiting.appendleft(request)

    def _item(self, request: Request, budget: int) -> StepItem | None:
        count = request.num_to_compute
        if count > budget:
            aligned = round_down(request.num_computed_tokens + budget, self._block_tokens)
            # Less than a block of budget: progress beats alignment, the next chunk ends on a boundary again.
            count = max(aligned - request.num_computed_tokens, 0) or budget
        if count <= 0:
            return None
        end = request.num_computed_tokens + count
        return StepItem(
            request_id=request.id,
            start=request.num_computed_tokens,
            count=count,
            samples=end == len(request.token_ids),
        )
