"""How the KV cache lies in memory: slabs, groups of layers, and the parts of one block.

The cost model makes a ``KVLayout`` and the allocator builds from the very same object, so the price of a block and
its size cannot drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from tonnage.units import ceil_div

#: Bytes of one element, by the name the cost model and the engine share.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "int64": 8,
    "float32": 4, "int32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
    "float4_e2m1fn_x2": 1,  # two packed elements
}  # fmt: skip


class KVGroupKind(StrEnum):
    """Layers whose blocks live and die together."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    STATE = "state"
    CROSS = "cross"


class KVOrder(StrEnum):
    """BLOCK_MAJOR: all layers of a group side by side inside one block. LAYER_MAJOR: one array per layer."""

    BLOCK_MAJOR = "block_major"
    LAYER_MAJOR = "layer_major"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One array inside a block: ``shape`` is per block, ``offset_bytes`` from the block's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers of one lifetime. ``block_bytes`` holds ``block_tokens`` tokens of every layer in ``layers``.

    A block lies in one slab; what the slab has beyond ``block_bytes`` is padding. Layers of one kind may be spread
    over several groups so that their blocks fill the slabs better. ``window`` is in tokens and None for full
    attention. A STATE block holds the recurrent state of one sequence, whatever its length: its ``block_tokens`` is 0.
    CROSS blocks count tokens of the encoder.
    """

    name: str
    kind: KVGroupKind
    layers: tuple[int, ...]
    window: int | None
    block_tokens: int
    block_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The whole cache: equal slabs of ``slab_bytes``, each able to hold one block of any group."""

    slab_bytes: int
    order: KVOrder
    groups: tuple[KVGroup, ...]


def bytes_per_token(layout: KVLayout) -> int:
    """Bytes of one more token of a long text, for display: over the groups that grow without bound, rounded up.

    The pool is priced per block. Tokens are the rank's own: under context parallelism every cp-th block is here.
    """
    growing = [group for group in layout.groups if group.kind in (KVGroupKind.FULL, KVGroupKind.LATENT)]
    return -(-sum(Fraction(group.block_bytes, group.block_tokens) for group in growing) // 1)


def group_families(layout: KVLayout) -> dict[str, tuple[KVGroup, ...]]:
    """Groups that keep the same for as long, in blocks of as many tokens: alike but for their layers. In order.

    The name of several is what their own names begin with (``state`` for ``state-1`` to ``state-48``).
    """
    found: dict[tuple[object, ...], list[KVGroup]] = {}
    for group in layout.groups:
        found.setdefault((group.kind, group.window, group.block_tokens), []).append(group)
    families: dict[str, tuple[KVGroup, ...]] = {}
    for groups in found.values():
        name = groups[0].name if len(groups) == 1 else groups[0].name.rpartition("-")[0] or groups[0].name
        families[name if name not in families else groups[0].name] = tuple(groups)
    return families


def state_bytes_per_sequence(layout: KVLayout) -> int:
    """Recurrent state of one sequence, whatever its length, without padding."""
    return sum(group.block_bytes for group in layout.groups if group.kind is KVGroupKind.STATE)


def window_blocks(window: int, block_tokens: int, *, extra_tokens: int = 0) -> int:
    """The most blocks that ``window`` tokens in a row can touch, wherever they start; ``extra_tokens`` more while a
    step computes that many."""
    return ceil_div(window - 1 + extra_tokens, block_tokens) + 1


def group_blocks(group: KVGroup, num_tokens: int, *, encoder_tokens: int = 0) -> int:
    """Blocks that one sequence of ``num_tokens`` tokens holds in a group, ``encoder_tokens`` beside the text."""
    if group.kind is KVGroupKind.STATE:
        return 1
    if group.kind is KVGroupKind.CROSS:
        return ceil_div(encoder_tokens, group.block_tokens)
    blocks = ceil_div(num_tokens, group.block_tokens)
    return blocks if group.window is None else min(blocks, window_blocks(group.window, group.block_tokens))


def sequence_bytes(layout: KVLayout, num_tokens: int, *, encoder_tokens: int = 0) -> int:
    """Bytes of the slabs that one sequence holds, padding included."""
    blocks = sum(group_blocks(group, num_tokens, encoder_tokens=encoder_tokens) for group in layout.groups)
    return blocks * layout.slab_bytes


def blocks_per_sequence(max_seq_len: int, block_tokens: int, *, extra_tokens: int = 0) -> int:
    """KV blocks of ``block_tokens`` tokens that the longest sequence fills, with ``extra_tokens`` beyond its end for
    drafts and look-ahead: the width of the page table."""
    return ceil_div(max_seq_len + extra_tokens, block_tokens)


def table_bytes(*, max_batch_size: int, max_seq_len: int, block_tokens: int, extra_tokens: int = 0) -> int:
    """Bytes of the page table: int32 ``[max_batch_size, blocks_per_sequence]``, one row for every running sequence."""
    width = blocks_per_sequence(max_seq_len, block_tokens, extra_tokens=extra_tokens)
    return max_batch_size * width * DTYPE_BYTES["int32"]


#: The name by which planner, report and ``disabled_claims`` know the penalty tables.
PENALTY_TABLES = "penalty tables"


def penalty_table_bytes(*, max_batch_size: int, vocab_size: int) -> int:
    """Bytes of the penalty tables: int32 counts of the output and a bool for the prompt, a row for every running
    sequence and an entry for every token of the vocabulary."""
    return max_batch_size * vocab_size * (DTYPE_BYTES["int32"] + DTYPE_BYTES["bool"])


#: Bytes of the Python objects that keep a cached block findable: a node of the prefix tree with the digests and
#: tokens of its text, its rank, and its place in the queue of what is evicted next. With 16 tokens a block, and what
#: each further token takes; measured with tracemalloc on 6,000 to 20,000 blocks of a full cache in use: 652 to 727, as
#: the interpreter's tables have just doubled or are about to. One that was just filled takes some 500: its queue has
#: no entries yet that no longer count.
_CACHED_BLOCK_BYTES, _CACHED_TOKEN_BYTES = 720, 4


def metadata_bytes_per_block(*, block_tokens: int = 16, prefix_caching: bool = False) -> int:
    """Bytes of bookkeeping for one block: its holders, level, slot, node and group, who owns its slot, and its places
    in the stacks of free ids and slots. With ``prefix_caching`` also the objects of the cache, if it is full."""
    arrays = 6 * DTYPE_BYTES["int32"] + 2 * DTYPE_BYTES["int8"]
    return arrays + (_CACHED_BLOCK_BYTES + _CACHED_TOKEN_BYTES * (block_tokens - 16)) * prefix_caching
