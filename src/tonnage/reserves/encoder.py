"""Encoder output and cache: what a picture, a sound or a source text becomes before the text model reads it.

Trigger: the model has an encoder and requests may use it. Formula: the output of max_encoder_tokens tokens (a vector of
the text model's width for each, one more for every level that is fed into deeper layers; where the encoder merges some,
fewer), less what a probe's own output already holds, and the cache of finished outputs at its full size. Models whose
layers attend to an encoder keep its output the same way until each layer has made keys and values of it: those lie in
the pool, as many for each sequence as one encoder gives. Lifetime: the output lives until its prefill has read it,
beside any stage of a step; the cache fills under traffic. Reason: a probe's picture is smaller than the largest, and
its cache is empty. The reference adds both to the measured peak.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.costs.activations import encoder_output_bytes
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, ReferenceSide, Source


def encoder_reserve_bytes(
    *, output_budget_bytes: int, profiled_output_bytes: int = 0, cache_bytes: int = 0, is_cache_active: bool = False
) -> int:
    """The whole reserve: the output beyond what a probe showed, and the cache where there is one."""
    return max(0, output_budget_bytes - profiled_output_bytes) + (cache_bytes if is_cache_active else 0)


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    limits = inputs.limits
    budget = encoder_output_bytes(inputs.config, num_tokens=limits.max_encoder_tokens, dtype=inputs.dtype)
    beyond = encoder_reserve_bytes(output_budget_bytes=budget, profiled_output_bytes=inputs.profiled_output_bytes)
    output = _claim(
        "encoder output",
        LineKind.TRANSIENT,
        Lifetime.STEP,
        budget,
        "what the encoder makes of one step's pictures, sounds or source texts, kept until the prompts are computed; "
        "without it the largest would run out of memory between encoder and model; switched off, requests that need "
        "the encoder are refused",
    )
    cache = _claim(
        "encoder cache",
        LineKind.TABLES,
        Lifetime.LAZY,
        limits.encoder_cache_bytes,
        "what the encoder made of inputs that may come again; it fills under traffic and would crowd out the cache "
        "of keys and values; switched off, each is encoded anew",
    )
    found = (
        only_if(
            replace(output, probed_bytes=budget - beyond),
            limits.max_encoder_tokens,
            "max_encoder_tokens is 0: the encoder is not used",
        ),
        only_if(cache, limits.encoder_cache_bytes, "encoder_cache_bytes is 0: nothing is cached"),
    )
    first = tuple(
        only_if(claim, inputs.held.has_embeddings, "only the first pipeline stage encodes") for claim in found
    )
    return tuple(only_if(claim, inputs.has_encoder, "the model has no encoder") for claim in first)


def _claim(name: str, line: LineKind, lifetime: Lifetime, size: int, reason: str) -> Claim:
    return Claim(
        name=name,
        owner="encoder",
        line=line,
        cost=Fixed(bytes=size),
        lifetime=lifetime,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        ref="max_encoder_tokens * width * element" if lifetime == Lifetime.STEP else "encoder_cache_bytes",
        reference_side=ReferenceSide.PEAK,
        can_disable=True,
        reason=reason,
    )


RESERVE = Reserve(
    name="encoder",
    trigger="the model has an encoder and requests may use it",
    formula="max(0, output - profiled output) + cache",
    lifetime=Lifetime.LAZY,
    reference_side=ReferenceSide.PEAK,
    claims=claims,
)
