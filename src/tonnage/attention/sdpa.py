"""Attention by torch's scaled_dot_product_attention over gathered pages.

SDPA has no page table: pages are copied into a contiguous tile first. All decode rows of similar length share one
tile and one call; a prefill that starts at position 0 needs no tile, since its keys are the ones just computed; a
chunk after a prefix gathers its own row. ``enable_gqa`` attends with grouped heads, nothing is repeated.

Tiles and masks come from the step's scratch, whose bound is ``declarations/sdpa.py``. What else a layer makes (the
output, the page indices) is proportional to the step's own tokens and pages, and part of the measured transient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tonnage.attention.base import Row, Rows, refuse
from tonnage.declarations.sdpa import MASK_TILE_ELEMENTS, TILE_TOKENS
from tonnage.units import ceil_div, round_up

if TYPE_CHECKING:
    from tonnage.workspace import StepScratch


@dataclass(slots=True)
class _Tile:
    """Rows attended together: ``index`` lists their pages, row after row, padded to ``num_blocks`` each."""

    rows: int
    num_blocks: int
    index: torch.Tensor  # int64 [rows * num_blocks], position of the page among the pool's pages of layer 0
    mask: torch.Tensor | None  # additive [rows, 1, 1, num_blocks * B]; None for a prefill chunk
    queries: torch.Tensor | slice  # where the rows stand in the flattened batch
    start: int = 0  # prefill chunk only: tokens already cached
    count: int = 1


@dataclass(slots=True)
class SdpaStep:
    """What one step needs, the same for every layer."""

    token_index: torch.Tensor  # int64 [T], slot of each new token among the pool's token slots of layer 0
    fresh: list[tuple[int, int]]  # prefills from position 0, as [offset, end) of the flattened batch
    decode: list[_Tile]
    chunks: list[_Tile]
    gathered: torch.Tensor  # [2, tile tokens * Hkv * D], K and V of the tile at hand
    mask_tile: torch.Tensor  # additive, flat


class SdpaBackend:
    """``pool`` is [num_slabs, layers, 2, B, Hkv, D], contiguous; it may grow behind the same address."""

    name = "sdpa"

    def __init__(self, pool: torch.Tensor) -> None:
        assert pool.dim() == 6
        assert pool.is_contiguous()
        self._pool = pool
        self._slabs, self._layers, _, self.block_tokens, self._kv_heads, self._head_dim = pool.shape
        self._pages_per_slab = 2 * self._layers
        pages = pool.view(-1, self.block_tokens * self._kv_heads * self._head_dim)
        slots = pool.view(-1, self._kv_heads * self._head_dim)
        # One page table serves all layers: layer l's K pages are the same array read from page 2*l on, V from 2*l + 1.
        starts = range(self._pages_per_slab)
        self._pages = [pages[page:] for page in starts]
        self._slots = [slots[page * self.block_tokens :] for page in starts]

    # -- once a step ---------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows | Sequence[Row], scratch: StepScratch) -> SdpaStep:
        rows = list(rows)
        decode = [row for row in rows if row.count == 1 and row.start > 0]
        prefill = [row for row in rows if row.count > 1 or row.start == 0]
        chunks = [self._chunk_tile(row) for row in prefill if row.start > 0]
        members = self._members(decode)
        groups = [self._decode_tile(rows_of_tile) for rows_of_tile in members]
        tile_tokens = max((tile.rows * tile.num_blocks * self.block_tokens for tile in [*groups, *chunks]), default=0)
        width = self._kv_heads * self._head_dim
        step = SdpaStep(
            token_index=self._token_index(rows),
            fresh=[(row.offset, row.offset + row.count) for row in prefill if row.start == 0],
            decode=groups,
            chunks=chunks,
            gathered=scratch.tensor((2, tile_tokens * width), self._pool.dtype),
            mask_tile=scratch.tensor((self._mask_tile_elements(chunks),), self._pool.dtype),
        )
        self._make_decode_masks(groups, members, scratch)
        self._clear_tails(rows)
        return step

    def _there(self, array: np.ndarray) -> torch.Tensor:
        """On the device of the pool."""
        return torch.from_numpy(array).to(self._pool.device)

    def _token_index(self, rows: Iterable[Row]) -> torch.Tensor:
        parts = [self._slots_of(row) for row in rows]
        return self._there(np.concatenate(parts))

    def _slots_of(self, row: Row) -> np.ndarray:
        position = np.arange(row.start, row.end, dtype=np.int64)
        block = row.blocks[position // self.block_tokens].astype(np.int64)
        return block * (self._pages_per_slab * self.block_tokens) + position % self.block_tokens

    def _page_index(self, row: Row, num_blocks: int) -> np.ndarray:
        """Pages of a row, padded by repeating its own first page: a masked page must still hold finite numbers."""
        used = ceil_div(row.end, self.block_tokens)
        index = np.full(num_blocks, row.blocks[0], dtype=np.int64)
        index[:used] = row.blocks[:used]
        return index * self._pages_per_slab

    def _chunk_tile(self, row: Row) -> _Tile:
        num_blocks = ceil_div(row.end, self.block_tokens)
        return _Tile(
            rows=1,
            num_blocks=num_blocks,
            index=self._there(self._page_index(row, num_blocks)),
            mask=None,
            queries=slice(row.offset, row.offset + row.count),
            start=row.start,
            count=row.count,
        )

    def _members(self, decode: Sequence[Row]) -> list[list[Row]]:
        """Decode rows, longest first, cut so that a padded group stays within one tile."""
        groups: list[list[Row]] = []
        limit = 0
        for row in sorted(decode, key=lambda row: row.end, reverse=True):
            if not groups or len(groups[-1]) >= limit:
                groups.append([])
                padded = round_up(row.end, self.block_tokens)
                limit = max(1, round_up(TILE_TOKENS, self.block_tokens) // padded)
            groups[-1].append(row)
        return groups

    def _decode_tile(self, members: Sequence[Row]) -> _Tile:
        num_blocks = ceil_div(members[0].end, self.block_tokens)
        index = np.concatenate([self._page_index(row, num_blocks) for row in members])
        offsets = np.array([row.offset for row in members])
        return _Tile(len(members), num_blocks, self._there(index), None, self._there(offsets))

    def _make_decode_masks(
        self, tiles: Sequence[_Tile], members: Sequence[Sequence[Row]], scratch: StepScratch
    ) -> None:
        """One piece of scratch for the masks of all decode tiles: they serve every layer of the step."""
        widths = [tile.num_blocks * self.block_tokens for tile in tiles]
        sizes = [tile.rows * width for tile, width in zip(tiles, widths, strict=True)]
        pieces = scratch.tensor((sum(sizes),), self._pool.dtype).split(sizes)
        for tile, width, rows, piece in zip(tiles, widths, members, pieces, strict=True):
            lengths = self._there(np.array([row.end for row in rows])).view(-1, 1, 1, 1)
            positions = torch.arange(width, device=lengths.device)
            tile.mask = _hide(piece.view(tile.rows, 1, 1, width), positions >= lengths)

    def _mask_tile_elements(self, chunks: Sequence[_Tile]) -> int:
        widths = [(tile.count, tile.num_blocks * self.block_tokens) for tile in chunks]
        return max((min(count * width, max(width, MASK_TILE_ELEMENTS)) for count, width in widths), default=0)

    def _clear_tails(self, rows: Iterable[Row]) -> None:
        """Zero the rest of a row's last block when the row enters it.

        A masked key gets weight 0, and 0 times a NaN left by an earlier owner would still be NaN.
        """
        for row in rows:
            entered = (row.end - 1) // self.block_tokens * self.block_tokens
            if row.start <= entered and row.end % self.block_tokens:
                self._pool[int(row.blocks[entered // self.block_tokens]), :, :, row.end % self.block_tokens :] = 0

    # -- once a layer --------------------------------------------------------------------------------------------

    def forward(
        self,
        step: SdpaStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse(self.name, window=window, softcap=softcap, sinks=sinks)
        tokens = query.shape[2]
        k_slots, v_slots = self._slots[2 * layer], self._slots[2 * layer + 1]
        k_slots.index_copy_(0, step.token_index, key[0].transpose(0, 1).reshape(tokens, -1))
        v_slots.index_copy_(0, step.token_index, value[0].transpose(0, 1).reshape(tokens, -1))
        out = query.new_empty(tokens, query.shape[1], value.shape[-1])
        for begin, end in step.fresh:
            part = scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, begin:end],
                value[:, :, begin:end],
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
            out[begin:end] = part[0].transpose(0, 1)
        for tile in step.decode:
            keys, values = self._gather(step, tile, layer)
            rows = query[0].transpose(0, 1)[tile.queries].unsqueeze(2)  # [rows, Hq, 1, D]
            part = scaled_dot_product_attention(rows, keys, values, attn_mask=tile.mask, scale=scaling, enable_gqa=True)
            out[tile.queries] = part.squeeze(2)
        for tile in step.chunks:
            self._attend_chunk(step, tile, layer, query, out, scaling=scaling)
        return out.unsqueeze(0)

    def _gather(self, step: SdpaStep, tile: _Tile, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tile's pages as [rows, Hkv, padded, D]."""
        num_pages = tile.rows * tile.num_blocks
        size = num_pages * self.block_tokens * self._kv_heads * self._head_dim
        both = []
        for side in (0, 1):
            flat = step.gathered[side, :size].view(num_pages, -1)
            torch.index_select(self._pages[2 * layer + side], 0, tile.index, out=flat)
            padded = tile.num_blocks * self.block_tokens
            both.append(flat.view(tile.rows, padded, self._kv_heads, self._head_dim).transpose(1, 2))
        return both[0], both[1]

    def _attend_chunk(
        self, step: SdpaStep, tile: _Tile, layer: int, query: torch.Tensor, out: torch.Tensor, *, scaling: float
    ) -> None:
        """A prefill chunk after a cached prefix, its queries cut so that the mask stays within its tile."""
        assert isinstance(tile.queries, slice)
        keys, values = self._gather(step, tile, layer)
        padded = tile.num_blocks * self.block_tokens
        at_once = max(1, step.mask_tile.numel() // padded)
        positions = torch.arange(padded, device=query.device)
        for first in range(0, tile.count, at_once):
            last = min(first + at_once, tile.count)
            mask = step.mask_tile[: (last - first) * padded].view(last - first, padded)
            queries = torch.arange(tile.start + first, tile.start + last, device=query.device)
            _hide(mask, positions > queries.unsqueeze(1))
            begin, end = tile.queries.start + first, tile.queries.start + last
            part = scaled_dot_product_attention(
                query[:, :, begin:end], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            out[begin:end] = part[0].transpose(0, 1)


def _hide(mask: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Make ``mask`` an additive one: minus infinity where ``hidden``, 0 elsewhere."""
    return mask.zero_().masked_fill_(hidden, -torch.inf)
