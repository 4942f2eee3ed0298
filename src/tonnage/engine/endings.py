"""How requests end: out of the scheduler, told to their listeners, counted, and handed to the caller."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

from tonnage.engine.delivery import completion_of, tell_end
from tonnage.engine.events import EventKind
from tonnage.engine.request import Completion, Finish, Request
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.text import Text
from tonnage.resources.admission import Admission


class Endings:
    """A request that ends is noted before what it holds is given back: whatever that raises, its caller hears of it.

    done         those that have ended and nobody was told yet; completions: those that the caller is still to get
    counts       ends of each kind; num_waited, cached_tokens: sums over the requests that have ended
    """

    def __init__(
        self, scheduler: Scheduler, text: Text, admission: Admission, on_event: Callable[[EventKind, Request], None]
    ) -> None:
        self.done: deque[Request] = deque()
        self.completions: list[Completion] = []
        self.counts = dict.fromkeys(Finish, 0)
        self.num_waited = self.cached_tokens = 0
        self._scheduler, self._text, self._admission, self._on_event = scheduler, text, admission, on_event

    def end(self, request: Request) -> None:
        """It has all that it is to get; nothing if it has left the scheduler already."""
        if self._scheduler.running.get(request.id) is request:
            self._leave(request)

    def cancel(self, request_id: str) -> None:
        request = self._scheduler.find(request_id)
        if request is not None:
            request.finish = request.finish or Finish.CANCELLED
            self._leave(request)

    def fail(self, request_id: str, reason: str) -> None:
        request = self._scheduler.find(request_id)
        if request is not None:
            request.finish, request.error = Finish.ERROR, reason
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """An error of a manager that gives something back is a defect, and neither this request's nor the step's."""
        self.done.append(request)
        try:
            self._scheduler.remove(request.id)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has ended
            told = f"giving back what request {request.id!r} held raised {type(error).__name__}: {error}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        self._on_event(EventKind.LEFT, request)

    def complete_all(self) -> None:
        """Completions of all that ended. A listener's last word may raise: that too loses no completion."""
        while self.done:
            request = self.done[0]
            raised = tell_end(request)
            self.completions.append(self._complete(request))
            self.done.popleft()
            if raised is not None:
                raise raised

    def _complete(self, request: Request) -> Completion:
        assert request.finish is not None
        self.counts[request.finish] += 1
        self.num_waited += request.waited
        self.cached_tokens += request.num_cached_tokens
        if request.finish in (Finish.STOP, Finish.LENGTH):
            self._admission.finished(request.num_generated_tokens)
        self._on_event(EventKind.ENDED, request)
        return completion_of(request, self._text)
