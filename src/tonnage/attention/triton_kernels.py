"""Kernels over paged KV in Triton: append new tokens, attend with one query a row (decode), with many (prefill).

A pool is [num_slabs, layers, 2, B, Hkv, D], contiguous. Kernels get a pointer to one layer's keys in slab 0 and jump
from page to page by ``SLAB`` elements; its values lie ``B * Hkv * D`` behind its keys. Jumps are 64-bit: a pool has
more than 2^31 elements. Everything about the shape is a compile-time constant, so that addresses are known to be
aligned; whatever differs from step to step is read from device memory, so that a captured graph can be replayed.

Softmax is done in base 2: ``scale`` holds log2(e), a soft-cap and sinks are multiplied by it. Masked keys and values
are never loaded, so what an earlier owner left in a page, or a page number behind the end of a row, does not matter.
"""

# The decorator of triton has no types, and neither have the pointers that it hands out.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    key, value, pages, slots, key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program t writes token t of ``key`` and ``value`` to ``slots[t]``, or nowhere where that is negative.

    A slot counts tokens from the first key of this layer in slab 0. ``WIDTH`` is the power of two from Hkv * D on.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, WIDTH)
        head, dim = at // HEAD_DIM, at % HEAD_DIM
        inside = at < NUM_KV_HEADS * HEAD_DIM
        target = pages + slot * (NUM_KV_HEADS * HEAD_DIM) + at
        keys = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=inside)
        tl.store(target, keys, mask=inside)
        values = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=inside)
        tl.store(target + PAGE * NUM_KV_HEADS * HEAD_DIM, values, mask=inside)


