"""Encoders beside the text model, from the many names that their sections of config.json use."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.costs.layers import Tower
from tonnage.costs.reading import Fields, objects

_SECTIONS = {
    "vision_config": "vision", "visual": "vision", "vision_tower_config": "vision", "vit_config": "vision",
    "audio_config": "audio", "speech_config": "audio", "audio_encoder_config": "audio",
}  # fmt: skip
_LAYERS = ("depth", "num_hidden_layers", "encoder_layers", "num_layers", "layers", "n_layers", "vt_num_hidden_layers")
_WIDTHS = ("hidden_size", "embed_dim", "d_model", "width", "hidden_dim", "vt_hidden_size")
_HEADS = ("num_heads", "num_attention_heads", "encoder_attention_heads", "attention_heads", "vt_num_attention_heads")
_INNER = ("intermediate_size", "encoder_ffn_dim", "mlp_dim", "vt_intermediate_size")
#: Their feed-forward parts have a gate.
_GATED = ("qwen2_5_vl", "pixtral", "qwen2_5_omni_vision_encoder", "glm4v", "gemma4_vision")


def towers(fields: Fields) -> tuple[Tower, ...]:
    """Every encoder whose section gives its size; one that does not is left out, with a note."""
    sources: list[tuple[str, Mapping[str, object]]] = list(objects(fields.outer, tuple(_SECTIONS)))
    for _, part in objects(fields.outer, ("thinker_config",)):
        sources += objects(part, tuple(_SECTIONS))
    made = [_tower(fields, key, section) for key, section in sources]
    if fields.flag("is_encoder_decoder"):
        made.append(_encoder(fields))
    return tuple(tower for tower in made if tower is not None)


def _tower(fields: Fields, key: str, raw: Mapping[str, object]) -> Tower | None:
    num_layers, width, heads = _first(raw, _LAYERS), _first(raw, _WIDTHS), _first(raw, _HEADS)
    if str(raw.get("model_type", "")).startswith("qwen2_vl") and _first(raw, ("embed_dim",)):
        width = _first(raw, ("embed_dim",))  # this family's hidden_size is the text model's
    inner = _first(raw, _INNER)
    ratio = raw.get("mlp_ratio")
    if not inner and isinstance(ratio, int | float) and 0 < ratio < 1000:
        inner = int(width * ratio)
    if not num_layers or not width or not inner:
        fields.note(f"{key} does not give layers, width and inner width: its encoder is not priced")
        return None
    patch = _first(raw, ("patch_size", "spatial_patch_size", "vt_patch_size"))
    channels = _first(raw, ("num_channels", "in_channels", "in_chans")) or 3
    frames = _first(raw, ("temporal_patch_size",)) or 1
    image = _first(raw, ("image_size", "vt_image_size"))
    positions = _first(raw, ("num_position_embeddings", "max_source_positions"))
    if not positions and image and patch:
        positions = (image // patch) ** 2
    return Tower(
        kind=_SECTIONS[key],
        num_layers=num_layers,
        hidden_size=width,
        num_heads=heads or 1,
        intermediate_size=inner,
        patch_elements=channels * patch * patch * frames if patch else _first(raw, ("num_mel_bins",)),
        num_positions=positions,
        projector_elements=_projector(fields, raw, width),
        is_gated=str(raw.get("model_type", "")).startswith(_GATED),
    )


def _projector(fields: Fields, raw: Mapping[str, object], width: int) -> int:
    """Weights between tower and text model: two matrices, the first over the patches merged into one token."""
    merge = _first(raw, ("spatial_merge_size",)) or 1
    text = fields.value("hidden_size")
    if not isinstance(text, int):
        return 0
    merged = width * merge * merge
    return merged * merged + merged * text if merge > 1 else width * text + text * text


def _encoder(fields: Fields) -> Tower | None:
    """The encoder of an encoder-decoder model, as wide as its decoder."""
    layers = _first(fields.own, ("encoder_layers",)) or _first(fields.outer, ("num_layers", "num_encoder_layers"))
    width, inner = _first(fields.own, ("hidden_size",)), _first(fields.own, ("encoder_ffn_dim", "intermediate_size"))
    if not layers or not width or not inner:
        fields.note("the encoder's layers are not given: it is not priced")
        return None
    heads = _first(fields.own, ("encoder_attention_heads", "num_attention_heads")) or 1
    return Tower(
        kind="text encoder" if "num_mel_bins" not in fields.own else "audio",
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        intermediate_size=inner,
        num_positions=_first(fields.own, ("max_source_positions",)),
        is_gated="gated" in str(fields.own.get("feed_forward_proj", "")),
    )


def _first(raw: Mapping[str, object], keys: tuple[str, ...]) -> int:
    """The first of the fields that holds a positive whole number; 0 where none does."""
    for key in keys:
        value = raw.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
