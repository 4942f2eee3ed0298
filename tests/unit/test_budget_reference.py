"""The reference's derivation for an 8B Llama on 80 GiB (32 layers, 8 KV heads of 128, blocks of 32 tokens).

Rows marked own are recomputed by our split and layout; the others are the reference's arithmetic.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from tonnage.budget.reference import (
    ProbeReading,
    packed_fp4_bytes,
    pool_budget,
    probe_lengths,
    resumable_tokens,
    resume_quota,
    temporary_blocks,
    token_cap_bytes,
    tokens_within,
    unprofiled_budget,
    usable_tokens,
)
from tonnage.budget.split import split
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.costs.weights import weights_layout
from tonnage.errors import DoesNotFit
from tonnage.units import GiB

CONFIG = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
TOTAL, MODEL, ACTIVATION, NON_TORCH = 85_899_345_920, 16_060_522_496, 1_610_612_736, 1_258_291_200
SLOPE, FP8_SLOPE, TEMPORARY, B0 = 131_072, 65_536, 17_716_740_096, 60_272_927_539

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


def test_slope_of_packed_fp4_reference():
    assert packed_fp4_bytes(32 * 2 * 8 * 128) == 36_864


def test_weights_own():
    assert weights_layout(CONFIG).total_bytes == MODEL


def test_temporary_pool_reference():
    blocks = temporary_blocks(
        max_num_tokens=8192, max_seq_len=131_072, max_batch_size=2048, max_graph_batch_size=128, block_tokens=32
    )
    assert (blocks, blocks * 32, blocks * 32 * SLOPE) == (4224, 135_168, TEMPORARY)


@pytest.mark.parametrize(
    ("tokens", "length", "want"), [(8192, 131_072, [8192]), (8192, 4097, [4096, 4096]), (10, 5, [4, 4, 2])]
)
def test_probe_lengths_reference(tokens, length, want):
    assert probe_lengths(max_num_tokens=tokens, max_seq_len=length) == want


def test_peak_and_budget_reference():
    assert READING.extra_cost_bytes == 18_975_031_296
    assert READING.peak_bytes == 36_646_166_528
    assert pool_budget(READING) == B0


def test_tokens_and_blocks_reference():
    tokens = tokens_within(B0, bytes_per_token=SLOPE)
    assert (tokens, *usable_tokens(tokens, block_tokens=32)) == (459_845, 14_370, 459_840)
    fp8 = tokens_within(B0, bytes_per_token=FP8_SLOPE)
    assert (fp8, usable_tokens(fp8, block_tokens=32)[0]) == (919_691, 28_740)


def test_blocks_own():
    """Our split prices blocks at once and comes to the same pool."""
    assert split(B0, rate_bytes=32 * SLOPE).units == 14_370
    assert split(B0, rate_bytes=32 * FP8_SLOPE).units == 28_740


def test_without_add_back_reference():
    forgotten = ProbeReading(
        total_bytes=TOTAL,
        torch_peak_bytes=MODEL + ACTIVATION,
        torch_used_bytes=MODEL,
        device_used_bytes=MODEL + NON_TORCH + TEMPORARY,
        temporary_pool_bytes=0,
    )
    budget = pool_budget(forgotten)
    assert (budget, tokens_within(budget, bytes_per_token=SLOPE)) == (44_327_861_452, 338_194)


def test_unprofiled_reference():
    budget = unprofiled_budget(total_bytes=TOTAL, used_bytes=MODEL + NON_TORCH)
    assert (budget, tokens_within(budget, bytes_per_token=SLOPE)) == (61_722_479_001, 470_905)


def test_reserves_reference():
    """Deducted from the pool a reserve costs all of itself; added to the peak, the fraction of itself."""
    assert B0 - GiB == B0 - 1_073_741_824
    assert pool_budget(READING, peak_reserves_bytes=GiB) == int((66_969_919_488 - GiB) * Fraction(9, 10))


def test_token_cap_reference():
    num_bytes = token_cap_bytes(200_000, bytes_per_token=SLOPE)
    assert (num_bytes, usable_tokens(200_000, block_tokens=32)[0]) == (26_214_400_000, 6250)


def test_second_manager_reference():
    assert resume_quota(TEMPORARY) == 18_649_200_102
    assert resumable_tokens(B0, bytes_per_token=SLOPE) == 436_853


def test_a_peak_above_the_device_is_refused():
    over = ProbeReading(
        total_bytes=10, torch_peak_bytes=20, torch_used_bytes=5, device_used_bytes=5, temporary_pool_bytes=0
    )
    with pytest.raises(DoesNotFit) as caught:
        pool_budget(over)
    assert caught.value.shortfall_bytes == 10
