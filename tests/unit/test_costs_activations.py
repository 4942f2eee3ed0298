"""The closed form against peaks that were measured, on a card and by a tracker of storages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.costs.activations import (
    encoder_output_bytes,
    encoder_peak,
    forward_peak,
    predicted,
    reserved_for,
    sampler_bytes,
    sampler_scratch_bytes,
)
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import collective_bytes, context_bytes, graph_bytes, library_bytes
from tonnage.costs.layers import Attention, Dense, Experts, Latent, Layer, Recurrent, Tower
from tonnage.costs.models import find_config
from tonnage.hardware import find_card
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import MiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")


@pytest.mark.parametrize(
    ("config", "tokens", "rows", "mib", "phase"),
    [
        (LLAMA_8B, 2048, 256, 233.0, "mlp"),
        (LLAMA_8B, 8192, 256, 932.0, "mlp"),
        (LLAMA_8B, 16_384, 256, 1864.0, "mlp"),
        (SMOLLM2, 512, 64, 13.75, "mlp"),
        (SMOLLM2, 1536, 64, 41.25, "mlp"),
        (SMOLLM2, 512, 512, 98.25, "logits"),
    ],
)
def test_measured_peaks(config, tokens, rows, mib, phase):
    peak = forward_peak(config, num_tokens=tokens, logits_rows=rows)
    assert peak.bytes == int(mib * MiB)
    assert peak.phase == phase


def test_the_bar_holds_compiled_layers_and_what_the_allocator_took():
    """8,192 tokens: 708 MiB compiled, 932 MiB eager, 1,120 MiB reserved; 2,048 tokens: 233 and 364 MiB."""
    peak = predicted(forward_peak(LLAMA_8B, num_tokens=8192, logits_rows=256).bytes, ref="")
    assert peak.low <= 708 * MiB <= 932 * MiB <= peak.high
    reserved = reserved_for(peak, device_kind="cuda")
    assert reserved.low <= 1120 * MiB <= reserved.high
    small = predicted(233 * MiB, ref="")
    assert reserved_for(small, device_kind="cuda").high >= 364 * MiB


def test_the_peak_grows_with_everything():
    small = forward_peak(LLAMA_8B, num_tokens=100, logits_rows=10).bytes
    assert forward_peak(LLAMA_8B, num_tokens=200, logits_rows=10).bytes > small
    assert forward_peak(LLAMA_8B, num_tokens=100, logits_rows=100).bytes > small
    assert forward_peak(LLAMA_8B, num_tokens=100, logits_rows=10, dtype="float32").bytes == 2 * small
    assert forward_peak(LLAMA_8B, num_tokens=1000, logits_rows=10, rank=Rank(tp=8, size=8)).bytes < 10 * small


def test_only_the_last_pipeline_stage_has_logits():
    first, last = Rank(index=0, size=2, pp=2), Rank(index=1, size=2, pp=2)
    shape = {"num_tokens": 512, "logits_rows": 512}
    assert forward_peak(SMOLLM2, rank=last, **shape).phase == "logits"
    assert forward_peak(SMOLLM2, rank=first, **shape).phase == "mlp"
    graphs = {"device_kind": "cuda", "max_batch_size": 512, "num_graphs": 1, "dtype": "float32"}
    assert graph_bytes(SMOLLM2, rank=first, **graphs).bytes < graph_bytes(SMOLLM2, rank=last, **graphs).bytes


def test_the_sampler_holds_all_logits_and_works_on_a_tile_of_them():
    """By hand: 28 bytes for each logit of a tile and 2,314 longs for each of its rows; 4,194,304 logits are 85 rows of
    SmolLM2's vocabulary and 32 of Llama's, 262,144 are 5 and 2. tests/cpu compares with what is really held."""
    assert sampler_bytes(SMOLLM2, logits_rows=256) == 256 * 49_152 * 4 + 85 * (49_152 * 28 + 18_512)
    assert sampler_bytes(LLAMA_8B, logits_rows=256) == 256 * 128_256 * 2 + 32 * (128_256 * 28 + 18_512)
    assert sampler_bytes(SMOLLM2, logits_rows=32, device_kind="host") == 32 * 49_152 * 4 + 5 * (49_152 * 28 + 18_512)
    assert sampler_bytes(LLAMA_8B, logits_rows=1, device_kind="host") == 128_256 * 2 + 128_256 * 28 + 18_512


def test_greedy_rows_need_exponentials_and_a_copy_where_logits_are_narrow():
    shape = {"num_rows": 4, "vocab_size": 1000, "tile_elements": 2000}
    assert sampler_scratch_bytes(**shape, greedy_dtype="float32") == 2 * (1000 * 4 + 64)
    assert sampler_scratch_bytes(**shape, greedy_dtype="bfloat16") == 2 * (1000 * 8 + 64)
    assert sampler_scratch_bytes(4, 1000, tile_elements=1) == 1000 * 28 + 18_512


def in_order(quantity: Quantity) -> bool:
    return 0 <= quantity.low <= quantity.bytes <= quantity.high


def test_the_measured_card_and_the_others():
    h200, l4 = find_card("H200"), find_card("L4")
    measured = context_bytes(h200.kind, known=h200.context)
    assert (measured.bytes, measured.source) == (524 * MiB, Source.CATALOGUE)
    assert library_bytes(h200.kind, known=h200.libraries).bytes == 164 * MiB
    assumed = context_bytes(l4.kind, known=l4.context)
    assert assumed.source == Source.ASSUMED
    assert all(
        in_order(q) for q in (measured, assumed, context_bytes("host"), library_bytes("host"), library_bytes("cuda"))
    )


def test_graphs_and_collectives():
    kwargs = {"max_batch_size": 256, "num_graphs": 86, "dtype": "bfloat16", "rank": Rank()}
    assert graph_bytes(LLAMA_8B, device_kind="host", **kwargs) is None
    logged = graph_bytes(LLAMA_8B, device_kind="cuda", **kwargs)
    assert logged is not None
    assert in_order(logged)
    assert logged.low <= int(0.59 * 1024) * MiB <= logged.high
    assert collective_bytes(Rank()).bytes == 0
    assert in_order(collective_bytes(Rank(tp=2, size=2)))


DATA = json.loads((Path(__file__).parents[1] / "data/weights/logged.json").read_text())["models"]


def published(name: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**DATA[name], **changes}, name=name)


def test_a_dense_peak_carries_the_bar_it_always_had():
    peak = forward_peak(LLAMA_8B, num_tokens=8192, logits_rows=256)
    bar = predicted(peak.bytes, ref="r")
    assert peak.quantity(ref="r") == bar


#: (model, changes, phase, bytes) of 4,096 tokens: by hand from the table of phases.
BY_HAND = [
    # 4H + 2D words, 8 of E + k ids; 2 x (H + 4I) words a token
    (
        "mixtral-8x7b",
        {},
        "experts",
        4096 * ((4 * 4096 + 2 * 128 + 2 * (4096 + 4 * 14_336)) * 2 + 8 * 4 + 2 * 40),
    ),
    # ... and where the weights of experts are float32: 6H words for each
    ("deepseek-v3", {}, "experts", 4096 * ((4 * 7168 + 2 * 64 + 8 * 6 * 7168) * 2 + 256 * 4 + 8 * 40)),
    # MLA in prefill: 4H + 2R + 2(L + R) + 3Q + rotary + keys and values + results
    (
        "deepseek-v3",
        {"num_experts_per_tok": 1},
        "expanded attention",
        4096 * 2 * (4 * 7168 + 2 * 64 + 2 * 576 + 128 * (3 * 192 + 64 + 256 + 128)),
    ),
]


@pytest.mark.parametrize(("name", "changes", "phase", "num_bytes"), BY_HAND)
def test_peaks_by_hand(name, changes, phase, num_bytes):
    peak = forward_peak(published(name, **changes), num_tokens=4096, logits_rows=256)
    assert (peak.phase, peak.bytes) == (phase, num_bytes)
    assert peak.low < peak.bytes < peak.high


def test_decode_takes_queries_into_the_latent():
    config = published("deepseek-v3", vocab_size=1000, num_experts_per_tok=1)
    assert forward_peak(config, num_tokens=64, logits_rows=64).phase == "absorbed attention"
    assert forward_peak(config, num_tokens=65, logits_rows=64).phase == "expanded attention"


def test_ranks_cut_heads_and_experts():
    config, eight = published("mixtral-8x7b"), Rank(tp=8, size=8)
    shape = {"num_tokens": 4096, "logits_rows": 1}
    whole, cut = forward_peak(config, **shape), forward_peak(config, rank=eight, **shape)
    assert cut.bytes < whole.bytes
    dealt = forward_peak(config, rank=replace(eight, ep=8), **shape)
    assert dealt.bytes > cut.bytes  # whole experts: every token may choose those of this rank
    apart = forward_peak(config, rank=replace(eight, ep=8, attention_dp=True), **shape)
    assert apart.high > 4 * dealt.high  # ... and so may the tokens of the other ranks


def test_only_the_stage_with_experts_pays_for_them():
    config = published("deepseek-v3", q_lora_rank=None, num_hidden_layers=6)
    ranks = [Rank(index=i, pp=2, size=2) for i in range(2)]
    first, last = (forward_peak(config, num_tokens=4096, logits_rows=1, rank=rank) for rank in ranks)
    assert first.high < last.high


MIXERS = st.sampled_from(
    [
        Attention(num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64),
        Latent(num_heads=8, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32),
        *(
            Recurrent(
                kind=kind, num_heads=8, head_dim=32, state_size=32, conv_channels=512, conv_kernel=4, num_groups=2
            )
            for kind in ("mamba2", "gated_delta", "short_conv", "kda", "linear", "mamba1", "rg_lru")
        ),
    ]
)
PARTS = st.sampled_from(
    [
        None,
        Dense(intermediate_size=700),
        Dense(intermediate_size=700, is_gated=False),
        Experts(num_experts=8, num_experts_per_token=2, intermediate_size=128, shared_intermediate_size=96),
    ]
)


@given(st.lists(st.builds(Layer, mixer=MIXERS, feed_forward=PARTS), min_size=1, max_size=4), st.integers(1, 5000))
def test_any_layers_have_a_peak_that_grows_with_tokens(layers, tokens):
    config = replace(LLAMA_8B, hidden_size=512, num_layers=len(layers), layers=tuple(layers), vocab_size=100)
    small = forward_peak(config, num_tokens=tokens, logits_rows=1)
    large = forward_peak(config, num_tokens=tokens + 2, logits_rows=1)
    assert 0 < small.low <= small.bytes <= small.high
    assert (large.low, large.bytes, large.high) > (small.low, small.bytes, small.high)
    one_more = replace(config, num_layers=len(layers) + 1, layers=(*layers, layers[0]))
    assert forward_peak(one_more, num_tokens=tokens, logits_rows=1) == small  # layers follow one another


def test_towers():
    tower = Tower(kind="vision", num_layers=27, hidden_size=1152, num_heads=16, intermediate_size=4304)
    peak = encoder_peak(tower, num_tokens=4096)
    assert (peak.phase, peak.bytes) == ("mlp", 4096 * 2 * (4 * 1152 + 2 * 4304))
    assert peak.low < peak.bytes < peak.high
    wide = replace(tower, intermediate_size=64, patch_elements=588)
    assert encoder_peak(wide, num_tokens=1).phase == "attention"
    assert encoder_peak(tower, num_tokens=4096, dtype="float32").bytes == 2 * peak.bytes


def test_what_towers_hand_over():
    assert encoder_output_bytes(published("qwen2-vl-7b"), num_tokens=1000) == 1000 * 3584 * 2
    deep = published("qwen3-vl-8b")  # three levels more
    assert encoder_output_bytes(deep, num_tokens=1000) == 4 * 1000 * 4096 * 2
