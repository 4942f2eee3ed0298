"""The steps of an engine, each a transaction: scheduled, prepared, launched, and landed one behind where they overlap.

A step that runs out of memory is rolled back and tried once more, smaller, and counted as a defect. Any other failure,
or a second one, fails the requests of that step and no others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from tonnage.engine.endings import Endings
from tonnage.engine.events import Event, EventKind, computed_events
from tonnage.engine.faults import culprit, release_frames
from tonnage.engine.landing import Flight, Landing
from tonnage.engine.picked import Scheduled
from tonnage.engine.retry import Care, Failed, told
from tonnage.engine.runtime import Runtime
from tonnage.engine.scheduler import Scheduler
from tonnage.errors import TransferFailed
from tonnage.step import MustLand, Txn, Veto


class Steps:
    """``flights`` are the steps under way, the oldest first; ``num_steps`` have been launched so far.

    ``num_generated`` tokens came of them; ``culprits`` ran out of memory, each as often as it did. ``observe`` is given
    what makes events, if anybody listens.
    """

    def __init__(
        self,
        runtime: Runtime,
        scheduler: Scheduler,
        endings: Endings,
        observe: Callable[[Callable[[], Iterable[Event]]], None],
    ) -> None:
        self.flights: deque[Flight] = deque()
        self.num_steps = 0
        self.culprits: Counter[str] = Counter()
        self._runtime, self._managers = runtime, runtime.managers
        self._scheduler, self._endings, self._observe = scheduler, endings, observe
        self._landing = Landing(runtime, scheduler, endings)
        self._care = Care(max_num_tokens=runtime.plan.limits.max_num_tokens)
        self._may_retry = all(manager.rerunnable for manager in runtime.managers.dispatcher.managers)

    @property
    def num_generated(self) -> int:
        return self._landing.num_generated

    def step(self) -> None:
        """Launch whatever is due, and land what is to be looked at."""
        self._managers.kv.cache.begin_step()
        before = self.num_steps
        failed = self._attempt_ahead(self._care.next_limit())
        if failed is not None:
            # Out here the exception and its frames are gone, and with them the tensors of the failed step.
            if failed.is_out_of_memory:
                self._runtime.drain()
                self._care.learn(failed)
            self.land_all()
            self._attempt(failed.retry_tokens, is_last=True)
            self._fail_uncut(failed)
        self._land_all_but(self._runtime.steps_ahead if self.num_steps > before else 0)

    def _attempt_ahead(self, max_tokens: int) -> Failed | None:
        """A first attempt, ahead of what has not landed unless that must come first."""
        try:
            return self._attempt(max_tokens, is_last=False)
        except MustLand:
            self.land_all()
            return self._attempt(max_tokens, is_last=False)

    def _attempt(self, max_tokens: int, *, is_last: bool) -> Failed | None:
        """One transaction. Returns what failed if it may be tried again, unless this ``is_last``."""
        txn = Txn()
        scheduled: Scheduled | None = None
        batch = self._scheduler.batch
        try:
            self._load(self._scheduler.start_loaded)
            scheduled = self._scheduler.schedule(txn, max_tokens=max_tokens, is_ahead=bool(self.flights))
            if scheduled is not None:
                self._managers.dispatcher.prepare(scheduled.plan, txn)
                pending = self._runtime.launch(scheduled, batch)
                self.flights.append(Flight(scheduled, pending, batch.epoch[scheduled.slots]))
        except MustLand:
            txn.rollback()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model, a kernel or a manager raises, the loop serves on
            txn.rollback()
            return self._contain(scheduled, error, max_tokens, is_last=is_last)
        except BaseException:
            txn.rollback()
            raise
        txn.commit()
        if scheduled is not None:
            batch.advance(scheduled.plan, scheduled.slots)
            self._observe(lambda: computed_events(scheduled.plan, step=self.num_steps))
            self.num_steps += 1
        try:
            self._load(self._managers.dispatcher.committed)
            if scheduled is None and not self.flights and not self._endings.done:  # nothing else to do
                self._load(self._managers.dispatcher.wait_loaded)
        except Exception as error:  # noqa: BLE001 - a manager that cannot move on takes its step with it, not the loop
            self._fail_step(scheduled, error)
        return None

    def land_all(self) -> None:
        """Nothing is under way afterwards."""
        self._land_all_but(0)

    def _land_all_but(self, num_ahead: int) -> None:
        """The oldest steps first, until so many are left under way."""
        while len(self.flights) > num_ahead:
            flight = self.flights.popleft()
            try:
                self._land(flight)
            except Exception as error:  # noqa: BLE001 - as above: what a device says of a step comes here
                self._managers.kv.abandon(flight.scheduled.plan)
                self._fail(flight.request_ids(self._scheduler.batch), error)

    def _land(self, flight: Flight) -> None:
        outcome = self._landing.outcome(flight)
        self._landing.move_on(flight, outcome)
        self._landing.deliver(flight, outcome)

    def _load(self, action: Callable[[], None]) -> None:
        """Do what a load may make fail: whoever loads then computes all by itself, and nobody else is hurt."""
        try:
            action()
        except TransferFailed as error:
            for request in list(self._scheduler.loading.values()):
                if request.params.cache.reuse:
                    self._scheduler.give_up_loading(request.id)
                else:
                    self._endings.fail(request.id, f"its cached tokens could not be loaded: {told(error)}")

    def _contain(self, scheduled: Scheduled | None, error: Exception, limit: int, *, is_last: bool) -> Failed | None:
        """Out of memory is tried again smaller, a veto as it was: nothing was launched. The rest fails its requests."""
        who = culprit(error)
        if isinstance(error, Veto) and not is_last:
            return Failed(retry_tokens=limit)
        if who is None or is_last or not self._may_retry:
            self.land_all()  # what was drawn before is not lost with this step
            self._fail_step(scheduled, error)
            return None
        self.culprits[who] += 1
        release_frames(error)
        self._observe(lambda: [Event(kind=EventKind.RETRIED, step=self.num_steps)])
        if scheduled is None:
            return Failed(retry_tokens=limit, is_out_of_memory=True)
        plan = scheduled.plan
        half = max(1, plan.shape.num_tokens // 2)
        too_long = tuple(item.request_id for item in plan.items if item.count > half)
        return Failed(retry_tokens=half, is_out_of_memory=True, too_long=too_long, told=f"the step failed: {error}")

    def _fail_uncut(self, failed: Failed) -> None:
        """Prompts that may not be cut and are too long for the smaller step would be tried in full for ever."""
        if self._runtime.chunking.is_on:
            return
        for request_id in failed.too_long:
            if not self._scheduler.may_be_cut(request_id):
                self._endings.fail(request_id, failed.told)

    def _fail_step(self, scheduled: Scheduled | None, error: Exception) -> None:
        """The step's requests end with the error. Without a plan whoever was being admitted does, or nothing would
        move; of a step that was vetoed twice its last row, the newest, and the others are tried without it.
        """
        if scheduled is not None:
            failing = list(scheduled.plan.request_ids)[-1 if isinstance(error, Veto) else 0 :]
        else:
            suspect = self._scheduler.admitting or self._scheduler.head()
            failing = [suspect.id] if suspect is not None else []
        self._fail(failing, error)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in request_ids:
            self._endings.fail(request_id, f"the step failed: {told(error)}")
