"""What the torch SDPA backend takes as scratch: gathered pages of one tile, and the mask that goes with them.

SDPA has no page table, so each layer copies the pages it attends to into a contiguous tile first. The backend cuts
its rows into tiles, so its scratch is bounded by the longest single row or ``TILE_TOKENS``, whichever is more,
and does not grow with the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.terms import Chip, Scratch, StepShape
from tonnage.units import round_up

#: Tokens gathered at once when rows are short: large enough that 16 decode rows of 512 tokens share one SDPA call.
TILE_TOKENS = 8192
#: Bytes (= bool elements) of one attention mask when rows are short.
MASK_TILE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class SdpaScratch(Scratch):
    """Bytes = gathered K and V of a tile + its mask; ``kv_heads`` and ``head_dim`` are this rank's."""

    backend: str = "sdpa"
    name: str = "gathered pages and mask"
    share: str = "attention"
    keeps_state: bool = False
    alignment: int = 64
    source: str = "own backend: attention/sdpa.py takes exactly these two buffers"
    kv_heads: int
    head_dim: int
    element_bytes: int
    block_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one gathered token of one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    def tile_tokens(self, shape: StepShape) -> int:
        """Tokens of the largest tile: all rows padded to the longest, but no more than one row or TILE_TOKENS."""
        row = round_up(shape.max_row_tokens, self.block_tokens)
        rows = shape.prefill_rows + shape.decode_rows
        return min(rows * row, max(row, round_up(TILE_TOKENS, self.block_tokens)))

    def mask_bytes(self, shape: StepShape) -> int:
        """Bytes of all decode masks (they live for the whole step) and of the largest prefill mask (cut by queries)."""
        row = round_up(shape.max_row_tokens, self.block_tokens)
        prefill = min(shape.prefill_tokens * row, max(row, MASK_TILE_BYTES))
        return shape.decode_rows * row + prefill

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:  # noqa: ARG002 - the same on every chip
        gathered = round_up(self.tile_tokens(shape) * self.bytes_per_token, self.alignment)
        return gathered + round_up(self.mask_bytes(shape), self.alignment)
