"""The feed-forward part of every layer: dense or a mixture of experts, and which layers have which."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tonnage.costs.layers import Dense, Experts, FeedForward
from tonnage.costs.patterns import Kind
from tonnage.costs.reading import LIKE_BART, LIKE_T5, Fields

#: Families with two matrices where most have three.
_UNGATED = frozenset((
    "gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "mpt", "codegen", "gpt_bigcode", "starcoder2",
    "phi", "nemotron", "nemotron_h", "persimmon", "arcee", "apertus", "whisper", *LIKE_BART, "RefinedWeb",
    "RefinedWebModel",
))  # fmt: skip
#: Families whose classes take four times the width where the file is silent.
_FOURFOLD = frozenset((
    "gpt2", "gptj", "gpt_neo", "bloom", "falcon", "mpt", "codegen", "gpt_bigcode", "zamba2", "RefinedWeb",
    "RefinedWebModel",
))  # fmt: skip
#: Families that have no feed-forward part in their recurrent layers.
_MIXER_ONLY = frozenset(("mamba", "mamba2", "falcon_mamba", "zamba", "zamba2", "nemotron_h"))
#: Families whose class makes the first layer dense where the file is silent.
_FIRST_IS_DENSE = ("hy_v3", "mimo_v2_flash", "mimo_v2", "kimi_linear")


class FeedForwards:
    """The feed-forward parts of a model whose layers are of these kinds."""

    def __init__(self, fields: Fields, kinds: tuple[Kind, ...]) -> None:
        self.fields, self.kinds = fields, kinds
        self.is_gated = fields.model_type not in _UNGATED
        if fields.model_type in LIKE_T5:
            self.is_gated = "gated" in str(fields.own.get("feed_forward_proj", "")) or fields.flag("is_gated_act")
        experts = fields.at_layer("num_experts", len(kinds) - 1) or 0
        if fields.model_type.startswith("gemma4") and not fields.flag("enable_moe_block"):
            experts = 0
        self.num_experts = experts if experts > 1 else 0
        self.rule = _rule(fields, len(kinds)) if self.num_experts else None
        self.dense = cache(self._dense)
        self.experts = cache(self._experts)

    def all(self) -> list[FeedForward | None]:
        """One entry a layer; None where a layer only mixes."""
        return [self.at(layer) for layer in range(len(self.kinds))]

    def at(self, layer: int) -> FeedForward | None:
        kind = self.kinds[layer]
        if kind is Kind.EXPERTS:
            return self.experts()
        if kind is Kind.DENSE:
            return self.dense(layer)
        if self.fields.model_type in _MIXER_ONLY and kind is not Kind.BOTH:
            return None
        if self.rule is not None and self.rule(layer):
            return self.experts()
        return self.dense(layer if isinstance(self.fields.own.get("intermediate_size"), list) else self._twin(layer))

    def draft(self) -> FeedForward | None:
        """Of a layer for multi-token prediction: as the last layers have it."""
        if self.num_experts:
            return self.experts()
        return next((part for part in reversed(self.all()) if part is not None), None)

    def _twin(self, layer: int) -> int:
        """Layers with the same width share an object: 0, or the first wide one."""
        return layer if self._is_double(layer) else 0

    def _is_double(self, layer: int) -> bool:
        shared = self.fields.optional("num_kv_shared_layers")
        return self.fields.flag("use_double_wide_mlp") and bool(shared) and layer >= len(self.kinds) - shared

    def _dense(self, layer: int) -> Dense:
        return Dense(
            intermediate_size=dense_size(self.fields, layer) * (1 + self._is_double(layer)), is_gated=self.is_gated
        )

    def _experts(self) -> Experts:
        fields = self.fields
        size = expert_size(fields)
        per_token = fields.at_layer("num_experts_per_tok", 0)
        if per_token is None:
            per_token = 1
            fields.note("num_experts_per_tok is absent: 1 assumed")
        return Experts(
            num_experts=self.num_experts,
            num_experts_per_token=per_token,
            intermediate_size=size,
            shared_intermediate_size=self._shared(size),
            is_gated=self.is_gated,
        )

    def _shared(self, size: int) -> int:
        """Width of all shared experts together."""
        fields = self.fields
        if fields.model_type.startswith("llama4"):
            return size  # one, as wide as a routed one
        if fields.model_type.startswith("gemma4"):
            return dense_size(fields, 0)  # a dense part beside the experts, in every layer
        width = fields.optional("shared_expert_intermediate_size")
        return width or (fields.at_layer("n_shared_experts", 0) or 0) * size


def dense_size(fields: Fields, layer: int = 0) -> int:
    """Width of a dense feed-forward part; four times the model's in families whose class says so."""
    if fields.model_type.startswith("llama4") and fields.value("intermediate_size_mlp") is not None:
        return fields.count("intermediate_size_mlp")
    if fields.model_type == "granitemoehybrid" and fields.value("shared_expert_intermediate_size"):
        return fields.count("shared_expert_intermediate_size")  # without experts the shared part is all there is
    size = fields.at_layer("intermediate_size", layer)
    if size:
        return size
    if fields.model_type in _FOURFOLD:
        factor = fields.optional("expansion_ratio", 4)
        fields.note(f"intermediate_size is absent: {factor} times hidden_size, as the family's class has it")
        return factor * fields.count("hidden_size")
    raise fields.error("intermediate_size", "is missing")


