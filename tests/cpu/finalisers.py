"""A finaliser at every place where the collector may run one: between any two bytecodes of a file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

Step = Callable[[], object]


def at_every_step(file_name: str, scenario: Callable[[], tuple[Step, Step, Step]]) -> int:
    """For each bytecode that runs in files of this name: make a scenario anew, do its first step, which the second
    (the finaliser) interrupts there, then its third, which checks; at last with the finaliser after the first. Returns
    how many bytecodes there were.
    """
    for number in count():
        work, finaliser, check = scenario()
        is_interrupted: list[bool] = []
        within_seconds(lambda: is_interrupted.append(_interrupted(file_name, number, work, finaliser)))  # noqa: B023
        if not is_interrupted[0]:
            finaliser()
        check()
        if not is_interrupted[0]:
            return number
    raise AssertionError


def within_seconds(call: Step) -> None:
    """In a thread, so that a call that never ends fails the test and does not hang it. Raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for itself"
    if raised:
        raise raised[0]


def _interrupted(file_name: str, number: int, work: Step, finaliser: Step) -> bool:
    """Whether there was a bytecode of this number."""
    left = number

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(file_name):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                sys.settrace(None)
                finaliser()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left < 0
