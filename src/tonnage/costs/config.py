"""A model's shape, read from the config.json that comes with it, and which shapes this release can price."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.costs.families import FAMILIES, Family
from tonnage.costs.layers import Attention, Dense, Layer, Quantisation, Tower
from tonnage.errors import InvalidSetting, ModelConfigError, ModelNotFound, UnsupportedModel

#: No published model comes near; a number above it is a typing error, and pricing it would take for ever.
_LARGEST_LAYERS, _LARGEST_SIZE = 10_000, 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Sizes are elements, counts are per model (not per rank), ``dtype`` of the weights.

    sliding_window  tokens a query can look back, None for full attention
    layers          what each layer is made of, ``num_layers`` of them, ``mtp_layers`` not counted
    mtp_layers      extra layers for multi-token prediction; they keep a cache of their own when drafting
    quantisation    how the checkpoint packs its matrices, None where it does not
    towers          encoders beside the text model
    unsupported     what config.json says that the engine cannot run, one short phrase each
    notes           what was assumed because config.json is silent
    raw             the parsed config.json, for the fingerprint
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layers: tuple[Layer, ...] = ()
    mtp_layers: tuple[Layer, ...] = ()
    quantisation: Quantisation | None = None
    towers: tuple[Tower, ...] = ()
    unsupported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    raw: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def family(self) -> Family:
        """The row of ``FAMILIES``; raises ``UnsupportedModel`` where there is none."""
        if self.model_type not in FAMILIES:
            raise UnsupportedModel(
                f"{self.name}: the family {self.model_type!r} is not known to this release",
                remedy=f"use a model of one of the families {', '.join(FAMILIES)}",
            )
        return FAMILIES[self.model_type]

    @classmethod
    def from_dict(cls, raw: Mapping[str, object], *, name: str = "") -> ModelConfig:
        """From the content of a config.json. Raises ``ModelConfigError`` naming the field that is missing or wrong."""
        return _Reader(raw, name=name).config()

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, name: str = "") -> ModelConfig:
        """From a config.json or the folder that holds one.

        Raises ``ModelNotFound`` where there is no such file and ``ModelConfigError`` where it cannot be read.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ModelNotFound(f"{file}: no such file", remedy="give a folder that holds a config.json, or the file")
        return cls.from_dict(_read_json(file), name=name or file.resolve().parent.name)


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise ``UnsupportedModel`` unless the model is a dense decoder with full attention in every layer."""
    if config.unsupported:
        raise UnsupportedModel(
            f"{config.name}: this release prices dense decoders with full attention, and config.json says "
            + ", ".join(config.unsupported),
            remedy="choose a dense decoder; experts, latent attention, windows, recurrent state, encoders and packed "
            "weights come in a later release",
        )
    _ = config.family  # an unknown family is refused by name


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON: {error}", remedy="download it again") from None
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} holds no JSON object", remedy="give the config.json of a model")
    return raw


class _Reader:
    """Reads one config.json, nested ``text_config`` included, and remembers what it had to assume."""

    def __init__(self, raw: Mapping[str, object], *, name: str) -> None:
        text = raw.get("text_config")
        self.outer = raw
        self.raw = {**raw, **text} if isinstance(text, Mapping) else dict(raw)
        self.name = name or str(raw.get("_name_or_path") or raw.get("model_type") or "model")
        self.notes: list[str] = []

    def config(self) -> ModelConfig:
        model_type = str(self.raw.get("model_type") or "")
        family = FAMILIES.get(model_type)
        if not model_type:
            raise self._error("model_type", "is missing")
        unsupported = _unsupported(self.outer, self.raw)
        heads = self._count("num_attention_heads")
        hidden = self._count("hidden_size")
        layers = self._count("num_hidden_layers", most=_LARGEST_LAYERS)
        positions = self._count("max_position_embeddings")
        window = self._window(family, num_layers=layers, positions=positions)
        if window is not None:
            unsupported.append(f"sliding_window = {window}")
        kv_heads, head_dim = self._kv_heads(family, heads=heads), self._head_dim(family, hidden=hidden, heads=heads)
        mixer = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, window=window)
        layer = Layer(mixer=mixer, feed_forward=Dense(intermediate_size=self._count("intermediate_size")))
        return ModelConfig(
            name=self.name,
            model_type=model_type,
            architectures=self._architectures(),
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layers=(layer,) * layers,
            intermediate_size=self._count("intermediate_size"),
            vocab_size=self._count("vocab_size"),
            max_position_embeddings=positions,
            tie_word_embeddings=self._flag(
                "tie_word_embeddings", default=family is not None and family.tie_word_embeddings
            ),
            dtype=self._dtype(),
            qkv_bias=self._bias("attention_bias", rule=family.qkv_bias if family else False),
            out_bias=self._bias("attention_bias", rule=family.out_bias if family else False),
            mlp_bias=self._bias("mlp_bias", rule=family.mlp_bias if family else False),
            qk_norm=family is not None and family.qk_norm,
            sliding_window=window,
            unsupported=tuple(unsupported),
            notes=tuple(self.notes),
            raw=MappingProxyType(dict(self.outer)),
        )

    def _error(self, key: str, what: str) -> ModelConfigError:
        return ModelConfigError(
            f"{self.name}: {key} {what} in config.json",
            knob=key,
            value=self.raw.get(key),
            remedy="use the config.json that was published with the model",
        )

    def _count(self, key: str, *, most: int = _LARGEST_SIZE) -> int:
        value = self.raw.get(key)
        if value is None:
            raise self._error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(key, f"= {value!r} is not a whole number")
        if not 0 < value <= most:
            raise self._error(key, f"= {value} is outside 1 to {most:,}")
        return value

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(key, f"= {value!r} is neither true nor false")
        return value

    def _bias(self, key: str, *, rule: bool | str) -> bool:
        return self._flag(key, default=False) if isinstance(rule, str) else rule

    def _architectures(self) -> tuple[str, ...]:
        names = self.raw.get("architectures")
        return tuple(str(name) for name in names) if isinstance(names, list) else ()

    def _kv_heads(self, family: Family | None, *, heads: int) -> int:
        if self.raw.get("num_key_value_heads") is not None:
            kv_heads = self._count("num_key_value_heads")
        else:
            kv_heads = (family.num_kv_heads if family else None) or heads
            self.notes.append(f"num_key_value_heads is absent: {kv_heads}, as the family's class has it")
        if heads % kv_heads:
            raise self._error("num_key_value_heads", f"= {kv_heads} does not divide num_attention_heads = {heads}")
        return kv_heads

    def _head_dim(self, family: Family | None, *, hidden: int, heads: int) -> int:
        if self.raw.get("head_dim") is not None:
            return self._count("head_dim")
        if family and family.head_dim:
            self.notes.append(f"head_dim is absent: {family.head_dim}, as the family's class has it")
            return family.head_dim
        if hidden % heads:
            raise self._error("head_dim", f"is missing and hidden_size {hidden} does not divide by {heads} heads")
        return hidden // heads

    def _dtype(self) -> str:
        text = self.raw.get("dtype") or self.raw.get("torch_dtype") or self.outer.get("dtype")
        if text is None:
            self.notes.append("dtype is absent: float32, as transformers takes it")
            return "float32"
        try:
            return parse_dtype(str(text), knob="dtype", allowed=WEIGHT_DTYPES)
        except InvalidSetting as error:
            raise self._error("dtype", f"= {text!r} is {error.what.partition(': ')[2]}") from None

    def _window(self, family: Family | None, *, num_layers: int, positions: int) -> int | None:
        """The window in force, None where every layer sees every position.

        ``use_sliding_window: false`` switches it off (Qwen); a window at least as long as the model's positions
        hides nothing; layers below ``max_window_layers`` have none (Qwen).
        """
        default = family.sliding_window if family else None
        if "sliding_window" not in self.raw and default:
            self.notes.append(f"sliding_window is absent: {default}, as the family's class has it")
        window = self.raw.get("sliding_window", default)
        switched_off = self.raw.get("use_sliding_window", not self._windows_by_switch()) is False
        if window is None or switched_off or self._all_layers_full(num_layers):
            return None
        window = self._count("sliding_window") if "sliding_window" in self.raw else default
        return None if window is None or window >= positions else window

    def _windows_by_switch(self) -> bool:
        """Qwen's classes leave windows off unless ``use_sliding_window`` is true."""
        return str(self.raw.get("model_type")).startswith("qwen")

    def _all_layers_full(self, num_layers: int) -> bool:
        types = self.raw.get("layer_types")
        if isinstance(types, list) and types:
            return all(kind == "full_attention" for kind in types)
        first = self.raw.get("max_window_layers")
        return isinstance(first, int) and first >= num_layers


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")
_TOWER_KEYS = ("vision_config", "audio_config", "speech_config")
_RECURRENT_PREFIXES = ("mamba_", "linear_", "ssm_", "lru_", "rwkv", "short_conv", "conv_L_cache")


def _unsupported(outer: Mapping[str, object], inner: Mapping[str, object]) -> list[str]:
    """Phrases such as ``num_experts = 128`` for everything that is no dense decoder with full attention."""
    found = [f"{key} = {_short(inner[key])}" for key in (*_EXPERT_KEYS, "kv_lora_rank") if inner.get(key)]
    found += [
        f"{key} = {_short(value)}" for key, value in inner.items() if key.startswith(_RECURRENT_PREFIXES) and value
    ]
    found += [f"a {key}" for key in _TOWER_KEYS if outer.get(key)]
    found += [f"{key} = {_short(outer[key])}" for key in ("is_encoder_decoder",) if outer.get(key)]
    if quantisation := outer.get("quantization_config") or inner.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        found.append(f"quantization_config ({method or 'packed weights'})")
    for key in ("layer_types", "layers_block_type"):
        kinds = inner.get(key)
        odd = {str(kind) for kind in kinds} - {"full_attention", "attention"} if isinstance(kinds, list) else set()
        if odd:
            found.append(f"{key} with {', '.join(sorted(odd))}")
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
