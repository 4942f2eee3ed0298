"""From the page table of a captured batch to the lists of pages that FlashInfer's kernels read, on the device."""

# The decorator of triton has no types, and neither have the pointers that it hands out.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def compact_kernel(
    lengths, table, query_indptr, page_indptr, pages, last_page_tokens, num_rows, table_stride,
    PAGE: tl.constexpr, ROWS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program i writes what the lists hold of row i, and program 0 their leading zeros.

    Every program adds up the rows before its own: they are few, and another launch would cost more. A row of padding,
    of length 0, has no query and no page. ``ROWS_PAD`` is the power of two from ``num_rows`` on.
    """
    row = tl.program_id(0)
    at = tl.arange(0, ROWS_PAD)
    all_lengths = tl.load(lengths + at, mask=at < num_rows, other=0)
    num_pages = (all_lengths + PAGE - 1) // PAGE
    first = tl.sum(tl.where(at < row, num_pages, 0), 0)
    queries = tl.sum(tl.where((at <= row) & (all_lengths > 0), 1, 0), 0)
    length = tl.load(lengths + row)
    count = (length + PAGE - 1) // PAGE
    if row == 0:
        tl.store(query_indptr, 0)
        tl.store(page_indptr, 0)
    tl.store(query_indptr + row + 1, queries)
    tl.store(page_indptr + row + 1, first + count)
    tl.store(last_page_tokens + row, length - tl.maximum(count - 1, 0) * PAGE)
    source = table + row.to(tl.int64) * table_stride
    target = pages + first.to(tl.int64)
    for begin in range(0, count, TILE):
        here = begin + tl.arange(0, TILE)
        tl.store(target + here, tl.load(source + here, mask=here < count), mask=here < count)