@triton.jit
def _page_numbers(table_row, at, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The pages of the ``TILE`` positions from ``at`` on: one number where they share a page, one for each else."""
    places = at if PAGE % TILE == 0 else at + tl.arange(0, TILE)
    return tl.load(table_row + places // PAGE, mask=places < end, other=0)


@triton.jit
def _attend_tile(
    query, acc, top, total, pages, page, at, first, last, scale, cap,
    HEAD_STRIDE: tl.constexpr, SLAB: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the running softmax (``acc`` [M, D], ``top`` and ``total`` [M]).

    Query m sees positions ``[first[m], last[m]]``; without ``MASKED`` it sees all of the tile. ``pages`` points to
    this head's keys of the layer, ``page`` holds what ``_page_numbers`` found for the positions ``at``.
    """
    dims = tl.arange(0, DIM_PAD)
    places = at + tl.arange(0, TILE)
    offsets = page.to(tl.int64) * SLAB + (places % PAGE) * HEAD_STRIDE
    keys_at = pages + offsets[None, :] + dims[:, None]
    values_at = pages + PAGE * HEAD_STRIDE + offsets[:, None] + dims[None, :]
    if MASKED:
        needed = (places >= tl.min(first, 0)) & (places <= tl.max(last, 0))
        wanted_keys, wanted_values = needed[None, :], needed[:, None]
        if HEAD_DIM < DIM_PAD:
            wanted_keys &= (dims < HEAD_DIM)[:, None]
            wanted_values &= (dims < HEAD_DIM)[None, :]
        keys = tl.load(keys_at, mask=wanted_keys, other=0.0)
        values = tl.load(values_at, mask=wanted_values, other=0.0)
    elif HEAD_DIM < DIM_PAD:
        keys = tl.load(keys_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        values = tl.load(values_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        keys = tl.load(keys_at)
        values = tl.load(values_at)
    scores = tl.dot(query, keys, input_precision=PRECISION) * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1): right at both ends, since e^2x may be 0 or infinite.
        scores = cap * (1 - 2 / (tl.exp2(scores) + 1))
    if MASKED:
        seen = (places[None, :] >= first[:, None]) & (places[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A query whose window begins behind this tile has seen nothing yet: minus infinity less itself is no number.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if WINDOW else new_top
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _part(length, split, num_splits, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first position that the row sees, and those [begin, end) of its split, which begins a tile."""
    lowest = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    start = lowest // TILE * TILE
    span = tl.cdiv(tl.cdiv(length - start, num_splits), TILE) * TILE
    begin = start + split * span
    return lowest, begin, tl.minimum(begin + span, length)


@triton.jit
def _first_sums(sinks, is_real, split, GROUP_PAD: tl.constexpr, HAS_SINKS: tl.constexpr):
    """``top`` and ``total`` before the first tile. A sink is one more key whose value is 0; the first split has it."""
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_real, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, total + 1.0, total)
    return top, total


@triton.jit
def _write_last(
    key, value, pages, table_row, place,
    HEAD_STRIDE: tl.constexpr, SLAB: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A head's key and value, [D] each, to position ``place`` of the row; ``pages`` as for ``_attend_tile``."""
    dims = tl.arange(0, DIM_PAD)
    inside = dims < HEAD_DIM
    target = pages + tl.load(table_row + place // PAGE).to(tl.int64) * SLAB + place % PAGE * HEAD_STRIDE + dims
    tl.store(target, tl.load(key + dims, mask=inside), mask=inside)
    tl.store(target + PAGE * HEAD_STRIDE, tl.load(value + dims, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    out, parts, sums, query, key, value, pages, table, lengths, tokens, sinks, query_head_stride, query_token_stride,
    key_head_stride, key_token_stride, value_head_stride, value_token_stride, table_stride, scale, cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SLAB: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
    APPENDS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, row, split): the row's last token attends to one part of the row, all queries of the head at
    once. Heads are next to each other in launch order, because they share the row's page numbers and DRAM pages.

    ``tokens`` says where in the batch the row's query stands, ``lengths`` how many tokens it attends to, itself
    included; 0: a row of padding, whose output is 0. With one split the result goes to ``out`` [T, Hq, D], else
    normalised to ``parts`` [rows, Hq, splits, D] with the base-2 log of its sum in ``sums`` [rows, Hq, splits].
    ``APPENDS``: the last token's key and value are not in their page yet; who attends to them writes them first.
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    token = tl.load(tokens + row).to(tl.int64)
    lowest, begin, end = _part(length, split, tl.num_programs(2), TILE, WINDOW)
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    heads = head * GROUP + group
    is_real = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = query + token * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query_at, mask=is_real, other=0.0)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    top, total = _first_sums(sinks + heads, group < GROUP, split, GROUP_PAD, HAS_SINKS)
    head_pages = pages + head * HEAD_DIM
    table_row = table + row.to(tl.int64) * table_stride
    if APPENDS:
        if (begin < length) & (end == length):
            new_key = key + head * key_head_stride + token * key_token_stride
            new_value = value + head * value_head_stride + token * value_token_stride
            _write_last(
                new_key, new_value, head_pages, table_row, length - 1, NUM_KV_HEADS * HEAD_DIM, SLAB, HEAD_DIM, DIM_PAD,
                PAGE,
            )  # fmt: skip
        tl.debug_barrier()  # the program's other threads read them below
    first = tl.full([1], 0, tl.int32) + lowest
    last = tl.full([1], -1, tl.int32) + end
    # Pages of the next tile are read while this one is attended to: keys must not wait for two trips to memory.
    following = _page_numbers(table_row, begin, end, PAGE, TILE)
    for at in tl.range(begin, end, TILE):
        page = following
        following = _page_numbers(table_row, at + TILE, end, PAGE, TILE)
        acc, top, total = _attend_tile(
            queries, acc, top, total, head_pages, page, at, first, last, scale, cap,
            NUM_KV_HEADS * HEAD_DIM, SLAB, HEAD_DIM, DIM_PAD, PAGE, TILE, True, False, CAPPED, PRECISION,
        )  # fmt: skip

    total = tl.where(total > 0, total, 1.0)  # where there was nothing to attend to: 0, and a log-sum of -infinity
    result = acc / total[:, None]
    if IS_SPLIT:
        place = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * tl.num_programs(2) + split
        tl.store(parts + place[:, None] * HEAD_DIM + dims[None, :], result, mask=is_real)
        tl.store(sums + place, top + tl.log2(total), mask=group < GROUP)
    else:
        out_at = out + (token * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out, parts, sums, tokens, num_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Program (query head, row): the parts of ``decode_kernel`` weighted by their sums, to ``out`` [T, Hq, D]."""
    head, row = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens + row).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    place = (row.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    logs = tl.load(sums + place, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    # A split behind the end of its row has left zeros, so nothing that is not a number comes in here.
    wanted = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
    found = tl.load(parts + place[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)
    result = tl.sum(found * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_at = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
