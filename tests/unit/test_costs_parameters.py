"""Weights of published models: counts that their authors state, bytes that engines logged, shares of a rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Dense, Experts, Latent, Layer, Quantisation, Recurrent
from tonnage.costs.models import find_config
from tonnage.costs.parameters import Build, layer_tensors
from tonnage.costs.price import weights_price
from tonnage.costs.tensors import Component, Cut
from tonnage.costs.traits import traits_of
from tonnage.costs.weights import weights_layout
from tonnage.errors import InvalidSetting, ModelConfigError
from tonnage.terms import Rank, Source
from tonnage.units import GiB

DATA = json.loads((Path(__file__).parents[1] / "data/weights/logged.json").read_text())
LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")


def published(name: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**DATA["models"][name], **changes}, name=name)


#: Parameters as the safetensors of the published model count them; buffers of routers left out.
COUNTS = [
    ("llama-3.1-8b", 8_030_261_248),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-8b", 8_190_735_360),
    ("phi-4", 14_659_507_200),
    ("gemma-2-9b", 9_241_705_984),
    ("mixtral-8x7b", 46_702_792_704),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("gpt-oss-120b", 116_829_156_672),
    ("deepseek-v3", 671_026_404_352),
    ("opt-125m", 125_239_296),
]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_published_counts(name, count):
    assert weights_price(published(name)).num_parameters == count


def test_published_bytes():
    """The totals that the index files of the published checkpoints state."""
    assert weights_price(published("llama-3.1-8b")).quantity.bytes == 16_060_522_496
    assert weights_price(published("gpt-oss-120b")).quantity.bytes == 65_248_815_744
    small = published("gpt-oss-120b", num_hidden_layers=24, num_local_experts=32)
    assert weights_price(small).quantity.bytes == 13_761_264_768
    assert weights_price(small).num_parameters == 20_914_757_184


#: Why an engine logged something else than the tensors of the model, and whose figure it is.
MISSES = {
    "fs-47444754202": "free memory before and after loading, a tiny model",
    "fs-9542409931": "free memory before and after loading, a tiny model",
    "fs-52853901169": "free memory before and after loading, a tiny model",
    "fs-55068335887": "free memory before and after loading, a tiny model",
    "fs-46415979912": "free memory before and after loading, a small model",
    "fs-33197864785": "buffers for adapters are in the figure, a tiny model",
    "fs-33220888888": "buffers for adapters are in the figure, a tiny model",
    "vllm-23278": "kernels pad the experts: inside the bar",
    "vllm-51590": "kernels pad the experts: inside the bar",
    "llmd-emp-gpt-oss-120b-tp1": "kernels pad the experts: inside the bar",
    "fs-57361824903": "0.6 GiB more than the model has parameters",
}


@pytest.mark.parametrize("start", DATA["starts"], ids=lambda start: start["id"])
def test_logged_weights(start):
    """Within 3 % of what the engine logged, or listed with the reason; what only pads lies inside the bar."""
    parts = tuple(start.get("partition", ()))
    rank = Rank(tp=start["tp"], pp=start["pp"], size=start["tp"] * start["pp"], partition=parts)
    dtype = None if start["dtype"] == "auto" else start["dtype"]
    quantity = weights_price(published(start["model"]), dtype=dtype, rank=rank).quantity
    logged = start["weights_gib"] * GiB
    if start["id"] not in MISSES:
        assert abs(quantity.bytes - logged) <= 0.03 * logged
    elif "inside the bar" in MISSES[start["id"]]:
        assert quantity.low <= logged <= quantity.high


def test_few_starts_are_missed():
    assert len(MISSES) <= 0.25 * len(DATA["starts"])
    assert set(MISSES) <= {start["id"] for start in DATA["starts"]}


@pytest.mark.parametrize("config", [LLAMA_8B, SMOLLM2], ids=lambda config: config.name)
@pytest.mark.parametrize("rank", [Rank(), Rank(tp=3, size=3, index=1), Rank(pp=3, size=3, index=2)])
def test_what_the_engine_lays_out_is_what_is_priced(config, rank):
    """To the byte, apart from the gaps between the arena's tensors."""
    if config.num_heads % rank.tp:
        rank = replace(rank, tp=4)
    layout = weights_layout(config, rank=rank)
    priced = weights_price(config, rank=rank)
    assert priced.quantity.bytes == sum(tensor.num_bytes for tensor in layout.tensors)
    assert priced.num_parameters == layout.num_parameters
    assert (priced.quantity.low, priced.quantity.high) == (priced.quantity.bytes,) * 2


