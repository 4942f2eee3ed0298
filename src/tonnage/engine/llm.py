"""The engine as a Python object: ``LLM`` generates, chats and streams inside one memory plan."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, Unpack

from tonnage.engine import calls
from tonnage.engine.calls import Ask, Call, Conversation, Desk, Output, Params, Prompt
from tonnage.engine.request import Delta, Progress
from tonnage.engine.settings import Options, engine_options
from tonnage.engine.sleep import Slept
from tonnage.engine.startup import start
from tonnage.ledger import Ledger
from tonnage.report import RunResult
from tonnage.sampling import SamplingParams
from tonnage.terms import MemoryPlan

#: Called during ``generate`` and ``chat`` after each step: samples that have ended, and samples in all.
OnProgress: TypeAlias = Callable[[int, int], None]


class LLM:
    """A model inside its memory plan. Not thread-safe: one thread uses it. Close it, or use it in a ``with`` block.

    ::

        with LLM("smollm2", memory="1GiB", max_seq_len=1024) as llm:
            print(llm.generate("The capital of France is")[0].text)

    ``model``: a folder, a .gguf file, ``smollm2``, or a hub id; for the rest see ``Options``. Raises ``UserError``
    for what the user can mend (``InvalidSetting``, ``DoesNotFit``, ``ModelNotFound`` ...), else ``StartupError``.
    """

    def __init__(self, model: str | Path, **options: Unpack[Options]) -> None:
        self._engine = start(engine_options(model, options))
        self._desk = Desk(self._engine)
        self._is_closed = False
        self._numbers = itertools.count(1)
        #: Names of streams that were dropped, ended or not: that may happen at any moment, in any thread.
        self._dropped: deque[str] = deque()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, on_progress: OnProgress | None = None
    ) -> list[Output]:
        """The outputs for one prompt or a list of them, in their order; a prompt is a text or token ids.

        ``params`` is one for all or a list with one for each. All prompts are checked before any is computed: raises
        ``RequestRefused`` (or ``InputError``) for the first that can never be served, with its index. A sample that
        fails later is reported in its output. An exception from outside, Ctrl-C too, cancels what was asked here.
        """
        return self._complete("generate", calls.ask_prompts(prompts, params), on_progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Output]:
        """The assistant's next turn of one conversation or of a list of them. Otherwise as ``generate``."""
        return self._complete("chat", calls.ask_conversations(messages, params), on_progress)

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Conversation | None = None,
    ) -> Stream:
        """An iterator over what each step adds to the text of a prompt, or of the answer to ``messages``.

        Several may be open at once: each ``next`` computes for all of them. Raises as ``generate`` does, at once, and
        ``InvalidSetting`` for ``params.n`` above 1.
        """
        ask = calls.ask_stream(prompt, params, messages)
        deltas: deque[Delta] = deque()
        desk, name = self._open_desk(), f"stream-{next(self._numbers)}"
        try:
            return Stream(self, desk.open(name, [ask], on_delta=deltas.append), deltas)
        except BaseException:
            desk.cancel(name)
            raise

    @property
    def plan(self) -> MemoryPlan:
        return self._engine.plan

    @property
    def ledger(self) -> Ledger:
        """Who holds what, live."""
        return self._engine.ledger

    def progress(self) -> Progress:
        return self._open_desk().engine.progress()

    def result(self) -> RunResult:
        """What has happened since start-up, with plan and ledger."""
        return self._open_desk().engine.result()

    def sleep(self, *tags: str) -> Slept:
        """Give memory back and keep what is open, as ``Engine.sleep``: "weights", "kv", "graphs", or all of them.

        What is asked meanwhile raises ``UserError`` when it would have to compute.
        """
        return self._open_desk().engine.sleep(*tags)

    def wake(self, *tags: str) -> None:
        """Have it back. Raises ``CannotMaterialize`` where the device lacks the memory now: call it again later."""
        self._open_desk().engine.wake(*tags)

    def close(self) -> None:
        """Cancel what is open and give the memory back; idempotent."""
        self._is_closed = True
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self, verb: str, asks: Sequence[Ask], on_progress: OnProgress | None) -> list[Output]:
        desk, name = self._open_desk(), f"{verb}-{next(self._numbers)}"
        try:
            call = desk.open(name, asks)
            num_samples = call.num_left
            while not call.is_done:
                self._step()
                if on_progress is not None:
                    on_progress(num_samples - call.num_left, num_samples)
        except BaseException:
            desk.cancel(name)
            raise
        return call.outputs()

    def _step(self) -> None:
        desk = self._open_desk()
        assert desk.has_work, "something is open and the engine is idle"
        desk.step()

    def _open_desk(self) -> Desk:
        if self._is_closed:
            raise calls.closed_error("LLM")
        while self._dropped:
            self._desk.cancel(self._dropped[0])  # forgotten only once it is done: an interrupt may come between
            self._dropped.popleft()
        return self._desk


class Stream(Iterator[Delta]):
    """What ``LLM.stream`` returns. Closing it early, or dropping it, cancels the request and gives its memory back.

    ``output`` is there once the stream has ended by itself. Raises ``TonnageError`` if the request fails on the way.
    """

    _is_made = False  # an interrupt may leave half of one behind, and __del__ comes to that too

    def __init__(self, llm: LLM, call: Call, deltas: deque[Delta]) -> None:
        self._llm, self._call, self._deltas = llm, call, deltas
        self._is_over = False
        self.output: Output | None = None
        self._is_made = True

    def __next__(self) -> Delta:
        if self._is_over:
            raise StopIteration
        while not self._deltas and not self._call.is_done:
            self._llm._step()
        if self._deltas:
            return self._deltas.popleft()
        (self.output,) = self._call.outputs()
        self._is_over = True
        calls.raise_if_failed(self.output)
        raise StopIteration

    def close(self) -> None:
        """Idempotent; does nothing once the stream has ended."""
        self._is_over = True
        self._llm._desk.cancel(self._call.name)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_made:  # nothing more is asked here: an interrupt in a __del__ is swallowed
            self._llm._dropped.append(self._call.name)
