"""``AsyncLLM``: many coroutines, one engine on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, Unpack

from tonnage.engine import calls
from tonnage.engine.calls import Ask, Conversation, Desk, Output, Params, Prompt
from tonnage.engine.core import Engine
from tonnage.engine.options import EngineOptions
from tonnage.engine.request import Delta, Progress
from tonnage.engine.settings import Options, engine_options
from tonnage.engine.startup import start
from tonnage.errors import TonnageError, UserError
from tonnage.ledger import Ledger
from tonnage.report import RunResult
from tonnage.sampling import SamplingParams
from tonnage.terms import MemoryPlan


class AsyncLLM:
    """``LLM`` for asyncio: any number of calls and streams at once, computed together. Options as for ``LLM``.

    ::

        async with AsyncLLM("smollm2", memory="1GiB", max_seq_len=1024) as llm:
            async for delta in llm.stream("The capital of France is"):
                print(delta.text, end="")

    The engine, its start-up included, runs on one thread that belongs to it; methods may be called from any event
    loop. Cancelling a task cancels what it asked for. If the engine fails, everybody who waits hears why.
    """

    def __init__(self, model: str | Path, **options: Unpack[Options]) -> None:
        """Raises ``InvalidSetting``; nothing is started yet."""
        self._options = engine_options(model, options)
        self._worker: _Worker | None = None
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """What ``async with`` does first. Raises ``UserError`` or ``StartupError``, as ``LLM`` does."""
        if self._worker is not None:
            raise UserError("This AsyncLLM was started before", remedy="make another one")
        self._worker = _Worker(self._options)
        try:
            await asyncio.wrap_future(self._worker.started)
        except asyncio.CancelledError:
            self._worker.close()  # once it is up: start-up cannot be interrupted
            raise

    async def close(self) -> None:
        """Cancel everything, give the memory back and end the thread; idempotent. Whoever still waits is told."""
        if self._worker is not None:
            self._worker.close()
            await asyncio.wrap_future(self._worker.ended)
            self._worker.thread.join()  # it has nothing left to do

    async def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Output]:
        """As ``LLM.generate``."""
        return await self._complete("generate", calls.ask_prompts(prompts, params))

    async def chat(self, messages: Conversation | Sequence[Conversation], params: Params = None) -> list[Output]:
        """As ``LLM.chat``."""
        return await self._complete("chat", calls.ask_conversations(messages, params))

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Conversation | None = None,
    ) -> AsyncStream:
        """An asynchronous iterator over what each step adds to the text; it is asked for at once, not at first use.

        Raises as ``LLM.stream`` does: ``InputError`` and ``InvalidSetting`` here, ``RequestRefused`` from the iterator.
        """
        name = f"stream-{next(self._numbers)}"
        inbox, worker = _Inbox(), self._running()
        worker.open(name, [calls.ask_stream(prompt, params, messages)], inbox, deltas=True)
        return AsyncStream(worker, name, inbox)

    @property
    def plan(self) -> MemoryPlan:
        return self._engine().plan

    @property
    def ledger(self) -> Ledger:
        """Who holds what, live; it may be read from any thread."""
        return self._engine().ledger

    async def progress(self) -> Progress:
        progress: Progress = await self._read(Engine.progress)
        return progress

    async def result(self) -> RunResult:
        """What has happened since start-up, with plan and ledger."""
        result: RunResult = await self._read(Engine.result)
        return result

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _complete(self, verb: str, asks: Sequence[Ask]) -> list[Output]:
        name = f"{verb}-{next(self._numbers)}"
        inbox, worker = _Inbox(), self._running()
        worker.open(name, asks, inbox, deltas=False)
        try:
            outputs: list[Output] = await inbox.get()
        except asyncio.CancelledError:
            worker.cancel(name)
            raise
        return outputs

    async def _read(self, read: Callable[[Engine], Any]) -> Any:
        inbox = _Inbox()
        self._running().post(lambda desk: inbox.put(read(desk.engine)), inbox)
        return await inbox.get()

    def _running(self) -> _Worker:
        if self._worker is None:
            raise UserError("This AsyncLLM is not started", remedy="use it in an async with block, or await start()")
        return self._worker

    def _engine(self) -> Engine:
        return self._running().started.result(timeout=0)


class AsyncStream(AsyncIterator[Delta]):
    """What ``AsyncLLM.stream`` returns. Closing or dropping it early cancels the request, and so does cancelling the
    task that waits for it.

    ``output`` is there once the stream has ended by itself. Raises ``TonnageError`` if the request fails on the way.
    """

    def __init__(self, worker: _Worker, name: str, inbox: _Inbox) -> None:
        self._worker, self._name, self._inbox = worker, name, inbox
        self._is_over = False
        self.output: Output | None = None

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        try:
            item = await self._inbox.get()
        except BaseException:
            self._cancel()
            raise
        if isinstance(item, Delta):
            return item
        self._is_over = True
        (self.output,) = item
        calls.raise_if_failed(self.output)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Idempotent; does nothing once the stream has ended."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._worker.cancel(self._name)


# -- the thread --------------------------------------------------------------------------------------------------


class _Inbox:
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
    inbox: _Inbox | None = None


Why: TypeAlias = Callable[[], TonnageError]


class _Worker:
    """The one thread that owns the engine. Jobs run in their order, all that are there before each step.

    started  the engine, or why there is none
    ended    done when the thread has given everything back, or why it could not
    """

    def __init__(self, options: EngineOptions) -> None:
        self.started: Future[Engine] = Future()
        self.ended: Future[None] = Future()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._waiting: dict[str, _Inbox] = {}
        self._why_over: Why | None = None
        # No job gets into the queue once _why_over is set. Reentrant: a stream may be dropped while this is held.
        self._lock = threading.RLock()
        for future in (self.started, self.ended):
            future.set_running_or_notify_cancel()  # who waits for it may be cancelled, it may not
        self.thread = threading.Thread(target=self._run, args=(options,), name="tonnage engine", daemon=True)
        self.thread.start()

    # -- called from any thread

    def post(self, run: Callable[[Desk], None] | None, inbox: _Inbox | None = None) -> None:
        """Raises ``TonnageError`` once there is no engine any more."""
        with self._lock:
            if self._why_over is not None:
                raise self._why_over()
            self._jobs.put(_Job(run, inbox))

    def open(self, name: str, asks: Sequence[Ask], inbox: _Inbox, *, deltas: bool) -> None:
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
            job = self._next_job(wait=not desk.has_work)
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

    def _do(self, run: Callable[[Desk], None], inbox: _Inbox | None, desk: Desk) -> None:
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


def _closed() -> TonnageError:
    return calls.closed_error("AsyncLLM")


def _failed(error: BaseException) -> Why:
    """An exception of its own for everybody who waits: one that several tasks raise would collect their tracebacks."""

    def told() -> TonnageError:
        failure = TonnageError(f"The engine failed: {error or type(error).__name__}")
        failure.__cause__ = error
        return failure

    return told
