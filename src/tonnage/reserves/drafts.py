"""Draft probabilities: what the drafter thought of each token it proposed, kept until the target has judged it.

Trigger: tokens are drafted. Formula: seats * drafted tokens * vocabulary * 4, float32. Lifetime: resident. Reason: it
is kept by seat, so it doubles with a look-ahead, and probes without drafts do not make it. The reference leaves it to
what its fraction spares.
"""

from __future__ import annotations

from tonnage.layout import DTYPE_BYTES
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source


def draft_probability_bytes(num_seats: int, max_draft_tokens: int, vocab_size: int) -> int:
    """Bytes of the probabilities of every drafted token of every seat."""
    return num_seats * max_draft_tokens * vocab_size * DTYPE_BYTES["float32"]


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    claim = Claim(
        name="draft probabilities",
        owner="resources.drafts",
        line=LineKind.TABLES,
        cost=Fixed(
            bytes=draft_probability_bytes(inputs.num_seats, inputs.limits.max_draft_tokens, inputs.config.vocab_size)
        ),
        lifetime=Lifetime.RESIDENT,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        ref="seats * drafted tokens * vocabulary * 4",
        can_disable=True,
        reason="what the drafter thought of each token it proposed; without it a full batch of drafts would run out of "
        "memory when it is judged; switched off, drafts are accepted only where they equal the best token",
    )
    drafting = only_if(claim, inputs.limits.max_draft_tokens, "no tokens are drafted")
    return (only_if(drafting, inputs.held.has_head, "only the last pipeline stage samples"),)


RESERVE = Reserve(
    name="drafts",
    trigger="tokens are drafted",
    formula="seats * drafted tokens * vocabulary * 4",
    lifetime=Lifetime.RESIDENT,
    reference_side=None,
    claims=claims,
)
