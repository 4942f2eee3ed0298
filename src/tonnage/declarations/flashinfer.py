"""What FlashInfer's kernels take of a step: plans, and a float workspace for the parts of decodes.

The formulas are those of the planners in ``scheduler.cuh`` of 0.6.14, "fa2" and "fa3". A packed query is one query of
one head: q tokens are ``q * G`` of them for G query heads a KV head. A work item is one tile of packed queries over one
part of the past.

tile    of fa2: 128 where rows have more than 64 packed queries and D < 256; else 64 above 16 packed queries; else 16;
        from D = 512 on 32 above 32 packed queries, else 16. Of fa3: 128 tokens of one head, 192 where D = 64
floats  ``H_q * P * tile * (D + 1) * 4`` bytes for P work items, only where the past of a row is cut into parts. An
        eager plan cuts only while there are fewer items than M = 2 * SMs / H_kv. A captured one always does, and is
        padded: P = max(M, ceil(T * G / tile) + B - 1) for T tokens of B rows, where the second is a bound on the sum
        of ceil(q_i * G / tile) over any lengths q_i
plan    of fa2, int32: three numbers an item, one for each row and for each token, and a flag for each item;
        of fa3: seven for each item of each head, and one for each multiprocessor

Decodes alone are cut, and alone captured: each row with its last token and what is drafted after it. Prompts are not,
so they need a plan and nothing else. A step plans once for each window that its layers have, since a window changes
how the past is cut; a plan is made anew for every step, so nothing of it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.declarations.shape import AttentionShape
from tonnage.declarations.splits import FLOAT_BYTES, num_sms
from tonnage.terms import Chip, Scratch, StepShape
from tonnage.units import ceil_div, round_up

BLOCKS_PER_SM = 2
INT_BYTES = 4
#: Packed queries of a row that has the largest tile.
LONG_ROW = 1024
#: The planner begins each array at such an address.
PLAN_ALIGNMENT = 16
#: Of the chips whose prompts run through "fa3".
FA3_SM = 90
#: Above so many items a head "fa3" makes one schedule for all heads.
MOST_FA3_ITEMS = 4096


def tile_rows(num_packed: int, head_dim: int) -> int:
    """Packed queries of one "fa2" work item, where the rows of a step have ``num_packed`` on average."""
    if head_dim >= 512:
        return 32 if num_packed > 32 else 16
    if num_packed > 64 and head_dim < 256:
        return 128
    return 64 if num_packed > 16 else 16


def workspace_bytes(*, num_heads: int, head_dim: int, num_items: int, tile: int) -> int:
    """Float32 output and log-sum-exp of every packed query of every work item, for every query head."""
    return num_heads * num_items * tile * (head_dim + 1) * FLOAT_BYTES


def fa2_plan_bytes(*, num_items: int, num_rows: int, num_tokens: int) -> int:
    """Row, query tile and part of each item and whether it is one; first output of each row, and how long parts are;
    how many tokens there are, and the first part of each."""
    ints = (num_items, num_items, num_items, num_rows + 2, 1, num_tokens + 1)
    arrays = sum(round_up(INT_BYTES * number, PLAN_ALIGNMENT) for number in ints)
    return arrays + round_up(num_items, PLAN_ALIGNMENT)


def fa3_plan_bytes(*, num_items: int, num_sms: int) -> int:
    """Query tile, first query, first page, numbers of queries and keys, head and row of each item; the first item of
    each multiprocessor."""
    arrays = 7 * round_up(INT_BYTES * num_items, PLAN_ALIGNMENT)
    return arrays + round_up(INT_BYTES * (num_sms + 1), PLAN_ALIGNMENT)


@dataclass(frozen=True, kw_only=True)
class FlashInferScratch(Scratch):
    """A plan for the decodes and one for the prompts, for each window of the layers, and floats for the decodes: of the
    size that graphs ask for where they are ``captured``, as they are but for a pair of backends."""

    backend: str = "flashinfer"
    name: str = "plans and floats"
    share: str = "attention"
    captured: bool = True
    keeps_state: bool = False
    source: str = "FlashInfer 0.6.14, scheduler.cuh: the plans of fa2, eager and under CUDA graphs, and of fa3"
    shape: AttentionShape

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        plans, floats = 0, 0
        captured = shape.captured and self.captured
        if shape.decode_rows:
            plans += self._piece(self.decode_plan_bytes(shape.decode_rows, chip, captured=captured))
            floats = self._piece(self.float_bytes(shape.decode_rows, chip, captured=captured))
        if shape.prefill_tokens:
            # Rows of one token that stand behind the first prompt are planned with it.
            num_rows = max(1, shape.prefill_rows) + shape.decode_rows
            plans += self._piece(self.prefill_plan_bytes(num_rows, shape.prefill_tokens + shape.decode_rows, chip))
        return self.shape.num_windows * plans + floats

    def decode_plan_bytes(self, num_rows: int, chip: Chip, *, captured: bool) -> int:
        """Of the plan for so many decodes, with one window."""
        tokens = num_rows * self.shape.row_tokens
        items = max(self.most_split_items(chip), ceil_div(tokens * self.shape.num_groups, 16) + num_rows - 1)
        if captured:
            items = max(items, self.graph_items(num_rows)[0])
        return fa2_plan_bytes(num_items=items, num_rows=num_rows, num_tokens=tokens)

    def float_bytes(self, num_rows: int, chip: Chip, *, captured: bool) -> int:
        """For the parts of so many decodes; the layers use it in turn."""
        items = self.most_split_items(chip)
        eager = self._float_bytes(items, tile_rows(self.shape.row_tokens * self.shape.num_groups, self._head_dim))
        if not captured:
            return eager
        padded, tile = self.graph_items(num_rows)
        return max(eager, self._float_bytes(max(items, padded), tile))

    def prefill_plan_bytes(self, num_rows: int, num_tokens: int, chip: Chip) -> int:
        """Of the plan for so many tokens of prompts of so many rows, with one window, whichever kernel runs them.

        A row of q tokens is ceil(q * G / tile) items of "fa2": with the smaller tiles that short rows have, at most
        three for each row, else one more than its share of the largest tile.
        """
        shared = num_tokens * self.shape.num_groups // tile_rows(LONG_ROW, self._head_dim)
        items = num_rows + max(2 * num_rows, shared)
        of_fa2 = fa2_plan_bytes(num_items=items, num_rows=num_rows, num_tokens=num_tokens)
        if chip.sm != FA3_SM:
            return of_fa2
        each = ceil_div(num_tokens, 192 if self._head_dim == 64 else 128) + num_rows - 1
        items = max(each, min(each, MOST_FA3_ITEMS) * self.shape.num_heads)
        return max(of_fa2, fa3_plan_bytes(num_items=items, num_sms=num_sms(chip)))

    def most_split_items(self, chip: Chip) -> int:
        """M, as many items as an eager plan fills the chip with."""
        return BLOCKS_PER_SM * num_sms(chip) // self.shape.num_kv_heads

    def graph_items(self, num_rows: int) -> tuple[int, int]:
        """Work items that the plan of a captured batch is padded to, before the floor of the chip, and their tile.

        The planner knows the number of tokens alone: one row might have all but one for each other row.
        """
        tokens = num_rows * self.shape.row_tokens
        tile = tile_rows((tokens - num_rows + 1) * self.shape.num_groups, self._head_dim)
        return ceil_div(tokens * self.shape.num_groups, tile) + num_rows - 1, tile

    @property
    def _head_dim(self) -> int:
        return self.shape.v_head_dim

    def _float_bytes(self, num_items: int, tile: int) -> int:
        return workspace_bytes(num_heads=self.shape.num_heads, head_dim=self._head_dim, num_items=num_items, tile=tile)

    def _piece(self, num_bytes: int) -> int:
        """As the arena hands it out, with the next piece behind it."""
        return round_up(num_bytes, self.alignment)


def declare(shape: AttentionShape) -> tuple[Scratch, ...]:
    return (FlashInferScratch(shape=shape),)
