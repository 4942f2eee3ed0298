"""What FlashAttention-3 takes inside its own call: partial outputs where it cuts the past into parts.

The op allocates ``S * T_q * H_q * (D + 1) * 4`` bytes where S > 1, with T_q the query tokens. Left to itself it picks
S from the longest context; we fix it: S(b) = ceil(SMs / (b * H_kv)), 1 to 16, for a batch of b decoding rows, and 1
for prefills. The memory comes from torch's allocator, so it is bounded here and audited, and not served by our arena.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.declarations.shape import AttentionShape
from tonnage.declarations.splits import most_parts, num_sms, partial_bytes
from tonnage.terms import Chip, Scratch, StepShape

#: The most parts our rule cuts one sequence into.
MOST_SPLITS = 16


@dataclass(frozen=True, kw_only=True)
class Fa3Partials(Scratch):
    """``num_splits``: parts of every row of every step, prefills too; None: our rule."""

    backend: str = "fa3"
    name: str = "partial outputs"
    share: str = "attention inside torch"
    served: bool = False
    captured: bool = True
    keeps_state: bool = False
    source: str = "FlashAttention-3's interface: fp32 partial outputs and log-sum-exps"
    shape: AttentionShape
    num_splits: int | None = None

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        if self.num_splits is None:
            parts = most_parts(shape.decode_rows, kv_heads, num_slots=num_sms(chip), most_splits=MOST_SPLITS)
            results = parts * self.shape.num_groups * self.shape.row_tokens
        else:
            tokens = max(shape.num_tokens, shape.prefill_tokens, shape.decode_rows * self.shape.row_tokens)
            results = self.num_splits * tokens * heads if self.num_splits > 1 else 0
        return partial_bytes(results, self.shape.v_head_dim)


def declare(shape: AttentionShape) -> tuple[Scratch, ...]:
    return (Fa3Partials(shape=shape),)
