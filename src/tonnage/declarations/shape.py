"""What an attention backend has to know of a model to size its scratch: heads and sizes of one kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tonnage.config import DEFAULT_BLOCK_TOKENS
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Latent, Mixer
from tonnage.costs.ranks import rank_shape
from tonnage.costs.traits import soft_cap, traits_of
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Rank
from tonnage.units import ceil_div

#: How a layer chooses which past tokens it attends to; "skip_softmax" and "none" read all of them.
ALGORITHMS = ("none", "skip_softmax", "dsa", "deepseek_v4")
#: Names under which a cache of 4-bit elements with a scale for every 16 of them is known.
NVFP4_NAMES = ("nvfp4", "float4_e2m1fn_x2")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One kind of attention layer on one rank. Sizes are elements; heads are this rank's.

    head_dim, v_head_dim    of a query or key head and of a value head, as the kernel sees them
    kv_lora_rank            elements of the compressed vector of a latent layer; 0: keys and values are cached as such
    qk_nope_head_dim, qk_rope_head_dim   the parts of a latent layer's head that are compressed and that carry positions
    algorithm               one of ``ALGORITHMS``
    has_short_mha           short contexts of a sparse latent layer are expanded like dense ones
    kv_dtype                of the cache as it is allocated
    row_tokens              query tokens of a decoding row: its last token and what is drafted after it
    is_scored               scores are changed one by one, by a soft-cap or by sinks
    num_windows             how many lengths of window such layers have, none counting as one
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    algorithm: str = "none"
    has_short_mha: bool = False
    kv_dtype: str = "bfloat16"
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    row_tokens: int = 1
    is_scored: bool = False
    num_windows: int = 1

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def is_sparse(self) -> bool:
        return self.algorithm in ("dsa", "deepseek_v4")

    @property
    def is_nvfp4(self) -> bool:
        return self.kv_dtype in NVFP4_NAMES

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype.startswith(("float8", "fp8"))

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head, rounded up."""
        return ceil_div(self.num_heads, self.num_kv_heads)

    @property
    def element_bytes(self) -> int:
        """Bytes of one gathered element; packed 4-bit elements are unpacked to 16 bits on the way."""
        return 2 if self.is_nvfp4 else DTYPE_BYTES.get(self.kv_dtype, 1)

    @property
    def label(self) -> str:
        """Tells kinds of layers of one model apart, as in "32 heads of 128 on 8"."""
        return f"{self.num_heads} heads of {self.head_dim} on {self.num_kv_heads}"


def sparse_algorithm(config: ModelConfig) -> str:
    """Which of ``ALGORITHMS`` the model's layers use: those with an indexer are sparse."""
    has_indexer = any(
        isinstance(mixer, Attention | Latent) and mixer.index_head_dim
        for layer in config.layers
        for mixer in layer.mixers
    )
    if not has_indexer:
        return "none"
    return "deepseek_v4" if config.model_type == "deepseek_v4" else "dsa"


def attention_shapes(
    config: ModelConfig,
    *,
    kv_dtype: str,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    row_tokens: int = 1,
    rank: Rank | None = None,
) -> tuple[AttentionShape, ...]:
    """Each kind of attention that this rank's layers have, once, in the order of the layers; recurrent ones have none.

    Query heads are divided among the tensor-parallel ranks, and key heads as whole ones, unless attention is
    data-parallel. Raises ``InvalidSetting`` where heads do not divide.
    """
    rank = rank or Rank()
    held = rank_shape(config, rank)
    num_ranks = 1 if rank.attention_dp else rank.tp
    algorithm = sparse_algorithm(config)
    # Most layers are alike, so each kind is worked out once.
    mixers = dict.fromkeys(mixer for index in held.layers for mixer in _mixers(config, index))
    windows: dict[AttentionShape, set[int | None]] = {}
    for mixer in mixers:
        if shape := _shape(mixer, num_ranks, algorithm):
            windows.setdefault(shape, set()).add(mixer.window if isinstance(mixer, Attention) else None)
    traits = traits_of(config)[0]
    known: dict[str, Any] = {
        "kv_dtype": kv_dtype,
        "block_tokens": block_tokens,
        "row_tokens": row_tokens,
        "is_scored": soft_cap(config) is not None or bool(traits.sinks) or traits.window_sinks,
    }
    return tuple(replace(shape, **known, num_windows=len(found)) for shape, found in windows.items())


def _mixers(config: ModelConfig, index: int) -> tuple[Mixer, ...]:
    """Of one layer; a config with no layers written out has plain attention in each."""
    if config.layers:
        return config.layers[index].mixers
    uniform = Attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
    )
    return (uniform,)


def _shape(mixer: Mixer, num_ranks: int, algorithm: str) -> AttentionShape | None:
    if isinstance(mixer, Latent):
        heads = ceil_div(mixer.num_heads, num_ranks)
        return AttentionShape(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=mixer.qk_nope_head_dim + mixer.qk_rope_head_dim,
            v_head_dim=mixer.v_head_dim,
            kv_lora_rank=mixer.kv_lora_rank,
            qk_nope_head_dim=mixer.qk_nope_head_dim,
            qk_rope_head_dim=mixer.qk_rope_head_dim,
            algorithm=algorithm,
        )
    if isinstance(mixer, Attention):
        return AttentionShape(
            num_heads=ceil_div(mixer.num_heads, num_ranks),
            num_kv_heads=ceil_div(mixer.num_kv_heads, num_ranks),
            head_dim=mixer.head_dim,
            v_head_dim=mixer.v_head_dim,
            algorithm=algorithm if mixer.index_head_dim else "none",
        )
    return None
