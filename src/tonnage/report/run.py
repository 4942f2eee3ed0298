"""What a run did, as one value: the source of the run file and of the table, so that both say the same.

``audit_rows`` puts what the plan promised beside what the ledger saw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.terms import LedgerEntry, LineKind, MemoryPlan, Snapshot

#: Lines that nobody allocates: they are room, not memory in use.
ROOM = frozenset({LineKind.KEEP_FREE, LineKind.ROUNDING, LineKind.SLACK})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage of start-up, with the bytes this process held on the device before and after it (None: not known)."""

    name: str
    own_before_bytes: int | None
    own_after_bytes: int | None
    elapsed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """A line planned against actual, in bytes. None: nobody counts it, or it is room that nobody takes.

    high_water_bytes is the most its accounts ever held (an upper bound where several accounts share the line);
    how names the way the ledger knows.
    """

    kind: LineKind
    planned_bytes: int
    actual_bytes: int | None
    high_water_bytes: int | None
    how: str

    @property
    def over_bytes(self) -> int:
        """How far the highest value went past the plan; 0 when it stayed inside."""
        return max(0, (self.high_water_bytes or self.actual_bytes or 0) - self.planned_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Counts of requests and tokens, the ledger at the end, and the plan that the engine was built from.

    finished, failed, cancelled   requests, by how they ended
    waited                        requests that had to wait for memory at least once
    elapsed_ms                    of serving, start-up left out
    peak_own_bytes                the most this process held on the device (None: not known)
    audit                         planned against actual; ``audit_rows(plan, snapshot)`` makes them
    """

    finished: int
    failed: int
    cancelled: int
    waited: int
    prompt_tokens: int
    generated_tokens: int
    elapsed_ms: int
    snapshot: Snapshot
    plan: MemoryPlan
    stages: tuple[StageRecord, ...] = ()
    peak_own_bytes: int | None = None
    audit: tuple[AuditRow, ...] = ()

    @property
    def tokens_per_second(self) -> str:
        """Generated tokens per second of serving, to one decimal; "0.0" where no time passed."""
        tenths = self.generated_tokens * 10_000 // self.elapsed_ms if self.elapsed_ms > 0 else 0
        return f"{tenths // 10}.{tenths % 10}"


def audit_rows(plan: MemoryPlan, snapshot: Snapshot) -> tuple[AuditRow, ...]:
    """One row for every kind of line that was planned or used, in the plan's order."""
    used = [entry.line for entry in snapshot.entries]
    kinds = dict.fromkeys([*(line.kind for line in plan.lines), *used, LineKind.UNATTRIBUTED])
    return tuple(_row(kind, plan, snapshot) for kind in kinds)


def _row(kind: LineKind, plan: MemoryPlan, snapshot: Snapshot) -> AuditRow:
    entries = [entry for entry in snapshot.entries if entry.line == kind]
    actual, high_water, how = _seen(kind, entries, snapshot)
    return AuditRow(
        kind=kind, planned_bytes=plan.bytes_of(kind), actual_bytes=actual, high_water_bytes=high_water, how=how
    )


def _seen(kind: LineKind, entries: list[LedgerEntry], snapshot: Snapshot) -> tuple[int | None, int | None, str]:
    if kind == LineKind.UNATTRIBUTED:
        return snapshot.unattributed, None, "own - accounts"
    if kind == LineKind.FOREIGN:
        return snapshot.foreign, None, snapshot.own_source
    if not entries:
        return None, None, "room" if kind in ROOM else "no account"
    physical = sum(entry.physical_bytes for entry in entries)
    return physical, sum(entry.high_water_bytes for entry in entries), _ways(entries)


def _ways(entries: Iterable[LedgerEntry]) -> str:
    return ", ".join(dict.fromkeys(entry.how.value for entry in entries))
