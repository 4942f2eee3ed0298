"""The reference policy as a plan: an exact partition, its own order of steps, claims on their sides, caps that bind."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from gather import Gather
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.budget.inputs import PlanInputs
from tonnage.budget.plan import plan
from tonnage.budget.reference.environment import Environment
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.plan import reference_plan
from tonnage.config import Knobs, Limits, Setting
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import kv_layout
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder, Part
from tonnage.terms import (
    Chip,
    Claim,
    Fixed,
    Lifetime,
    LineKind,
    Maker,
    Measured,
    MemoryPlan,
    PerBlock,
    Quantity,
    Rank,
    ReferenceSide,
    Source,
    StagePeak,
    StepShape,
)
from tonnage.units import GiB

CHIP = Chip(name="test", sm=90, num_sms=0, total_bytes=0)
PEAK, POOL = ReferenceSide.PEAK, ReferenceSide.POOL
V1, V2 = ReferenceKnobs(), ReferenceKnobs(manager="V2")


def group(kind: KVGroupKind, name: str, *, window: int | None = None, block_bytes: int = 100) -> KVGroup:
    part = Part(name="kv", dtype="uint8", shape=(block_bytes,), offset_bytes=0)
    tokens = 0 if kind == KVGroupKind.STATE else 4
    return KVGroup(
        name=name, kind=kind, layers=(0,), window=window, block_tokens=tokens, block_bytes=block_bytes, parts=(part,)
    )


FULL = group(KVGroupKind.FULL, "full")
LAYOUTS = {
    "dense": (FULL,),
    "windows": (FULL, group(KVGroupKind.WINDOW, "window", window=16)),
    "states": (FULL, group(KVGroupKind.STATE, "state")),
    "padded": (FULL, group(KVGroupKind.WINDOW, "window", window=16, block_bytes=90)),
    "encoder": (FULL, group(KVGroupKind.CROSS, "cross")),
    "latent": (group(KVGroupKind.LATENT, "latent"),),
}
LIMITS = Limits(max_seq_len=64, max_batch_size=4, max_num_tokens=32, max_logits_rows=4, max_encoder_tokens=8)


def quantity(size: int, spread: int = 0) -> Quantity:
    return Quantity(bytes=size, low=size - spread, high=size + spread, source=Source.MEASURED, ref="test")


def measured(device: int = 100_000, trial: int = 5000, **sizes: int) -> Measured:
    given_ = {"weights": 20_000, "context": 3000, "libraries": 2000, "graphs": 1000, "foreign": 500, "stage": 4000}
    found = given_ | sizes
    stage = StagePeak(
        stage="prefill", shape=StepShape(), allocated=quantity(found["stage"]), reserved=quantity(found["stage"] + 700)
    )
    small = replace(stage, stage="decode", allocated=quantity(100), reserved=quantity(100))
    return Measured(
        rank=Rank(),
        device_bytes=device,
        weights=quantity(found["weights"]),
        context=quantity(found["context"], 500),
        libraries=quantity(found["libraries"]),
        graphs=quantity(found["graphs"]),
        foreign_bytes=quantity(found["foreign"]),
        stages=(small, stage),
        trial_pool_bytes=trial,
    )


def inputs(kind: str = "dense", *claims: Claim, **changes: object) -> PlanInputs:
    base = PlanInputs(
        device_name="test",
        model_name="model",
        chip=CHIP,
        measured=measured(),
        claims=claims,
        layout=KVLayout(slab_bytes=100, order=KVOrder.BLOCK_MAJOR, groups=LAYOUTS[kind]),
        page_bytes=64,
        knobs=Knobs(),
        limits=LIMITS,
    )
    return replace(base, **changes)


def claim(name: str, size: int, side: ReferenceSide | None, **changes: object) -> Claim:
    base = Claim(
        name=name,
        owner="test",
        line=LineKind.TABLES,
        cost=Fixed(bytes=size),
        lifetime=Lifetime.RESIDENT,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        reason="test",
        reference_side=side,
    )
    return replace(base, **changes)


def context(rate: int, side: ReferenceSide | None = POOL, **changes: object) -> Claim:
    scratch = Gather(rate=rate, chunk_bounded=False)
    return claim("context", 0, side, cost=scratch, line=LineKind.SCRATCH, share="attention", **changes)


def check(made: MemoryPlan) -> None:
    """What holds for every plan: a partition, an unbroken path, one limit that binds and is the pool."""
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    for line in made.lines:
        assert line.bytes >= 0
        assert line.low <= line.bytes <= line.high
    ops = {"-": int.__sub__, "+": int.__add__, "min": min, "min tokens": min}
    now = made.device_bytes
    for step in made.steps:
        assert step.before == now
        assert step.after >= 0
        if step.op in ops:
            assert step.after == ops[step.op](step.before, step.operand)
        now = step.after
    assert now == made.kv.tokens
    binding = [cap for cap in made.caps if cap.binding]
    assert [cap.kv_bytes for cap in binding] == [made.kv.bytes]
    assert all(cap.kv_bytes >= made.kv.bytes and cap.reason for cap in made.caps)
    padding = sum(line.bytes for line in made.lines if line.name == "padding")
    assert made.kv.bytes == made.kv.num_slabs * made.kv.layout.slab_bytes == made.bytes_of(LineKind.KV) + padding


def of(kind: str, knobs: ReferenceKnobs) -> ReferenceKnobs:
    return replace(knobs, cross_kv_cache_fraction=Fraction(1, 4)) if kind == "encoder" else knobs


# -- the worked example ------------------------------------------------------------------------------------------------

LLAMA = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")


def llama(**changes: object) -> PlanInputs:
    """An 8B model on 80 GiB; blocks of 32 tokens. D"""
    return inputs(
        measured=measured(
            device=80 * GiB,
            trial=17_716_740_096,
            weights=16_060_522_496,
            stage=1_610_612_736,
            context=1_258_291_200,
            libraries=0,
            graphs=0,
            foreign=0,
        ),
        layout=kv_layout(LLAMA, block_tokens=32),
        limits=replace(LIMITS, max_seq_len=131_072, max_batch_size=2048, max_num_tokens=8192),
        **changes,
    )


def test_the_worked_example():
    made = reference_plan(llama(), V1)
    check(made)
    assert (made.kv.num_slabs, made.kv.tokens) == (14_370, 459_840)
    assert [(step.name, step.op, step.after) for step in made.steps] == [
        ("peak", "-", 80 * GiB - 36_646_166_528),
        ("temporary pool", "+", 66_969_919_488),
        ("free_gpu_memory_fraction", "-", 60_272_927_539),
        ("blocks", "tokens for", 459_840),
    ]
    capped = reference_plan(llama(), replace(V1, max_tokens=200_000))
    check(capped)
    assert (capped.kv.num_slabs, capped.steps[-2].after) == (6250, 26_214_400_000)
    skipped = reference_plan(llama(), replace(V1, environment=Environment(skip_estimation=True)))
    check(skipped)
    assert (skipped.steps[-2].after, skipped.kv.tokens) == (61_722_479_001, 470_905 // 32 * 32)
    assert any("SKIP_KV_CACHE_ESTIMATION" in warning for warning in skipped.warnings)


def test_the_page_tells_the_worked_example():
    text = (Path(__file__).parents[2] / "docs/reference-policy.md").read_text()
    made = reference_plan(llama(), V1)
    peak, back, share, _ = made.steps
    told = [peak.operand, back.operand, back.after, share.after, share.after // 131_072, made.kv.num_slabs]
    assert [number for number in told if f"{number:,}" not in text] == []


def test_resumed_requests_of_the_page_manager():
    made = reference_plan(llama(), V2)
    check(made)
    assert made.kv.tokens == 459_840
    assert "436,853 tokens" in made.line(LineKind.KV).reason


# -- sides -------------------------------------------------------------------------------------------------------------


def test_every_step_in_order():
    made = reference_plan(
        inputs("latent", claim("encoder", 1000, PEAK), claim("indexer", 700, POOL), context(5)),
        replace(V1, max_tokens=1024),
    )
    check(made)
    names = [step.name for step in made.steps]
    assert names == [
        "peak", "encoder", "temporary pool", "free_gpu_memory_fraction", "indexer", "context workspace", "max_tokens",
        "blocks",
    ]  # fmt: skip
    # 4 sequences of 64 tokens, 5 bytes each, and they fit.
    assert made.attended_cap == 256
    assert made.line(LineKind.SCRATCH).bytes == 1280
    assert {line.name for line in made.line(LineKind.TABLES).children} == {"encoder", "indexer"}


def budget_of(made: MemoryPlan) -> int:
    """Bytes before they become blocks."""
    return next(step.before for step in made.steps if step.name == "blocks")


@settings(max_examples=40)
@given(st.integers(0, 20_000), st.fractions(Fraction(1, 2), Fraction(99, 100), max_denominator=100))
def test_what_a_claim_costs_by_its_side(size, fraction):
    knobs = replace(V1, free_gpu_memory_fraction=fraction)
    plain = reference_plan(inputs(), knobs)
    on_peak = reference_plan(inputs("dense", claim("a", size, PEAK)), knobs)
    on_pool = reference_plan(inputs("dense", claim("a", size, POOL)), knobs)
    outside = reference_plan(inputs("dense", claim("a", size, None)), knobs)
    for made in (plain, on_peak, on_pool, outside):
        check(made)
    assert abs(budget_of(plain) - budget_of(on_peak) - fraction * size) < 1
    assert budget_of(plain) - budget_of(on_pool) == size
    assert budget_of(outside) == budget_of(plain)


def test_what_the_probe_holds_already_is_not_counted_twice():
    made = reference_plan(inputs("dense", claim("a", 1000, PEAK, probed_bytes=900)), V1)
    assert made.line(LineKind.TABLES).bytes == 100


def test_claims_that_share_memory_count_once():
    shared = [claim(name, size, PEAK, share="one") for name, size in (("a", 300), ("b", 500))]
    made = reference_plan(inputs("dense", *shared), V1)
    assert [line.name for line in made.line(LineKind.TABLES).children] == ["b"]


def test_a_claim_that_does_not_apply_costs_nothing():
    made = reference_plan(inputs("dense", claim("a", 300, PEAK, applies=False, because="no encoder")), V1)
    assert made.bytes_of(LineKind.TABLES) == 0
    assert [(one.name, one.bytes) for one in made.not_charged] == [("a", 300)]


def test_what_is_claimed_beside_the_pool_lives_off_the_slack():
    """The reference would start and fail later; here the line is cut, its full need stands beside it, and is told."""
    made = reference_plan(inputs("dense", claim("tables", 50_000, None)), V1)
    check(made)
    tables = made.line(LineKind.TABLES)
    assert (tables.bytes < 50_000, tables.high) == (True, 50_000)
    assert next(line for line in made.lines if line.name == "slack").bytes == 0
    assert any("short of what is claimed" in warning for warning in made.warnings)
    fits = reference_plan(inputs("dense", claim("tables", 500, None)), V1)
    assert fits.line(LineKind.TABLES).bytes == 500
    assert not fits.warnings


def test_bookkeeping_of_blocks_lives_off_the_slack():
    each = claim("books", 0, None, cost=PerBlock(bytes_per_block=2))
    made = reference_plan(inputs("dense", each), V1)
    check(made)
    assert made.line(LineKind.TABLES).bytes == 2 * made.kv.num_slabs
    assert made.kv == reference_plan(inputs(), V1).kv


# -- attended tokens ---------------------------------------------------------------------------------------------------


def test_the_workspace_and_its_cap():
    """Where the worst case is out of reach, pool and scratch hold equally many tokens."""
    wide = replace(LIMITS, max_batch_size=512, max_num_tokens=512)
    made = reference_plan(inputs("latent", context(25), limits=wide), V1)
    check(made)
    assert made.attended_cap is not None
    assert 0 <= made.attended_cap - made.kv.tokens < 8
    asked = reference_plan(inputs("latent", context(25), limits=wide), replace(V1, fp8_context_mla_kv_len_cap=1))
    check(asked)
    assert asked.attended_cap == 64
    assert asked.kv.tokens > made.kv.tokens


@pytest.mark.parametrize(
    ("knobs", "facts", "sm", "reserved"),
    [
        (V1, {}, 90, True),
        (replace(V1, enable_block_reuse=False), {}, 90, False),
        (replace(V1, enable_chunked_prefill=True), {}, 90, False),
        (replace(V1, enable_chunked_prefill=True), {"is_chunk_bounded": False}, 90, True),
        (replace(V1, enable_chunked_prefill=True), {}, 100, True),  # the long prompt is longer than the model allows
    ],
)
def test_when_a_workspace_is_reserved(knobs, facts, sm, reserved):
    made = reference_plan(inputs("latent", context(5), chip=replace(CHIP, sm=sm)), knobs, **facts)
    check(made)
    assert (made.attended_cap is not None) is reserved


def test_the_long_probe_has_seen_the_workspace():
    chunked = replace(V1, enable_chunked_prefill=True)
    short = replace(LIMITS, max_num_tokens=4)
    made = reference_plan(inputs("latent", context(5), chip=replace(CHIP, sm=100), limits=short), chunked)
    assert made.attended_cap is None


def test_scratch_that_the_reference_does_not_know():
    made = reference_plan(inputs("latent", context(5, None)), V1)
    check(made)
    assert made.attended_cap is None
    assert [one.name for one in made.not_charged] == ["context"]


def test_ranks_agree_on_tokens_and_on_the_cap():
    made = reference_plan(inputs("latent", context(5), ranks_tokens=130, ranks_attended=77), V1)
    check(made)
    assert (made.kv.tokens, made.attended_cap) == (130, 77)  # whole blocks of 4 tokens have room for all of them


# -- kinds of caches and managers --------------------------------------------------------------------------------------

CLAIMED = (LineKind.TABLES, LineKind.SCRATCH, LineKind.TRANSIENT, LineKind.GRAPHS, LineKind.LIBRARIES)
KNOBS = st.builds(
    ReferenceKnobs,
    free_gpu_memory_fraction=st.fractions(Fraction(1, 4), Fraction(99, 100), max_denominator=100),
    max_tokens=st.none() | st.integers(64, 4000),
    max_gpu_total_bytes=st.just(0) | st.integers(4000, 80_000),
    manager=st.sampled_from(["V1", "V2"]),
    environment=st.builds(Environment, skip_estimation=st.booleans()),
)
CLAIMS = st.lists(
    st.tuples(st.integers(0, 4000), st.sampled_from([PEAK, POOL, None]), st.sampled_from(list(Lifetime))), max_size=4
)


@given(st.sampled_from(sorted(LAYOUTS)), KNOBS, CLAIMS, st.integers(0, 40), st.integers(0, 3))
def test_every_plan_is_a_partition(kind, knobs, claims, rate, extra):
    found = [
        claim(f"claim {i}", size, side, lifetime=lifetime, line=CLAIMED[(i + extra) % len(CLAIMED)])
        for i, (size, side, lifetime) in enumerate(claims)
    ]
    try:
        made = reference_plan(inputs(kind, *found, context(rate)), of(kind, knobs))
    except DoesNotFit as error:
        refused = error
    else:
        check(made)
        return
    assert refused.need_bytes > refused.have_bytes


@given(st.sampled_from(sorted(LAYOUTS)), KNOBS, st.data())
def test_more_is_never_less(kind, knobs, data):
    knobs = of(kind, knobs)
    more = data.draw(
        st.sampled_from(
            [
                {"free_gpu_memory_fraction": Fraction(99, 100)},
                {"max_tokens": None},
                {"max_tokens": (knobs.max_tokens or 10**6) + 100},
                {"max_gpu_total_bytes": 0},
                {"max_gpu_total_bytes": (knobs.max_gpu_total_bytes or 10**6) + 1000},
            ]
        )
    )

    def tokens(asked: ReferenceKnobs) -> int:
        try:
            return reference_plan(inputs(kind), asked).kv.tokens
        except DoesNotFit:
            return 0

    assert tokens(knobs) <= tokens(replace(knobs, **more))


def test_states_of_every_pipeline_stage():
    one, two = (
        reference_plan(inputs("states", measured=replace(measured(), rank=Rank(size=pp, pp=pp))), V2) for pp in (1, 2)
    )
    check(two)
    assert one.kv.bytes - two.kv.bytes == pytest.approx(400, abs=100)


def test_equal_shares_leave_what_short_windows_do_not_fill():
    made = reference_plan(inputs("windows"), V1)
    check(made)
    assert next(cap.name for cap in made.caps if cap.binding) == "equal shares of windows"
    left = next(line for line in made.lines if line.name == "left by equal shares of windows")
    assert left.bytes > 20_000
    paged = reference_plan(inputs("windows"), V2)
    check(paged)
    assert paged.kv.tokens > made.kv.tokens
    cached = replace(LIMITS, prefix_caching=True)
    ours = plan(inputs("windows", knobs=Knobs(keep_free_bytes=Setting(1)), limits=cached))
    assert ours.kv.tokens > made.kv.tokens


def test_the_encoder_has_a_share():
    with pytest.raises(InvalidSetting, match="cross_kv_cache_fraction"):
        reference_plan(inputs("encoder"), V1)
    made = reference_plan(inputs("encoder"), of("encoder", V1))
    check(made)
    assert any("encoder" in warning for warning in made.warnings)
    with pytest.raises(DoesNotFit, match="encoder's cache"):
        reference_plan(inputs("encoder"), replace(V1, cross_kv_cache_fraction=Fraction(1, 1000)))


def test_the_byte_cap_reaches_some_managers():
    capped = replace(V1, max_gpu_total_bytes=10_000)
    uniform = reference_plan(inputs(), capped)
    check(uniform)
    assert uniform.kv == reference_plan(inputs(), V1).kv
    assert any("max_gpu_total_bytes does not limit" in warning for warning in uniform.warnings)
    for kind, knobs in (("dense", replace(V2, max_gpu_total_bytes=10_000)), ("states", capped)):
        made = reference_plan(inputs(kind), knobs)
        check(made)
        assert made.kv.bytes <= 10_000
        assert any(step.name == "max_gpu_total_bytes" for step in made.steps)


def test_the_page_manager_inflates_max_tokens():
    """Quirk: 100 tokens need a quota of 100/0.95, so that resumed requests may still use them. Ours caps at 100."""
    made = reference_plan(inputs(), replace(V2, max_tokens=100))
    check(made)
    assert made.kv.tokens == 104
    assert reference_plan(inputs(), replace(V1, max_tokens=100)).kv.tokens == 100


@pytest.mark.parametrize(("knobs", "cp"), [(V2, 2), (V1, 2), (V1, 1)])
def test_where_nothing_is_derived(knobs, cp):
    """Helix with a quota; helix and VANILLA where the manager takes the fraction of what is free."""
    found = replace(measured(), rank=Rank(size=cp, cp=cp))
    made = reference_plan(inputs("dense", claim("a", 1000, PEAK), measured=found), knobs, backend="VANILLA")
    check(made)
    free = 100_000 - 26_500
    assert budget_of(made) == free * 9 // 10
    assert made.line(LineKind.TABLES).bytes == 1000
    assert made.warnings


def test_a_quota_that_is_given_caps_what_is_free():
    found = replace(measured(), rank=Rank(size=2, cp=2))
    made = reference_plan(
        inputs("dense", claim("a", 1000, PEAK), measured=found), replace(V2, max_gpu_total_bytes=9000)
    )
    check(made)
    assert [(step.name, step.after) for step in made.steps[:-1]] == [("peak", 73_500), ("max_gpu_total_bytes", 9000)]
    assert next(cap.name for cap in made.caps if cap.binding) == "max_gpu_total_bytes"


def test_claims_also_live_off_what_a_cap_leaves():
    made = reference_plan(inputs("dense", claim("tables", 50_000, None)), replace(V1, max_tokens=64))
    check(made)
    assert made.line(LineKind.TABLES).bytes == 50_000
    assert not made.warnings


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_peak_above_the_device_is_refused():
    with pytest.raises(DoesNotFit) as caught:
        reference_plan(inputs(measured=measured(device=25_000)), V1)
    assert caught.value.need_bytes == 30_500


def test_a_pool_below_one_sequence_is_refused():
    with pytest.raises(DoesNotFit, match="less than one sequence of max_seq_len = 64") as caught:
        reference_plan(inputs(), replace(V1, max_tokens=60))
    assert (caught.value.need_bytes, caught.value.have_bytes) == (1600, 1500)


def test_a_refusal_names_what_windows_and_states_take_first():
    crowd = replace(LIMITS, max_batch_size=400)
    with pytest.raises(DoesNotFit, match="before the first token") as caught:
        reference_plan(inputs("states", limits=crowd), replace(V2, max_gpu_total_bytes=30_000))
    assert caught.value.need_bytes == 401 * 100 + 64 * 25


def test_the_bar_follows_what_was_measured():
    made = reference_plan(inputs(), V1)
    line = made.line(LineKind.KV)
    assert line.low < line.bytes < line.high
    assert abs((line.high - line.low) - 900) < 200


def test_context_parallel_ranks_hold_every_other_page():
    found = replace(measured(), rank=Rank(size=2, cp=2))
    made = reference_plan(inputs(measured=found), V2)
    check(made)
    assert made.kv.tokens == made.kv.num_slabs * 8
