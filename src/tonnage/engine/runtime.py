"""Everything that holds memory while the engine runs, built by start-up and given back by ``close``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.device.process import trim_heap
from tonnage.engine.executor import Executor
from tonnage.engine.request import Request
from tonnage.engine.sampler import Sampled
from tonnage.engine.site import Site
from tonnage.ledger import Account
from tonnage.report import RunResult
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.step import StepPlan
from tonnage.terms import MemoryPlan


@dataclass(slots=True, eq=False, kw_only=True)
class Runtime:
    """``transient`` accounts for what comes and goes inside steps."""

    plan: MemoryPlan
    vocab_size: int
    site: Site
    kv: KVManager
    dispatcher: Dispatcher
    executor: Executor
    transient: Account
    peak_own_bytes: int | None = None

    def launch(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, Sampled]:
        tokens = {id: request.token_ids for id, request in requests.items()}
        blocks: dict[str, np.ndarray[Any, Any]] = {id: self.kv.row(id) for id in requests}
        return self.executor.launch(plan, tokens, blocks)

    def settle(self, phase: str) -> None:
        """Look at the device between steps, make the heap give back what it keeps, look again; tell the ledger.

        What the process held at its peak and no longer holds came and went inside steps; what the heap gives back
        when asked was free memory it had kept of that, the allocator's overhead and not a leak. Both are one account:
        from outside, tensors and what the heap adds to them cannot be told apart.
        """
        before = self.site.read(phase)
        trim_heap()
        after = self.site.read(phase)
        if before.own_bytes is not None and after.own_bytes is not None and before.peak_own_bytes is not None:
            self.peak_own_bytes = max(self.peak_own_bytes or 0, before.peak_own_bytes)
            kept = max(0, before.own_bytes - after.own_bytes)
            self.transient.sampled(before.peak_own_bytes - before.own_bytes + kept)
            self.transient.sampled(kept)
        self.site.ledger.sample(before)
        self.transient.sampled(0)
        self.site.ledger.sample(after)

    def result(self, **counts: Any) -> RunResult:
        self.settle("end")
        return RunResult(
            snapshot=self.site.ledger.snapshot(),
            plan=self.plan,
            audit=self.site.ledger.audit(),
            peak_own_bytes=self.peak_own_bytes,
            **counts,
        )

    def close(self) -> None:
        """Drop every tensor over our memory, then give the memory back; idempotent."""
        self.executor.close()
        self.dispatcher.close()
        self.site.close()
