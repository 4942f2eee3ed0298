"""The reference's probe, managers, quotas and ranks; when nothing is probed; restoring what the probe overrode.

"T": the number is that of a test of the reference; "D": derived from its formulas.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.cost import Bounded, Cost
from tonnage.budget.reference import host, pages, tokens
from tonnage.budget.reference.environment import Environment
from tonnage.budget.reference.estimation import Method, estimation, helix_quota, self_sized_bytes
from tonnage.budget.reference.knobs import ReferenceKnobs, Speculation
from tonnage.budget.reference.manager import chosen_manager, effective_reuse
from tonnage.budget.reference.probe import (
    SharedSettings,
    encoder_probe,
    extra_probe_tokens,
    long_mla_probe,
    manager_max_seq_len,
    num_pool_groups,
    num_sequences,
    overridden_for_probe,
    probe_lengths,
    temporary_blocks,
    temporary_pool,
    wants_long_probe,
)
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.units import GiB

V1, V2 = ReferenceKnobs(), ReferenceKnobs(manager="V2")
DRAFTS = Speculation(draft_tokens=3, max_draft_tokens=3)

# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "length", "copies", "want"),
    [
        (8192, 131_072, 1, [8192]),
        (8192, 4097, 1, [4096, 4096]),
        (10, 5, 1, [4, 4, 2]),
        (3, 1, 1, [1, 1, 1]),
        (8, 5, 2, [4, 4, 4, 4]),
    ],
)
def test_probe_lengths(step, length, copies, want):
    assert probe_lengths(max_num_tokens=step, max_seq_len=length, num_copies=copies) == want


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 4))
def test_the_probe_is_one_full_step_of_possible_prompts(step, length, copies):
    found = probe_lengths(max_num_tokens=step, max_seq_len=length, num_copies=copies)
    assert sum(found) == step * copies
    assert all(1 <= each <= max(1, length - 1) for each in found)


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({}, (8192, 256)),
        ({"encoder_max_num_tokens": 100, "encoder_max_batch_size": 2}, (100, 2)),
        ({"encoder_max_num_tokens": 0}, None),
        ({"encoder_max_batch_size": -1}, None),
    ],
)
def test_the_encoder_is_run_by_itself(asked, want):
    assert encoder_probe(replace(V1, **asked), max_num_tokens=8192, max_batch_size=256) == want
    assert encoder_probe(V1, max_num_tokens=None, max_batch_size=256) is None


@pytest.mark.parametrize(("limit", "want"), [(131_071, 73_728), (65_535, None)])
def test_long_probe(limit, want):
    """Chunk 8192 x 4, step 8192; the limit is one below the longest sequence. D"""
    assert long_mla_probe(chunk_tokens=8192, buffer_batch_size=4, max_num_tokens=8192, max_seq_len=limit + 1) == want


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, True),
        ({"sm": 90}, False),
        ({"is_latent": False}, False),
        ({"backend": "VANILLA"}, False),
        ({"sparse_algorithm": "dsa"}, False),
        ({"sparse_algorithm": "skip_softmax"}, True),
        ({"is_chunked": False}, False),
        ({"chunk_tokens": 0}, False),
    ],
)
def test_who_gets_the_long_probe(changes, want):
    facts = {"is_latent": True, "backend": "TRTLLM", "sparse_algorithm": None, "is_chunked": True}
    assert wants_long_probe(**({**facts, "chunk_tokens": 8192, "sm": 100} | changes)) is want


# -- the temporary pool ------------------------------------------------------------------------------------------------


def blocks(lengths, **changes):
    arguments = {"max_seq_len": 1, "max_batch_size": 1, "max_graph_batch_size": 1, "block_tokens": 64}
    return temporary_blocks(lengths, **(arguments | changes))


@pytest.mark.parametrize(("copies", "want", "by"), [(1, 768, "T"), (4, 192, "T")])
def test_estimation(copies, want, by):
    """Four prompts of 128 on every rank, or one of them on each of four."""
    assert blocks([128] * 4, num_copies=copies) * 64 == want


@pytest.mark.parametrize(("groups", "want"), [(1, 12_416), (2, 24_832)])
def test_one_sequence_beside_captured_rows(groups, want):
    """D; the doubling is T"""
    found = blocks(
        [12_287, 1], block_tokens=32, max_batch_size=4, max_graph_batch_size=4, max_seq_len=12_288, pool_groups=groups
    )
    assert found * 32 == want


def test_drafts_that_overlap():
    """One-model drafting of 3. D"""
    extra = extra_probe_tokens(DRAFTS, is_overlapped=True)
    assert extra == 9
    shape = {"max_batch_size": 64, "max_graph_batch_size": 64, "max_seq_len": 8192, "block_tokens": 32}
    lengths = probe_lengths(max_num_tokens=8192, max_seq_len=8192)
    assert blocks(lengths, extra_tokens=extra, **shape) * 32 == 10_240
    assert blocks([1], max_batch_size=9, beam_width=4) == 36


@pytest.mark.parametrize(
    ("speculation", "overlapped", "extra", "longest"),
    [
        (None, True, 1, 101),
        (None, False, 1, 100),
        (DRAFTS, True, 9, 100 + 4 + 2 + 3),
        (DRAFTS, False, 6, 100 + 2 + 3),
        (Speculation(draft_tokens=3, max_draft_tokens=3, is_one_engine=False), True, 7, 100 + 4 + 3),
        (Speculation(draft_tokens=3, max_draft_tokens=3, shares_target_cache=True), False, 4, 100 + 3),
    ],
)
def test_look_ahead(speculation, overlapped, extra, longest):
    assert extra_probe_tokens(speculation, is_overlapped=overlapped) == extra
    assert manager_max_seq_len(100, speculation, is_overlapped=overlapped) == longest


def test_the_temporary_pool_is_held_within_the_device_and_the_caps():
    cost = Cost(slope=100, intercept=1000)
    half = replace(V1, free_gpu_memory_fraction=Fraction(1, 2))
    # 50,000 bytes pay for 490 tokens; whole blocks hold 480.
    assert temporary_pool(100, half, cost=cost, free_bytes=100_000).tokens == 480
    assert temporary_pool(100, replace(half, max_tokens=96), cost=cost, free_bytes=100_000).tokens == 96
    paged = replace(V2, free_gpu_memory_fraction=Fraction(1, 2))
    pool = temporary_pool(100, paged, cost=cost, free_bytes=100_000)
    assert (pool.tokens, pool.quota_bytes) == (3200, 50_000)
    assert temporary_pool(100, replace(paged, max_gpu_total_bytes=7), cost=cost, free_bytes=100_000).quota_bytes == 7
    roomy = temporary_pool(1, paged, cost=cost, free_bytes=100_000)
    assert roomy.quota_bytes == math.ceil(4200 / Fraction(95, 100))


def test_groups_of_pools():
    assert num_pool_groups(V1, windows=[128, 4096], layer_types=[]) == 1
    assert num_pool_groups(V2, windows=[128, 4096, 128], layer_types=[]) == 2
    assert num_pool_groups(V2, windows=[], layer_types=["attention", "mamba"]) == 2
    assert num_pool_groups(V2, windows=[], layer_types=[]) == 1


USER = ReferenceKnobs(
    manager="V2", pool_ratio=(Fraction(1, 4), Fraction(3, 4)), avg_seq_len=77, host_cache_bytes=5, max_tokens=9
)


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_what_the_probe_overrode_comes_back(failure):
    settings = SharedSettings(knobs=USER, max_seq_len=4096)

    def probe():
        with overridden_for_probe(settings) as probing:
            assert (probing.knobs.pool_ratio, probing.knobs.avg_seq_len) == (None, 4096)
            assert (probing.knobs.host_cache_bytes, probing.knobs.max_tokens) == (None, 9)
            probing.max_seq_len = 128  # a temporary manager too small for one full sequence
            if failure:
                raise failure

    if failure:
        with pytest.raises(failure):
            probe()
    else:
        probe()
    assert settings == SharedSettings(knobs=USER, max_seq_len=4096)


@pytest.mark.parametrize(("batch", "pp", "headroom", "want"), [(8, 1, True, 16), (8, 1, False, 8), (8, 2, True, 16)])
def test_seats(batch, pp, headroom, want):
    """T"""
    assert num_sequences(max_batch_size=batch, pp=pp, has_headroom=headroom) == want


# -- when nothing is probed --------------------------------------------------------------------------------------------

SKIP = replace(V1, environment=Environment(skip_estimation=True))


@pytest.mark.parametrize(
    ("knobs", "facts", "want"),
    [
        (V1, {}, Method.PROBE),
        (V2, {}, Method.PROBE),
        (SKIP, {}, Method.UNPROFILED),
        (V1, {"is_encoder_decoder": True}, Method.UNPROFILED),
        (V2, {"context_parallel": "helix"}, Method.HELIX_QUOTA),
        (V1, {"context_parallel": "helix"}, Method.NO_CAPACITY_STEP),
        (V2, {"context_parallel": "other"}, Method.NO_CAPACITY_STEP),
        (V1, {"backend": "vanilla"}, Method.NO_CAPACITY_STEP),
    ],
)
def test_estimation_off(knobs, facts, want):
    found = estimation(knobs, **facts)
    assert found.method == want
    assert bool(found.because) == (want != Method.PROBE)


def test_helix_quota():
    """T"""
    half = replace(V2, free_gpu_memory_fraction=Fraction(1, 2))
    assert helix_quota(half, free_bytes=1_000_000) == 500_000
    # Tokens would be inflated on their way to a quota, so they do not enter; and they stay as they are.
    assert helix_quota(replace(half, max_tokens=3), free_bytes=1_000_000) == 500_000
    assert helix_quota(replace(half, max_gpu_total_bytes=9), free_bytes=1_000_000) == 9
    with pytest.raises(InvalidSetting):
        helix_quota(replace(half, max_tokens=0), free_bytes=1_000_000)
    with pytest.raises(DoesNotFit):
        helix_quota(half, free_bytes=0)


def test_managers_that_size_themselves():
    assert self_sized_bytes(V1, free_bytes=1000) == 900
    assert self_sized_bytes(replace(V2, max_gpu_total_bytes=7), free_bytes=1000) == 7
    with pytest.raises(InvalidSetting, match="quota not set"):
        self_sized_bytes(V2, free_bytes=1000)


def test_helix_counts_whole_pages():
    """Tokens are of the whole sequence, bytes of this rank."""
    shape = {"bytes_per_local_token": 10, "block_tokens": 32, "cp": 4}
    assert tokens.helix_tokens(1000, **shape) == 96 * 4
    assert [tokens.helix_bytes(t, **shape) for t in (1, 128, 129)] == [320, 320, 640]


@given(st.integers(0, 10**6), st.integers(1, 50), st.sampled_from([2, 32]), st.integers(1, 8))
def test_helix_never_promises_more_than_is_paid(budget, size, block, cp):
    shape = {"bytes_per_local_token": size, "block_tokens": block, "cp": cp}
    assert tokens.helix_bytes(tokens.helix_tokens(budget, **shape), **shape) <= budget


# -- pages and ranks ---------------------------------------------------------------------------------------------------


def test_the_second_fraction():
    net = {"fraction": Fraction(9, 10), "runtime_bytes_per_token": 10}
    assert pages.v1_uniform_tokens(50, free_bytes=1000, **net) == 50
    assert pages.v1_uniform_tokens(500, free_bytes=1000, **net) == 90
    assert pages.v1_uniform_tokens(None, free_bytes=1000, **net) == 90
    with pytest.raises(InvalidSetting, match="below 1"):
        pages.v1_uniform_tokens(50, free_bytes=1000, fraction=Fraction(1), runtime_bytes_per_token=10)


def test_the_block_manager_counts():
    assert pages.v1_probe_blocks(100, block_tokens=32) == 3
    assert pages.v1_window_pool_bytes(V1, free_bytes=1000) == 900
    assert pages.v1_window_pool_bytes(replace(V1, max_gpu_total_bytes=7), free_bytes=1000) == 7
    assert host.host_blocks(10_000, bytes_per_token=10, block_tokens=32) == 31


def test_post_check():
    kept = pages.v1_post_check([128, 4096], 200, block_tokens=32, beam_width=1, max_seq_len=4096)
    assert (kept.bound_tokens, kept.windows, kept.max_seq_len) == (6400, (128, 4096), 4096)
    low = pages.v1_post_check([128, 4096], 100, block_tokens=32, beam_width=4, max_seq_len=4096)
    assert (low.bound_tokens, low.windows, low.max_seq_len) == (768, (128, 768), 768)
    for num_blocks, beams in ((0, 1), (4, 4), (3, 4)):
        with pytest.raises(DoesNotFit):
            pages.v1_post_check([4096], num_blocks, block_tokens=32, beam_width=beams, max_seq_len=4096)


def test_quota():
    cost = Cost(slope=95)
    assert pages.v2_quota(V2, cost, pool_bytes=1000) == 1000
    assert pages.v2_quota(replace(V2, max_tokens=4), cost, pool_bytes=1000) == 400
    assert pages.v2_quota(replace(V2, max_tokens=4), cost, pool_bytes=None) == 400
    with pytest.raises(InvalidSetting, match="quota not set"):
        pages.v2_quota(V2, cost, pool_bytes=None)


COSTS = st.builds(
    Cost,
    slope=st.integers(0, 40),
    intercept=st.integers(0, 200),
    bounded=st.builds(Bounded, rate=st.integers(0, 40), until=st.integers(0, 30)).map(lambda segment: (segment,)),
)
RESUME = st.sampled_from([Fraction(95, 100), Fraction(1), Fraction(1, 3)])


@given(st.lists(st.tuples(COSTS, st.integers(0, 5000)), min_size=1, max_size=4), RESUME)
def test_ranks_agree_on_tokens(ranks, share):
    """After the clamp every rank still holds what the poorest promised, and none has grown."""
    costs, quotas = [cost for cost, _ in ranks], [quota for _, quota in ranks]
    promised = [tokens.resumable_tokens(cost, quota, resume_fraction=share) for cost, quota in ranks]
    agreed = tokens.agreed_quotas(costs, quotas, resume_fraction=share)
    assert all(new <= old for new, old in zip(agreed, quotas, strict=True))
    after = [tokens.resumable_tokens(cost, new, resume_fraction=share) for cost, new in zip(costs, agreed, strict=True)]
    assert min(after) == min(promised)
    if min(promised) == math.inf:
        assert agreed == quotas


def test_ranks_take_the_fewest():
    assert pages.agreed_tokens([5, 3, math.inf]) == 3
    assert pages.agreed_tokens([math.inf]) == math.inf
    assert pages.agreed_window_blocks([{128: 5, 4096: 9}, {128: 7, 4096: 2}]) == {128: 5, 4096: 2}
    assert pages.agreed_cap([None, 7, 0]) == 0  # ours; 0 is a cap
    assert pages.agreed_cap([None, None]) is None
    assert host.agreed_host_bytes([GiB, 3]) == 3


@pytest.mark.parametrize(
    ("quota", "free", "ranks", "pinnable", "want"),
    [(10, 1000, 1, None, 10), (10_000, 1000, 2, None, 250), (10_000, 100_000, 1, 1000, 800)],
)
def test_host_tier(quota, free, ranks, pinnable, want):
    found = host.auto_host_bytes(
        device_quota_bytes=quota, free_host_bytes=free, num_local_ranks=ranks, pinnable_bytes=pinnable
    )
    assert found == want


# -- which manager -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "facts", "want", "warned"),
    [
        ("auto", {}, "V1", False),
        ("auto", {"prefers_v2": True}, "V2", False),
        ("V1", {"prefers_v2": True}, "V1", False),
        ("V2", {}, "V2", False),
        ("V2", {"beam_width": 4}, "V1", True),
        ("auto", {"prefers_v2": True, "has_connector": True}, "V1", True),
        ("auto", {"needs_v2": True}, "V2", False),
        ("V1", {"beam_width": 4}, "V1", False),
    ],
)
def test_managers(asked, facts, want, warned):
    choice = chosen_manager(asked, **facts)
    assert choice.manager == want
    assert bool(choice.warning) is warned


def test_a_model_that_needs_the_page_manager_refuses_beams():
    with pytest.raises(InvalidSetting, match="4 beams"):
        chosen_manager("auto", needs_v2=True, beam_width=4)


@pytest.mark.parametrize(
    ("latent", "sm", "dtype", "want"),
    [(False, 80, "nvfp4", True), (True, 90, "fp8", True), (True, 89, "fp8", False), (True, 100, "nvfp4", False)],
)
def test_reuse(latent, sm, dtype, want):
    assert effective_reuse(is_enabled=True, is_latent=latent, sm=sm, kv_dtype=dtype) is want
    assert effective_reuse(is_enabled=False, is_latent=latent, sm=sm, kv_dtype=dtype) is False
