"""Penalty tables: how often each sequence has used each token of the vocabulary.

Trigger: requests may have penalties. Formula: seats * vocabulary * (4 * beams + 1), an int32 count for every beam and
a bool for the prompt. Lifetime: lazy, made by the first request that asks. Reason: probes of plain requests never make
them. Base seats are the running sequences; extra seats are those of a look-ahead, where a sequence that ended keeps
its seat for a step. We charge every seat; the reference adds only the extra ones to its peak and leaves the base seats
to what its fraction spares.
"""

from __future__ import annotations

from tonnage.layout import DTYPE_BYTES, PENALTY_TABLES, penalty_table_bytes
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, ReferenceSide, Source

EXTRA_PENALTY_TABLES = "penalty tables of look-ahead seats"


def penalty_bytes(num_seats: int, vocab_size: int, *, beam_width: int = 1) -> int:
    """Bytes of the tables of so many seats, 0 for none."""
    more_beams = (beam_width - 1) * DTYPE_BYTES["int32"] * num_seats * vocab_size
    return penalty_table_bytes(max_batch_size=num_seats, vocab_size=vocab_size) + more_beams


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    vocab, limits, beams = inputs.config.vocab_size, inputs.limits, inputs.beam_width
    base = _claim(
        PENALTY_TABLES,
        penalty_bytes(limits.max_batch_size, vocab, beam_width=beams),
        None,  # the reference leaves the base seats to the part of the device that its fraction does not touch
        "token counts of every running sequence, made by the first request with penalties; without it that request "
        "would find no memory; switched off, requests with penalties are refused",
    )
    extra = _claim(
        EXTRA_PENALTY_TABLES,
        penalty_bytes(inputs.num_extra_seats, vocab, beam_width=beams),
        ReferenceSide.PEAK,
        "token counts of seats that sequences keep while the step after their last is in flight; without it the table "
        "would grow under traffic, on a full device; switched off, a sequence with penalties waits for its seat",
    )
    extra = only_if(extra, inputs.num_extra_seats, "no step is launched before the one ahead of it has ended")
    asked = (only_if(claim, limits.penalties, "requests may not have penalties") for claim in (base, extra))
    # Every stage lists them, so that one name switches them off on all.
    return tuple(only_if(claim, inputs.held.has_head, "only the last stage samples") for claim in asked)


def _claim(name: str, size: int, side: ReferenceSide | None, reason: str) -> Claim:
    return Claim(
        name=name,
        owner="resources.penalties",
        line=LineKind.TABLES,
        cost=Fixed(bytes=size),
        lifetime=Lifetime.LAZY,
        maker=Maker.DRIVER,
        source=Source.DERIVED,
        ref="seats * vocabulary * (4 * beams + 1)",
        reference_side=side,
        can_disable=True,
        reason=reason,
    )


RESERVE = Reserve(
    name="penalties",
    trigger="requests may have penalties",
    formula="seats * vocabulary * (4 * beams + 1)",
    lifetime=Lifetime.LAZY,
    reference_side=ReferenceSide.PEAK,
    claims=claims,
)
