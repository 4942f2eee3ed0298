"""What captured decodes of the Triton kernels read, on the device at fixed addresses."""

from __future__ import annotations

import torch

from tonnage.attention.base import Rows
from tonnage.buffers.torch_copies import ALIGNMENT
from tonnage.step import Ints
from tonnage.units import ceil_div, round_up


class StaticInputs:
    """Device tensors at fixed addresses that a captured decode reads, written in place before each replay.

    slots    int64 [max_rows], where the row's new token goes; -1: nowhere (padding)
    lengths  int32 [max_rows], tokens that the row attends to, the new one included; 0: padding
    table    int32 [max_rows, max_blocks], its pages
    tokens   int32 [max_rows], where its query stands in the batch: row i's at i, always

    The first three lie one behind the other, so that one copy writes them. It goes to the end of the last row in use;
    what a row has behind its length is never read, and holds what an earlier step left there.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.max_rows, self.max_blocks = max_rows, max_blocks
        self._table_at = round_up(max_rows * 8, ALIGNMENT) + round_up(max_rows * 4, ALIGNMENT)
        num_bytes = self._table_at + max_rows * max_blocks * 4
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._is_pinned = device.type == "cuda"
        self.slots, self.lengths, self.table = self._views(self._on_device, max_rows)
        self.slots.fill_(-1)  # all rows are padding until the first step: a capture before it must write nothing
        self.tokens = torch.arange(max_rows, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """On the device, for all of them."""
        return self._on_device.numel() + self.tokens.numel() * 4

    def load(self, rows: Rows, slots: Ints, *, block_tokens: int) -> None:
        """Write a step of decodes; all rows behind them become padding. Does not wait for the device.

        ``slots`` [rows] is ``rows.token_slots``. Every row has one token.
        """
        num = len(rows)
        assert num == slots.size <= self.max_rows
        used = int(rows.ends.max(initial=0))
        width = ceil_div(used, block_tokens)
        size = self._table_at + num * self.max_blocks * 4
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        to_slots, to_lengths, to_table = (view.numpy() for view in self._views(staged, num))
        to_slots[:num], to_slots[num:] = slots, -1
        to_lengths[:num], to_lengths[num:] = rows.ends, 0
        to_table[:, :width] = rows.table[rows.slots, :width]
        self._on_device[:size].copy_(staged, non_blocking=True)

    def _views(self, memory: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``slots``, ``lengths`` and the first rows of ``table`` in such a memory."""
        lengths_at, table_bytes = round_up(self.max_rows * 8, ALIGNMENT), num_rows * self.max_blocks * 4
        slots = memory[: self.max_rows * 8].view(torch.int64)
        lengths = memory[lengths_at : lengths_at + self.max_rows * 4].view(torch.int32)
        table = memory[self._table_at : self._table_at + table_bytes].view(torch.int32)
        return slots, lengths, table.view(num_rows, self.max_blocks)
