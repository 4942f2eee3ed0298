"""What tokens cost under the reference: slopes, hybrid models, windows. Rows are compared after flooring.

"T": the number is that of a test of the reference; "D": derived from its formulas.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.cost import Cost
from tonnage.budget.reference import slopes, states, windows
from tonnage.budget.reference.environment import window_byte_shares
from tonnage.budget.reference.pages import v1_hybrid_blocks, window_bound
from tonnage.budget.reference.tokens import tokens_for_budget
from tonnage.budget.reference.windows import WindowLayer
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.units import GiB

# -- slopes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "heads", "tp", "want", "by"),
    [(80, 8, 8, 40_960, "D"), (80, 8, 1, 327_680, "D"), (20, 8, 1, 81_920, "D")],
    ids=["tp 8", "attention-DP 8", "pp 4"],
)
def test_an_80_layer_model(layers, heads, tp, want, by):
    shape = {"num_layers": layers, "num_kv_heads": heads, "head_dim": 128, "element_bytes": 2, "tp": tp}
    assert slopes.static_bytes_per_token(**shape) == want
    assert slopes.runtime_bytes_per_token(**shape) == want


def test_less_than_a_head_on_each_rank():
    """Quirk: the budget counts half a head, the manager allocates a whole one. Ours has one formula, the second. D"""
    shape = {"num_layers": 48, "num_kv_heads": 4, "head_dim": 128, "element_bytes": 2, "tp": 8}
    assert (slopes.static_bytes_per_token(**shape), slopes.runtime_bytes_per_token(**shape)) == (12_288, 24_576)


def test_heads_of_every_layer():
    shape = {"num_layers": 4, "num_kv_heads": [8, 8, 8, 1], "head_dim": 128, "element_bytes": 2}
    assert slopes.static_bytes_per_token(**shape) == 2 * 4 * 800 * 2
    assert slopes.runtime_bytes_per_token(**shape) == 2 * 25 * 128 * 2
    # The mean may be fractional, and is floored only when the ranks divide it.
    uneven = {"num_layers": 3, "num_kv_heads": [8, 8, 1], "head_dim": 128, "element_bytes": 2, "tp": 2}
    assert slopes.static_bytes_per_token(**uneven) == 2 * 3 * int(Fraction(17, 3) * 64) * 2


def latent(num_layers, element_bytes):
    return slopes.latent_bytes_per_token(
        num_layers=num_layers, kv_lora_rank=512, qk_rope_head_dim=64, element_bytes=element_bytes
    )


@pytest.mark.parametrize(
    ("found", "want"), [(latent(61, 2), 70_272), (latent(61, 1), 35_136), (slopes.packed_fp4_bytes(61 * 576), 19_764)]
)
def test_latent_attention(found, want):
    """D"""
    assert found == want


def test_stages_of_a_latent_model():
    """D"""
    assert slopes.local_layers(61, 4) == [16, 15, 15, 15]
    assert [latent(n, 1) for n in slopes.local_layers(61, 4)] == [9216, 8640, 8640, 8640]
    assert slopes.local_layers(2, 4) == [1, 1, 0, 0]
    assert [slopes.costed_layers(2, 4, stage) for stage in range(4)] == [1, 1, 1, 1]


def test_a_drafter_is_charged_at_the_dtype_it_is_allocated_in():
    """The fp8 flag of the target halved the draft's pool until a worker died. T"""
    assert (latent(5, 1), latent(5, 2)) == (2880, 5760)


def test_helix_scales_the_draft_slope_only():
    """D"""
    assert slopes.helix_draft_slope(8192, cp=4) == 32_768
    draft = Cost(slope=8192, intercept=5, quota_per_request=3)
    assert draft.scaled(4) == Cost(slope=32_768, intercept=5, quota_per_request=3)


def test_side_caches_and_packed_latents():
    assert slopes.indexer_bytes_per_token(num_layers=61, index_head_dim=128) == 61 * 132
    assert (
        slopes.cross_bytes_per_token(num_decoder_layers=6, num_encoder_heads=8, head_dim=64, element_bytes=2) == 12_288
    )
    found = slopes.fp4_latent_bytes_per_token(num_layers=2, num_elements=576, scale_page_bytes=100, block_tokens=32)
    assert found == 2 * (288 + 36 + 4)


