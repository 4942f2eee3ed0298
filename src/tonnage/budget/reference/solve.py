"""One derivation of the reference over one set of measurements, from the inputs of any plan to a number of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from tonnage.budget.charges import Charges, charges
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.pool import PoolPrice
from tonnage.budget.reference.derive import Derivation, derive, max_bytes_works
from tonnage.budget.reference.estimation import Estimation, Method, estimation, helix_quota, self_sized_bytes
from tonnage.budget.reference.knobs import ReferenceKnobs, cross_fraction
from tonnage.budget.reference.measure import ProbeReading, unprofiled_reading
from tonnage.budget.reference.mla import WorkspaceReserve, attended_worst_case
from tonnage.budget.reference.pool import Cache, Sized, largest_pool, sized
from tonnage.budget.reference.probe import LONG_PROBE_SM, long_mla_probe
from tonnage.budget.reference.sides import Sides, sides, uncharged
from tonnage.budget.reference.split import encoder_and_decoder
from tonnage.budget.reference.tokens import tokens_for_budget
from tonnage.errors import DoesNotFit
from tonnage.layout import KVGroupKind, blocks_per_sequence
from tonnage.terms import Measured
from tonnage.units import ceil_div, format_bytes

#: Chunks that the reference's chunked latent path expands at once.
CHUNK_BUFFERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The question: a plan's inputs, the reference's knobs, and what its attention backend answers (see ``plan``)."""

    inputs: PlanInputs
    knobs: ReferenceKnobs
    backend: str = "TRTLLM"
    is_chunk_bounded: bool = True

    @property
    def cache(self) -> Cache:
        return Cache(layout=self.inputs.layout, limits=self.inputs.limits, pp=self.inputs.measured.rank.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """Every number of the answer. ``units`` are blocks of ``price.block_tokens`` tokens; ``cross_bytes`` of the pool
    are the encoder's; ``obeys_byte_cap``: whether max_gpu_total_bytes reaches the manager."""

    how: Estimation
    sides: Sides
    base: Charges
    derived: Derivation
    price: PoolPrice
    found: Sized
    units: int
    tokens: int
    cross_bytes: int
    obeys_byte_cap: bool

    @property
    def workspace_bytes(self) -> int:
        """Whole bytes that the latent workspace takes from the pool."""
        derived = self.derived
        return derived.after_fraction_bytes - derived.pool_reserves_bytes - derived.after_workspace_bytes

    @property
    def pool_bytes(self) -> int:
        return self.price.kv_bytes(self.units)


def solve(asked: Asked, measured: Measured) -> Solved:
    """Raises ``DoesNotFit`` for a negative budget, ``InvalidSetting`` for knobs that the reference refuses."""
    inputs, knobs = asked.inputs, asked.knobs
    how = estimation(
        knobs,
        is_encoder_decoder=asked.cache.has(KVGroupKind.CROSS),
        context_parallel="helix" if measured.rank.cp > 1 else "none",
        backend=asked.backend,
    )
    has_step = how.method not in (Method.HELIX_QUOTA, Method.NO_CAPACITY_STEP)
    attended = _attended_tokens(asked, is_profiled=how.method == Method.PROBE) if has_step else None
    claimed = sides(inputs.claims, limits=inputs.limits, chip=inputs.chip, is_unseen=attended is not None)
    free = measured.device_bytes - used_bytes(measured)
    if not has_step:
        claimed = uncharged(claimed)
        derived = _self_sized(how, knobs, measured, free)
        knobs = replace(knobs, max_tokens=None) if how.method == Method.HELIX_QUOTA else knobs
    else:
        derived = _derived(asked, measured, claimed, attended, is_profiled=how.method == Method.PROBE)
    base = charges(measured, (), limits=inputs.limits, chip=inputs.chip)
    price = PoolPrice.of(inputs.layout, base, limits=inputs.limits, page_bytes=inputs.page_bytes, cp=measured.rank.cp)
    cross = _cross_bytes(asked, price, derived.pool_bytes)
    found = _sized(asked, knobs, derived, price, cross_bytes=cross, free_bytes=free)
    units = min(largest_pool(price, found), ranks_units(inputs, price))
    tokens = units * price.block_tokens
    return Solved(
        how=how,
        sides=claimed,
        base=base,
        derived=derived,
        price=price,
        found=found,
        units=int(units),
        tokens=int(tokens if inputs.ranks_tokens is None else min(tokens, inputs.ranks_tokens)),
        cross_bytes=cross,
        obeys_byte_cap=max_bytes_works(
            knobs.manager,
            is_variable_window=asked.cache.is_variable_window,
            is_hybrid=asked.cache.has(KVGroupKind.STATE),
        ),
    )


def ranks_units(inputs: PlanInputs, price: PoolPrice) -> int | float:
    """Units for what the smallest rank holds, rounded up: stages may differ in the tokens of a unit, and each has room.

    Infinite where there is one rank, or the others are not known yet.
    """
    if inputs.ranks_tokens is None:
        return math.inf
    limits = inputs.limits
    sequence = blocks_per_sequence(limits.max_seq_len, price.block_tokens, extra_tokens=limits.extra_tokens)
    return max(ceil_div(inputs.ranks_tokens, price.block_tokens), (inputs.ranks_sequences or 0) * sequence)


def reading_of(measured: Measured) -> ProbeReading:
    """What the reference would have read: weights and the largest stage are torch's peak."""
    stage = max((stage.allocated.bytes for stage in measured.stages), default=0)
    return ProbeReading(
        total_bytes=measured.device_bytes,
        torch_peak_bytes=measured.weights.bytes + stage,
        torch_used_bytes=measured.weights.bytes,
        device_used_bytes=used_bytes(measured) + measured.trial_pool_bytes,
        temporary_pool_bytes=measured.trial_pool_bytes,
    )


def used_bytes(measured: Measured) -> int:
    """All that is on the device before any step and beside any pool, other processes included."""
    graphs = measured.graphs.bytes if measured.graphs else 0
    beside = measured.context.bytes + measured.libraries.bytes + measured.foreign_bytes.bytes
    return measured.weights.bytes + beside + graphs


def _derived(
    asked: Asked, measured: Measured, claimed: Sides, attended_tokens: int | None, *, is_profiled: bool
) -> Derivation:
    """Probed or not, reserves and caps are the same."""
    reading = reading_of(measured)
    if not is_profiled:
        reading = unprofiled_reading(total_bytes=measured.device_bytes, used_bytes=used_bytes(measured))
    return derive(
        reading,
        asked.knobs,
        asked.cache.budget_cost(asked.knobs.manager),
        peak_reserves_bytes=claimed.peak_bytes,
        pool_reserves_bytes=claimed.pool_bytes,
        workspace_bytes_per_token=claimed.workspace_rate,
        attended_tokens=attended_tokens,
    )


def _attended_tokens(asked: Asked, *, is_profiled: bool) -> int | None:
    """What a step may attend to beyond the probe. The long probe runs on newer cards, where its prompt fits."""
    limits, knobs = asked.inputs.limits, asked.knobs
    length = long_mla_probe(
        chunk_tokens=limits.max_num_tokens,
        buffer_batch_size=CHUNK_BUFFERS,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
    )
    is_needed = knobs.enable_chunked_prefill and asked.inputs.chip.sm >= LONG_PROBE_SM
    return attended_worst_case(
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        is_reused=knobs.enable_block_reuse,
        is_chunked=knobs.enable_chunked_prefill,
        is_chunk_bounded=asked.is_chunk_bounded,
        override_tokens=knobs.fp8_context_mla_kv_len_cap,
        is_profile_needed=is_needed,
        is_profiled=is_needed and is_profiled and length is not None,
    )


def _self_sized(how: Estimation, knobs: ReferenceKnobs, measured: Measured, free_bytes: int) -> Derivation:
    """Where nothing is derived: what the manager takes by itself, written down like a derivation.

    A quota that was given is a cap on what is free, else the fraction of that is taken.
    """
    used = measured.device_bytes - free_bytes
    if free_bytes < 0:
        raise DoesNotFit("the device is full before any pool", need_bytes=used, have_bytes=measured.device_bytes)
    take = helix_quota if how.method == Method.HELIX_QUOTA else self_sized_bytes
    pool = min(take(knobs, free_bytes=free_bytes), free_bytes)
    is_given = knobs.manager == "V2" and knobs.max_gpu_total_bytes > 0
    budget = free_bytes if is_given else pool
    return Derivation(
        total_bytes=measured.device_bytes,
        peak_bytes=used,
        peak_reserves_bytes=0,
        temporary_pool_bytes=0,
        fraction=Fraction(1) if is_given else knobs.free_gpu_memory_fraction,
        after_fraction_bytes=budget,
        pool_reserves_bytes=0,
        workspace=WorkspaceReserve(reserve_bytes=Fraction(0), cap_tokens=None),
        after_workspace_bytes=budget,
        after_max_tokens_bytes=budget,
        pool_bytes=pool,
        max_tokens=knobs.max_tokens or None,
    )


def _cross_bytes(asked: Asked, price: PoolPrice, pool_bytes: int) -> int:
    """The encoder's share of the pool. Raises ``DoesNotFit`` where it does not hold every sequence's encoder tokens."""
    share = cross_fraction(asked.knobs, is_encoder_decoder=asked.cache.has(KVGroupKind.CROSS))
    if share is None:
        return 0
    cross, _ = encoder_and_decoder(pool_bytes, share)
    need = _cross_slabs(price) * price.slab_bytes
    if need > cross:
        raise DoesNotFit(
            f"cross_kv_cache_fraction {share} leaves the encoder's cache too small",
            need_bytes=need,
            have_bytes=cross,
            need=f"{format_bytes(need)} ({need:,} bytes)",
            have=f"{format_bytes(cross)} ({cross:,} bytes)",
        )
    return cross


def _sized(
    asked: Asked,
    knobs: ReferenceKnobs,
    derived: Derivation,
    price: PoolPrice,
    *,
    cross_bytes: int,
    free_bytes: int,
) -> Sized:
    """The text's own pool; the encoder's slabs are added to its bytes, since ours lie in the same array."""
    text_bytes = derived.pool_bytes - cross_bytes
    told = derived.max_tokens if knobs.manager == "V1" else None
    if told is not None and cross_bytes:
        told = min(told, tokens_for_budget(asked.cache.budget_cost("V1"), text_bytes))
    found = sized(text_bytes, told, knobs, asked.cache, free_bytes=free_bytes)
    return replace(
        found,
        pool_bytes=found.pool_bytes + _cross_slabs(price) * price.slab_bytes,
        limit="cross_kv_cache_fraction" if cross_bytes else found.limit,
    )


def _cross_slabs(price: PoolPrice) -> int:
    return sum(group.blocks(0) for group in price.groups if group.kind == KVGroupKind.CROSS)
