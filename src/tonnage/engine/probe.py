"""Probes: full steps run before the plan, to see what a forward takes beyond the weights, the cache and the scratch.

The managers name the requests (``ResourceManager.probe``); a trial pool just large enough holds them, and they go the
way of real ones: admitted, prepared, launched. Three stages: prefill, whose prompts want log-probabilities; decode;
and the sampler with every feature on. Two figures come out of each: bytes of tensors alive at the peak, and bytes by
which what the device gave really grew. The second holds what kernels take inside themselves and allocators waste.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from tonnage.config import Limits
from tonnage.engine.batch import Batch
from tonnage.engine.executor import Executor
from tonnage.engine.inputs import StepInputs
from tonnage.engine.managers import Managers
from tonnage.engine.picked import Scheduled
from tonnage.engine.request import Request
from tonnage.engine.site import Site, StepPeak
from tonnage.layout import KVLayout
from tonnage.resources.base import ProbeRequest, RequestView
from tonnage.resources.cache import BlockCache
from tonnage.resources.kv import KVManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.terms import Quantity, Source, StagePeak

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
        self,
        executor: Executor,
        managers: Managers,
        site: Site,
        *,
        limits: Limits,
        vocab_size: int,
        known: Sequence[torch.Tensor],
    ) -> None:
        self._executor, self._managers, self._site = executor, managers, site
        self._limits, self._vocab_size, self._known = limits, vocab_size, known

    def warm_up(self) -> None:
        """First calls of every kernel, so that one-off library buffers are not taken for transients."""
        for stage in STAGES:
            self._run(stage, lambda launch: launch())
        if self._site.is_capped_by_use:
            for views in self._mixtures():
                self._run_step(self._requests(views, SamplingParams()), lambda launch: launch())

    def measure(self) -> tuple[StagePeak, ...]:
        """The peak of each stage, in bytes of tensors and in bytes of growth, both rounded up to a MiB.

        Allocators are trimmed once, before the first stage, and each stage runs twice: what they keep of one is part
        of the next one's growth, as it is when steps of both kinds follow each other.
        """
        self._site.begin_measuring()
        first = [self._measure(stage) for stage in STAGES]
        second = [self._measure(stage) for stage in STAGES]
        return tuple(max(pair, key=lambda peak: peak.reserved.bytes) for pair in zip(first, second, strict=True))

    def _measure(self, stage: str) -> StagePeak:
        known = [*self._known, *(self._managers.penalties.tables() or ())]
        peaks: list[StepPeak] = []
        plan = self._run(stage, lambda launch: peaks.append(self._site.measured(launch, known)))
        (peak,) = peaks
        return StagePeak(
            stage=stage,
            shape=plan.shape,
            allocated=Quantity.exact(peak.tensor_bytes, Source.MEASURED, f"probe {stage}: {peak.tensors_told}"),
            reserved=Quantity.exact(peak.grown_bytes, Source.MEASURED, f"probe {stage}: {peak.grown_told}"),
        )

    def _run(self, stage: str, under: Callable[[Callable[[], object]], object]) -> StepPlan:
        """One step of the stage; ``under`` is given its launch, to watch it."""
        requests = self._requests(_named_by(self._managers.kv, stage, self._limits), self._params(stage))
        return self._run_step(requests, under)

    def _mixtures(self) -> Iterator[Sequence[RequestView]]:
        """Steps that no stage shows, and kernels are compiled for: a short prompt beside one decode and beside as many
        as a step takes, and a token alone."""
        decodes = _named_by(self._managers.kv, "decode", self._limits)
        prompt = ProbeRequest(id="probe-prompt", num_prompt_tokens=2, max_total_tokens=3)
        most = min(self._limits.max_batch_size - 1, self._limits.max_num_tokens - 2)
        yield from ([prompt, *decodes[:num]] for num in sorted({1, most}) if 0 < num <= most)
        yield [ProbeRequest(id="probe-token", num_prompt_tokens=1, max_total_tokens=2)]

    def _requests(self, views: Sequence[RequestView], params: SamplingParams) -> list[Request]:
        return [_request(view, params) for view in self._held_by_pool(views)]

    def _run_step(self, requests: Sequence[Request], under: Callable[[Callable[[], object]], object]) -> StepPlan:
        with self._managers.dispatcher.holding(requests):
            scheduled, batch = self._scheduled(requests)
            txn = Txn()
            self._managers.dispatcher.prepare(scheduled.plan, txn)
            try:
                inputs = StepInputs.of(scheduled, batch, self._managers)
                under(lambda: self._executor.launch(inputs))
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
