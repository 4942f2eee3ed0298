"""What a run did, as one value: the source of the run file and of the table, so that both say the same."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.ledger import AuditRow
from tonnage.terms import MemoryPlan, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage of start-up, with what was free on the device, what this process held of it and what others did,
    before and after it, in bytes (None: not known)."""

    name: str
    own_before_bytes: int | None
    own_after_bytes: int | None
    elapsed_ms: int
    free_before_bytes: int | None = None
    free_after_bytes: int | None = None
    foreign_before_bytes: int | None = None
    foreign_after_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRecord:
    """What a thread saw that looked at the device every ``interval_ms`` while the engine served.

    lowest_free_bytes       the least that was free at any of ``num_looks`` looks
    highest_foreign_bytes   the most that others held
    problem                 why it stopped looking; empty: it did not
    """

    interval_ms: int
    num_looks: int
    lowest_free_bytes: int | None = None
    highest_foreign_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Counts of requests and tokens, the ledger at the end, and the plan that the engine was built from.

    finished, failed, cancelled   requests, by how they ended
    waited                        requests that had to wait for memory at least once
    suspensions                   times that a running request gave its memory up and was computed again later
    cached_prompt_tokens          of prompt_tokens, those that were not computed, for a text before began alike
    offloaded_blocks, loaded_blocks   KV blocks that went to host memory, and that came back
    retried_steps                 who ran out of memory in a step that was then tried again, one entry a step: defects
    elapsed_ms                    of serving, start-up left out
    peak_own_bytes                the most this process held on the device (None: not known)
    audit                         planned against actual, line by line, as ``Ledger.audit`` gives it
    watch                         what was free and what others held at its least and most while the engine served
    plan_file                     what became of the plan file that was named, in a sentence; empty: none was
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
    suspensions: int = 0
    cached_prompt_tokens: int = 0
    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    retried_steps: tuple[str, ...] = ()
    peak_own_bytes: int | None = None
    audit: tuple[AuditRow, ...] = ()
    watch: WatchRecord | None = None
    plan_file: str = ""

    @property
    def tokens_per_second(self) -> str:
        """Generated tokens per second of serving, to one decimal; "0.0" where no time passed."""
        tenths = self.generated_tokens * 10_000 // self.elapsed_ms if self.elapsed_ms > 0 else 0
        return f"{tenths // 10}.{tenths % 10}"
