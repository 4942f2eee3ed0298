"""Who gives memory back when a device has none left, and in which order they are asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

_log = logging.getLogger(__name__)

#: Called with the bytes that are wanted; returns the bytes it gave back to the device.
Giver: TypeAlias = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Relief:
    """What asking around brought: bytes given back, and one phrase for each that was asked."""

    given_bytes: int = 0
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    priority: int
    number: int
    name: str = field(compare=False)
    give: Giver = field(compare=False)


class Pressure:
    """Callbacks by priority, the smallest asked first: caches before anything that costs work to rebuild.

    A callback may run on any thread that allocates and on several at once, and it must not wait for another thread
    that allocates. An allocation inside one that fails asks nobody again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # finalisers take themselves off the list
        self._entries: dict[int, _Entry] = {}
        self._numbers = count(1)
        self._here = threading.local()

    def register(self, name: str, give: Giver, *, priority: int = 0) -> Callable[[], None]:
        """Ask ``give`` when memory runs out; ``name`` is how errors call it. Returns what takes it off the list."""
        number = next(self._numbers)
        with self._lock:
            self._entries[number] = _Entry(priority, number, name, give)
        return lambda: self._remove(number)

    def relieve(self, need_bytes: int) -> Relief:
        """Ask one after the other until ``need_bytes`` came back. What a callback raises is logged and told."""
        if getattr(self._here, "asking", False):
            return Relief(told=("nobody is asked from inside a callback",))
        with self._lock:
            entries = sorted(self._entries.values())
        given, told = 0, []
        self._here.asking = True
        try:
            for entry in entries:
                if given >= need_bytes:
                    break
                got, phrase = _ask(entry, need_bytes - given)
                given += got
                told.append(phrase)
        finally:
            self._here.asking = False
        return Relief(given, tuple(told))

    def _remove(self, number: int) -> None:
        with self._lock:
            self._entries.pop(number, None)


def _ask(entry: _Entry, need_bytes: int) -> tuple[int, str]:
    try:
        got = max(0, entry.give(need_bytes))
    except Exception as error:  # noqa: BLE001 - one that fails must not keep the others from being asked
        _log.warning("%s gave nothing back: %r", entry.name, error)
        return 0, f"{entry.name} failed: {error!r}"
    return got, f"{entry.name} gave {got:,} bytes"
