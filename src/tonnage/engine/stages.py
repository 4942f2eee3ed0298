"""Start-up in stages, each bracketed by a look at the device, so that a failure can tell what went before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tonnage.errors import StartupError, UserError
from tonnage.ledger import Ledger
from tonnage.report import StageRecord
from tonnage.units import format_bytes


class StageMonitor:
    """``with monitor.stage("weights", remedy=...):`` runs a stage; ``own_bytes`` reads what the process holds."""

    def __init__(
        self, ledger: Ledger, own_bytes: Callable[[], int | None], on_stage: Callable[[str], None] | None = None
    ) -> None:
        self._ledger = ledger
        self._own_bytes = own_bytes
        self._on_stage = on_stage or (lambda _: None)
        self.records: list[StageRecord] = []

    @contextmanager
    def stage(self, name: str, *, remedy: str) -> Iterator[None]:
        """A user's error passes as it is; any other becomes a ``StartupError`` with stage, history and remedy."""
        self._on_stage(name)
        before, began = self._own_bytes(), time.monotonic_ns()
        try:
            with self._ledger.phase(name):
                yield
        except UserError:
            raise
        except Exception as error:
            raise StartupError(
                name, f"{type(error).__name__}: {error}", history=self.history(), remedy=remedy
            ) from error
        elapsed_ms = (time.monotonic_ns() - began) // 10**6
        self.records.append(
            StageRecord(name=name, own_before_bytes=before, own_after_bytes=self._own_bytes(), elapsed_ms=elapsed_ms)
        )

    def history(self) -> list[str]:
        """One line a stage: memory before and after, and time."""
        return [
            f"{r.name}: {_told(r.own_before_bytes)} -> {_told(r.own_after_bytes)} in {r.elapsed_ms} ms"
            for r in self.records
        ]


def _told(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)
