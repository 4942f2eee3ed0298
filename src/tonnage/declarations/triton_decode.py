"""What our own split-KV decode kernel takes: partial outputs of small batches, none for large ones.

With S(b) = ceil(2 * SMs / (b * H_kv)) splits, at most 32, the partial results of any batch b stay below
(2 * SMs + b * H_kv) * G * (D + 1) * 4 bytes, as many times as a row has query tokens. From b * H_kv >= 2 * SMs on
there is one split and nothing to keep.
Prefill and mixed rows go through another kernel, which keeps no partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.declarations.shape import AttentionShape
from tonnage.declarations.splits import most_parts, num_sms, partial_bytes
from tonnage.terms import Chip, Scratch, StepShape
from tonnage.units import ceil_div

#: Blocks that the kernel wants in flight on each multiprocessor, and the most parts it cuts one sequence into.
BLOCKS_PER_SM, MOST_SPLITS = 2, 32


def num_splits(num_rows: int, num_kv_heads: int, *, num_sms: int) -> int:
    """S(b), into how many parts the kernel cuts each of ``num_rows`` decodes, whatever their lengths. At least 1."""
    return max(1, min(MOST_SPLITS, ceil_div(BLOCKS_PER_SM * num_sms, max(1, num_rows * num_kv_heads))))


@dataclass(frozen=True, kw_only=True)
class TritonPartials(Scratch):
    """Bytes = the most partial results of any batch up to ``decode_rows``, for every query head of a KV head."""

    backend: str = "triton"
    name: str = "partial outputs"
    share: str = "attention"
    captured: bool = True
    keeps_state: bool = False
    source: str = "own kernel: split rule of declarations/splits.py"
    shape: AttentionShape

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        slots = BLOCKS_PER_SM * num_sms(chip)
        parts = most_parts(shape.decode_rows, self.shape.num_kv_heads, num_slots=slots, most_splits=MOST_SPLITS)
        return partial_bytes(parts * self.shape.num_groups * self.shape.row_tokens, self.shape.v_head_dim)


def declare(shape: AttentionShape) -> tuple[Scratch, ...]:
    return (TritonPartials(shape=shape),)
