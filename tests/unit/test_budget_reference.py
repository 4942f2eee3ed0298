"""The reference's derivation for an 8B Llama on 80 GiB (32 layers, 8 KV heads of 128, blocks of 32 tokens).

Rows marked own are recomputed by our split and layout; the others are the reference's arithmetic. All rows are derived
from the formulas ("D" in the tables of the other files).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.cost import Cost
from tonnage.budget.reference.derive import derive, max_bytes_works, pool_budget, token_cap_bytes
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.measure import ProbeReading, unprofiled_reading
from tonnage.budget.reference.mla import WorkspaceReserve
from tonnage.budget.reference.pages import v1_uniform_tokens
from tonnage.budget.reference.probe import probe_lengths, temporary_blocks, temporary_pool
from tonnage.budget.reference.slopes import packed_fp4_bytes, static_bytes_per_token
from tonnage.budget.reference.tokens import resumable_tokens, resume_quota, tokens_for_budget, usable_tokens
from tonnage.budget.split import split
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.costs.weights import weights_layout
from tonnage.errors import DoesNotFit
from tonnage.units import GiB

CONFIG = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
TOTAL, MODEL, ACTIVATION, NON_TORCH = 85_899_345_920, 16_060_522_496, 1_610_612_736, 1_258_291_200
SLOPE, FP8_SLOPE, TEMPORARY, B0 = 131_072, 65_536, 17_716_740_096, 60_272_927_539
COST, FP8_COST = Cost(slope=SLOPE), Cost(slope=FP8_SLOPE)
KNOBS = ReferenceKnobs()

READING = ProbeReading(
    total_bytes=TOTAL,
    torch_peak_bytes=MODEL + ACTIVATION,
    torch_used_bytes=MODEL,
    device_used_bytes=MODEL + NON_TORCH + TEMPORARY,
    temporary_pool_bytes=TEMPORARY,
)


def test_slopes_own():
    assert bytes_per_token(kv_layout(CONFIG, block_tokens=32)) == SLOPE
    assert bytes_per_token(kv_layout(CONFIG, kv_dtype="fp8", block_tokens=32)) == FP8_SLOPE


@pytest.mark.parametrize(("element_bytes", "want"), [(2, SLOPE), (1, FP8_SLOPE)])
def test_slopes_reference(element_bytes, want):
    found = static_bytes_per_token(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=element_bytes)
    assert found == want


def test_slope_of_packed_fp4_reference():
    assert packed_fp4_bytes(32 * 2 * 8 * 128) == 36_864


def test_weights_own():
    assert weights_layout(CONFIG).total_bytes == MODEL


def test_temporary_pool_reference():
    lengths = probe_lengths(max_num_tokens=8192, max_seq_len=131_072)
    blocks = temporary_blocks(
        lengths, max_seq_len=131_072, max_batch_size=2048, max_graph_batch_size=128, block_tokens=32
    )
    assert (blocks, blocks * 32, blocks * 32 * SLOPE) == (4224, 135_168, TEMPORARY)
    pool = temporary_pool(blocks, KNOBS, cost=COST, free_bytes=TOTAL - MODEL)
    assert (pool.tokens, pool.quota_bytes) == (135_168, None)


def test_peak_and_budget_reference():
    assert READING.extra_cost_bytes == 18_975_031_296
    assert READING.peak_bytes == 36_646_166_528
    assert pool_budget(READING) == B0


@pytest.mark.parametrize(("cost", "tokens", "blocks"), [(COST, 459_845, 14_370), (FP8_COST, 919_691, 28_740)])
def test_tokens_and_blocks_reference(cost, tokens, blocks):
    found = derive(READING, KNOBS, cost)
    assert (found.after_fraction_bytes, found.pool_bytes, found.max_tokens) == (B0, B0, tokens)
    assert usable_tokens(tokens, block_tokens=32) == (blocks, blocks * 32)
    # The second fraction, of what is free when the final pool is built, leaves more and is silent.
    free = TOTAL - MODEL - NON_TORCH
    net = v1_uniform_tokens(tokens, free_bytes=free, fraction=Fraction(9, 10), runtime_bytes_per_token=cost.slope)
    assert net == tokens


def test_blocks_own():
    """Our split prices blocks at once and comes to the same pool."""
    assert split(B0, rate_bytes=32 * SLOPE).units == 14_370
    assert split(B0, rate_bytes=32 * FP8_SLOPE).units == 28_740


def test_without_add_back_reference():
    forgotten = replace(READING, temporary_pool_bytes=0)
    budget = pool_budget(forgotten)
    assert (budget, tokens_for_budget(COST, budget)) == (44_327_861_452, 338_194)


def test_unprofiled_reference():
    found = derive(unprofiled_reading(total_bytes=TOTAL, used_bytes=MODEL + NON_TORCH), KNOBS, COST)
    assert (found.pool_bytes, found.max_tokens) == (61_722_479_001, 470_905)


def test_reserves_reference():
    """Deducted from the pool a reserve costs all of itself; added to the peak, the fraction of itself."""
    assert derive(READING, KNOBS, COST, pool_reserves_bytes=GiB).pool_bytes == B0 - 1_073_741_824
    on_peak = derive(READING, KNOBS, COST, peak_reserves_bytes=GiB)
    assert on_peak.pool_bytes == int((66_969_919_488 - GiB) * Fraction(9, 10))


def test_token_cap_reference():
    found = derive(READING, replace(KNOBS, max_tokens=200_000), COST)
    assert (found.pool_bytes, found.max_tokens) == (26_214_400_000, 200_000)
    assert usable_tokens(200_000, block_tokens=32)[0] == 6250


def test_second_manager_reference():
    """V2 turns tokens into a larger quota, since a resumed request may fill only 95 % of it."""
    assert resume_quota(TEMPORARY) == 18_649_200_102
    assert resumable_tokens(COST, B0) == 436_853
    v2 = replace(KNOBS, manager="V2")
    assert temporary_pool(4224, v2, cost=COST, free_bytes=TOTAL - MODEL).quota_bytes == 18_649_200_102
    capped = derive(READING, replace(v2, max_tokens=200_000), COST)
    assert (capped.pool_bytes, capped.max_tokens) == (B0, 200_000)


def test_the_byte_cap_of_the_block_manager_does_nothing():
    """Quirk: V1's tokens are derived before it. Ours, with ``kv_bytes``, limits the pool by it."""
    capped = derive(READING, replace(KNOBS, max_gpu_total_bytes=GiB), COST)
    assert (capped.pool_bytes, capped.max_tokens) == (GiB, 459_845)
    assert not max_bytes_works("V1")
    assert max_bytes_works("V2")
    assert max_bytes_works("V1", is_variable_window=True)
    assert split(GiB, rate_bytes=32 * SLOPE).units * 32 == 8192


