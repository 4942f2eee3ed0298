"""Steps from their launch to what comes of them: every request is moved on, and the finished ones end.

On a card a step lands when the next one has been launched. Meanwhile requests may have left, and others may sit in
their slots: what a step drew for those is let go. So is the row too many of a request that turns out to have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.engine.batch import Batch
from tonnage.engine.delivery import take, tell_all
from tonnage.engine.endings import Endings
from tonnage.engine.outcome import Outcome, Pending
from tonnage.engine.picked import Scheduled
from tonnage.engine.runtime import Runtime
from tonnage.engine.scheduler import Scheduler
from tonnage.step import Flags, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A launched step. ``epochs`` tell, by row, whose the slots were."""

    scheduled: Scheduled
    pending: Pending
    epochs: Ints

    def is_here(self, batch: Batch) -> Flags:
        """Which rows belong to the sequences that are in their slots now."""
        here: Flags = batch.epoch[self.scheduled.slots] == self.epochs
        return here

    def request_ids(self, batch: Batch) -> list[str]:
        """Of those rows."""
        is_here = self.is_here(batch).tolist()
        return [one for one, here in zip(self.scheduled.plan.request_ids, is_here, strict=True) if here]


class Landing:
    """``num_generated`` counts the tokens that requests got."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler, endings: Endings) -> None:
        self.num_generated = 0
        self._managers, self._scheduler, self._endings = runtime.managers, scheduler, endings

    def outcome(self, flight: Flight) -> Outcome:
        """What the step gave, once it has run. Whose rows are no numbers, nobody may find what they computed."""
        outcome = flight.pending.outcome()
        if not all(outcome.finite):
            here = set(flight.request_ids(self._scheduler.batch))
            for request_id, is_finite in zip(outcome.request_ids, outcome.finite, strict=True):
                if not is_finite and request_id in here:
                    self._managers.kv.distrust(request_id)
        return outcome

    def move_on(self, flight: Flight, outcome: Outcome) -> None:
        """Managers and batch learn what was computed and drawn."""
        plan, slots, batch = flight.scheduled.plan, flight.scheduled.slots, self._scheduler.batch
        self._managers.dispatcher.update(plan, outcome)
        batch.land(plan, slots, np.asarray(outcome.tokens, np.int64), flight.is_here(batch))

    def deliver(self, flight: Flight, outcome: Outcome) -> None:
        """Hand tokens out, then let the finished go.

        Callers' code runs only once all requests are consistent and those that end have left, so nothing that it does
        or raises can leave one half moved.
        """
        running, batch = self._scheduler.running, self._scheduler.batch
        here = {request_id: running[request_id] for request_id in flight.request_ids(batch)}
        told = zip(outcome.request_ids, outcome.finite, strict=True)
        self.num_generated += sum(request_id in here and is_finite for request_id, is_finite in told)
        ended, deltas = take(outcome, here)
        for request in ended:
            self._endings.end(request)
        raised = tell_all(deltas)
        for request, _ in deltas:
            if request.finish is not None:
                self._endings.end(request)
        if raised is not None:
            raise raised
