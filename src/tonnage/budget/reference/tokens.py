"""Bytes to tokens and back, as the reference does it: floors, a share for resumed requests, local pages of helix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from tonnage.budget.cost import Cost
from tonnage.units import ceil_div, round_down

#: Share of its quota that the page manager lets a resumed request fill.
DEFAULT_RESUME_FRACTION = Fraction(95, 100)


def tokens_for_budget(cost: Cost, budget_bytes: int) -> int:
    """The reference's inverse of an affine cost, never negative.

    Its quirk: a cost without a slope buys no token at all. Ours (``Cost.units_within``) says infinity there, since
    any number of tokens costs the same.
    """
    if cost.slope <= 0:
        return 0
    return max((budget_bytes - cost.intercept) // cost.slope, 0)


def usable_tokens(tokens: int, *, block_tokens: int) -> tuple[int, int]:
    """Whole blocks, and the tokens they hold."""
    blocks = tokens // block_tokens
    return blocks, blocks * block_tokens


def resume_quota(pool_bytes: int, *, resume_fraction: Fraction = DEFAULT_RESUME_FRACTION) -> int:
    """V2's quota so that ``pool_bytes`` stay usable by resumed requests, rounded up."""
    return ceil(pool_bytes / resume_fraction)


def resumable_tokens(
    cost: Cost, quota_bytes: int, *, resume_fraction: Fraction = DEFAULT_RESUME_FRACTION
) -> int | float:
    """Tokens that resumed requests may fill of V2's quota; ``math.inf`` where only windows and states cost."""
    return cost.units_within(int(quota_bytes * resume_fraction))


def agreed_quotas(
    costs: Sequence[Cost], quotas: Sequence[int], *, resume_fraction: Fraction = DEFAULT_RESUME_FRACTION
) -> list[int]:
    """V2's quota of each rank once all promise the same number of tokens.

    Tokens are compared, not bytes: stages of a pipeline hold different layers. The way there and back is not the
    identity where windows dominate, so no rank's quota may grow by it. Where tokens are free nothing is cut.
    """
    promised = min(
        resumable_tokens(cost, quota, resume_fraction=resume_fraction)
        for cost, quota in zip(costs, quotas, strict=True)
    )
    if promised == math.inf:
        return list(quotas)
    return [
        min(quota, resume_quota(cost.at(int(promised)), resume_fraction=resume_fraction))
        for cost, quota in zip(costs, quotas, strict=True)
    ]


def helix_tokens(budget_bytes: int, *, bytes_per_local_token: int, block_tokens: int, cp: int) -> int:
    """Tokens of the whole sequence under helix: whole pages of this rank, each standing for ``cp`` of them."""
    return round_down(budget_bytes // bytes_per_local_token, block_tokens) * cp


def helix_bytes(tokens: int, *, bytes_per_local_token: int, block_tokens: int, cp: int) -> int:
    """Bytes of this rank for tokens of the whole sequence, in whole pages on every rank."""
    return ceil_div(tokens, block_tokens * cp) * block_tokens * bytes_per_local_token
