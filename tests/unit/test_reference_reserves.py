"""Reserves, the latent workspace and admission, splits, the probe's sizes: the reference's rows as tables.

"T": the number is that of a test of the reference; "D": derived from its formulas; both compared after flooring.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.cost import Cost
from tonnage.budget.reference import charges, mla, split
from tonnage.budget.reference.derive import derive
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.measure import ProbeReading
from tonnage.budget.split import Demand
from tonnage.budget.split import split as our_split
from tonnage.errors import DoesNotFit
from tonnage.units import GiB, MiB

# -- the latent workspace ----------------------------------------------------------------------------------------------

W, K = 40_960, 35_136


@pytest.mark.parametrize(
    ("budget", "k", "w", "attended", "reserve", "cap", "tokens", "by"),
    [
        (40 * GiB, K, W, 64 * 4096, 10_737_418_240, 262_144, 916_787, "D"),
        (40 * GiB, K, W, 256 * 131_072, 23_118_411_012, 564_414, 564_414, "D"),
        (40 * GiB, K, W, 131_072, 5_368_709_120, 131_072, 1_069_585, "D"),
        (40 * GiB, 19_764, 640, 33_554_432, 1_347_176_568, 2_104_963, 2_104_963, "D"),
        (10**12, 1000, 100, 50_000, 5_000_000, 50_000, None, "T"),
    ],
)
def test_workspace(budget, k, w, attended, reserve, cap, tokens, by):
    found = mla.workspace_reserve(budget, bytes_per_token=k, workspace_bytes_per_token=w, attended_tokens=attended)
    assert (int(found.reserve_bytes), found.cap_tokens) == (reserve, cap)
    if tokens is not None:
        assert int(budget - found.reserve_bytes) // k == tokens
        # Ours comes to the same pool without a reserve in between.
        ours = our_split(budget, rate_bytes=k, demands=[Demand(name="w", rate_bytes=w, ceiling_bytes=w * attended)])
        assert ours.units == tokens


def test_the_share_of_an_unbounded_worst_case():
    """D"""
    found = mla.workspace_reserve(40 * GiB, bytes_per_token=K, workspace_bytes_per_token=W, attended_tokens=33_554_432)
    assert float(found.reserve_bytes / (40 * GiB)) == pytest.approx(0.538, abs=5e-4)
    assert float(found.reserve_bytes) == pytest.approx(23_118_411_012.95, abs=5e-3)


@pytest.mark.parametrize("wrong", [{"budget_bytes": 0}, {"k": 0}, {"w": 0}, {"w": -1}, {"tokens": 0}, {"tokens": None}])
def test_nothing_is_reserved_where_a_number_is_missing(wrong):
    """T"""
    given_ = {"budget_bytes": 100, "k": 3, "w": 2, "tokens": 5} | wrong
    found = mla.workspace_reserve(
        given_["budget_bytes"],
        bytes_per_token=given_["k"],
        workspace_bytes_per_token=given_["w"],
        attended_tokens=given_["tokens"],
    )
    assert (found.reserve_bytes, found.cap_tokens) == (0, None)


def worst(**changes):
    arguments = {"max_batch_size": 64, "max_num_tokens": 8192, "max_seq_len": 4096, "is_reused": True}
    return mla.attended_worst_case(**({**arguments, "is_chunked": False, "is_chunk_bounded": True} | changes))


@pytest.mark.parametrize(("override", "want"), [(None, 262_144), (100_000, 100_000), (1000, 4096), (10**12, 262_144)])
def test_attended_worst_case(override, want):
    """T"""
    assert worst(override_tokens=override) == want


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"is_reused": False}, None),
        ({"is_chunked": True}, None),
        ({"is_chunked": True, "is_chunk_bounded": False}, 262_144),
        ({"is_chunked": True, "is_profile_needed": True}, 262_144),
        ({"is_chunked": True, "is_profile_needed": True, "is_profiled": True}, None),
        ({"max_num_tokens": 10}, 40_960),
    ],
)
def test_when_the_probe_saw_the_worst(changes, want):
    """The first two rows: T"""
    assert worst(**changes) == want


def test_rates():
    """T for 64 heads; D"""
    rope, nope, value = 64, 128, 128
    assert [heads * (rope + nope + value) for heads in (128, 64)] == [40_960, 20_480]
    assert 512 + 64 + 64 == 640
    gathers = 128 * (nope + rope) * 2 + 128 * (nope + value) * 2
    assert gathers == 114_688
    assert gathers * 262_144 == 28 * GiB


DEEPSEEK = ProbeReading(
    total_bytes=140 * GiB,
    torch_peak_bytes=(83 + 6) * GiB,
    torch_used_bytes=83 * GiB,
    device_used_bytes=(83 + 4) * GiB,
    temporary_pool_bytes=0,
)


@pytest.mark.parametrize(
    ("override", "reserve", "cap", "tokens"),
    [
        (None, 23_089_512_998, 563_708, 563_708),
        (1000, 2_684_354_560, 65_536, 1_144_456),
        (65_536, 2_684_354_560, 65_536, 1_144_456),
        (262_144, 10_737_418_240, 262_144, 915_259),
    ],
)
def test_a_large_latent_model(override, reserve, cap, tokens):
    """fp8 cache, attention data parallelism. D"""
    attended = worst(max_batch_size=256, max_seq_len=65_536, override_tokens=override)
    knobs = ReferenceKnobs(free_gpu_memory_fraction=Fraction(85, 100))
    found = derive(DEEPSEEK, knobs, Cost(slope=K), workspace_bytes_per_token=W, attended_tokens=attended)
    assert found.after_fraction_bytes == 42_895_985_868
    assert (int(found.workspace.reserve_bytes), found.workspace.cap_tokens) == (reserve, cap)
    assert found.max_tokens == tokens


def test_a_large_latent_model_without_a_reserve():
    """Reuse off, or the chunks were in the probe. D"""
    knobs = ReferenceKnobs(free_gpu_memory_fraction=Fraction(85, 100))
    none = worst(max_batch_size=256, max_seq_len=65_536, is_reused=False)
    found = derive(DEEPSEEK, knobs, Cost(slope=K), workspace_bytes_per_token=W, attended_tokens=none)
    assert (found.workspace.reserve_bytes, found.workspace.cap_tokens, found.max_tokens) == (0, None, 1_220_855)
    reserve = mla.workspace_reserve(100, bytes_per_token=3, workspace_bytes_per_token=2, attended_tokens=5)
    assert mla.without_if_profiled(reserve, is_profiled=True).cap_tokens is None
    assert mla.without_if_profiled(reserve, is_profiled=False) == reserve


@pytest.mark.parametrize(
    ("cap", "lengths", "kept"),
    [(120, [50] * 3, 2), (200, [50] * 3, 3), (120, [200, 50], 1), (1, [500], 1), (0, [50] * 3, 1), (None, [50] * 5, 5)],
)
def test_admission(cap, lengths, kept):
    """T"""
    assert mla.requests_kept(lengths, cap_tokens=cap) == kept


@pytest.mark.parametrize(
    ("position", "first", "reusable", "chunk", "prompt", "want"),
    [
        (0, True, 100, 50, 150, 150),
        (100, True, 100, 50, 150, 150),
        (0, True, 0, 80, 80, 80),
        (200, False, 0, 100, 500, 300),
        (0, True, 999, 50, 150, 150),
    ],
)
def test_attended_length(position, first, reusable, chunk, prompt, want):
    """T"""
    found = mla.attended_length(
        position=position, is_first_chunk=first, reusable_tokens=reusable, chunk_tokens=chunk, prompt_tokens=prompt
    )
    assert found == want


def test_a_cap_of_nothing_is_a_cap():
    assert mla.cap_warning(0, max_seq_len=10)
    assert mla.cap_warning(9, max_seq_len=10)
    assert mla.cap_warning(10, max_seq_len=10) is None
    assert mla.cap_warning(None, max_seq_len=10) is None


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 200))
def test_what_is_kept_is_the_longest_head_that_fits(lengths, cap):
    kept = mla.requests_kept(lengths, cap_tokens=cap)
    assert kept >= min(1, len(lengths))
    assert kept <= 1 or sum(lengths[:kept]) <= cap
    assert kept == len(lengths) or sum(lengths[: kept + 1]) > cap


# -- reserves by formula -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "length", "elements", "want", "by"),
    [
        (4096, 4096, 2**31, 67_108_864, "T"),
        (8192, 131_072, 2**31, 4 * GiB, "D"),
        (8192, 1_048_576, 2**31, 8 * GiB, "D"),
        (None, None, 1024, 4096, "D"),
    ],
)
def test_indexer(tokens, length, elements, want, by):
    assert charges.indexer_reserve(max_num_tokens=tokens, max_seq_len=length, max_elements=elements) == want


@pytest.mark.parametrize(
    ("seats", "base", "vocabulary", "want"), [(512, 256, 129_280, 165_478_400), (4096, 2048, 151_936, 1_555_824_640)]
)
def test_penalties(seats, base, vocabulary, want):
    """D; quirk: only the seats that overlapping adds. Ours charges all of them."""

    def reserve(num_sequences, num_base_sequences, vocab_size=vocabulary):
        return charges.penalty_reserve(
            num_sequences=num_sequences, num_base_sequences=num_base_sequences, beam_width=1, vocab_size=vocab_size
        )

    assert reserve(seats, base) == want
    assert reserve(base, base) == 0
    assert reserve(seats, base, None) == 0
    assert reserve(seats, 0) == want + 5 * base * vocabulary


@pytest.mark.parametrize(
    ("budget", "profiled", "active", "cache", "want"),
    [
        (512, 400, False, 64, 112),
        (0, 0, True, 64, 64),
        (0, 10, True, 64, 64),
        (512, 400, True, 128 * MiB, 112 + 128 * MiB),
    ],
)
def test_encoder(budget, profiled, active, cache, want):
    """The first two rows: T"""
    found = charges.encoder_reserve(
        output_budget_bytes=budget, profiled_output_bytes=profiled, is_cache_active=active, cache_bytes=cache
    )
    assert found == want


def test_fixed_workspace():
    assert [charges.fixed_workspace_reserve(declared) for declared in (0, 5)] == [0, 5]


def test_the_arena_of_a_drafter():
    shape = {"num_layers": 5, "max_seq_len": 4096, "block_size": 16, "num_kv_heads": 8, "head_dim": 128}
    arena = charges.dflash_arena(max_batch_size=7, element_bytes=2, **shape)
    assert arena == 8 * 2 * 5 * 4112 * 8 * 128 * 2
    charges.check_dflash_arena(arena, max_batch_size=7, free_bytes=arena)
    with pytest.raises(DoesNotFit) as caught:
        charges.check_dflash_arena(arena, max_batch_size=7, free_bytes=arena - 1)
    assert caught.value.remedies == ("max_batch_size 6",)
    charges.check_dflash_arena(
        charges.dflash_arena(max_batch_size=6, element_bytes=2, **shape), max_batch_size=6, free_bytes=arena - 1
    )


# -- splits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "target", "draft", "want"),
    [
        (10 * GiB, (80, 0), (20, 0), (8 * GiB, 2 * GiB)),
        (10 * GiB, (80, 0), (20, 5 * GiB), (4 * GiB, 6 * GiB)),
        (500, (0, 300), (0, 200), (300, 200)),
        (1000, (0, 300), (0, 200), (800, 200)),
        (1000, (0, 300), (20, 0), (300, 700)),
        (200, (80, 0), (0, 200), None),
        (GiB, (80, 0), (20, 2 * GiB), None),
    ],
)
def test_target_and_draft(budget, target, draft, want):
    """T"""
    costs = [Cost(slope=slope, intercept=intercept) for slope, intercept in (target, draft)]
    if want is None:
        with pytest.raises(DoesNotFit) as caught:
            split.target_and_draft(budget, *costs)
        assert caught.value.need_bytes > budget
    else:
        assert split.target_and_draft(budget, *costs) == want


def test_host_tiers_ignore_what_is_fixed():
    """T"""
    target, draft = Cost(slope=80), Cost(slope=20, intercept=50 * GiB)
    assert split.tier_split(10 * GiB, target, draft, tier="host") == (8 * GiB, 2 * GiB)
    with pytest.raises(DoesNotFit):
        split.tier_split(10 * GiB, target, draft, tier="gpu")
    assert split.tier_split(0, target, draft, tier="disk") == (0, 0)
    assert split.tier_split(7, Cost(slope=0, intercept=1), draft, tier="host") == (0, 7)


def test_a_side_that_costs_nothing_is_no_side():
    assert split.target_and_draft(10, Cost(slope=5), Cost(slope=0)) == (10, 0)
    assert split.target_and_draft(10, Cost(slope=0), Cost(slope=5)) == (0, 10)


PAIRS = st.tuples(st.integers(0, 100), st.integers(0, 1000))


@given(st.integers(0, 10**5), PAIRS, PAIRS)
def test_shares_sum_to_the_budget(budget, target, draft):
    costs = [Cost(slope=slope, intercept=intercept) for slope, intercept in (target, draft)]
    try:
        shares = split.target_and_draft(budget, *costs)
    except DoesNotFit:
        fixed = target[1] + draft[1]
        assert budget < fixed or (budget == fixed and target[0] + draft[0] > 0)
        return
    assert sum(shares) == budget
    if all(cost.slope or cost.intercept for cost in costs):
        assert all(share >= cost.intercept for share, cost in zip(shares, costs, strict=True))


def test_encoder_and_decoder():
    """D"""
    assert split.encoder_and_decoder(10 * GiB, Fraction(3, 10)) == (3_221_225_472, 7_516_192_768)
    assert split.split_fraction(Fraction(9, 10), Fraction(3, 10)) == (Fraction(27, 100), Fraction(63, 100))


@given(st.integers(0, 10**12), st.fractions(0, 1))
def test_encoder_and_decoder_sum_to_the_budget(budget, share):
    assert sum(split.encoder_and_decoder(budget, share)) == budget
    assert sum(split.split_fraction(Fraction(9, 10), share)) == Fraction(9, 10)


@pytest.mark.parametrize(
    ("tier", "manager", "facts", "want"),
    [
        ("gpu", "V2", {"has_separate_draft_cache": True}, True),
        ("gpu", "V2", {"has_separate_draft_cache": True, "has_draft_engine": True}, False),
        ("gpu", "V2", {}, False),
        ("gpu", "V1", {"has_separate_draft_cache": True}, False),
        ("gpu", "V1", {"has_variable_windows": True}, True),
        ("host", "V1", {}, True),
        ("disk", "V2", {"has_draft_engine": True}, True),
        ("host", "V2", {"is_probing": True}, False),
    ],
)
def test_when_tiers_are_split(tier, manager, facts, want):
    assert split.is_split(tier, manager, **facts) is want


@pytest.mark.parametrize(
    ("dp", "standalone", "algorithm", "pp", "want"),
    [
        (False, False, None, 1, True),
        (True, False, None, 1, False),
        (True, True, None, 1, True),
        (False, False, "deepseek_v4", 2, False),
        (False, False, "deepseek_v4", 1, True),
    ],
)
def test_when_a_draft_has_a_cache(dp, standalone, algorithm, pp, want):
    found = split.has_draft_cache(attention_dp=dp, is_standalone_drafter=standalone, sparse_algorithm=algorithm, pp=pp)
    assert found is want


def test_ours_weighs_by_requests():
    """What a request pins moves the weight; the allocator's quota bounds the share from below and above."""

    def shares(target, draft):
        return split.split_by_requests(1000, target, draft, num_requests=4, typical_tokens=10)

    assert shares(Cost(slope=80), Cost(slope=20)) == split.target_and_draft(1000, Cost(slope=80), Cost(slope=20))
    assert shares(Cost(slope=80), Cost(slope=20, bytes_per_request=600)) == (500, 500)
    assert shares(Cost(slope=80), Cost(slope=20, quota_per_request=300)) == (700, 300)
    assert shares(Cost(slope=80), Cost(slope=20, quota_per_request=20)) == (920, 80)
