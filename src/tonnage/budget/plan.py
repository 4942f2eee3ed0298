"""From what is allowed, measured and claimed to one partition of the device.

    B = floor(kv_fraction * (cap - every line that does not depend on the number of tokens))

B pays for the KV blocks and for whatever grows with their tokens (see ``split``). Caps may leave part of it. The
lines that come out are each >= 0 and sum exactly to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tonnage.budget.charges import Charges, charges, not_charged
from tonnage.budget.lines import partition
from tonnage.budget.money import Budget
from tonnage.budget.pool import POOL_CAPS, PoolPrice
from tonnage.budget.refusal import refuse_beside_pool, refuse_pool
from tonnage.budget.steps import derivation
from tonnage.budget.words import WHY_CAP, told
from tonnage.config import DEFAULT_KEEP_FREE_BYTES, Knobs, LimitKnobs, Limits
from tonnage.layout import KVLayout, blocks_per_sequence
from tonnage.terms import (
    Cap,
    Chip,
    Claim,
    HostPlan,
    KVPool,
    LineKind,
    Measured,
    MemoryPlan,
)
from tonnage.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that the arithmetic sees. ``limit_knobs`` says where each limit came from; it does not change numbers.

    page_bytes       arenas (weights, scratch, KV) are committed in whole pages of this size
    ranks_tokens     what the smallest rank's pool holds, ranks_attended what it can attend to in a step; None: the only
                     rank, or the others are not known yet
    """

    device_name: str
    model_name: str
    chip: Chip
    measured: Measured
    claims: tuple[Claim, ...]
    layout: KVLayout
    page_bytes: int
    knobs: Knobs
    limits: Limits
    limit_knobs: LimitKnobs = field(default_factory=LimitKnobs)
    fingerprint: str = ""
    warnings: tuple[str, ...] = ()
    ranks_tokens: int | None = None
    ranks_attended: int | None = None


def plan(inputs: PlanInputs) -> MemoryPlan:
    """The plan for one rank. Raises ``DoesNotFit`` (without remedies) where not one sequence of max_seq_len fits."""
    limits, knobs = inputs.limits, inputs.knobs
    charged = charges(
        inputs.measured,
        inputs.claims,
        limits=limits,
        chip=inputs.chip,
        attended_tokens=knobs.attended_tokens.value,
        reserve_worst=knobs.scratch.value == "reserve",
    )
    price = PoolPrice.of(
        inputs.layout, charged, limits=limits, page_bytes=inputs.page_bytes, cp=inputs.measured.rank.cp
    )
    page_losses = _page_losses(charged, inputs.page_bytes)
    budget = _budget(inputs, fixed=charged.fixed_bytes + sum(page_losses.values()) + price.fixed_bytes)
    sequence_blocks = blocks_per_sequence(limits.max_seq_len, price.block_tokens, extra_tokens=limits.extra_tokens)
    if budget.rest < 0:
        refuse_beside_pool(inputs.model_name, budget, charged, price, sequence_blocks, limits=limits)
    caps, num_blocks = _caps(budget, price, inputs=inputs)
    if num_blocks < sequence_blocks:
        refuse_pool(inputs.model_name, budget, charged, price, sequence_blocks, caps=caps, limits=limits)
    tokens = num_blocks * price.block_tokens
    return MemoryPlan(
        rank=inputs.measured.rank,
        device_name=inputs.device_name,
        device_bytes=budget.device,
        model_name=inputs.model_name,
        lines=partition(
            budget,
            charged,
            price,
            num_blocks=num_blocks,
            bar=_bar(budget, charged, price, num_blocks=num_blocks, caps=caps),
            page_losses=page_losses,
            caps=caps,
            measured=inputs.measured,
            keep_free=knobs.keep_free_bytes,
            limits=limits,
        ),
        steps=derivation(
            budget,
            charged,
            price,
            caps=caps,
            num_blocks=num_blocks,
            page_losses=page_losses,
            knobs=knobs,
            limits=limits,
        ),
        caps=caps,
        kv=KVPool(
            layout=inputs.layout,
            num_slabs=price.num_slabs(num_blocks),
            bytes=price.kv_bytes(num_blocks),
            tokens=tokens,
            guaranteed_tokens=tokens,
            reachable_tokens=tokens,
        ),
        host=HostPlan(),
        attended_cap=_attended_cap(charged, price, num_blocks, ranks_attended=inputs.ranks_attended),
        max_concurrency=num_blocks // sequence_blocks,
        knobs=knobs,
        limits=limits,
        limit_knobs=inputs.limit_knobs,
        fingerprint=inputs.fingerprint,
        warnings=inputs.warnings,
        not_charged=not_charged(inputs.claims, disabled=knobs.disabled_claims, limits=limits, chip=inputs.chip),
    )


