"""One config.json as fields: nested text models unpacked, old names translated, class defaults behind them.

A config.json is written as the difference to its family's class, most of all the one of a text model inside another
model's. ``data/class-defaults.json`` holds what the classes of transformers 5.17 assume; each use of it is noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tonnage.errors import ModelConfigError

#: No published model comes near; a number above it is a typing error, and pricing it would take for ever.
LARGEST_LAYERS, LARGEST_SIZE = 10_000, 2**31

#: Where a model of several parts keeps its text model.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

#: The name used here, and the other names that published files have for it, the likeliest first.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("n_embd", "d_model", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("attention_head_dim", "kv_channels", "d_kv", "d_head"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "block_ff_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": (
        "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length", "model_max_length",
        "max_target_positions", "max_decoder_position_embeddings",
    ),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "num_nextn_predict_layers": ("mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"),
    "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
    "mamba_d_head": ("mamba_head_dim", "mamba_headdim"),
    "mamba_n_groups": ("mamba_ngroups", "n_groups"),
    "mamba_d_state": ("ssm_state_size", "state_size"),
    "mamba_d_conv": ("conv_kernel", "conv1d_width"),
    "mamba_expand": ("expand",),
    "layer_types": ("layers_block_type",),
    "sliding_window": ("attention_window_size", "window_size"),
}  # fmt: skip

#: In a decoder beside an encoder the plain names may mean the encoder.
_DECODER_NAMES = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}

#: Fields that one old family keeps in objects of their own.
_IN_PARTS = {
    "kv_n_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}

#: Families whose class has another name than the model type of the file.
_SAME_CLASS = {
    "kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "deepseek_v3_2": "deepseek_v32", "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "mllama": "mllama_text_model",
    "mimo_v2": "mimo_v2_flash", "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text",
}  # fmt: skip

#: What a file must say itself: a default here would be a guess at the size of the model. A text model nested in
#: another is the exception, since its file was written as a difference.
_ESSENTIAL = frozenset(
    ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
     "max_position_embeddings")
)  # fmt: skip

#: In these classes num_heads counts heads of the state, not of attention.
_STATE_ONLY = frozenset(("mamba", "mamba2", "falcon_mamba"))

PUBLISHED = "use the config.json that was published with the model"
_UNMET = "its model_type is not known to this release, and reading it like a Llama needs this field: add it"

#: Encoders and decoders built like T5's and like BART's.
LIKE_T5 = ("t5", "mt5", "umt5", "longt5")
LIKE_BART = ("bart", "mbart", "m2m_100", "pegasus", "marian", "blenderbot", "blenderbot-small", "plbart", "mvp", "led")

#: Families that the readers know by rules of their own, though no class defaults are kept for them.
_BY_RULE = frozenset(
    ("RefinedWeb", "RefinedWebModel", "biogpt", "cohere2_moe", "exaone_moe", "flex_olmo", "glm4_moe_lite",
     "granite_swa", "longcat_flash", "phi4_multimodal", "qwen2_5_omni_text", "deci", "nemotron-nas",
     *LIKE_T5, *LIKE_BART)
)  # fmt: skip


class Fields:
    """What one config.json says about its text model. Missing values fall back to the family's class, with a note."""

    def __init__(self, raw: Mapping[str, object], *, name: str) -> None:
        inner, self.is_nested = _text_model(raw)
        self.outer, self.inner = raw, inner
        self.name = name or str(raw.get("_name_or_path") or raw.get("model_type") or "model")
        self.model_type = str(inner.get("model_type") or "")
        self.own = _translated(inner, model_type=self.model_type)
        self.defaults = _defaults(self.model_type)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def error(self, key: str, what: str, *, remedy: str = PUBLISHED) -> ModelConfigError:
        """To be raised: the field, what is wrong with it, and whose file it is."""
        return ModelConfigError(
            f"{self.name}: {key} {what} in config.json", knob=key, value=self.own.get(key), remedy=remedy
        )

    def value(self, key: str) -> object:
        """As written, or as the family's class has it (noted), or None."""
        value = self.own.get(key)
        if value is not None or key not in self.defaults or (key in _ESSENTIAL and not self.is_nested):
            return value
        default = self.defaults[key]
        if not isinstance(default, bool):
            self.note(f"{key} is absent: {default}, as the family's class has it")
        return default

    def count(self, key: str, *, most: int = LARGEST_SIZE) -> int:
        """A whole number from 1 to ``most``; raises ``ModelConfigError`` where it is missing or is none."""
        value = self.value(key)
        if value is None:
            raise self.error(key, "is missing", remedy=PUBLISHED if is_known(self.model_type) else _UNMET)
        return self._whole(key, value, least=1, most=most)

    def optional(self, key: str, default: int = 0) -> int:
        """A whole number from 0, or ``default`` where neither file nor class has one."""
        value = self.value(key)
        return default if value is None else self._whole(key, value, least=0, most=LARGEST_SIZE)

    def at_layer(self, key: str, layer: int) -> int | None:
        """A count that may be a list with one entry a layer; None where there is none. The last entry repeats."""
        value = self.value(key)
        if isinstance(value, list) and value:
            value = value[min(layer, len(value) - 1)]
        return None if value is None else self._whole(key, value, least=0, most=LARGEST_SIZE)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.own.get(key)
        if value is None:
            value = self.defaults.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"= {value!r} is neither true nor false")
        return value

    def sequence(self, key: str) -> Sequence[object] | None:
        """A list that is not empty, or None."""
        value = self.value(key)
        return value if isinstance(value, list) and value else None

    def whole_numbers(self, key: str) -> frozenset[int]:
        """A list of layer numbers; empty where there is none."""
        values = self.sequence(key) or ()
        return frozenset(value for value in values if isinstance(value, int))

    def section(self, key: str) -> Mapping[str, object]:
        """An object inside the file; empty where there is none."""
        value = self.own.get(key)
        return value if isinstance(value, Mapping) else {}

    def _whole(self, key: str, value: object, *, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"= {value!r} is not a whole number")
        if not least <= value <= most:
            raise self.error(key, f"= {value} is outside {least} to {most:,}")
        return value


