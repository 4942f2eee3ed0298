"""Everything that holds memory while the engine runs, built by start-up and given back by ``close``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tonnage.engine.batch import Batch
from tonnage.engine.executor import Executor
from tonnage.engine.inputs import StepInputs
from tonnage.engine.managers import Managers
from tonnage.engine.options import Chunking
from tonnage.engine.outcome import Pending
from tonnage.engine.picked import Scheduled
from tonnage.engine.site import Site
from tonnage.ledger import Ledger
from tonnage.report import RunResult
from tonnage.terms import MemoryPlan


class Runtime(Protocol):
    """What the engine's loop needs of the machine below it."""

    @property
    def plan(self) -> MemoryPlan: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def managers(self) -> Managers: ...
    @property
    def chunking(self) -> Chunking: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def steps_ahead(self) -> int:
        """So many steps are launched before the one before them has landed."""

    def active(self) -> AbstractContextManager[object]:
        """Around a whole step: what is asked of torch goes to the device and in its order."""

    def launch(self, scheduled: Scheduled, batch: Batch) -> Pending:
        """Compute a prepared step, or begin to. Whatever it raises, nothing that it took is kept."""

    def settle(self, phase: str) -> None:
        """Look at the device between steps and tell the ledger."""

    def drain(self) -> None:
        """After a step that ran out of memory: wait for the device and give back what nobody holds."""

    def result(self, **counts: Any) -> RunResult: ...

    def close(self) -> None:
        """Give everything back; idempotent."""


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceRuntime:
    """A model on a device."""

    plan: MemoryPlan
    vocab_size: int
    managers: Managers
    chunking: Chunking
    site: Site
    executor: Executor
    steps_ahead: int = 0

    @property
    def ledger(self) -> Ledger:
        return self.site.ledger

    def active(self) -> AbstractContextManager[object]:
        return self.site.active()

    def launch(self, scheduled: Scheduled, batch: Batch) -> Pending:
        return self.executor.launch(StepInputs.of(scheduled, batch, self.managers))

    def drain(self) -> None:
        self.site.drain()
        self.settle("out of memory")

    def settle(self, phase: str) -> None:
        self.site.settle(phase)

    def result(self, **counts: Any) -> RunResult:
        self.settle("end")
        moved = self.managers.kv.stats()
        return RunResult(
            offloaded_blocks=moved["offloaded"],
            loaded_blocks=moved["loaded"],
            snapshot=self.site.ledger.snapshot(),
            plan=self.plan,
            audit=self.site.ledger.audit(),
            peak_own_bytes=self.site.peak_own_bytes,
            **counts,
        )

    def close(self) -> None:
        """Let steps that still run end, drop every tensor over our memory, then give the memory back; idempotent."""
        try:
            self.site.finish()
            self.executor.close()
            self.managers.dispatcher.close()
        finally:
            self.site.close()
