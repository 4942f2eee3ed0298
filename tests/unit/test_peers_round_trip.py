"""Equivalent flags, translated back, give the pool they came from: over plans made by hand and plans of models.

The bar: ``exact`` to within one block. ``fraction`` never more, and less by no more than a unit of its last digit, one
block and what whole pages round; where that may leave less than one sequence it is not printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import shapes
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tonnage.budget.plan import PlanInputs, plan
from tonnage.budget.search import smallest
from tonnage.config import Knobs, LimitKnobs, Limits, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import Card, find_card, generic_card, host_card
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder
from tonnage.peers import ENGINES, equivalents, translate
from tonnage.peers.equivalent import NO_SHARE, ONE
from tonnage.peers.facts import PlanFacts
from tonnage.planner import find_config, plan_without_device
from tonnage.terms import (
    Chip,
    Claim,
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
from tonnage.units import GiB, MiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")
PlanWith = Callable[[Knobs, LimitKnobs], MemoryPlan]

#: What each engine's flags say; the other knobs have no word there and stay as they were asked.
SAID = ("total_bytes", "keep_free_bytes", "kv_bytes", "kv_tokens", "kv_fraction", "kv_dtype", "block_tokens")
SHAPES = ("max_seq_len", "max_batch_size", "max_num_tokens")


def unsaid(made: MemoryPlan, knobs: Knobs, limits: LimitKnobs) -> tuple[Knobs, LimitKnobs]:
    said = SAID if made.limits.graph_batch_sizes else (*SAID, "graphs")
    shapes = SHAPES if made.limits.prefix_caching else (*SHAPES, "prefix_caching")
    return replace(knobs, **dict.fromkeys(said, Setting())), replace(limits, **dict.fromkeys(shapes, Setting()))


def back(likes: list[str], made: MemoryPlan, knobs: Knobs, limits: LimitKnobs, plan_with: PlanWith) -> MemoryPlan:
    base, shapes = unsaid(made, knobs, limits)
    asked = translate(likes, knobs=base, limit_knobs=shapes, plan_with=plan_with)
    return plan_with(asked.knobs, asked.limit_knobs)


def check_round_trip(knobs: Knobs, limits: LimitKnobs, plan_with: PlanWith, *, page_bytes: int) -> None:
    made = plan_with(knobs, limits)
    facts = PlanFacts.of(made)
    unit_tokens = min((g.block_tokens for g in made.kv.layout.groups if g.block_tokens), default=1)
    largest = max(g.block_tokens for g in made.kv.layout.groups)
    unit_bytes = made.kv.layout.slab_bytes * sum(
        -(-largest // (g.block_tokens or largest)) for g in made.kv.layout.groups
    )
    denominators = dict(zip(("vllm", "sglang", "trtllm"), (facts.device, facts.before, facts.rest), strict=True))
    for each in equivalents(made):
        assert each.exact
        exact = back(each.likes(), made, knobs, limits, plan_with)
        # Where windows alone are kept, one more token may cost nothing, so the same bytes may hold more of them.
        assert exact.kv.bytes == made.kv.bytes or abs(exact.kv.tokens - made.kv.tokens) <= unit_tokens, each
        assert exact.limits == made.limits
        if not each.fraction:
            assert NO_SHARE in each.notes or not facts.kv, each
            continue
        lost = denominators[each.engine.name] // ONE + 1 + unit_bytes + 2 * page_bytes
        near = back(each.likes(by_fraction=True), made, knobs, limits, plan_with)
        assert made.kv.tokens >= near.kv.tokens, each
        assert made.kv.bytes - near.kv.bytes <= lost, each


# Plans made by hand: layers of several kinds, scratch that grows, bookkeeping of blocks, other processes.


@dataclass(frozen=True, kw_only=True)
class Gather(Scratch):
    """``rate`` bytes for each attended token."""

    backend: str = "test"
    name: str = "gather"
    share: str = "attention"
    source: str = "test"
    rate: int

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        return self.rate * shape.attended_tokens


def exactly(num_bytes: int) -> Quantity:
    return Quantity.exact(num_bytes, Source.MEASURED, "test")


def claim(name: str, cost: PerBlock | Scratch, line: LineKind) -> Claim:
    return Claim(
        name=name, owner="test", line=line, cost=cost, lifetime=Lifetime.RESIDENT, maker=Maker.ARENA,
        source=Source.DERIVED, reason="test",
    )  # fmt: skip


def group(kind: KVGroupKind, slab_bytes: int) -> KVGroup:
    window = 100 if kind == KVGroupKind.WINDOW else None
    block_tokens = 0 if kind == KVGroupKind.STATE else 16
    return KVGroup(
        name=kind.value, kind=kind, layers=(0,), window=window, block_tokens=block_tokens, block_bytes=slab_bytes - 7,
        parts=(),
    )  # fmt: skip


@st.composite
def by_hand(draw: st.DrawFn) -> tuple[PlanInputs, Limits]:
    slab_bytes = draw(st.integers(1000, 50_000))
    others = draw(st.sets(st.sampled_from([KVGroupKind.WINDOW, KVGroupKind.STATE])))
    groups = (group(KVGroupKind.FULL, slab_bytes), *(group(kind, slab_bytes) for kind in sorted(others)))
    claims = []
    if draw(st.booleans()):
        claims.append(claim("gather", Gather(rate=draw(st.integers(1, 3000)), chunk_bounded=False), LineKind.SCRATCH))
    if not others and draw(st.booleans()):
        claims.append(claim("counts", PerBlock(bytes_per_block=draw(st.integers(1, 100))), LineKind.TABLES))
    sizes = st.integers(0, 10 * MiB)
    peak = draw(sizes)
    step = StagePeak(stage="prefill", shape=StepShape(), allocated=exactly(peak), reserved=exactly(peak + draw(sizes)))
    measured = Measured(
        rank=Rank(), device_bytes=draw(st.integers(60 * MiB, 2000 * MiB)), weights=exactly(draw(sizes) + 1),
        context=exactly(draw(sizes)), libraries=exactly(draw(sizes)), stages=(step,), graphs=exactly(draw(sizes)),
        foreign_bytes=exactly(draw(sizes)),
    )  # fmt: skip
    knobs = draw(some_knobs())
    seq_len, batch = draw(st.integers(1, 500)), draw(st.integers(1, 100))
    limits = Limits(
        max_seq_len=seq_len, max_batch_size=batch, max_num_tokens=batch + draw(st.integers(0, 200)),
        max_logits_rows=batch, prefix_caching=draw(st.booleans()),
    )  # fmt: skip
    inputs = PlanInputs(
        device_name="test", model_name="model", chip=Chip(name="test", sm=0, num_sms=0, total_bytes=0),
        measured=measured, claims=tuple(claims), page_bytes=draw(st.sampled_from([1, 4096, 65536])), knobs=knobs,
        layout=KVLayout(slab_bytes=slab_bytes, order=KVOrder.BLOCK_MAJOR, groups=groups), limits=limits,
    )  # fmt: skip
    return inputs, limits


@st.composite
def some_knobs(draw: st.DrawFn, most_bytes: int = 2000 * MiB) -> Knobs:
    given: dict[str, object] = {
        "total_bytes": draw(st.none() | st.integers(most_bytes // 30, most_bytes)),
        "keep_free_bytes": draw(st.none() | st.integers(0, most_bytes // 100)),
        "kv_bytes": draw(st.none() | st.integers(most_bytes // 100, most_bytes)),
        "kv_tokens": draw(st.none() | st.integers(1000, 10**6)),
        "kv_fraction": draw(st.none() | st.fractions(Fraction(1, 3), 1, max_denominator=1000)),
    }
    given["keep_free_bytes"] = given["keep_free_bytes"] or 0
    return Knobs(**{n: Setting.flag(v, v, f"--{n}") for n, v in given.items() if v is not None})  # type: ignore[arg-type]


@settings(max_examples=40)
@given(by_hand())
def test_plans_by_hand(case: tuple[PlanInputs, Limits]) -> None:
    inputs, limits = case

    def plan_with(knobs: Knobs, asked: LimitKnobs) -> MemoryPlan:
        shapes = {name: getattr(asked, name).or_else(getattr(limits, name)) for name in SHAPES}
        return plan(replace(inputs, knobs=knobs, limits=replace(limits, **shapes)))

    try:
        plan_with(inputs.knobs, LimitKnobs())
    except DoesNotFit:
        assume(False)
    check_round_trip(inputs.knobs, LimitKnobs(), plan_with, page_bytes=inputs.page_bytes)


# Plans of models on cards.

PLACES = [
    (LLAMA_8B, generic_card(80 * GiB)), (LLAMA_8B, generic_card(40 * GiB)), (SMOLLM2, generic_card(4 * GiB)),
    (SMOLLM2, host_card(2 * GiB)), (SMOLLM2, find_card("H200")),
]  # fmt: skip
ASKED: list[dict[str, object]] = [
    {}, {"kv_fraction": Fraction(9, 10)}, {"total_bytes": 3 * GiB // 2, "graphs": "none"}, {"kv_tokens": 20_000},
    {"kv_bytes": GiB, "keep_free_bytes": 0}, {"block_tokens": 32, "kv_dtype": "float8_e4m3fn"},
]  # fmt: skip
LIMITED: list[dict[str, object]] = [
    {}, {"max_seq_len": 2048, "max_batch_size": 8, "prefix_caching": False}, {"max_num_tokens": 1024},
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].name} on {place[1].name}")
def test_plans_of_models(place: tuple[ModelConfig, Card]) -> None:
    config, card = place

    def plan_with(knobs: Knobs, limits: LimitKnobs) -> MemoryPlan:
        return plan_without_device(config, card=card, knobs=knobs, limit_knobs=limits)

    done = 0
    for place_in_list, asked in enumerate(ASKED):
        limited = LIMITED[place_in_list % len(LIMITED)]
        knobs = Knobs(**{n: Setting.flag(v, v, f"--{n}") for n, v in asked.items()})  # type: ignore[arg-type]
        limits = LimitKnobs(**{n: Setting.flag(v, v, f"--{n}") for n, v in limited.items()})  # type: ignore[arg-type]
        try:
            plan_with(knobs, limits)
        except (DoesNotFit, InvalidSetting):  # weights beyond total_bytes, a host's step beyond its default
            continue
        check_round_trip(knobs, limits, plan_with, page_bytes=card.page_bytes)
        done += 1
    assert done >= 3
    assert len(ENGINES) == 3


@pytest.mark.parametrize(
    ("key", "snapshot_tokens"), [("gemma-3-27b", 0), ("qwen3.6-27b", 0), ("qwen3.6-27b", 1024), ("qwen3.6-27b", 64)]
)
def test_a_share_that_is_printed_is_never_refused(key: str, snapshot_tokens: int) -> None:
    """From the smallest device upwards: pools of one sequence, states and their snapshots, windows."""
    config = shapes.config(key)
    limits = LimitKnobs(
        max_seq_len=Setting.flag(8192, "8192", "--max-seq-len"),
        snapshot_tokens=Setting.flag(snapshot_tokens, snapshot_tokens, "--snapshot-tokens"),
    )

    def on(num_mib: int) -> PlanWith:
        card = generic_card(num_mib * MiB)
        return lambda knobs, limits: plan_without_device(config, card=card, knobs=knobs, limit_knobs=limits)

    def fits(num_mib: int) -> bool:
        try:
            on(num_mib)(Knobs(), limits)
        except DoesNotFit:
            return False
        return True

    least = smallest(fits, low=1, high=400 * 1024)
    assert least is not None
    printed = []
    for more in (0, 16, 4096):
        plan_with = on(least + more)
        check_round_trip(Knobs(), limits, plan_with, page_bytes=2 * MiB)
        printed.append(all(each.fraction for each in equivalents(plan_with(Knobs(), limits))))
    assert (printed[0], printed[-1]) == (False, True)
