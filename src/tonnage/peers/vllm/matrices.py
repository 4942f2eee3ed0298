"""The matrices of a layer as vLLM holds them: projections that share their input are one."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Dense, Experts, Layer
from tonnage.costs.ranks import attention_ranks, rank_kv_heads
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Rank
from tonnage.units import ceil_div

#: Bytes of one element by the packed format; scales lie apart.
_PACKED = {
    "fp8": Fraction(1), "int8": Fraction(1), "int4": Fraction(1, 2), "nf4": Fraction(1, 2),
    "nvfp4": Fraction(1, 2), "mxfp4": Fraction(1, 2),
}  # fmt: skip


def element_bytes(config: ModelConfig, dtype: str | None) -> Fraction:
    """Of a matrix that the checkpoint packs, or of the model's dtype."""
    if config.quantisation is not None:
        return _PACKED.get(config.quantisation.format, Fraction(1, 2))
    return Fraction(DTYPE_BYTES[dtype or config.dtype])


def fused_elements(config: ModelConfig, layer: Layer, rank: Rank) -> Iterator[int]:
    """Elements of each large matrix of one layer on one rank."""
    hidden, tp = config.hidden_size, rank.tp
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            heads = mixer.num_heads // attention_ranks(rank)
            kv_heads = rank_kv_heads(mixer.num_kv_heads, rank)
            yield (heads + 2 * kv_heads) * mixer.head_dim * hidden
            yield heads * (mixer.v_head_dim or mixer.head_dim) * hidden
    part = layer.feed_forward
    if isinstance(part, Dense):
        inner = ceil_div(part.intermediate_size, tp)
        yield (2 if part.is_gated else 1) * inner * hidden
        yield inner * hidden
    elif isinstance(part, Experts):
        experts, inner = part.num_experts // rank.ep, ceil_div(part.intermediate_size * rank.ep, tp)
        yield (2 if part.is_gated else 1) * experts * inner * hidden
        yield experts * inner * hidden


def expert_elements(config: ModelConfig, layer: Layer, rank: Rank, *, hidden_step: int, inner_step: int) -> int:
    """Elements of one layer's routed experts where a kernel fills both sides up to multiples; 0 for a dense layer."""
    part = layer.feed_forward
    if not isinstance(part, Experts):
        return 0
    inner = ceil_div(part.intermediate_size * rank.ep, rank.tp)
    sides = ceil_div(inner, inner_step) * inner_step * (ceil_div(config.hidden_size, hidden_step) * hidden_step)
    return part.num_experts // rank.ep * (3 if part.is_gated else 2) * sides
