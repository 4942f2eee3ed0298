"""The engine once it is built: requests in, tokens out, every step a transaction."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from tonnage.engine.endings import Endings
from tonnage.engine.events import Event, EventKind, OnEvent, computed_events, event_of
from tonnage.engine.faults import culprit, release_frames
from tonnage.engine.interrupts import deferred_interrupts
from tonnage.engine.landing import Flight, Landing
from tonnage.engine.picked import Scheduled
from tonnage.engine.refusals import refuse_impossible
from tonnage.engine.request import Completion, Finish, OnDelta, Progress, Request, prompt_ids
from tonnage.engine.retry import Care, Failed, told
from tonnage.engine.runtime import Runtime
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.text import Message, Text
from tonnage.errors import InputError, RequestRefused, TransferFailed, UserError
from tonnage.report import RunResult, StageRecord
from tonnage.resources.cache_events import OnEvents
from tonnage.resources.gate import Gate
from tonnage.resources.pins import PinHandle
from tonnage.sampling import SamplingParams
from tonnage.step import MustLand, Txn, Veto
from tonnage.terms import MemoryPlan

#: Time between two looks at the process's memory, which also make the heap give back what it keeps: a few milliseconds.
SETTLE_EVERY_NS = 500 * 10**6


class Engine:
    """A model inside its memory plan. Not thread-safe: one thread submits, steps and cancels.

    Use as a context manager, or call ``close``. ``plan``, ``ledger``, ``stages`` and ``text`` may be read at any time.
    ``observe``, if set, hears every ``Event``; it must not call back into the engine.
    """

    def __init__(self, runtime: Runtime, text: Text, stages: Sequence[StageRecord]) -> None:
        self.plan: MemoryPlan = runtime.plan
        self.ledger = runtime.ledger
        self.text = text
        self.stages = tuple(stages)
        self.observe: OnEvent | None = None
        self._runtime = runtime
        kv, chunking, self._cache = runtime.managers.kv, runtime.chunking, runtime.managers.kv.cache
        self._scheduler = Scheduler(
            runtime.managers.dispatcher,
            runtime.managers.slots,
            runtime.managers.admission,
            Gate.of(self.plan, kv, beside_decodes=chunking.beside_decodes),
            max_num_tokens=self.plan.limits.max_num_tokens,
            block_tokens=kv.block_tokens,
            chunking=chunking,
            memory_managers=frozenset({kv.name}),
            on_event=self._event,
        )
        self._may_retry = all(manager.rerunnable for manager in runtime.managers.dispatcher.managers)
        self._ids: set[str] = set()
        self._endings = Endings(self._scheduler, text, runtime.managers.admission, self._event)
        self._landing = Landing(runtime, self._scheduler, self._endings)
        self._flights: deque[Flight] = deque()
        self._prompt_tokens = self._num_steps = 0
        self._culprits: Counter[str] = Counter()
        self._care = Care(max_num_tokens=self.plan.limits.max_num_tokens)
        self._in_step = threading.Lock()
        self._is_closed = False
        self._serving_ns = 0
        self._settled_ns = time.monotonic_ns()

    # -- requests ------------------------------------------------------------------------------------------------

    def request(
        self,
        id: str,
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        on_delta: OnDelta | None = None,
    ) -> Request:
        """A request for one sample, from exactly one of a text, a conversation, or token ids; not submitted yet.

        ``params.n`` is the caller's to expand: one request each, with seeds of its own.

        Raises ``RequestRefused`` for one that can never be served, ``InputError`` for one that makes no sense.
        """
        ids = prompt_ids(id, self.text, prompt=prompt, messages=messages, token_ids=token_ids)
        params = params or SamplingParams()
        request = Request.of(id, ids, params, text=self.text, limits=self.plan.limits, on_delta=on_delta)
        try:
            refuse_impossible(
                request,
                limits=self.plan.limits,
                chunking=self._runtime.chunking,
                vocab_size=self._runtime.vocab_size,
                dispatcher=self._runtime.managers.dispatcher,
            )
        except RequestRefused:
            self._event(EventKind.REFUSED, request)
            raise
        return request

    def submit(self, request: Request) -> None:
        """Queue it, in order of arrival. Raises ``InputError`` if a live request has the same id."""
        self._require_open()
        if request.id in self._ids:
            raise InputError(f"There is a request {request.id!r} already", remedy="give every request its own id")
        with deferred_interrupts():
            self._ids.add(request.id)
            self._prompt_tokens += request.num_prompt_tokens
            self._scheduler.add(request)
            self._event(EventKind.ARRIVED, request)

    def cancel(self, request_id: str) -> None:
        """Stop a request; what it generated so far comes with the next ``step``. Unknown ids are fine."""
        if self._is_closed:
            return
        with deferred_interrupts():
            self._endings.cancel(request_id)

    def pin(self, request_id: str) -> PinHandle:
        """Keep what is computed of a running request cached until the handle is closed, though it ends before.

        Raises ``InputError`` if no such request runs.
        """
        self._require_open()
        if request_id not in self._scheduler.running:
            raise InputError(f"No request {request_id!r} is running", remedy="pin it while it runs")
        with deferred_interrupts():
            return self._runtime.managers.kv.pin(request_id, guard=deferred_interrupts)

    def subscribe_cache(self, callback: OnEvents) -> Callable[[], None]:
        """Tell ``callback`` of every block that enters or leaves the prefix cache, after the step in which it did.

        Returns what ends that. A callback that raises is dropped; it must not call back into the engine.
        """
        self._require_open()
        if not callable(callback):
            raise InputError(f"A subscriber of the cache is called: {callback!r} cannot be", remedy="pass a function")
        return self._cache.events.subscribe(callback)

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        endings, scheduler = self._endings, self._scheduler
        is_busy = self._flights or scheduler.num_running or scheduler.num_waiting
        return bool(is_busy or endings.done or endings.completions) and not self._is_closed

    def step(self) -> list[Completion]:
        """One forward over whatever is due, or a wait for a load; returns the requests that ended since the last call.

        On a card the forward is launched and the one before it looked at, so that the device never waits for the host:
        tokens come a call later than they are asked for.
        A step that runs out of memory is rolled back and tried once more, smaller, and counted as a defect. Any other
        failure, or a second one, fails the requests of that step, and the engine goes on.
        ``KeyboardInterrupt`` comes after the step; what it finished is then returned by the next call.
        Raises ``UserError`` if another thread is in a step, or this one is.
        """
        self._require_open()
        began = time.monotonic_ns()
        with deferred_interrupts(), self._alone(), self._runtime.active():
            try:
                self.ledger.step(self._num_steps)
                self._step()
                self._cache.events.flush()
            finally:
                self._serving_ns += time.monotonic_ns() - began
            self._endings.complete_all()
        done = self._endings.completions
        self._ids.difference_update(one.request_id for one in done)
        # On one line: an interrupt comes before it and they stay for the next call, or after it and they are told.
        return (done.copy(), done.clear())[0]  # type: ignore[func-returns-value]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One step at a time: two threads, or a callback that steps, would see each other's requests half moved."""
        if not self._in_step.acquire(blocking=False):
            raise UserError(
                "This engine is in the middle of a step",
                remedy="use it from one thread, and not from its own callbacks; AsyncLLM serves many at once",
            )
        try:
            yield
        finally:
            self._in_step.release()

    def _step(self) -> None:
        self._cache.begin_step()
        before = len(self._flights)
        failed = self._attempt_ahead(self._care.next_limit())
        if failed is not None:
            # Out here the exception and its frames are gone, and with them the tensors of the failed step.
            if failed.is_out_of_memory:
                self._runtime.drain()
                self._care.learn(failed)
            self._land_all_but(0)
            before = 0
            self._attempt(failed.retry_tokens, is_last=True)
            self._fail_uncut(failed)
        self._land_all_but(self._runtime.steps_ahead if len(self._flights) > before else 0)
        if time.monotonic_ns() - self._settled_ns > SETTLE_EVERY_NS:
            self._runtime.settle("serving")
            self._settled_ns = time.monotonic_ns()

    def _attempt_ahead(self, max_tokens: int) -> Failed | None:
        """A first attempt, ahead of what has not landed unless that must come first."""
        try:
            return self._attempt(max_tokens, is_last=False)
        except MustLand:
            self._land_all_but(0)
            return self._attempt(max_tokens, is_last=False)

    def _attempt(self, max_tokens: int, *, is_last: bool) -> Failed | None:
        """One transaction. Returns what failed if it may be tried again, unless this ``is_last``."""
        txn = Txn()
        scheduled: Scheduled | None = None
        batch = self._scheduler.batch
        try:
            self._load(self._scheduler.start_loaded)
            scheduled = self._scheduler.schedule(txn, max_tokens=max_tokens, is_ahead=bool(self._flights))
            if scheduled is not None:
                self._runtime.managers.dispatcher.prepare(scheduled.plan, txn)
                pending = self._runtime.launch(scheduled, batch)
                self._flights.append(Flight(scheduled, pending, batch.epoch[scheduled.slots]))
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
            if self.observe is not None:
                self._observe(*computed_events(scheduled.plan, step=self._num_steps))
            self._num_steps += 1
        try:
            self._load(self._runtime.managers.dispatcher.committed)
            if scheduled is None and not self._flights and not self._endings.done:  # nothing else to do
                self._load(self._runtime.managers.dispatcher.wait_loaded)
        except Exception as error:  # noqa: BLE001 - a manager that cannot move on takes its step with it, not the loop
            self._fail_step(scheduled, error)
        return None

    def _land_all_but(self, num_ahead: int) -> None:
        """The oldest steps first, until so many are left under way."""
        while len(self._flights) > num_ahead:
            flight = self._flights.popleft()
            try:
                self._land(flight)
            except Exception as error:  # noqa: BLE001 - as above: what a device says of a step comes here
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
            self._fail_step(scheduled, error)
            return None
        self._culprits[who] += 1
        release_frames(error)
        self._observe(Event(kind=EventKind.RETRIED, step=self._num_steps))
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

    # -- what is going on ----------------------------------------------------------------------------------------

    def _event(self, kind: EventKind, request: Request) -> None:
        if self.observe is not None:
            self._observe(event_of(kind, request, step=self._num_steps))

    def _observe(self, *events: Event) -> None:
        """A listener that raises is dropped: it must not take requests with it."""
        try:
            for event in events:
                if self.observe is not None:
                    self.observe(event)
        except Exception as error:  # noqa: BLE001 - whatever it raises
            self.observe = None
            warnings.warn(f"Engine.observe raised {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""
        return self._runtime.vocab_size

    @property
    def steps_ahead(self) -> int:
        """So many steps are launched when an earlier one has not been looked at: 0, or 1 where steps overlap."""
        return self._runtime.steps_ahead

    def stats(self) -> dict[str, int]:
        """Every manager's counts, under ``MANAGER.COUNT``."""
        return self._runtime.managers.dispatcher.stats()

    def progress(self) -> Progress:
        kv = self._runtime.managers.kv
        return Progress(
            num_finished=sum(self._endings.counts.values()),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_used_tokens=kv.num_used * kv.block_tokens,
            kv_total_tokens=kv.capacity() * kv.block_tokens,
            generated_tokens=self._landing.num_generated,
            num_suspensions=self._scheduler.num_suspensions,
            num_loading=len(self._scheduler.loading),
            cached_prompt_tokens=self._endings.cached_tokens,
        )

    def result(self) -> RunResult:
        """What has happened since start-up, with the ledger as it stands now."""
        counts = self._endings.counts
        return self._runtime.result(
            finished=counts[Finish.STOP] + counts[Finish.LENGTH],
            failed=counts[Finish.ERROR],
            cancelled=counts[Finish.CANCELLED],
            waited=self._endings.num_waited,
            suspensions=self._scheduler.num_suspensions,
            retried_steps=tuple(self._culprits.elements()),
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._endings.cached_tokens,
            generated_tokens=self._landing.num_generated,
            elapsed_ms=self._serving_ns // 10**6,
            stages=self.stages,
        )

    def close(self) -> None:
        """Give the memory back; idempotent. Requests that still run end with it, and nobody is told.

        Raises ``UserError`` in the middle of a step: from a callback, or another thread.
        """
        with self._alone():
            self._is_closed = True
            self._flights.clear()
            self._runtime.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise UserError("This engine is closed", remedy="start another one")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
