"""What must be where it was: what managers hold, counted lines of the ledger, what no line explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.bench import inside
from tonnage.terms import How, LineKind
from tonnage.units import MiB, format_bytes

if TYPE_CHECKING:
    from tonnage.engine import Engine
    from tonnage.report import RunResult

#: On a card no line of the ledger explains at most this many bytes.
UNATTRIBUTED_CARD_BYTES = 150 * MiB
#: On the host, where all of this process counts, it may be this many, or this share (in hundredths) of the device.
UNATTRIBUTED_BYTES, UNATTRIBUTED_HUNDREDTHS = 32 * MiB, 3


class Books:
    """The engine's books as they are when this is made, and what of them has moved since: ``tell(rule, text)``."""

    def __init__(self, engine: Engine, tell: Callable[[str, str], None]) -> None:
        self._engine, self._tell = engine, tell
        self._at_rest = inside.held(engine)
        self._lines_at_rest = _counted_lines(engine.result())

    def check_held(self) -> None:
        """With nothing left to do."""
        held, progress = inside.held(self._engine), self._engine.progress()
        moved = {name: (self._at_rest.get(name), count) for name, count in held.items() if self._at_rest[name] != count}
        if moved or progress.num_running or progress.num_waiting or progress.kv_used_tokens:
            self._tell("held", f"with nothing left to do: {moved or progress}")
        for told in inside.lost_blocks(self._engine):
            self._tell("held", f"with nothing left to do {told}")

    def check_emptied(self) -> None:
        """With nothing left to do, at the end of all: the cache is emptied."""
        for told in inside.lost_when_emptied(self._engine):
            self._tell("held", f"with nothing left to do and an empty cache {told}")

    def check_lines(self, result: RunResult, *, lent_bytes: int = 0) -> None:
        """At any time, but while the engine sleeps. ``lent_bytes`` are held by a process that came after the first
        look at the card: where the driver does not tell processes apart, they are taken for ours."""
        for line, num_bytes in _counted_lines(result).items():
            if num_bytes != self._lines_at_rest.get(line, 0):
                was = format_bytes(self._lines_at_rest.get(line, 0))
                self._tell("ledger", f"{line} stands at {format_bytes(num_bytes)}, at the start at {was}")
        unexplained, device = result.snapshot.unattributed, result.plan.device_bytes
        most = max(UNATTRIBUTED_BYTES, device * UNATTRIBUTED_HUNDREDTHS // 100)
        if inside.is_on_card(self._engine):
            most = UNATTRIBUTED_CARD_BYTES + lent_bytes
        if unexplained is not None and unexplained > most:
            self._tell("ledger", f"no line explains {format_bytes(unexplained)}, {format_bytes(most)} may be")


def _counted_lines(result: RunResult) -> dict[str, int]:
    """Bytes of each line that our own allocators count; a lazily made one (penalty tables) is left out."""
    lines: Counter[str] = Counter()
    for entry in result.snapshot.entries:
        if entry.how is How.COUNTED and entry.line is not LineKind.TABLES:
            lines[entry.line.value] += entry.physical_bytes
    return dict(lines)
