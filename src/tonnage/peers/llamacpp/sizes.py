"""Buffers of one device by context and layers: what ``--fit`` projects without allocating any of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tonnage.costs.layers import Attention, Latent, Layer, Mixer, Recurrent
from tonnage.costs.price import weights_price
from tonnage.costs.ranks import rank_shape
from tonnage.costs.states import state_shape
from tonnage.costs.tensors import Component
from tonnage.errors import InvalidSetting
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.span import Span
from tonnage.units import round_up

#: Bytes of an element of the cache by its type, scales of 32 elements included.
CACHE_TYPES = {
    "f32": Fraction(4), "f16": Fraction(2), "bf16": Fraction(2), "q8_0": Fraction(34, 32), "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32), "q4_1": Fraction(20, 32), "q4_0": Fraction(18, 32), "iq4_nl": Fraction(18, 32),
}  # fmt: skip
#: Our names of the dtypes that have one there.
_OURS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "q8_0"}
#: Cells of the context come in such groups.
CELLS = 256
_FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One device's share of the model, with nothing decided.

    cell, window_cell   bytes of a cell in all layers without a window, and in those with one
    state               bytes of one sequence's states
    num_layers          that may be moved to the host
    compute             the buffer beside attention's scores, at its ends
    score               bytes of scores for each cell of context, 0 with flash attention
    output_bytes        of the weights: what stays with the last device whatever layers go
    expert_share        of the layers' weights: routed experts
    """

    cell: Fraction
    window_cell: Fraction
    window: int
    state: int
    num_layers: int
    ubatch: int
    compute: Span
    score: int
    weights: Span
    output_bytes: int
    expert_share: Fraction
    num_sequences: int
    is_unified: bool
    has_full_windows: bool

    def cache_bytes(self, context: int) -> int:
        """Cells of every kind, and states of every sequence."""
        return self.kv_bytes(context) + self.state * self.num_sequences

    def kv_bytes(self, context: int) -> int:
        cells = round_up(context, CELLS)
        return int(cells * self.cell + self.window_cells(cells) * self.window_cell)

    def window_cells(self, cells: int) -> int:
        if not self.window or self.has_full_windows:
            return cells
        each = self.window * (self.num_sequences if self.is_unified else 1) + self.ubatch
        streams = 1 if self.is_unified else self.num_sequences
        return min(cells, round_up(each, CELLS) * streams)

    def used(self, context: int, *, weights: int, compute: int) -> int:
        """With every layer on the device."""
        return weights + self.cache_bytes(context) + compute + self.score * round_up(context, CELLS)


def model_of(launch: Launch, settings: Settings) -> Model:
    """Raises ``InvalidSetting`` for a type of cache that llama.cpp has not, or for a split across heads."""
    rank = launch.rank
    if rank.tp > 1:
        what = "llama.cpp gives whole layers to its devices"
        raise InvalidSetting("tp", rank.tp, what, remedy=f"write --pp {rank.tp}")
    shape = rank_shape(launch.config, rank)
    layers = [launch.config.layers[number] for number in shape.layers]
    keys, values = (_element(launch, settings, name) for name in ("cache_type_k", "cache_type_v"))
    ubatch = settings.whole("ubatch_size", 512, "tokens of one graph")
    asked = settings.maybe("parallel")
    sequences = asked or settings.took("parallel", 4, "4", "slots of the server, where their number is left to it")
    near = [mixer for mixer in _mixers(layers) if isinstance(mixer, Attention) and mixer.window]
    flash = settings.text("flash_attn", "on").lower() not in ("off", "false", "0")
    heads = max((mixer.num_heads for mixer in _mixers(layers) if not isinstance(mixer, Recurrent)), default=0)
    return Model(
        cell=sum((_cell(mixer, keys, values) for mixer in _mixers(layers) if mixer not in near), Fraction(0)),
        window_cell=sum((_cell(mixer, keys, values) for mixer in near), Fraction(0)),
        window=max((mixer.window or 0 for mixer in near), default=0),
        state=sum(_state(mixer, launch) for mixer in _mixers(layers) if isinstance(mixer, Recurrent)),
        num_layers=len(layers),
        ubatch=ubatch,
        compute=_compute(launch, ubatch, has_head=shape.has_head),
        score=0 if flash else heads * ubatch * _FLOAT,
        weights=_weights(launch, has_embeddings=shape.has_embeddings, has_head=shape.has_head),
        output_bytes=_part(launch, Component.HEAD if not launch.config.tie_word_embeddings else Component.EMBEDDINGS)
        if shape.has_head
        else 0,
        expert_share=_expert_share(launch),
        num_sequences=sequences,
        is_unified=settings.switch("kv_unified") if settings.has("kv_unified") else asked is None,
        has_full_windows=settings.switch("swa_full"),
    )


def _mixers(layers: list[Layer]) -> Iterator[Mixer]:
    return (mixer for layer in layers for mixer in layer.mixers)


def _element(launch: Launch, settings: Settings, name: str) -> Fraction:
    kind = settings.text(name, _OURS.get(launch.kv_dtype or "float16", "f16")).lower()
    if kind not in CACHE_TYPES:
        raise InvalidSetting(name, kind, "no such type of cache", remedy=f"use one of {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[kind]


def _cell(mixer: Mixer, keys: Fraction, values: Fraction) -> Fraction:
    if isinstance(mixer, Latent):
        return keys * (mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    if isinstance(mixer, Recurrent) or mixer.kv_from is not None or mixer.is_cross:
        return Fraction(0)
    return mixer.num_kv_heads * (keys * mixer.head_dim + values * (mixer.v_head_dim or mixer.head_dim))


def _state(mixer: Recurrent, launch: Launch) -> int:
    """In float32, both arrays."""
    shape = state_shape(mixer, launch.rank)
    conv, ssm = shape.conv, shape.ssm
    return _FLOAT * (conv[0] * conv[1] + ssm[0] * ssm[1] * ssm[2])


def _compute(launch: Launch, ubatch: int, *, has_head: bool) -> Span:
    """Logits and the hidden state of a ubatch, or the widest feed-forward part where that is more."""
    config = launch.config
    logits = (config.vocab_size if has_head else 0) + config.hidden_size
    inner = 2 * config.intermediate_size + 2 * config.hidden_size
    best = ubatch * max(logits, inner) * _FLOAT
    return Span(best, best * 95 // 100, best * 3 // 2)


def _weights(launch: Launch, *, has_embeddings: bool, has_head: bool) -> Span:
    """Of the device: the input embeddings stay on the host."""
    weights = Span.of(launch.weights)
    if not has_embeddings or (launch.config.tie_word_embeddings and has_head):
        return weights
    table = _part(launch, Component.EMBEDDINGS)
    return Span(weights.best - table, weights.low - table * 3 // 2, weights.high - table // 2).at_least(0)


def _part(launch: Launch, component: Component) -> int:
    """Bytes of a component, as its share of our own price for the model."""
    price = weights_price(launch.config, dtype=launch.dtype, rank=launch.rank)
    return launch.weights.bytes * price.bytes_of(component) // max(price.quantity.bytes, 1)


def _expert_share(launch: Launch) -> Fraction:
    price = weights_price(launch.config, dtype=launch.dtype, rank=launch.rank)
    outside = sum(price.bytes_of(each) for each in (Component.EMBEDDINGS, Component.HEAD))
    layers = max(price.quantity.bytes - outside, 1)
    return Fraction(price.bytes_of(Component.EXPERTS), layers)
