"""Sliding windows under both managers of the reference.

V2 prices a window as a fixed number of pages for each sequence, and while prompts are read as so many bytes a token
until a step is full. V1 gives every window the same share of bytes, so windows win it no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tonnage.budget.cost import Bounded, Cost
from tonnage.budget.reference.environment import window_byte_shares
from tonnage.units import ceil_div, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLayer:
    """One layer: bytes of one token, and its window in tokens (None: full attention).

    ``is_explicitly_full``: a layer that the model calls full stays in the slope even where the user gives it a window.
    """

    bytes_per_token: int
    window: int | None = None
    is_explicitly_full: bool = False


def layer_windows(pattern: Sequence[int] | None, num_layers: int) -> list[int | None]:
    """The user's windows, repeated in turn over the layers; recurrent states (negative) have none."""
    if pattern is None:
        return [None] * num_layers
    return [window if window > 0 else None for window in (pattern[i % len(pattern)] for i in range(num_layers))]


def windows_from_types(
    layer_types: Sequence[str], *, sliding_window: int, max_seq_len: int, is_hybrid: bool = False
) -> list[int] | None:
    """V2's windows where the user gave none: by the kinds of layer, if there are at least two; None: one window."""
    if is_hybrid:
        return None
    windows = [sliding_window if kind == "sliding_attention" else max_seq_len for kind in layer_types]
    return windows if len(set(windows)) >= 2 else None


def static_cost(
    layers: Sequence[WindowLayer], *, max_seq_len: int, max_batch_size: int, block_tokens: int, name: str = ""
) -> Cost:
    """V2 before anything is built: full layers in the slope, whole pages of each window and sequence in the intercept.

    A window as long as the longest sequence counts as full.
    """
    slope, per_sequence = 0, 0
    for layer in layers:
        if _is_full(layer, max_seq_len):
            slope += layer.bytes_per_token
        else:
            per_sequence += _resident(layer, block_tokens)
    return Cost(slope=slope, intercept=per_sequence * max_batch_size, name=name)


def dflash_window_pages(window: int, *, extra_kv_tokens: int, tokens_per_step: int, block_tokens: int) -> int:
    """Pages of one sequence in a DFlash drafter's window: its look-ahead, and one page since it starts anywhere."""
    return ceil_div(window + extra_kv_tokens + tokens_per_step - 1, block_tokens) + 1


def quota_cost(
    *, full: int, prefill: int, fixed: int, num_sequences: int, step_tokens: int, generation: int = 0
) -> Cost:
    """V2's quota as a cost: F*T + G*(T - min(T, M)) + n*R + C*min(T, M).

    full        F, bytes a token of full layers;  prefill: C, of windows while prompts are read
    fixed       R, bytes each sequence keeps;  num_sequences: n;  step_tokens: M
    generation  G, bytes a token of windows after a step's worth of them
    """
    return Cost(
        slope=full + generation,
        intercept=num_sequences * fixed,
        bounded=(Bounded(rate=prefill - generation, until=step_tokens),),
    )


def runtime_cost(
    layers: Sequence[WindowLayer],
    *,
    max_seq_len: int,
    max_batch_size: int,
    max_num_tokens: int,
    block_tokens: int,
    reuses_scratch: bool = False,
) -> Cost:
    """V2's own quota. With scratch reuse only the first layer of each window and size holds pages in a prefill."""
    windowed = [layer for layer in layers if not _is_full(layer, max_seq_len)]
    held = dict.fromkeys((layer.window, layer.bytes_per_token) for layer in windowed)
    prefill = sum(size for _, size in held) if reuses_scratch else sum(layer.bytes_per_token for layer in windowed)
    return quota_cost(
        full=sum(layer.bytes_per_token for layer in layers if _is_full(layer, max_seq_len)),
        prefill=prefill,
        fixed=sum(_resident(layer, block_tokens) for layer in windowed),
        num_sequences=max_batch_size,
        step_tokens=max_num_tokens,
    )


def quota_tokens(
    quota_bytes: int,
    *,
    full: int,
    prefill: int,
    fixed: int,
    num_sequences: int,
    step_tokens: int,
    generation: int = 0,
) -> Fraction | float:
    """The reference's inverse of ``quota_cost``: exact, not floored, by its three cases; it may be ``math.inf``.

    Its quirk: where nothing grows in the first case but something does after it, the quota of the sequences alone
    buys infinity. Ours, the inverse of the cost itself, says ``step_tokens`` there.
    """
    early, late = full + prefill, full + generation
    left = quota_bytes - num_sequences * fixed
    if left < 0:
        return Fraction(0)
    if left <= step_tokens * early:
        return Fraction(left, early) if early else math.inf
    return step_tokens + Fraction(left - step_tokens * early, late) if late else math.inf


def lowered_windows(
    layer_bytes: Mapping[int, int], *, pool_bytes: int, max_tokens: int | None = None
) -> dict[int, int]:
    """V1's windows, lowered where the pool cannot hold one sequence in all of them.

    layer_bytes   window -> bytes a token of all layers with it
    Returns every window with what it becomes. Shorter windows are served first, with longer ones alongside.
    """
    if sum(window * size for window, size in layer_bytes.items()) < pool_bytes:
        granted = {window: window for window in layer_bytes}
    else:
        granted, left, reached, before = {}, pool_bytes, 0, 0
        for window in sorted(layer_bytes):
            joint = sum(size for other, size in layer_bytes.items() if other >= window)
            more = min(left // joint, window - before)
            left = left - more * joint if more == window - before else 0
            reached, before = reached + more, window
            granted[window] = reached
    if max_tokens:
        granted = {window: min(tokens, max_tokens) for window, tokens in granted.items()}
    return granted


def window_blocks(
    layer_bytes: Mapping[int, int],
    *,
    pool_bytes: int,
    block_tokens: int,
    shares: tuple[Fraction, ...] | None = None,
) -> dict[int, int]:
    """V1's blocks of each window, ascending: its share of bytes, equal unless given, over the bytes of its layers."""
    windows = sorted(layer_bytes)
    parts = window_byte_shares(shares, len(windows))
    return {
        window: int(pool_bytes * part) // layer_bytes[window] // block_tokens
        for window, part in zip(windows, parts, strict=True)
    }


def _is_full(layer: WindowLayer, max_seq_len: int) -> bool:
    return layer.is_explicitly_full or layer.window is None or layer.window >= max_seq_len


def _resident(layer: WindowLayer, block_tokens: int) -> int:
    return round_up(layer.window or 0, block_tokens) * layer.bytes_per_token
