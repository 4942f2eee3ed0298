"""Everything that holds memory while the engine runs, built by start-up and given back by ``close``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
from tonnage.engine.watch import Watch
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

    @property
    def watch(self) -> Watch | None: ...

    def active(self) -> AbstractContextManager[object]:
        """Around a whole step: what is asked of torch goes to the device and in its order."""

    def aside(self) -> AbstractContextManager[object]:
        """The same around what is no step and takes nothing of its memory: torch's own cache can be emptied inside."""

    def launch(self, scheduled: Scheduled, batch: Batch) -> Pending:
        """Compute a prepared step, or begin to. Whatever it raises, nothing that it took is kept."""

    def settle(self, phase: str) -> None:
        """Look at the device between steps and tell the ledger."""

    def drain(self) -> None:
        """After a step that ran out of memory: wait for the device and give back what nobody holds."""

    def require_sleepable(self) -> None:
        """Raises ``UserError`` where memory cannot be given back and come again at its address."""

    def release(self, tags: Collection[str]) -> Mapping[str, int]:
        """Give the memory of "weights" and "kv" back; returns the bytes of each. Nobody holds a block, no step runs.

        Raises whatever a release raises: everything is as before then, but after a ``DriverError``, when some is gone.
        """

    def materialize(self, tags: Collection[str]) -> None:
        """Bring it back, all or nothing. Raises ``CannotMaterialize`` where there is not enough memory now."""

    def drop_graphs(self) -> int:
        """Give the graphs' memory back; returns its bytes."""

    def recapture(self) -> None:
        """Capture them again."""

    def holdings(self) -> tuple[tuple[tuple[str, int], ...], int | None]:
        """Bytes that are held of the device, by owner, the largest first; and what the driver says of them in all."""

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
    plan_file: str = ""

    @property
    def watch(self) -> Watch | None:
        return self.site.watch

    @property
    def ledger(self) -> Ledger:
        return self.site.ledger

    def active(self) -> AbstractContextManager[object]:
        return self.site.active()

    def aside(self) -> AbstractContextManager[object]:
        return self.site.capturing()

    def launch(self, scheduled: Scheduled, batch: Batch) -> Pending:
        return self.executor.launch(StepInputs.of(scheduled, batch, self.managers))

    def drain(self) -> None:
        self.site.drain()
        self.settle("out of memory")

    def settle(self, phase: str) -> None:
        self.site.settle(phase)

    def require_sleepable(self) -> None:
        self.site.require_sleepable()

    def release(self, tags: Collection[str]) -> Mapping[str, int]:
        return self.site.release(tags)

    def materialize(self, tags: Collection[str]) -> None:
        self.site.materialize(tags)

    def drop_graphs(self) -> int:
        graphs = self.executor.graphs
        return 0 if graphs is None else self.site.dropped(graphs.clear)

    def recapture(self) -> None:
        if (graphs := self.executor.graphs) is None:
            return
        with self.aside():
            graphs.warm_up()
            self.site.captured(graphs.capture)

    def holdings(self) -> tuple[tuple[tuple[str, int], ...], int | None]:
        self.settle("asleep")
        shot = self.site.ledger.snapshot()
        of_device = [entry for entry in shot.entries if entry.memory is self.site.memory and entry.physical_bytes]
        found = sorted(((entry.owner, entry.physical_bytes) for entry in of_device), key=lambda pair: -pair[1])
        return tuple(found), shot.own

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
            watch=None if self.watch is None else self.watch.record(),
            plan_file=self.plan_file,
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
