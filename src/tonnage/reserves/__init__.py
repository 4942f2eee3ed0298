"""What profiling cannot see: memory that is taken later, or by steps that no probe runs. One file each.

A reserve names its trigger, formula, lifetime and reason in its docstring, has the formula as a pure function, and
says its claims in every plan: those that do not apply cost nothing and tell why.
"""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.reserves import (
    adapters,
    attention,
    collectives,
    context,
    drafts,
    encoder,
    fragmentation,
    graphs,
    indexer,
    penalties,
    prompt_logprobs,
    sampler,
    tables,
)
from tonnage.reserves.base import COUNTED, Declared, Reserve, ReserveInputs
from tonnage.terms import Claim

__all__ = ["COUNTED", "RESERVES", "Declared", "Reserve", "ReserveInputs", "reserve_claims"]

#: Every reserve, in the order of the report.
RESERVES: Mapping[str, Reserve] = {
    row.name: row
    for row in (
        attention.RESERVE,
        tables.RESERVE,
        penalties.RESERVE,
        collectives.RESERVE,
        context.RESERVE,
        indexer.RESERVE,
        sampler.RESERVE,
        prompt_logprobs.RESERVE,
        drafts.RESERVE,
        encoder.RESERVE,
        adapters.RESERVE,
        graphs.RESERVE,
        fragmentation.RESERVE,
    )
}


def reserve_claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    """What every reserve claims, in the order of ``RESERVES``."""
    return tuple(claim for reserve in RESERVES.values() for claim in reserve.claims(inputs))
