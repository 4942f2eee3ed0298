"""Settings that were typed and change nothing in a plan: whoever typed them should know."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.layout import KVGroupKind
from tonnage.terms import IDLE_TIER, MemoryPlan


def idle_settings(plan: MemoryPlan) -> tuple[str, ...]:
    """A sentence for each setting that has no effect on this plan, with the reason."""
    return tuple(f"{setting} has no effect here: {why}" for setting, why in _idle(plan))


def _idle(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    knobs, limits, asked = plan.knobs, plan.limits, plan.limit_knobs
    if plan.attended_cap is None:
        for name in ("attended_tokens", "scratch"):
            if getattr(knobs, name).is_set:
                yield name, "no scratch grows with the tokens that a step attends to"
    if asked.max_adapter_rank.is_set and not limits.max_adapters:
        yield "max_adapter_rank", "no adapters are planned for; max_adapters says how many"
    if plan.host.kv_bytes and not limits.prefix_caching:
        yield "host_kv_bytes", IDLE_TIER
    if not any(group.kind == KVGroupKind.STATE for group in plan.kv.layout.groups):
        for name, is_asked in (("state_dtype", knobs.state_dtype.is_set), ("snapshot_tokens", limits.snapshot_tokens)):
            if is_asked:
                yield name, "no layer of this model keeps a recurrent state"
