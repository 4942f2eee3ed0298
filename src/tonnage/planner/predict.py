"""``Measured`` without a device: the closed forms of ``costs`` in the place of probes, or a forward on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from tonnage.config import Limits
from tonnage.costs.activations import Peak, encoder_peak, forward_peak, predicted, reserved_for, sampler_bytes
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import context_bytes, graph_bytes, library_bytes
from tonnage.costs.ranks import rank_shape
from tonnage.hardware import Card
from tonnage.planner.drafts import draft_rank
from tonnage.terms import Measured, Quantity, Rank, Source, StagePeak, StepShape


class StageProbe(Protocol):
    """Whoever knows the stages of a step better than the closed forms do. ``identity`` names it and what it rests on,
    for fingerprints; equal questions get equal answers."""

    @property
    def identity(self) -> str: ...

    def stages(
        self, config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str
    ) -> tuple[StagePeak, ...] | None:
        """Prefill first; encoders left out. None where it does not know: closed forms then."""


def predict(
    config: ModelConfig,
    *,
    card: Card,
    limits: Limits,
    rank: Rank,
    dtype: str,
    weights: Quantity,
    draft: ModelConfig | None = None,
    probe: StageProbe | None = None,
) -> Measured:
    """What a start on that card would measure, as far as formulas know. The card is taken to be empty but for what the
    system of a unified machine holds of it."""
    stages = _stages(config, card=card, limits=limits, rank=rank, dtype=dtype, probe=probe)
    if draft is not None and rank_shape(config, rank).has_head:
        stages = (*stages, _draft_stage(draft, card=card, limits=limits, rank=rank, dtype=dtype, probe=probe))
    return Measured(
        rank=rank,
        device_bytes=card.total_bytes,
        weights=weights,
        context=context_bytes(card.kind, known=card.context),
        libraries=library_bytes(card.kind, known=card.libraries),
        stages=stages,
        graphs=_graphs(config, card=card, limits=limits, rank=rank, dtype=dtype),
        foreign_bytes=card.system or Quantity.exact(0, Source.ASSUMED, "an empty device"),
    )


def leave_out(measured: Measured, disabled: frozenset[str]) -> Measured:
    """The same without what is counted here and was switched off under the name of its reserve."""
    stages = measured.stages
    if "sampler rows" in disabled:
        stages = tuple(stage for stage in stages if stage.stage != "sampler")
    if "allocator fragmentation" in disabled:
        stages = tuple(replace(stage, reserved=stage.allocated) for stage in stages)
    return replace(measured, stages=stages, graphs=None if "cuda graphs" in disabled else measured.graphs)


def _graphs(config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str) -> Quantity | None:
    sizes = limits.graph_batch_sizes
    if not sizes:
        return None
    rows = sizes[-1] * (1 + limits.max_draft_tokens)
    return graph_bytes(
        config, device_kind=card.kind, max_batch_size=rows, num_graphs=len(sizes), dtype=dtype, rank=rank
    )


def _stages(
    config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str, probe: StageProbe | None
) -> tuple[StagePeak, ...]:
    known = None if probe is None else probe.stages(config, card=card, limits=limits, rank=rank, dtype=dtype)
    encoder = _encoder_stages(config, card=card, limits=limits, rank=rank, dtype=dtype)
    if known is not None:
        return (*known, *encoder)
    rows = limits.max_logits_rows
    prefill = StepShape(
        num_tokens=limits.max_num_tokens, prefill_tokens=limits.max_num_tokens, prefill_rows=rows, logits_rows=rows
    )
    decode = StepShape(num_tokens=rows, decode_rows=rows, logits_rows=rows)
    found = []
    for name, shape in (("prefill", prefill), ("decode", decode)):
        peak = forward_peak(config, num_tokens=shape.num_tokens, logits_rows=rows, dtype=dtype, rank=rank)
        found.append(_stage(name, shape, peak.quantity(ref=_ref(peak, shape.num_tokens)), card.kind))
    found += encoder
    if not rank_shape(config, rank).has_head:
        return tuple(found)  # only the last pipeline stage samples
    sampled = sampler_bytes(config, logits_rows=rows, dtype=dtype, device_kind=card.kind)
    allocated = predicted(sampled, ref=f"costs.activations: {rows:,} rows of logits and what sampling takes")
    found.append(_stage("sampler", decode, allocated, card.kind))
    return tuple(found)


def _encoder_stages(
    config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str
) -> tuple[StagePeak, ...]:
    """The widest of the towers, which lie on the first pipeline stage and run one at a time; nothing without one."""
    if not limits.max_encoder_tokens or not rank_shape(config, rank).has_embeddings or not config.towers:
        return ()
    peaks = (encoder_peak(tower, num_tokens=limits.max_encoder_tokens, dtype=dtype) for tower in config.towers)
    widest: Peak = max(peaks, key=lambda peak: peak.bytes)
    shape = StepShape(num_tokens=limits.max_encoder_tokens)
    return (_stage("encoder", shape, widest.quantity(ref=_ref(widest, shape.num_tokens)), card.kind),)


def _draft_stage(
    draft: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str, probe: StageProbe | None
) -> StagePeak:
    """The draft model reads the prompt as the target does, beside it and not at the same moment."""
    rows = limits.max_logits_rows
    shape = StepShape(num_tokens=limits.max_num_tokens, prefill_tokens=limits.max_num_tokens, logits_rows=rows)
    where = draft_rank(rank)
    known = None if probe is None else probe.stages(draft, card=card, limits=limits, rank=where, dtype=dtype)
    if known:
        return replace(known[0], stage="draft")
    peak = forward_peak(draft, num_tokens=shape.num_tokens, logits_rows=rows, dtype=dtype, rank=where)
    return _stage("draft", shape, peak.quantity(ref=_ref(peak, shape.num_tokens)), card.kind)


def _ref(peak: Peak, num_tokens: int) -> str:
    return f"costs.activations: {peak.phase} phase of {num_tokens:,} tokens"


def _stage(name: str, shape: StepShape, allocated: Quantity, device_kind: str) -> StagePeak:
    reserved = reserved_for(allocated, device_kind=device_kind)
    return StagePeak(stage=name, shape=shape, allocated=allocated, reserved=reserved)
