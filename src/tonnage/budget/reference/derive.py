"""From the measured peak to the bytes of the pool, in the reference's order.

    peak += reserves on the peak's side
    B0 = floor((total - peak + temporary pool) * fraction)
    B1 = B0 - indexer logits (and whatever else is on the pool's side)
    B2 = floor(B1 - latent workspace)
    B3 = min(B2, what max_tokens costs (V1 only), max_gpu_total_bytes)

A reserve on the peak's side costs the pool the fraction of itself: f stays "f of what is really left". One on the
pool's side costs all of itself, and the slack keeps its bytes. Caps come last, so a cap below the reduced budget is
granted in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

from tonnage.budget.cost import Cost
from tonnage.budget.reference.knobs import Manager, ReferenceKnobs
from tonnage.budget.reference.measure import ProbeReading
from tonnage.budget.reference.mla import WorkspaceReserve, workspace_reserve
from tonnage.budget.reference.tokens import tokens_for_budget
from tonnage.errors import DoesNotFit
from tonnage.units import format_bytes

DEFAULT_FRACTION = Fraction(9, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """Every number on the way, in bytes. ``max_tokens`` is what the manager is then told: V1 always a number."""

    total_bytes: int
    peak_bytes: int
    peak_reserves_bytes: int
    temporary_pool_bytes: int
    fraction: Fraction
    after_fraction_bytes: int
    pool_reserves_bytes: int
    workspace: WorkspaceReserve
    after_workspace_bytes: int
    after_max_tokens_bytes: int
    pool_bytes: int
    max_tokens: int | None

    @property
    def left_bytes(self) -> int:
        """What the fraction is taken of."""
        return self.total_bytes - self.peak_bytes - self.peak_reserves_bytes + self.temporary_pool_bytes


def pool_budget(reading: ProbeReading, *, fraction: Fraction = DEFAULT_FRACTION, peak_reserves_bytes: int = 0) -> int:
    """B0. Raises ``DoesNotFit`` where the reference would go on with a negative budget."""
    peak = reading.peak_bytes + peak_reserves_bytes
    left = reading.total_bytes - peak + reading.temporary_pool_bytes
    if left < 0:
        _refuse_peak(reading, peak_reserves_bytes)
    return int(left * fraction)


def _refuse_peak(reading: ProbeReading, reserves_bytes: int) -> NoReturn:
    need = reading.peak_bytes + reserves_bytes - reading.temporary_pool_bytes
    beside = need - reading.torch_peak_bytes - reserves_bytes
    parts = {"weights and steps": reading.torch_peak_bytes, "beside torch": beside, "reserves": reserves_bytes}
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    raise DoesNotFit(
        f"the peak of {format_bytes(need)} is above the device's {format_bytes(reading.total_bytes)}",
        need_bytes=need,
        have_bytes=reading.total_bytes,
        need=f"{format_bytes(need)} ({need:,} bytes: {told})",
        have=f"{format_bytes(reading.total_bytes)} ({reading.total_bytes:,} bytes)",
    )


def derive(
    reading: ProbeReading,
    knobs: ReferenceKnobs,
    cost: Cost,
    *,
    peak_reserves_bytes: int = 0,
    pool_reserves_bytes: int = 0,
    workspace_bytes_per_token: int = 0,
    attended_tokens: int | None = None,
) -> Derivation:
    """The whole derivation. Raises ``DoesNotFit`` wherever what is left would be negative."""
    fraction = knobs.free_gpu_memory_fraction
    b0 = pool_budget(reading, fraction=fraction, peak_reserves_bytes=peak_reserves_bytes)
    b1 = _less(b0, pool_reserves_bytes, "what is deducted after the fraction")
    workspace = workspace_reserve(
        b1,
        bytes_per_token=cost.slope,
        workspace_bytes_per_token=workspace_bytes_per_token,
        attended_tokens=attended_tokens,
    )
    b2 = int(b1 - workspace.reserve_bytes)
    capped = max_tokens_cap(b2, cost, knobs)
    b3 = min(capped, knobs.max_gpu_total_bytes) if knobs.max_gpu_total_bytes else capped
    return Derivation(
        total_bytes=reading.total_bytes,
        peak_bytes=reading.peak_bytes,
        peak_reserves_bytes=peak_reserves_bytes,
        temporary_pool_bytes=reading.temporary_pool_bytes,
        fraction=fraction,
        after_fraction_bytes=b0,
        pool_reserves_bytes=pool_reserves_bytes,
        workspace=workspace,
        after_workspace_bytes=b2,
        after_max_tokens_bytes=capped,
        pool_bytes=b3,
        max_tokens=manager_max_tokens(capped, cost, knobs),
    )


def max_tokens_cap(budget_bytes: int, cost: Cost, knobs: ReferenceKnobs) -> int:
    """V1's hard cap, what ``max_tokens`` cost. V2 leaves the bytes alone and turns the number into a quota later."""
    if knobs.manager == "V2" or not knobs.max_tokens:
        return budget_bytes
    return min(budget_bytes, token_cap_bytes(knobs.max_tokens, cost))


def manager_max_tokens(budget_bytes: int, cost: Cost, knobs: ReferenceKnobs) -> int | None:
    """The number of tokens the manager is told. V1: what the bytes pay for, always; V2: the user's, or none."""
    return tokens_for_budget(cost, budget_bytes) if knobs.manager == "V1" else knobs.max_tokens or None


def token_cap_bytes(max_tokens: int, cost: Cost) -> int:
    """Bytes of ``max_tokens`` tokens by the affine cost."""
    return cost.slope * max_tokens + cost.intercept


def max_bytes_works(manager: Manager, *, is_variable_window: bool = False, is_hybrid: bool = False) -> bool:
    """Whether ``max_gpu_total_bytes`` limits the pool.

    V1 with uniform pools derives its tokens before that cap is applied and never reads it again. Ours limits the
    pool by bytes whatever its kind.
    """
    return manager == "V2" or is_variable_window or is_hybrid


def _less(budget_bytes: int, deducted_bytes: int, what: str) -> int:
    if deducted_bytes > budget_bytes:
        raise DoesNotFit(
            f"{what} takes more than the pool has",
            need_bytes=deducted_bytes,
            have_bytes=budget_bytes,
            need=f"{format_bytes(deducted_bytes)} ({deducted_bytes:,} bytes)",
            have=f"{format_bytes(budget_bytes)} ({budget_bytes:,} bytes)",
        )
    return budget_bytes - deducted_bytes
