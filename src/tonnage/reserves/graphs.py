"""CUDA graphs: captured decode steps, their shared memory pool and their executables.

Trigger: batch sizes are captured, on a card. Formula: the forward peak of the largest captured batch, once, and some
MiB for each graph. Lifetime: resident. Reason: where the pool of keys and values is sized before the captures, nobody
has measured them yet. Where a plan has measured or predicted graphs already, they are counted there and not here.
Graphs are captured before the reference's probe, and again after its pool exists; it has no side for them.
"""

from __future__ import annotations

from tonnage.costs.context import graph_bytes
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, Quantity, Source


def declared_bytes(inputs: ReserveInputs) -> Quantity:
    """What the captures will take, with its bar; 0 where nothing is captured."""
    sizes = inputs.limits.graph_batch_sizes
    size = None
    if sizes:
        size = graph_bytes(
            inputs.config,
            device_kind=inputs.device_kind,
            max_batch_size=max(sizes),
            num_graphs=len(sizes),
            dtype=inputs.dtype,
            rank=inputs.rank,
        )
    return size or Quantity.exact(0, Source.DERIVED, "nothing is captured")


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    is_counted = "graphs" in inputs.counted
    size = Quantity.exact(0, Source.MEASURED, "the plan's own graphs") if is_counted else declared_bytes(inputs)
    claim = Claim(
        name="cuda graphs",
        owner="graphs",
        line=LineKind.GRAPHS,
        cost=Fixed(bytes=size.bytes),
        lifetime=Lifetime.RESIDENT,
        maker=Maker.DRIVER,
        source=size.source,
        ref=size.ref,
        can_disable=not is_counted,
        low=size.low,
        high=size.high,
        reason="captured decode steps; without it the captures would fail once the cache has taken the rest; switched "
        "off, decodes run launch by launch, which a small batch feels most",
    )
    captured = only_if(claim, inputs.limits.graph_batch_sizes, "no batch size is captured")
    there = only_if(captured, not inputs.on_host, "a host captures no graphs")
    return (only_if(there, not is_counted, "counted in the line of graphs, as measured or predicted"),)


RESERVE = Reserve(
    name="graphs",
    trigger="batch sizes are captured, on a card",
    formula="forward peak of the largest captured batch + graphs * 1 MiB",
    lifetime=Lifetime.RESIDENT,
    reference_side=None,
    claims=claims,
)
