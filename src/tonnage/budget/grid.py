"""What a plan gives at many shapes: tokens and sequences against the length of one and the number of all.

Values alone; ``planner.grid`` fills them with whole plans.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """The plan at one shape. Where it was refused ``refused`` says why in a few words and every number is 0.

    kv_tokens            tokens that the pool holds
    num_sequences        sequences of ``max_seq_len`` tokens that it holds at once; may be more than may run
    kv_bytes, low, high  bytes of the pool, and with every other line at its most and at its least
    """

    max_seq_len: int
    max_batch_size: int
    kv_tokens: int = 0
    num_sequences: int = 0
    kv_bytes: int = 0
    low: int = 0
    high: int = 0
    refused: str = ""

    @property
    def num_running(self) -> int:
        """Sequences of full length that run at once: no more than are held, nor than may run."""
        return min(self.num_sequences, self.max_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells by length, then by batch size, both ascending."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    cells: tuple[tuple[GridCell, ...], ...]

    def at(self, max_seq_len: int, max_batch_size: int) -> GridCell:
        """Raises ``ValueError`` for a shape that is not in it."""
        return self.cells[self.lengths.index(max_seq_len)][self.batches.index(max_batch_size)]
