"""Ctrl-C and SIGTERM while requests are served: the first is noted, so that no result is lost between two writes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: A process ended by signal n exits with this much more, as shells tell it.
SIGNAL_EXIT = 128


@dataclass(slots=True)
class Stop:
    """``number`` of the signal that asked to stop; 0 while none did."""

    number: int = 0
    leaving: bool = False

    @property
    def exit_code(self) -> int:
        return SIGNAL_EXIT + self.number

    def __bool__(self) -> bool:
        return bool(self.number)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The handler. Raises ``KeyboardInterrupt`` from the second signal on."""
        if self.number and not self.leaving:
            raise KeyboardInterrupt
        self.number = self.number or number


@contextmanager
def noted_interrupts() -> Iterator[Stop]:
    """Inside, the first SIGINT or SIGTERM sets the ``Stop`` and nothing else. The handlers from before come back.

    A signal that was ignored stays so, as does one whose handler is not Python's to put back. Outside the main
    thread, which no signal reaches, nothing is done.
    """
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS if _is_main_thread()}
    ours = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in ours:
            signal.signal(number, stop.note)
        yield stop
    finally:
        stop.leaving = True  # a signal between two of the next lines must not keep the others from running
        for number, handler in ours.items():
            signal.signal(number, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
