"""The loop of ``tonnage run``: requests in, steps, results out as they end, so that an interruption loses nothing."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tonnage.cli.asks import Ask, Asks, Failure
from tonnage.cli.display import Display
from tonnage.cli.interrupt import noted_interrupts
from tonnage.cli.records import record_of
from tonnage.errors import InputError, UserError
from tonnage.files import to_write, why

if TYPE_CHECKING:
    from tonnage.engine import Completion, Engine
    from tonnage.engine.request import OnDelta
    from tonnage.report import RunResult

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
            told = f"--output {path} cannot be written: {why(fault)}"
            raise InputError(told, knob="--output", value=str(path), remedy=to_write(fault)) from None


@dataclass(slots=True)
class Tally:
    """What has become of the requests so far. ``stopped_by``: the signal that ended the run early, 0 for none.

    ``shown`` holds the texts of a request's samples.
    """

    finished: int = 0
    cancelled: int = 0
    waited: int = 0
    failures: list[Failure] = field(default_factory=list)
    shown: dict[str, list[str]] = field(default_factory=dict)
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


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask whose samples the engine has; ``ended`` holds a completion for each that is done, by its number."""

    ask: Ask
    ended: dict[int, Completion] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.ended) == self.ask.params.n

    def completions(self) -> list[Completion]:
        return [self.ended[number] for number in sorted(self.ended)]


class Serving:
    """Serves ``asks`` on ``engine``, step by step. ``tally`` and the result lines are right at every moment."""

    def __init__(self, engine: Engine, asks: Asks, *, results: ResultLines, display: Display) -> None:
        self._engine, self._asks, self._results, self._display = engine, asks, results, display
        self._open: dict[str, tuple[_Pending, int]] = {}  # by the engine's request id: whose sample, and which
        self._taken = {ask.id for ask in asks.asks}
        self._to_show = {ask.id for ask in (asks.asks if asks.typed else asks.asks[:NUM_SHOWN])}
        self.tally = Tally()

    def run(self, *, chat: bool, on_delta: OnDelta | None) -> None:
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
                self._submit(ask, chat=chat, on_delta=on_delta)
            while self._engine.has_work and not stop:
                self._step()
            if stop:
                self._cancel_rest()
        # read outside, where every signal that was noted has arrived
        self.tally.stopped_by = stop.number

    def _submit(self, ask: Ask, *, chat: bool, on_delta: OnDelta | None) -> None:
        prompt, messages = ask.prompt, ask.messages
        if chat and prompt is not None:
            messages, prompt = [{"role": "user", "content": prompt}], None
        pending = _Pending(ask)
        names = [self._name(ask, number) for number in range(ask.params.n)]
        # before they are submitted: whatever comes back from the engine is then known here
        self._open |= {name: (pending, number) for number, name in enumerate(names)}
        try:
            for request in [
                self._engine.request(name, params, prompt=prompt, messages=messages, on_delta=on_delta)
                for name, params in zip(names, ask.params.samples(), strict=True)
            ]:
                self._engine.submit(request)
        except UserError as refused:
            for name in names:
                del self._open[name]
            self._fail(Failure(where=ask.where, id=ask.id, why=str(refused)))

    def _name(self, ask: Ask, number: int) -> str:
        """What the engine calls a sample: the first as the ask, so that refusals speak of it; the others as nobody."""
        name = ask.id if number == 0 else f"{ask.id}, sample {number + 1}"
        while number and name in self._taken:
            name += "'"
        self._taken.add(name)
        return name

    def _step(self) -> None:
        for completion in self._engine.step():
            self._take(completion)
        self._display.step(self._engine.progress(), done=self.tally.done)

    def _take(self, completion: Completion) -> None:
        pending, number = self._open.pop(completion.request_id)
        pending.ended[number] = completion
        if pending.is_complete:
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        """Every sample has ended: one line, one count. A failed sample fails the request, a cancelled one ends it."""
        ask, completions = pending.ask, pending.completions()
        reasons = {str(completion.finish_reason) for completion in completions}
        self.tally.waited += any(completion.waited for completion in completions)
        if "error" in reasons:
            self._fail(Failure(where=ask.where, id=ask.id, why=_why(completions)), record_of(ask, completions))
            return
        if reasons != {"cancelled"}:
            self._results.write(record_of(ask, completions))
        if "cancelled" in reasons:
            self.tally.cancelled += 1
            return
        # counted once it is kept
        self.tally.finished += 1
        if ask.id in self._to_show:
            self.tally.shown[ask.id] = [completion.text for completion in completions]

    def _fail(self, failure: Failure, record: dict[str, Any] | None = None) -> None:
        self.tally.failures.append(failure)
        told = {"id": failure.id, "where": failure.where, "error": failure.why}
        self._results.write(told | {"samples": record["samples"]} if record and "samples" in record else told)

    def _cancel_rest(self) -> None:
        """Give everything back. One more step hands over what had ended when the interrupt came."""
        for request_id in self._open:
            self._engine.cancel(request_id)
        for completion in self._engine.step():
            self._take(completion)
        self.tally.cancelled += len({id(pending) for pending, _ in self._open.values()})
        never_submitted = self._asks.total - self.tally.done - self.tally.cancelled
        self.tally.cancelled += never_submitted


def _why(completions: list[Completion]) -> str:
    """The first failed sample's reason."""
    number, failed = next((n, each) for n, each in enumerate(completions, 1) if each.finish_reason == "error")
    why = failed.error or "the engine gave no reason"
    return why if len(completions) == 1 else f"sample {number}: {why}"