def _page_losses(charged: Charges, page_bytes: int) -> dict[str, int]:
    """What whole pages add to the arenas of fixed size."""
    kinds = (LineKind.WEIGHTS, LineKind.SCRATCH)
    sizes = {kind.value: charged.line(kind).bytes for kind in kinds}
    return {name: round_up(size, page_bytes) - size for name, size in sizes.items()}


def _budget(inputs: PlanInputs, *, fixed: int) -> Budget:
    knobs = inputs.knobs
    return Budget(
        device=inputs.measured.device_bytes,
        foreign=inputs.measured.foreign_bytes.bytes,
        keep_free=knobs.keep_free_bytes.or_else(DEFAULT_KEEP_FREE_BYTES),
        total_bytes=knobs.total_bytes.value,
        fixed=fixed,
        fraction=knobs.kv_fraction.or_else(Fraction(1)),
    )


def _caps(budget: Budget, price: PoolPrice, *, inputs: PlanInputs) -> tuple[tuple[Cap, ...], int]:
    """Every limit on the pool in KV bytes of whole blocks, the smallest marked, and its number of blocks.

    Where several are equally small the first of the order below binds.
    """
    knobs, limits = inputs.knobs, inputs.limits
    found = [("budget", price.blocks_within(budget.room - budget.fixed), "what the device leaves")]
    if budget.total_bytes is not None:
        found.append(("total_bytes", price.blocks_within(budget.rest), told("total_bytes", knobs.total_bytes)))
    if budget.fraction < 1:
        found.append(("kv_fraction", price.blocks_within(budget.pool), told("kv_fraction", knobs.kv_fraction)))
    if knobs.kv_bytes.value is not None:
        found.append(("kv_bytes", price.kv_blocks_within(knobs.kv_bytes.value), told("kv_bytes", knobs.kv_bytes)))
    if knobs.kv_tokens.value is not None:
        found.append(("kv_tokens", knobs.kv_tokens.value // price.block_tokens, told("kv_tokens", knobs.kv_tokens)))
    if not limits.prefix_caching:
        # A pool that also caches prefixes has a use for every block; without, more than this is never touched.
        used = f"max_batch_size {limits.max_batch_size:,} x max_seq_len {limits.max_seq_len:,}"
        found.append(("limits", price.most_units, used))
    if inputs.ranks_tokens is not None:
        found.append(("ranks", inputs.ranks_tokens // price.block_tokens, "the smallest rank"))
    binding = min(range(len(found)), key=lambda i: found[i][1])
    caps = tuple(
        Cap(
            name=name,
            kv_bytes=price.kv_bytes(blocks),
            setting=setting,
            binding=i == binding,
            reason=WHY_CAP[name],
        )
        for i, (name, blocks, setting) in enumerate(found)
    )
    return caps, found[binding][1]


def _bar(
    budget: Budget, charged: Charges, price: PoolPrice, *, num_blocks: int, caps: Sequence[Cap]
) -> tuple[int, int]:
    """KV bytes with every other line at its high, and at its low; caps that are no matter of money still hold."""
    fixed_caps = [cap.kv_bytes for cap in caps if cap.name in POOL_CAPS]

    def at(fixed_change: int) -> int:
        rest = budget.rest - fixed_change
        blocks = price.blocks_within(int(rest * budget.fraction) if rest > 0 else 0)
        return min([price.kv_bytes(blocks), *fixed_caps])

    now = price.kv_bytes(num_blocks)
    return (
        min(now, at(sum(line.high - line.bytes for line in charged.fixed))),
        max(now, at(sum(line.low - line.bytes for line in charged.fixed))),
    )


def _attended_cap(charged: Charges, price: PoolPrice, num_blocks: int, *, ranks_attended: int | None) -> int | None:
    """Tokens one step may attend to so that every growing scratch holds, on every rank; None where nothing grows."""
    granted = price.granted_bytes(num_blocks)
    cp = price.block_tokens // price.local_tokens
    caps = [have // rated.bytes_per_token * cp for have, rated in zip(granted, charged.rated, strict=True)]
    caps += [cap for cap in (charged.paid_tokens, ranks_attended) if cap is not None]
    return min(caps, default=None)