# -- hybrid models -----------------------------------------------------------------------------------------------------

MAMBA = {"head_dim": 80, "num_heads": 128, "num_groups": 8, "state_size": 128, "conv_kernel": 4}
SLOT, BUDGET, A = 72_769_536, 40 * GiB, 16_384


def test_states():
    """D"""
    assert states.state_bytes(**MAMBA) == (73_728, 2_621_440)
    assert 27 * sum(states.state_bytes(**MAMBA)) == SLOT
    assert 27 * sum(states.state_bytes(**MAMBA, ssm_element_bytes=4)) == 143_548_416
    assert states.state_bytes(**MAMBA, tp=8) == (73_728 // 8, 2_621_440 // 8)
    attention = slopes.static_bytes_per_token(num_layers=4, num_kv_heads=8, head_dim=128, element_bytes=2)
    assert attention == A


def v1(num_sequences, interval=0):
    return states.v1_static_cost(
        attention_slope=A, slot_bytes=SLOT, num_sequences=num_sequences, interval_tokens=interval
    )


def v2(num_sequences, interval=0, num_fixed_snapshots=0):
    return states.v2_cost(
        attention_slope=A,
        slot_bytes=SLOT,
        num_sequences=num_sequences,
        block_tokens=32,
        interval_tokens=interval,
        num_fixed_snapshots=num_fixed_snapshots,
    )


@pytest.mark.parametrize(
    ("cost", "slope", "intercept", "tokens"),
    [
        (v1(64), 16_384, 4_657_250_304, 2_337_184),
        (v2(64), 16_384, 4_730_019_840, 2_332_742),
        (v1(64, 256), 300_640, 0, 142_860),
        (v2(64, 256), 300_640, 4_763_574_272, 127_016),
        (v1(256), 16_384, 18_629_001_216, 1_484_416),
        (v2(256), 16_384, 18_701_770_752, 1_479_974),
        (v2(64, num_fixed_snapshots=2), 16_384, 14_078_074_880, 1_762_182),
    ],
    ids=["V1 64", "V2 64", "V1 64 every 256", "V2 64 every 256", "V1 256", "V2 256", "V2 64 two fixed"],
)
def test_hybrid_costs(cost, slope, intercept, tokens):
    """D"""
    assert (cost.slope, cost.intercept) == (slope, intercept)
    assert tokens_for_budget(cost, BUDGET) == tokens


def test_a_hybrid_is_promised_more_than_is_built():
    """Quirk: the budget drops the slots of running sequences, the manager keeps them; ours counts as it does. D"""
    runtime = states.v1_runtime_cost(attention_slope=A, slot_bytes=SLOT, num_sequences=64, interval_tokens=256)
    assert (tokens_for_budget(v1(64, 256), BUDGET), tokens_for_budget(runtime, BUDGET)) == (142_860, 127_369)
    blocks, slots = v1_hybrid_blocks(
        BUDGET, runtime, num_sequences=64, block_tokens=32, interval_tokens=256, is_reused=True
    )
    assert (blocks, slots) == (127_369 // 32, 64 + 1 + 127_369 // 256)


def test_the_page_manager_inverts_a_hybrid_by_bisection():
    cost = v2(64)
    arguments = {"slot_bytes": SLOT, "num_sequences": 64, "num_dummy_slots": 1, "page_bytes": 32 * A}
    assert states.v2_tokens(BUDGET, cost, **arguments) == cost.units_within(BUDGET) == 2_332_742
    with pytest.raises(DoesNotFit) as caught:
        states.v2_tokens(cost.intercept, cost, **arguments)
    assert caught.value.need_bytes == 65 * SLOT + 32 * A


def test_a_length_for_shaping_pools():
    assert states.default_avg_seq_len(512, max_seq_len=4096) == (512, None)
    length, warning = states.default_avg_seq_len(None, max_seq_len=4096)
    assert length == 2048
    assert warning


# -- windows -----------------------------------------------------------------------------------------------------------


def static(layers, *, max_seq_len, batch, block):
    return windows.static_cost(layers, max_seq_len=max_seq_len, max_batch_size=batch, block_tokens=block)


def test_windows_are_paid_in_whole_pages_for_each_sequence():
    """T"""
    draft = static([WindowLayer(bytes_per_token=64, window=512)], max_seq_len=4096, batch=1, block=64)
    total = Cost(slope=10) + draft
    assert (total.slope, total.intercept) == (10, 32_768)


def test_a_window_as_long_as_the_model_is_full():
    """T"""
    layers = [WindowLayer(bytes_per_token=64, window=window) for window in (2048, 2048, 4096)]
    found = static(layers, max_seq_len=4096, batch=3, block=64)
    assert (found.slope, found.intercept) == (64, 786_432)


def test_an_explicitly_full_layer_stays_in_the_slope():
    layers = [WindowLayer(bytes_per_token=64, window=128, is_explicitly_full=True)]
    assert static(layers, max_seq_len=4096, batch=3, block=64) == Cost(slope=64)


LAYERS = [*[WindowLayer(bytes_per_token=10, window=128)] * 2, WindowLayer(bytes_per_token=20)]


@pytest.mark.parametrize(("reuses_scratch", "want"), [(False, 54_240), (True, 44_240)])
def test_quota_of_windows(reuses_scratch, want):
    """T"""
    cost = windows.runtime_cost(
        LAYERS,
        max_seq_len=4096,
        max_batch_size=4,
        max_num_tokens=1000,
        block_tokens=64,
        reuses_scratch=reuses_scratch,
    )
    assert cost.at(1200) == want
    assert cost.units_within(want) == 1200
    prefill = 10 if reuses_scratch else 20
    quota = {"full": 20, "prefill": prefill, "fixed": 2560, "num_sequences": 4, "step_tokens": 1000}
    assert windows.quota_cost(**quota) == cost
    assert windows.quota_tokens(want, **quota) == 1200


HALF = [*[WindowLayer(bytes_per_token=2048, window=128)] * 18, *[WindowLayer(bytes_per_token=2048)] * 18]


def test_half_windows_half_full():
    """D"""
    found = static(HALF, max_seq_len=131_072, batch=128, block=32)
    assert (found.slope, found.intercept) == (36_864, 603_979_776)
    arguments = {"max_seq_len": 131_072, "max_batch_size": 128, "max_num_tokens": 8192, "block_tokens": 32}
    cost = windows.runtime_cost(HALF, **arguments)
    assert cost.units_within(50 * GiB) == 1_431_779
    assert cost.units_within(int(50 * GiB * Fraction(95, 100))) == 1_358_961
    quota = {"full": 36_864, "prefill": 36_864, "fixed": 4_718_592, "num_sequences": 128, "step_tokens": 8192}
    assert [round(float(windows.quota_tokens(q, **quota)), 1) for q in (50 * GiB, 50 * GiB * 95 // 100)] == [
        1_431_779.6,
        1_358_961.8,
    ]


def test_windows_win_nothing_under_the_block_manager():
    """Equal shares of bytes: each pool holds as many tokens as one uniform pool would. D"""
    layer_bytes = {128: 36_864, 131_072: 36_864}
    blocks = windows.window_blocks(layer_bytes, pool_bytes=50 * GiB, block_tokens=1)
    assert blocks == {128: 728_177, 131_072: 728_177}
    assert 50 * GiB // (2 * 36_864) == 728_177
    uneven = windows.window_blocks(
        layer_bytes, pool_bytes=50 * GiB, block_tokens=1, shares=(Fraction(1, 4), Fraction(3, 4))
    )
    assert uneven[131_072] == 50 * GiB * 3 // 4 // 36_864
    with pytest.raises(InvalidSetting):
        window_byte_shares((Fraction(1, 2), Fraction(1, 3)), 2)
    with pytest.raises(InvalidSetting):
        window_byte_shares((Fraction(1),), 2)


def test_windows_are_lowered():
    """D"""
    layer_bytes = {128: 36_864, 131_072: 36_864}
    assert sum(window * size for window, size in layer_bytes.items()) == 4_836_556_800
    assert windows.lowered_windows(layer_bytes, pool_bytes=2 * GiB) == {128: 128, 131_072: 58_126}
    assert windows.lowered_windows(layer_bytes, pool_bytes=5 * GiB) == {128: 128, 131_072: 131_072}
    capped = windows.lowered_windows(layer_bytes, pool_bytes=2 * GiB, max_tokens=1000)
    assert capped == {128: 128, 131_072: 1000}


@given(
    st.dictionaries(st.integers(1, 300), st.integers(1, 50), min_size=1, max_size=4),
    st.integers(1, 60_000),
)
def test_lowered_windows_fit_and_keep_their_order(layer_bytes, pool_bytes):
    found = windows.lowered_windows(layer_bytes, pool_bytes=pool_bytes)
    assert sum(found[window] * size for window, size in layer_bytes.items()) <= pool_bytes
    assert sorted(found.values()) == [found[window] for window in sorted(found)]
    assert all(found[window] <= window for window in found)


@pytest.mark.parametrize(("beams", "want"), [(1, 3200), (4, 768)])
def test_the_bound_of_one_sequence(beams, want):
    """D"""
    assert window_bound(100, block_tokens=32, beam_width=beams, max_seq_len=131_072) == want


def test_pages_of_a_drafter_with_windows():
    assert windows.dflash_window_pages(512, extra_kv_tokens=2, tokens_per_step=4, block_tokens=32) == 18


def test_where_windows_come_from():
    assert windows.layer_windows([128, 4096], 5) == [128, 4096, 128, 4096, 128]
    assert windows.layer_windows([128, -2147483647], 3) == [128, None, 128]
    assert windows.layer_windows(None, 2) == [None, None]
    types = ["sliding_attention", "full_attention"]
    assert windows.windows_from_types(types, sliding_window=128, max_seq_len=4096) == [128, 4096]
    assert windows.windows_from_types(types[:1] * 2, sliding_window=128, max_seq_len=4096) is None
    assert windows.windows_from_types(types, sliding_window=128, max_seq_len=4096, is_hybrid=True) is None


# -- the quota of the page manager, against counting -------------------------------------------------------------------

SMALL = st.integers(0, 5)


@given(F=SMALL, C=SMALL, G=SMALL, R=SMALL, n=SMALL, M=st.integers(0, 12), quota=st.integers(0, 150))
def test_the_quota_and_its_inverse(F, C, G, R, n, M, quota):
    def price(tokens):
        return F * tokens + G * (tokens - min(tokens, M)) + n * R + C * min(tokens, M)

    named = {"full": F, "prefill": C, "fixed": R, "num_sequences": n, "step_tokens": M, "generation": G}
    cost = windows.quota_cost(**named)
    assert [cost.at(t) for t in range(250)] == [price(t) for t in range(250)]
    most = max((t for t in range(250) if price(t) <= quota), default=0)
    ours = cost.units_within(quota)
    assert ours == (math.inf if most == 249 else most)
    theirs = windows.quota_tokens(quota, **named)
    if quota < n * R:
        assert theirs == ours == 0
        return
    left = quota - n * R
    if left == 0 and F + C == 0:
        # Quirk: nothing costs anything until a step is full, and the first case says so for ever.
        assert theirs == math.inf
        assert ours == (math.inf if F + G == 0 else M)
    elif left == M * (F + C) and F + G == 0:
        # Quirk: the last quota of the first case ends where the flat part begins.
        assert theirs == M
        assert ours == math.inf
    else:
        assert (theirs if theirs == math.inf else math.floor(theirs)) == ours


@pytest.mark.parametrize(
    ("budget", "slope", "intercept", "want"), [(100, 3, 10, 30), (100, 3, 101, 0), (100, 0, 0, 0), (1000, 7, 6, 142)]
)
def test_tokens_for_a_budget(budget, slope, intercept, want):
    """T; quirk: slope 0 buys nothing there, and infinity under ours."""
    cost = Cost(slope=slope, intercept=intercept)
    assert tokens_for_budget(cost, budget) == want
    assert cost.units_within(budget) == (want if slope else math.inf)
