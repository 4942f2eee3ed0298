"""``AsyncLLM``: many coroutines, one engine on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from tonnage.engine import calls
from tonnage.engine.calls import Ask, Conversation, Output, Params, Prompt
from tonnage.engine.core import Engine
from tonnage.engine.request import Delta, Progress
from tonnage.engine.settings import Options, engine_options
from tonnage.engine.sleep import Slept
from tonnage.engine.worker import Inbox, Worker
from tonnage.errors import UserError
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
    loop. Cancelling a task, or dropping a coroutine, cancels what it asked for. If the engine fails, everybody who
    waits hears why.
    """

    def __init__(self, model: str | Path, **options: Unpack[Options]) -> None:
        """Raises ``InvalidSetting``; nothing is started yet."""
        self._options = engine_options(model, options)
        self._worker: Worker | None = None
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """What ``async with`` does first. Raises ``UserError`` or ``StartupError``, as ``LLM`` does."""
        if self._worker is not None:
            raise UserError("This AsyncLLM was started before", remedy="make another one")
        self._worker = Worker(self._options)
        try:
            await asyncio.wrap_future(self._worker.started)
        except BaseException:
            self._worker.close()  # once it is up: start-up cannot be interrupted
            raise

    async def close(self) -> None:
        """Cancel everything, give the memory back and end the thread; idempotent. Whoever still waits is told."""
        if self._worker is not None:
            self._worker.close()
            try:
                await asyncio.wrap_future(self._worker.ended)
            finally:
                if self._worker.ended.done():
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
        inbox, worker = Inbox(), self._running()
        ask, stream = calls.ask_stream(prompt, params, messages), AsyncStream(worker, name, inbox)
        worker.open(name, [ask], inbox, deltas=True)  # the stream is there first: whoever loses it cancels the request
        return stream

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

    async def sleep(self, *tags: str) -> Slept:
        """As ``LLM.sleep``; what is open, and what is asked meanwhile, waits until ``wake``."""
        slept: Slept = await self._read(lambda engine: engine.sleep(*tags))
        return slept

    async def wake(self, *tags: str) -> None:
        """As ``LLM.wake``."""
        await self._read(lambda engine: engine.wake(*tags))

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _complete(self, verb: str, asks: Sequence[Ask]) -> list[Output]:
        name = f"{verb}-{next(self._numbers)}"
        inbox, worker = Inbox(), self._running()
        try:
            worker.open(name, asks, inbox, deltas=False)
            outputs: list[Output] = await inbox.get()
        except BaseException:  # cancelled, interrupted, or closed as a coroutine that nobody awaits any more
            worker.cancel(name)
            raise
        return outputs

    async def _read(self, read: Callable[[Engine], Any]) -> Any:
        inbox = Inbox()
        self._running().post(lambda desk: inbox.put(read(desk.engine)), inbox)
        return await inbox.get()

    def _running(self) -> Worker:
        if self._worker is None or not self._worker.started.done():
            raise UserError("This AsyncLLM is not started", remedy="use it in an async with block, or await start()")
        return self._worker

    def _engine(self) -> Engine:
        return self._running().started.result()


class AsyncStream(AsyncIterator[Delta]):
    """What ``AsyncLLM.stream`` returns. Closing or dropping it early cancels the request, and so does cancelling the
    task that waits for it.

    ``output`` is there once the stream has ended by itself. Raises ``TonnageError`` if the request fails on the way.
    """

    _is_over = True  # until it is made: an interrupt may leave half of one to __del__

    def __init__(self, worker: Worker, name: str, inbox: Inbox) -> None:
        self._worker, self._name, self._inbox = worker, name, inbox
        self.output: Output | None = None
        self._is_over = False

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
