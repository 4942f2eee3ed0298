"""Weights of the encoders beside a text model, and of the projector between them.

The sizes come from ``Tower``; which biases and norms lie between the matrices is a row of ``TOWER_TRAITS``, one for
each class of transformers. A tower of another class is taken to have every bias, and its price carries a bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tonnage.costs.config import ModelConfig
from tonnage.costs.encoders import tower_type
from tonnage.costs.layers import Tower
from tonnage.costs.reading import whole
from tonnage.costs.tensors import Component, Tensor, matrix, vector


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerTraits:
    """Biases of the projections, of the norms, of the patches; a norm before and after all layers; a class token;
    learned positions where the sizes name any (rotary ones are none)."""

    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    patch_bias: bool = True
    pre_norm: bool = False
    post_norm: bool = True
    class_token: bool = False
    has_positions: bool = True


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of the matrices, and of everything else."""

    matrices: int
    vectors: int

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.matrices + other.matrices, self.vectors + other.vectors)

    def times(self, count: int) -> Elements:
        return Elements(self.matrices * count, self.vectors * count)


_PIXTRAL = TowerTraits(
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    norm_bias=False,
    patch_bias=False,
    pre_norm=True,
    post_norm=False,
    has_positions=False,
)
_QWEN2 = TowerTraits(patch_bias=False, post_norm=False)
_QWEN2_5 = TowerTraits(norm_bias=False, patch_bias=False, post_norm=False)
_QWEN3 = TowerTraits(post_norm=False)
_CLIP = TowerTraits(patch_bias=False, pre_norm=True, class_token=True)

#: By the model_type of the vision part; where a config.json gives it none, that of the whole model's class.
TOWER_TRAITS: dict[str, TowerTraits] = {
    **dict.fromkeys(("siglip_vision_model", "idefics3_vision"), TowerTraits()),
    **dict.fromkeys(("clip_vision_model", "llama4_vision_model"), _CLIP),
    "pixtral": _PIXTRAL,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision"), _QWEN2),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _QWEN2_5),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_vision", "qwen3_vl_moe_vision"), _QWEN3),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_vision", "qwen3_5_moe_vision"), _QWEN3),
    "mllama_vision_model": TowerTraits(
        qkv_bias=False, out_bias=False, patch_bias=False, pre_norm=True, class_token=True
    ),
}


def tower_tensors(config: ModelConfig) -> tuple[tuple[Tensor, ...], bool]:
    """The tensors of all towers and their projectors, whole, and whether every one is counted exactly."""
    found: list[Tensor] = []
    exact = True
    for tower in config.towers:
        raw = _raw_of(config, tower)
        kind = tower_type(config.raw, raw) if tower.kind == "vision" else str(raw.get("model_type", ""))
        traits = TOWER_TRAITS.get(kind)
        exact = exact and traits is not None and str(config.raw.get("model_type")) in _PROJECTORS
        elements = _tower(tower, traits or TowerTraits(pre_norm=True), raw, kind) + _projector(config, tower, raw)
        found += _tensors(tower, elements)
    return tuple(found), exact


def _tensors(tower: Tower, elements: Elements) -> Iterator[Tensor]:
    """One matrix stands for all of a tower's: packed formats look at rows of its width."""
    rows, rest = divmod(elements.matrices, tower.hidden_size)
    yield matrix(Component.TOWERS, f"{tower.kind}_tower", rows, tower.hidden_size)
    yield vector(Component.TOWERS, f"{tower.kind}_tower", elements.vectors + rest)


def _raw_of(config: ModelConfig, tower: Tower) -> Mapping[str, object]:
    found = config.raw.get(f"{tower.kind}_config")
    return found if isinstance(found, Mapping) else {}


def _tower(tower: Tower, traits: TowerTraits, raw: Mapping[str, object], kind: str) -> Elements:
    hidden = tower.hidden_size
    norm = hidden * (2 if traits.norm_bias else 1)
    num_layers = tower.num_layers
    elements = Elements(0, 0)
    if kind == "mllama_vision_model":
        num_layers = whole(raw, "num_hidden_layers", default=32) + whole(raw, "num_global_layers", default=8)
        elements += _tiles(tower, _positions(tower, traits), raw)
    elements += _layer(tower, traits).times(num_layers)
    patches = Elements(hidden * tower.patch_elements, hidden * traits.patch_bias * bool(tower.patch_elements))
    ends = norm * (traits.pre_norm + traits.post_norm) + hidden * (_positions(tower, traits) + traits.class_token)
    if kind == "siglip_vision_model" and raw.get("vision_use_head", True):
        elements += _pooling_head(tower)
    return elements + patches + Elements(0, ends)


