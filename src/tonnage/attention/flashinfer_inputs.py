"""What FlashInfer's kernels read of a step: rows and their pages, one list behind the other.

The planner reads the same numbers on the host: planning from device tensors would wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tonnage.attention.append import next_power_of_2
from tonnage.attention.base import Rows
from tonnage.attention.triton_inputs import StaticInputs
from tonnage.config import Limits
from tonnage.step import Ints
from tonnage.units import ceil_div

Int32s = npt.NDArray[np.int32]
#: Page numbers that one program moves in a trip.
COMPACT_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLists:
    """Some rows of a step on the host, all int32.

    query_indptr      [n + 1], row i has the queries [i] to [i + 1] of those of these rows
    page_indptr       [n + 1], and so its pages
    lengths           [n], tokens that it attends to, its own included
    last_page_tokens  [n], how many of them lie in its last page
    """

    query_indptr: Int32s
    page_indptr: Int32s
    lengths: Int32s
    last_page_tokens: Int32s

    @classmethod
    def of(cls, counts: Ints, ends: Ints, *, block_tokens: int, num_rows: int | None = None) -> HostLists:
        """Rows that compute ``counts`` tokens each, up to ``ends``; rows of padding up to ``num_rows`` have neither
        queries nor pages."""
        num, padded = counts.size, counts.size if num_rows is None else num_rows
        lengths = np.zeros(padded, np.int32)
        lengths[:num] = ends
        num_pages = -(-lengths // block_tokens)
        queries = np.zeros(padded, np.int32)
        queries[:num] = counts
        return cls(
            query_indptr=_indptr(queries),
            page_indptr=_indptr(num_pages),
            lengths=lengths,
            last_page_tokens=lengths - np.maximum(num_pages - 1, 0) * block_tokens,
        )

    @property
    def num_rows(self) -> int:
        return self.lengths.size

    def pages(self, rows: Rows, which: Ints) -> Int32s:
        """Page numbers of rows ``which``, those that these lists are of, one row behind the other."""
        num_pages = np.diff(self.page_indptr)
        table = rows.table[rows.slots[which], : int(num_pages.max(initial=0))]
        return table[np.arange(table.shape[1]) < num_pages[:, None]]


def _indptr(counts: npt.NDArray) -> Int32s:
    made = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=made[1:])
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLists:
    """The lists of ``HostLists`` that kernels read, on the device, with ``pages`` by group of layers, int32
    [at least page_indptr[n]]: what a group gave up of a row has a number there too, which nobody reads."""

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    last_page_tokens: torch.Tensor
    pages: Sequence[torch.Tensor]


class StaticLists:
    """Device lists at fixed addresses for the graphs of decodes, made inside each graph from ``inputs``: page tables
    and lengths, which are all that is written before a replay, beside the plan.

    They have room for the supported maximum: every row as long as a sequence may be.
    """

    def __init__(self, limits: Limits, *, block_tokens: int, device: torch.device, num_groups: int = 1) -> None:
        max_rows, max_blocks = limits.max_batch_size, ceil_div(limits.max_seq_len, block_tokens)
        self.inputs = StaticInputs(max_rows=max_rows, max_blocks=max_blocks, device=device, num_groups=num_groups)
        self._block_tokens = block_tokens

        def made(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._lists = DeviceLists(
            query_indptr=made(max_rows + 1),
            page_indptr=made(max_rows + 1),
            last_page_tokens=made(max_rows),
            pages=made(num_groups, max_rows * max_blocks).unbind(0),
        )

    def compact(self, num_rows: int) -> DeviceLists:
        """The lists of the first ``num_rows`` rows, from what ``inputs`` hold when the stream gets here."""
        from tonnage.attention.flashinfer_kernels import compact_kernel

        inputs, lists = self.inputs, self._lists
        for table, pages in zip(inputs.tables, lists.pages, strict=True):
            compact_kernel[(num_rows,)](
                inputs.lengths, table, lists.query_indptr, lists.page_indptr, pages, lists.last_page_tokens,
                num_rows, table.stride(0),
                PAGE=self._block_tokens, ROWS_PAD=next_power_of_2(num_rows), TILE=COMPACT_TILE, num_warps=4,
            )  # fmt: skip
        return DeviceLists(
            query_indptr=lists.query_indptr[: num_rows + 1],
            page_indptr=lists.page_indptr[: num_rows + 1],
            last_page_tokens=lists.last_page_tokens[:num_rows],
            pages=lists.pages,
        )