def _text_model(raw: Mapping[str, object]) -> tuple[Mapping[str, object], bool]:
    """The fields of the text model over those around it, and whether it is nested at all."""
    for key in NESTED:
        inner = raw.get(key)
        if isinstance(inner, Mapping):
            deeper, _ = _text_model(inner)
            return {**raw, **deeper}, True
    return raw, False


def _translated(raw: Mapping[str, object], *, model_type: str) -> dict[str, object]:
    """The same fields under the names used here; a name used here wins where both are given."""
    fields = dict(raw)
    for name, decoder_name in _DECODER_NAMES.items():
        if isinstance(fields.get(decoder_name), int):
            fields[name] = fields[decoder_name]
    if "num_decoder_layers" in fields and fields["num_decoder_layers"] is not None:
        fields["num_hidden_layers"] = fields["num_decoder_layers"]
    for _, part in objects(raw, ("attn_config", "ffn_config")):
        for old, name in _IN_PARTS.items():
            if part.get(old) is not None and fields.get(name) is None:
                fields[name] = part[old]
    for name, others in ALIASES.items():
        if fields.get(name) is not None or (name == "num_attention_heads" and model_type in _STATE_ONLY):
            continue
        found = next((fields[other] for other in others if fields.get(other) is not None), None)
        if found is not None:
            fields[name] = found
    return fields


def is_known(model_type: str) -> bool:
    """Whether this release has met the family; the fields of another are read as a Llama's."""
    return model_type in class_defaults() or model_type in _SAME_CLASS or model_type in _BY_RULE


@cache
def _defaults(model_type: str) -> Mapping[str, object]:
    """What the family's class assumes, under the names used here; empty for a family that is not known."""
    name = _SAME_CLASS.get(model_type, model_type)
    return _translated(class_defaults().get(name, {}), model_type=name)


@cache
def class_defaults() -> dict[str, dict[str, object]]:
    """By family, as the classes name their fields."""
    text = (Path(__file__).parent / "data" / "class-defaults.json").read_text(encoding="utf-8")
    made: dict[str, dict[str, object]] = json.loads(text)
    return made


def whole(raw: Mapping[str, object], *keys: str, default: int) -> int:
    """The first of ``keys`` that holds a whole number, or ``default``."""
    for key in keys:
        value = raw.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def objects(raw: Mapping[str, object], keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Those of ``keys`` that hold an object, with it."""
    for key in keys:
        value = raw.get(key)
        if isinstance(value, Mapping) and value:
            yield key, value
