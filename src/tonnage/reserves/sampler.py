"""Sampler and log-prob rows: logits, what drawing from them takes, and the most probable tokens that are told.

Trigger: the rank has the vocabulary projection. Formula: rows * vocabulary * bytes of a logit, one tile of the
sampler's own numbers, and 16 bytes for each told token (float32 value and log-prob, int64 id). Lifetime: within a
step. Reason: probes of greedy requests draw nothing. Our probes, and the closed form in their place, run a stage with
every feature on, so it is counted there. The reference's dummies ask for no log-probs: it has no side for them.
"""

from __future__ import annotations

from tonnage.costs.activations import sampler_bytes
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source

#: Value, id and log-prob of one told token while they are made.
TOLD_BYTES = 4 + 8 + 4


def sampling_bytes(inputs: ReserveInputs) -> int:
    """Bytes alive at once while the rows of one step are sampled."""
    limits = inputs.limits
    drawn = sampler_bytes(
        inputs.config, logits_rows=limits.max_logits_rows, dtype=inputs.dtype, device_kind=inputs.device_kind
    )
    return drawn + limits.max_logits_rows * min(limits.max_logprobs, inputs.config.vocab_size) * TOLD_BYTES


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    claim = Claim(
        name="sampler rows",
        owner="sampler",
        line=LineKind.TRANSIENT,
        cost=Fixed(bytes=sampling_bytes(inputs)),
        lifetime=Lifetime.STEP,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        ref="costs.activations.sampler_bytes, and 16 bytes for each told token",
        stage="sampler",
        reason="logits and what drawing from them takes; without it a full batch with top-p and log-probs would run "
        "out of memory after its forward; it shares its bytes with the other stages of a step",
    )
    counted = only_if(claim, "sampler" not in inputs.counted, "counted in the sampler stage, which runs every feature")
    return (only_if(counted, inputs.held.has_head, "only the last pipeline stage samples"),)


RESERVE = Reserve(
    name="sampler",
    trigger="the rank has the vocabulary projection",
    formula="rows * vocabulary * bytes of a logit + one tile of the sampler + rows * told tokens * 16",
    lifetime=Lifetime.STEP,
    reference_side=None,
    claims=claims,
)
