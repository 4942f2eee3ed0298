"""The partition: exact, never negative, monotone in what is allowed, with one cap that binds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from gather import Gather
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.plan import PlanInputs, plan
from tonnage.config import Knobs, Limits, Setting
from tonnage.errors import DoesNotFit
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
    Scratch,
    Source,
    StagePeak,
    StepShape,
)

BLOCK_TOKENS, SLAB_BYTES, PAGE_BYTES = 4, 100, 64
CHIP = Chip(name="test", sm=0, num_sms=0, total_bytes=0)


def layout() -> KVLayout:
    part = Part(name="kv", dtype="uint8", shape=(SLAB_BYTES,), offset_bytes=0)
    group = KVGroup(
        name="full",
        kind=KVGroupKind.FULL,
        layers=(0,),
        window=None,
        block_tokens=BLOCK_TOKENS,
        block_bytes=SLAB_BYTES,
        parts=(part,),
    )
    return KVLayout(slab_bytes=SLAB_BYTES, order=KVOrder.BLOCK_MAJOR, groups=(group,))


def exactly(num_bytes: int) -> Quantity:
    return Quantity.exact(num_bytes, Source.MEASURED, "test")


def stage(name: str, allocated: int, reserved: int | None = None) -> StagePeak:
    taken = exactly(allocated if reserved is None else reserved)
    return StagePeak(stage=name, shape=StepShape(), allocated=exactly(allocated), reserved=taken)


def measured(device_bytes: int = 100_000, **changes: object) -> Measured:
    made = Measured(
        rank=Rank(),
        device_bytes=device_bytes,
        weights=exactly(10_000),
        context=exactly(500),
        libraries=exactly(300),
        stages=(stage("prefill", 2000, 2400), stage("decode", 700, 800)),
        graphs=None,
        foreign_bytes=exactly(0),
    )
    return replace(made, **changes)


def claim(name: str, cost: Fixed | PerBlock | Scratch, line: LineKind = LineKind.TABLES, **changes: object) -> Claim:
    fields = {"lifetime": Lifetime.RESIDENT, "maker": Maker.TORCH, "source": Source.DERIVED, "reason": "test"}
    return Claim(name=name, owner="test", line=line, cost=cost, **{**fields, **changes})


def step_claim(name: str, num_bytes: int, **changes: object) -> Claim:
    return claim(name, Fixed(bytes=num_bytes), LineKind.TRANSIENT, lifetime=Lifetime.STEP, **changes)


def knobs(**values: object) -> Knobs:
    asked = {"keep_free_bytes": 0, **values}
    return Knobs(**{name: Setting.flag(value, value, f"--{name}") for name, value in asked.items()})


def limits(seq_len: int = 40, batch: int = 100) -> Limits:
    return Limits(max_seq_len=seq_len, max_batch_size=batch, max_num_tokens=200, max_logits_rows=batch)


def inputs(**changes: object) -> PlanInputs:
    made = PlanInputs(
        device_name="test",
        model_name="model",
        chip=CHIP,
        measured=measured(),
        claims=(),
        layout=layout(),
        page_bytes=PAGE_BYTES,
        knobs=knobs(),
        limits=limits(),
    )
    return replace(made, **changes)


def check(made: MemoryPlan) -> MemoryPlan:
    """What holds for every plan."""
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    for line in made.lines:
        assert 0 <= line.low <= line.bytes <= line.high, line
        assert all(child.bytes >= 0 for child in line.children)
        if line.children and line.kind == LineKind.TRANSIENT:
            assert line.bytes == max(child.bytes for child in line.children)
        elif line.children:
            assert line.bytes == sum(child.bytes for child in line.children), line
    assert sum(cap.binding for cap in made.caps) == 1
    binding = next(cap for cap in made.caps if cap.binding)
    assert made.kv.bytes == binding.kv_bytes == min(cap.kv_bytes for cap in made.caps)
    assert made.kv.bytes == made.kv.num_slabs * made.kv.layout.slab_bytes == made.bytes_of(LineKind.KV)
    assert made.kv.tokens == made.kv.num_slabs * BLOCK_TOKENS
    assert made.max_concurrency >= 1
    for before, after in zip(made.steps, made.steps[1:], strict=False):
        assert before.after == after.before
    for row in made.steps:
        assert row.op != "-" or row.after == row.before - row.operand
        assert "min" not in row.op or row.after == min(row.before, row.operand)
    assert made.steps[0].before == made.device_bytes
    assert made.steps[-1].after == made.kv.tokens
    return made


def test_by_hand():
    made = check(plan(inputs(page_bytes=1)))
    left = 100_000 - 10_000 - 500 - 300 - 2000 - 400
    assert made.kv.num_slabs == left // 100 == 868
    assert made.line(LineKind.TRANSIENT).bytes == 2000
    assert made.bytes_of(LineKind.SLACK) == 0
    assert made.bytes_of(LineKind.ROUNDING) == 0
    assert made.max_concurrency == 86
    assert made.attended_cap is None


def test_what_steps_take_is_one_kind_and_slack_is_only_what_is_left():
    """Tensors and what the allocator adds to them cannot be told apart on a device, so one figure is compared."""
    made = check(plan(inputs(page_bytes=1, knobs=knobs(kv_fraction=Fraction(1, 2)))))
    steps = [line for line in made.lines if line.kind == LineKind.TRANSIENT]
    assert [(line.name, line.bytes, line.lifetime) for line in steps] == [
        ("transient", 2000, Lifetime.STEP),
        ("fragmentation", 400, Lifetime.STEP),
    ]
    assert made.line(LineKind.TRANSIENT).name == "transient"
    assert made.bytes_of(LineKind.TRANSIENT) == 2400
    assert {line.name for line in made.lines if line.kind == LineKind.SLACK} == {"left by kv_fraction"}


@pytest.mark.parametrize(("asked", "said"), [(knobs(keep_free_bytes=7), "as asked"), (Knobs(), "the default")])
def test_keep_free_says_who_wanted_it(asked, said):
    made = plan(inputs(knobs=asked, measured=measured(10**9)))
    step = next(step for step in made.steps if step.name == "keep_free")
    assert said in step.reason
    assert step.reason == made.line(LineKind.KEEP_FREE).reason


def test_keep_free_has_a_default_and_zero_means_zero():
    large = measured(10**9)
    assert plan(inputs(knobs=Knobs(), measured=large)).bytes_of(LineKind.KEEP_FREE) == 256 * 2**20
    assert plan(inputs(measured=large)).bytes_of(LineKind.KEEP_FREE) == 0


def test_pages_are_a_line_of_their_own():
    made = check(plan(inputs(knobs=knobs(kv_bytes=1000))))
    rounding = next(line for line in made.lines if line.name == "page rounding")
    assert {child.name: child.bytes for child in rounding.children} == {
        "weights": -10_000 % PAGE_BYTES,
        "scratch": 0,
        "kv": -1000 % PAGE_BYTES,
    }


def test_the_fraction_is_of_what_does_not_depend_on_tokens():
    made = check(plan(inputs(page_bytes=1, knobs=knobs(kv_fraction=Fraction(9, 10)))))
    rest = 86_800
    assert made.kv.num_slabs == rest * 9 // 10 // 100
    left = next(line for line in made.lines if line.name == "left by kv_fraction")
    assert (left.kind, left.bytes) == (LineKind.SLACK, rest - rest * 9 // 10)


@pytest.mark.parametrize(
    ("asked", "binding", "slabs"),
    [
        ({}, "budget", 868),
        ({"kv_bytes": 5050}, "kv_bytes", 50),
        ({"kv_tokens": 403}, "kv_tokens", 100),
        ({"kv_tokens": 403, "kv_bytes": 5050}, "kv_bytes", 50),
        ({"total_bytes": 50_000}, "total_bytes", 368),
        ({"kv_fraction": Fraction(1, 2)}, "kv_fraction", 434),
        ({"total_bytes": 10**9}, "budget", 868),
        ({"kv_bytes": 10**9}, "budget", 868),
    ],
)
def test_the_smallest_cap_binds_and_what_it_leaves_is_named(asked, binding, slabs):
    made = check(plan(inputs(page_bytes=1, knobs=knobs(**asked))))
    assert (next(cap.name for cap in made.caps if cap.binding), made.kv.num_slabs) == (binding, slabs)
    assert {cap.name for cap in made.caps} >= {"budget", "limits", *asked} - (
        {"kv_fraction"} if "kv_fraction" not in asked else set()
    )
    if binding != "budget":
        assert any(line.name == f"left by {binding}" for line in made.lines)
        assert all(f"--{name}" in cap.setting for cap in made.caps for name in asked if cap.name == name)


def test_more_than_the_limits_can_use_is_left():
    made = check(plan(inputs(page_bytes=1, limits=limits(seq_len=41, batch=2))))
    assert made.kv.num_slabs == 2 * 11
    assert made.max_concurrency == 2
    assert next(cap.name for cap in made.caps if cap.binding) == "limits"


def test_a_prefix_cache_has_a_use_for_every_block():
    caching = replace(limits(batch=2), prefix_caching=True)
    assert check(plan(inputs(page_bytes=1, limits=caching))).kv.num_slabs == 868


def test_total_bytes_holds_everything_but_what_is_not_ours():
    made = check(
        plan(
            inputs(
                measured=measured(foreign_bytes=exactly(20_000)), knobs=knobs(total_bytes=50_000, keep_free_bytes=1000)
            )
        )
    )
    outside = (LineKind.FOREIGN, LineKind.KEEP_FREE)
    left = next(line.bytes for line in made.lines if line.name == "left by total_bytes")
    assert made.device_bytes - sum(made.bytes_of(kind) for kind in outside) - left == 50_000


def test_claims_per_block_join_its_price():
    made = check(plan(inputs(page_bytes=1, claims=(claim("metadata", PerBlock(bytes_per_block=11)),))))
    assert made.kv.num_slabs == 86_800 // 111
    assert made.bytes_of(LineKind.TABLES) == 11 * made.kv.num_slabs


def test_same_stage_adds_and_other_stages_do_not():
    claims = (
        step_claim("masks", 50, stage="prefill"),
        step_claim("more", 30, stage="prefill"),
        step_claim("log-probabilities", 400, stage="decode"),
        step_claim("encoder", 2070, stage="encoder"),
    )
    made = check(plan(inputs(claims=claims)))
    transient = made.line(LineKind.TRANSIENT)
    assert {child.name: child.bytes for child in transient.children} == {
        "prefill": 2080,
        "decode": 1100,
        "encoder": 2070,
    }
    assert transient.bytes == 2080


def test_a_claim_of_no_stage_may_meet_any():
    made = check(plan(inputs(claims=(step_claim("debug copies", 100),))))
    assert made.line(LineKind.TRANSIENT).bytes == 2100


def test_what_a_probe_saw_is_not_counted_twice():
    claims = (
        step_claim("logits", 500, stage="prefill", probed_bytes=450),
        claim("t", Fixed(bytes=90), probed_bytes=70),
    )
    made = check(plan(inputs(claims=claims)))
    assert made.line(LineKind.TRANSIENT).bytes == 2050
    assert made.bytes_of(LineKind.TABLES) == 20


def test_sharers_take_the_largest():
    claims = (
        claim("a", Fixed(bytes=70), LineKind.SCRATCH, share="one"),
        claim("b", Fixed(bytes=90), LineKind.SCRATCH, share="one"),
        claim("c", Fixed(bytes=5), LineKind.SCRATCH, share="two"),
    )
    assert check(plan(inputs(claims=claims))).bytes_of(LineKind.SCRATCH) == 95


def test_a_claim_that_does_not_apply_costs_nothing():
    made = check(plan(inputs(claims=(claim("penalties", Fixed(bytes=10**9), applies=False),))))
    assert made.bytes_of(LineKind.TABLES) == 0


def test_bounded_scratch_is_paid_in_full():
    small = limits(seq_len=40, batch=10)
    made = check(plan(inputs(limits=small, claims=(claim("s", Gather(rate=2, base=7), LineKind.SCRATCH),))))
    assert made.bytes_of(LineKind.SCRATCH) == 7 + 2 * 10 * 40
    assert made.attended_cap is None


def test_unbounded_scratch_shares_the_budget():
    """Blocks of 4 tokens cost 100 bytes, and 25 bytes of scratch for each token that may be attended to."""
    gather = Gather(rate=25, base=300, chunk_bounded=False)
    made = check(plan(inputs(page_bytes=1, claims=(claim("s", gather, LineKind.SCRATCH),))))
    blocks = (86_800 - 300) // 200
    assert made.kv.num_slabs == blocks
    assert made.bytes_of(LineKind.SCRATCH) == 300 + 100 * blocks
    assert made.attended_cap == 4 * blocks


def test_unbounded_scratch_stops_at_its_worst_case():
    gather = Gather(rate=25, chunk_bounded=False)
    few = limits(seq_len=40, batch=3)
    made = check(plan(inputs(page_bytes=1, limits=replace(few, prefix_caching=True), claims=(claim("s", gather),))))
    assert made.attended_cap == 3 * 40
    assert made.kv.num_slabs == (86_800 - 25 * 120) // 100


def test_the_bar_of_the_pool_follows_the_other_lines():
    wide = Quantity(bytes=500, low=400, high=1500, source=Source.ASSUMED, ref="test")
    made = check(plan(inputs(page_bytes=1, measured=measured(context=wide))))
    kv = made.line(LineKind.KV)
    assert (kv.low, kv.bytes, kv.high) == (85_800, 86_800, 86_900)


class TestRefusals:
    def refused(self, **changes: object) -> DoesNotFit:
        with pytest.raises(DoesNotFit) as caught:
            plan(inputs(page_bytes=1, **changes))
        return caught.value

    def test_weights(self):
        error = self.refused(measured=measured(9000))
        assert "weights alone take" in str(error)
        assert (error.need_bytes, error.have_bytes) == (10_000 + 800 + 2400 + 1000, 9000)

    def test_lines_beside_the_pool(self):
        error = self.refused(measured=measured(12_000))
        assert "before the first KV block" in str(error)
        assert error.shortfall_bytes == 2200

    def test_less_than_one_sequence(self):
        error = self.refused(measured=measured(14_100))
        assert "the KV pool would hold 36 tokens" in str(error)
        assert "max_seq_len = 40" in str(error)
        assert error.shortfall_bytes == 100

    def test_a_cap_on_the_pool(self):
        error = self.refused(knobs=knobs(kv_tokens=39))
        assert "--kv_tokens" in str(error)
        assert (error.need_bytes, error.have_bytes) == (1000, 900)

    def test_one_block_is_not_blocks(self):
        assert "for 1 block." in str(self.refused(knobs=knobs(kv_tokens=3), limits=limits(seq_len=4)))

    def test_a_small_share_is_told_as_a_share(self):
        """10 blocks of 100 bytes of the 86,800 that are left: 0.0115..., rounded up to what one can type."""
        error = self.refused(knobs=knobs(kv_fraction=Fraction(1, 10**9)))
        assert "Need: a kv_fraction of at least 0.011521: 1000 B (1,000 bytes) for 10 blocks." in str(error)
        assert "iB" not in error.need
        assert (error.need_bytes, error.have_bytes) == (1000, 0)
        check(plan(inputs(page_bytes=1, knobs=knobs(kv_fraction=Fraction(12, 1000)))))
        self.refused(knobs=knobs(kv_fraction=Fraction(11, 1000)))

    @pytest.mark.parametrize("device_bytes", [9000, 12_000, 14_100])
    def test_a_share_of_too_little_asks_for_no_more_than_enough(self, device_bytes):
        error = self.refused(measured=measured(device_bytes), knobs=knobs(kv_fraction=Fraction(1, 10**9)))
        assert error.need_bytes == 14_200
        assert "even with a kv_fraction of 1" in error.need

    def test_a_cap_on_everything(self):
        error = self.refused(knobs=knobs(total_bytes=13_000))
        assert error.have_bytes == 13_000
        assert "total_bytes allows" in str(error)

    def test_need_is_exactly_enough(self):
        for changes in ({"measured": measured(14_100)}, {"measured": measured(9000)}):
            need = self.refused(**changes).need_bytes
            check(plan(inputs(page_bytes=1, measured=measured(need))))
            self.refused(measured=measured(need - 1))


ASKED = st.fixed_dictionaries(
    {},
    optional={
        "kv_bytes": st.integers(1, 100_000),
        "kv_tokens": st.integers(1, 5000),
        "total_bytes": st.integers(1, 150_000),
        "keep_free_bytes": st.integers(0, 50_000),
        "kv_fraction": st.fractions(min_value=Fraction(1, 100), max_value=1),
    },
)


def a_fixed(num_bytes: int, probed: int, share: str | None) -> Claim:
    return claim(f"fixed {num_bytes}", Fixed(bytes=num_bytes), probed_bytes=probed, share=share)


def a_per_block(num_bytes: int) -> Claim:
    return claim(f"block {num_bytes}", PerBlock(bytes_per_block=num_bytes))


def a_step(num_bytes: int, where: str | None) -> Claim:
    return step_claim(f"step {num_bytes}", num_bytes, stage=where)


def a_scratch(rate: int, base: int, *, bounded: bool) -> Claim:
    gather = Gather(rate=rate, base=base, chunk_bounded=bounded)
    return claim(f"scratch {rate} {base}", gather, LineKind.SCRATCH, share=f"{rate}")


CLAIMS = st.lists(
    st.one_of(
        st.builds(a_fixed, st.integers(0, 5000), st.integers(0, 300), st.sampled_from([None, "x"])),
        st.builds(a_per_block, st.integers(0, 50)),
        st.builds(a_step, st.integers(0, 3000), st.sampled_from(["prefill", "x", None])),
        st.builds(a_scratch, st.integers(0, 3), st.integers(0, 500), bounded=st.booleans()),
    ),
    max_size=5,
)


def tokens_or_none(made: PlanInputs) -> int:
    """Tokens of a checked plan; -1 where it is refused."""
    try:
        return check(plan(made)).kv.tokens
    except DoesNotFit as error:
        short = error.shortfall_bytes
    assert short > 0
    return -1


@given(ASKED, CLAIMS, st.integers(1, 200_000), st.integers(1, 200), st.integers(1, 60), st.sampled_from([1, 64, 4096]))
def test_every_plan_is_a_partition(asked, claims, device, seq_len, batch, page):
    tokens_or_none(
        inputs(
            measured=measured(device),
            claims=tuple(claims),
            page_bytes=page,
            knobs=knobs(**asked),
            limits=limits(seq_len, batch),
        )
    )


@given(ASKED, CLAIMS, st.sampled_from(["kv_bytes", "kv_tokens", "total_bytes"]), st.integers(1, 20_000))
def test_a_higher_cap_never_gives_less(asked, claims, name, more):
    if name not in asked:
        return
    before = tokens_or_none(inputs(claims=tuple(claims), knobs=knobs(**asked)))
    after = tokens_or_none(inputs(claims=tuple(claims), knobs=knobs(**{**asked, name: asked[name] + more})))
    assert after >= before


@given(ASKED, CLAIMS, st.fractions(min_value=Fraction(1, 50), max_value=1))
def test_a_larger_share_never_gives_less(asked, claims, share):
    smaller = tokens_or_none(
        inputs(claims=tuple(claims), knobs=knobs(**{**asked, "kv_fraction": share * Fraction(9, 10)}))
    )
    assert tokens_or_none(inputs(claims=tuple(claims), knobs=knobs(**{**asked, "kv_fraction": share}))) >= smaller


@given(ASKED, CLAIMS, st.integers(0, 30_000))
def test_a_larger_device_never_gives_less(asked, claims, more):
    small = tokens_or_none(inputs(claims=tuple(claims), knobs=knobs(**asked)))
    large = inputs(claims=tuple(claims), knobs=knobs(**asked), measured=measured(100_000 + more))
    assert tokens_or_none(large) >= small


@given(CLAIMS, st.randoms(use_true_random=False))
def test_the_order_of_claims_does_not_matter(claims, random):
    shuffled = list(claims)
    random.shuffle(shuffled)
    assert tokens_or_none(inputs(claims=tuple(shuffled))) == tokens_or_none(inputs(claims=tuple(claims)))
