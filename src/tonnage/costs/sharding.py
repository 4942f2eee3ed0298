"""Stored tensors by component and by one rank's share of them, told from their names.

The rule: a name says the layer (``layers.N``, ``h.N``, ``blk.N`` ...), so the pipeline stage; and the kind. Norms,
routers, the latents' down projections and the biases of what is cut by its inputs lie whole on every rank; key and
value projections by whole key heads; other projections of attention and of recurrent layers by heads; experts by
``ep`` and then by ``tp / ep``; everything else, the vocabulary included, by ``tp``. Towers lie whole on the first
stage. Tensors that no engine loads (stored rotary tables) are left out; a tied head is listed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Experts, Latent, Layer, Recurrent
from tonnage.costs.quantised import NOTHING, Span
from tonnage.costs.ranks import RankShape, rank_shape
from tonnage.costs.stored import StoredTensor
from tonnage.costs.tensors import Component, Cut
from tonnage.terms import Rank
from tonnage.units import ceil_div

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk|blocks|layer)\.(\d+)\.")
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|audio\w*|speech\w*|multi_modal_projector|mm_projector|connector|mlp1|v\.|mm\.)"
)
_KINDS: tuple[tuple[Component, re.Pattern[str]], ...] = tuple(
    (component, re.compile(pattern))
    for component, pattern in (
        (Component.NORMS, r"norm|(?:^|\.)ln_\w+\."),
        (Component.SHARED_EXPERTS, r"shared_expert|shared_mlp|shexp"),
        (
            Component.EXPERTS,
            r"experts?\.(?:\d|gate_up|down|up|gate)|_exps\.|moe\.(?:in|out)put_linear|(?:^|\.)w[123]\.(?:\d+)\.",
        ),
        (Component.ROUTER, r"(?:mlp|moe|mixer|feed_forward)\.gate\.|router|gate_inp|e_score|exp_probs|expert_bias"),
        (
            Component.RECURRENT,
            r"linear_attn|mamba|mixer\.(?:in_proj|out_proj|conv|A|D|dt)|\.conv\.|ssm_|temporal_b",
        ),
        (Component.ATTENTION, r"attn|attention|indexer"),
    )
)
_EMBEDDINGS = re.compile(
    r"embed_tokens|(?:^|\.)wte\.|(?:^|\.)wpe\.|word_embeddings|embed_in|token_embd|\.embeddings\.|embed"
)
_HEAD = re.compile(r"lm_head|embed_out|^output\.")
_WHOLE = re.compile(r"q_a_proj|kv_a_proj|indexer|attn_q_a|attn_kv_a|(?:o_proj|out_proj|down_proj|c_proj|dense)\.bias")
_KEYS = re.compile(r"(?:k_proj|v_proj|attn_k|attn_v)\.")
_PACKED = re.compile(r"qkv|query_key_value|c_attn|Wqkv")
_UNUSED = re.compile(r"rotary_emb\.inv_freq|rope_freqs|masked_bias|(?:^|\.)attn\.bias$")
#: Stored in the model's dtype and turned into the one asked for; all else stays as it is stored.
_WIDE = ("F32", "F16", "BF16")
_SCALES = re.compile(r"scale|absmax|zeros|quant|SCB|e_score|g_idx|code")
_WHOLE_SHARE = Fraction(1)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a name belongs: its component, and its layer's number where it lies in one."""

    component: Component
    layer: int | None


