"""The curve's points against plans, the reference's figures, and counting unit by unit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from gather import Gather
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.budget.curve import (
    CURRENT,
    FAIR_SHARE,
    ONE_REQUEST,
    WORST_CASE,
    Stack,
    attended_curve,
    curve,
    lent_tokens,
    stack,
)
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.plan import plan
from tonnage.budget.solve import solve
from tonnage.budget.split import Demand, split
from tonnage.config import Knobs, Limits, Setting
from tonnage.errors import DoesNotFit
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder
from tonnage.terms import (
    Chip,
    Claim,
    Fixed,
    Lifetime,
    LineKind,
    Maker,
    Measured,
    Quantity,
    Rank,
    Scratch,
    Source,
)
from tonnage.units import GiB

CHIP = Chip(name="test", sm=90, num_sms=1, total_bytes=0)
NOTHING = Quantity.exact(0, Source.ASSUMED, "test")

#: The reference's latent model: bytes a token of cache, bytes a token attended to, and pools of 40 GiB.
K, W, BUDGET = 35_136, 40_960, 40 * GiB
REFERENCE = {262_144: (916_787, 262_144), 33_554_432: (564_414, 564_414), 131_072: (1_069_585, 131_072)}


#: Of a backend that does not cut its work to stay below a bound.
unbounded = partial(Gather, chunk_bounded=False)


def claim(cost: Fixed | Scratch, name: str = "gather", **changes: object) -> Claim:
    fields = {
        "line": LineKind.SCRATCH, "lifetime": Lifetime.RESIDENT, "maker": Maker.ARENA, "source": Source.DECLARED,
        "reason": "test", "share": name, "lendable": True,
    }  # fmt: skip
    return Claim(name=name, owner="test", cost=cost, **{**fields, **changes})


def group(kind: KVGroupKind, *, block_tokens: int, block_bytes: int, window: int | None = None) -> KVGroup:
    return KVGroup(
        name=kind.value, kind=kind, layers=(0,), window=window, block_tokens=block_tokens, block_bytes=block_bytes,
        parts=(),
    )  # fmt: skip


def inputs(
    device_bytes: int = 100_000,
    *,
    groups: tuple[KVGroup, ...] = (group(KVGroupKind.FULL, block_tokens=4, block_bytes=100),),
    claims: tuple[Claim, ...] = (claim(unbounded(rate=10, base=7)),),
    length: int = 40,
    rows: int = 100,
    page_bytes: int = 64,
    weights: int = 1000,
    **knobs: object,
) -> PlanInputs:
    measured = Measured(
        rank=Rank(), device_bytes=device_bytes, weights=Quantity.exact(weights, Source.DERIVED, "test"),
        context=NOTHING, libraries=NOTHING, stages=(), graphs=None, foreign_bytes=NOTHING,
    )  # fmt: skip
    asked = {"keep_free_bytes": 0, **knobs}
    return PlanInputs(
        device_name="test",
        model_name="test",
        chip=CHIP,
        measured=measured,
        claims=claims,
        layout=KVLayout(slab_bytes=max(g.block_bytes for g in groups), order=KVOrder.BLOCK_MAJOR, groups=groups),
        page_bytes=page_bytes,
        knobs=Knobs(**{name: Setting.flag(value, value, f"--{name}") for name, value in asked.items()}),
        limits=Limits(max_seq_len=length, max_batch_size=rows, max_num_tokens=200, max_logits_rows=rows),
    )


def with_attended(made: PlanInputs, tokens: int) -> PlanInputs:
    return replace(made, knobs=replace(made.knobs, attended_tokens=Setting.flag(tokens, tokens, "test")))


@pytest.mark.parametrize("most", REFERENCE)
def test_the_references_pools_by_the_split_alone(most):
    shared = split(BUDGET, rate_bytes=K, demands=[Demand(name="context", rate_bytes=W, ceiling_bytes=W * most)])
    assert (shared.units, shared.granted[0] // W) == REFERENCE[most]


@pytest.mark.parametrize("most", REFERENCE)
def test_the_references_pools_as_points_of_a_curve(most):
    """Blocks of one token and pages of one byte, so that nothing is rounded; 256 sequences of 131,072 tokens."""
    latent = (group(KVGroupKind.LATENT, block_tokens=1, block_bytes=K),)
    asked = inputs(
        BUDGET, groups=latent, claims=(claim(unbounded(rate=W)),), length=131_072, rows=256, page_bytes=1, weights=0,
        attended_tokens=most,
    )  # fmt: skip
    current = attended_curve(asked).marked(CURRENT)
    assert current is not None
    assert (current.kv_tokens, current.attended_cap) == REFERENCE[most]
    assert lent_tokens(asked) == BUDGET // K


def test_both_ends_the_setting_and_the_bend_are_points():
    drawn = attended_curve(inputs(attended_tokens=1234))
    asked = [point.attended_tokens for point in drawn.points]
    assert asked == sorted(set(asked))
    assert {40, 1234, 4000} <= set(asked)
    first, now, last = (drawn.marked(mark) for mark in (ONE_REQUEST, CURRENT, WORST_CASE))
    assert (first, last) == (drawn.points[0], drawn.points[-1])
    assert now is not None
    assert now.attended_tokens == 1234
    share = drawn.marked(FAIR_SHARE)
    assert share is not None
    assert share.attended_tokens == share.attended_cap == last.attended_cap
    assert abs(share.kv_tokens - share.attended_cap) <= 4  # one block
    assert drawn.scratch == ("gather",)


@given(
    device=st.integers(2_000, 200_000),
    rate=st.integers(1, 300),
    base=st.integers(0, 500),
    length=st.integers(1, 60),
    rows=st.integers(1, 40),
    page=st.sampled_from([1, 64, 1000]),
    now=st.none() | st.integers(1, 3000),
    kv_tokens=st.none() | st.integers(1, 3000),
    policy=st.sampled_from(["cap", "reserve"]),
)
@settings(max_examples=25)
def test_every_point_is_the_plan_with_that_setting(device, rate, base, length, rows, page, now, kv_tokens, policy):
    asked = {"attended_tokens": now, "kv_tokens": kv_tokens, "scratch": policy}
    made = inputs(
        device, claims=(claim(unbounded(rate=rate, base=base)),), length=length, rows=rows, page_bytes=page,
        **{name: value for name, value in asked.items() if value is not None},
    )  # fmt: skip
    try:
        plan(made)
    except DoesNotFit:
        return
    drawn = curve(made)
    assert drawn.attended is not None
    for point in drawn.attended.points:
        same = plan(with_attended(made, point.attended_tokens))
        assert (point.kv_tokens, point.kv_bytes) == (same.kv.tokens, same.kv.bytes)
        assert point.scratch_bytes == same.bytes_of(LineKind.SCRATCH)
        held_to = point.attended_tokens if policy == "reserve" else min(point.attended_tokens, point.kv_tokens)
        assert point.attended_cap == same.attended_cap == held_to
    for tokens in drawn.attended.refused_tokens:
        with pytest.raises(DoesNotFit):
            plan(with_attended(made, tokens))
    pools = [point.kv_tokens for point in drawn.attended.points]
    assert pools == sorted(pools, reverse=True)
    assert drawn.attended.lent_tokens >= pools[0]
    current = drawn.attended.marked(CURRENT)
    assert current is not None
    assert current.kv_tokens == plan(made).kv.tokens


def test_scratch_that_keeps_its_state_is_not_lent():
    kept = claim(unbounded(rate=10), lendable=False)
    assert lent_tokens(inputs(claims=(kept,))) is None
    # one arena, two declarations: whoever keeps state keeps all of it
    both = (claim(unbounded(rate=10)), claim(unbounded(rate=5), name="other", share="gather", lendable=False))
    assert lent_tokens(inputs(claims=both)) is None
    apart = (claim(unbounded(rate=10)), claim(unbounded(rate=5), name="other", lendable=False))
    only_other = plan(inputs(claims=apart[1:])).kv.tokens
    assert lent_tokens(inputs(claims=apart)) == only_other


def test_without_growing_scratch_there_is_one_picture():
    drawn = curve(inputs(claims=(claim(Fixed(bytes=500)),)))
    assert drawn.attended is None
    assert drawn.stack.crossing_tokens == drawn.stack.plan_tokens


GROUPS = (
    group(KVGroupKind.FULL, block_tokens=4, block_bytes=100),
    group(KVGroupKind.WINDOW, block_tokens=4, block_bytes=90, window=10),
    group(KVGroupKind.STATE, block_tokens=0, block_bytes=70),
)


@given(
    device=st.integers(20_000, 300_000),
    rate=st.integers(0, 50),
    rows=st.integers(1, 12),
    page=st.sampled_from([1, 64, 1000]),
    kv_tokens=st.none() | st.integers(40, 3000),
)
@settings(max_examples=25)
def test_the_stack_adds_up_and_crosses_where_the_plan_is(device, rate, rows, page, kv_tokens):
    capped = {} if kv_tokens is None else {"kv_tokens": kv_tokens}
    asked = inputs(device, groups=GROUPS, claims=(claim(unbounded(rate=rate)),), rows=rows, page_bytes=page, **capped)
    try:
        made = plan(asked)
    except DoesNotFit:
        return
    drawn = stack(solve(asked))
    assert all(len(part.sizes) == len(drawn.tokens) and min(part.sizes) >= 0 for part in drawn.parts)
    totals = [drawn.total_at(place) for place in range(len(drawn.tokens))]
    assert totals == sorted(totals)
    for tokens, total in zip(drawn.tokens, totals, strict=True):
        assert (total <= drawn.budget_bytes) == (tokens <= drawn.crossing_tokens)
    assert drawn.budget_bytes == device
    assert drawn.plan_tokens == made.kv.tokens <= drawn.crossing_tokens
    assert (drawn.plan_tokens == drawn.crossing_tokens) or drawn.bound_by in ("kv_tokens", "limits")
    at = drawn.tokens.index(made.kv.tokens)
    unused = sum(line.bytes for line in made.lines if line.name.startswith(("left by", "part of a block")))
    assert drawn.total_at(at) == device - unused


def sizes(drawn: Stack, name: str) -> tuple[int, ...]:
    return next(part.sizes for part in drawn.parts if part.name == name)


def test_each_demand_has_a_part_and_scratch_stops_growing():
    asked = inputs(200_000, groups=GROUPS, rows=3)
    drawn = stack(solve(asked))
    assert [part.name for part in drawn.parts] == [
        "weights", "other fixed lines", "state", "full", "window", "gather", "books and rounding",
    ]  # fmt: skip
    assert len(set(sizes(drawn, "weights"))) == len(set(sizes(drawn, "state"))) == 1
    window, scratch, full = sizes(drawn, "window"), sizes(drawn, "gather"), sizes(drawn, "full")
    assert window[0] == 0 < window[len(window) // 2] < window[-1] < full[-1]
    assert scratch[-1] == 10 * 3 * 40
    assert full[-1] > full[-2] > full[len(full) // 2]


def test_the_budget_is_what_is_not_set_aside():
    asked = inputs(100_000, keep_free_bytes=5_000, total_bytes=60_000, claims=())
    assert stack(solve(asked)).budget_bytes == 60_000
