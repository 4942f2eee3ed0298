"""Adapters: low-rank pairs of matrices that requests may choose, resident side by side.

Trigger: adapters are allowed. Formula: adapters * rank * (inputs + outputs) of every adapted matrix * bytes of an
element: the projections of attention and the dense and shared feed-forward parts; routed experts and recurrent layers
are not adapted. Beside them, what one step's tokens become between the two: tokens * rank * 3 * 4, float32 for the
three projections that are computed together. Lifetime: slots resident, the rest within a step. Reason: slots of the
largest rank are made before the first adapter is known. Under tensor parallelism one matrix of each pair is split and
the other is whole on every rank. The reference sizes its own adapter cache apart from this budget: it has no side.
"""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.costs.layers import Attention, Dense, Experts, FeedForward, Latent, Layer, Mixer
from tonnage.layout import DTYPE_BYTES
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Source
from tonnage.units import ceil_div

#: Projections computed in one launch, whose intermediate results live together: query, key and value.
NUM_SLICES = 3


def adapter_bytes(*, num_adapters: int, max_rank: int, num_features: int, element_bytes: int) -> int:
    """``num_features``: inputs and outputs of all adapted matrices, as ``adapted_features`` counts them."""
    return num_adapters * max_rank * num_features * element_bytes


def between_bytes(*, num_tokens: int, max_rank: int) -> int:
    """The tokens of one step between the two matrices of a pair, float32."""
    return num_tokens * max_rank * NUM_SLICES * DTYPE_BYTES["float32"]


def adapted_features(inputs: ReserveInputs) -> int:
    """Inputs plus outputs of every adapted matrix of this rank's layers, after the split."""
    hidden, tp = inputs.config.hidden_size, inputs.rank.tp
    attention_tp = 1 if inputs.rank.attention_dp else tp
    return sum(
        num_in + num_out
        for layer in _layers(inputs)
        for pairs in (
            *(_of_mixer(mixer, hidden, attention_tp) for mixer in layer.mixers),
            _of_feed_forward(layer.feed_forward, hidden, tp),
        )
        for num_in, num_out in pairs
    )


def _layers(inputs: ReserveInputs) -> list[Layer]:
    return [inputs.config.layers[index] for index in inputs.held.layers] if inputs.config.layers else []


def _of_mixer(mixer: Mixer, hidden: int, tp: int) -> Iterator[tuple[int, int]]:
    """(inputs, outputs) of the projections on one rank: those into heads are split by outputs, the last by inputs."""
    if isinstance(mixer, Attention):
        heads, kv_heads = ceil_div(mixer.num_heads, tp), ceil_div(mixer.num_kv_heads, tp)
        yield hidden, heads * mixer.head_dim
        if mixer.kv_from is None:
            yield hidden, kv_heads * mixer.head_dim
            yield hidden, kv_heads * mixer.v_head_dim
        yield heads * mixer.v_head_dim, hidden
    elif isinstance(mixer, Latent):
        heads = ceil_div(mixer.num_heads, tp)
        query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
        if mixer.q_lora_rank:
            yield hidden, mixer.q_lora_rank
        yield mixer.q_lora_rank or hidden, query
        yield hidden, mixer.kv_lora_rank + mixer.qk_rope_head_dim
        yield mixer.kv_lora_rank, heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        yield heads * mixer.v_head_dim, hidden


def _of_feed_forward(part: FeedForward | None, hidden: int, tp: int) -> Iterator[tuple[int, int]]:
    if isinstance(part, Dense):
        width = part.intermediate_size
    else:
        width = part.shared_intermediate_size if isinstance(part, Experts) else 0
    if part is None or not width:
        return
    inner = ceil_div(width, tp)
    yield from [(hidden, inner)] * (2 if part.is_gated else 1)
    yield inner, hidden


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    limits = inputs.limits
    slots = adapter_bytes(
        num_adapters=limits.max_adapters,
        max_rank=limits.max_adapter_rank,
        num_features=adapted_features(inputs) if limits.max_adapters else 0,
        element_bytes=DTYPE_BYTES[inputs.dtype],
    )
    between = between_bytes(num_tokens=limits.max_num_tokens, max_rank=limits.max_adapter_rank)
    found = (
        _claim(
            "adapters",
            LineKind.WEIGHTS,
            Lifetime.RESIDENT,
            slots,
            f"slots for {limits.max_adapters} adapters of rank {limits.max_adapter_rank}; without them the first "
            "request with an adapter would find no memory; switched off, requests with adapters are refused",
        ),
        _claim(
            "adapter activations",
            LineKind.TRANSIENT,
            Lifetime.STEP,
            between,
            "tokens of the largest step between the two matrices of an adapter; probes of plain requests have none",
        ),
    )
    return tuple(only_if(claim, limits.max_adapters, "no adapters are allowed") for claim in found)


def _claim(name: str, line: LineKind, lifetime: Lifetime, size: int, reason: str) -> Claim:
    return Claim(
        name=name,
        owner="adapters",
        line=line,
        cost=Fixed(bytes=size),
        lifetime=lifetime,
        maker=Maker.ARENA if lifetime == Lifetime.RESIDENT else Maker.TORCH,
        source=Source.DERIVED,
        ref="adapters * rank * (inputs + outputs)" if lifetime == Lifetime.RESIDENT else "tokens * rank * 3 * 4",
        can_disable=True,
        reason=reason,
    )


RESERVE = Reserve(
    name="adapters",
    trigger="adapters are allowed",
    formula="adapters * rank * (inputs + outputs) of every adapted matrix * element; tokens * rank * 12",
    lifetime=Lifetime.RESIDENT,
    reference_side=None,
    claims=claims,
)
