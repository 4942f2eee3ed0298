"""Latent attention's declarations against a truth table written out by hand, and what bounds them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_declarations import H200, LATENT, LLAMA, limits

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Latent, Layer, Recurrent
from tonnage.declarations import Questions, attention_shapes, declare_for, questions, sparse_algorithm
from tonnage.declarations.trtllm_mla import LatentContext, gather_rate, reference_chunk_bounded, reference_rate
from tonnage.terms import Rank, StepShape

FP8, HALF, NVFP4 = "float8_e4m3fn", "bfloat16", "nvfp4"
SMS = (80, 89, 90, 100, 103, 107, 120)
ALGORITHMS = ("none", "skip_softmax", "dsa", "deepseek_v4")

#: 128 heads: one byte each of nope 128, rope 64, v 128; picked tokens: 512 + 64 elements and 64 bytes of indices.
DENSE, PICKED, DIRECT = 128 * 320, 512 + 64 + 64, 0

# cache dtype, algorithm, short contexts expanded -> the reference's rate on each SM of SMS, in that order
TABLE: dict[tuple[str, str, bool], tuple[int, ...]] = {
    (HALF, "none", False): (0,) * 7,
    (HALF, "none", True): (0,) * 7,
    (HALF, "skip_softmax", False): (0,) * 7,
    (HALF, "skip_softmax", True): (0,) * 7,
    (HALF, "dsa", False): (0,) * 7,
    (HALF, "dsa", True): (0,) * 7,
    (HALF, "deepseek_v4", False): (0,) * 7,
    (HALF, "deepseek_v4", True): (0,) * 7,
    (FP8, "none", False): (0, 0, DENSE, DENSE, DENSE, DENSE, DENSE),
    (FP8, "none", True): (0, 0, DENSE, DENSE, DENSE, DENSE, DENSE),
    (FP8, "skip_softmax", False): (0, 0, DENSE, DENSE, DENSE, DENSE, DENSE),
    (FP8, "skip_softmax", True): (0, 0, DENSE, DENSE, DENSE, DENSE, DENSE),
    (FP8, "dsa", False): (0, 0, DENSE, DIRECT, DIRECT, DIRECT, DENSE),
    (FP8, "dsa", True): (0, 0, DENSE, DENSE, DENSE, DENSE, DENSE),
    (FP8, "deepseek_v4", False): (0, 0, DENSE, DIRECT, DIRECT, DIRECT, DENSE),
    (FP8, "deepseek_v4", True): (0, 0, DENSE, DENSE, DENSE, DENSE, DENSE),
    (NVFP4, "none", False): (0,) * 7,
    (NVFP4, "none", True): (0,) * 7,
    (NVFP4, "skip_softmax", False): (0,) * 7,
    (NVFP4, "skip_softmax", True): (0,) * 7,
    (NVFP4, "dsa", False): (0, 0, 0, PICKED, PICKED, PICKED, PICKED),
    (NVFP4, "dsa", True): (0, 0, 0, PICKED, PICKED, PICKED, PICKED),
    (NVFP4, "deepseek_v4", False): (0,) * 7,
    (NVFP4, "deepseek_v4", True): (0,) * 7,
}
CASES = [(*key, sm, rate) for key, rates in TABLE.items() for sm, rate in zip(SMS, rates, strict=True)]


def shape(kv_dtype: str, algorithm: str = "none", *, has_short_mha: bool = False, num_heads: int = 128):
    return replace(LATENT, kv_dtype=kv_dtype, algorithm=algorithm, has_short_mha=has_short_mha, num_heads=num_heads)


def on(sm: int):
    return replace(H200, sm=sm)


def test_the_table_is_whole():
    assert set(TABLE) == set(product((HALF, FP8, NVFP4), ALGORITHMS, (False, True)))


@pytest.mark.parametrize(("kv_dtype", "algorithm", "has_short_mha", "sm", "rate"), CASES)
@pytest.mark.parametrize("reuse", [False, True], ids=["no reuse", "reuse"])
def test_truth_table(kv_dtype, algorithm, has_short_mha, sm, rate, reuse):
    """The rate does not depend on reuse; whether all of the attended past lies there at once does."""
    attention = shape(kv_dtype, algorithm, has_short_mha=has_short_mha)
    assert reference_rate(attention, sm) == rate
    assert reference_chunk_bounded(attention, sm) is (rate != PICKED)
    bounds = limits(4096, 64, 512, prefix_caching=reuse, chunked_prefill=False)
    declared = {d.name: d for d in declare_for("trtllm", attention, limits=bounds, chip=on(sm))}
    context = declared["context dequantisation"]
    told = questions(context, bounds, on(sm))
    assert told == Questions(bytes_per_attended_token=rate, is_chunk_bounded=not (reuse and rate), fixed_bytes=0)
    assert context.chunk_bounded is not reuse
    assert ("context gather" in declared) is reuse
    # Heads that are cached as such need none of it.
    plain = replace(LLAMA, kv_dtype=kv_dtype, algorithm=algorithm, has_short_mha=has_short_mha)
    assert (reference_rate(plain, sm), gather_rate(plain, sm)) == (0, 0)
    assert declare_for("trtllm", plain, limits=bounds, chip=on(sm)) == ()


@pytest.mark.parametrize(("kv_dtype", "algorithm", "has_short_mha"), TABLE)
@pytest.mark.parametrize("sm", SMS)
def test_the_16_bit_gather_lies_beside_every_expansion(kv_dtype, algorithm, has_short_mha, sm):
    """Where the reference expands an fp8 cache, and with a 16-bit cache too, which it takes for free."""
    attention = shape(kv_dtype, algorithm, has_short_mha=has_short_mha)
    expands_fp8 = TABLE[FP8, algorithm, has_short_mha][SMS.index(sm)] > 0
    assert gather_rate(attention, sm) == (114_688 if expands_fp8 and kv_dtype != NVFP4 else 0)


@pytest.mark.parametrize(
    ("attention", "sm", "rate", "gather"),
    [
        pytest.param(shape(FP8), 90, 40_960, 114_688, id="128 heads, attention-DP"),
        pytest.param(shape(FP8, num_heads=64), 100, 20_480, 57_344, id="64 heads, attention-DP"),
        pytest.param(shape(FP8, num_heads=16), 90, 5_120, 14_336, id="128 heads over 8 ranks"),
        pytest.param(shape(NVFP4, "dsa"), 100, 640, 0, id="nvfp4, picked tokens"),
    ],
)
def test_figures(attention, sm, rate, gather):
    assert (reference_rate(attention, sm), gather_rate(attention, sm)) == (rate, gather)


def test_28_gib_that_the_reference_does_not_charge():
    gather = next(d for d in declare_for("trtllm", shape(FP8)) if d.name == "context gather")
    assert gather.bytes_at(StepShape(attended_tokens=262_144), on(90)) == 28 * 2**30


def test_both_live_at_once_so_neither_shares_with_the_other():
    first, second = declare_for("trtllm", shape(FP8))
    assert first.share != second.share
    assert isinstance(first, LatentContext)
    assert isinstance(second, LatentContext)
    assert (first.in_reference, second.in_reference) == (True, False)
    assert not first.chunk_bounded
    assert first.rates(limits(4096, 64, 8192), on(90)).per_attended_token == 40_960


@pytest.mark.parametrize(
    ("sm", "algorithm", "reuse", "chunked", "prefix"),
    [
        (90, "none", False, False, 0),
        (100, "none", False, False, 0),
        (90, "none", True, False, None),
        (100, "none", True, False, None),
        (90, "none", False, True, None),  # chunks bound nothing before SM 100
        (90, "none", True, True, None),
        (100, "none", False, True, 8 * 512),  # two pieces of four chunks
        (100, "skip_softmax", True, True, 8 * 512),
        (100, "dsa", True, True, None),
        (0, "none", True, True, None),
    ],
)
def test_how_much_of_a_cached_past_lies_there_at_once(sm, algorithm, reuse, chunked, prefix):
    bounds = limits(4096, 64, 512, prefix_caching=reuse, chunked_prefill=chunked)
    attention = shape(FP8, algorithm, has_short_mha=True)
    context = declare_for("trtllm", attention, limits=bounds, chip=on(sm))[0]
    assert isinstance(context, LatentContext)
    assert context.prefix_tokens == prefix
    worst = 64 * 4096
    expected = worst if prefix is None else 512 + prefix
    step = StepShape(num_tokens=512, prefill_tokens=512, prefill_rows=64, attended_tokens=worst)
    assert context.bytes_at(step, on(sm)) == 40_960 * expected
    assert questions(context, bounds, on(sm)).is_chunk_bounded is (prefix is not None)


@given(heads=st.integers(1, 256), sm=st.sampled_from(SMS), algorithm=st.sampled_from(ALGORITHMS))
def test_an_unknown_card_is_charged_like_those_that_need_the_most(heads, sm, algorithm):
    for scratch in declare_for("trtllm", shape(FP8, algorithm, num_heads=heads)):
        assert isinstance(scratch, LatentContext)
        assert scratch.rate(on(0)) >= scratch.rate(on(sm))


@given(cap=st.integers(1, 3000), tokens=st.integers(1, 300), seq=st.integers(1, 300), batch=st.integers(1, 40))
def test_the_questions_by_brute_force(cap, tokens, seq, batch):
    """Every step up to the worst case: the rate is what each token adds, until the bound if there is one."""
    context = LatentContext(
        name="x", share="x", source="test", shape=shape(FP8), prefix_tokens=cap, in_reference=True, chunk_bounded=True
    )
    bounds = limits(seq, batch, tokens)
    told = questions(context, bounds, on(90))
    worst = min(batch, tokens) * seq
    assert told.bytes_per_attended_token == 40_960
    assert told.fixed_bytes == 0
    grew_last = max(
        n
        for n in range(1, worst + 1)
        if context.bytes_at(StepShape(num_tokens=tokens, attended_tokens=n), on(90))
        > context.bytes_at(StepShape(num_tokens=tokens, attended_tokens=n - 1), on(90))
    )
    assert grew_last == min(worst, tokens + cap)
    if told.is_chunk_bounded:
        assert grew_last < worst or worst <= tokens
    else:
        assert grew_last > max(tokens, worst - 4096)  # a bound so close to the worst case spares nothing


class TestShapesOfAModel:
    """Which kinds of layers a config has, once each and in the order of the layers."""

    DENSE = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
    MIXERS = (
        Attention(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, window=128),
        Attention(num_heads=32, num_kv_heads=2, head_dim=256, v_head_dim=256),
        Recurrent(kind="mamba2", num_heads=32, head_dim=64, state_size=128, conv_channels=4096, conv_kernel=4),
        Latent(
            num_heads=32, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=96, index_head_dim=128
        ),
    )

    def config(self, **changes: object) -> ModelConfig:
        layers = tuple(Layer(mixer=mixer, feed_forward=None) for mixer in self.MIXERS for _ in range(2))
        return replace(self.DENSE, **{"num_layers": len(layers), "layers": layers, **changes})

    def test_dense(self):
        (made,) = attention_shapes(self.DENSE, kv_dtype=HALF)
        assert made == replace(LLAMA, kv_dtype=HALF)
        assert attention_shapes(replace(self.DENSE, layers=()), kv_dtype=HALF) == (made,)
        assert attention_shapes(self.DENSE, kv_dtype=HALF, row_tokens=3) == (replace(made, row_tokens=3),)

    def test_windows_of_one_kind_are_counted(self):
        narrow, whole = (replace(self.MIXERS[0], window=window) for window in (1024, None))
        layers = tuple(Layer(mixer=mixer, feed_forward=None) for mixer in (narrow, whole, narrow))
        (made,) = attention_shapes(replace(self.DENSE, num_layers=3, layers=layers), kv_dtype=HALF)
        assert made.num_windows == 2
        (made,) = attention_shapes(replace(self.DENSE, num_layers=2, layers=layers[::2]), kv_dtype=HALF)
        assert made.num_windows == 1

    def test_each_kind_once_and_none_for_states(self):
        window, wide, latent = attention_shapes(self.config(), kv_dtype=FP8, block_tokens=32)
        assert (window.num_kv_heads, window.head_dim, window.num_groups) == (8, 128, 4)
        assert (wide.num_kv_heads, wide.v_head_dim, wide.block_tokens) == (2, 256, 32)
        assert (latent.head_dim, latent.v_head_dim, latent.kv_lora_rank) == (192, 96, 512)
        assert (window.algorithm, latent.algorithm) == ("none", "dsa")
        assert latent.is_latent
        assert not wide.is_latent

    def test_the_algorithm(self):
        assert sparse_algorithm(self.DENSE) == "none"
        assert sparse_algorithm(self.config()) == "dsa"
        assert sparse_algorithm(self.config(model_type="deepseek_v4")) == "deepseek_v4"

    @pytest.mark.parametrize(
        ("rank", "heads", "kv_heads"),
        [
            (Rank(tp=4, size=4), 8, 2),
            (Rank(tp=16, size=16), 2, 1),  # each KV head lies on two ranks
            (Rank(tp=4, size=4, attention_dp=True), 32, 8),
        ],
    )
    def test_heads_of_a_rank(self, rank, heads, kv_heads):
        (made,) = attention_shapes(self.DENSE, kv_dtype=HALF, rank=rank)
        assert (made.num_heads, made.num_kv_heads) == (heads, kv_heads)

    def test_layers_of_a_stage(self):
        last = attention_shapes(self.config(), kv_dtype=HALF, rank=Rank(index=1, size=2, pp=2))
        assert [one.is_latent for one in last] == [True]
