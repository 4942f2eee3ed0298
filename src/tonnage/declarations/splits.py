"""Into how many parts decode kernels cut the past of a sequence so that few sequences still fill the chip."""

from __future__ import annotations

from functools import lru_cache

from tonnage.terms import Chip
from tonnage.units import ceil_div

FLOAT_BYTES = 4
#: Taken for a card of which we do not know how many it has; no card of today has more.
MOST_SMS = 160


def num_sms(chip: Chip) -> int:
    """Multiprocessors of the chip, or more than any has where that is not known."""
    return chip.num_sms or MOST_SMS


@lru_cache(maxsize=4096)
def most_parts(max_rows: int, num_kv_heads: int, *, num_slots: int, most_splits: int) -> int:
    """The most partial results that any batch of up to ``max_rows`` sequences leaves, one for each KV head and split.

    A batch of b is cut into S(b) = ceil(num_slots / (b * num_kv_heads)) parts, at most ``most_splits``; with S = 1
    results are written in place and there are none. S falls as b grows, so the largest batch need not be the worst:
    a buffer must serve all of them.
    """
    most = 0
    for rows in range(1, min(max_rows, num_slots // num_kv_heads + 1) + 1):
        splits = min(most_splits, ceil_div(num_slots, rows * num_kv_heads))
        if splits > 1:
            most = max(most, rows * num_kv_heads * splits)
    return most


def partial_bytes(num_results: int, v_head_dim: int) -> int:
    """Float32 output and log-sum-exp of so many partial results of one query head each."""
    return num_results * (v_head_dim + 1) * FLOAT_BYTES
