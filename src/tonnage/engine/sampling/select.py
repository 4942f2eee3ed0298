"""Filters and draws over whole vocabularies, without sorting: everything is a threshold on the gap to the best token.

A token's gap is how far its logit lies below the row's largest, divided by the temperature: a float32 that is never
negative, whose bits, read as an integer, are therefore in the order of the numbers. exp(-gap) is its probability
over that of the best token, and weights are these in fixed point, floor(2**40 * exp(-gap)). Sums of such integers
are exact, so they depend neither on their order nor on the batch nor on the device.

Filters keep the tokens with gap <= limit. The limits of top-k and top-p are the same question, answered by radix
select (Knuth, The Art of Computer Programming 3, 5.2.5): the smallest gap up to which tokens sum to at least so much,
in ones for top-k and in weights for top-p. Tokens as probable as the last one kept are kept too.

A row with a NaN or nothing but -inf in it gives a token that means nothing; its neighbours are not touched.
"""

from __future__ import annotations

import numpy as np
import torch

from tonnage.buffers.torch_copies import upload_one
from tonnage.engine.sampling.rows import Draws, Floats
from tonnage.step import Ints
from tonnage.units import round_up

#: Fixed point of the weights. The sum over 2**22 tokens stays below 2**63.
_ONE = 2.0**40
#: The 31 bits of a float32 that is not negative, in digits of at most 11 bits: 2,048 sums a row.
_DIGIT_BITS = (11, 10, 10)
#: Children of a node in the tree of sums that a draw walks down; ``rows.NUM_UNIFORM`` levels are 2**32 tokens.
_FAN_OUT = 16


def gaps_to_best(logits: torch.Tensor, best: torch.Tensor, temperature: Floats) -> torch.Tensor:
    """float32 [rows, V] from logits of that shape and type and their maximum ``best`` [rows, 1]."""
    # Two zeros of different sign are -0.0 apart, whose bits are not those of a number >= 0; adding 0.0 makes it +0.0.
    return torch.sub(best, logits).div_(column(temperature, logits.device, torch.float32)).add_(0.0)


def limits(gaps: torch.Tensor, draws: Draws) -> torch.Tensor | None:
    """The largest gap that passes the filters of each row, float32 [rows, 1]; None: no row has a filter.

    top-p looks at what top-k left; min-p compares with the best token, so its place in the order does not matter.
    """
    if draws.top_k is None and draws.top_p is None and draws.min_p is None:
        return None
    limit = gaps.new_full((gaps.shape[0], 1), torch.inf)
    if draws.top_k is not None:
        _limit_top_k(limit, gaps, draws.top_k)
    if draws.top_p is not None:
        _limit_top_p(limit, gaps, draws.top_p, is_cut=draws.top_k is not None)
    if draws.min_p is not None:
        with np.errstate(divide="ignore"):  # 0 keeps everything: its limit is infinite
            limit = torch.minimum(limit, column(-np.log(draws.min_p), gaps.device, torch.float32))
    return limit


def weights(gaps: torch.Tensor, limit: torch.Tensor | None) -> torch.Tensor:
    """floor(2**40 * exp(-gap)), 0 beyond ``limit``: int64 [rows, V rounded up to whole nodes], 0 there as well."""
    size = gaps.shape[1]
    fixed = gaps.new_empty((gaps.shape[0], round_up(size, _FAN_OUT)), dtype=torch.int64)
    fixed[:, size:] = 0
    share = gaps.neg().exp_()
    if limit is not None:
        # As floats: operations on booleans are many times slower on a CPU.
        share.mul_(torch.le(gaps, limit, out=torch.empty_like(gaps)))
    fixed[:, :size] = share.mul_(_ONE)
    return fixed


def nearest(gaps: torch.Tensor, weight: torch.Tensor, need: torch.Tensor) -> torch.Tensor:
    """The smallest gap, float32 [rows, 1], such that the weight of all tokens up to it is at least ``need`` >= 1.

    ``gaps`` float32 and ``weight`` int64, both [rows, V]; ``need`` int64 [rows, 1], at most the sum of the weights.
    From the highest digit to the lowest: sum by digit among the tokens that agree with the digits found so far, on
    top of those below them, and take the first digit where the running sum reaches ``need``.
    """
    keys = gaps.view(torch.int32)
    found = keys.new_zeros((gaps.shape[0], 1))
    shift = sum(_DIGIT_BITS)
    for bits in _DIGIT_BITS:
        shift -= bits
        below = (found << bits) - 1
        found = below + _first_enough(keys >> shift, weight, below, need, num_digits=1 << bits)
    return found.view(torch.float32)


