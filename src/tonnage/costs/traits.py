"""What a family's class has beside the matrices that every layer of its kind has: biases, norms, gates, sinks.

A config.json says how large the matrices are; which small tensors lie between them is known from the class alone.
Each row repeats one class of transformers, and tests/cpu counts the class's parameters against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from tonnage.costs.config import ModelConfig

#: Yes, no, or what config.json says under a key, with what the class assumes where the key is missing.
Switch: TypeAlias = bool | tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """One family. Sizes are counts; what is a ``Switch`` in the table is a plain bool after ``traits_of``.

    qkv_bias, out_bias     biases of the attention projections, ``attention_bias`` of all of them; ``latent_bias`` of
                           MLA's (both down projections and out)
    mlp_bias, every_bias   biases of a dense feed-forward part; of attention too
    qk_norm, norm_width    norms over queries and keys: one for every head ("head"), one over all heads side by side
                           ("all"), or one of its own for each head ("each")
    norms_per_part         norms beside one mixer or one feed-forward part: 1, or 2 where its output has one too
    is_parallel            both parts read the same norm
    norm_bias, head_bias   a bias beside every norm's weight; beside the vocabulary projection
    output_gate            the query projection is twice as wide, its second half gates attention's output
    sinks, window_sinks    one learned logit a query head, in every layer or in those with a window
    router_bias, expert_bias   beside the router, and beside every expert's matrices
    router_correction      float32 corrections of the router's scores; parameters of the class only in few
    float_routing          the weights of experts are float32 without them
    shared_gate            one row that gates the shared experts
    conv_bias, inner_bias  of a recurrent layer: its convolution, its projections
    inner_norm             Mamba2 layers have a gated norm
    final_norm             a norm before the vocabulary projection
    num_positions          learned position embeddings: the key that holds their number, and an addend
    embedding_norm         a norm right after the embeddings
    vocabulary_extra       rows of the embeddings that the vocabulary projection lacks
    """

    qkv_bias: Switch = False
    out_bias: Switch = False
    attention_bias: Switch = False
    every_bias: Switch = False
    latent_bias: Switch = ("attention_bias", False)
    mlp_bias: Switch = False
    qk_norm: Switch = False
    norm_width: str = "head"
    norms_per_part: int = 1
    is_parallel: Switch = False
    norm_bias: Switch = False
    head_bias: Switch = False
    output_gate: Switch = False
    sinks: Switch = False
    window_sinks: bool = False
    router_bias: Switch = False
    expert_bias: Switch = False
    router_correction: bool = False
    correction_counts: bool = False
    float_routing: bool = False
    shared_gate: bool = False
    conv_bias: Switch = True
    inner_bias: Switch = False
    inner_norm: Switch = True
    final_norm: bool = True
    num_positions: tuple[str, int] | None = None
    embedding_norm: bool = False
    vocabulary_extra: int = 0


_BIAS: Switch = ("attention_bias", False)
_BIASED: Switch = ("attention_bias", True)

_LLAMA = Traits(attention_bias=_BIAS, mlp_bias=("mlp_bias", False))
_ATTENTION_BIAS = Traits(attention_bias=_BIAS)
_QWEN3 = Traits(attention_bias=_BIAS, qk_norm=True)
_QWEN3_NEXT = Traits(attention_bias=_BIAS, qk_norm=True, output_gate=True, shared_gate=True, conv_bias=False)
_GEMMA2 = Traits(attention_bias=_BIAS, norms_per_part=2)
_GEMMA3 = Traits(attention_bias=_BIAS, norms_per_part=2, qk_norm=True)
_DEEPSEEK = Traits(router_correction=True)
_COHERE = Traits(attention_bias=_BIAS, qk_norm=("use_qk_norm", False), norm_width="each", is_parallel=True)
_LFM2 = Traits(qk_norm=True, conv_bias=("conv_bias", False), inner_bias=("conv_bias", False))
_GRANITE_HYBRID = Traits(
    attention_bias=_BIAS, mlp_bias=("mlp_bias", False), conv_bias=("mamba_conv_bias", True),
    inner_bias=("mamba_proj_bias", False),
)  # fmt: skip

#: By the model_type of the text model.
TRAITS: dict[str, Traits] = {
    **dict.fromkeys(("llama", "granite", "smollm3", "arcee", "helium"), _LLAMA),
    **dict.fromkeys(("mistral", "mixtral", "ministral", "ministral3", "phi3", "gemma", "llama4_text"), Traits()),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), Traits(qkv_bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN3_NEXT),
    "qwen2_moe": Traits(qkv_bias=("qkv_bias", True), shared_gate=True),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _DEEPSEEK),
    "deepseek_v2": Traits(float_routing=True),
    "deepseek_v4": Traits(router_correction=True),  # its attention: costs/compressed.py
    "gpt_oss": Traits(attention_bias=_BIASED, sinks=True, router_bias=True, expert_bias=True),
    "granitemoe": _ATTENTION_BIAS,
    "granitemoeshared": _ATTENTION_BIAS,
    "granitemoehybrid": _GRANITE_HYBRID,
    "bamba": _GRANITE_HYBRID,
    "falcon_h1": Traits(
        attention_bias=_BIAS, conv_bias=("mamba_conv_bias", True), inner_bias=("mamba_proj_bias", False),
        inner_norm=("mamba_rms_norm", False), mlp_bias=("mlp_bias", False),
    ),
    "nemotron_h": Traits(
        mlp_bias=("mlp_bias", False), conv_bias=("use_conv_bias", True), inner_bias=("use_bias", False),
        router_correction=True,
    ),
    "mamba2": Traits(conv_bias=("use_conv_bias", True), inner_bias=("use_bias", False)),
    "lfm2": _LFM2,
    "lfm2_moe": Traits(
        qk_norm=True, conv_bias=("conv_bias", False), inner_bias=("conv_bias", False), router_correction=True
    ),
    "mllama_text_model": Traits(vocabulary_extra=8),
    "glm4_moe": Traits(
        qkv_bias=("attention_bias", False), qk_norm=("use_qk_norm", False), router_correction=True
    ),
    "glm4": Traits(qkv_bias=("attention_bias", True), norms_per_part=2),
    "olmo2": Traits(attention_bias=_BIAS, qk_norm=True, norm_width="all"),
    "olmo3": Traits(attention_bias=_BIAS, qk_norm=True, norm_width="all"),
    "olmoe": Traits(attention_bias=_BIAS, qk_norm=True, norm_width="all"),
    "flex_olmo": Traits(attention_bias=_BIAS, qk_norm=True, norm_width="all"),
    "cohere": _COHERE,
    "cohere2": Traits(attention_bias=_BIAS, is_parallel=True),
    "starcoder2": Traits(every_bias=("use_bias", True), norm_bias=True),
    "gpt_neox": Traits(attention_bias=_BIASED, mlp_bias=True, norm_bias=True),
    "gpt2": Traits(every_bias=True, norm_bias=True, num_positions=("n_positions", 0)),
    "bloom": Traits(every_bias=True, norm_bias=True, embedding_norm=True),
    "opt": Traits(every_bias=("enable_bias", True), norm_bias=True, num_positions=("max_position_embeddings", 2)),
    "phi": Traits(every_bias=True, norm_bias=True, is_parallel=True, head_bias=True),
    "phimoe": Traits(attention_bias=_BIAS, norm_bias=True, head_bias=("lm_head_bias", False)),
    "stablelm": Traits(qkv_bias=("use_qkv_bias", False), norm_bias=True, is_parallel=("use_parallel_residual", False)),
    "falcon": Traits(every_bias=("bias", False), norm_bias=True, is_parallel=("parallel_attn", True)),
    "ernie4_5": Traits(every_bias=("use_bias", False)),
    "ernie4_5_moe": Traits(every_bias=("use_bias", False), router_correction=True, correction_counts=True),
    "seed_oss": Traits(
        qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False), mlp_bias=("mlp_bias", False)
    ),
    "nemotron": Traits(attention_bias=_BIAS, mlp_bias=("mlp_bias", False), norm_bias=True),
    "exaone4": Traits(qk_norm=True),
    "hunyuan_v1_moe": _QWEN3,
    "hunyuan_v1_dense": _QWEN3,
    "minimax": Traits(conv_bias=False),
    "minimax_m2": Traits(qk_norm=True, norm_width="all", router_correction=True),
    **dict.fromkeys(("exaone_moe", "dots1"), Traits(qk_norm=True, router_correction=True)),
    "solar_open": Traits(router_correction=True),
    "afmoe": Traits(
        qk_norm=True, output_gate=True, norms_per_part=2, router_correction=True, correction_counts=True
    ),
    "mimo_v2_flash": Traits(window_sinks=True, router_correction=True),
    "minicpm3": Traits(),
    "kimi_linear": Traits(conv_bias=False, router_correction=True),
    "cohere2_moe": Traits(attention_bias=_BIAS, is_parallel=True),
    "gptj": Traits(mlp_bias=True, norm_bias=True, is_parallel=True, head_bias=True),
    "olmo": Traits(attention_bias=_BIAS, norms_per_part=0, final_norm=False),
    "glm": Traits(qkv_bias=("attention_bias", True)),
    "granite_swa": Traits(attention_bias=_BIAS, mlp_bias=("mlp_bias", False), sinks=True),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), Traits(attention_bias=_BIAS, norms_per_part=2, qk_norm=True)),
    "jamba": Traits(conv_bias=("mamba_conv_bias", True), inner_bias=("mamba_proj_bias", False)),
}  # fmt: skip


#: What a class assumes of ``attn_logit_softcapping`` where config.json is silent.
CLASS_SOFT_CAPS = {"gemma2": 50.0}


def traits_of(config: ModelConfig) -> tuple[Traits, bool]:
    """The family's row with every switch read, and whether there is one; an unknown family is taken to be plain."""
    row = TRAITS.get(config.model_type)
    known = row is not None
    raw = inner_raw(config)
    read: dict[str, Any] = {
        field.name: _read(raw, getattr(row or Traits(), field.name), field.name) for field in fields(Traits)
    }
    attention = read["attention_bias"] or read["every_bias"]
    read["qkv_bias"] = read["qkv_bias"] or attention or config.qkv_bias
    read["out_bias"] = read["out_bias"] or attention or config.out_bias
    read["mlp_bias"] = read["mlp_bias"] or read["every_bias"] or config.mlp_bias
    read["qk_norm"] = read["qk_norm"] or config.qk_norm
    return Traits(**read), known


def soft_cap(config: ModelConfig) -> float | None:
    """Of attention scores: x becomes cap * tanh(x / cap). None: they stay as they are."""
    cap: Any = inner_raw(config).get("attn_logit_softcapping", CLASS_SOFT_CAPS.get(config.model_type))
    return float(cap) if cap else None


def inner_raw(config: ModelConfig) -> Mapping[str, object]:
    """config.json with the text model's own part laid over it."""
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.raw.get(key)
        if isinstance(inner, Mapping):
            return {**config.raw, **inner}
    return config.raw


def _read(raw: Mapping[str, object], value: object, name: str) -> object:
    if isinstance(value, tuple) and name != "num_positions":
        key, default = value
        found = raw.get(key)
        return default if found is None else bool(found)
    return value
