"""Collectives: communicators between ranks and the buffers they register.

Trigger: more than one rank. Formula: a range that was seen, 128 MiB to 2 GiB, 512 MiB best: it depends on library,
topology and number of channels. Lifetime: resident. Reason: a probe of one rank alone has none, and the library takes
them from the driver at the first exchange. The reference meets them inside its measured peak: no side here.
"""

from __future__ import annotations

from tonnage.costs.context import collective_bytes
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    size = collective_bytes(inputs.rank)
    claim = Claim(
        name="collectives",
        owner="collectives",
        line=LineKind.LIBRARIES,
        cost=Fixed(bytes=size.bytes),
        lifetime=Lifetime.RESIDENT,
        maker=Maker.LIBRARY,
        source=size.source,
        ref=size.ref,
        low=size.low,
        high=size.high,
        reason="communicators and their buffers, taken at the first exchange between ranks; without it that exchange "
        "would fail on a full device and every rank would wait for it",
    )
    return (only_if(claim, size.bytes, "one rank exchanges nothing"),)


RESERVE = Reserve(
    name="collectives",
    trigger="more than one rank",
    formula="128 MiB to 2 GiB, 512 MiB best",
    lifetime=Lifetime.RESIDENT,
    reference_side=None,
    claims=claims,
)
