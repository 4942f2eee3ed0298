"""Tensors of DeepSeek-V4's attention, whose past lies in entries of several tokens, and of its hyper-connections.

Names and shapes are those of transformers' class. Queries and outputs go through latents; keys and values are one
vector that every head shares. What compresses the past, and the indexer, lie whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Layer
from tonnage.costs.tensors import Component, Cut, Tensor, matrix, vector
from tonnage.costs.traits import inner_raw

MODEL_TYPE = "deepseek_v4"
_PART = Component.ATTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The sizes that layers of this kind share; copies of the hidden vector that hyper-connections mix."""

    hidden: int
    query_rank: int
    out_rank: int
    out_groups: int
    num_index_heads: int
    num_copies: int

    @classmethod
    def of(cls, config: ModelConfig) -> Compressed | None:
        """None for every other family."""
        if config.model_type != MODEL_TYPE:
            return None
        raw = inner_raw(config)

        def count(key: str, default: int) -> int:
            found = raw.get(key)
            return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else default

        return cls(
            hidden=config.hidden_size,
            query_rank=count("q_lora_rank", 1024),
            out_rank=count("o_lora_rank", 1024),
            out_groups=count("o_groups", 8),
            num_index_heads=count("index_n_heads", 64),
            num_copies=count("hc_mult", 4),
        )


def compressed_tensors(layer: Layer, sizes: Compressed, cut: Cut) -> Iterator[Tensor]:
    """The mixer of one layer, and its two hyper-connections."""
    near, past = layer.mixer, layer.beside
    if not isinstance(near, Attention):
        return
    heads, groups = cut.heads(near.num_heads), cut.heads(sizes.out_groups)
    width = near.head_dim
    yield matrix(_PART, "self_attn.q_a_proj", sizes.query_rank, sizes.hidden)
    yield vector(Component.NORMS, "self_attn.q_a_norm", sizes.query_rank)
    yield matrix(_PART, "self_attn.q_b_proj", heads * width, sizes.query_rank)
    yield matrix(_PART, "self_attn.kv_proj", width, sizes.hidden)
    yield vector(Component.NORMS, "self_attn.kv_norm", width)
    yield matrix(_PART, "self_attn.o_a_proj", groups * sizes.out_rank, near.num_heads * width // sizes.out_groups)
    yield matrix(_PART, "self_attn.o_b_proj", sizes.hidden, groups * sizes.out_rank)
    yield vector(_PART, "self_attn.sinks", heads)
    if isinstance(past, Attention):
        yield from _compressor("self_attn.compressor", past, width, sizes.hidden)
        if past.index_head_dim:
            yield from _indexer(past, sizes)
    copies = sizes.num_copies
    rows = (2 + copies) * copies
    for name in ("attn_hc", "ffn_hc"):
        yield vector(Component.NORMS, f"{name}.fn", rows * copies * sizes.hidden + rows + 3)


def hyper_head(sizes: Compressed) -> Tensor:
    """What joins the copies of the hidden vector before the last norm."""
    return vector(Component.NORMS, "hc_head", sizes.num_copies * sizes.num_copies * sizes.hidden + sizes.num_copies + 1)


def _compressor(name: str, past: Attention, width: int, hidden: int) -> Iterator[Tensor]:
    """Entries with an indexer overlap: each is made of two halves."""
    wide = width * (2 if past.index_head_dim else 1)
    yield vector(_PART, f"{name}.position_bias", past.compress_ratio * wide)
    for part in ("kv_proj", "gate_proj"):
        yield replace(matrix(_PART, f"{name}.{part}", wide, hidden), can_pack=False)
    yield vector(Component.NORMS, f"{name}.kv_norm", width)


def _indexer(past: Attention, sizes: Compressed) -> Iterator[Tensor]:
    name = "self_attn.compressor.indexer"
    yield from _compressor(name, past, past.index_head_dim, sizes.hidden)
    rows = sizes.num_index_heads * past.index_head_dim
    yield matrix(_PART, f"{name}.q_b_proj", rows, sizes.query_rank)
    yield replace(matrix(_PART, f"{name}.weights_proj", sizes.num_index_heads, sizes.hidden), can_pack=False)
