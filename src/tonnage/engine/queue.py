"""Who waits, in which order: larger priorities first, equal ones by arrival, and nobody for ever."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tonnage.engine.request import Request

#: So often may later arrivals of a higher priority go before the oldest waiting request; then it is its turn.
MAX_OVERTAKEN = 256

#: Entries of requests that have gone, beyond as many again as there are live ones, before both heaps are rebuilt.
SPARE_ENTRIES = 128


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it was, and whom that passed over: enough to put both back."""

    request: Request
    overtaken: Request | None


class WaitingQueue:
    """Requests by (priority, arrival), with a bound on overtaking.

    Only the oldest request counts how often it is passed; once it has gone, the next oldest counts. So a request of
    any priority goes after at most ``MAX_OVERTAKEN`` * (older requests + 1) others.
    """

    def __init__(self) -> None:
        self._live: dict[str, Request] = {}
        # Entries of requests that have gone are dropped when they come to the top.
        self._by_rank: list[tuple[int, int, Request]] = []
        self._by_age: list[tuple[int, Request]] = []

    def __len__(self) -> int:
        return len(self._live)

    def push(self, request: Request) -> None:
        self._live[request.id] = request
        if len(self._by_rank) + len(self._by_age) > 4 * len(self._live) + SPARE_ENTRIES:
            self._by_rank = [entry for entry in self._by_rank if not self._gone(entry[-1])]
            self._by_age = [entry for entry in self._by_age if not self._gone(entry[-1])]
            heapq.heapify(self._by_rank)
            heapq.heapify(self._by_age)
        heapq.heappush(self._by_rank, (-request.priority, request.arrival, request))
        heapq.heappush(self._by_age, (request.arrival, request))

    def peek(self) -> Request | None:
        """Whose turn it is."""
        oldest = self._oldest()
        if oldest is None or oldest.num_overtaken >= MAX_OVERTAKEN:
            return oldest
        while self._gone(self._by_rank[0][-1]):
            heapq.heappop(self._by_rank)
        return self._by_rank[0][-1]

    def pop(self) -> Turn:
        request, oldest = self.peek(), self._oldest()
        assert request is not None, "nobody waits"
        assert oldest is not None
        del self._live[request.id]
        if request is oldest:
            return Turn(request, None)
        oldest.num_overtaken += 1
        return Turn(request, oldest)

    def undo(self, turn: Turn) -> None:
        """As before that ``pop``."""
        if turn.overtaken is not None:
            turn.overtaken.num_overtaken -= 1
        self.push(turn.request)

    def find(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def remove(self, request_id: str) -> Request | None:
        return self._live.pop(request_id, None)

    def _oldest(self) -> Request | None:
        while self._by_age and self._gone(self._by_age[0][-1]):
            heapq.heappop(self._by_age)
        return self._by_age[0][-1] if self._by_age else None

    def _gone(self, request: Request) -> bool:
        return self._live.get(request.id) is not request
