"""The weights arena: counts that are publicly known, adjacency, offsets, and the split over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.costs.config import ModelConfig
from tonnage.costs.models import find_config
from tonnage.costs.ranks import rank_shape, stage_layers
from tonnage.costs.weights import weights_layout
from tonnage.errors import InvalidSetting, UnsupportedModel
from tonnage.terms import Rank, Source

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")


def test_llama_8b():
    layout = weights_layout(LLAMA_8B)
    assert layout.num_parameters == 8_030_261_248
    assert layout.total_bytes == 16_060_522_496
    assert layout.source == Source.DERIVED
    assert layout.tied == ()


def test_smollm2_counts_tied_embeddings_once():
    layout = weights_layout(SMOLLM2)
    assert layout.num_parameters == 134_515_008
    assert layout.total_bytes == 538_060_032
    assert layout.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert "lm_head.weight" not in {tensor.name for tensor in layout.tensors}


@pytest.mark.parametrize("config", [LLAMA_8B, SMOLLM2], ids=lambda config: config.name)
def test_tensors_follow_each_other_aligned(config):
    layout, end = weights_layout(config), 0
    for tensor in layout.tensors:
        assert tensor.offset_bytes >= end
        assert tensor.offset_bytes % layout.alignment_bytes == 0
        assert tensor.offset_bytes - end < layout.alignment_bytes
        end = tensor.offset_bytes + tensor.num_bytes
    assert end <= layout.total_bytes < end + layout.alignment_bytes


def test_q_k_v_are_adjacent_even_with_biases():
    config = ModelConfig.from_dict({**dict(LLAMA_8B.raw), "model_type": "qwen2"})
    tensors = {tensor.name: tensor for tensor in weights_layout(config).tensors}
    assert "model.layers.0.self_attn.q_proj.bias" in tensors
    q, k, v = (tensors[f"model.layers.7.self_attn.{n}_proj.weight"] for n in "qkv")
    assert (k.offset_bytes, v.offset_bytes) == (q.offset_bytes + q.num_bytes, k.offset_bytes + k.num_bytes)


def test_another_dtype_halves_the_bytes():
    assert weights_layout(SMOLLM2, dtype="bf16").total_bytes == 269_030_016
    with pytest.raises(InvalidSetting, match="dtype"):
        weights_layout(SMOLLM2, dtype="fp8")


@pytest.mark.parametrize(
    ("num_layers", "stages", "counts"), [(61, 4, [16, 15, 15, 15]), (32, 3, [11, 11, 10]), (2, 2, [1, 1])]
)
def test_uneven_stages(num_layers, stages, counts):
    parts = [stage_layers(num_layers, num_stages=stages, stage=stage) for stage in range(stages)]
    assert [len(part) for part in parts] == counts
    assert [layer for part in parts for layer in part] == list(range(num_layers))


def test_tensor_parallel_ranks_hold_whole_heads():
    shape = rank_shape(LLAMA_8B, Rank(index=3, size=16, tp=16))
    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size, shape.vocab_size) == (2, 1, 896, 8016)
    whole = weights_layout(LLAMA_8B).num_parameters
    eighth = weights_layout(LLAMA_8B, rank=Rank(size=8, tp=8)).num_parameters
    norms = 65 * 4096
    assert eighth == (whole - norms) // 8 + norms


def test_pipeline_stages_hold_everything_once():
    stages = [weights_layout(LLAMA_8B, rank=Rank(index=i, size=4, pp=4)) for i in range(4)]
    assert sum(stage.num_parameters for stage in stages) == 8_030_261_248
    assert stages[0].tensors[0].name == "model.embed_tokens.weight"
    assert stages[3].tensors[-1].name == "lm_head.weight"
    assert "model.layers.8.self_attn.q_proj.weight" in {tensor.name for tensor in stages[1].tensors}


def test_tied_embeddings_lie_on_both_ends():
    names = [{t.name for t in weights_layout(SMOLLM2, rank=Rank(index=i, size=3, pp=3)).tensors} for i in range(3)]
    assert ["model.embed_tokens.weight" in found for found in names] == [True, False, True]


@pytest.mark.parametrize("rank", [Rank(tp=5), Rank(index=2, tp=2), Rank(pp=31), Rank(tp=0), Rank(cp=0), Rank(ep=3)])
def test_splits_that_do_not_divide(rank):
    with pytest.raises(InvalidSetting):
        weights_layout(SMOLLM2, rank=rank)


def test_attention_data_parallel_divides_no_heads():
    shape = rank_shape(SMOLLM2, Rank(size=4, tp=4, attention_dp=True))
    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size) == (9, 3, 384)


def test_an_unpriced_model_has_no_layout():
    with pytest.raises(UnsupportedModel):
        weights_layout(ModelConfig.from_dict({**dict(LLAMA_8B.raw), "num_local_experts": 8}))