def test_caps_come_after_deductions():
    """A cap below the reduced budget is granted in full; the other order would take the reserve from it as well."""
    found = derive(READING, replace(KNOBS, manager="V2", max_gpu_total_bytes=GiB), COST, pool_reserves_bytes=GiB)
    assert found.pool_bytes == GiB


def test_a_peak_above_the_device_is_refused():
    over = ProbeReading(
        total_bytes=10, torch_peak_bytes=20, torch_used_bytes=5, device_used_bytes=5, temporary_pool_bytes=0
    )
    with pytest.raises(DoesNotFit) as caught:
        pool_budget(over)
    assert caught.value.shortfall_bytes == 10


def test_a_deduction_above_the_pool_is_refused():
    with pytest.raises(DoesNotFit) as caught:
        derive(READING, KNOBS, COST, pool_reserves_bytes=B0 + 1)
    assert (caught.value.need_bytes, caught.value.have_bytes) == (B0 + 1, B0)


# -- properties --------------------------------------------------------------------------------------------------------

READINGS = st.builds(
    lambda total, peak, used, other, pool: ProbeReading(
        total_bytes=total + peak + used + other + pool,
        torch_peak_bytes=used + peak,
        torch_used_bytes=used,
        device_used_bytes=used + other + pool,
        temporary_pool_bytes=pool,
    ),
    *[st.integers(0, 10**6)] * 5,
)
FRACTIONS = st.fractions(0, 1, max_denominator=1000)
COSTS = st.builds(Cost, slope=st.integers(1, 500), intercept=st.integers(0, 10**5))
CAPS = st.none() | st.integers(1, 10**4)
MANAGERS = st.sampled_from(["V1", "V2"])


