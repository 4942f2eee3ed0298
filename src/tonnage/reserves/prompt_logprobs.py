"""Prompt log-probs: the probability of every token of a prompt, not only of the last.

Trigger: requests may ask for them. Formula: hidden states of a whole step stay, tokens * hidden * bytes of a word;
the vocabulary projection runs in slices of max_logits_rows rows, rows * vocabulary * bytes of a logit; and a tile of
them as float32 numbers and exponentials, with 16 bytes for each told token. Lifetime: within a step. Reason: uncut it
would be max_num_tokens * vocabulary * 4 bytes, which no probe of plain requests shows, and which has ended engines.
The reference reserves nothing for it.
"""

from __future__ import annotations

from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS
from tonnage.layout import DTYPE_BYTES
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.reserves.sampler import TOLD_BYTES
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source
from tonnage.units import format_bytes

_FLOAT_BYTES = DTYPE_BYTES["float32"]


def prompt_logprob_bytes(
    *,
    num_tokens: int,
    slice_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: str,
    tile_elements: int,
    num_told: int = 0,
) -> int:
    """Bytes alive at once: hidden states of ``num_tokens``, one slice of logits, one tile as float32.

    Exponentials are a tile of their own; the numbers are too, unless the logits are float32 already.
    """
    word = DTYPE_BYTES[dtype]
    rows = min(slice_rows, num_tokens)
    tile_rows = min(rows, max(1, tile_elements // vocab_size))
    num_floats = 1 if word == _FLOAT_BYTES else 2
    tile = tile_rows * (vocab_size * num_floats * _FLOAT_BYTES + min(num_told, vocab_size) * TOLD_BYTES)
    return num_tokens * hidden_size * word + rows * vocab_size * word + tile


def whole_bytes(num_tokens: int, vocab_size: int) -> int:
    """What it would be in one piece: a float32 row of the vocabulary for every token."""
    return num_tokens * vocab_size * _FLOAT_BYTES


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    config, limits = inputs.config, inputs.limits
    size = prompt_logprob_bytes(
        num_tokens=limits.max_num_tokens,
        slice_rows=limits.max_logits_rows,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=inputs.dtype,
        tile_elements=SAMPLER_TILE_ELEMENTS[inputs.device_kind],
        num_told=limits.max_logprobs,
    )
    whole = format_bytes(whole_bytes(limits.max_num_tokens, config.vocab_size))
    claim = Claim(
        name="prompt log-probs",
        owner="sampler",
        line=LineKind.TRANSIENT,
        cost=Fixed(bytes=size),
        lifetime=Lifetime.STEP,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        ref="hidden states + one slice of logits + one tile",
        stage="prompt log-probs",
        can_disable=True,
        reason=f"the vocabulary projection of a prompt, {limits.max_logits_rows:,} rows at a time; all at once would "
        f"take {whole} and run out of memory; switched off, requests for prompt log-probs are refused",
    )
    allowed = only_if(claim, limits.prompt_logprobs, "requests may not ask for log-probs of their prompt")
    return (only_if(allowed, inputs.held.has_head, "only the last pipeline stage samples"),)


RESERVE = Reserve(
    name="prompt log-probs",
    trigger="requests may ask for log-probs of their prompt",
    formula="tokens * hidden * word + slice * vocabulary * word + tile * 8",
    lifetime=Lifetime.STEP,
    reference_side=None,
    claims=claims,
)
