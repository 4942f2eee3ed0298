"""The reference's pool over a layout of ours: what a token costs by its rules, and the tokens that a budget holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
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

_GROWING = (KVGroupKind.FULL, KVGroupKind.LATENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A layout of ours as the reference prices it. Each of ``pp`` pipeline stages keeps a batch of states."""

    layout: KVLayout
    limits: Limits
    pp: int = 1

    def budget_cost(self, manager: Manager) -> Cost:
        """What the derivation counts with. V1 takes windows for full attention, V2 puts them into the intercept."""
        if manager == "V1":
            slope = self._slope(*_GROWING, KVGroupKind.WINDOW)
            return Cost(slope=slope, intercept=self.state_bytes("V1"), name="V1")
        fixed = self.limits.max_batch_size * self._resident_bytes()
        return Cost(slope=self._slope(*_GROWING), intercept=fixed + self.state_bytes("V2"), name="V2")

    def quota_cost(self) -> Cost:
        """V2's own cost, windows as bounded segments; states beside it."""
        cost = quota_cost(
            full=self._slope(*_GROWING),
            prefill=self._slope(KVGroupKind.WINDOW),
            fixed=self._resident_bytes(),
            num_sequences=self.limits.max_batch_size,
            step_tokens=self.limits.max_num_tokens,
        )
        return cost + Cost(slope=0, intercept=self.state_bytes("V2"))

    def state_bytes(self, manager: Manager) -> int:
        """Slots of recurrent states; V2's budget knows of the one that pads captured steps, V1's does not."""
        slots = self.limits.max_batch_size * self.pp + (SPARE_STATES if manager == "V2" else 0)
        return slots * sum(group.block_bytes for group in self._of(KVGroupKind.STATE))

    def window_bytes(self) -> dict[int, int]:
        """V1's pools: bytes a token of all layers with one window; full attention has the longest sequence's."""
        longest, sizes = self.limits.max_seq_len, dict[int, Fraction]()
        for group in self._of(*_GROWING, KVGroupKind.WINDOW):
            window = min(group.window or longest, longest)
            sizes[window] = sizes.get(window, Fraction(0)) + Fraction(group.block_bytes, group.block_tokens)
        return {window: math.ceil(size) for window, size in sizes.items()}

    def first_bytes(self, manager: Manager) -> int:
        """What the manager pays before the first token."""
        return self.state_bytes("V1") if manager == "V1" else self.quota_cost().intercept

    def needed_bytes(self, manager: Manager, tokens: int) -> int:
        """The pool in which one sequence of ``tokens`` tokens fits, by the manager's rules; equal shares for V1."""
        if manager == "V2":
            return self.quota_cost().at(tokens)
        sizes = self.window_bytes()
        if not sizes:
            return self.state_bytes("V1")
        longest = max(sizes)
        held = tokens if self.has(*_GROWING) else min(tokens, longest)
        return self.state_bytes("V1") + len(sizes) * sizes[longest] * held

    @property
    def is_variable_window(self) -> bool:
        """Whether V1 makes a pool for each window; one window for all layers is a uniform pool to it."""
        return len(self.window_bytes()) > 1

    def has(self, *kinds: KVGroupKind) -> bool:
        return any(True for _ in self._of(*kinds))

    def _of(self, *kinds: KVGroupKind) -> Iterator[KVGroup]:
        return (group for group in self.layout.groups if group.kind in kinds)

    def _slope(self, *kinds: KVGroupKind) -> int:
        each = [Fraction(group.block_bytes, group.block_tokens) for group in self._of(*kinds)]
        return math.ceil(sum(each, start=Fraction(0)))

    def _resident_bytes(self) -> int:
        """Whole pages of the windows of one sequence."""
        windows = self._of(KVGroupKind.WINDOW)
        return sum(ceil_div(group.window or 0, group.block_tokens) * group.block_bytes for group in windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """``pool_bytes`` the manager may use, and the local ``tokens`` it makes of them (math.inf: no number is too many).

    ``limit`` says what held the tokens below the bytes, and is empty where nothing did.
    """

    pool_bytes: int
    tokens: int | float
    limit: str = ""


def sized(pool_bytes: int, max_tokens: int | None, knobs: ReferenceKnobs, cache: Cache, *, free_bytes: int) -> Sized:
    """The bytes of the derivation as tokens, by the manager's own rules.

    ``max_tokens`` is what the derivation told V1, None where there was none; ``free_bytes`` are free when the final
    pool is built.
    """
    if knobs.manager == "V2":
        cost = cache.quota_cost()
        held = v2_quota(knobs, cost, pool_bytes=pool_bytes)
        return Sized(pool_bytes=held, tokens=cost.units_within(held))
    if cache.is_variable_window:
        return _equal_shares(pool_bytes, knobs, cache)
    runtime = cache.budget_cost("V1")
    if runtime.intercept and not runtime.slope:
        # States alone: its own rule gives 0 tokens where one costs nothing, and no such model would start.
        return Sized(pool_bytes=pool_bytes, tokens=math.inf)
    if runtime.intercept:
        tokens, _ = v1_hybrid_blocks(
            pool_bytes, runtime, num_sequences=cache.limits.max_batch_size * cache.pp, block_tokens=1
        )
        return Sized(pool_bytes=pool_bytes, tokens=_passing(tokens, cache))
    fraction = knobs.free_gpu_memory_fraction
    tokens = v1_uniform_tokens(
        max_tokens, free_bytes=free_bytes, fraction=fraction, runtime_bytes_per_token=runtime.slope
    )
    limit = "second fraction" if max_tokens is not None and tokens < max_tokens else ""
    # Uniform pools are built from the tokens alone: max_gpu_total_bytes does not reach them.
    return Sized(pool_bytes=tokens * runtime.slope, tokens=_passing(tokens, cache), limit=limit)


def largest_pool(price: PoolPrice, found: Sized) -> int:
    """Units of our own slabs that the manager's bytes and tokens both allow. Its tokens are local ones: under context
    parallelism a whole page here stands for one on each rank."""
    units = price.kv_blocks_within(found.pool_bytes)
    return units if found.tokens == math.inf else min(units, int(found.tokens) // price.local_tokens)


def _passing(tokens: int, cache: Cache) -> int | float:
    """Under one window for all layers they are tokens in the pool at once, and texts of any length pass through."""
    has_window_alone = cache.has(KVGroupKind.WINDOW) and not cache.has(*_GROWING)
    return math.inf if has_window_alone else tokens


def _equal_shares(pool_bytes: int, knobs: ReferenceKnobs, cache: Cache) -> Sized:
    """V1's variable windows: the tokens of the longest, from its share of the bytes."""
    left = max(0, pool_bytes - cache.state_bytes("V1"))
    shares = knobs.environment.window_shares
    blocks = window_blocks(cache.window_bytes(), pool_bytes=left, block_tokens=1, shares=shares)
    return Sized(pool_bytes=pool_bytes, tokens=blocks[max(blocks)], limit="equal shares of windows")
