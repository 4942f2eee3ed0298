"""Probes: full steps run before the plan, to see what a forward takes beyond the weights, the cache and the scratch.

The managers name the requests (``ResourceManager.probe``); a trial pool just large enough holds them. Two figures
come out of each stage: bytes of tensors alive at the peak, and bytes by which the process really grew. The second
holds what kernels take inside themselves and what the heap wastes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from tonnage.config import Limits
from tonnage.device.process import ProcessMemory, process_memory, reset_peak, trim_heap
from tonnage.engine.executor import Executor
from tonnage.engine.site import ROUNDING_BYTES
from tonnage.engine.tracker import StorageTracker
from tonnage.resources.base import RequestView
from tonnage.resources.block_pool import BlockPool
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.terms import Quantity, Source, StagePeak
from tonnage.units import round_up

STAGES = ("prefill", "decode")


def trial_blocks(limits: Limits, *, block_tokens: int) -> int:
    """Blocks that the most demanding probe stage needs at once, as the manager itself counts them."""
    kv = KVManager(
        BlockPool(1),
        block_tokens=block_tokens,
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
    )
    return max(sum(kv.lifetime_need(request) for request in kv.probe(stage, limits)) for stage in STAGES)


class Prober:
    """Runs probe stages through the same dispatcher and executor as real requests.

    ``known`` tensors exist before a step (weights, pool, scratch) and are no part of what it takes.
    """

    def __init__(
        self,
        executor: Executor,
        dispatcher: Dispatcher,
        kv: KVManager,
        *,
        limits: Limits,
        known: Sequence[torch.Tensor],
    ) -> None:
        self._executor, self._dispatcher, self._kv = executor, dispatcher, kv
        self._limits, self._known = limits, known

    def warm_up(self) -> None:
        """First calls of every kernel, so that one-off library buffers are not taken for transients."""
        for stage in STAGES:
            self._run(stage, None)

    def measure(self) -> tuple[StagePeak, ...]:
        """The peak of each stage, in bytes of tensors and in bytes of process growth, both rounded up to a MiB.

        The heap is trimmed once, before the first stage, and each stage runs twice: what the heap keeps of one is
        part of the next one's growth, as it is when steps of both kinds follow each other.
        """
        trim_heap()
        before = process_memory()
        first = [self._measure(stage, before) for stage in STAGES]
        second = [self._measure(stage, before) for stage in STAGES]
        return tuple(max(pair, key=lambda peak: peak.reserved.bytes) for pair in zip(first, second, strict=True))

    def _measure(self, stage: str, before: ProcessMemory) -> StagePeak:
        tracker = StorageTracker(self._known)
        can_reset = reset_peak()
        plan = self._run(stage, tracker)
        after = process_memory()
        tracked = round_up(tracker.peak_bytes, ROUNDING_BYTES)
        grown = tracked
        if can_reset and after.supported:
            # File pages touched for the first time are the page cache's, not ours.
            new_file_bytes = max(0, after.file_bytes - before.file_bytes)
            grown = max(tracked, round_up(after.peak_bytes - before.resident_bytes - new_file_bytes, ROUNDING_BYTES))
        return StagePeak(
            stage=stage,
            shape=plan.shape,
            allocated=Quantity.exact(tracked, Source.MEASURED, f"probe {stage}: tensors alive at the peak"),
            reserved=Quantity.exact(grown, Source.MEASURED, f"probe {stage}: growth of the process"),
        )

    def _run(self, stage: str, tracker: StorageTracker | None) -> StepPlan:
        requests = self._held_by_pool(self._kv.probe(stage, self._limits))
        with self._dispatcher.holding(requests):
            plan = StepPlan.of(0, tuple(_item(request, stage) for request in requests))
            txn = Txn()
            self._dispatcher.prepare(plan, txn)
            try:
                self._launch(plan, tracker)
            finally:
                txn.rollback()
        return plan

    def _held_by_pool(self, requests: Sequence[RequestView]) -> Sequence[RequestView]:
        """The first of the requests that the pool holds at once: no real step computes more than that either."""
        needs = accumulate(self._kv.lifetime_need(request) for request in requests)
        return [request for request, need in zip(requests, needs, strict=True) if need <= self._kv.available()]

    def _launch(self, plan: StepPlan, tracker: StorageTracker | None) -> None:
        # Token 0 everywhere: what a dense model takes does not depend on what it reads.
        tokens = {item.request_id: [0] * item.end for item in plan.items}
        blocks: dict[str, np.ndarray] = {item.request_id: self._kv.row(item.request_id) for item in plan.items}
        if tracker is None:
            self._executor.launch(plan, tokens, blocks)
            return
        with tracker:
            self._executor.launch(plan, tokens, blocks)


def _item(request: RequestView, stage: str) -> StepItem:
    start = request.num_computed_tokens
    count = 1 if stage == "decode" else request.num_prompt_tokens - start
    return StepItem(request_id=request.id, start=start, count=count, samples=True)