def _layer(tower: Tower, traits: TowerTraits) -> Elements:
    hidden, inner, ups = tower.hidden_size, tower.intermediate_size, 2 if tower.is_gated else 1
    vectors = 2 * hidden * (2 if traits.norm_bias else 1) + hidden * (3 * traits.qkv_bias + traits.out_bias)
    if traits.mlp_bias:
        vectors += ups * inner + hidden
    return Elements(4 * hidden * hidden + (ups + 1) * hidden * inner, vectors)


def _pooling_head(tower: Tower) -> Elements:
    """SigLIP's attention over one learned query, which text models do not read but the class has."""
    hidden, inner = tower.hidden_size, tower.intermediate_size
    return Elements(4 * hidden * hidden + 2 * hidden * inner, hidden + 4 * hidden + 2 * hidden + inner + hidden)


def _positions(tower: Tower, traits: TowerTraits) -> int:
    """Learned position embeddings, one for the class token too."""
    return tower.num_positions + traits.class_token if traits.has_positions else 0


def _tiles(tower: Tower, num_positions: int, raw: Mapping[str, object]) -> Elements:
    """Embeddings of the tile an image patch lies in: before the layers, after them, and within the positions."""
    ratios = raw.get("supported_aspect_ratios")
    num_ratios = len(ratios) if isinstance(ratios, list) else 8
    rows = (num_ratios + 1) * whole(raw, "max_num_tiles", default=4) * tower.hidden_size
    gates = 3 + 2 * whole(raw, "num_global_layers", default=8)
    return Elements(0, rows * (num_positions + 2) + gates)


def _projector(config: ModelConfig, tower: Tower, raw: Mapping[str, object]) -> Elements:
    build = _PROJECTORS.get(str(config.raw.get("model_type")))
    if build is None or tower.kind != "vision":
        return Elements(tower.projector_elements, 0)
    return build(tower.hidden_size, config.hidden_size, raw)


def _merger(hidden: int, out: int, merge: int, norm: int) -> Elements:
    """Several patches side by side through two layers with biases, and a norm."""
    wide = hidden * merge**2
    return Elements(wide * wide + wide * out, wide + out + norm)


def _qwen2_vl(hidden: int, out: int, raw: Mapping[str, object]) -> Elements:
    return _merger(hidden, out, whole(raw, "spatial_merge_size", default=2), 2 * hidden)


def _qwen2_5_vl(hidden: int, out: int, raw: Mapping[str, object]) -> Elements:
    return _merger(hidden, out, whole(raw, "spatial_merge_size", default=2), hidden)


def _qwen3_vl(hidden: int, out: int, raw: Mapping[str, object]) -> Elements:
    levels = raw.get("deepstack_visual_indexes")
    merge, wide = whole(raw, "spatial_merge_size", default=2), whole(raw, "out_hidden_size", default=out)
    deep = _merger(hidden, wide, merge, 2 * hidden * merge**2)
    return _qwen3_5(hidden, wide, raw) + deep.times(len(levels) if isinstance(levels, list) else 3)


def _qwen3_5(hidden: int, out: int, raw: Mapping[str, object]) -> Elements:
    wide = whole(raw, "out_hidden_size", default=out)
    return _merger(hidden, wide, whole(raw, "spatial_merge_size", default=2), 2 * hidden)


def _gemma3(hidden: int, out: int, _raw: Mapping[str, object]) -> Elements:
    return Elements(hidden * out, hidden)


def _llama4(_hidden: int, out: int, raw: Mapping[str, object]) -> Elements:
    inner, middle = whole(raw, "intermediate_size", default=5632), whole(raw, "projector_input_dim", default=4096)
    last, given = whole(raw, "projector_output_dim", default=4096), whole(raw, "vision_output_dim", default=4096)
    return Elements(inner * middle + last * last + given * out, 0)


def _mllama(_hidden: int, out: int, raw: Mapping[str, object]) -> Elements:
    return Elements(whole(raw, "vision_output_dim", default=7680) * out, out)


def _mistral3(hidden: int, out: int, _raw: Mapping[str, object]) -> Elements:
    return Elements(4 * hidden * hidden + hidden * out + out * out, hidden)


def _llava(hidden: int, out: int, _raw: Mapping[str, object]) -> Elements:
    return Elements(hidden * out + out * out, 2 * out)


#: By the model_type of the whole model.
_PROJECTORS: dict[str, Callable[[int, int, Mapping[str, object]], Elements]] = {
    "gemma3": _gemma3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "llama4": _llama4,
    "mllama": _mllama,
    "mistral3": _mistral3,
    "llava": _llava,
}
