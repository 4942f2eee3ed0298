"""Context workspace: what latent attention expands for every token that a step attends to.

Trigger: the backend declares scratch that grows with the cached past. Formula: rate * attended tokens, up to the cap
of ``attended_worst_tokens``; where nothing bounds it, it shares the budget with the cache, and steps are kept within
what it got. Lifetime: resident. Reason: prefix reuse makes steps attend to far more than they compute, which a probe
with an empty cache does not do. The reference takes its own part from the pool after the fraction.
"""

from __future__ import annotations

from tonnage.config import Limits
from tonnage.reserves.attention import scratch_claim
from tonnage.reserves.base import Declared, Reserve, ReserveInputs
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, ReferenceSide, Source

NAME = "context workspace"


def attended_worst_tokens(limits: Limits, *, asked: int | None = None) -> int:
    """The most tokens one step may attend to: all rows at full length, or what was ``asked``, but never less than
    one sequence of full length, which could not run at all otherwise."""
    worst = min(limits.max_batch_size, limits.max_num_tokens) * limits.max_seq_len
    return worst if asked is None else min(max(asked, limits.max_seq_len), worst)


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    found = tuple(_claim(one, inputs.limits) for one in inputs.scratch if one.is_context)
    return found or (_none(inputs),)


def _claim(one: Declared, limits: Limits) -> Claim:
    # What the reference leaves undeclared it cannot charge either.
    side = ReferenceSide.POOL if one.in_reference else None
    if one.scratch.chunk_bounded:
        cost = "chunks bound it, so it is set aside whole and no step waits for it"
    else:
        cost = "it shares the budget with the cache, and a step that would attend to more than it got is split or waits"
    reason = (
        "cached keys and values are expanded for every token a step attends to, at most "
        f"{attended_worst_tokens(limits):,}; without it a step over long cached prefixes would run out of memory "
        f"half-way; {cost}"
    )
    return scratch_claim(one, reason=reason, reference_side=side)


def _none(inputs: ReserveInputs) -> Claim:
    return Claim(
        name=NAME,
        owner=f"attention.{inputs.backend}",
        line=LineKind.SCRATCH,
        cost=Fixed(bytes=0),
        lifetime=Lifetime.RESIDENT,
        maker=Maker.ARENA,
        source=Source.DECLARED,
        ref="nothing declared",
        reference_side=ReferenceSide.POOL,
        applies=False,
        because=f"{inputs.backend} {inputs.reads or 'declares none'}",
        reason="memory for the cached past where attention has to expand it",
    )


RESERVE = Reserve(
    name=NAME,
    trigger="the backend declares scratch that grows with the cached past",
    formula="bytes per attended token * attended tokens",
    lifetime=Lifetime.RESIDENT,
    reference_side=ReferenceSide.POOL,
    claims=claims,
)
