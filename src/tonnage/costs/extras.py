"""Tensors that only one or two families have: per-layer embeddings, alternating updates, routers with scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Dense, Experts, Layer
from tonnage.costs.tensors import Component, Cut, Tensor, matrix, vector
from tonnage.costs.traits import inner_raw
from tonnage.units import ceil_div, round_up

_PER_LAYER = ("gemma3n_text", "gemma4_text")
_MODEL, _LAYER = Component.FEED_FORWARD, Component.FEED_FORWARD


def _count(raw: Mapping[str, object], key: str, default: int) -> int:
    found = raw.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else default


def expert_hidden(config: ModelConfig) -> int:
    """Width of the vector that routed experts work on where it is not the model's; 0 where it is."""
    return _count(inner_raw(config), "moe_latent_size", 0)


def settled(config: ModelConfig, layer: Layer) -> Layer:
    """The layer with the widths that three classes work out for themselves.

    LFM2 takes two thirds of the width it is given, times a factor, rounded up to a multiple; Hunyuan's mixtures have
    a shared expert as wide as a routed one; RecurrentGemma's gate and up are each half of the width.
    """
    part, raw = layer.feed_forward, inner_raw(config)
    if config.model_type == "lfm2" and isinstance(part, Dense) and raw.get("block_auto_adjust_ff_dim", True):
        given = _count(raw, "block_ff_dim", 0) or _count(raw, "intermediate_size", 12_288)
        factor = raw.get("block_ffn_dim_multiplier", 1.0)
        width = 2 * given // 3
        if isinstance(factor, int | float):  # a null: neither scaled nor rounded
            width = round_up(width * Fraction(factor) // 1, _count(raw, "block_multiple_of", 256))
        return replace(layer, feed_forward=replace(part, intermediate_size=width))
    if config.model_type == "recurrent_gemma" and isinstance(part, Dense):
        return replace(layer, feed_forward=replace(part, intermediate_size=_count(raw, "intermediate_size", 7680) // 2))
    if config.model_type == "hunyuan_v1_moe" and isinstance(part, Experts):
        return replace(layer, feed_forward=replace(part, shared_intermediate_size=part.intermediate_size))
    return layer


def layer_extras(config: ModelConfig, layer: Layer) -> Iterator[Tensor]:
    """What one layer has beyond its mixer and its feed-forward part."""
    if config.model_type not in _PER_LAYER:
        return
    hidden, raw = config.hidden_size, inner_raw(config)
    if per_layer := _count(raw, "hidden_size_per_layer_input", 256):
        yield matrix(_LAYER, "per_layer_input_gate", per_layer, hidden)
        yield matrix(_LAYER, "per_layer_projection", hidden, per_layer)
        yield vector(Component.NORMS, "post_per_layer_input_norm", hidden)
    if config.model_type == "gemma3n_text":
        yield from _alternating_updates(raw, hidden)
    elif isinstance(layer.feed_forward, Experts):
        yield vector(Component.ROUTER, "router.scale", hidden + layer.feed_forward.num_experts)
        yield vector(Component.NORMS, "feedforward_layernorms", 3 * hidden)


def _alternating_updates(raw: Mapping[str, object], hidden: int) -> Iterator[Tensor]:
    """Gemma 3n: coefficients that mix several copies of the hidden vector, and a low-rank bypass."""
    copies, rank = _count(raw, "altup_num_inputs", 4), _count(raw, "laurel_rank", 64)
    yield vector(_LAYER, "altup.coefs", copies**2 + copies**3 + copies * hidden)
    yield vector(Component.NORMS, "altup.norms", 2 * hidden)
    yield matrix(_LAYER, "laurel.linear_left", rank, hidden)
    yield matrix(_LAYER, "laurel.linear_right", hidden, rank)
    yield vector(Component.NORMS, "laurel.post_laurel_norm", hidden)


def model_extras(config: ModelConfig, cut: Cut) -> Iterator[Tensor]:
    """What lies beside the embeddings, once a model."""
    if config.model_type not in _PER_LAYER:
        return
    hidden, raw = config.hidden_size, inner_raw(config)
    if per_layer := _count(raw, "hidden_size_per_layer_input", 256):
        vocabulary = ceil_div(_count(raw, "vocab_size_per_layer_input", 262_144), cut.inner)
        width = config.num_layers * per_layer
        table = vector(Component.EMBEDDINGS, "embed_tokens_per_layer", vocabulary, count=width)
        yield table
        yield matrix(_MODEL, "per_layer_model_projection", width, hidden)
        yield vector(Component.NORMS, "per_layer_projection_norm", per_layer)
    if config.model_type == "gemma3n_text":
        copies = _count(raw, "altup_num_inputs", 4) - 1
        yield matrix(_MODEL, "altup_projections", hidden, hidden, count=2 * copies)
