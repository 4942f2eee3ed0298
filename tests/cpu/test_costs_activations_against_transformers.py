"""Closed forms of what is not dense, experts, latents, recurrent layers and towers, against counted storages."""

from __future__ import annotations

import warnings
from fractions import Fraction

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from tonnage.costs.activations import encoder_peak, forward_peak
from tonnage.costs.config import ModelConfig
from tonnage.engine.tracker import StorageTracker

WIDE = {
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 384,
    "n_routed_experts": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 1,
}
NARROW = {"moe_intermediate_size": 32, "num_experts_per_tok": 1, "intermediate_size": 256}
GLM = {key: LATENT[key] for key in ("moe_intermediate_size", "n_routed_experts", "first_k_dense_replace")}
DELTA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 256,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def result_alone(module, query, key, value, attention_mask, **kwargs):
    """Attention left out: a result of every query head, as wide as the values."""
    batch, heads, rows, _size = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]), None


transformers.AttentionInterface.register("result_alone", result_alone)


def tracked(library: transformers.PretrainedConfig, *, tokens: int, rows: int, experts: str | None) -> int:
    if experts:
        library._experts_implementation = experts
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(
            library, attn_implementation="result_alone", dtype=torch.bfloat16
        )
        ids, positions = (torch.zeros(1, tokens, dtype=torch.int64) for _ in range(2))
        keep = torch.zeros(rows, dtype=torch.int64)
        tracker = StorageTracker([*model.parameters(), *model.buffers(), ids, positions, keep])
        with torch.no_grad(), tracker:
            model.eval()(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep)
    return tracker.peak_bytes


CASES = [
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, "grouped_mm", "experts"),
    (
        "qwen3_moe",
        {"head_dim": 64, "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 4},
        "grouped_mm",
        "experts",
    ),
    (
        "qwen2_moe",
        {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "num_experts": 8},
        "grouped_mm",
        "experts",
    ),
    (
        "gpt_oss",
        {"head_dim": 64, "intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 4},
        "grouped_mm",
        "experts",
    ),
    ("deepseek_v3", LATENT, "grouped_mm", "experts"),
    ("deepseek_v3", {**LATENT, **NARROW}, "grouped_mm", "expanded attention"),
    ("deepseek_v3", {**LATENT, "intermediate_size": 9000, "first_k_dense_replace": 2}, "grouped_mm", "mlp"),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}, "grouped_mm", "experts"),
    ("glm4_moe", {**GLM, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}, "grouped_mm", "experts"),
    ("lfm2", {"intermediate_size": 512, "layer_types": ["conv", "full_attention", "conv"]}, None, "short convolution"),
    ("gemma3_text", {"head_dim": 64, "intermediate_size": 3072}, None, "mlp"),
    ("phi", {"num_key_value_heads": 16, "hidden_act": "gelu_new"}, None, "mlp"),
    ("phi", {"num_key_value_heads": 16, "hidden_act": "relu", "intermediate_size": 8192}, None, "mlp"),
    ("phi3", {"intermediate_size": 3072}, None, "mlp"),
]


@pytest.mark.parametrize(("model_type", "changes", "experts", "phase"), CASES)
def test_the_peak_of_a_forward(model_type, changes, experts, phase):
    """Within 3 % where the library's own code is what is counted, and inside the bar."""
    library = transformers.AutoConfig.for_model(model_type, **{**WIDE, **changes})
    real = tracked(library, tokens=1024, rows=64, experts=experts)
    told = forward_peak(ModelConfig.from_dict(library.to_dict()), num_tokens=1024, logits_rows=64, dtype="bfloat16")
    assert told.phase == phase
    assert abs(told.bytes - real) <= Fraction(3, 100) * real
    assert told.low <= real <= told.high


def test_linear_attention_in_plain_float32_is_the_upper_end():
    """The library falls back to its reference where the kernels are not installed: the worst of the bar."""
    library = transformers.AutoConfig.for_model("qwen3_next", **{**WIDE, **DELTA})
    real = tracked(library, tokens=1024, rows=64, experts="grouped_mm")
    told = forward_peak(ModelConfig.from_dict(library.to_dict()), num_tokens=1024, logits_rows=64, dtype="bfloat16")
    assert told.bytes < real <= told.high <= Fraction(120, 100) * real


VISION = {
    "gemma3": ("siglip_vision_model", {"intermediate_size": 2048, "vision_use_head": False}),
    "mistral3": ("pixtral", {"intermediate_size": 2048}),
    "llava": ("clip_vision_model", {"intermediate_size": 2048}),
}


@pytest.mark.parametrize("model_type", VISION)
def test_the_peak_of_a_tower(model_type):
    kind, changes = VISION[model_type]
    sizes = {
        "hidden_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "image_size": 448,
        "patch_size": 14,
        **changes,
    }
    vision = transformers.AutoConfig.for_model(kind, **sizes)
    library = transformers.AutoConfig.for_model(model_type, vision_config=vision.to_dict())
    (tower,) = ModelConfig.from_dict(library.to_dict()).towers
    model = transformers.AutoModel.from_config(vision, attn_implementation="result_alone", dtype=torch.bfloat16)
    pixels = torch.zeros(1, 3, 448, 448, dtype=torch.bfloat16)
    tracker = StorageTracker([*model.parameters(), *model.buffers(), pixels])
    kwargs = {"image_sizes": [(448, 448)]} if kind == "pixtral" else {}
    with torch.no_grad(), tracker:
        model.eval()(pixel_values=pixels, **kwargs)
    told = encoder_peak(tower, num_tokens=32 * 32)
    assert told.low <= tracker.peak_bytes <= told.high
