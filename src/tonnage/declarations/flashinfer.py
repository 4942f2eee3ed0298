"""What FlashInfer's ``fa2`` path (prefill, and decode on tensor cores) takes: a float and an int workspace.

Float workspace, only where the past of a row is cut into parts: ``H_q * P * tile * (D + 1) * 4`` bytes, P work items
of one tile of packed queries each (a packed query is one query of one head; ``q * G`` of them for q tokens).

tile    128 where rows have more than 64 packed queries and D < 256; else 64 above 16 packed queries; else 16.
        From D = 512 on: 32 above 32 packed queries, else 16
eager   it cuts only while there are fewer tiles than 2 * SMs / H_kv, so P stays within that number
graphs  it always cuts, and pads: P = max(2 * SMs / H_kv, ceil(T * G / tile) + B - 1) for T tokens of B rows, where
        the second is the planner's bound on the sum of ceil(q_i * G / tile) over any lengths q_i

Only decodes are captured here, each row with its last token and what is drafted after it. The int workspace holds the
plan itself, 8 MiB on the device, beside as many pinned in host memory. ``plan`` raises where either is too small.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.declarations.shape import AttentionShape
from tonnage.declarations.splits import FLOAT_BYTES, num_sms
from tonnage.terms import Chip, Scratch, StepShape
from tonnage.units import MiB, ceil_div

BLOCKS_PER_SM = 2
#: What the wrapper makes for its plan on the device; it pins as much in host memory.
INT_WORKSPACE_BYTES = 8 * MiB


def tile_rows(num_packed: int, head_dim: int) -> int:
    """Packed queries of one work item, where the rows of a step have ``num_packed`` on average."""
    if head_dim >= 512:
        return 32 if num_packed > 32 else 16
    if num_packed > 64 and head_dim < 256:
        return 128
    return 64 if num_packed > 16 else 16


def workspace_bytes(*, num_heads: int, head_dim: int, num_items: int, tile: int) -> int:
    """Float32 output and log-sum-exp of every packed query of every work item, for every query head."""
    return num_heads * num_items * tile * (head_dim + 1) * FLOAT_BYTES


@dataclass(frozen=True, kw_only=True)
class FlashInferFloats(Scratch):
    """The float workspace: the larger of what an eager step and, if captured, a graph of the decodes needs."""

    backend: str = "flashinfer"
    name: str = "float workspace"
    share: str = "attention"
    captured: bool = True
    source: str = "FlashInfer 0.6.14, scheduler.cuh: the prefill plan, eager and under CUDA graphs"
    shape: AttentionShape

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        items = BLOCKS_PER_SM * num_sms(chip) // self.shape.num_kv_heads
        eager = self._bytes(items, self._eager_tile(shape)) if shape.prefill_tokens or shape.decode_rows else 0
        if not (shape.captured and shape.decode_rows):
            return eager
        padded, tile = self.graph_items(shape.decode_rows)
        return max(eager, self._bytes(max(items, padded), tile))

    def graph_items(self, num_rows: int) -> tuple[int, int]:
        """Work items that the plan of a captured batch is padded to, before the floor of the chip, and their tile.

        The planner knows the number of tokens alone: one row might have all but one for each other row.
        """
        tokens = num_rows * self.shape.row_tokens
        tile = tile_rows((tokens - num_rows + 1) * self.shape.num_groups, self.shape.v_head_dim)
        return ceil_div(tokens * self.shape.num_groups, tile) + num_rows - 1, tile

    def _eager_tile(self, shape: StepShape) -> int:
        """The largest tile that any mix of rows within the shape leads to: one row with all of the prefill tokens."""
        longest = max(shape.prefill_tokens, self.shape.row_tokens) * self.shape.num_groups
        return tile_rows(longest, self.shape.v_head_dim)

    def _bytes(self, num_items: int, tile: int) -> int:
        return workspace_bytes(
            num_heads=self.shape.num_heads, head_dim=self.shape.v_head_dim, num_items=num_items, tile=tile
        )


@dataclass(frozen=True, kw_only=True)
class FlashInferPlan(Scratch):
    """The int workspace, whatever the step: a plan is kept from one step to the next."""

    backend: str = "flashinfer"
    name: str = "plan"
    share: str = "flashinfer plan"
    captured: bool = True
    source: str = "FlashInfer's wrappers: 8 MiB on the device and as much pinned"

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:  # noqa: ARG002 - the same for every step and chip
        return INT_WORKSPACE_BYTES


def declare(shape: AttentionShape) -> tuple[Scratch, ...]:
    return FlashInferFloats(shape=shape), FlashInferPlan()
