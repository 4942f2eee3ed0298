"""The most probable token of each row and its log-probability, in one pass over the logits: what most steps want.

The general way (``sampler``) takes a dozen kernels and float32 copies of the logits for it; for 256 rows of 128,000
logits those are 1 ms on an H200, and this is 0.05.
"""

# The decorator of triton has no types, and neither have the pointers that it hands out.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.engine.sampling.told import Drawn

#: Logits of one round of a row's program; from 16,384 on registers spill.
_TILE = 8192


@triton.jit(do_not_specialize=["num_rows"])
def _greedy_kernel(logits, tokens, told, num_rows, row_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """One program a row. The running maximum and the sum of exponentials below it are rescaled as in softmax's online
    form (Milakov and Gimelshein 2018); of equal logits the first wins."""
    row = tl.program_id(0)
    mine = logits + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    place = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, VOCAB, TILE):
        at = first + lanes
        value = tl.load(mine + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        is_more = value > best
        above = tl.where(is_more, value, best)
        shrunk = tl.where(best == above, total, total * tl.exp(best - above))
        added = tl.where(value == float("-inf"), 0.0, tl.exp(value - above))
        total = shrunk + added
        place = tl.where(is_more, at, place)
        best = above
    highest = tl.max(best, 0)
    share = tl.where(best == float("-inf"), 0.0, total * tl.exp(best - highest))
    # A NaN is above nothing, and makes the sum of its lane one.
    norm = highest + tl.log(tl.sum(tl.where(total == total, share, total), 0))
    first_place = tl.min(tl.where(best == highest, place, VOCAB), 0)
    is_finite = (tl.abs(norm) < float("inf")) & (tl.abs(highest) < float("inf"))
    token = tl.where(is_finite, first_place, 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(told + row, token.to(tl.float64))
    tl.store(told + num_rows + row, (highest - norm).to(tl.float64))
    tl.store(told + 2 * num_rows + row, is_finite.to(tl.float64))


def greedy(logits: torch.Tensor) -> Drawn:
    """Of ``logits`` [rows, V] of any float type, on a card. Ties go to the lowest id; a row with a NaN, +inf or nothing
    but -inf gives token 0 and is not finite."""
    rows, vocab_size = logits.shape
    tokens = logits.new_empty(rows, dtype=torch.int64)
    told = logits.new_empty((3, rows), dtype=torch.float64)
    if rows:
        _greedy_kernel[(rows,)](
            logits, tokens, told, rows, logits.stride(0), VOCAB=vocab_size, TILE=_TILE, num_warps=16
        )
    return Drawn(tokens, told)
