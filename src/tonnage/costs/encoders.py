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
_FRAMES = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_INNER = ("intermediate_size", "encoder_ffn_dim", "mlp_dim", "vt_intermediate_size")
#: Their feed-forward parts have a gate.
_GATED = ("qwen2_5_vl", "pixtral", "qwen2_5_omni_vision_encoder", "glm4v", "gemma4_vision")
#: The class of the vision part where its section gives no model_type, by that of the whole model; in other families
#: one class does not follow from the other.
_SILENT = {
    "qwen2_vl": "qwen2_vl_vision", "qwen2_5_vl": "qwen2_5_vl_vision", "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_moe_vision", "qwen3_5": "qwen3_5_vision", "qwen3_5_moe": "qwen3_5_moe_vision",
    "qwen2_5_omni": "qwen2_5_omni_vision_encoder", "qwen2_5_omni_thinker": "qwen2_5_omni_vision_encoder",
    "glm4v": "glm4v_vision", "glm4v_moe": "glm4v_moe_vision",
    "gemma3": "siglip_vision_model", "paligemma": "siglip_vision_model", "gemma4": "gemma4_vision",
    "mistral3": "pixtral", "llama4": "llama4_vision_model", "mllama": "mllama_vision_model",
    "llava": "clip_vision_model", "llava_next": "clip_vision_model", "vipllava": "clip_vision_model",
    "internvl": "internvl_vision", "internvl_chat": "intern_vit_6b",
}  # fmt: skip
#: What the classes of vision parts assume that published files leave out, as transformers 5.17 has them.
_CLASS_SIZES: dict[str, dict[str, int]] = {
    "pixtral": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "patch_size": 16, "image_size": 1024,
    },
    "clip_vision_model": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "patch_size": 32, "image_size": 224,
    },
    "siglip_vision_model": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "patch_size": 16, "image_size": 224,
    },
    "qwen2_vl_vision": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, **_FRAMES},
    "qwen2_5_vl_vision": {"depth": 32, "hidden_size": 3584, "num_heads": 16, "intermediate_size": 3420, **_FRAMES},
    "qwen3_vl_vision": {
        "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, **_FRAMES, "patch_size": 16,
        "num_position_embeddings": 2304,
    },
    "llama4_vision_model": {
        "hidden_size": 768, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632,
        "patch_size": 14, "image_size": 448,
    },
    "mllama_vision_model": {
        "hidden_size": 1280, "num_hidden_layers": 32, "attention_heads": 16, "intermediate_size": 5120,
        "patch_size": 14, "image_size": 448,
    },
}  # fmt: skip
_SAME_SIZES = {"qwen2_vl": "qwen2_vl_vision", "qwen2_5_vl": "qwen2_5_vl_vision", "qwen3_vl": "qwen3_vl_vision"}


def towers(fields: Fields) -> tuple[Tower, ...]:
    """Every encoder whose section gives its size; one that does not is left out, with a note."""
    sources: list[tuple[str, Mapping[str, object]]] = list(objects(fields.outer, tuple(_SECTIONS)))
    for _, part in objects(fields.outer, ("thinker_config",)):
        sources += objects(part, tuple(_SECTIONS))
    made = [_tower(fields, key, section) for key, section in sources]
    if fields.flag("is_encoder_decoder"):
        made.append(_encoder(fields))
    return tuple(tower for tower in made if tower is not None)


def tower_type(outer: Mapping[str, object], raw: Mapping[str, object]) -> str:
    """The class of a vision part: as its section says, or as the whole model's class has it; "" where neither tells."""
    return str(raw.get("model_type") or _SILENT.get(str(outer.get("model_type")), ""))


def encoder_tokens(fields: Fields, *, reads_encoder: bool) -> int | None:
    """What cross attention keeps for one sequence: every position that the encoder gives. None where no layer reads
    one, and where the file tells none.

    Audio: the encoder's own positions. A picture: its patches and a class token, in as many tiles as one may have.
    Text: the encoder reads at most as many tokens as the decoder has positions.
    """
    if not reads_encoder:
        return None
    positions = _first(fields.own, ("max_source_positions",))
    if positions:
        return positions
    for _, section in objects(fields.outer, ("vision_config",)):
        raw = _with_class_sizes(fields, section)
        image, patch = _first(raw, ("image_size",)), _first(raw, ("patch_size",))
        return ((image // patch) ** 2 + 1) * (_first(raw, ("max_num_tiles",)) or 4) if image and patch else None
    given = _first(fields.own, ("n_positions", "max_encoder_position_embeddings", "max_position_embeddings"))
    return given or None


def _with_class_sizes(fields: Fields, section: Mapping[str, object]) -> dict[str, object]:
    """The section over what its class assumes, with a note of that."""
    kind = tower_type(fields.outer, section)
    sizes = _CLASS_SIZES.get(_SAME_SIZES.get(kind, kind), {})
    given = {key: value for key, value in section.items() if value is not None}
    taken = {key: size for key, size in sizes.items() if key not in given}
    if taken:
        told = ", ".join(f"{key} {size}" for key, size in taken.items())
        fields.note(f"the vision part leaves out what its class assumes: {told}")
    return {**taken, **given}


def _tower(fields: Fields, key: str, section: Mapping[str, object]) -> Tower | None:
    raw, kind = _with_class_sizes(fields, section), tower_type(fields.outer, section)
    if _SECTIONS[key] != "vision":
        raw, kind = dict(section), str(section.get("model_type", ""))
    num_layers, width, heads = _first(raw, _LAYERS), _first(raw, _WIDTHS), _first(raw, _HEADS)
    if kind.startswith("qwen2_vl") and _first(raw, ("embed_dim",)):
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
        is_gated=kind.startswith(_GATED),
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
