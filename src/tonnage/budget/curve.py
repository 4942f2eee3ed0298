"""Two pictures of one budget, as exact points: what is given up for attending to more tokens, and how bytes grow.

The first varies ``attended_tokens``, the most that one step may attend to. Scratch that grows with them shares the
budget with the cache (see ``split``), so a step that may attend to more leaves fewer tokens of cache. It goes from
one sequence of full length, which must always pass, to every running sequence at full length at once. Between the
two the curve may become flat: beyond its fair share more is never granted.

The second varies the tokens in the pool, and stacks what each demand takes for them. Where the stack crosses the
budget, the tokens of the plan stand, unless a cap that is no matter of money stops it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt

from tonnage.budget.charges import RatedClaim, charges
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.plan import plan
from tonnage.budget.pool import POOL_CAPS, PoolPrice
from tonnage.budget.solve import Solved, solve
from tonnage.config import Origin, Setting
from tonnage.errors import DoesNotFit
from tonnage.terms import Claim, LineKind, MemoryPlan, Rank
from tonnage.units import ceil_div

CURVE_SCHEMA = "tonnage.curve/1"
#: How often the way from the least to the most attended tokens is halved, and parts of the second picture's axis.
HALVINGS, NUM_COLUMNS = 5, 64
ONE_REQUEST, CURRENT, FAIR_SHARE, WORST_CASE = "one request", "current setting", "fair share", "worst case"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The plan where a step may attend to ``attended_tokens``: tokens of cache, what steps are really held to
    (``attended_cap``), and the bytes of both. ``marks`` say what is special about the point."""

    attended_tokens: int
    kv_tokens: int
    attended_cap: int
    kv_bytes: int
    scratch_bytes: int
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedCurve:
    """Points by ascending ``attended_tokens``. ``refused_tokens``: those asked for where one sequence would not fit.

    lent_tokens  what the pool holds while no growing scratch is in use, if its bytes are lent to cached blocks
                 meanwhile; None where none of it may be lent
    scratch      names of what grows
    """

    points: tuple[CurvePoint, ...]
    lent_tokens: int | None
    scratch: tuple[str, ...]
    refused_tokens: tuple[int, ...] = ()

    def marked(self, mark: str) -> CurvePoint | None:
        """The point that carries the mark; None where there is no plan at it."""
        return next((point for point in self.points if mark in point.marks), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPart:
    """One demand: its bytes at every position of ``Stack.tokens``."""

    name: str
    kind: LineKind
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Bytes against tokens, in whole blocks. Parts are stacked in order.

    budget_bytes     what the parts may take together: all but the memory of others and what is set aside
    crossing_tokens  the most tokens whose stack stays within the budget
    plan_tokens      what the plan has: fewer where ``bound_by``, a cap on the pool itself, stops it before
    """

    tokens: tuple[int, ...]
    parts: tuple[StackPart, ...]
    budget_bytes: int
    crossing_tokens: int
    plan_tokens: int
    bound_by: str

    def total_at(self, place: int) -> int:
        return sum(part.sizes[place] for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Both pictures of one question. ``attended`` is None where no scratch grows with attended tokens."""

    schema: str = CURVE_SCHEMA
    model_name: str
    device_name: str
    rank: Rank
    max_seq_len: int
    max_batch_size: int
    attended: AttendedCurve | None
    stack: Stack


def curve(inputs: PlanInputs) -> Curve:
    """Both pictures. Raises ``DoesNotFit`` where the plan itself is refused."""
    solved = solve(inputs)
    return Curve(
        model_name=inputs.model_name,
        device_name=inputs.device_name,
        rank=inputs.measured.rank,
        max_seq_len=inputs.limits.max_seq_len,
        max_batch_size=inputs.limits.max_batch_size,
        attended=attended_curve(inputs) if _growing(inputs) else None,
        stack=stack(solved),
    )


def attended_curve(inputs: PlanInputs) -> AttendedCurve:
    """Plans over ``attended_tokens``; those that are refused are listed instead."""
    least = inputs.limits.max_seq_len
    most = inputs.limits.max_batch_size * least
    now = min(max(inputs.knobs.attended_tokens.or_else(most), least), most)
    special = {ONE_REQUEST: least, CURRENT: now, WORST_CASE: most}
    made = _planned(inputs, most)
    if made is not None and made.attended_cap is not None and least < made.attended_cap < most:
        special[FAIR_SHARE] = made.attended_cap  # from here on the curve is flat
    points, refused = [], []
    for tokens in sorted({*_geometric(least, most, HALVINGS), *special.values()}):
        marks = tuple(name for name, at in special.items() if at == tokens)
        made = _planned(inputs, tokens)
        if made is None:
            refused.append(tokens)
        else:
            points.append(_point(inputs, made, tokens, marks))
    growing = tuple(rated.claim.name for rated in _growing(inputs))
    return AttendedCurve(
        points=tuple(points), lent_tokens=lent_tokens(inputs), scratch=growing, refused_tokens=tuple(refused)
    )


def lent_tokens(inputs: PlanInputs) -> int | None:
    """Tokens of the pool with none of the growing scratch that may be lent; None where no such scratch may be."""
    growing = {rated.claim.share or rated.claim.name for rated in _growing(inputs)}
    lent = {_key(claim) for claim in inputs.claims if claim.applies and _key(claim) in growing and claim.lendable}
    # One arena with a declaration that keeps its state is not lent, whoever else uses it.
    kept = {_key(claim) for claim in inputs.claims if claim.applies and not claim.lendable}
    if not lent - kept:
        return None
    rest = tuple(
        replace(claim, applies=False, because="lent") if _key(claim) in lent - kept else claim
        for claim in inputs.claims
    )
    return plan(replace(inputs, claims=rest)).kv.tokens


def stack(solved: Solved) -> Stack:
    """What each demand takes, from an empty pool to a quarter beyond the crossing."""
    price, budget = solved.price, solved.budget
    crossing = price.blocks_within(budget.pool)
    top = max(1, ceil_div(5 * crossing, 4))
    even = {top * place // NUM_COLUMNS for place in range(NUM_COLUMNS + 1)}
    units = sorted(even | {crossing, solved.num_blocks})
    return Stack(
        tokens=tuple(each * price.block_tokens for each in units),
        parts=(*_fixed_parts(solved, len(units)), *_growing_parts(price, units)),
        budget_bytes=budget.fixed + budget.pool,
        crossing_tokens=crossing * price.block_tokens,
        plan_tokens=solved.tokens,
        bound_by=solved.binding.name if solved.binding.name in POOL_CAPS else "",
    )


def _fixed_parts(solved: Solved, num_points: int) -> Iterator[StackPart]:
    """Weights, everything else that is there from the start, then the groups of layers that do not grow."""
    price, weights = solved.price, solved.charged.line(LineKind.WEIGHTS).bytes
    groups = [(g.name, g.blocks(0) * price.block_bytes) for g in price.groups if g.is_fixed]
    others = solved.budget.fixed - weights - sum(size for _, size in groups)
    for name, kind, size in (
        ("weights", LineKind.WEIGHTS, weights),
        ("other fixed lines", LineKind.TRANSIENT, others),
        *((name, LineKind.KV, size) for name, size in groups),
    ):
        if size:
            yield StackPart(name=name, kind=kind, sizes=(size,) * num_points)


def _growing_parts(price: PoolPrice, units: list[int]) -> Iterator[StackPart]:
    """The groups that grow, the scratch that grows, then the books of blocks and what pages and slabs leave empty."""
    found = [
        StackPart(name=group.name, kind=LineKind.KV, sizes=tuple(price.group_bytes(group, n) for n in units))
        for group in price.groups
        if not group.is_fixed
    ]
    for place, demand in enumerate(price.demands):
        sizes = tuple(price.granted_bytes(n)[place] for n in units)
        found.append(StackPart(name=demand.name, kind=LineKind.SCRATCH, sizes=sizes))
    yield from found
    rest = tuple(price.total_bytes(n) - sum(part.sizes[at] for part in found) for at, n in enumerate(units))
    if any(rest):
        yield StackPart(name="books and rounding", kind=LineKind.ROUNDING, sizes=rest)


def _point(inputs: PlanInputs, made: MemoryPlan, tokens: int, marks: tuple[str, ...]) -> CurvePoint:
    cap = made.attended_cap
    return CurvePoint(
        attended_tokens=tokens,
        kv_tokens=made.kv.tokens,
        attended_cap=inputs.limits.max_batch_size * inputs.limits.max_seq_len if cap is None else cap,
        kv_bytes=made.kv.bytes,
        scratch_bytes=made.bytes_of(LineKind.SCRATCH),
        marks=marks,
    )


def _planned(inputs: PlanInputs, attended_tokens: int) -> MemoryPlan | None:
    """The plan with that much to attend to; None where it is refused."""
    asked = Setting(attended_tokens, None, Origin.FIT, None)
    try:
        return plan(replace(inputs, knobs=replace(inputs.knobs, attended_tokens=asked)))
    except DoesNotFit:
        return None


def _growing(inputs: PlanInputs) -> tuple[RatedClaim, ...]:
    """Scratch that grows with attended tokens, the one of the highest rate for each arena; whatever the policy."""
    return charges(inputs.measured, inputs.claims, limits=inputs.limits, chip=inputs.chip).rated


def _key(claim: Claim) -> str:
    return claim.share or claim.name


def _geometric(low: int, high: int, halvings: int) -> set[int]:
    """Whole numbers whose ratios are about equal, both ends included."""
    if halvings == 0 or high - low < 2:
        return {low, high}
    middle = isqrt(low * high)
    return _geometric(low, middle, halvings - 1) | _geometric(middle, high, halvings - 1)
