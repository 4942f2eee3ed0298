"""Reading a config.json: what is taken, assumed, refused, and how a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.costs.config import ModelConfig, refuse_unsupported
from tonnage.errors import ModelConfigError, ModelNotFound, UnsupportedModel

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def config(**changes):
    return ModelConfig.from_dict({**LLAMA, **changes}, name="tiny")


def without(key):
    return ModelConfig.from_dict({k: v for k, v in LLAMA.items() if k != key}, name="tiny")


def test_what_is_taken():
    made = config()
    assert (made.num_layers, made.num_heads, made.num_kv_heads, made.head_dim) == (4, 8, 2, 8)
    assert (made.dtype, made.tie_word_embeddings, made.qkv_bias, made.name) == ("bfloat16", False, False, "tiny")
    assert made.notes == ()
    refuse_unsupported(made)


def test_an_explicit_head_dim_wins():
    assert config(head_dim=32).head_dim == 32


def test_the_newer_name_of_dtype_wins():
    assert config(dtype="float16").dtype == "float16"


def test_absent_dtype_is_float32_and_says_so():
    made = without("torch_dtype")
    assert made.dtype == "float32"
    assert "dtype is absent: float32" in made.notes[0]


def test_absent_kv_heads_follow_the_family():
    assert without("num_key_value_heads").num_kv_heads == 8
    mistral = ModelConfig.from_dict(
        {**{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, "model_type": "mistral"}
    )
    assert mistral.num_kv_heads == 8
    assert any("num_key_value_heads is absent" in note for note in mistral.notes)


def test_nested_text_config():
    made = ModelConfig.from_dict({"model_type": "outer", "text_config": LLAMA, "dtype": "float16"})
    assert (made.model_type, made.num_layers) == ("llama", 4)


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(key):
    with pytest.raises(ModelConfigError, match=f"tiny: {key} is missing"):
        without(key)


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, [4], float("nan"), 10**12])
def test_a_senseless_field_is_named(value):
    with pytest.raises(ModelConfigError, match="num_hidden_layers"):
        config(num_hidden_layers=value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "head_dim"),
        ({"torch_dtype": "int3"}, "dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_fields_that_contradict(changes, named):
    with pytest.raises(ModelConfigError, match=named):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"n_routed_experts": 64, **LATENT}, "kv_lora_rank = 512"),
        ({"mamba_d_state": 128}, "mamba_d_state = 128"),
        ({"layer_types": ["linear_attention", "full_attention"] * 2, **LINEAR}, "layer_types with linear_attention"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}, "sliding_attention"),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"vision_config": {"depth": 3}}, "vision_config"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq)"),
        ({"compression_config": {"quant_method": "fp8"}}, "compression_config (fp8)"),
        ({"model_type": "mistral"}, "sliding_window = 4096"),
        (
            {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0},
            "sliding_window = 128",
        ),
    ],
)
def test_what_is_no_dense_decoder_is_refused_with_the_field(changes, phrase):
    if changes.get("model_type") == "mistral":
        changes = {**changes, "max_position_embeddings": 32_768}
    with pytest.raises(UnsupportedModel) as caught:
        refuse_unsupported(config(**changes))
    assert phrase in str(caught.value)
    assert str(caught.value).startswith("tiny: the engine runs dense decoders")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False, "max_window_layers": 2},
        {"model_type": "qwen2", "sliding_window": 128},
        {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 4},
        {"model_type": "mistral", "sliding_window": None},
        {"sliding_window": 512},
        {"layer_types": ["full_attention"] * 4},
        {"mamba_d_state": None, "num_local_experts": 0},
    ],
)
def test_full_attention_by_another_name(changes):
    made = config(**changes)
    assert made.sliding_window is None
    refuse_unsupported(made)


def test_an_unknown_family_is_named():
    with pytest.raises(UnsupportedModel, match=r"'gpt_neox'.*llama, mistral, qwen2, qwen3, phi3"):
        refuse_unsupported(config(model_type="gpt_neox"))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"llama"', "\xff", "[" * 100_000])
def test_unreadable_files(tmp_path: Path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        ModelConfig.read(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(ModelNotFound):
        ModelConfig.read(tmp_path / "nothing")


def test_folder_and_file_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.read(tmp_path) == ModelConfig.read(tmp_path / "config.json")
    assert ModelConfig.read(tmp_path).name == tmp_path.name
