"""Another process on a simulated device, taking and giving back memory at chosen moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class _Shared(Protocol):
    """What the other process changes: the bytes of the device that are not ours."""

    foreign_bytes: int


@dataclass(slots=True)
class _Move:
    """Once ``calls_left`` more calls named ``at`` (None: any) have come, and just before the last of them."""

    foreign_bytes: int
    at: str | None
    calls_left: int


class ForeignScript:
    """Moves of another process on ``device``, each made just before a call of ours: after it looked, say, and before
    it asks. Counts only calls made from outside; ``hook``, when set, is told the name of each such call.
    """

    def __init__(self, device: _Shared) -> None:
        self._device = device
        self._moves: list[_Move] = []
        self.hook: Callable[[str], None] | None = None

    @property
    def is_armed(self) -> bool:
        return bool(self._moves) or self.hook is not None

    def holds(self, foreign_bytes: int, *, at: str | None = None, nth: int = 1) -> None:
        """From just before the ``nth`` call from now (of the name ``at``, or any) others hold ``foreign_bytes``."""
        if nth < 1 or foreign_bytes < 0:
            raise ValueError(f"others hold {foreign_bytes:,} bytes from call {nth} on: neither can be that small")
        self._moves.append(_Move(foreign_bytes, at, nth))

    def before(self, call: str) -> None:
        """Make the moves that are due before ``call``."""
        if self.hook is not None:
            self.hook(call)
        for move in list(self._moves):
            move.calls_left -= move.at in (None, call)
            if move.calls_left == 0:
                self._moves.remove(move)
                self._device.foreign_bytes = move.foreign_bytes
