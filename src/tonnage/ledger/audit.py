"""Planned against actual, one row a line."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.terms import LineKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One line, planned against actual, in bytes. ``None``: nothing has been read from the device, so unknown."""

    line: LineKind
    planned_bytes: int
    actual_bytes: int | None
    high_water_bytes: int | None

    @property
    def error_bytes(self) -> int | None:
        """Actual minus planned: positive is overspent."""
        return None if self.actual_bytes is None else self.actual_bytes - self.planned_bytes

    @property
    def high_error_bytes(self) -> int | None:
        """The highest ever held minus planned: what matters for a line that is empty between steps."""
        return None if self.high_water_bytes is None else self.high_water_bytes - self.planned_bytes
