"""The thread that owns the engine of an ``AsyncLLM``: jobs in, answers out to event loops."""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from tonnage.engine import calls
from tonnage.engine.calls import Ask, Desk
from tonnage.engine.core import Engine
from tonnage.engine.faults import release_frames
from tonnage.engine.options import EngineOptions
from tonnage.engine.startup import start
from tonnage.errors import TonnageError

#: Makes the exception that tells why there is no engine any more.
Why: TypeAlias = Callable[[], TonnageError]


class Inbox:
    """Where one waiting coroutine gets its answers: values, or an exception. ``put`` is for the other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> Any:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


@dataclass(frozen=True, slots=True)
class _Job:
    """Something to do between two steps; ``inbox`` hears if it fails. Without a ``run``: close."""

    run: Callable[[Desk], None] | None
    inbox: Inbox | None = None


class Worker:
    """The one thread that owns the engine. Jobs run in their order, all that are there before each step.

    started  the engine, or why there is none
    ended    done when the thread has given everything back, or why it could not
    """

    def __init__(self, options: EngineOptions) -> None:
        self.started: Future[Engine] = Future()
        self.ended: Future[None] = Future()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._waiting: dict[str, Inbox] = {}
        self._why_over: Why | None = None
        # No job gets into the queue once _why_over is set. Reentrant: a stream may be dropped while this is held.
        self._lock = threading.RLock()
        for future in (self.started, self.ended):
            future.set_running_or_notify_cancel()  # who waits for it may be cancelled, it may not
        self.thread = threading.Thread(target=self._run, args=(options,), name="tonnage engine", daemon=True)
        self.thread.start()
        # A thread that is inside a kernel when the interpreter goes takes the process with it (SIGABRT).
        atexit.register(_stop, weakref.ref(self))

    # -- called from any thread

    def post(self, run: Callable[[Desk], None] | None, inbox: Inbox | None = None) -> None:
        """Raises ``TonnageError`` once there is no engine any more."""
        with self._lock:
            if self._why_over is not None:
                raise self._why_over()
            self._jobs.put(_Job(run, inbox))

    def open(self, name: str, asks: Sequence[Ask], inbox: Inbox, *, deltas: bool) -> None:
        """``inbox`` gets a refusal, or in the end the list of outputs; and before it the deltas, if it wants them."""

        def done(call: calls.Call) -> None:
            self._waiting.pop(call.name)
            inbox.put(call.outputs())

        def run(desk: Desk) -> None:
            self._waiting[name] = inbox
            try:
                desk.open(name, asks, on_delta=inbox.put if deltas else None, on_done=done)
            except BaseException:
                self._waiting.pop(name, None)
                raise

        self.post(run, inbox)

    def cancel(self, name: str) -> None:
        def run(desk: Desk) -> None:
            self._waiting.pop(name, None)
            desk.cancel(name)

        with suppress(TonnageError):  # an engine that is gone has cancelled everything
            self.post(run)

    def close(self) -> None:
        with suppress(TonnageError):
            self.post(None)

    # -- the thread itself

    def _run(self, options: EngineOptions) -> None:
        try:
            engine = start(options)
        except BaseException as error:  # noqa: BLE001 - it goes to whoever starts us
            self.started.set_exception(error)
            self._end(_failed(error), None)
            return
        self.started.set_result(engine)
        why: Why = _closed
        try:
            self._serve(Desk(engine))
        except BaseException as error:  # noqa: BLE001 - it goes to everybody who waits
            release_frames(error)  # they hold tensors, and memory that is looked at cannot be given back
            why = _failed(error)
        fault: BaseException | None = None
        try:
            engine.close()
        except BaseException as error:  # noqa: BLE001 - it goes to whoever closes us
            fault = error
        self._end(why, fault)

    def _serve(self, desk: Desk) -> None:
        """Returns when it is told to close; raises what the engine raises."""
        while True:
            job = self._next_job(wait=not desk.can_step)
            if job is None:
                desk.step()
            elif job.run is None:
                return
            else:
                self._do(job.run, job.inbox, desk)

    def _next_job(self, *, wait: bool) -> _Job | None:
        try:
            return self._jobs.get(block=wait)
        except queue.Empty:
            return None

    def _do(self, run: Callable[[Desk], None], inbox: Inbox | None, desk: Desk) -> None:
        try:
            run(desk)
        except Exception as error:
            if inbox is None:
                raise
            inbox.put(error)

    def _end(self, why: Why, fault: BaseException | None) -> None:
        with self._lock:
            self._why_over = why
        left = list(self._waiting.values())
        while (job := self._next_job(wait=False)) is not None:
            left += [job.inbox] if job.inbox is not None else []
        for inbox in left:
            inbox.put(why())
        if fault is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(fault)


def _stop(dropped: weakref.ref[Worker]) -> None:
    """At the interpreter's end: the step at hand is finished, the memory given back."""
    worker = dropped()
    if worker is not None:
        worker.close()
        worker.thread.join()


def _closed() -> TonnageError:
    return calls.closed_error("AsyncLLM")


def _failed(error: BaseException) -> Why:
    """An exception of its own for everybody who waits: one that several tasks raise would collect their tracebacks."""

    def told() -> TonnageError:
        failure = TonnageError(f"The engine failed: {error or type(error).__name__}")
        failure.__cause__ = error
        return failure

    return told
