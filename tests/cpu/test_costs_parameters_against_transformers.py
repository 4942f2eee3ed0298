"""Parameter counts of every priced family against the library's own classes, built on the meta device."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers

from tonnage.costs.config import ModelConfig
from tonnage.costs.price import weights_price
from tonnage.terms import Source

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1003,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
}
COMPRESSED = {
    **EXPERTS,
    "n_routed_experts": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 20,
    "o_groups": 2,
    "num_key_value_heads": 1,
    "index_head_dim": 8,
    "index_n_heads": 4,
    "sliding_window": 32,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}
NO_HEAD_DIM = {"head_dim": None}
NO_GROUPS = {"num_key_value_heads": None}
CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}

CASES: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("mistral", {}),
    ("qwen2", NO_HEAD_DIM),
    ("qwen3", {"tie_word_embeddings": True}),
    ("phi3", NO_HEAD_DIM),
    ("mixtral", {"num_local_experts": 6}),
    ("qwen2_moe", {**NO_HEAD_DIM, **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 72}),
    ("qwen2_moe", {**NO_HEAD_DIM, **EXPERTS, "num_experts": 6, "qkv_bias": False, "mlp_only_layers": [0, 2]}),
    ("qwen3_moe", {**EXPERTS, "num_experts": 6}),
    ("qwen3_moe", {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("deepseek_v2", {**LATENT, **ROUTED, "q_lora_rank": None}),
    ("deepseek_v2", {**LATENT, **ROUTED, "q_lora_rank": 24}),
    ("deepseek_v4", COMPRESSED),
    ("deepseek_v4", {**COMPRESSED, "o_groups": 4, "hc_mult": 2, "index_n_heads": 2, "qk_rope_head_dim": 4}),
    ("deepseek_v3", {**LATENT, **ROUTED, "q_lora_rank": 24, "n_shared_experts": 2}),
    ("deepseek_v3", {**LATENT, **ROUTED, "q_lora_rank": 24, "attention_bias": True}),
    ("deepseek_v32", {**LATENT, **ROUTED, "q_lora_rank": 24, "index_n_heads": 4, "index_head_dim": 16}),
    ("glm4_moe_lite", {**LATENT, **ROUTED, "q_lora_rank": 24}),
    ("gpt_oss", {"num_local_experts": 6}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("gemma3n_text", {"num_hidden_layers": 10, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 900}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 900}),
    ("qwen3_next", {**DELTA, **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 72}),
    ("qwen3_5_text", DELTA),
    ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 72}),
    (
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 6,
            "shared_intermediate_size": 72,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
        },
    ),
    ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    ("falcon_h1", {**MAMBA, "mamba_d_ssm": 128}),
    (
        "nemotron_h",
        {
            **EXPERTS,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 56,
            "hybrid_override_pattern": "M-*E",
        },
    ),
    ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2}),
    ("jamba", {**NO_HEAD_DIM, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    ("lfm2", {**NO_HEAD_DIM, **CONVS}),
    ("lfm2_moe", {**NO_HEAD_DIM, **CONVS, **EXPERTS, "num_experts": 6, "num_dense_layers": 1}),
    ("llama4_text", {"intermediate_size_mlp": 80, "num_local_experts": 4, "interleave_moe_layer_step": 2}),
    ("glm4_moe", {**ROUTED, "use_qk_norm": True}),
    ("glm4", {}),
    ("glm", {}),
    ("olmo", NO_HEAD_DIM),
    ("olmo2", NO_HEAD_DIM),
    ("olmo3", NO_HEAD_DIM),
    ("olmoe", {**NO_HEAD_DIM, "num_experts": 4}),
    ("cohere", NO_HEAD_DIM),
    ("cohere2", NO_HEAD_DIM),
    ("granite", NO_HEAD_DIM),
    ("granitemoe", {**NO_HEAD_DIM, "num_local_experts": 4}),
    ("starcoder2", NO_HEAD_DIM),
    ("gpt_neox", {**NO_HEAD_DIM, **NO_GROUPS}),
    ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 100}),
    ("opt", {**NO_GROUPS, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("bloom", {"n_layer": 2, "n_head": 4}),
    ("falcon", {**NO_HEAD_DIM, "intermediate_size": None, "multi_query": True}),
    ("phi", NO_HEAD_DIM),
    ("phimoe", {**NO_HEAD_DIM, "num_local_experts": 4}),
    ("stablelm", NO_HEAD_DIM),
    ("ernie4_5", {}),
    ("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 6}),
    ("smollm3", NO_HEAD_DIM),
    ("seed_oss", {}),
    ("nemotron", NO_HEAD_DIM),
    ("exaone4", NO_HEAD_DIM),
    ("exaone_moe", {**EXPERTS, "num_experts": 6}),
    ("dots1", {**NO_HEAD_DIM, **ROUTED, "n_shared_experts": 2}),
    ("hunyuan_v1_moe", {"num_experts": 4}),
    ("hunyuan_v1_dense", {}),
    ("minimax", {"num_local_experts": 6, "layer_types": ["linear_attention", "full_attention"] * 2}),
    ("minimax_m2", {"num_local_experts": 6}),
    ("minicpm3", {**LATENT, "q_lora_rank": 24}),
    ("kimi_linear", {"num_local_experts": 4}),
    ("mimo_v2_flash", {}),
    ("afmoe", {**EXPERTS, "num_experts": 4}),
    ("solar_open", {**EXPERTS, "n_routed_experts": 8}),
    ("arcee", {}),
    ("helium", {}),
]


def library_config(model_type: str, changes: dict[str, object]) -> transformers.PretrainedConfig:
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    if "n_layer" in changes or "n_layers" in changes:
        for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
            sizes.pop(key)
    return transformers.AutoConfig.for_model(model_type, **sizes)


def class_count(library: transformers.PretrainedConfig, auto: type = transformers.AutoModelForCausalLM) -> int:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(library)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_every_parameter_of_the_class(model_type, changes):
    library = library_config(model_type, changes)
    priced = weights_price(ModelConfig.from_dict(library.to_dict(), name=model_type))
    assert priced.num_parameters == class_count(library)


UNKNOWN = [
    ("apertus", NO_HEAD_DIM),
    ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4}),
    ("recurrent_gemma", {**NO_HEAD_DIM, "lru_width": 64}),
]


@pytest.mark.parametrize(("model_type", "changes"), UNKNOWN)
def test_an_unknown_family_is_priced_within_its_bar(model_type, changes):
    library = library_config(model_type, changes)
    quantity = weights_price(ModelConfig.from_dict(library.to_dict(), name=model_type), dtype="bf16").quantity
    assert quantity.source == Source.PREDICTED
    assert quantity.low < 2 * class_count(library) < quantity.high


VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "patch_size": 14,
    "image_size": 56,
}
QWEN_VISION = {"hidden_size": 48, "depth": 2, "num_heads": 4, "intermediate_size": 80, "out_hidden_size": 64}
TEXT = {key: value for key, value in SIZES.items() if key != "head_dim"}
LLAMA4_VISION = {
    "vision_output_dim": 40,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "pixel_shuffle_ratio": 0.5,
}
MLLAMA_VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "intermediate_size": 80,
    "vision_output_dim": 96,
    "image_size": 56,
    "intermediate_layers_indices": [0],
}
LLAMA4_TEXT = {**SIZES, "intermediate_size_mlp": 80, "num_local_experts": 4}
MLLAMA_TEXT = {**TEXT, "cross_attention_layers": [1]}

UNTIED = {"tie_word_embeddings": False}  # this class reads it from the outer part alone

TOWERS: list[tuple[str, dict[str, object], dict[str, object], dict[str, object]]] = [
    ("gemma3", SIZES, VISION, {"mm_tokens_per_image": 4}),
    ("gemma3", SIZES, {**VISION, "vision_use_head": False}, {"mm_tokens_per_image": 4}),
    ("qwen2_vl", TEXT, {"embed_dim": 48, "depth": 2, "num_heads": 4, "hidden_size": 64}, {}),
    ("qwen2_5_vl", TEXT, QWEN_VISION, {}),
    ("qwen3_vl", SIZES, {**QWEN_VISION, "deepstack_visual_indexes": [1]}, {}),
    ("qwen3_5", {**TEXT, **DELTA}, QWEN_VISION, {}),
    ("llama4", LLAMA4_TEXT, {**VISION, **LLAMA4_VISION}, {}),
    ("mllama", MLLAMA_TEXT, MLLAMA_VISION, {}),
    ("mistral3", {**SIZES, "model_type": "mistral"}, {**VISION, "model_type": "pixtral"}, UNTIED),
    ("llava", {**TEXT, "model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}, {}),
]


@pytest.mark.parametrize(("model_type", "text", "vision", "changes"), TOWERS)
def test_towers_and_projectors(model_type, text, vision, changes):
    library = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **changes)
    priced = weights_price(ModelConfig.from_dict(library.to_dict(), name=model_type))
    assert priced.num_parameters == class_count(library, transformers.AutoModelForImageTextToText)
    assert priced.quantity.source == Source.DERIVED
