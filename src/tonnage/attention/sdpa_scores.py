"""Attention of queries in a row over keys that lie side by side, in pieces: by torch, or score by score.

Torch's attention knows masks and neither a soft-cap nor sinks; with one of these the scores are written out into
scratch, a piece of the queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a layer asks for; see ``Backend.forward``."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Torch's attention can do it, by a mask."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Queries [1, Hq, n, D] at the positions from ``start`` on, and keys and values [1, Hkv, W, D] at those from
    ``base`` on: all that the queries see, causally, and nothing behind the last of them."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    start: int
    base: int = 0

    @property
    def count(self) -> int:
        return self.query.shape[2]


def attend(span: Span, wanted: Wanted, mask_tile: torch.Tensor, scores: torch.Tensor | None, out: torch.Tensor) -> None:
    """Into ``out`` [n, Hq, D]. ``mask_tile`` holds one mask, ``scores`` (flat; None where ``is_plain``) as many scores
    for each query head."""
    for first, last in _pieces(span, wanted.window, mask_tile.numel()):
        low = 0 if wanted.window is None else max(0, span.start + first - wanted.window + 1 - span.base)
        high = span.start + last - span.base
        piece = Span(
            query=span.query[:, :, first:last],
            keys=span.keys[:, :, low:high],
            values=span.values[:, :, low:high],
            start=span.start + first,
            base=span.base + low,
        )
        mask = _mask(piece, wanted.window, mask_tile)
        if wanted.is_plain:
            part = scaled_dot_product_attention(
                piece.query, piece.keys, piece.values, attn_mask=mask, scale=wanted.scaling, enable_gqa=True
            )[0]
        else:
            assert scores is not None
            part = _by_scores(piece, wanted, mask, scores)
        out[first:last] = part.transpose(0, 1)


def _pieces(span: Span, window: int | None, mask_elements: int) -> Iterator[tuple[int, int]]:
    """Queries [first, last) whose mask is within its tile: n queries see no more than all keys, and no more than
    n + window - 1."""
    width = span.keys.shape[2]
    at_once = mask_elements // width
    if window is not None:
        before = window - 1
        at_once = max(at_once, (math.isqrt(before * before + 4 * mask_elements) - before) // 2)
    at_once = max(1, at_once)
    return ((first, min(first + at_once, span.count)) for first in range(0, span.count, at_once))


def _mask(span: Span, window: int | None, mask_tile: torch.Tensor) -> torch.Tensor | None:
    """Additive, [n, W]; None where one query sees all the keys."""
    count, width = span.count, span.keys.shape[2]
    if count == 1:
        return None
    queries = torch.arange(span.start, span.start + count, device=mask_tile.device).unsqueeze(1)
    keys = torch.arange(span.base, span.base + width, device=mask_tile.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hide(mask_tile[: count * width].view(count, width), hidden)


def hide(mask: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Make ``mask`` an additive one: minus infinity where ``hidden``, 0 elsewhere."""
    return mask.zero_().masked_fill_(hidden, -torch.inf)


def _by_scores(span: Span, wanted: Wanted, mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """[Hq, n, D]. Weights stay in the dtype of the queries, as the classes of transformers have them."""
    keys, values = span.keys[0], span.values[0]
    heads, count, dim = span.query.shape[1:]
    kv_heads, width, _ = keys.shape
    group = heads // kv_heads
    weights = scores[: heads * count * width].view(kv_heads, group * count, width)
    torch.bmm(span.query[0].reshape(kv_heads, group * count, dim), keys.transpose(1, 2), out=weights)
    if wanted.softcap is None:
        weights.mul_(wanted.scaling)
    else:
        weights.mul_(wanted.scaling / wanted.softcap).tanh_().mul_(wanted.softcap)
    if mask is not None:
        weights.view(heads, count, width).add_(mask)
    top = weights.amax(-1, keepdim=True)
    if wanted.sinks is not None:
        sinks = wanted.sinks.to(weights.dtype).view(heads, 1).expand(heads, count).reshape(top.shape)
        top = torch.maximum(top, sinks)
    total = weights.sub_(top).exp_().sum(-1, keepdim=True, dtype=torch.float32)
    if wanted.sinks is not None:
        total += (sinks - top).float().exp()
    part = torch.bmm(weights, values).div_(total.to(weights.dtype))
    return part.view(heads, count, dim)
