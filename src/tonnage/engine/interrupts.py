"""Ctrl-C between consistent states only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """An interrupt that arrives inside waits for the end of the block and then goes where it would have gone.

    Queues, blocks and slots change in several places for one request; a ``KeyboardInterrupt`` between two of them
    would leave it half moved. Outside the main thread, which no signal reaches, nothing is done.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        for one in caught:  # a second Ctrl-C may mean more than the first
            previous(*one)
