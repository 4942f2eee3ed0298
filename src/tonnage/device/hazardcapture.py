"""A stream capture as ``HazardDriver`` plays it: work with the addresses it had, to be queued again and again."""

from __future__ import annotations

from typing import Any

from tonnage.device.driver import Driver
from tonnage.device.hazardclock import Span


class Capture:
    """``works`` are (what, reads, writes). Over a simulated device the copies and fills among them run in ``run``;
    a real one captures them itself and replays them through its own graph.
    """

    def __init__(self, what: str, driver: Driver) -> None:
        self.what, self._driver = what, driver
        self._is_played = driver.kind == "host"
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self.works: list[tuple[str, tuple[Span, ...], tuple[Span, ...]]] = []

    def take(self, call: str, args: tuple[Any, ...], stream: int) -> None:
        if self._is_played:
            self._calls.append((call, args))
        else:
            getattr(self._driver, call)(*args, stream=stream)

    def run(self, stream: int) -> None:
        for call, args in self._calls:
            getattr(self._driver, call)(*args, stream=stream)
