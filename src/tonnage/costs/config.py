"""A model's shape, read from the config.json that comes with it, and which shapes this release can price."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.costs.encoders import encoder_tokens, towers
from tonnage.costs.families import FAMILIES, Family
from tonnage.costs.feedforward import FeedForwards, widest
from tonnage.costs.generating import refuse_other_models
from tonnage.costs.gguf import gguf_files
from tonnage.costs.gguf_config import gguf_config, only_model
from tonnage.costs.layers import Attention, Latent, Layer, Quantisation, Recurrent, Tower
from tonnage.costs.mixers import draft_mixers, layer_mixers
from tonnage.costs.packing import SECTIONS, quantisation
from tonnage.costs.patterns import Kind, layer_kinds, num_layers
from tonnage.costs.reading import LARGEST_LAYERS, LIKE_BART, LIKE_T5, Fields, is_known
from tonnage.errors import InvalidSetting, ModelConfigError, ModelNotFound, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Sizes are elements, counts are per model (not per rank), ``dtype`` of the weights.

    ``layers`` is the whole truth. The single numbers beside it are those of a layer with full attention where there
    is one (of the first mixer otherwise), and ``intermediate_size`` is the widest dense part (or an expert's width).

    sliding_window  tokens a query can look back in the layers that have a window, None where none has
    layers          what each layer is made of, ``num_layers`` of them, ``mtp_layers`` not counted
    state_dtype     dtype of recurrent states, None where config.json does not name one
    mtp_layers      extra layers for multi-token prediction; they keep a cache of their own when drafting
    quantisation    how the checkpoint packs its matrices, None where it does not
    towers          encoders beside the text model
    encoder_tokens  what cross attention keeps of an encoder for one sequence, None where no layer reads an encoder
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
    state_dtype: str | None = None
    mtp_layers: tuple[Layer, ...] = ()
    quantisation: Quantisation | None = None
    towers: tuple[Tower, ...] = ()
    encoder_tokens: int | None = None
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
        return _config(Fields(raw, name=name))

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, name: str = "") -> ModelConfig:
        """From a config.json or the folder that holds one; where there is none, from the metadata of a GGUF file.

        Raises ``ModelNotFound`` where there is no such file, ``ModelConfigError`` where it cannot be read, and
        ``UnsupportedModel`` for a GGUF file of an architecture whose metadata are not understood.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            packed = gguf_files(file)
            file = file / "config.json"
            if packed and not file.is_file():
                file = only_model(packed)
        if not file.is_file():
            raise ModelNotFound(f"{file}: no such file", remedy="give a folder that holds a config.json, or the file")
        if file.suffix.lower() == ".gguf":
            return cls.from_dict(gguf_config(file), name=name or file.stem)
        if file.suffix.lower() in _WEIGHT_FILES:
            raise ModelConfigError(
                f"{file} holds weights, and plans need the config.json", remedy="give the folder that holds both"
            )
        return cls.from_dict(_read_json(file), name=name or file.resolve().parent.name)


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise ``UnsupportedModel`` unless the engine runs it: a dense decoder with full attention in every layer."""
    if config.unsupported:
        raise UnsupportedModel(
            f"{config.name}: the engine runs dense decoders with full attention, and config.json says "
            + ", ".join(config.unsupported),
            remedy="choose a dense decoder to run; tonnage plan prices this model too, with no engine",
        )
    _ = config.family  # an unknown family is refused by name


#: Files that people give in place of the config.json beside them.
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".onnx")


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON: {error}", remedy="download it again") from None
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} holds no JSON object", remedy="give the config.json of a model")
    return raw


def _config(fields: Fields) -> ModelConfig:
    refuse_other_models(fields.outer, name=fields.name)
    if not fields.model_type:
        raise fields.error("model_type", "is missing")
    if not is_known(fields.model_type):
        fields.note(f"model_type {fields.model_type!r} is not known to this release: read like a Llama")
    family = FAMILIES.get(fields.model_type)
    count, hidden = num_layers(fields), fields.count("hidden_size")
    kinds = layer_kinds(fields, count)
    mixers = layer_mixers(fields, kinds)
    parts = FeedForwards(fields, kinds)
    feeds = parts.all()
    layers = tuple(
        Layer(mixer=mixer, feed_forward=feed, beside=beside)
        for (mixer, beside), feed in zip(mixers, feeds, strict=True)
    )
    heads, packing = _Heads.of(fields, layers), quantisation(fields)
    made = towers(fields)
    window = max((m.window for layer in layers for m in _attention(layer) if m.window is not None), default=None)
    return ModelConfig(
        name=fields.name,
        model_type=fields.model_type,
        architectures=tuple(str(each) for each in fields.sequence("architectures") or ()),
        num_layers=count,
        hidden_size=hidden,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        layers=layers,
        state_dtype=_state_dtype(fields, layers),
        mtp_layers=_draft_layers(fields, kinds, parts),
        intermediate_size=widest(feeds),
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=_positions(fields),
        tie_word_embeddings=fields.flag(
            "tie_word_embeddings", default=family.tie_word_embeddings if family else fields.model_type in _TIED
        ),
        dtype=_dtype(fields, is_packed=packing is not None),
        qkv_bias=_bias(fields, "attention_bias", rule=family.qkv_bias if family else False),
        out_bias=_bias(fields, "attention_bias", rule=family.out_bias if family else False),
        mlp_bias=_bias(fields, "mlp_bias", rule=family.mlp_bias if family else False),
        qk_norm=family is not None and family.qk_norm,
        sliding_window=window,
        quantisation=packing,
        towers=made,
        encoder_tokens=encoder_tokens(fields, reads_encoder=any(m.is_cross for x in layers for m in _attention(x))),
        unsupported=_unsupported(fields.outer, fields.inner, window=window, layers=layers),
        notes=tuple(fields.notes),
        raw=MappingProxyType(dict(fields.outer)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """The single numbers that stand for all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, fields: Fields, layers: tuple[Layer, ...]) -> _Heads:
        attention = [mixer for layer in layers for mixer in layer.mixers if isinstance(mixer, Attention | Latent)]
        full = [mixer for mixer in attention if isinstance(mixer, Latent) or mixer.window is None]
        mixer = next(iter(full or attention), None)
        if isinstance(mixer, Latent):
            size = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
            kv_heads = fields.optional("num_key_value_heads") or mixer.num_heads
            return cls(num_heads=mixer.num_heads, num_kv_heads=kv_heads, head_dim=size)
        if isinstance(mixer, Attention):
            return cls(num_heads=mixer.num_heads, num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim)
        state = next((mixer for layer in layers for mixer in layer.mixers if isinstance(mixer, Recurrent)), None)
        if state is None:
            raise fields.error("layer_types", "names no layer that mixes tokens")
        heads = max(state.num_heads, 1)
        return cls(num_heads=heads, num_kv_heads=heads, head_dim=max(state.head_dim, 1))


