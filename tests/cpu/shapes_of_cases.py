"""Shapes that forwards on fake tensors are tried with: published ones, and small ones of many kinds of layers."""

from __future__ import annotations

from typing import Any

from tonnage.costs.config import ModelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14_336, "vocab_size": 128_256, "num_hidden_layers": 32,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151_936, "num_hidden_layers": 48,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "intermediate_size": 15_360, "vocab_size": 262_208, "num_hidden_layers": 48,
    "sliding_window": 1024,
}  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "vocab_size": 102_400, "num_hidden_layers": 27,
}  # fmt: skip
_SMALL = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
_DENSE = {**LLAMA, **_SMALL, "intermediate_size": 160}

#: Name: shape, and how many layers the full run has.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": (_DENSE, 9),
    "wide heads": ({**_DENSE, "num_attention_heads": 32}, 7),
    "phi3": ({**_DENSE, "model_type": "phi3", "pad_token_id": 0}, 6),
    "gemma3": ({**GEMMA3, **_SMALL, "intermediate_size": 160, "sliding_window": 8}, 24),
    "qwen3_moe": ({**QWEN3_MOE, **_SMALL, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}, 8),
    "a dense layer among experts": (
        {**QWEN3_MOE, **_SMALL, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
         "intermediate_size": 3000, "mlp_only_layers": [5]},
        9,
    ),
    "deepseek_v2": (
        {**DEEPSEEK_V2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
         "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32,
         "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 100},
        8,
    ),
    "gpt_oss": (
        {**_DENSE, "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
        10,
    ),
}  # fmt: skip


def config_of(shape: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(
        {"max_position_embeddings": 32_768, "torch_dtype": "bfloat16", **shape}, name=shape["model_type"]
    )
