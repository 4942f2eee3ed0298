"""Probes: full steps run before the plan, to see what a forward takes beyond the weights, the cache and the scratch.

The managers name the requests (``ResourceManager.probe``); a trial pool just large enough holds them, and they go the
way of real ones: admitted, prepared, launched. Three stages: prefill, whose prompts want log-probabilities; decode;
and the sampler with every feature on. Two figures come out of each: bytes of tensors alive at the peak, and bytes by
which the process really grew. The second holds what kernels take inside themselves and what the heap wastes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from tonnage.config import Limits
from tonnage.device.process import ProcessMemory, process_memory, reset_peak, trim_heap
from tonnage.engine.batch import Batch
from tonnage.engine.executor import Executor
from tonnage.engine.inputs import StepInputs
from tonnage.engine.managers import Managers
from tonnage.engine.request import Request
from tonnage.engine.scheduler import Scheduled
from tonnage.engine.site import ROUNDING_BYTES
from tonnage.engine.tracker import StorageTracker
from tonnage.layout import KVLayout
from tonnage.resources.base import RequestView
from tonnage.resources.cache import BlockCache
from tonnage.resources.kv import KVManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.terms import Quantity, Source, StagePeak
from tonnage.units import round_up

STAGES = ("prefill", "decode", "sampler")


def trial_blocks(limits: Limits, layout: KVLayout) -> int:
    """Blocks that the most demanding probe stage needs at once, as the manager itself counts them."""
    kv = KVManager(
        BlockCache(layout.groups, num_slots=1, reuse=False),
        block_tokens=layout.groups[0].block_tokens,
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        extra_tokens=limits.extra_tokens,
    )
    return max(sum(kv.lifetime_need(request) for request in _named_by(kv, stage, limits)) for stage in STAGES)


class Prober:
    """Runs probe stages through ``managers`` and the executor as real requests go; nothing is left behind.

    ``known`` tensors exist before a step (weights, pool, scratch) and are no part of what it takes. The penalty tables
    are allocated by the first run of the sampler stage; closing the managers gives them back.
    """

    def __init__(
        self, executor: Executor, managers: Managers, *, limits: Limits, vocab_size: int, known: Sequence[torch.Tensor]
    ) -> None:
        self._executor, self._managers = executor, managers
        self._limits, self._vocab_size, self._known = limits, vocab_size, known

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
        tables = self._managers.penalties.tables()
        tracker = StorageTracker([*self._known, *(tables or ())])
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
        requests = [
            _request(view, self._params(stage))
            for view in self._held_by_pool(_named_by(self._managers.kv, stage, self._limits))
        ]
        with self._managers.dispatcher.holding(requests):
            scheduled, batch = self._scheduled(requests)
            txn = Txn()
            self._managers.dispatcher.prepare(scheduled.plan, txn)
            try:
                self._launch(StepInputs.of(scheduled, batch, self._managers), tracker)
            finally:
                txn.rollback()
        return scheduled.plan

    def _held_by_pool(self, requests: Sequence[RequestView]) -> Sequence[RequestView]:
        """The first of the requests that the pool holds at once: no real step computes more than that either."""
        kv = self._managers.kv
        needs = accumulate(kv.lifetime_need(request) for request in requests)
        return [request for request, need in zip(requests, needs, strict=True) if need <= kv.available()]

    def _scheduled(self, requests: Sequence[Request]) -> tuple[Scheduled, Batch]:
        """One step that computes all that is known of each request."""
        batch = Batch(self._limits.max_batch_size)
        items = []
        for request in requests:
            request.slot = self._managers.slots.slot_of(request.id)
            batch.add(request)
            start = request.num_computed_tokens
            items.append(
                StepItem(request_id=request.id, start=start, count=len(request.token_ids) - start, samples=True)
            )
        slots = np.array([request.slot for request in requests], np.int64)
        return Scheduled(StepPlan.of(0, items), slots), batch

    def _launch(self, inputs: StepInputs, tracker: StorageTracker | None) -> None:
        if tracker is None:
            self._executor.launch(inputs)
            return
        with tracker:
            self._executor.launch(inputs)

    def _params(self, stage: str) -> SamplingParams:
        num_top = min(self._limits.max_logprobs, self._vocab_size)
        if stage == "prefill":
            return SamplingParams(prompt_logprobs=num_top)
        if stage == "decode":
            return SamplingParams()
        penalty = 0.5 if self._limits.penalties else 0.0
        return SamplingParams(
            temperature=0.9,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1 + penalty,
            presence_penalty=penalty,
            frequency_penalty=penalty,
            logit_bias={0: 1.0},
            min_tokens=3,
            stop_token_ids=(0,),
            logprobs=num_top,
            seed=0,
        )


def _named_by(kv: KVManager, stage: str, limits: Limits) -> Sequence[RequestView]:
    """The stand-ins of a stage; the sampler is shown by a step of decodes."""
    return kv.probe("decode" if stage == "sampler" else stage, limits)


def _request(view: RequestView, params: SamplingParams) -> Request:
    # Token 0 everywhere: what a dense model takes does not depend on what it reads.
    num_known = max(view.num_prompt_tokens, view.num_computed_tokens + 1)
    return Request(
        id=view.id,
        token_ids=[0] * num_known,
        num_prompt_tokens=view.num_prompt_tokens,
        max_tokens=view.max_total_tokens - view.num_prompt_tokens,
        params=params,
        stop_ids=frozenset(params.stop_token_ids),
        num_computed_tokens=view.num_computed_tokens,
    )
