"""The weights arena: every tensor of a model by name, shape and offset, computed from config.json alone.

Names and shapes are those of the model's class in transformers, so the engine can make its parameters views into
the arena. The planner prices the very list that the engine allocates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.costs.config import ModelConfig, refuse_unsupported
from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.costs.ranks import RankShape, rank_shape
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import round_up

#: One cache line, and enough for every vector load: tensors start at multiples of it.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter at ``offset_bytes`` from the start of the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLayout:
    """The arena. ``tied`` maps names that own no bytes to the tensor they share (``lm_head`` to the embeddings)."""

    tensors: tuple[TensorSpec, ...]
    tied: tuple[tuple[str, str], ...]
    total_bytes: int
    alignment_bytes: int
    source: Source = Source.DERIVED

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    def quantity(self) -> Quantity:
        return Quantity.exact(self.total_bytes, self.source, "costs.weights: every tensor's shape from config.json")


def weights_layout(config: ModelConfig, *, dtype: str | None = None, rank: Rank | None = None) -> WeightsLayout:
    """Every tensor of one rank, in the order of ``named_parameters()`` but with q, k and v side by side.

    ``dtype`` defaults to the model's own. Raises ``UnsupportedModel`` for a model whose tensors are not known
    exactly, ``InvalidSetting`` for an unknown dtype or a split that does not divide.
    """
    refuse_unsupported(config)
    element = parse_dtype(dtype or config.dtype, knob="dtype", allowed=WEIGHT_DTYPES)
    shape = rank_shape(config, rank or Rank())
    tensors, offset = [], 0
    for name, dims in _tensors(config, shape):
        tensor = TensorSpec(name=name, shape=dims, dtype=element, offset_bytes=offset)
        tensors.append(tensor)
        offset = round_up(offset + tensor.num_bytes, ALIGNMENT_BYTES)
    tied = shape.has_head and config.tie_word_embeddings
    return WeightsLayout(
        tensors=tuple(tensors),
        tied=(("lm_head.weight", "model.embed_tokens.weight"),) if tied else (),
        total_bytes=offset,
        alignment_bytes=ALIGNMENT_BYTES,
    )


Named = tuple[str, tuple[int, ...]]


def _tensors(config: ModelConfig, shape: RankShape) -> Iterator[Named]:
    table = (shape.vocab_size, config.hidden_size)
    tied_here = shape.has_head and config.tie_word_embeddings
    if shape.has_embeddings or tied_here:
        yield "model.embed_tokens.weight", table
    for layer in shape.layers:
        prefix = f"model.layers.{layer}."
        for name, dims in _layer(config, shape):
            yield prefix + name, dims
    if shape.has_head:
        yield "model.norm.weight", (config.hidden_size,)
        if not config.tie_word_embeddings:
            yield "lm_head.weight", table


def _layer(config: ModelConfig, shape: RankShape) -> Iterator[Named]:
    yield from _attention(config, shape)
    yield from _mlp(config, shape)
    yield "input_layernorm.weight", (config.hidden_size,)
    yield "post_attention_layernorm.weight", (config.hidden_size,)


def _attention(config: ModelConfig, shape: RankShape) -> Iterator[Named]:
    hidden = config.hidden_size
    query, key = shape.num_heads * config.head_dim, shape.num_kv_heads * config.head_dim
    if config.family.packed:
        projections = [("qkv_proj", query + 2 * key)]
    else:
        projections = [("q_proj", query), ("k_proj", key), ("v_proj", key)]
    # All matrices first, then all biases: the matrices stay adjacent, so a packed projection is a plain view.
    for name, rows in projections:
        yield f"self_attn.{name}.weight", (rows, hidden)
    if config.qkv_bias:
        for name, rows in projections:
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, query)
    if config.out_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def _mlp(config: ModelConfig, shape: RankShape) -> Iterator[Named]:
    hidden, inner = config.hidden_size, shape.intermediate_size
    projections = [("gate_up_proj", 2 * inner)] if config.family.packed else [("gate_proj", inner), ("up_proj", inner)]
    for name, rows in projections:
        yield f"mlp.{name}.weight", (rows, hidden)
    if config.mlp_bias:
        for name, rows in projections:
            yield f"mlp.{name}.bias", (rows,)
    yield "mlp.down_proj.weight", (hidden, inner)
    if config.mlp_bias:
        yield "mlp.down_proj.bias", (hidden,)
