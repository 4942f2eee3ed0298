"""The layout of the KV cache, and so its price: one group of layers, all of them side by side inside a block."""

from __future__ import annotations

from fractions import Fraction

from tonnage.config import DEFAULT_BLOCK_TOKENS
from tonnage.costs.config import ModelConfig, refuse_unsupported
from tonnage.costs.dtypes import KV_DTYPES, parse_dtype
from tonnage.costs.ranks import rank_shape
from tonnage.errors import InvalidSetting
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder, Part
from tonnage.terms import Rank

#: Beyond this a block is no longer a unit of rounding but a pool of its own.
LARGEST_BLOCK_TOKENS = 65_536


def kv_layout(
    config: ModelConfig,
    *,
    kv_dtype: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    rank: Rank | None = None,
) -> KVLayout:
    """The cache of one rank: blocks of shape (layers, 2, block_tokens, kv_heads, head_dim), K at 0 and V at 1.

    ``kv_dtype`` is the dtype that is allocated (default: that of the weights). ``block_tokens`` may be any number
    from 1 to 65,536; powers of two are usual, kernels ask for them, the arithmetic does not. Raises
    ``UnsupportedModel`` for attention that is not full, ``InvalidSetting`` for a dtype or a block size.
    """
    refuse_unsupported(config)
    element = parse_dtype(kv_dtype or config.dtype, knob="kv_dtype", allowed=KV_DTYPES)
    if isinstance(block_tokens, bool) or not 1 <= block_tokens <= LARGEST_BLOCK_TOKENS:
        raise InvalidSetting(
            "block_tokens", block_tokens, f"outside 1 to {LARGEST_BLOCK_TOKENS:,}", remedy="use 16, 32 or 64"
        )
    shape = rank_shape(config, rank or Rank())
    part = Part(
        name="kv",
        dtype=element,
        shape=(len(shape.layers), 2, block_tokens, shape.num_kv_heads, config.head_dim),
        offset_bytes=0,
    )
    group = KVGroup(
        name="full",
        kind=KVGroupKind.FULL,
        layers=shape.layers,
        window=None,
        block_tokens=block_tokens,
        block_bytes=part.num_bytes,
        parts=(part,),
    )
    return KVLayout(slab_bytes=part.num_bytes, order=KVOrder.BLOCK_MAJOR, groups=(group,))


def bytes_per_token(layout: KVLayout) -> int:
    """Bytes of one token over all groups, for display; the pool is priced per block. Rounded up."""
    return -(-sum(Fraction(group.block_bytes, group.block_tokens) for group in layout.groups) // 1)