def draw(weight: torch.Tensor, uniform: Floats) -> torch.Tensor:
    """One token a row, int64 [rows, 1], with probability weight / sum: a walk down a tree of sums, its root on top.

    Each level takes a number of its own, ``uniform`` [rows, at least as many as levels]. One number for the whole
    vocabulary would do as well, but the logits differ in the last bits from batch to batch, which moves every border
    of a distribution function by more than an improbable token is wide: the same request would draw another one of
    them now and then. Here a border moves by its share of one node's weight alone.
    """
    levels = [weight]
    while levels[-1].shape[1] > _FAN_OUT:
        levels[-1] = torch.nn.functional.pad(levels[-1], (0, -levels[-1].shape[1] % _FAN_OUT))
        levels.append(levels[-1].unflatten(1, (-1, _FAN_OUT)).sum(-1))
    numbers = upload_one(uniform, weight.device)
    node = weight.new_zeros((weight.shape[0], 1))
    for level, sums in enumerate(reversed(levels)):
        first = node * _FAN_OUT
        children = first + torch.arange(min(_FAN_OUT, sums.shape[1]), device=weight.device)
        upto = sums.gather(1, children).cumsum(-1)
        total = upto[:, -1:]
        target = (numbers[:, level : level + 1] * total).to(torch.int64).minimum(total - 1)
        node = first + _first_above(upto, target)
    return node


def pick(tensor: torch.Tensor, rows: Ints) -> torch.Tensor:
    """Those rows: the tensor itself where they are all of its rows, else a copy."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, index(rows, tensor.device))


def index(values: Ints, device: torch.device) -> torch.Tensor:
    """An array of whole numbers on the device."""
    return upload_one(values.astype(np.int64, copy=False), device)


def column(values: Ints | Floats, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An array as [len, 1] on the device, to be combined with [rows, V]."""
    return upload_one(values, device).to(dtype).unsqueeze(1)


def _limit_top_k(limit: torch.Tensor, gaps: torch.Tensor, top_k: Ints) -> None:
    rows = np.flatnonzero(top_k)
    if rows.size:
        some, need = pick(gaps, rows), column(np.minimum(top_k[rows], gaps.shape[1]), gaps.device)
        found = nearest(some, torch.ones_like(some, dtype=torch.int64), need)
        limit.index_copy_(0, index(rows, limit.device), found)


def _limit_top_p(limit: torch.Tensor, gaps: torch.Tensor, top_p: Floats, *, is_cut: bool) -> None:
    """``is_cut``: ``limit`` leaves out tokens already."""
    rows = np.flatnonzero(top_p < 1)
    if rows.size:
        some, before = pick(gaps, rows), pick(limit, rows)
        weight = weights(some, before if is_cut else None)
        need = column(top_p[rows], gaps.device) * weight.sum(-1, keepdim=True)
        found = nearest(some, weight[:, : gaps.shape[1]], need.ceil_().to(torch.int64).clamp_(min=1))
        limit.index_copy_(0, index(rows, limit.device), torch.minimum(before, found))


def _first_enough(
    keys: torch.Tensor, weight: torch.Tensor, below: torch.Tensor, need: torch.Tensor, *, num_digits: int
) -> torch.Tensor:
    """How far above ``below``, in [1, num_digits], the first key lies up to which the weights sum to ``need``.

    ``keys`` int32 [rows, V] are overwritten. All up to ``below`` share a bin, as do all beyond the digits, so that
    every key has a bin, whatever it is.
    """
    torch.maximum(keys, below, out=keys)
    torch.minimum(keys, below + num_digits + 1, out=keys)
    bins = keys.sub_(below).to(torch.int64)
    sums = weight.new_zeros((bins.shape[0], num_digits + 2)).scatter_add_(1, bins, weight)
    return torch.searchsorted(sums.cumsum_(-1), need, out_int32=True)


def _first_above(upto: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first column whose running sum is above ``target`` [rows, 1]; the last one where there is none."""
    return torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
