"""What one layer writes into the cache: arrays per token, per compressed entry, or per sequence, with their dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.costs.dtypes import FP8_DS_MLA, NVFP4
from tonnage.costs.layers import Attention, Latent, Layer, Mixer, Recurrent
from tonnage.costs.ranks import rank_kv_heads
from tonnage.costs.states import compressor_shape, state_shape
from tonnage.errors import InvalidSetting
from tonnage.layout import DTYPE_BYTES, KVGroupKind
from tonnage.terms import Rank
from tonnage.units import ceil_div, round_up

_FP8 = "float8_e4m3fn"
#: Four-bit elements that share one 8-bit scale.
NVFP4_BLOCK = 16
#: Elements of a sparse indexer's key that share one float32 scale.
INDEX_BLOCK = 128
#: Elements of an 8-bit latent record that share one float32 scale.
_LATENT_BLOCK = 128
#: Elements of an 8-bit record of compressed attention that share one 8-bit scale; the scales fill whole words of 8.
_RECORD_BLOCK, _RECORD_SCALES = 64, 8


@dataclass(frozen=True, slots=True)
class Vector:
    """One array of one layer: ``lead`` dimensions, then the entries of a block, then ``tail`` dimensions."""

    name: str
    dtype: str
    tail: tuple[int, ...]
    lead: tuple[int, ...] = ()

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.lead) * math.prod(self.tail) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a layer keeps: for every ``tokens`` tokens, or once a sequence where ``tokens`` is 0.

    Two layers with equal entries can share a group. ``window``: tokens after which an entry is dropped.
    """

    kind: KVGroupKind
    tokens: int
    vectors: tuple[Vector, ...]
    window: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(vector.entry_bytes for vector in self.vectors)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Of the cache, of convolution inputs (the weights'), and of recurrent matrices."""

    kv: str
    conv: str
    state: str


def layer_entries(layer: Layer, dtypes: Dtypes, rank: Rank) -> tuple[Entry, ...]:
    """Everything one layer keeps on one rank, nothing for a layer that reads another's cache."""
    return tuple(entry for mixer in layer.mixers for entry in _entries(mixer, dtypes, rank) if entry.num_bytes)


def _entries(mixer: Mixer, dtypes: Dtypes, rank: Rank) -> Iterator[Entry]:
    if isinstance(mixer, Recurrent):
        yield _state(mixer, dtypes, rank)
    elif isinstance(mixer, Latent):
        vectors = (*_latent(mixer, dtypes.kv), *_index(mixer.index_head_dim))
        yield Entry(KVGroupKind.LATENT, 1, vectors)
    elif mixer.kv_from is None:
        yield from _attention(mixer, dtypes, rank)


def _attention(mixer: Attention, dtypes: Dtypes, rank: Rank) -> Iterator[Entry]:
    kind = KVGroupKind.FULL if mixer.window is None else KVGroupKind.WINDOW
    if mixer.is_cross:
        kind = KVGroupKind.CROSS
    heads = rank_kv_heads(mixer.num_kv_heads, rank)
    vectors = _keys_and_values(mixer, heads, dtypes.kv)
    yield Entry(kind, mixer.compress_ratio, (*vectors, *_index(mixer.index_head_dim)), mixer.window)
    if mixer.compress_ratio > 1:
        yield Entry(KVGroupKind.STATE, 0, (Vector("compressor", "float32", compressor_shape(mixer)),))


def _keys_and_values(mixer: Attention, heads: int, dtype: str) -> Iterator[Vector]:
    if dtype == FP8_DS_MLA:
        raise InvalidSetting("kv_dtype", dtype, "a record for latent attention, which this model has not",
                             remedy="use fp8")  # fmt: skip
    keys, values = mixer.head_dim, mixer.v_head_dim
    if not values and mixer.qk_rope_head_dim and dtype == _FP8:
        yield Vector("kv", "uint8", (heads, _record_bytes(mixer)))
    elif not values:
        yield from _vectors("kv", dtype, (heads, keys))
    elif keys == values:
        yield from _vectors("kv", dtype, (heads, keys), lead=(2,))
    else:
        yield from _vectors("k", dtype, (heads, keys))
        yield from _vectors("v", dtype, (heads, values))


def _record_bytes(mixer: Attention) -> int:
    """The rotary part in 16 bits, the rest in 8 with an 8-bit scale per 64: 448 + 128 + 8 for a head of 512."""
    narrow = mixer.head_dim - mixer.qk_rope_head_dim
    return narrow + 2 * mixer.qk_rope_head_dim + round_up(ceil_div(narrow, _RECORD_BLOCK), _RECORD_SCALES)


def _latent(mixer: Latent, dtype: str) -> Iterator[Vector]:
    size = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    if dtype == FP8_DS_MLA:
        scales = ceil_div(mixer.kv_lora_rank, _LATENT_BLOCK) * DTYPE_BYTES["float32"]
        size = mixer.kv_lora_rank + scales + mixer.qk_rope_head_dim * DTYPE_BYTES["bfloat16"]
        yield Vector("latent", "uint8", (size,))
    else:
        yield from _vectors("latent", dtype, (size,))


def _vectors(name: str, dtype: str, tail: tuple[int, ...], lead: tuple[int, ...] = ()) -> Iterator[Vector]:
    """One array, or in four bits two: packed pairs, and a scale for every 16 elements.

    Scales never span heads; a head that is no multiple of 16 is laid flat, and its layer rounded up as a whole.
    """
    if dtype != NVFP4:
        yield Vector(name, dtype, tail, lead)
    elif tail[-1] % NVFP4_BLOCK == 0:
        yield Vector(name, NVFP4, (*tail[:-1], tail[-1] // 2), lead)
        yield Vector(f"{name}_scale", _FP8, (*tail[:-1], tail[-1] // NVFP4_BLOCK), lead)
    else:
        elements = math.prod(lead) * math.prod(tail)
        yield Vector(name, NVFP4, (ceil_div(elements, 2),))
        yield Vector(f"{name}_scale", _FP8, (ceil_div(elements, NVFP4_BLOCK),))


def _index(head_dim: int) -> tuple[Vector, ...]:
    """The sparse indexer's key: 8 bits an element and a float32 scale per 128, whatever the dtype of the cache."""
    if not head_dim:
        return ()
    return Vector("index", _FP8, (head_dim,)), Vector("index_scale", "float32", (ceil_div(head_dim, INDEX_BLOCK),))


def _state(mixer: Recurrent, dtypes: Dtypes, rank: Rank) -> Entry:
    shape = state_shape(mixer, rank)
    vectors = (Vector("ssm", dtypes.state, shape.ssm), Vector("conv", dtypes.conv, shape.conv))
    return Entry(KVGroupKind.STATE, 0, tuple(vector for vector in vectors if vector.entry_bytes))
