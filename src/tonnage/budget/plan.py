"""From what is allowed, measured and claimed to one partition of the device.

    B = floor(kv_fraction * (cap - every line that does not depend on the number of tokens))

B pays for the KV blocks and for whatever grows with their tokens (see ``split``). Caps may leave part of it. The
lines that come out are each >= 0 and sum exactly to the device.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.budget.charges import not_charged
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.lines import partition
from tonnage.budget.pool import POOL_CAPS
from tonnage.budget.solve import Solved, solve
from tonnage.budget.steps import derivation
from tonnage.terms import HostPlan, KVPool, MemoryPlan

__all__ = ["PlanInputs", "plan"]


def plan(inputs: PlanInputs) -> MemoryPlan:
    """The plan for one rank. Raises ``DoesNotFit`` (without remedies) where not one sequence of max_seq_len fits."""
    solved = solve(inputs)
    limits, knobs = inputs.limits, inputs.knobs
    return MemoryPlan(
        rank=inputs.measured.rank,
        device_name=inputs.device_name,
        device_bytes=solved.budget.device,
        model_name=inputs.model_name,
        lines=partition(solved, bar=_bar(solved)),
        steps=derivation(solved),
        caps=solved.caps,
        kv=_pool(solved),
        host=HostPlan(kv_bytes=knobs.host_kv_bytes.or_else(0)),
        attended_cap=_attended_cap(solved),
        max_concurrency=solved.num_sequences,
        knobs=knobs,
        limits=limits,
        limit_knobs=inputs.limit_knobs,
        fingerprint=inputs.fingerprint,
        warnings=inputs.warnings,
        stages=inputs.measured.stages,
        not_charged=not_charged(inputs.claims, disabled=knobs.disabled_claims, limits=limits, chip=inputs.chip),
    )


def _pool(solved: Solved) -> KVPool:
    return KVPool(
        layout=solved.inputs.layout,
        num_slabs=solved.price.num_slabs(solved.num_blocks),
        bytes=solved.price.kv_bytes(solved.num_blocks),
        tokens=solved.tokens,
        guaranteed_tokens=solved.tokens,
        reachable_tokens=solved.tokens,
    )


def _bar(solved: Solved) -> tuple[int, int]:
    """KV bytes with every other line at its high, and at its low; caps that are no matter of money still hold."""
    budget, charged, price = solved.budget, solved.charged, solved.price
    foreign = solved.inputs.measured.foreign_bytes
    fixed_caps = [cap.kv_bytes for cap in solved.caps if cap.name in POOL_CAPS]

    def at(fixed_change: int, others: int) -> int:
        rest = replace(budget, foreign=others).rest - fixed_change
        blocks = price.blocks_within(int(rest * budget.fraction) if rest > 0 else 0)
        return min([price.kv_bytes(blocks), *fixed_caps])

    now = price.kv_bytes(solved.num_blocks)
    return (
        min(now, at(sum(line.high - line.bytes for line in charged.fixed), foreign.high)),
        max(now, at(sum(line.low - line.bytes for line in charged.fixed), foreign.low)),
    )


def _attended_cap(solved: Solved) -> int | None:
    """Tokens one step may attend to so that every growing scratch holds, on every rank; None where nothing grows."""
    price, charged = solved.price, solved.charged
    granted = price.granted_bytes(solved.num_blocks)
    cp = price.block_tokens // price.local_tokens
    caps = [have // rated.bytes_per_token * cp for have, rated in zip(granted, charged.rated, strict=True)]
    caps += [cap for cap in (charged.paid_tokens, solved.inputs.ranks_attended) if cap is not None]
    return min(caps, default=None)
