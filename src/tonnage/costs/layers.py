"""What one layer of a model is made of, as far as memory goes: how it mixes tokens, and its feed-forward part.

Counts and sizes are the model's, before any split over ranks; sizes are elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention that keeps the keys and values of every past token, or of the last ``window`` tokens.

    head_dim, v_head_dim   of one query or key head, and of one value head (they differ in few models); a value head
                           of 0 elements: the values are the keys, one vector is kept for both
    window                 tokens a query can look back, itself included; None: all of them
    is_cross               keys and values come from an encoder, once per request, and do not grow with the text
    kv_from                the layer whose cache this one reads; it keeps none of its own
    index_head_dim         a sparse indexer keeps one key of this size for every token beside the cache; 0: none
    compress_ratio         one cached entry stands for so many tokens (compressed attention); 1: for one
    qk_rope_head_dim       elements of a key that stay 16 bits wide where such a vector is kept in 8 bits; 0: none
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    is_cross: bool = False
    kv_from: int | None = None
    index_head_dim: int = 0
    compress_ratio: int = 1
    qk_rope_head_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: one compressed vector and one rotary key a token, shared by all heads.

    The cache holds ``kv_lora_rank + qk_rope_head_dim`` elements a token, whole on every tensor-parallel rank.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    index_head_dim: int = 0
    num_index_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A layer whose memory of the past is a state of fixed size: Mamba2, gated delta, linear attention, short conv.

    The state of one sequence is a window of inputs, ``(conv_kernel - 1) * conv_channels``, and a matrix,
    ``num_heads * head_dim * state_size``; either may be empty (0).

    kind        "mamba1", "mamba2", "gated_delta", "kda", "linear", "rg_lru" or "short_conv": what the weights look like
    num_groups  heads of the inputs that several heads share (keys and queries, or B and C); conv_channels holds
                ``num_heads * head_dim`` channels of the heads, and what is left belongs to the groups
    """

    kind: str
    num_heads: int
    head_dim: int
    state_size: int
    conv_channels: int
    conv_kernel: int
    num_groups: int = 1


Mixer: TypeAlias = Attention | Latent | Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A feed-forward part of one width. ``is_gated``: gate and up beside down (three matrices), else two."""

    intermediate_size: int
    is_gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture: ``num_experts`` routed ones of which a token takes ``num_experts_per_token``, and shared ones.

    ``shared_intermediate_size`` is the width of all shared experts together; 0: none.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    is_gated: bool = True


FeedForward: TypeAlias = Dense | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer. Either part may be missing (a layer of a hybrid that only mixes, or only feeds forward).

    ``beside`` is a second mixer of the same layer: the state next to attention in a parallel hybrid, the compressed
    past next to a window, the attention to an encoder after a decoder's own.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    beside: Mixer | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a checkpoint packs its matrices.

    method      as config.json names it: "fp8", "awq", "gptq", "bitsandbytes", "compressed-tensors", "modelopt" ...
    format      what lies in memory: "fp8", "int8", "int4", "nf4", "nvfp4", "mxfp4" or "gguf"
    group_size  elements that share one scale; None: one scale a row or a matrix
    kept        name patterns of modules that stay in the model's dtype
    """

    method: str
    format: str
    group_size: int | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder beside the text model (vision, audio), a plain transformer for its weights.

    patch_elements   inputs of the first projection: channels * patch height * patch width (* frames)
    num_positions    learned position embeddings; 0: none
    """

    kind: str
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_elements: int = 0
    num_positions: int = 0
    projector_elements: int = 0
    is_gated: bool = False
