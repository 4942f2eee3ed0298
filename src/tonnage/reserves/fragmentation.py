"""Allocator fragmentation: what an allocator takes beyond the bytes alive, in segments, rounding and holes.

Trigger: always, for what torch allocates in a step. Formula: the peak of a forward times what was seen over it, 1.15
to 1.56 on a card and 1.0 to 1.1 on a host. Lifetime: within a step, and kept. Reason: peaks are counted in allocated
bytes, and a pool sized by them leaves too little. Where the stages of a plan have their reserved bytes, as measured
ones do, it is counted there. The reference leaves it to the margin under which torch empties its cache: no side.
"""

from __future__ import annotations

from tonnage.costs.activations import forward_peak, predicted, reserved_for
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Quantity, Source


def fragmentation(allocated: Quantity, *, device_kind: str) -> Quantity:
    """What the allocator adds to ``allocated``: reserved less allocated, with the bar of both."""
    reserved = reserved_for(allocated, device_kind=device_kind)
    return Quantity(
        bytes=max(0, reserved.bytes - allocated.bytes),
        low=max(0, reserved.low - allocated.low),
        high=max(0, reserved.high - allocated.high),
        source=reserved.source,
        ref=reserved.ref,
    )


def step_fragmentation(inputs: ReserveInputs) -> Quantity:
    """For the largest forward at the limits, by the closed form."""
    limits = inputs.limits
    peak = forward_peak(
        inputs.config,
        num_tokens=limits.max_num_tokens,
        logits_rows=limits.max_logits_rows,
        dtype=inputs.dtype,
        rank=inputs.rank,
    )
    return fragmentation(predicted(peak.bytes, ref="costs.activations"), device_kind=inputs.device_kind)


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    is_counted = "fragmentation" in inputs.counted
    size = (
        Quantity.exact(0, Source.MEASURED, "reserved bytes of the stages") if is_counted else step_fragmentation(inputs)
    )
    claim = Claim(
        name="allocator fragmentation",
        owner="torch",
        line=LineKind.TRANSIENT,
        cost=Fixed(bytes=size.bytes),
        lifetime=Lifetime.STEP,
        maker=Maker.TORCH,
        source=size.source,
        ref=size.ref,
        low=size.low,
        high=size.high,
        reason="segments, rounding and holes beyond the bytes alive; without it a step that fits by its sizes would "
        "fail for lack of one contiguous piece",
    )
    return (only_if(claim, not is_counted, "counted in the line of fragmentation, from the stages' reserved bytes"),)


RESERVE = Reserve(
    name="fragmentation",
    trigger="always, for what torch allocates in a step",
    formula="forward peak * (1.25 - 1) on a card, * (1.05 - 1) on a host",
    lifetime=Lifetime.STEP,
    reference_side=None,
    claims=claims,
)
