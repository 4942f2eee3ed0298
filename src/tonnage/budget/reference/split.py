"""One budget for two caches: target and draft, or encoder and decoder. Both shares always sum to exactly the budget."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, TypeAlias

from tonnage.budget.cost import Cost
from tonnage.budget.reference.knobs import Manager
from tonnage.errors import DoesNotFit
from tonnage.units import format_bytes

Tier: TypeAlias = Literal["gpu", "host", "disk"]


def target_and_draft(budget_bytes: int, target: Cost, draft: Cost) -> tuple[int, int]:
    """Bytes of the target's and of the draft's pool: intercepts first, the rest in proportion to the slopes.

    A pair without slopes gives the rest to the target. Where one side costs nothing at all there is nothing to split,
    and the other gets everything. Raises ``DoesNotFit`` where the intercepts leave nothing for slopes.
    """
    if not (draft.slope or draft.intercept):
        return budget_bytes, 0
    if not (target.slope or target.intercept):
        return 0, budget_bytes
    fixed, slope = target.intercept + draft.intercept, target.slope + draft.slope
    variable = budget_bytes - fixed
    if variable < 0 or (variable == 0 and slope > 0):
        raise DoesNotFit(
            f"the fixed parts of target and draft, {format_bytes(fixed)} together, leave nothing for tokens",
            need_bytes=fixed + (1 if slope else 0),
            have_bytes=budget_bytes,
            need=f"more than {format_bytes(fixed)} ({fixed:,} bytes)",
            have=f"{format_bytes(budget_bytes)} ({budget_bytes:,} bytes)",
        )
    share = draft.intercept + (variable * draft.slope // slope if slope else 0)
    return budget_bytes - share, share


def tier_split(budget_bytes: int, target: Cost, draft: Cost, *, tier: Tier) -> tuple[int, int]:
    """The split of one tier. On host and disk intercepts do not count, since what is fixed stays on the device; and
    where nothing can be split there, the draft gets nothing."""
    if tier == "gpu":
        return target_and_draft(budget_bytes, target, draft)
    try:
        return target_and_draft(budget_bytes, Cost(slope=target.slope), Cost(slope=draft.slope))
    except DoesNotFit:
        return budget_bytes, 0


def is_split(
    tier: Tier,
    manager: Manager,
    *,
    is_probing: bool = False,
    has_separate_draft_cache: bool = False,
    has_variable_windows: bool = False,
    has_draft_engine: bool = False,
) -> bool:
    """Whether a tier's bytes are split between target and draft.

    has_separate_draft_cache  one model, the draft with a cache of its own
    has_variable_windows      target or draft, which makes V1 size itself from bytes
    has_draft_engine          the draft is an engine of its own: V2 leaves both the whole device budget
    V1 with uniform pools shares one number of tokens instead.
    """
    if is_probing:
        return False
    if tier != "gpu":
        return True
    return has_variable_windows if manager == "V1" else has_separate_draft_cache and not has_draft_engine


def has_draft_cache(*, attention_dp: bool, is_standalone_drafter: bool, sparse_algorithm: str | None, pp: int) -> bool:
    """Whether a one-model draft gets a cache of its own."""
    if attention_dp and not is_standalone_drafter:
        return False
    return not (sparse_algorithm == "deepseek_v4" and pp > 1)


def encoder_and_decoder(budget_bytes: int, share: Fraction) -> tuple[int, int]:
    """Bytes of the cross and of the self cache; done before the draft's split, for device and host alike."""
    cross = int(budget_bytes * share)
    return cross, budget_bytes - cross


def split_fraction(fraction: Fraction, share: Fraction) -> tuple[Fraction, Fraction]:
    """The memory fraction of the cross and of the self cache. ``max_tokens`` stays as it is for both."""
    cross = fraction * share
    return cross, fraction - cross


def split_by_requests(
    budget_bytes: int, target: Cost, draft: Cost, *, num_requests: int, typical_tokens: int
) -> tuple[int, int]:
    """Ours, not the reference's: the split where the costs say what each request pins and which quota it needs.

    Weighs both sides by what a request of ``typical_tokens`` takes, then holds the draft's share between one
    request's quota and that of all ``num_requests``, and within the budget.
    """
    _, plain = target_and_draft(budget_bytes, target, draft)
    weights = [cost.slope * typical_tokens + (cost.bytes_per_request or 0) for cost in (target, draft)]
    variable = budget_bytes - target.intercept - draft.intercept
    share = draft.intercept + variable * weights[1] // sum(weights) if sum(weights) else plain
    if draft.quota_per_request is not None:
        share = min(max(share, draft.quota_per_request), num_requests * draft.quota_per_request)
    share = min(max(share, 0), budget_bytes)
    return budget_bytes - share, share
