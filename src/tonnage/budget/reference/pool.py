"""The reference's pool over a layout of ours: what a token costs by its rules, and the tokens that a budget holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tonnage.budget.cost import Cost
from tonnage.budget.pool import SPARE_STATES, PoolPrice
from tonnage.budget.reference.knobs import Manager, ReferenceKnobs
from tonnage.budget.reference.pages import v1_hybrid_blocks, v1_uniform_tokens, v2_quota
from tonnage.budget.reference.windows import quota_cost, window_blocks
from tonnage.config import Limits
from tonnage.layout import KVGroup, KVGroupKind, KVLayout
from tonnage.units import ceil_div


def budget_cost(layout: KVLayout, limits: Limits, *, manager: Manager) -> Cost:
    """What the derivation counts with. V1 takes windows for full attention; V2 puts them into the intercept."""
    growing = (KVGroupKind.FULL, KVGroupKind.LATENT)
    kinds = (*growing, KVGroupKind.WINDOW) if manager == "V1" else growing
    fixed = _states(layout, limits, manager)
    if manager == "V2":
        fixed += limits.max_batch_size * _resident_bytes(layout)
    return Cost(slope=_slope(layout, kinds), intercept=fixed, name=manager)


def quota(layout: KVLayout, limits: Limits) -> Cost:
    """V2's own cost, windows as bounded segments; states beside it."""
    cost = quota_cost(
        full=_slope(layout, (KVGroupKind.FULL, KVGroupKind.LATENT)),
        prefill=_slope(layout, (KVGroupKind.WINDOW,)),
        fixed=_resident_bytes(layout),
        num_sequences=limits.max_batch_size,
        step_tokens=limits.max_num_tokens,
    )
    return cost + Cost(slope=0, intercept=_states(layout, limits, "V2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """``pool_bytes`` the manager may use, and the local ``tokens`` it makes of them (math.inf: no number is too many).

    ``limit`` says what held the tokens below the bytes, and is empty where nothing did.
    """

    pool_bytes: int
    tokens: int | float
    limit: str = ""


def sized(
    pool_bytes: int, max_tokens: int | None, knobs: ReferenceKnobs, layout: KVLayout, limits: Limits, *, free_bytes: int
) -> Sized:
    """The bytes of the derivation as tokens, by the manager's own rules.

    ``max_tokens`` is what the derivation told V1, None where there was none; ``free_bytes`` are free when the final
    pool is built.
    """
    if knobs.manager == "V2":
        cost = quota(layout, limits)
        held = v2_quota(knobs, cost, pool_bytes=pool_bytes)
        return Sized(pool_bytes=held, tokens=cost.units_within(held))
    if any(group.kind == KVGroupKind.WINDOW for group in layout.groups):
        return _equal_shares(pool_bytes, layout, limits, knobs)
    runtime = budget_cost(layout, limits, manager="V1")
    if runtime.intercept:
        blocks, _ = v1_hybrid_blocks(pool_bytes, runtime, num_sequences=limits.max_batch_size, block_tokens=1)
        return Sized(pool_bytes=pool_bytes, tokens=blocks)
    fraction = knobs.free_gpu_memory_fraction
    tokens = v1_uniform_tokens(
        max_tokens, free_bytes=free_bytes, fraction=fraction, runtime_bytes_per_token=runtime.slope
    )
    limit = "second fraction" if max_tokens is not None and tokens < max_tokens else ""
    # Uniform pools are built from the tokens alone: max_gpu_total_bytes does not reach them.
    return Sized(pool_bytes=tokens * runtime.slope, tokens=tokens, limit=limit)


def largest_pool(price: PoolPrice, found: Sized) -> int:
    """Units of our own slabs that the manager's bytes and tokens both allow. Its tokens are local ones: under context
    parallelism a whole page here stands for one on each rank."""
    units = price.kv_blocks_within(found.pool_bytes)
    return units if found.tokens == math.inf else min(units, int(found.tokens) // price.local_tokens)


def _equal_shares(pool_bytes: int, layout: KVLayout, limits: Limits, knobs: ReferenceKnobs) -> Sized:
    """V1's variable windows: the tokens of the longest, from its share of the bytes."""
    sizes: dict[int, Fraction] = {}
    for group in layout.groups:
        if group.kind in (KVGroupKind.FULL, KVGroupKind.LATENT, KVGroupKind.WINDOW):
            window = min(group.window or limits.max_seq_len, limits.max_seq_len)
            sizes[window] = sizes.get(window, Fraction(0)) + Fraction(group.block_bytes, group.block_tokens)
    layer_bytes = {window: math.ceil(size) for window, size in sizes.items()}
    left = pool_bytes - _states(layout, limits, "V1")
    blocks = window_blocks(layer_bytes, pool_bytes=max(0, left), block_tokens=1, shares=knobs.environment.window_shares)
    return Sized(pool_bytes=pool_bytes, tokens=blocks[max(blocks)], limit="equal shares of windows")


def _slope(layout: KVLayout, kinds: tuple[KVGroupKind, ...]) -> int:
    each = [Fraction(group.block_bytes, group.block_tokens) for group in layout.groups if group.kind in kinds]
    return math.ceil(sum(each, start=Fraction(0)))


def _resident_bytes(layout: KVLayout) -> int:
    """Whole pages of the windows of one sequence."""
    return sum(_window_blocks(group) * group.block_bytes for group in layout.groups if group.kind == KVGroupKind.WINDOW)


def _window_blocks(group: KVGroup) -> int:
    return ceil_div(group.window or 0, group.block_tokens)


def _states(layout: KVLayout, limits: Limits, manager: Manager) -> int:
    """Slots of recurrent states; V2's budget knows of the one that pads captured steps, V1's does not."""
    slots = limits.max_batch_size + (SPARE_STATES if manager == "V2" else 0)
    return slots * sum(group.block_bytes for group in layout.groups if group.kind == KVGroupKind.STATE)
