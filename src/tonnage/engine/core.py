"""The engine once it is built: requests in, tokens out, every step a transaction."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from tonnage.engine.endings import Endings
from tonnage.engine.events import Event, EventKind, OnEvent, event_of
from tonnage.engine.interrupts import deferred_interrupts
from tonnage.engine.refusals import refuse_impossible
from tonnage.engine.request import Completion, Finish, OnDelta, Progress, Request, prompt_ids
from tonnage.engine.runtime import Runtime
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.sleep import Sleeper, Slept
from tonnage.engine.steps import Steps
from tonnage.engine.text import Message, Text
from tonnage.errors import InputError, RequestRefused, UserError
from tonnage.report import RunResult, StageRecord
from tonnage.resources.cache_events import OnEvents
from tonnage.resources.gate import Gate
from tonnage.resources.pins import PinHandle
from tonnage.sampling import SamplingParams
from tonnage.terms import MemoryPlan

#: Time between two looks at the process's memory, which also make the heap give back what it keeps: a few milliseconds.
SETTLE_EVERY_NS = 500 * 10**6


class Engine:
    """A model inside its memory plan. Not thread-safe: one thread submits, steps and cancels.

    Use as a context manager, or call ``close``. ``plan``, ``ledger``, ``watch``, ``stages`` and ``text`` may be read at
    any time.
    ``observe``, if set, hears every ``Event``; it must not call back into the engine.
    """

    def __init__(self, runtime: Runtime, text: Text, stages: Sequence[StageRecord]) -> None:
        self.plan: MemoryPlan = runtime.plan
        self.ledger = runtime.ledger
        self.watch = runtime.watch
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
        self._ids: set[str] = set()
        self._endings = Endings(self._scheduler, text, runtime.managers.admission, self._event)
        self._steps = Steps(runtime, self._scheduler, self._endings, self._observe)
        self._sleeper = Sleeper(runtime, self._scheduler)
        self._prompt_tokens = 0
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
        is_busy = self._steps.flights or scheduler.num_running or scheduler.num_waiting
        return bool(is_busy or endings.done or endings.completions) and not self._is_closed

    def step(self) -> list[Completion]:
        """One forward over whatever is due, or a wait for a load; returns the requests that ended since the last call.

        On a card the forward is launched and the one before it looked at, so that the device never waits for the host:
        tokens come a call later than they are asked for.
        A step that runs out of memory is rolled back and tried once more, smaller, and counted as a defect. Any other
        failure, or a second one, fails the requests of that step, and the engine goes on.
        ``KeyboardInterrupt`` comes after the step; what it finished is then returned by the next call.
        Raises ``UserError`` if another thread is in a step, or this one is, and while weights or KV sleep, but for
        requests that have ended: those are told.
        """
        self._require_open()
        if self.is_asleep:
            return self._ended_asleep()
        began = time.monotonic_ns()
        with deferred_interrupts(), self._alone(), self._runtime.active():
            try:
                self.ledger.step(self._steps.num_steps)
                self._steps.step()
                self._settle_now_and_then()
                self._cache.events.flush()
            finally:
                self._serving_ns += time.monotonic_ns() - began
            self._endings.complete_all()
        return self._told()

    def _ended_asleep(self) -> list[Completion]:
        """Of those that had ended before, or were cancelled. Raises ``UserError`` if there are none."""
        with deferred_interrupts(), self._alone():
            self._endings.complete_all()
        if not self._endings.completions:
            self._sleeper.require_awake()
        return self._told()

    def _told(self) -> list[Completion]:
        done = self._endings.completions
        self._ids.difference_update(one.request_id for one in done)
        # On one line: an interrupt comes before it and they stay for the next call, or after it and they are told.
        return (done.copy(), done.clear())[0]  # type: ignore[func-returns-value]

    def _settle_now_and_then(self) -> None:
        if time.monotonic_ns() - self._settled_ns > SETTLE_EVERY_NS:
            self._runtime.settle("serving")
            self._settled_ns = time.monotonic_ns()

    # -- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, *tags: str) -> Slept:
        """Give memory back and keep every request: ``weights``, ``kv``, ``graphs``, or without tags all of them; see
        ``engine.sleep``. Requests may be submitted and cancelled meanwhile, and wait.

        Raises ``InvalidSetting`` for an unknown tag, and ``UserError``, with nothing changed, while pins are open or
        where the device has no virtual memory.
        """
        self._require_open()
        with deferred_interrupts(), self._alone():
            with self._runtime.active():
                self._steps.land_all()
            with self._runtime.aside():
                slept = self._sleeper.sleep(tags)
            self._cache.events.flush()
        return slept

    def wake(self, *tags: str) -> None:
        """Have it back, all or by tags: weights, then KV, then graphs, as somebody needs room in between.

        Raises ``CannotMaterialize`` where the device lacks the memory now: nothing has changed, call it again; and
        ``UserError`` where graphs find none: they sleep on, and steps run without.
        """
        self._require_open()
        with deferred_interrupts(), self._alone():
            self._sleeper.wake(tags)

    @property
    def asleep(self) -> frozenset[str]:
        """The tags that sleep now."""
        return self._sleeper.asleep

    @property
    def has_ended(self) -> bool:
        """Whether ``step`` has somebody's end to tell, asleep or not."""
        return bool(self._endings.done or self._endings.completions)

    @property
    def is_asleep(self) -> bool:
        """Whether something sleeps without which no step runs."""
        return self._sleeper.is_asleep

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

    # -- what is going on ----------------------------------------------------------------------------------------

    def _event(self, kind: EventKind, request: Request) -> None:
        self._observe(lambda: [event_of(kind, request, step=self._steps.num_steps)])

    def _observe(self, events: Callable[[], Iterable[Event]]) -> None:
        """A listener that raises is dropped: it must not take requests with it."""
        if self.observe is None:
            return
        try:
            for event in events():
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
            generated_tokens=self._steps.num_generated,
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
            retried_steps=tuple(self._steps.culprits.elements()),
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._endings.cached_tokens,
            generated_tokens=self._steps.num_generated,
            elapsed_ms=self._serving_ns // 10**6,
            stages=self.stages,
        )

    def close(self) -> None:
        """Give the memory back; idempotent. Requests that still run end with it, and nobody is told.

        Raises ``UserError`` in the middle of a step: from a callback, or another thread.
        """
        with self._alone():
            self._is_closed = True
            self._steps.flights.clear()
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
