"""The layout of one rank's cache, and so its price: layers of one lifetime side by side in blocks, blocks in slabs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import lcm

from tonnage.config import DEFAULT_BLOCK_TOKENS
from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import FP8_DS_MLA, KV_DTYPES, STATE_DTYPES, parse_dtype
from tonnage.costs.entries import Dtypes, Entry, Vector, layer_entries
from tonnage.costs.grouping import Share, Stack, choose_slabs
from tonnage.costs.layers import Layer
from tonnage.costs.ranks import rank_shape, stage_of
from tonnage.errors import InvalidSetting, UnsupportedModel
from tonnage.layout import DTYPE_BYTES, KVGroup, KVGroupKind, KVLayout, KVOrder, Part, bytes_per_token
from tonnage.terms import Rank
from tonnage.units import round_up

__all__ = ["DEFAULT_STATE_DTYPE", "LARGEST_BLOCK_TOKENS", "bytes_per_token", "kv_layout"]

#: Beyond this a block is no longer a unit of rounding but a pool of its own.
LARGEST_BLOCK_TOKENS = 65_536
#: Of recurrent matrices where neither the user nor config.json says: sums over a whole text want the range.
DEFAULT_STATE_DTYPE = "float32"

_ORDER = (KVGroupKind.FULL, KVGroupKind.LATENT, KVGroupKind.WINDOW, KVGroupKind.CROSS, KVGroupKind.STATE)

#: Kinds whose blocks hold tokens of the text.
_OF_TEXT = (KVGroupKind.FULL, KVGroupKind.LATENT, KVGroupKind.WINDOW)


def kv_layout(
    config: ModelConfig,
    *,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    rank: Rank | None = None,
    with_mtp: bool = False,
) -> KVLayout:
    """The cache of one rank. A dense model has one group whose blocks have the shape (layers, 2, block_tokens,
    kv_heads, head_dim), K at 0 and V at 1; other kinds of layers have groups of their own in slabs of the same size
    (``costs.grouping``), those that grow with every token first.

    kv_dtype      the dtype that is allocated (default: that of the weights)
    state_dtype   of recurrent matrices (default: config.json's, else float32)
    block_tokens  any number from 1 to 65,536; where there are states, or an encoder's tokens, beside the text's, a
                  group's blocks hold a multiple of it. Under context parallelism these are tokens of this rank: every
                  cp-th block of a sequence is here
    with_mtp      whether the layers for multi-token prediction, on the last stage, keep a cache too

    Raises ``InvalidSetting`` for a dtype, a block size or a rank, ``UnsupportedModel`` where nothing is kept at all.
    """
    where = rank or Rank()
    dtypes = Dtypes(
        kv=parse_dtype(kv_dtype or config.dtype, knob="kv_dtype", allowed=(*KV_DTYPES, FP8_DS_MLA)),
        conv=config.dtype,
        state=parse_dtype(
            state_dtype or config.state_dtype or DEFAULT_STATE_DTYPE, knob="state_dtype", allowed=STATE_DTYPES
        ),
    )
    if isinstance(block_tokens, bool) or not 1 <= block_tokens <= LARGEST_BLOCK_TOKENS:
        raise InvalidSetting(
            "block_tokens", block_tokens, f"outside 1 to {LARGEST_BLOCK_TOKENS:,}", remedy="use 16, 32 or 64"
        )
    stacks = _stacks(_local_layers(config, where, with_mtp=with_mtp), dtypes, where)
    if not stacks:
        raise UnsupportedModel(
            f"{config.name}: no layer of this rank keeps anything of the past",
            remedy="choose a pp or a partition that gives every stage a layer with attention or state",
        )
    return _layout(tuple(stacks.items()), block_tokens)


def _local_layers(config: ModelConfig, rank: Rank, *, with_mtp: bool) -> Iterator[tuple[int, Layer]]:
    """(global number, layer) of the rank's stage; extra layers come after the model's last."""
    for number in rank_shape(config, rank).layers:
        yield number, config.layers[number]
    if with_mtp and stage_of(rank) == rank.pp - 1:
        yield from enumerate(config.mtp_layers, start=config.num_layers)


def _stacks(layers: Iterator[tuple[int, Layer]], dtypes: Dtypes, rank: Rank) -> dict[Entry, tuple[int, ...]]:
    """Layers with equal entries, by entry. Layers are mostly one object many times: each is looked at once."""
    entries: dict[int, tuple[Entry, ...]] = {}
    stacks: dict[Entry, list[int]] = {}
    for number, layer in layers:
        if id(layer) not in entries:
            entries[id(layer)] = layer_entries(layer, dtypes, rank)
        for entry in entries[id(layer)]:
            stacks.setdefault(entry, []).append(number)
    return {entry: tuple(stacks[entry]) for entry in sorted(stacks, key=_place)}


def _place(entry: Entry) -> tuple[int, int, int, int]:
    return _ORDER.index(entry.kind), entry.tokens, entry.window or 0, -entry.num_bytes


@lru_cache(maxsize=256)
def _layout(stacks: tuple[tuple[Entry, tuple[int, ...]], ...], block_tokens: int) -> KVLayout:
    units = [lcm(block_tokens, entry.tokens) if entry.tokens else 0 for entry, _ in stacks]
    is_text = all(entry.kind in _OF_TEXT for entry, _ in stacks) and len(set(units)) == 1
    slabs = choose_slabs(
        tuple(
            Stack(len(numbers), _block_bytes(entry, tokens), tokens, entry.window, 1 if is_text else None)
            for (entry, numbers), tokens in zip(stacks, units, strict=True)
        )
    )
    names = _names([entry for entry, _ in stacks], [len(shares) for shares in slabs.shares])
    groups: list[KVGroup] = []
    for (entry, numbers), tokens, shares in zip(stacks, units, slabs.shares, strict=True):
        first = 0
        for share in shares:
            groups.append(_group(next(names), entry, numbers[first : first + share.num_layers], share, tokens))
            first += share.num_layers
    slab_bytes = max(slabs.slab_bytes, *(group.block_bytes for group in groups))
    return KVLayout(slab_bytes=slab_bytes, order=KVOrder.BLOCK_MAJOR, groups=tuple(groups))


def _names(entries: list[Entry], counts: list[int]) -> Iterator[str]:
    """The kind, with its window where it has one; numbered where several groups would have one name."""
    names: list[str] = []
    for entry, count in zip(entries, counts, strict=True):
        names += [entry.kind.value + (f"-{entry.window}" if entry.window else "")] * count
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if names.count(name) == 1 else f"{name}-{seen[name]}"


def _group(name: str, entry: Entry, layers: tuple[int, ...], share: Share, unit_tokens: int) -> KVGroup:
    block_tokens = share.num_units * unit_tokens
    parts = tuple(_parts(entry, len(layers), block_tokens))
    last = parts[-1]
    return KVGroup(
        name=name,
        kind=entry.kind,
        layers=layers,
        window=entry.window,
        block_tokens=block_tokens,
        block_bytes=last.offset_bytes + last.num_bytes,
        parts=parts,
    )


def _parts(entry: Entry, num_layers: int, block_tokens: int) -> Iterator[Part]:
    """Arrays one after the other, each at a multiple of its element."""
    offset = 0
    for vector in entry.vectors:
        offset = round_up(offset, DTYPE_BYTES[vector.dtype])
        part = Part(
            name=vector.name,
            dtype=vector.dtype,
            shape=_shape(entry, vector, num_layers, block_tokens),
            offset_bytes=offset,
        )
        yield part
        offset += part.num_bytes


def _shape(entry: Entry, vector: Vector, num_layers: int, block_tokens: int) -> tuple[int, ...]:
    if not entry.tokens:
        return (num_layers, *vector.lead, *vector.tail)
    return (num_layers, *vector.lead, block_tokens // entry.tokens, *vector.tail)


def _block_bytes(entry: Entry, block_tokens: int) -> int:
    """Of one layer, holes between arrays included."""
    parts = tuple(_parts(entry, 1, block_tokens))
    whole = parts[-1].offset_bytes + parts[-1].num_bytes
    # Arrays of several layers lie together, so that a hole can move; rounding to the widest element covers it.
    return whole if len(parts) == 1 else round_up(whole, max(DTYPE_BYTES[part.dtype] for part in parts))
