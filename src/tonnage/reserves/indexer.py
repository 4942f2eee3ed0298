"""Sparse-indexer logits: the scores by which sparse attention picks the tokens it reads.

Trigger: layers with an indexer. Formula: 4 * min(element budget, max_num_tokens * max_seq_len), a float32 score for
every new token against every cached one, cut into tiles of at most the budget. Lifetime: within a prefill step.
Reason: the context is empty in a probe, so the probe shows next to nothing of it. The reference takes it from the
pool, after the fraction, and for one of the algorithms only; the other has the same buffer.
"""

from __future__ import annotations

from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, ReferenceSide, Source

#: Scores of one tile at most, as the reference's indexer cuts them: 8 GiB of float32.
ELEMENT_BUDGET = 2**31
_FLOAT_BYTES = 4
#: The only algorithm for which the reference charges it.
REFERENCE_ALGORITHM = "deepseek_v4"


def indexer_logits_bytes(
    max_num_tokens: int | None, max_seq_len: int | None, *, element_budget: int = ELEMENT_BUDGET
) -> int:
    """Bytes of the largest tile of scores; a shape that is not known (None or 0) takes the whole budget."""
    if not max_num_tokens or not max_seq_len:
        return _FLOAT_BYTES * element_budget
    return _FLOAT_BYTES * min(element_budget, max_num_tokens * max_seq_len)


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    limits = inputs.limits
    has_indexer = inputs.algorithm != "none"
    size = indexer_logits_bytes(limits.max_num_tokens, limits.max_seq_len) if has_indexer else 0
    claim = Claim(
        name="indexer logits",
        owner="attention.indexer",
        line=LineKind.TRANSIENT,
        cost=Fixed(bytes=size),
        lifetime=Lifetime.STEP,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        ref="4 * min(2^31, max_num_tokens * max_seq_len)",
        stage="prefill",
        reference_side=ReferenceSide.POOL if inputs.algorithm == REFERENCE_ALGORITHM else None,
        reason="scores of every new token against every cached one; without it the first long context would run out "
        "of memory or stall in the driver; a smaller max_num_tokens makes it smaller and prefill slower",
    )
    return (only_if(claim, has_indexer, "no layer has a sparse indexer"),)


RESERVE = Reserve(
    name="indexer logits",
    trigger="layers with a sparse indexer",
    formula="4 * min(2^31, max_num_tokens * max_seq_len)",
    lifetime=Lifetime.STEP,
    reference_side=ReferenceSide.POOL,
    claims=claims,
)
