"""Bytes of cache that one token takes on one rank, as the reference counts them before it builds anything.

``static`` is what its budget counts with, ``runtime`` what its managers then allocate. They differ where a rank holds
less than one KV head: there the static number is too small. Ours has one formula, and it is the runtime one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tonnage.units import ceil_div


def local_layers(num_layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage: even, the first ones take the rest."""
    whole, rest = divmod(num_layers, pp)
    return [whole + (stage < rest) for stage in range(pp)]


def costed_layers(num_layers: int, pp: int, stage: int) -> int:
    """Layers that a stage's cost is made of: never none, so that nothing is divided by zero."""
    return max(1, local_layers(num_layers, pp)[stage])


def static_bytes_per_token(
    *, num_layers: int, num_kv_heads: int | Sequence[int], head_dim: int, element_bytes: int, tp: int = 1
) -> int:
    """Keys and values of all layers; ``tp`` is 1 under attention data parallelism.

    A list of heads, one for each layer, is replaced by its mean.
    """
    heads = num_kv_heads if isinstance(num_kv_heads, int) else Fraction(sum(num_kv_heads), len(num_kv_heads))
    return int(2 * num_layers * (head_dim * heads // tp) * element_bytes)


def runtime_bytes_per_token(
    *, num_layers: int, num_kv_heads: int | Sequence[int], head_dim: int, element_bytes: int, tp: int = 1
) -> int:
    """The same with whole heads on every rank and each layer by itself."""
    heads = [num_kv_heads] * num_layers if isinstance(num_kv_heads, int) else num_kv_heads
    return 2 * head_dim * element_bytes * sum(ceil_div(each, tp) for each in heads)


def latent_bytes_per_token(*, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, element_bytes: int) -> int:
    """One compressed vector and one rotary key for each layer, whole on every tensor-parallel rank."""
    return num_layers * (kv_lora_rank + qk_rope_head_dim) * element_bytes


def packed_fp4_bytes(num_elements: int) -> int:
    """Packed 4-bit data and one 8-bit scale for every 16 elements. V1 rounds all layers at once, V2 each by itself."""
    return ceil_div(num_elements, 2) + ceil_div(num_elements, 16)


def fp4_latent_bytes_per_token(*, num_layers: int, num_elements: int, scale_page_bytes: int, block_tokens: int) -> int:
    """The 4-bit latent manager: packed data, scales, and a page of value scales spread over the tokens of a block.

    Its tails of high precision are sized by the window and not in here.
    """
    return num_layers * (packed_fp4_bytes(num_elements) + ceil_div(scale_page_bytes, block_tokens))


def indexer_bytes_per_token(
    *, num_layers: int, index_head_dim: int, quantisation_block: int = 128, scale_bytes: int = 4
) -> int:
    """Side cache of a sparse indexer: one 8-bit key a token and layer, a scale for each ``quantisation_block``."""
    return num_layers * (index_head_dim + ceil_div(index_head_dim, quantisation_block) * scale_bytes)


def cross_bytes_per_token(*, num_decoder_layers: int, num_encoder_heads: int, head_dim: int, element_bytes: int) -> int:
    """Per token of the encoder: every decoder layer keeps its keys and values. One beam, whatever the width."""
    return 2 * num_decoder_layers * num_encoder_heads * head_dim * element_bytes


def helix_draft_slope(dense_slope: int, *, cp: int) -> int:
    """Slope of a dense drafter beside a target under helix.

    It is costed with the context ranks turned into tensor ranks; one local token of the target stands for ``cp``.
    """
    return dense_slope * cp
