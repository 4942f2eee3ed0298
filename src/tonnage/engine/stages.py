"""Start-up in stages, each bracketed by a look at the device, so that a failure can tell what went before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tonnage.errors import DriverError, StartupError, UserError
from tonnage.ledger import Ledger
from tonnage.report import StageRecord
from tonnage.terms import Reading
from tonnage.units import format_bytes


class StageMonitor:
    """``with monitor.stage("weights", remedy=...):`` runs a stage; ``read(phase)`` takes a look at the device."""

    def __init__(
        self, ledger: Ledger, read: Callable[[str], Reading], on_stage: Callable[[str], None] | None = None
    ) -> None:
        self._ledger = ledger
        self._read = read
        self._on_stage = on_stage or (lambda _: None)
        self.records: list[StageRecord] = []

    @contextmanager
    def stage(self, name: str, *, remedy: str) -> Iterator[None]:
        """A user's error passes as it is; any other becomes a ``StartupError`` with stage, history and remedy."""
        self._on_stage(name)
        before, began = self._read(name), time.monotonic_ns()
        try:
            with self._ledger.phase(name):
                yield
        except UserError:
            raise
        except Exception as error:
            raise StartupError(
                name,
                f"{type(error).__name__}: {error}",
                history=[*self.history(), f"{self._told_of_failure(name, before, began)}, when it failed"],
                remedy=remedy,
            ) from error
        self.records.append(self._record(name, before, self._read(name), began))

    def history(self) -> list[str]:
        """One line a stage: what was held, free and others' before and after, and time."""
        return [_told(record) for record in self.records]

    def _told_of_failure(self, name: str, before: Reading, began_ns: int) -> str:
        """The failed stage as far as it came; a device that failed may not answer any more."""
        try:
            return _told(self._record(name, before, self._read(name), began_ns))
        except DriverError as error:
            return f"{name}: the device does not answer ({error})"

    def _record(self, name: str, before: Reading, after: Reading, began_ns: int) -> StageRecord:
        return StageRecord(
            name=name,
            own_before_bytes=before.own_bytes,
            own_after_bytes=after.own_bytes,
            elapsed_ms=(time.monotonic_ns() - began_ns) // 10**6,
            free_before_bytes=before.free_bytes,
            free_after_bytes=after.free_bytes,
            foreign_before_bytes=self._ledger.foreign_of(before),
            foreign_after_bytes=self._ledger.foreign_of(after),
        )


def _told(record: StageRecord) -> str:
    held = f"held {_bytes(record.own_before_bytes)} -> {_bytes(record.own_after_bytes)}"
    free = f"free {_bytes(record.free_before_bytes)} -> {_bytes(record.free_after_bytes)}"
    others = f"others' {_bytes(record.foreign_before_bytes)} -> {_bytes(record.foreign_after_bytes)}"
    return f"{record.name}: {held}, {free}, {others} in {record.elapsed_ms} ms"


def _bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)