def test_parts_sum_to_the_whole():
    priced = weights_price(published("deepseek-v3"), with_mtp=True)
    assert sum(part.bytes for part in priced.parts) == priced.quantity.bytes
    assert sum(part.num_parameters for part in priced.parts) == priced.num_parameters
    assert {part.component for part in priced.parts} == {
        Component.EMBEDDINGS, Component.HEAD, Component.ATTENTION, Component.FEED_FORWARD, Component.EXPERTS,
        Component.SHARED_EXPERTS, Component.ROUTER, Component.NORMS, Component.MTP,
    }  # fmt: skip
    assert priced.bytes_of(Component.RECURRENT) == 0


def test_experts_are_dealt_out_and_everything_else_follows_tp():
    config = published("mixtral-8x7b")
    whole = weights_price(config)
    dealt = weights_price(config, rank=Rank(tp=4, size=4, ep=4))
    cut = weights_price(config, rank=Rank(tp=4, size=4))
    mixed = weights_price(config, rank=Rank(tp=4, size=4, ep=2))
    for priced in (dealt, cut, mixed):
        assert priced.bytes_of(Component.EXPERTS) * 4 == whole.bytes_of(Component.EXPERTS)
        assert priced.bytes_of(Component.ROUTER) == whole.bytes_of(Component.ROUTER)
        assert priced.bytes_of(Component.NORMS) == whole.bytes_of(Component.NORMS)
        assert priced.bytes_of(Component.ATTENTION) * 4 == whole.bytes_of(Component.ATTENTION)
    # Sixteen ranks for eight experts that are dealt out over eight: two share each.
    wide = weights_price(config, rank=Rank(tp=16, size=16, ep=8))
    assert wide.bytes_of(Component.EXPERTS) * 16 == whole.bytes_of(Component.EXPERTS)


def test_attention_data_parallel_replicates_attention_alone():
    config = published("deepseek-v3")
    whole = weights_price(config)
    rank = weights_price(config, rank=Rank(tp=8, size=8, ep=8, attention_dp=True))
    assert rank.bytes_of(Component.ATTENTION) == whole.bytes_of(Component.ATTENTION)
    assert rank.bytes_of(Component.EXPERTS) * 8 == whole.bytes_of(Component.EXPERTS)


def test_latents_lie_on_every_rank():
    config = published("deepseek-v3", quantization_config=None)
    rank, whole = (
        {
            t.module: t
            for t in layer_tensors(
                config.layers[0], Build(hidden=7168, traits=traits_of(config)[0], cut=Cut.of(Rank(tp=tp, size=tp)))
            )
        }
        for tp in (8, 1)
    )
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"):
        assert rank[f"self_attn.{name}"] == whole[f"self_attn.{name}"]
    for name in ("q_b_proj", "kv_b_proj", "o_proj"):
        assert rank[f"self_attn.{name}"].num_elements * 8 == whole[f"self_attn.{name}"].num_elements


def test_stages_follow_a_named_partition():
    config = published("deepseek-v3")
    parts = (15, 15, 16, 15)
    ranks = [Rank(index=i, pp=4, size=4, partition=parts) for i in range(4)]
    stages = [weights_price(config, rank=rank).quantity.bytes for rank in ranks]
    assert sum(stages) == weights_price(config).quantity.bytes
    assert max(stages) == stages[2]


def test_multi_token_layers_are_loaded_when_asked_and_share_both_vocabulary_tables():
    config = published("deepseek-v3")
    drafting = weights_price(config, with_mtp=True)
    layer = drafting.num_parameters - weights_price(config).num_parameters
    assert layer == 11_610_067_968  # one layer, the projection of 7,168 x 14,336, three norms
    first, last = (Rank(index=i, pp=2, size=2) for i in range(2))
    assert weights_price(config, rank=first, with_mtp=True) == weights_price(config, rank=first)
    assert weights_price(config, rank=last, with_mtp=True).bytes_of(Component.MTP) > 0


def test_tied_embeddings_count_once_a_rank():
    tied, untied = published("qwen3-8b", tie_word_embeddings=True), published("qwen3-8b")
    table = 151_936 * 4096 * 2
    assert weights_price(untied).quantity.bytes - weights_price(tied).quantity.bytes == table
    last = weights_price(tied, rank=Rank(index=1, pp=2, size=2))
    assert last.bytes_of(Component.HEAD) == table


