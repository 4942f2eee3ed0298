"""Tensors that only one or two families have: per-layer embeddings, alternating updates, routers with scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Dense, Experts, Layer
from tonnage.costs.reading import LARGEST_SIZE, PUBLISHED
from tonnage.costs.tensors import Component, Cut, Tensor, matrix, vector
from tonnage.costs.traits import inner_raw
from tonnage.errors import ModelConfigError
from tonnage.units import ceil_div, round_up

_PER_LAYER = ("gemma3n_text", "gemma4_text")
_PART = Component.FEED_FORWARD


def _count(config: ModelConfig, key: str, default: int, *, least: int = 0) -> int:
    """A whole number from ``least``, or ``default``. Raises ``ModelConfigError`` where the file has something else."""
    found = inner_raw(config).get(key)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= LARGEST_SIZE:
        raise _wrong(config, key, found, f"a whole number from {least} to {LARGEST_SIZE:,}")
    return found


def _wrong(config: ModelConfig, key: str, found: object, what: str) -> ModelConfigError:
    return ModelConfigError(
        f"{config.name}: {key} = {repr(found)[:40]} is not {what} in config.json",
        knob=key, value=found, remedy=PUBLISHED,
    )  # fmt: skip


def expert_hidden(config: ModelConfig) -> int:
    """Width of the vector that routed experts work on where it is not the model's; 0 where it is."""
    return _count(config, "moe_latent_size", 0)


def settled(config: ModelConfig, layer: Layer) -> Layer:
    """The layer with the widths that three classes work out for themselves.

    LFM2 takes two thirds of the width it is given, times a factor, rounded up to a multiple; Hunyuan's mixtures have
    a shared expert as wide as a routed one; RecurrentGemma's gate and up are each half of the width.
    """
    part, raw = layer.feed_forward, inner_raw(config)
    if config.model_type == "lfm2" and isinstance(part, Dense) and raw.get("block_auto_adjust_ff_dim", True):
        given = _count(config, "block_ff_dim", 0) or _count(config, "intermediate_size", 12_288)
        factor = raw.get("block_ffn_dim_multiplier", 1.0)
        width = 2 * given // 3
        if factor is not None:  # a null: neither scaled nor rounded
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
                raise _wrong(config, "block_ffn_dim_multiplier", factor, "a number above 0 and below 1,000")
            width = round_up(width * Fraction(factor) // 1, _count(config, "block_multiple_of", 256, least=1))
        return replace(layer, feed_forward=replace(part, intermediate_size=width))
    if config.model_type == "recurrent_gemma" and isinstance(part, Dense):
        return replace(
            layer, feed_forward=replace(part, intermediate_size=_count(config, "intermediate_size", 7680) // 2)
        )
    if config.model_type == "hunyuan_v1_moe" and isinstance(part, Experts):
        return replace(layer, feed_forward=replace(part, shared_intermediate_size=part.intermediate_size))
    return layer


def layer_extras(config: ModelConfig, layer: Layer) -> Iterator[Tensor]:
    """What one layer has beyond its mixer and its feed-forward part."""
    if config.model_type not in _PER_LAYER:
        return
    hidden = config.hidden_size
    if per_layer := _count(config, "hidden_size_per_layer_input", 256):
        yield matrix(_PART, "per_layer_input_gate", per_layer, hidden)
        yield matrix(_PART, "per_layer_projection", hidden, per_layer)
        yield vector(Component.NORMS, "post_per_layer_input_norm", hidden)
    if config.model_type == "gemma3n_text":
        yield from _alternating_updates(config)
    elif isinstance(layer.feed_forward, Experts):
        yield vector(Component.ROUTER, "router.scale", hidden + layer.feed_forward.num_experts)
        yield vector(Component.NORMS, "feedforward_layernorms", 3 * hidden)


def _alternating_updates(config: ModelConfig) -> Iterator[Tensor]:
    """Gemma 3n: coefficients that mix several copies of the hidden vector, and a low-rank bypass."""
    hidden = config.hidden_size
    copies, rank = _count(config, "altup_num_inputs", 4), _count(config, "laurel_rank", 64)
    yield vector(_PART, "altup.coefs", copies**2 + copies**3 + copies * hidden)
    yield vector(Component.NORMS, "altup.norms", 2 * hidden)
    yield matrix(_PART, "laurel.linear_left", rank, hidden)
    yield matrix(_PART, "laurel.linear_right", hidden, rank)
    yield vector(Component.NORMS, "laurel.post_laurel_norm", hidden)


def model_extras(config: ModelConfig, cut: Cut) -> Iterator[Tensor]:
    """What lies beside the embeddings, once a model."""
    if config.model_type not in _PER_LAYER:
        return
    hidden = config.hidden_size
    if per_layer := _count(config, "hidden_size_per_layer_input", 256):
        vocabulary = ceil_div(_count(config, "vocab_size_per_layer_input", 262_144), cut.inner)
        width = config.num_layers * per_layer
        yield vector(Component.EMBEDDINGS, "embed_tokens_per_layer", vocabulary, count=width)
        yield matrix(_PART, "per_layer_model_projection", width, hidden)
        yield vector(Component.NORMS, "per_layer_projection_norm", per_layer)
    if config.model_type == "gemma3n_text":
        copies = _count(config, "altup_num_inputs", 4) - 1
        yield matrix(_PART, "altup_projections", hidden, hidden, count=2 * copies)
