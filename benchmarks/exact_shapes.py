"""Shapes that `exact_peaks.py` and `code_for_card.py` run or compile: published ones, and small ones for a host."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.costs.config import ModelConfig

DTYPE = "bfloat16"
COMMON = {"max_position_embeddings": 32_768, "torch_dtype": DTYPE, "tie_word_embeddings": False}
#: Published shapes; as many layers as hold three of each kind.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14_336, "vocab_size": 128_256, "num_hidden_layers": 4,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151_936, "num_hidden_layers": 4,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "intermediate_size": 15_360, "vocab_size": 262_208, "num_hidden_layers": 18,
    "sliding_window": 1024,
}  # fmt: skip
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "vocab_size": 102_400, "num_hidden_layers": 5,
}  # fmt: skip
CARD_SHAPES = {
    "Llama-3.1-8B": LLAMA,
    "Qwen3-30B-A3B": QWEN3_MOE,
    "Gemma-3-12B": GEMMA3,
    "DeepSeek-V2-Lite": DEEPSEEK_V2,
}


def small(shape: Mapping[str, object], **changes: object) -> dict[str, object]:
    return {**shape, "vocab_size": 1000, "num_hidden_layers": 3, **changes}


#: By name: the same families with small widths in about the same proportions, and some whose attention sets the peak.
HOST_SHAPES = {
    "llama": small(LLAMA, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
                   intermediate_size=1792),
    "llama, wide heads": small(LLAMA, hidden_size=512, num_attention_heads=32, num_key_value_heads=32, head_dim=64,
                               intermediate_size=512),
    "qwen3": small(LLAMA, model_type="qwen3", hidden_size=512, num_attention_heads=16, num_key_value_heads=4,
                   head_dim=64, intermediate_size=1536),
    "qwen3, wide heads": small(LLAMA, model_type="qwen3", hidden_size=512, num_attention_heads=32,
                               num_key_value_heads=8, head_dim=64, intermediate_size=512),
    "gemma3": small(GEMMA3, hidden_size=480, num_attention_heads=16, head_dim=32, intermediate_size=1920,
                    layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "qwen3_moe": small(QWEN3_MOE, hidden_size=512, head_dim=32, moe_intermediate_size=192, num_experts=32,
                       intermediate_size=1536),
    "mixtral": small(LLAMA, model_type="mixtral", hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
                     head_dim=64, intermediate_size=1792, num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v2": small(DEEPSEEK_V2, hidden_size=512, intermediate_size=2736, moe_intermediate_size=352,
                         n_routed_experts=16, kv_lora_rank=128, qk_rope_head_dim=16, qk_nope_head_dim=32,
                         v_head_dim=32),
    "deepseek_v2, narrow experts": small(DEEPSEEK_V2, hidden_size=512, intermediate_size=512,
                                         moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=2,
                                         kv_lora_rank=128, qk_rope_head_dim=16, qk_nope_head_dim=64, v_head_dim=64),
}  # fmt: skip


def config_of(name: str, shape: Mapping[str, object]) -> ModelConfig:
    return ModelConfig.from_dict({**COMMON, **shape}, name=name)