def expert_size(fields: Fields) -> int:
    """Width of one routed expert."""
    size = fields.at_layer("moe_intermediate_size", 0) or fields.at_layer("intermediate_size", 0)
    if not size:
        raise fields.error("moe_intermediate_size", "is missing")
    return size


def widest(feed_forwards: list[FeedForward | None]) -> int:
    """The widest dense part, or the widest expert where no layer is dense; 0 where no layer has either."""
    dense = [part.intermediate_size for part in feed_forwards if isinstance(part, Dense)]
    return max(dense or [part.intermediate_size for part in feed_forwards if part is not None] or [0])


def _rule(fields: Fields, count: int) -> Callable[[int], bool]:
    """Which layers have experts; the first field that speaks of it decides, and without one all have."""
    types = fields.sequence("mlp_layer_types")
    if types is not None:
        if len(types) < count:
            raise fields.error("mlp_layer_types", f"has {len(types)} entries for {count} layers")
        return lambda layer: types[layer] != "dense"
    frequencies = fields.sequence("moe_layer_freq")
    if frequencies is not None:
        return lambda layer: layer < len(frequencies) and bool(frequencies[layer])
    named = fields.own.get("moe_layers_enum")
    if isinstance(named, str) and named:
        chosen = {int(part) for part in named.split(",") if part.strip().isdigit()}
        return lambda layer: layer in chosen
    if fields.sequence("moe_layers") is not None:
        listed = fields.whole_numbers("moe_layers")
        return lambda layer: layer in listed
    return _by_step(fields, count)


def _by_step(fields: Fields, count: int) -> Callable[[int], bool]:
    """Rules of the kind "every nth", "all but the first", "from one to another"."""
    period = fields.optional("expert_layer_period")
    if period:
        offset = fields.optional("expert_layer_offset")
        return lambda layer: layer % period == offset
    step = fields.optional("interleave_moe_layer_step")
    if step:
        return lambda layer: (layer + 1) % step == 0
    if fields.value("moe_layer_start_index") is not None:
        every = fields.optional("moe_layer_interval", 1) or 1
        first = fields.optional("moe_layer_start_index")
        written = fields.own.get("moe_layer_end_index")  # -1 means the last layer, and so does silence
        last = written if isinstance(written, int) and written >= 0 else count - 1
        return lambda layer: first <= layer <= last and (layer + 1) % every == 0
    dense_first = fields.optional("first_k_dense_replace", fields.model_type in _FIRST_IS_DENSE)
    dense_first = dense_first or fields.optional("num_dense_layers")
    frequency = fields.optional("moe_layer_freq", 1) or 1
    sparse_step = fields.optional("decoder_sparse_step", 1)
    only_dense = fields.whole_numbers("mlp_only_layers")

    def has_experts(layer: int) -> bool:
        return (
            layer >= dense_first
            and layer % frequency == 0
            and layer not in only_dense
            and sparse_step > 0
            and (layer + 1) % sparse_step == 0
        )

    return has_experts
