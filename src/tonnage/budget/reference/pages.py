"""From the bytes of a pool to its blocks, under each manager; and the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tonnage.budget.cost import Cost
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.states import v1_state_slots
from tonnage.budget.reference.tokens import resume_quota
from tonnage.errors import DoesNotFit, InvalidSetting


def v1_uniform_tokens(
    max_tokens: int | None, *, free_bytes: int, fraction: Fraction, runtime_bytes_per_token: int
) -> int:
    """Tokens of V1's one pool on this rank.

    The fraction is applied a second time, to what is free once the probe is gone: a silent net. Raises
    ``InvalidSetting`` at a fraction of 1, where the reference stops at an assertion.
    """
    if fraction >= 1:
        what = "the block manager with uniform pools needs a fraction below 1"
        raise InvalidSetting("free_gpu_memory_fraction", str(fraction), what, remedy='write 0.99, or use manager "V2"')
    net = int(free_bytes * fraction) // runtime_bytes_per_token
    return net if max_tokens is None else min(net, max_tokens)


def v1_probe_blocks(max_tokens: int, *, block_tokens: int) -> int:
    """Blocks of every window while probing; the memory was looked at before."""
    return max_tokens // block_tokens


def v1_window_pool_bytes(knobs: ReferenceKnobs, *, free_bytes: int) -> int:
    """Bytes that V1 shares between variable windows: the cap that the derivation left behind, or the fraction."""
    return knobs.max_gpu_total_bytes or int(free_bytes * knobs.free_gpu_memory_fraction)


def v1_hybrid_blocks(
    budget_bytes: int,
    runtime_cost: Cost,
    *,
    num_sequences: int,
    block_tokens: int,
    interval_tokens: int = 0,
    max_draft_tokens: int = 0,
    is_reused: bool = False,
) -> tuple[int, int]:
    """V1's blocks of attention and slots of states for a hybrid model."""
    tokens = max(0, (budget_bytes - runtime_cost.intercept) // runtime_cost.slope)
    slots = v1_state_slots(
        tokens,
        num_sequences=num_sequences,
        interval_tokens=interval_tokens,
        max_draft_tokens=max_draft_tokens,
        is_reused=is_reused,
    )
    return tokens // block_tokens, slots


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSequence:
    """What one sequence may have of V1's pool: its windows, lowered where they must be, and its longest length."""

    bound_tokens: int
    windows: tuple[int, ...]
    max_seq_len: int


def window_bound(num_blocks: int, *, block_tokens: int, beam_width: int, max_seq_len: int) -> int:
    """Tokens of one beam if a request has the pool for itself; branching costs a block where the bound is short."""
    bound = num_blocks // beam_width * block_tokens
    return bound - block_tokens if beam_width > 1 and max_seq_len > bound else bound


def v1_post_check(
    windows: Sequence[int], num_blocks: int, *, block_tokens: int, beam_width: int, max_seq_len: int
) -> OneSequence:
    """V1's last look: windows above the bound are lowered and the longest sequence follows the largest window.

    Raises ``DoesNotFit`` where nothing is left.
    """
    bound = window_bound(num_blocks, block_tokens=block_tokens, beam_width=beam_width, max_seq_len=max_seq_len)
    if bound <= 0:
        raise DoesNotFit(
            f"the pool of {num_blocks:,} blocks holds no sequence with {beam_width:,} beams",
            need_bytes=beam_width * (2 if beam_width > 1 else 1),
            have_bytes=num_blocks,
            need=f"{beam_width * (2 if beam_width > 1 else 1):,} blocks",
            have=f"{num_blocks:,} blocks",
        )
    lowered = tuple(min(window, bound) for window in windows)
    is_lowered = any(window > bound for window in windows)
    return OneSequence(
        bound_tokens=bound,
        windows=lowered,
        max_seq_len=min(max_seq_len, max(lowered)) if is_lowered else max_seq_len,
    )


def v2_quota(knobs: ReferenceKnobs, cost: Cost, *, pool_bytes: int | None) -> int:
    """V2's quota: the bytes derived, at most what ``max_tokens`` need to stay usable by resumed requests.

    ``pool_bytes`` None or 0: no bytes are known. Raises ``InvalidSetting`` where neither is.
    """
    found = [pool_bytes] if pool_bytes else []
    if knobs.max_tokens:
        found.append(resume_quota(cost.at(knobs.max_tokens), resume_fraction=knobs.max_util_for_resume))
    if not found:
        what = "quota not set: neither bytes nor tokens are known"
        raise InvalidSetting("max_gpu_total_bytes", 0, what, remedy="set it, or max_tokens")
    return min(found)


def agreed_tokens(per_rank: Sequence[int | float]) -> int | float:
    """Tokens of every rank under V1: the fewest. ``math.inf`` only if all say so."""
    return min(per_rank, default=math.inf)


def agreed_window_blocks(per_rank: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Blocks of each window on every rank under V1: the fewest, window by window."""
    return {window: min(blocks[window] for blocks in per_rank) for window in per_rank[0]}


def agreed_cap(per_rank: Sequence[int | None]) -> int | None:
    """Ours: the admission cap of every rank, the lowest there is.

    The reference leaves the cap to each rank. Ranks that run one scheduler must agree on it, or their batches drift
    apart and a collective hangs.
    """
    return min((cap for cap in per_rank if cap is not None), default=None)