def stored_spans(
    tensors: Iterable[StoredTensor], config: ModelConfig, *, word: int, rank: Rank, with_mtp: bool
) -> dict[Component, Span]:
    """Bytes of one rank by component. ``word``: bytes of an element of what is not packed."""
    shape, cut = rank_shape(config, rank), Cut.of(rank)
    spans: dict[Component, Span] = {}
    listed = list(tensors)
    tied = config.tie_word_embeddings and any(_EMBEDDINGS.search(tensor.name) for tensor in listed)
    for tensor in listed:
        place = _place(tensor.name, config)
        if _UNUSED.search(tensor.name) or (tied and place.component is Component.HEAD):
            continue
        share = _share(tensor.name, place, config, shape, cut, with_mtp=with_mtp)
        if share:
            size = _size(tensor, word)
            span = Span.exact(-(-size * share.numerator // share.denominator))
            copied = place.component is Component.EMBEDDINGS and not shape.has_embeddings
            component = Component.HEAD if copied else place.component
            spans[component] = spans.get(component, NOTHING) + span
    return spans


def _size(tensor: StoredTensor, word: int) -> int:
    wide = tensor.dtype in _WIDE and not _SCALES.search(tensor.name)
    return tensor.num_elements * word if wide else tensor.num_bytes


def _place(name: str, config: ModelConfig) -> _Place:
    if _TOWER.search(name):
        return _Place(Component.TOWERS, None)
    found = _LAYER.search(name)
    number = int(found.group(1)) if found else None
    if name.startswith("mtp.") or (number is not None and number >= config.num_layers):
        return _Place(Component.MTP, number)
    if number is None:
        if _HEAD.search(name):
            return _Place(Component.HEAD, None)
        table = _EMBEDDINGS.search(name) and "norm" not in name
        return _Place(Component.EMBEDDINGS if table else Component.NORMS, None)
    inside = name[found.end() :] if found else name
    for component, pattern in _KINDS:
        if pattern.search("." + inside):
            return _Place(component, number)
    return _Place(Component.FEED_FORWARD, number)


def _share(name: str, place: _Place, config: ModelConfig, shape: RankShape, cut: Cut, *, with_mtp: bool) -> Fraction:
    """The part of one tensor that lies on this rank."""
    component = place.component
    if component is Component.MTP:
        # Stored copies of the embeddings and of the vocabulary projection are the model's own.
        is_copy = bool(re.search(r"embed_tokens|shared_head\.head|lm_head", name))
        return _WHOLE_SHARE if with_mtp and shape.has_head and not is_copy else Fraction(0)
    if component is Component.TOWERS:
        return Fraction(int(shape.has_embeddings))
    if place.layer is None:
        return _end_share(component, config, shape)
    if place.layer not in shape.layers:
        return Fraction(0)
    if component in (Component.NORMS, Component.ROUTER) or _WHOLE.search(name):
        return _WHOLE_SHARE
    layer = config.layers[place.layer]
    if component is Component.EXPERTS:
        return _expert_share(layer, cut)
    if component in (Component.ATTENTION, Component.RECURRENT):
        return _head_share(name, layer, cut, is_state=component is Component.RECURRENT)
    return Fraction(1, cut.inner)


def _end_share(component: Component, config: ModelConfig, shape: RankShape) -> Fraction:
    if component is Component.NORMS:
        return Fraction(int(shape.has_head))
    here = shape.has_head if component is Component.HEAD else shape.has_embeddings
    if component is Component.EMBEDDINGS and config.tie_word_embeddings:
        here = shape.has_embeddings or shape.has_head
    return Fraction(shape.vocab_size, config.vocab_size) if here else Fraction(0)


def _expert_share(layer: Layer, cut: Cut) -> Fraction:
    part = layer.feed_forward
    num_experts = part.num_experts if isinstance(part, Experts) else 1
    return Fraction(ceil_div(num_experts, cut.experts), num_experts * cut.expert_inner)


def _head_share(name: str, layer: Layer, cut: Cut, *, is_state: bool) -> Fraction:
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrent):
            if is_state or len(layer.mixers) == 1:
                channels = mixer.num_heads or mixer.conv_channels  # a short convolution has no heads
                return Fraction(cut.heads(channels), channels)
        elif isinstance(mixer, Latent):
            return Fraction(cut.heads(mixer.num_heads), mixer.num_heads)
        elif not is_state:
            return _attention_share(name, mixer, cut)
    return Fraction(1, cut.attention)


def _attention_share(name: str, mixer: Attention, cut: Cut) -> Fraction:
    heads, kv_heads = cut.heads(mixer.num_heads), cut.heads(mixer.num_kv_heads)
    if _KEYS.search(name):
        return Fraction(kv_heads, mixer.num_kv_heads)
    if _PACKED.search(name):
        each = mixer.head_dim + mixer.v_head_dim
        whole = mixer.num_heads * mixer.head_dim + mixer.num_kv_heads * each
        return Fraction(heads * mixer.head_dim + kv_heads * each, whole)
    return Fraction(heads, mixer.num_heads)