def test_an_unknown_family_has_a_bar_and_says_so():
    config = replace(LLAMA_8B, model_type="never_seen")
    quantity = weights_price(config).quantity
    assert (quantity.source, quantity.bytes) == (Source.PREDICTED, 16_060_522_496)
    assert quantity.low < quantity.bytes < quantity.high


def test_what_cannot_be_split_is_refused():
    with pytest.raises(InvalidSetting, match="tp"):
        weights_price(LLAMA_8B, rank=Rank(tp=5, size=5))
    with pytest.raises(InvalidSetting, match="dtype"):
        weights_price(LLAMA_8B, dtype="int3")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("lfm2-700m", "block_multiple_of", 0),
        ("lfm2-700m", "block_ffn_dim_multiplier", float("nan")),
        ("lfm2-700m", "block_ffn_dim_multiplier", float("inf")),
        ("lfm2-700m", "block_ffn_dim_multiplier", -1),
        ("lfm2-700m", "block_ffn_dim_multiplier", "1.0"),
        ("deepseek-v3", "moe_latent_size", -64),
    ],
)
def test_widths_that_make_no_sense_are_refused_by_name(name, key, value):
    with pytest.raises(ModelConfigError, match=f"{name}: {key} = "):
        weights_price(published(name, **{key: value}))


HEADS = st.sampled_from([(8, 1), (8, 2), (8, 8), (16, 4)])


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    heads, kv_heads = draw(HEADS)
    attention = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=16, v_head_dim=16)
    latent = Latent(num_heads=heads, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32)
    state = Recurrent(
        kind=draw(st.sampled_from(["mamba2", "gated_delta", "short_conv", "kda", "linear", "mamba1"])),
        num_heads=heads, head_dim=16, state_size=16, conv_channels=heads * 16 + 64, conv_kernel=4, num_groups=2,
    )  # fmt: skip
    dense = Dense(intermediate_size=draw(st.integers(100, 300)))
    experts = Experts(
        num_experts=8, num_experts_per_token=2, intermediate_size=draw(st.integers(64, 100)),
        shared_intermediate_size=draw(st.sampled_from([0, 96])),
    )  # fmt: skip
    parts = st.builds(
        Layer,
        mixer=st.sampled_from([attention, latent, state, None]),
        feed_forward=st.sampled_from([dense, experts, None]),
    )
    layers = tuple(draw(st.lists(parts, min_size=2, max_size=5)))
    return replace(
        LLAMA_8B, hidden_size=256, num_heads=heads, num_kv_heads=kv_heads, head_dim=16, vocab_size=1003,
        num_layers=len(layers), layers=layers, tie_word_embeddings=draw(st.booleans()),
    )  # fmt: skip


@given(configs())
def test_ranks_hold_at_least_the_whole_and_less_each(config):
    whole = weights_price(config).quantity.bytes
    before = whole
    for tp in (2, 4, 8):
        each = [weights_price(config, rank=Rank(index=i, tp=tp, size=tp)).quantity.bytes for i in range(tp)]
        assert sum(each) >= whole
        assert each[0] <= before
        before = each[0]
    stages = [weights_price(config, rank=Rank(index=i, pp=2, size=2)).quantity.bytes for i in range(2)]
    copies = 2 * 1003 * 256 if config.tie_word_embeddings else 0
    assert sum(stages) == whole + copies


PACKED = [
    ("fp8", "fp8", 128), ("fp8", "fp8", None),
    ("compressed-tensors", "fp8", None), ("compressed-tensors", "int8", None),
    ("awq", "int4", 128), ("gptq", "int4", 128), ("gptq", "int8", 128), ("compressed-tensors", "int4", 128),
    ("bitsandbytes", "nf4", 64), ("bitsandbytes", "int8", None), ("modelopt", "nvfp4", 16), ("mxfp4", "mxfp4", 32),
]  # fmt: skip


@given(configs(), st.sampled_from(PACKED), st.sampled_from([1, 2, 4]))
def test_packed_weights_are_smaller_and_sum(config, packed, tp):
    method, form, size = packed
    scheme = Quantisation(method=method, format=form, group_size=size)
    rank = Rank(tp=tp, size=tp)
    wide = weights_price(config, rank=rank)
    priced = weights_price(replace(config, quantisation=scheme), rank=rank)
    assert sum(part.bytes for part in priced.parts) == priced.quantity.bytes
    assert priced.quantity.low <= priced.quantity.bytes <= priced.quantity.high
    assert priced.quantity.bytes <= wide.quantity.bytes
    assert priced.num_parameters == wide.num_parameters
