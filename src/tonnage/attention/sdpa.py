"""Attention by torch's scaled_dot_product_attention over gathered pages.

SDPA has no page table: pages are copied into a contiguous tile first. All decode rows of similar length share one
tile and one call; a prefill that starts at position 0 needs no tile, since its keys are the ones just computed; a
chunk after a prefix gathers its own row. ``enable_gqa`` attends with grouped heads, nothing is repeated. Layers with a
window gather what it shows. A soft-cap and sinks are done score by score, one row after the other (``sdpa_scores``).

Tiles, masks and scores come from the step's scratch, whose bound is ``declarations/sdpa.py``. What else a layer makes
(the output, the page indices) is proportional to the step's own tokens and pages, and part of the measured transient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from tonnage.attention.base import Row, Rows
from tonnage.attention.pages import Pages
from tonnage.attention.sdpa_scores import Span, Wanted, attend, hide
from tonnage.attention.sdpa_tiles import Tile, Tiles, cut, decode_mask_elements, gathered_tokens, span_elements

if TYPE_CHECKING:
    from tonnage.workspace import StepScratch


@dataclass(slots=True, kw_only=True)
class SdpaStep:
    """What one step needs. Tiles are cut when the first layer of their kind asks, and serve all the others.

    rows         by group of layers; they differ in their blocks alone
    fresh        prefills from position 0, as [begin, end) of the flattened batch
    longest      tokens of the longest row, those before the step included
    slots        by group, int64 [T]: where each new token goes, in tokens of one layer
    gathered     [2, tile tokens * Hkv * D], K and V of the tile at hand
    mask_tile    additive, flat: that of the piece of a prefill at hand
    masks        the same of all decode tiles, for layers that see as much as ``masked_for`` says; -1: not made yet
    scores       flat, taken by the first layer that has a soft-cap or sinks
    tiles        by group and window
    """

    rows: Sequence[Sequence[Row]]
    fresh: Sequence[tuple[int, int]]
    longest: int
    slots: Sequence[torch.Tensor]
    scratch: StepScratch
    gathered: torch.Tensor
    mask_tile: torch.Tensor
    masks: torch.Tensor
    masked_for: int | None = -1
    scores: torch.Tensor | None = None
    tiles: dict[tuple[int, int | None], Tiles] = field(default_factory=dict)

    def take_scores(self, num_heads: int) -> torch.Tensor:
        if self.scores is None:
            shape = (num_heads * span_elements(self.rows[0])[1],)
            self.scores = self.scratch.tensor(shape, self.gathered.dtype)
        return self.scores


class SdpaBackend:
    """``pool`` may grow behind the same address; see ``Pages``."""

    name = "sdpa"

    def __init__(self, pool: torch.Tensor | Pages) -> None:
        self._pages = pages = Pages.of(pool)
        self._pool, self.block_tokens = pages.slabs, pages.block_tokens
        every_page, every_slot = (pages.slabs.view(-1, size) for size in (pages.page_elements, pages.token_elements))
        # One page table serves all layers of a group: the K pages of layer l are the same array read from page 2*l on,
        # V from 2*l + 1.
        starts = range(2 * max(shape[0] for shape in pages.shapes))
        self._from_page = [every_page[page:] for page in starts]
        self._from_slot = [every_slot[page * self.block_tokens :] for page in starts]

    # -- once a step ---------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows | Sequence[Row], scratch: StepScratch) -> SdpaStep:
        given = rows if isinstance(rows, Rows) else Rows.of(rows)
        groups = [given.of_group(group) for group in range(self._pages.num_groups)]
        listed = [list(group) for group in groups]
        dtype, any_group = self._pool.dtype, listed[0]
        tile_elements = gathered_tokens(any_group, self.block_tokens) * self._pages.token_elements
        step = SdpaStep(
            rows=listed,
            fresh=[(row.offset, row.offset + row.count) for row in any_group if row.start == 0],
            longest=max((row.end for row in any_group), default=0),
            slots=[self._slots(group) for group in groups],
            scratch=scratch,
            gathered=scratch.tensor((2, tile_elements), dtype),
            mask_tile=scratch.tensor((span_elements(any_group)[0],), dtype),
            masks=scratch.tensor((decode_mask_elements(any_group, self.block_tokens),), dtype),
        )
        for view, group_rows in zip(self._pages.views, listed, strict=True):
            self._clear_tails(view, group_rows)
        return step

    def _slots(self, rows: Rows) -> torch.Tensor:
        slots = rows.token_slots(block_tokens=self.block_tokens, slab_tokens=self._pages.slab_tokens)
        return torch.from_numpy(slots).to(self._pool.device)

    def _clear_tails(self, view: torch.Tensor, rows: Sequence[Row]) -> None:
        """Zero the rest of a row's last block when the row enters it.

        A masked key gets weight 0, and 0 times a NaN left by an earlier owner would still be NaN.
        """
        for row in rows:
            entered = (row.end - 1) // self.block_tokens * self.block_tokens
            if row.start <= entered and row.end % self.block_tokens:
                view[int(row.blocks[entered // self.block_tokens]), :, :, row.end % self.block_tokens :] = 0

    # -- once for each kind of layer -----------------------------------------------------------------------------

    def _tiles(self, step: SdpaStep, group: int, window: int | None) -> Tiles:
        found = step.tiles.get((group, window))
        if found is None:
            found = cut(
                step.rows[group],
                window,
                block_tokens=self.block_tokens,
                slab_pages=self._pages.slab_pages,
                device=self._pool.device,
            )
            step.tiles[group, window] = found
        return found

    def _decode_masks(self, step: SdpaStep, tiles: Sequence[Tile], window: int | None) -> Sequence[torch.Tensor]:
        """[rows, 1, 1, padded] of each tile: they serve all layers that see as much, one kind after the other."""
        widths = [tile.num_blocks * self.block_tokens for tile in tiles]
        sizes = [len(tile.members) * width for tile, width in zip(tiles, widths, strict=True)]
        pieces = step.masks[: sum(sizes)].split(sizes)
        masks = [piece.view(-1, 1, 1, width) for piece, width in zip(pieces, widths, strict=True)]
        if step.masked_for != window:
            step.masked_for = window
            for tile, mask in zip(tiles, masks, strict=True):
                self._make_mask(tile, mask, window)
        return masks

    def _make_mask(self, tile: Tile, mask: torch.Tensor, window: int | None) -> None:
        firsts, ends = (
            torch.tensor(column, device=mask.device).view(-1, 1, 1, 1)
            for column in (tile.firsts, [row.end for row in tile.members])
        )
        positions = firsts + torch.arange(mask.shape[-1], device=mask.device)
        hidden = positions >= ends
        hide(mask, hidden if window is None else hidden | (positions < ends - window))

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
        tokens, (group, place) = query.shape[2], self._pages.places[layer]
        if window is not None and window >= step.longest:
            window = None  # nobody has come so far
        wanted = Wanted(scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        for side, new in enumerate((key, value)):
            slots = self._from_slot[2 * place + side]
            slots.index_copy_(0, step.slots[group], new[0].transpose(0, 1).reshape(tokens, -1))
        out = query.new_empty(tokens, query.shape[1], value.shape[-1])
        for begin, end in step.fresh:
            here = slice(begin, end)
            span = Span(query=query[:, :, here], keys=key[:, :, here], values=value[:, :, here], start=0)
            self._attend_fresh(step, span, wanted, out[here])
        tiles = self._tiles(step, group, window)
        if wanted.is_plain:
            self._attend_decodes(step, tiles.decode, place, query, out, wanted)
        # Score by score each row is looked at by itself, and one that decodes is a prefill of one token.
        for tile in tiles.chunks if wanted.is_plain else (*tiles.decode, *tiles.chunks):
            self._attend_rows(step, tile, place, query, out, wanted)
        return out.unsqueeze(0)

    def _attend_fresh(self, step: SdpaStep, span: Span, wanted: Wanted, out: torch.Tensor) -> None:
        """A prompt from position 0, whose keys are the ones just computed."""
        if wanted.is_plain and (wanted.window is None or wanted.window >= span.count):
            part = scaled_dot_product_attention(
                span.query, span.keys, span.values, is_causal=True, scale=wanted.scaling, enable_gqa=True
            )
            out[:] = part[0].transpose(0, 1)
        else:
            self._attend(step, span, wanted, out)

    def _attend_decodes(
        self,
        step: SdpaStep,
        tiles: Sequence[Tile],
        place: int,
        query: torch.Tensor,
        out: torch.Tensor,
        wanted: Wanted,
    ) -> None:
        for tile, mask in zip(tiles, self._decode_masks(step, tiles, wanted.window), strict=True):
            keys, values = self._gather(step, tile, place)
            rows = query[0].transpose(0, 1)[tile.queries].unsqueeze(2)  # [rows, Hq, 1, D]
            part = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, scale=wanted.scaling, enable_gqa=True
            )
            out[tile.queries] = part.squeeze(2)

    def _attend_rows(
        self, step: SdpaStep, tile: Tile, place: int, query: torch.Tensor, out: torch.Tensor, wanted: Wanted
    ) -> None:
        """The rows of a tile one after the other."""
        keys, values = self._gather(step, tile, place)
        for at, (row, first) in enumerate(zip(tile.members, tile.firsts, strict=True)):
            here, seen = slice(row.offset, row.offset + row.count), slice(0, row.end - first)
            span = Span(
                query=query[:, :, here],
                keys=keys[at : at + 1, :, seen],
                values=values[at : at + 1, :, seen],
                start=row.start,
                base=first,
            )
            self._attend(step, span, wanted, out[here])

    def _attend(self, step: SdpaStep, span: Span, wanted: Wanted, out: torch.Tensor) -> None:
        scores = None if wanted.is_plain else step.take_scores(span.query.shape[1])
        attend(span, wanted, step.mask_tile, scores, out)

    def _gather(self, step: SdpaStep, tile: Tile, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tile's pages as [rows, Hkv, padded, D]."""
        num_pages, padded = len(tile.members) * tile.num_blocks, tile.num_blocks * self.block_tokens
        both = []
        for side in (0, 1):
            flat = step.gathered[side, : num_pages * self._pages.page_elements].view(num_pages, -1)
            torch.index_select(self._from_page[2 * place + side], 0, tile.index, out=flat)
            shape = (len(tile.members), padded, self._pages.kv_heads, self._pages.head_dim)
            both.append(flat.view(shape).transpose(1, 2))
        return both[0], both[1]
