"""The card as vLLM divides it: a share of the total, what is deducted from it, the pool, and what lies outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, isqrt

from tonnage.peers.start import Rule, Term
from tonnage.peers.vllm import adapters, graphs, heads, nontorch, peak, resident
from tonnage.peers.vllm.facts import Facts
from tonnage.peers.vllm.setup import Setup
from tonnage.terms import Quantity, Source

WEIGHTS = Rule(name="weights", says="what the rank loads of the checkpoint", source="vLLM's model loaders")
POOL = Rule(
    name="pool",
    says="ceil(total x gpu_memory_utilization) less all that is deducted, in whole blocks",
    records=("vllm-10511-b", "fs-57908690698", "llmd-microsoft-phi-4-h100-80gb-tp1pp1dp1-8192"),
    source="vLLM 0.33.0, the worker's profile",
)
REST = Rule(name="left free", says="total less everything else; below zero: so much is missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes. ``available`` is what the engine believes to have for its pool: below zero where the rest is too large."""

    total: Quantity
    requested: Quantity
    deducted: tuple[Term, ...]
    outside: tuple[Term, ...]
    available: Quantity


def budget_of(setup: Setup, facts: Facts) -> Budget:
    """Everything but the pool's own division."""
    total = setup.launch.card.total
    requested = _share(total, setup.utilisation)
    captured = Term(
        name="graphs",
        bytes=graphs.graphs(setup, facts),
        rule=graphs.rule(setup, facts),
        is_budgeted=setup.deducts_graphs,
    )
    deducted = [
        Term(name="weights", bytes=_weights(setup), rule=WEIGHTS),
        Term(name="beside the weights", bytes=resident.beside_weights(setup), rule=resident.RULE),
        *_adapters(setup),
        Term(name="non-torch", bytes=nontorch.non_torch(setup, facts), rule=nontorch.rule(setup, facts)),
        Term(name="activation peak", bytes=peak.activation_peak(setup, facts), rule=peak.rule(setup, facts)),
    ]
    outside = [_context(setup, facts)]
    (deducted if captured.is_budgeted else outside).append(captured)
    available = _available(setup, requested, [term.bytes for term in deducted])
    return Budget(
        total=total, requested=requested, deducted=tuple(deducted), outside=tuple(outside), available=available
    )


def _adapters(setup: Setup) -> Iterator[Term]:
    """A term of its own, where they are enabled."""
    slots = adapters.adapter_bytes(setup)
    if slots is not None:
        yield Term(name="adapters", bytes=slots, rule=adapters.rule(setup))


def _weights(setup: Setup) -> Quantity:
    """Less what other ranks hold of an encoder, and what ``cpu_offload_gb`` leaves in host memory; a head that drafts
    shares tables of its target."""
    weights, cut, away = _with_head(setup), resident.towers_cut(setup), setup.offloaded_bytes
    if not cut and not away:
        return weights
    best, low, high = (max(0, value - cut - away) for value in (weights.bytes, weights.low, weights.high))
    told = [weights.ref, *(["encoders cut"] if cut else []), *(["less cpu_offload_gb"] if away else [])]
    return Quantity(bytes=best, low=low, high=high, source=weights.source, ref=", ".join(told))


def _with_head(setup: Setup) -> Quantity:
    weights, found = setup.launch.weights, heads.correction(setup)
    if found is None:
        return weights
    best, low, high = found
    return replace(weights, bytes=weights.bytes + best, low=weights.low + low, high=weights.high + high,
                   ref=f"{weights.ref}, as a head")  # fmt: skip


def _share(total: Quantity, share: Fraction) -> Quantity:
    return Quantity(
        bytes=ceil(total.bytes * share),
        low=ceil(total.low * share),
        high=ceil(total.high * share),
        source=total.source,
        ref=f"ceil({float(share):g} of the total)",
    )


def _context(setup: Setup, facts: Facts) -> Term:
    """Nothing where an early release counts it within the budget."""
    rule = nontorch.context_rule(setup, facts)
    taken = nontorch.context(setup, facts)
    if rule.since is None:
        taken = Quantity.exact(0, taken.source, "counted with what torch does not hand out")
    return Term(name="context", bytes=taken, rule=rule, is_budgeted=False)


def _available(setup: Setup, requested: Quantity, deducted: list[Quantity]) -> Quantity:
    if setup.pool_bytes is not None:
        return Quantity.exact(setup.pool_bytes, Source.ASKED, "kv_cache_memory_bytes")
    best = requested.bytes - sum(each.bytes for each in deducted)
    low = best - _joint([requested.bytes - requested.low, *(each.high - each.bytes for each in deducted)])
    high = best + _joint([requested.high - requested.bytes, *(each.bytes - each.low for each in deducted)])
    return Quantity(bytes=best, low=low, high=high, source=Source.PREDICTED, ref="the budget less its deductions")


def _joint(errors: Iterable[int]) -> int:
    """Errors of terms that do not depend on each other: the root of the sum of squares."""
    return isqrt(sum(error * error for error in errors))


def partition(budget: Budget, *, pool: Quantity) -> tuple[Term, ...]:
    """Terms whose bytes sum to the total exactly: what is deducted, the pool, what lies outside, and the rest."""
    rounding = max(0, budget.available.bytes) - pool.bytes
    terms = [
        *budget.deducted,
        Term(name="kv pool", bytes=pool, rule=POOL),
        Term(
            name="rounding",
            bytes=Quantity.exact(rounding, Source.DERIVED, "less than one block") if rounding >= 0
            else Quantity.exact(0, Source.DERIVED, "the pool is as asked"),
            rule=POOL,
        ),
        *budget.outside,
    ]  # fmt: skip
    taken = [term.bytes for term in terms]
    best = budget.total.bytes - sum(each.bytes for each in taken)
    # The pool moves against what is deducted: only what lies outside, and the total, moves the rest.
    loose = [term.bytes for term in budget.outside]
    rest = Quantity(
        bytes=best,
        low=best - _joint([budget.total.bytes - budget.total.low, *(each.high - each.bytes for each in loose)]),
        high=best + _joint([budget.total.high - budget.total.bytes, *(each.bytes - each.low for each in loose)]),
        source=Source.DERIVED,
        ref="total less the rest",
    )
    return (*terms, Term(name="left free", bytes=rest, rule=REST, is_budgeted=False))
