"""What stands beside the layers in config.json: how matrices are packed, and encoders."""

from __future__ import annotations

import pytest

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Quantisation, Tower
from tonnage.errors import ModelConfigError

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def read(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **changes}, name="tiny")


def group(**weights) -> dict:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


@pytest.mark.parametrize(
    ("raw", "packed"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", "fp8", 128, ())),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("fp8", "fp8", None, ())),
        (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
            ("fbgemm_fp8", "fp8", None, ("lm_head",)),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, ("awq", "int4", 64, ())),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, ("awq", "int4", 128, ())),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", "int8", None, ())),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", "nf4", 64, ())),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
            ("bitsandbytes", "int8", None, ("lm_head",)),
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["a", "b"]}, ("mxfp4", "mxfp4", 32, ("a", "b"))),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            ("modelopt", "fp8", None, ("lm_head",)),
        ),
        (
            {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["x"]},
            },
            ("modelopt", "nvfp4", 16, ("x",)),
        ),
        ({"quant_algo": "NVFP4"}, ("modelopt", "nvfp4", 16, ())),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": group(num_bits=4, type="int", group_size=128),
                "ignore": ["lm_head"],
            },
            ("compressed-tensors", "int4", 128, ("lm_head",)),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": group(num_bits=8, type="float", strategy="channel"),
            },
            ("compressed-tensors", "fp8", None, ()),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": group(num_bits=8, type="int", strategy="channel")},
            ("compressed-tensors", "int8", None, ()),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": group(num_bits=4, type="float", group_size=16),
            },
            ("compressed-tensors", "nvfp4", 16, ()),
        ),
    ],
)
def test_packed_matrices(raw, packed):
    method, name, size, kept = packed
    made = read(quantization_config=raw).quantisation
    assert made == Quantisation(method=method, format=name, group_size=size, kept=kept)


def test_a_packed_model_without_a_dtype_computes_in_bfloat16():
    """So is the first large model in four bits published; a plain one would be float32."""
    raw = {key: value for key, value in BASE.items() if key != "torch_dtype"}
    made = ModelConfig.from_dict({**raw, "quantization_config": {"quant_method": "mxfp4"}}, name="tiny")
    assert made.dtype == "bfloat16"
    assert any("dtype is absent: bfloat16" in note for note in made.notes)


def test_plain_matrices():
    assert read().quantisation is None
    assert read(quantization_config={}).quantisation is None


@pytest.mark.parametrize(
    "raw",
    [
        {"quant_method": "aqlm"},
        {"bits": 4},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "modelopt", "quant_algo": "PAPER"},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_unknown_packing_is_refused_by_name(raw):
    with pytest.raises(ModelConfigError, match="quantization_config"):
        read(quantization_config=raw)


def test_mixed_formats_are_noted():
    groups = {**group(num_bits=4, type="int", group_size=32), "group_1": {"weights": {"num_bits": 8, "type": "int"}}}
    made = read(quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    assert made.quantisation.format == "int4"
    assert any("several formats" in note for note in made.notes)


def test_scales_for_a_narrow_cache_are_noted():
    """They change no price: the cache is allocated in the dtype that is asked for."""
    raw = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    assert any("KV cache" in note for note in read(quantization_config=raw).notes)


@pytest.mark.parametrize(
    ("section", "raw", "tower"),
    [
        (
            "vision_config",
            {
                "num_hidden_layers": 3,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "intermediate_size": 96,
                "patch_size": 4,
                "image_size": 16,
                "model_type": "siglip_vision_model",
            },
            ("vision", 3, 32, 4, 96, 3 * 16, 16, False),
        ),
        (
            "vision_config",
            {
                "depth": 3,
                "hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 96,
                "patch_size": 2,
                "in_channels": 3,
                "temporal_patch_size": 2,
                "model_type": "qwen2_5_vl",
                "spatial_merge_size": 2,
            },
            ("vision", 3, 32, 4, 96, 3 * 4 * 2, 0, True),
        ),
        (
            "vision_config",
            {
                "depth": 3,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 4,
                "mlp_ratio": 4,
                "patch_size": 2,
                "model_type": "qwen2_vl",
            },
            ("vision", 3, 32, 4, 128, 3 * 4 * 2, 0, False),  # two frames a patch, as the class has it
        ),
        (
            "audio_config",
            {
                "encoder_layers": 3,
                "d_model": 32,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "num_mel_bins": 80,
                "max_source_positions": 1500,
            },
            ("audio", 3, 32, 4, 96, 80, 1500, False),
        ),
    ],
)
def test_towers(section, raw, tower):
    (made,) = read(**{section: raw}).towers
    assert isinstance(made, Tower)
    assert tower == (
        made.kind, made.num_layers, made.hidden_size, made.num_heads, made.intermediate_size, made.patch_elements,
        made.num_positions, made.is_gated,
    )  # fmt: skip


@pytest.mark.parametrize("raw", [{"depth": 3}, {"depth": 3, "hidden_size": 32, "mlp_ratio": float("inf")}])
def test_a_tower_without_sizes_is_noted(raw):
    made = read(vision_config=raw)
    assert made.towers == ()
    assert any("vision_config" in note and "not priced" in note for note in made.notes)


def test_projectors():
    """Two matrices: through the text's width, or over the patches that become one token."""
    plain = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 96}
    assert read(vision_config=plain).towers[0].projector_elements == 32 * 64 + 64 * 64
    merged = {**plain, "spatial_merge_size": 2}
    assert read(vision_config=merged).towers[0].projector_elements == 128 * 128 + 128 * 64


def test_the_encoder_of_an_encoder_decoder():
    raw = {"model_type": "t5", "num_layers": 5, "num_decoder_layers": 3, "d_model": 96, "num_heads": 6, "d_kv": 32,
           "d_ff": 200, "vocab_size": 99, "is_encoder_decoder": True, "feed_forward_proj": "gated-gelu"}  # fmt: skip
    made = ModelConfig.from_dict(raw, name="t5")
    (encoder,) = made.towers
    assert (encoder.num_layers, encoder.hidden_size, encoder.intermediate_size, encoder.is_gated) == (5, 96, 200, True)
    assert [layer.feed_forward.is_gated for layer in made.layers] == [True] * 3
