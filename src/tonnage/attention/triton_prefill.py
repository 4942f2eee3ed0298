"""The Triton kernel for rows of several queries: fresh prompts, chunks after a cached prefix, drafts.

Each query block reads its row's pages where they lie, those of the cached prefix and those just appended alike, so
nothing is gathered and nothing kept. Notation and masks are those of ``triton_kernels.py``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from tonnage.attention.triton_kernels import _attend_tile, _page_numbers


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out, query, pages, table, spans, blocks, sinks, query_head_stride, query_token_stride, table_stride, scale, cap,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SLAB: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (query head, block): ``QUERIES`` queries of one row, causal, to ``out`` [T, Hq, D].

    ``blocks`` int32 [num_blocks, 2] is (row, first query counted from the row's own), ``spans`` int32 [rows, 3] is
    (start, end, where the row's tokens begin in the batch), and ``table`` has the pages of the same rows.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    row, offset = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    row_start, row_end = tl.load(spans + 3 * row), tl.load(spans + 3 * row + 1)
    token = (tl.load(spans + 3 * row + 2) + offset + tl.arange(0, QUERIES)).to(tl.int64)
    begin = row_start + offset
    positions = begin + tl.arange(0, QUERIES)
    end = tl.minimum(begin + QUERIES, row_end)
    dims = tl.arange(0, DIM_PAD)
    is_real = (positions < row_end)[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = query + token[:, None] * query_token_stride + head * query_head_stride + dims[None, :]
    queries = tl.load(query_at, mask=is_real, other=0.0)
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0

    head_pages = pages + head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
    table_row = table + row.to(tl.int64) * table_stride
    # What a padded query computes is never stored; it sees what the last real one sees, so that it stays finite.
    last = tl.minimum(positions, end - 1)
    first = tl.maximum(last - WINDOW + 1, 0) if WINDOW else last * 0
    lowest = tl.maximum(begin - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    # All queries see the tiles up to here whole, where there is no window: no mask to make for most of a long prefix.
    whole = lowest if WINDOW else (begin + 1) // TILE * TILE
    following = _page_numbers(table_row, lowest, end, PAGE, TILE)
    for at in tl.range(lowest, whole, TILE):
        page = following
        following = _page_numbers(table_row, at + TILE, end, PAGE, TILE)
        acc, top, total = _attend_tile(
            queries, acc, top, total, head_pages, page, at, first, last, scale, cap,
            NUM_KV_HEADS * HEAD_DIM, SLAB, HEAD_DIM, DIM_PAD, PAGE, TILE, False, False, CAPPED, PRECISION,
        )  # fmt: skip
    for at in tl.range(whole, end, TILE):
        page = following
        following = _page_numbers(table_row, at + TILE, end, PAGE, TILE)
        acc, top, total = _attend_tile(
            queries, acc, top, total, head_pages, page, at, first, last, scale, cap,
            NUM_KV_HEADS * HEAD_DIM, SLAB, HEAD_DIM, DIM_PAD, PAGE, TILE, True, WINDOW > 0, CAPPED, PRECISION,
        )  # fmt: skip

    result = acc / total[:, None]
    out_at = out + (token[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_real)
