"""The loop of ``tonnage run``: requests in, steps, results out as they end, so that an interruption loses nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tonnage.cli.asks import Ask, Asks, Failure
from tonnage.cli.display import Display
from tonnage.cli.interrupt import noted_interrupts
from tonnage.errors import InputError, UserError

if TYPE_CHECKING:
    from tonnage.engine import Completion, Engine
    from tonnage.report import RunResult

OnToken = Callable[[str, int, str], None]

#: Completions kept to be shown at the end, where the requests came from a file.
NUM_SHOWN = 3


class ResultLines:
    """Results as JSON lines, each flushed when its request ends. The file is made with the first of them."""

    def __init__(self, path: str | None, *, force: bool) -> None:
        self.path, self._force = path, force
        self._out: IO[str] | None = sys.stdout if path == "-" else None
        #: Every result, where no file keeps them: ``--json`` then shows them.
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        if self.path is None:
            self.records.append(record)
            return
        if self._out is None:
            self._out = self._open(Path(self.path))
        try:
            self._out.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as fault:
            with suppress(OSError):  # closing tries to write once more
                self._out.close()
            self._out = None
            raise InputError(
                f"--output {self.path} cannot be written: {fault.strerror}",
                knob="--output",
                remedy="free some space or give another file; the lines already there are whole",
            ) from None

    def close(self) -> None:
        if self._out is not None and self._out is not sys.stdout:
            self._out.close()

    def _open(self, path: Path) -> IO[str]:
        try:
            # A lone surrogate in an id becomes \\udXXX, which is what JSON calls it.
            return path.open("w" if self._force else "x", encoding="utf-8", errors="backslashreplace", newline="\n")
        except OSError as fault:
            raise InputError(f"--output {path} cannot be written: {fault.strerror}", knob="--output") from None


@dataclass(slots=True)
class Tally:
    """What has become of the requests so far. ``stopped_by``: the signal that ended the run early, 0 for none."""

    finished: int = 0
    cancelled: int = 0
    waited: int = 0
    failures: list[Failure] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    stopped_by: int = 0

    @property
    def done(self) -> int:
        return self.finished + len(self.failures)

    def counted_into(self, result: RunResult) -> RunResult:
        """The engine's result with our counts: broken lines and refused requests never reached the engine."""
        return replace(
            result,
            finished=self.finished,
            failed=len(self.failures),
            cancelled=self.cancelled,
            waited=self.waited,
        )


class Serving:
    """Serves ``asks`` on ``engine``, step by step. ``tally`` and the result lines are right at every moment."""

    def __init__(self, engine: Engine, asks: Asks, *, results: ResultLines, display: Display) -> None:
        self._engine, self._asks, self._results, self._display = engine, asks, results, display
        self._open: dict[str, Ask] = {}
        self._to_show = {ask.id for ask in (asks.asks if asks.typed else asks.asks[:NUM_SHOWN])}
        self.tally = Tally()

    def run(self, *, max_tokens: int | None, chat: bool, on_token: OnToken | None) -> None:
        """Serve everything. An interrupt lets the step end, cancels what is left and returns.

        What had finished stays written. Raises ``KeyboardInterrupt`` for a second one.
        """
        self._display.begin(self._asks.total)
        with noted_interrupts() as stop:
            for failure in self._asks.failures:
                self._fail(failure)
            for ask in self._asks.asks:
                if stop:
                    break
                self._submit(ask, max_tokens=ask.max_tokens or max_tokens, chat=chat, on_token=on_token)
            while self._engine.has_work and not stop:
                self._step()
            if stop:
                self._cancel_rest()
        # read outside, where every signal that was noted has arrived
        self.tally.stopped_by = stop.number

    def _submit(self, ask: Ask, *, max_tokens: int | None, chat: bool, on_token: OnToken | None) -> None:
        prompt, messages = ask.prompt, ask.messages
        if chat and prompt is not None:
            messages, prompt = [{"role": "user", "content": prompt}], None
        # before it is submitted: whatever comes back from the engine is then known here
        self._open[ask.id] = ask
        try:
            request = self._engine.request(
                ask.id, prompt=prompt, messages=messages, max_tokens=max_tokens, on_token=on_token
            )
            self._engine.submit(request)
        except UserError as refused:
            del self._open[ask.id]
            self._fail(Failure(where=ask.where, id=ask.id, why=str(refused)))

    def _step(self) -> None:
        for completion in self._engine.step():
            self._take(completion)
        self._display.step(self._engine.progress(), done=self.tally.done)

    def _take(self, completion: Completion) -> None:
        ask = self._open.pop(completion.request_id)
        self.tally.waited += completion.waited
        if completion.finish_reason == "cancelled":
            self.tally.cancelled += 1
        elif completion.finish_reason == "error":
            self._fail(Failure(where=ask.where, id=ask.id, why=completion.error or "the engine gave no reason"))
        else:
            self._finish(completion)

    def _finish(self, completion: Completion) -> None:
        self._results.write(
            {
                "id": completion.request_id,
                "text": completion.text,
                "finish_reason": str(completion.finish_reason),
                "num_prompt_tokens": completion.num_prompt_tokens,
                "num_generated_tokens": len(completion.token_ids),
                "waited": completion.waited,
            }
        )
        # counted once it is kept
        self.tally.finished += 1
        if completion.request_id in self._to_show:
            self.tally.shown[completion.request_id] = completion.text

    def _fail(self, failure: Failure) -> None:
        self.tally.failures.append(failure)
        self._results.write({"id": failure.id, "where": failure.where, "error": failure.why})

    def _cancel_rest(self) -> None:
        """Give everything back. One more step hands over what had ended when the interrupt came."""
        for request_id in self._open:
            self._engine.cancel(request_id)
        for completion in self._engine.step():
            self._take(completion)
        self.tally.cancelled += len(self._open)
        never_submitted = self._asks.total - self.tally.done - self.tally.cancelled
        self.tally.cancelled += never_submitted