def _attention(layer: Layer) -> Iterator[Attention]:
    return (mixer for mixer in layer.mixers if isinstance(mixer, Attention))


def _draft_layers(fields: Fields, kinds: tuple[Kind, ...], parts: FeedForwards) -> tuple[Layer, ...]:
    """Layers for multi-token prediction, each like the model's last ones."""
    count = fields.optional("num_nextn_predict_layers") * (fields.optional("mtp_transformer_layers", 1) or 1)
    if count > LARGEST_LAYERS:
        raise fields.error("num_nextn_predict_layers", f"= {count} is outside 0 to {LARGEST_LAYERS:,}")
    if not count:
        return ()
    mixer, beside = draft_mixers(fields, kinds)
    feed = parts.draft()
    return (Layer(mixer=mixer, feed_forward=feed, beside=beside),) * count


#: Their files say that embeddings are not tied, or nothing.
_TIED = (*LIKE_T5, *LIKE_BART)

#: Models without learned or rotary positions, whose files may give no length; and the one they get here, that of the
#: longest models published.
_ANY_LENGTH = (*LIKE_T5, "bloom", "mpt", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma")
ASSUMED_POSITIONS = 1_048_576


def _positions(fields: Fields) -> int:
    if fields.model_type in _ANY_LENGTH and fields.value("max_position_embeddings") is None:
        fields.note(
            f"max_position_embeddings is absent: {ASSUMED_POSITIONS:,} are our own limit, the model itself has none"
        )
        return ASSUMED_POSITIONS
    return fields.count("max_position_embeddings")


def _dtype(fields: Fields, *, is_packed: bool) -> str:
    text = fields.own.get("dtype") or fields.own.get("torch_dtype") or fields.outer.get("dtype")
    if text is None and is_packed:
        fields.note("dtype is absent: bfloat16 assumed, packed matrices are unpacked to it")
        return "bfloat16"
    if text is None:
        fields.note("dtype is absent: float32, as transformers takes it")
        return "float32"
    return _parsed(fields, "dtype", text)


def _state_dtype(fields: Fields, layers: tuple[Layer, ...]) -> str | None:
    """As the file names it; what is assumed where it names none is noted if there is a state at all."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        text = fields.value(key)
        if text is not None and text != "auto":
            return _parsed(fields, key, text)
    if any(isinstance(mixer, Recurrent) and mixer.num_heads for layer in layers for mixer in layer.mixers):
        fields.note("mamba_ssm_dtype is absent: recurrent states in float32")
    return None


def _parsed(fields: Fields, key: str, text: object) -> str:
    try:
        return parse_dtype(str(text), knob=key, allowed=WEIGHT_DTYPES)
    except InvalidSetting as error:
        raise fields.error(key, f"= {text!r} is {error.what.partition(': ')[2]}") from None


def _bias(fields: Fields, key: str, *, rule: bool | str) -> bool:
    return fields.flag(key) if isinstance(rule, str) else rule


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")
_TOWER_KEYS = ("vision_config", "audio_config", "speech_config")
_RECURRENT_PREFIXES = ("mamba_", "linear_", "ssm_", "lru_", "rwkv", "short_conv", "conv_L_cache")


def _unsupported(
    outer: Mapping[str, object], inner: Mapping[str, object], *, window: int | None, layers: tuple[Layer, ...]
) -> tuple[str, ...]:
    """Phrases such as ``num_experts = 128`` for everything that is no dense decoder with full attention."""
    found = [f"{key} = {_short(inner[key])}" for key in (*_EXPERT_KEYS, "kv_lora_rank") if inner.get(key)]
    found += [
        f"{key} = {_short(value)}" for key, value in inner.items() if key.startswith(_RECURRENT_PREFIXES) and value
    ]
    found += [f"a {key}" for key in _TOWER_KEYS if outer.get(key)]
    found += [f"{key} = {_short(outer[key])}" for key in ("is_encoder_decoder",) if outer.get(key)]
    for key in SECTIONS:
        if packed := outer.get(key) or inner.get(key):
            method = packed.get("quant_method") if isinstance(packed, Mapping) else None
            found.append(f"{key} ({method or 'packed weights'})")
    for key in ("layer_types", "layers_block_type"):
        kinds = inner.get(key)
        odd = {str(kind) for kind in kinds} - {"full_attention", "attention"} if isinstance(kinds, list) else set()
        if odd:
            found.append(f"{key} with {', '.join(sorted(odd))}")
    if window is not None:
        found.append(f"sliding_window = {window}")
    if not found and (len(set(layers)) > 1 or not isinstance(layers[0].mixer, Attention)):
        found.append("layers that differ from each other or have no attention")
    return tuple(found)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
