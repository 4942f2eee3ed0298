"""Fixed attention workspace: the scratch of the backend, full size from the start.

Trigger: the backend declares scratch that its own chunks bound. Formula: the declaration's ``bytes_at`` at the limits;
kinds of layers that take turns on one memory count once, at their maximum. Lifetime: resident. Reason: a decode arena
reaches its size only in steps that a prefill probe does not run. The reference adds it to the measured peak.
"""

from __future__ import annotations

from tonnage.reserves.base import Declared, Reserve, ReserveInputs
from tonnage.terms import Claim, Lifetime, LineKind, Maker, ReferenceSide, Source


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    return tuple(scratch_claim(one, reason=_reason(one)) for one in inputs.scratch if not one.is_context)


def scratch_claim(one: Declared, *, reason: str, reference_side: ReferenceSide | None = ReferenceSide.PEAK) -> Claim:
    """A declaration as a claim; memory that a library takes inside torch is torch's, the rest our arena's."""
    scratch = one.scratch
    return Claim(
        name=one.name,
        owner=f"attention.{scratch.backend}",
        line=LineKind.SCRATCH,
        cost=scratch,
        lifetime=Lifetime.RESIDENT,
        maker=Maker.ARENA if scratch.served else Maker.TORCH,
        source=Source.DECLARED,
        ref=scratch.source,
        share=scratch.share,
        reference_side=reference_side,
        lendable=scratch.served and not scratch.keeps_state,
        reason=reason,
    )


def _reason(one: Declared) -> str:
    whose = "set aside whole" if one.scratch.served else "left to torch, which takes it inside the call"
    return (
        f"scratch of {one.scratch.backend} at the limits, {whose}: without it the first large batch would run out of "
        "memory in the middle of a step; the cache is smaller by it even while steps are small"
    )


RESERVE = Reserve(
    name="attention workspace",
    trigger="the backend declares scratch that its chunks bound",
    formula="bytes_at(the limits) of the declaration",
    lifetime=Lifetime.RESIDENT,
    reference_side=ReferenceSide.PEAK,
    claims=claims,
)
