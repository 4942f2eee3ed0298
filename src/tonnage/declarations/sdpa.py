"""What the torch SDPA backend takes as scratch: gathered pages of one tile, and the masks that go with them.

SDPA has no page table, so each layer copies the pages it attends to into a contiguous tile first. The backend cuts
its rows into tiles, so its scratch is bounded by the longest single row or ``TILE_TOKENS``, whichever is more,
and does not grow with the number of sequences, but for the decode masks, which are small beside it.

Masks are additive, in the dtype of the queries: from a boolean one SDPA would make that by itself, out of sight. SDPA
knows neither a soft-cap nor sinks; where layers have one of them, scores of a piece of one row's queries are written
out, for every query head as many as the largest mask has elements. A window makes nothing larger.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.terms import Chip, Scratch, StepShape
from tonnage.units import round_up

#: Tokens gathered at once when rows are short: large enough that 16 decode rows of 512 tokens share one SDPA call.
TILE_TOKENS = 8192
#: Elements of one prefill mask when rows are short.
MASK_TILE_ELEMENTS = 2**18


@dataclass(frozen=True, kw_only=True)
class SdpaScratch(Scratch):
    """Bytes = gathered K and V of a tile + its masks + scores; heads are this rank's, ``v_head_dim`` None: as
    ``head_dim``. ``scored_heads``: query heads whose scores are written out; 0: none are."""

    backend: str = "sdpa"
    name: str = "gathered pages and masks"
    share: str = "attention"
    keeps_state: bool = False
    alignment: int = 64
    source: str = "own backend: attention/sdpa.py takes these pieces, each aligned"
    kv_heads: int
    head_dim: int
    element_bytes: int
    block_tokens: int
    v_head_dim: int | None = None
    scored_heads: int = 0

    @property
    def bytes_per_token(self) -> int:
        """K and V of one gathered token of one layer."""
        width = self.head_dim + (self.head_dim if self.v_head_dim is None else self.v_head_dim)
        return self.kv_heads * width * self.element_bytes

    def tile_tokens(self, shape: StepShape) -> int:
        """Tokens of the largest tile: all rows padded to the longest, but no more than one row or TILE_TOKENS."""
        row = round_up(shape.max_row_tokens, self.block_tokens)
        rows = shape.prefill_rows + shape.decode_rows
        return min(rows * row, max(row, round_up(TILE_TOKENS, self.block_tokens)))

    def decode_mask_elements(self, shape: StepShape) -> int:
        """Elements of all decode masks together: they serve every layer, so they live for the whole step."""
        return shape.decode_rows * round_up(shape.max_row_tokens, self.block_tokens)

    def prefill_mask_elements(self, shape: StepShape) -> int:
        """Elements of the largest prefill mask, cut along the queries to one row or MASK_TILE_ELEMENTS."""
        row = round_up(shape.max_row_tokens, self.block_tokens)
        return min(shape.prefill_tokens * row, max(row, MASK_TILE_ELEMENTS))

    def score_elements(self, shape: StepShape) -> int:
        """Scores of one piece of queries: as many for each head as one mask has, or as a decode has keys."""
        row = round_up(shape.max_row_tokens, self.block_tokens) if shape.decode_rows else 0
        return self.scored_heads * max(row, self.prefill_mask_elements(shape))

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:  # noqa: ARG002 - the same on every chip
        pieces = (
            self.tile_tokens(shape) * self.bytes_per_token,
            self.prefill_mask_elements(shape) * self.element_bytes,
            self.decode_mask_elements(shape) * self.element_bytes,
            self.score_elements(shape) * self.element_bytes,
        )
        return sum(round_up(piece, self.alignment) for piece in pieces)
