"""Hybrid models: attention layers beside recurrent ones, whose state does not grow with the text."""

from __future__ import annotations

from tonnage.budget.cost import Cost
from tonnage.budget.search import largest
from tonnage.errors import DoesNotFit
from tonnage.units import ceil_div, format_bytes


def state_bytes(
    *,
    head_dim: int,
    num_heads: int,
    num_groups: int,
    state_size: int,
    conv_kernel: int,
    conv_element_bytes: int = 2,
    ssm_element_bytes: int = 2,
    tp: int = 1,
) -> tuple[int, int]:
    """Bytes of one sequence in one recurrent layer: its window of inputs, and its matrix. Heads divide over ranks."""
    channels = (head_dim * num_heads + 2 * num_groups * state_size) // tp
    conv = channels * (conv_kernel - 1) * conv_element_bytes
    return conv, num_heads // tp * head_dim * state_size * ssm_element_bytes


def v1_static_cost(*, attention_slope: int, slot_bytes: int, num_sequences: int, interval_tokens: int = 0) -> Cost:
    """What V1's budget counts with.

    Its heuristic: once snapshots cost anything by the token, the slots of running sequences are dropped, as if
    snapshots dominated. The runtime inverse keeps them, so more tokens are promised than built.
    """
    snapshots = slot_bytes // interval_tokens if interval_tokens else 0
    intercept = 0 if snapshots else num_sequences * slot_bytes
    return Cost(slope=attention_slope + snapshots, intercept=intercept)


def v1_runtime_cost(*, attention_slope: int, slot_bytes: int, num_sequences: int, interval_tokens: int = 0) -> Cost:
    """What V1 builds with: the slots of running sequences always count. Ours counts with this one."""
    snapshots = slot_bytes // interval_tokens if interval_tokens else 0
    return Cost(slope=attention_slope + snapshots, intercept=num_sequences * slot_bytes)


def v1_state_slots(
    tokens: int, *, num_sequences: int, interval_tokens: int = 0, max_draft_tokens: int = 0, is_reused: bool = False
) -> int:
    """State slots that V1 builds beside ``tokens`` of attention cache: sequences, one spare, drafts, snapshots."""
    snapshots = tokens // interval_tokens if is_reused and interval_tokens else 0
    return num_sequences + 1 + max_draft_tokens + snapshots


def v2_cost(
    *,
    attention_slope: int,
    slot_bytes: int,
    num_sequences: int,
    block_tokens: int,
    interval_tokens: int = 0,
    num_fixed_snapshots: int = 0,
    num_dummy_slots: int = 1,
) -> Cost:
    """V2's cost: slots of sequences, of dummies (one pads captured steps) and of fixed snapshots.

    As soon as any snapshot is possible each sequence may also leave one partly filled attention page.
    """
    has_snapshots = bool(interval_tokens or num_fixed_snapshots)
    slots = num_sequences * (1 + num_fixed_snapshots) + num_dummy_slots
    partial = num_sequences * attention_slope * block_tokens if has_snapshots else 0
    per_token = ceil_div(slot_bytes, interval_tokens) if interval_tokens else 0
    return Cost(slope=attention_slope + per_token, intercept=slots * slot_bytes + partial)


def v2_tokens(
    quota_bytes: int,
    cost: Cost,
    *,
    slot_bytes: int,
    num_sequences: int,
    num_dummy_slots: int,
    page_bytes: int,
) -> int:
    """V2's inverse, by doubling and halving. Raises ``DoesNotFit`` below the slots and one page of attention."""
    least = max(cost.at(0), (num_sequences + num_dummy_slots) * slot_bytes + page_bytes)
    if quota_bytes < least:
        raise DoesNotFit(
            "the states of all sequences and one page of attention do not fit in the quota",
            need_bytes=least,
            have_bytes=quota_bytes,
            need=f"{format_bytes(least)} ({least:,} bytes)",
            have=f"{format_bytes(quota_bytes)} ({quota_bytes:,} bytes)",
        )
    high = 1
    while cost.at(high) <= quota_bytes:
        high *= 2
    return largest(lambda tokens: cost.at(tokens) <= quota_bytes, low=0, high=high) or 0


def default_avg_seq_len(avg_seq_len: int | None, *, max_seq_len: int) -> tuple[int, str | None]:
    """The length V2 shapes a hybrid's pools by, and the warning where it had to guess."""
    if avg_seq_len is not None:
        return avg_seq_len, None
    return max_seq_len // 2, "avg_seq_len is not set; half of max_seq_len shapes the pools of this hybrid model"
