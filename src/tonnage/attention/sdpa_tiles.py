"""How the SDPA backend cuts a step into tiles: which pages are gathered together, and where in a text a tile begins.

Layers with a window get tiles of their own: pages that have left it belong to others by now and are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tonnage.attention.base import Row
from tonnage.declarations.sdpa import MASK_TILE_ELEMENTS, TILE_TOKENS
from tonnage.units import ceil_div, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows whose pages are gathered together, each padded to ``num_blocks``.

    members  the rows; firsts: the position at which the tile of each begins, the start of a block
    index    int64 [rows * num_blocks], row after row: slabs, counted in pages
    queries  int64 [rows], where in the batch the tokens of each begin
    """

    members: Sequence[Row]
    firsts: Sequence[int]
    num_blocks: int
    index: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Of one group of layers: of rows with one token, longest first, and of each prefill after a cached prefix."""

    decode: Sequence[Tile]
    chunks: Sequence[Tile]


def first_seen(start: int, window: int | None, block_tokens: int) -> int:
    """The start of the block with the first position that a token at ``start`` sees."""
    return 0 if window is None else max(0, start - window + 1) // block_tokens * block_tokens


def cut(rows: Sequence[Row], window: int | None, *, block_tokens: int, slab_pages: int, device: torch.device) -> Tiles:
    """Tiles of the rows as layers with this window see them; None: they see everything."""

    def tile(members: Sequence[Row]) -> Tile:
        firsts = [first_seen(row.start, window, block_tokens) for row in members]
        num_blocks = max(_num_blocks(row, first, block_tokens) for row, first in zip(members, firsts, strict=True))
        pages = [
            _pages(row, first // block_tokens, num_blocks, block_tokens)
            for row, first in zip(members, firsts, strict=True)
        ]
        index = torch.from_numpy(np.concatenate(pages) * slab_pages).to(device)
        queries = torch.tensor([row.offset for row in members], device=device)
        return Tile(members=members, firsts=firsts, num_blocks=num_blocks, index=index, queries=queries)

    decode = [row for row in rows if row.count == 1 and row.start > 0]
    chunks = [row for row in rows if row.count > 1 and row.start > 0]
    return Tiles(
        decode=[tile(members) for members in _together(decode, window, block_tokens)],
        chunks=[tile([row]) for row in chunks],
    )


def _num_blocks(row: Row, first: int, block_tokens: int) -> int:
    return ceil_div(row.end - first, block_tokens)


def _pages(row: Row, first_block: int, num_blocks: int, block_tokens: int) -> np.ndarray:
    """Slabs of a row from a block on, padded by repeating the first: a masked page must still hold finite numbers."""
    last = ceil_div(row.end, block_tokens)
    index = np.full(num_blocks, row.blocks[first_block], dtype=np.int64)
    index[: last - first_block] = row.blocks[first_block:last]
    return index


def _together(rows: Sequence[Row], window: int | None, block_tokens: int) -> list[list[Row]]:
    """The rows, longest first, cut so that a padded tile stays within ``TILE_TOKENS``, or is one row."""

    def padded(row: Row) -> int:
        return round_up(row.end - first_seen(row.start, window, block_tokens), block_tokens)

    groups: list[list[Row]] = []
    limit = 0
    for row in sorted(rows, key=padded, reverse=True):
        if not groups or len(groups[-1]) >= limit:
            groups.append([])
            limit = max(1, round_up(TILE_TOKENS, block_tokens) // padded(row))
        groups[-1].append(row)
    return groups


def gathered_tokens(rows: Sequence[Row], block_tokens: int) -> int:
    """The most tokens that any of their tiles has, whatever the window."""
    lengths = [round_up(row.end, block_tokens) for row in rows if row.start > 0]
    longest = max(lengths, default=0)
    return min(len(lengths) * longest, max(longest, round_up(TILE_TOKENS, block_tokens)))


def decode_mask_elements(rows: Sequence[Row], block_tokens: int) -> int:
    """The most that the masks of all decode tiles have together, whatever the window: none of them is longer than the
    longest row."""
    lengths = [round_up(row.end, block_tokens) for row in rows if row.count == 1 and row.start > 0]
    return len(lengths) * max(lengths, default=0)


def span_elements(rows: Sequence[Row]) -> tuple[int, int]:
    """Queries times keys that are looked at in one go, at most: of prefills (one mask), and of any row (scores)."""
    prefill = [
        min(row.count * row.end, max(row.end, MASK_TILE_ELEMENTS)) for row in rows if row.count > 1 or row.start == 0
    ]
    return max(prefill, default=0), max([*prefill, *(row.end for row in rows)], default=0)
