"""The sums that other engines' fractions are shares of, read off a plan's lines and steps."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.budget.pool import group_prices, unit_tokens
from tonnage.terms import LineKind, MemoryPlan

#: The line of what is left over because blocks are whole. It is free memory to another engine.
PART_OF_A_BLOCK = "part of a block"
#: Steps that leave money unused: another engine's fraction is a share of it all the same.
_CAPS = ("total_bytes", "kv_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Bytes on one device, in the terms that other engines count in.

    device     all of it
    outside    context and library handles: made before the other engines look at free memory for the first time
    before     free memory at that first look, before weights: device - other processes - outside
    weights    of the target, and of a draft where there is one
    kv         the pool
    least      the smallest pool there can be: one sequence of full length, and all states
    taken      everything that this engine takes, ``outside`` included
    pool       the pool with what grows with it: rounding to pages, bookkeeping of blocks, growing scratch
    rest       what would be left for ``pool`` if nothing were kept free: device - other processes - every line that
               does not depend on the number of tokens
    """

    device: int
    outside: int
    before: int
    weights: int
    kv: int
    least: int
    taken: int
    pool: int
    rest: int

    @classmethod
    def of(cls, plan: MemoryPlan) -> PlanFacts:
        """Sums over the plan's lines; ``rest`` needs its steps, for lines do not say which of their bytes grow."""
        foreign, keep_free = plan.bytes_of(LineKind.FOREIGN), plan.bytes_of(LineKind.KEEP_FREE)
        outside = plan.bytes_of(LineKind.CONTEXT) + plan.bytes_of(LineKind.LIBRARIES)
        part = sum(line.bytes for line in plan.lines if line.name == PART_OF_A_BLOCK)
        unused = keep_free + plan.bytes_of(LineKind.SLACK) + part
        rest = _budget(plan, part=part) + keep_free
        return cls(
            device=plan.device_bytes,
            outside=outside,
            before=plan.device_bytes - foreign - outside,
            weights=plan.bytes_of(LineKind.WEIGHTS),
            kv=plan.kv.bytes,
            least=_least(plan),
            taken=plan.device_bytes - foreign - unused,
            pool=rest - unused,
            rest=rest,
        )


def _least(plan: MemoryPlan) -> int:
    layout = plan.kv.layout
    unit = unit_tokens(layout) or 1
    prices = group_prices(layout, limits=plan.limits, unit=unit, cp=plan.rank.cp)
    return layout.slab_bytes * sum(price.blocks_of_sequences(1) for price in prices)


def _budget(plan: MemoryPlan, *, part: int) -> int:
    """What the pool could have had without caps: the last step in bytes, and what caps took on the way there."""
    blocks = next((step for step in plan.steps if step.name == "blocks"), None)
    if blocks is None:  # a plan of another arithmetic: as if nothing beside the pool grew
        return plan.kv.bytes + plan.bytes_of(LineKind.SLACK) + part
    lost = sum(step.before - step.after for step in plan.steps if step.name in _CAPS and step.op in ("-", "min"))
    return blocks.before + lost
