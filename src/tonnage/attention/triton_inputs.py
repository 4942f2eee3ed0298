"""What captured decodes of the Triton kernels read, on the device at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tonnage.attention.base import Rows
from tonnage.buffers.torch_copies import ALIGNMENT
from tonnage.step import Ints
from tonnage.units import ceil_div, round_up


class StaticInputs:
    """Device tensors at fixed addresses that a captured decode reads, written in place before each replay.

    slots    by group of layers, int64 [max_rows], where the row's new token goes; -1: nowhere (padding)
    lengths  int32 [max_rows], tokens that the row attends to, the new one included; 0: padding
    tables   by group, int32 [max_rows, max_blocks], its pages; those of one row stand side by side
    tokens   int32 [max_rows], where its query stands in the batch: row i's at i, always

    The first three lie one behind the other, so that one copy writes them. It goes to the end of the last row in use;
    what a row has behind its length is never read, and holds what an earlier step left there.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, device: torch.device, num_groups: int = 1) -> None:
        self.max_rows, self.max_blocks = max_rows, max_blocks
        # Each part, and each row of a table, begins where a pointer is aligned.
        rows, columns = round_up(max_rows, ALIGNMENT // 4), round_up(max_blocks, ALIGNMENT // 4)
        self._slots_shape, self._row_shape = (num_groups, rows), (num_groups, columns)
        self._lengths_at = num_groups * rows * 8
        self._table_at = self._lengths_at + rows * 4
        self._on_device = torch.zeros(self._used_bytes(max_rows), dtype=torch.uint8, device=device)
        self._is_pinned = device.type == "cuda"
        slots, lengths, table = self._views(self._on_device, max_rows)
        slots.fill_(-1)  # all rows are padding until the first step: a capture before it must write nothing
        self.slots, self.lengths = slots.unbind(0), lengths
        self.tables = table[..., :max_blocks].unbind(1)
        self.tokens = torch.arange(max_rows, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """On the device, for all of them."""
        return self._on_device.numel() + self.tokens.numel() * 4

    def load(self, rows: Rows, slots: Sequence[Ints], *, block_tokens: int) -> None:
        """Write a step of decodes; all rows behind them become padding. Does not wait for the device.

        ``slots``: ``rows.token_slots`` by group, [rows] each. Every row has one token.
        """
        num = len(rows)
        assert num == slots[0].size <= self.max_rows
        width = ceil_div(int(rows.ends.max(initial=0)), block_tokens)
        size = self._used_bytes(num)
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        to_slots, to_lengths, to_table = (view.numpy() for view in self._views(staged, num))
        for group, (group_slots, table) in enumerate(zip(slots, rows.tables, strict=True)):
            to_slots[group, :num], to_slots[group, num:] = group_slots, -1
            to_table[:, group, :width] = table[rows.slots, :width]
        to_lengths[:num], to_lengths[num:] = rows.ends, 0
        self._on_device[:size].copy_(staged, non_blocking=True)

    def _used_bytes(self, num_rows: int) -> int:
        return self._table_at + num_rows * prod(self._row_shape) * 4

    def _views(self, memory: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots [groups, rows], lengths [rows] and the first rows of the tables [rows, groups, blocks] in a memory."""
        slots = memory[: self._lengths_at].view(torch.int64).view(self._slots_shape)
        lengths = memory[self._lengths_at : self._table_at].view(torch.int32)
        table = memory[self._table_at : self._used_bytes(num_rows)].view(torch.int32)
        return slots[:, : self.max_rows], lengths[: self.max_rows], table.view(num_rows, *self._row_shape)
