"""Everything that holds memory while the engine runs, built by start-up and given back by ``close``."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tonnage.costs.config import ModelConfig
from tonnage.device.host import HostDriver
from tonnage.device.process import process_memory, trim_heap
from tonnage.engine.executor import Executor
from tonnage.engine.request import Request
from tonnage.engine.sampler import Sampled
from tonnage.errors import BufferInUse
from tonnage.ledger import Account, Ledger
from tonnage.report import RunResult
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.step import StepPlan
from tonnage.terms import LineKind, MemoryPlan, Reading


@dataclass(slots=True, eq=False, kw_only=True)
class Runtime:
    """``transient`` accounts for what comes and goes inside steps, ``heap`` for what the allocator kept of it.

    ``closing`` runs newest first.
    """

    plan: MemoryPlan
    config: ModelConfig
    driver: HostDriver
    ledger: Ledger
    kv: KVManager
    dispatcher: Dispatcher
    executor: Executor
    transient: Account
    heap: Account
    closing: list[Callable[[], None]] = field(default_factory=list)
    peak_own_bytes: int | None = None

    def launch(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, Sampled]:
        tokens = {id: request.token_ids for id, request in requests.items()}
        blocks: dict[str, np.ndarray[Any, Any]] = {id: self.kv.row(id) for id in requests}
        return self.executor.launch(plan, tokens, blocks)

    def settle(self, phase: str) -> None:
        """Look at the device between steps, make the heap give back what it keeps, look again; tell the ledger.

        What the process held at its peak and no longer holds came and went inside steps. Tensors and what the heap
        adds to them cannot be told apart from outside: up to the planned tensors it is transient, the rest is heap.
        What the heap gives back when asked was free memory it had kept: the allocator's overhead, not a leak.
        """
        before = read_device(self.driver, self.ledger, phase)
        trim_heap()
        after = read_device(self.driver, self.ledger, phase)
        if before.own_bytes is not None and after.own_bytes is not None and before.peak_own_bytes is not None:
            self.peak_own_bytes = max(self.peak_own_bytes or 0, before.peak_own_bytes)
            grown = before.peak_own_bytes - before.own_bytes
            tensors = min(grown, self.plan.bytes_of(LineKind.TRANSIENT))
            self.transient.sampled(tensors)
            self.transient.sampled(0)
            kept = max(0, before.own_bytes - after.own_bytes)
            self.heap.sampled(max(grown - tensors, kept))
            self.heap.sampled(kept)
        self.ledger.sample(before)
        self.heap.sampled(0)
        self.ledger.sample(after)

    def result(self, **counts: Any) -> RunResult:
        self.settle("end")
        return RunResult(
            snapshot=self.ledger.snapshot(),
            plan=self.plan,
            audit=self.ledger.audit(),
            peak_own_bytes=self.peak_own_bytes,
            **counts,
        )

    def close(self) -> None:
        """Drop every tensor over our memory, then give the memory back; idempotent."""
        self.executor.close()
        self.dispatcher.close()
        release(self.driver, self.closing)


def release(driver: HostDriver, closing: list[Callable[[], None]]) -> None:
    """Run what gives memory back, newest first, then close the device.

    Memory that somebody still looks at is leaked, with a warning, rather than pulled away from under them.
    """
    gc.collect()  # modules and their hooks form cycles
    in_use = []
    while closing:
        try:
            closing.pop()()
        except BufferInUse as error:
            in_use.append(str(error))
    if not in_use:
        driver.close()
        return
    warnings.warn(f"memory stays mapped: {'; '.join(in_use)}", ResourceWarning, stacklevel=3)


def read_device(driver: HostDriver, ledger: Ledger, phase: str) -> Reading:
    """One reading; the peak is the process's own since the last ``reset_peak``, less what it held at the baseline."""
    free, total = driver.mem_info()
    own, process = driver.own_bytes(), process_memory()
    peak = None
    if own is not None and process.own_bytes is not None and process.peak_own_bytes is not None:
        peak = max(own, process.peak_own_bytes - (process.own_bytes - own))
    return Reading(
        phase=phase,
        at_ns=time.monotonic_ns(),
        total_bytes=total,
        free_bytes=free,
        own_bytes=own,
        own_source="anonymous + shared memory since the imports",
        peak_own_bytes=peak,
        arena_bytes=ledger.accounted_bytes,
    )
