"""``Measured`` without a device: the closed forms of ``costs`` in the place of probes."""

from __future__ import annotations

from tonnage.config import Limits
from tonnage.costs.activations import forward_peak, predicted, reserved_for, sampler_bytes
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import context_bytes, graph_bytes, library_bytes
from tonnage.costs.ranks import rank_shape
from tonnage.hardware import Card
from tonnage.terms import Measured, Quantity, Rank, Source, StagePeak, StepShape


def predict(config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str, weights: Quantity) -> Measured:
    """What a start on that card would measure, as far as formulas know. The card is taken to be empty."""
    return Measured(
        rank=rank,
        device_bytes=card.total_bytes,
        weights=weights,
        context=context_bytes(card.kind, known=card.context),
        libraries=library_bytes(card.kind, known=card.libraries),
        stages=_stages(config, card=card, limits=limits, rank=rank, dtype=dtype),
        graphs=_graphs(config, card=card, limits=limits, rank=rank, dtype=dtype),
        foreign_bytes=Quantity.exact(0, Source.ASSUMED, "an empty device"),
    )


def _graphs(config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str) -> Quantity | None:
    sizes = limits.graph_batch_sizes
    if not sizes:
        return None
    return graph_bytes(
        config, device_kind=card.kind, max_batch_size=sizes[-1], num_graphs=len(sizes), dtype=dtype, rank=rank
    )


def _stages(config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str) -> tuple[StagePeak, ...]:
    rows = limits.max_logits_rows
    prefill = StepShape(
        num_tokens=limits.max_num_tokens, prefill_tokens=limits.max_num_tokens, prefill_rows=rows, logits_rows=rows
    )
    decode = StepShape(num_tokens=rows, decode_rows=rows, logits_rows=rows)
    found = []
    for name, shape in (("prefill", prefill), ("decode", decode)):
        peak = forward_peak(config, num_tokens=shape.num_tokens, logits_rows=rows, dtype=dtype, rank=rank)
        allocated = predicted(peak.bytes, ref=f"costs.activations: {peak.phase} phase of {shape.num_tokens:,} tokens")
        found.append(_stage(name, shape, allocated, card.kind))
    if not rank_shape(config, rank).has_head:
        return tuple(found)  # only the last pipeline stage samples
    sampled = sampler_bytes(config, logits_rows=rows, dtype=dtype, device_kind=card.kind)
    allocated = predicted(sampled, ref=f"costs.activations: {rows:,} rows of logits and what sampling takes")
    found.append(_stage("sampler", decode, allocated, card.kind))
    return tuple(found)


def _stage(name: str, shape: StepShape, allocated: Quantity, device_kind: str) -> StagePeak:
    reserved = reserved_for(allocated, device_kind=device_kind)
    return StagePeak(stage=name, shape=shape, allocated=allocated, reserved=reserved)