@given(READINGS, FRACTIONS, st.integers(0, 10**6))
def test_a_peak_reserve_costs_the_fraction_of_itself(reading, fraction, reserve):
    """Before rounding, so within one byte after it; a pool reserve costs exactly all of itself."""
    plain = pool_budget(reading, fraction=fraction)
    left = reading.total_bytes - reading.peak_bytes + reading.temporary_pool_bytes
    if reserve <= left:
        lost = plain - pool_budget(reading, fraction=fraction, peak_reserves_bytes=reserve)
        assert abs(lost - fraction * reserve) < 1
    if reserve <= plain:
        knobs = replace(KNOBS, free_gpu_memory_fraction=fraction)
        assert plain - derive(reading, knobs, Cost(slope=1), pool_reserves_bytes=reserve).pool_bytes == reserve


@given(READINGS, st.tuples(FRACTIONS, FRACTIONS), COSTS, MANAGERS, st.integers(0, 50), st.integers(0, 10**4))
def test_more_fraction_never_gives_less(reading, fractions, cost, manager, rate, attended):
    low, high = (
        derive(
            reading,
            replace(KNOBS, free_gpu_memory_fraction=fraction, manager=manager),
            cost,
            workspace_bytes_per_token=rate,
            attended_tokens=attended,
        )
        for fraction in sorted(fractions)
    )
    assert low.pool_bytes <= high.pool_bytes
    assert (low.max_tokens or 0) <= (high.max_tokens or 0)
    assert (low.workspace.cap_tokens or 0) <= (high.workspace.cap_tokens or 0)


@given(READINGS, COSTS, MANAGERS, st.tuples(CAPS, CAPS), st.tuples(CAPS, CAPS))
def test_a_higher_cap_never_gives_less(reading, cost, manager, tokens, num_bytes):
    def order(cap):
        return float("inf") if cap is None else cap

    low, high = (
        derive(reading, replace(KNOBS, manager=manager, max_tokens=t, max_gpu_total_bytes=b or 0), cost).pool_bytes
        for t, b in zip(sorted(tokens, key=order), sorted(num_bytes, key=order), strict=True)
    )
    assert low <= high


@given(READINGS, COSTS, st.integers(0, 50), st.integers(1, 10**4))
def test_without_an_intercept_the_pool_keeps_the_better_of_two(reading, cost, rate, attended):
    """max((B - wL)/k, B/(k+w)) tokens, floored: the reserve in other words, and what our split finds at once."""
    cost = Cost(slope=cost.slope)
    found = derive(reading, KNOBS, cost, workspace_bytes_per_token=rate, attended_tokens=attended)
    budget = found.after_fraction_bytes
    if not rate or not budget:
        assert found.workspace == WorkspaceReserve(reserve_bytes=Fraction(0), cap_tokens=None)
        return
    tokens = max(Fraction(budget - rate * attended, cost.slope), Fraction(budget, cost.slope + rate))
    assert 0 <= tokens - (found.max_tokens or 0) < 2


def test_a_token_cap_counts_the_intercept():
    assert token_cap_bytes(10, Cost(slope=3, intercept=7)) == 37
