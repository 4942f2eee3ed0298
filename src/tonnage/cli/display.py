"""How a run is watched, on stderr: a bar on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tonnage.engine import Progress

#: Seconds between two plain lines.
PLAIN_SECONDS = 5.0


class Display(Protocol):
    """Told of every stage of start-up, then of every step. ``total``: requests that will come; None: nobody knows."""

    def stage(self, name: str) -> None: ...
    def begin(self, total: int | None) -> None: ...
    def step(self, progress: Progress, *, done: int) -> None: ...
    def close(self) -> None: ...


def make_display(stream: IO[str]) -> Display:
    return Bar(stream) if stream.isatty() else PlainLines(stream)


class Rate:
    """Generated tokens per second since ``begin``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()

    def text(self, generated_tokens: int) -> str:
        seconds = self._clock() - self._began
        return f"{generated_tokens / seconds:.1f} tokens/s" if seconds > 0 else "– tokens/s"


def kv_text(progress: Progress) -> str:
    """The part of the KV cache in use, in whole percent."""
    percent = 100 * progress.kv_used_tokens // max(1, progress.kv_total_tokens)
    return f"KV {'<1' if progress.kv_used_tokens and not percent else percent} % in use"


def of_total(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done}/{total}"


class PlainLines:
    """One line a stage, then one every few seconds. ``clock`` counts seconds."""

    def __init__(self, stream: IO[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._total: int | None = None
        self._next = 0.0
        self._rate = Rate(clock)

    def stage(self, name: str) -> None:
        self._print(f"start-up: {name}")

    def begin(self, total: int | None) -> None:
        self._total, self._next = total, self._clock() + PLAIN_SECONDS
        self._rate = Rate(self._clock)

    def step(self, progress: Progress, *, done: int) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + PLAIN_SECONDS
        self._print(
            f"{of_total(done, self._total)} requests done, "
            f"{progress.num_running} running, {progress.num_waiting} waiting, "
            f"{kv_text(progress)}, {self._rate.text(progress.generated_tokens)}"
        )

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar:
    """A bar that disappears when the run is over."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[told]}")]
        self._bar: Any = Progress(*columns, console=Console(file=stream, markup=False), transient=True)
        self._task = self._bar.add_task("start-up", total=None, told="")
        self._rate = Rate()
        self._total: int | None = None
        self._bar.start()

    def stage(self, name: str) -> None:
        self._bar.update(self._task, told=name)

    def begin(self, total: int | None) -> None:
        self._rate, self._total = Rate(), total
        self._bar.reset(self._task, description=f"{of_total(0, total)} requests", total=total, told="")

    def step(self, progress: Progress, *, done: int) -> None:
        told = f"{self._rate.text(progress.generated_tokens)}  {kv_text(progress)}  {progress.num_waiting} waiting"
        self._bar.update(self._task, completed=done, description=f"{of_total(done, self._total)} requests", told=told)

    def close(self) -> None:
        self._bar.stop()
