"""Scratch that grows with attended tokens (latent attention): what is set aside for it, and how a step obeys.

``w`` bytes for each attended token compete with ``k`` bytes of cache. The reserve is the worst case, or the share at
which pool and scratch hold equally many tokens, whichever is less; so the pool keeps max((B - wL)/k, B/(k+w)) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


def attended_worst_case(
    *,
    max_batch_size: int,
    max_num_tokens: int,
    max_seq_len: int,
    is_reused: bool,
    is_chunked: bool,
    is_chunk_bounded: bool,
    override_tokens: int | None = None,
    is_profile_needed: bool = False,
    is_profiled: bool = False,
) -> int | None:
    """The most tokens one step may attend to beyond what the probe saw; None: the probe saw the worst.

    The override cannot go below one full sequence, which could then never be served, nor above the worst case.
    ``is_profile_needed`` and ``is_profiled`` are about the long probe (see ``probe.wants_long_probe``).
    """
    if is_chunked:
        exceeds = not is_chunk_bounded or (is_profile_needed and not is_profiled)
    else:
        exceeds = is_reused
    if not exceeds:
        return None
    worst = min(max_batch_size, max_num_tokens) * max_seq_len
    return min(max(override_tokens, max_seq_len), worst) if override_tokens else worst


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceReserve:
    """``reserve_bytes`` is exact, so it may be a fraction of a byte; ``cap_tokens`` None: no cap, 0: a cap of none."""

    reserve_bytes: Fraction
    cap_tokens: int | None


def workspace_reserve(
    budget_bytes: int, *, bytes_per_token: int, workspace_bytes_per_token: int, attended_tokens: int | None
) -> WorkspaceReserve:
    """What is deducted from the pool, and how many tokens a step may then attend to.

    ``bytes_per_token`` is the slope of the cache alone; the reference leaves the intercept out here.
    """
    k, w = bytes_per_token, workspace_bytes_per_token
    if attended_tokens is None or min(budget_bytes, k, w, attended_tokens) <= 0:
        return WorkspaceReserve(reserve_bytes=Fraction(0), cap_tokens=None)
    reserve = min(Fraction(w * attended_tokens), Fraction(budget_bytes * w, k + w))
    return WorkspaceReserve(reserve_bytes=reserve, cap_tokens=int(reserve / w))


def without_if_profiled(reserve: WorkspaceReserve, *, is_profiled: bool) -> WorkspaceReserve:
    """No reserve and no cap where the long probe ran: the peak holds the scratch already."""
    return WorkspaceReserve(reserve_bytes=Fraction(0), cap_tokens=None) if is_profiled else reserve


def attended_length(
    *, position: int, is_first_chunk: bool, reusable_tokens: int, chunk_tokens: int, prompt_tokens: int
) -> int:
    """Tokens that a context request attends to in this step, itself included.

    Right for both managers: under V1 the reusable prefix is still an estimate, under V2 the position is past it.
    """
    cached = max(position, reusable_tokens if is_first_chunk else 0)
    return min(cached + chunk_tokens, prompt_tokens)


def requests_kept(lengths: Sequence[int], *, cap_tokens: int | None) -> int:
    """How many of the scheduled context requests stay, in order: the tail is cut at the first one too many.

    The first always stays, so that there is progress, also under a cap of 0.
    """
    if cap_tokens is None:
        return len(lengths)
    attended = 0
    for kept, length in enumerate(lengths):
        attended += length
        if kept and attended > cap_tokens:
            return kept
    return len(lengths)


def cap_warning(cap_tokens: int | None, *, max_seq_len: int) -> str | None:
    """What is said once at the start where the cap leaves room for hardly any batching."""
    if cap_tokens is None or cap_tokens >= max_seq_len:
        return None
    return (
        f"one step may attend to {cap_tokens:,} tokens, less than one sequence of max_seq_len = {max_seq_len:,}: "
        "prompts run one at a time; only a larger budget changes that"
    )
