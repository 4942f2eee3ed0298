"""The declarations of attention backends: pure, monotone, found by name, and equal to the figures of their kernels."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.config import Limits
from tonnage.declarations import BACKENDS, AttentionShape, declare, declare_for, questions
from tonnage.declarations.fa3 import Fa3Partials
from tonnage.declarations.flashinfer import (
    FlashInferScratch,
    fa2_plan_bytes,
    fa3_plan_bytes,
    tile_rows,
    workspace_bytes,
)
from tonnage.declarations.sdpa import SdpaScratch
from tonnage.declarations.splits import MOST_SMS, most_parts, num_sms
from tonnage.declarations.triton_decode import TritonPartials
from tonnage.errors import InvalidSetting
from tonnage.terms import Chip, StepShape, worst_shape
from tonnage.units import MiB, ceil_div

HOST = Chip(name="host", sm=0, num_sms=0, total_bytes=2**30)
H200 = Chip(name="H200", sm=90, num_sms=132, total_bytes=150_109_880_320)
SHAPE = {"kv_heads": 3, "head_dim": 64, "kv_dtype": "float32", "block_tokens": 16}
#: Query and key heads of an 8B Llama.
LLAMA = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
LATENT = AttentionShape(
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    v_head_dim=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    kv_dtype="float8_e4m3fn",
)


def limits(seq_len, batch, tokens, **more):
    rows = min(batch, tokens)
    return Limits(max_seq_len=seq_len, max_batch_size=batch, max_num_tokens=tokens, max_logits_rows=rows, **more)


def decode(rows: int, *, captured: bool = False) -> StepShape:
    return StepShape(num_tokens=rows, decode_rows=rows, logits_rows=rows, captured=captured)


@pytest.mark.parametrize("backend", BACKENDS)
@given(seq=st.integers(1, 10**5), batch=st.integers(1, 512), tokens=st.integers(1, 10**4), more=st.integers(1, 1000))
def test_never_less_at_higher_limits(backend, seq, batch, tokens, more):
    def at(*sizes):
        return sum(d.bytes_at(worst_shape(limits(*sizes)), HOST) for d in declare(backend, **SHAPE))

    base = at(seq, batch, tokens)
    assert base > 0 or backend == "trtllm"  # which needs nothing for plain heads
    assert base <= min(at(seq + more, batch, tokens), at(seq, batch + more, tokens), at(seq, batch, tokens + more))


SHAPES = st.builds(
    StepShape,
    **{name: st.integers(0, 5000) for name in ("num_tokens", "prefill_tokens", "attended_tokens", "max_row_tokens")},
    **{name: st.integers(0, 300) for name in ("prefill_rows", "decode_rows", "logits_rows")},
    captured=st.booleans(),
)
ATTENTION = st.sampled_from(
    [
        LLAMA,
        replace(LLAMA, num_heads=8, row_tokens=4),
        replace(LLAMA, num_kv_heads=1, head_dim=256, v_head_dim=256),
        LATENT,
        replace(LATENT, kv_dtype="nvfp4", algorithm="dsa"),
        replace(LATENT, algorithm="deepseek_v4", has_short_mha=True),
    ]
)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    step=SHAPES,
    attention=ATTENTION,
    sm=st.sampled_from([0, 80, 90, 100, 120]),
    more=st.integers(1, 5000),
    bounds=st.sampled_from([None, limits(4096, 64, 512), limits(4096, 64, 512, chunked_prefill=False)]),
)
def test_never_less_in_any_field_of_the_step(backend, step, attention, sm, more, bounds):
    chip = replace(H200, sm=sm)
    for scratch in declare_for(backend, attention, limits=bounds, chip=chip):
        base = scratch.bytes_at(step, chip)
        assert base >= 0
        for field in fields(StepShape):
            grown = True if field.name == "captured" else getattr(step, field.name) + more
            assert scratch.bytes_at(replace(step, **{field.name: grown}), chip) >= base, field.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attention", [LLAMA, LATENT], ids=["heads", "latent"])
def test_an_empty_step_needs_nothing(backend, attention):
    assert not any(declared.bytes_at(StepShape(), H200) for declared in declare_for(backend, attention))


def test_an_unknown_backend_lists_the_known():
    with pytest.raises(InvalidSetting, match="sdpa, flashinfer, fa3, triton, paired, trtllm"):
        declare("flash9", **SHAPE)


def test_plain_heads_are_one_kind_of_layer():
    shape = AttentionShape(num_heads=3, num_kv_heads=3, head_dim=64, v_head_dim=64, kv_dtype="float32", block_tokens=16)
    for backend in BACKENDS:
        assert declare(backend, **SHAPE) == declare_for(backend, shape)


def test_values_may_be_narrower_than_keys():
    plain = SdpaScratch(kv_heads=4, head_dim=192, element_bytes=2, block_tokens=16)
    assert plain.bytes_per_token == 4 * 2 * 192 * 2
    assert replace(plain, v_head_dim=128).bytes_per_token == 4 * (192 + 128) * 2
    (narrow,) = declare_for("sdpa", replace(LATENT, kv_dtype="nvfp4"))
    assert isinstance(narrow, SdpaScratch)
    assert narrow.bytes_per_token == 128 * (192 + 128) * 2  # unpacked to 16 bits


def rounded(num_bytes, alignment=256):
    return -(-num_bytes // alignment) * alignment


class TestFlashInfer:
    """Floats of ``H_q * P * tile * (D + 1) * 4`` for 32 query heads over 8, of 128, on 132 multiprocessors."""

    ALL = FlashInferScratch(shape=LLAMA)

    @pytest.mark.parametrize(("batch", "megabytes"), [(64, "16.9"), (128, "33.8"), (256, "67.6"), (512, "135.3")])
    def test_one_item_for_every_row(self, batch, megabytes):
        """Each row of one token and four query heads a KV head is one tile: ceil(1 * 4 / 16) = 1."""
        size = workspace_bytes(num_heads=32, head_dim=128, num_items=batch, tile=16)
        assert f"{size / 10**6:.1f}" == megabytes

    @pytest.mark.parametrize(
        ("batch", "items"), [(1, 33), (8, 33), (33, 41), (64, 79), (128, 159), (256, 319), (512, 639)]
    )
    def test_a_captured_batch_is_padded_to_the_planners_bound(self, batch, items):
        """ceil(4 B / 16) + B - 1 items, which is what ``plan`` carves out, and more than one for every row."""
        floats = 32 * items * 16 * 129 * 4
        assert self.ALL.float_bytes(batch, H200, captured=True) == floats
        numbers = 3 * items + (batch + 1) + 1 + 1 + (batch + 1)  # items, rows, part length, tokens, tokens
        plan = self.ALL.decode_plan_bytes(batch, H200, captured=True)
        assert 4 * numbers + items <= plan <= 4 * numbers + items + 7 * 16
        assert self.ALL.bytes_at(decode(batch, captured=True), H200) == rounded(floats) + rounded(plan)

    def test_512_captured_rows_pass_the_customary_128_mib(self):
        assert self.ALL.float_bytes(512, H200, captured=True) == 168_818_688 > 128 * MiB

    @pytest.mark.parametrize("batch", [1, 16, 33, 512])
    def test_eager_decodes_stay_within_what_fills_the_chip(self, batch):
        assert self.ALL.float_bytes(batch, H200, captured=False) == 32 * 33 * 16 * 129 * 4 == 8_718_336

    def test_prompts_leave_no_parts(self):
        """8,192 tokens in one row: 64 tiles of 128 for each of 32 heads of fa3, seven numbers each."""
        shape = StepShape(num_tokens=8192, prefill_tokens=8192, prefill_rows=1)
        hopper = self.ALL.bytes_at(shape, H200)
        assert hopper == rounded(7 * 4 * 64 * 32 + rounded(133 * 4, 16))
        ampere = self.ALL.bytes_at(shape, replace(H200, sm=80))
        assert ampere < hopper
        assert ampere == rounded(fa2_plan_bytes(num_items=1 + 256, num_rows=1, num_tokens=8192))

    @pytest.mark.parametrize(
        ("packed", "dim", "tile"),
        [
            (4, 128, 16),
            (16, 128, 16),
            (17, 128, 64),
            (64, 64, 64),
            (65, 128, 128),
            (65, 256, 64),
            (32, 512, 16),
            (33, 512, 32),
        ],
    )
    def test_tiles(self, packed, dim, tile):
        assert tile_rows(packed, dim) == tile

    @pytest.mark.parametrize(("batch", "items", "tile"), [(1, 1, 16), (8, 8, 128), (64, 71, 128)])
    def test_drafts_make_larger_tiles(self, batch, items, tile):
        """Three drafts a row: 4 * 4 packed queries in each, and up to (3 B + 1) * 4 in one of them."""
        drafting = FlashInferScratch(shape=replace(LLAMA, row_tokens=4))
        assert drafting.graph_items(batch) == (items, tile)
        size = workspace_bytes(num_heads=32, head_dim=128, num_items=max(33, items), tile=tile)
        assert drafting.float_bytes(batch, H200, captured=True) == size

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
    def test_the_bound_covers_any_lengths(self, lengths):
        """Brute force: no way to cut the tokens into rows makes more tiles than the planner's bound."""
        tokens, rows = sum(lengths), len(lengths)
        for tile in (16, 64, 128):
            tiles = sum(ceil_div(length * 4, tile) for length in lengths)
            assert tiles <= ceil_div(tokens * 4, tile) + rows - 1

    @given(
        lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40),
        heads=st.sampled_from([(32, 8), (8, 8), (14, 2), (5, 1), (128, 8)]),
        dim=st.sampled_from([64, 128, 256, 512]),
        sm=st.sampled_from([80, 90]),
    )
    def test_plans_of_prompts_fit_whatever_their_lengths(self, lengths, heads, dim, sm):
        """Items counted row by row, with the tile of the average row, as the planners do."""
        num_heads, kv_heads = heads
        shape = replace(LLAMA, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim)
        group, rows, tokens = num_heads // kv_heads, len(lengths), sum(lengths)
        tile = tile_rows(tokens * group // rows, dim)
        items = sum(ceil_div(length * group, tile) for length in lengths)
        needed = fa2_plan_bytes(num_items=items, num_rows=rows, num_tokens=tokens)
        chip = replace(H200, sm=sm)
        declared = FlashInferScratch(shape=shape).prefill_plan_bytes(rows, tokens, chip)
        assert needed <= declared
        if sm == 90:
            works = sum(ceil_div(length, 192 if dim == 64 else 128) for length in lengths) * num_heads
            assert fa3_plan_bytes(num_items=works, num_sms=132) <= declared

    def test_each_window_has_plans_of_its_own_and_floats_are_shared(self):
        both = FlashInferScratch(shape=replace(LLAMA, num_windows=2))
        floats = rounded(both.float_bytes(64, H200, captured=True))
        shape = decode(64, captured=True)
        assert both.bytes_at(shape, H200) - floats == 2 * (self.ALL.bytes_at(shape, H200) - floats)

    def test_nothing_is_kept_from_one_step_to_the_next(self):
        (scratch,) = declare_for("flashinfer", LLAMA)
        assert not scratch.keeps_state
        assert scratch.bytes_at(StepShape(), H200) == 0


class TestFa3:
    @pytest.mark.parametrize(("splits", "megabytes"), [(8, "33.8"), (32, "135.3"), (1, "0.0")])
    def test_a_given_number_of_splits(self, splits, megabytes):
        size = Fa3Partials(shape=LLAMA, num_splits=splits).bytes_at(decode(256), H200)
        assert f"{size / 10**6:.1f}" == megabytes

    @pytest.mark.parametrize("batch", [1, 2, 5, 16, 17, 64, 256])
    def test_our_rule_serves_every_smaller_batch_too(self, batch):
        splits = {b: min(16, max(1, ceil_div(132, b * 8))) for b in range(1, batch + 1)}
        worst = max(splits[b] * b * 32 * 129 * 4 if splits[b] > 1 else 0 for b in splits)
        assert Fa3Partials(shape=LLAMA).bytes_at(decode(batch), H200) == worst

    def test_it_is_audited_and_not_served(self):
        (scratch,) = declare_for("fa3", LLAMA)
        assert not scratch.served
        assert scratch.bytes_at(StepShape(num_tokens=8192, prefill_tokens=8192, prefill_rows=4), H200) == 0


class TestTriton:
    @given(batch=st.integers(1, 600), kv_heads=st.integers(1, 40), groups=st.integers(1, 8), sms=st.integers(1, 160))
    def test_below_the_closed_bound(self, batch, kv_heads, groups, sms):
        shape = replace(LLAMA, num_heads=kv_heads * groups, num_kv_heads=kv_heads)
        size = TritonPartials(shape=shape).bytes_at(decode(batch), replace(H200, num_sms=sms))
        rows = min(batch, 2 * sms // kv_heads)
        assert size <= (2 * sms + rows * kv_heads) * groups * 129 * 4

    def test_one_megabyte_whatever_the_batch(self):
        scratch = TritonPartials(shape=LLAMA)
        largest = scratch.bytes_at(decode(33), H200)
        assert scratch.bytes_at(decode(512), H200) == largest == 1_056_768
        assert most_parts(512, 8, num_slots=264, most_splits=32) == most_parts(32, 8, num_slots=264, most_splits=32)

    def test_drafts_leave_parts_of_their_own(self):
        size = TritonPartials(shape=LLAMA).bytes_at(decode(16), H200)
        assert TritonPartials(shape=replace(LLAMA, row_tokens=4)).bytes_at(decode(16), H200) == 4 * size

    def test_no_parts_where_rows_fill_the_chip_by_themselves(self):
        assert most_parts(512, 512, num_slots=264, most_splits=32) == 0


def test_a_card_whose_multiprocessors_are_unknown_is_taken_for_a_large_one():
    assert (num_sms(H200), num_sms(HOST)) == (132, MOST_SMS)


def test_a_pair_declares_what_both_do_on_one_scratch():
    (ours,), (theirs,) = declare_for("triton", LLAMA), declare_for("flashinfer", LLAMA)
    both = declare_for("paired", LLAMA)
    assert both == (ours, replace(theirs, captured=False))
    assert {scratch.share for scratch in both} == {"attention"}
    bounds = limits(4096, 256, 8192, graph_batch_sizes=(256,))
    # 256 captured decodes are padded to 256 * 4 / 16 + 255 items of 16 packed queries, eager ones to the 33 that fill
    # the chip; each item has 129 floats for every one of its queries and of 32 heads. Plans are the rest.
    worst = worst_shape(bounds)
    captured, eager = theirs.bytes_at(worst, H200), both[1].bytes_at(worst, H200)
    assert 319 * 16 * 32 * 129 * 4 < captured < 319 * 16 * 32 * 129 * 4 + MiB
    assert 33 * 16 * 32 * 129 * 4 < eager < 33 * 16 * 32 * 129 * 4 + MiB


@pytest.mark.parametrize("backend", ["sdpa", "flashinfer", "fa3", "triton"])
def test_questions_of_backends_that_read_or_copy_pages(backend):
    """Nothing grows with the attended tokens, so all of it is fixed."""
    bounds = limits(4096, 64, 8192, graph_batch_sizes=(64,))
    for scratch in declare_for(backend, LLAMA):
        told = questions(scratch, bounds, H200)
        assert (told.bytes_per_attended_token, told.is_chunk_bounded) == (0, True)
        assert told.fixed_bytes == scratch.bytes_at(worst_shape(bounds), H200) > 0
