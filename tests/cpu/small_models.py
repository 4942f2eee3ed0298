"""Small random models of the families that the engine runs, made on the spot as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import byte_tokenizer

#: Wide enough that the best two logits stand apart; the class's own 0.02 gives logits that are all alike.
_SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 257, "bos_token_id": 256,
    "pad_token_id": 257, "initializer_range": 0.4,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

#: (model_type, what it has beside _SHAPE): each feature of a family's class that the engine must carry.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral, a window beyond its positions": ("mistral", {"sliding_window": 256}),
    "mistral, a window": ("mistral", {"sliding_window": 20}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "qwen2, windows in its last layers": (
        "qwen2",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 18, "max_window_layers": 3},
    ),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, windows in its last layers": (
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "num_hidden_layers": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
         "query_pre_attn_scalar": 24, "sliding_window": 20},
    ),
    "gemma2, full attention without a cap": (
        "gemma2",
        {"head_dim": 16, "attn_logit_softcapping": None, "query_pre_attn_scalar": 24,
         "layer_types": ["full_attention"] * 2},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "num_hidden_layers": 7, "query_pre_attn_scalar": 24, "sliding_window": 20},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    ),
    "phi": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi, head norms": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "phi3, a window": ("phi3", {"sliding_window": 20}),
}  # fmt: skip


def library_config(name: str, **changes: Any) -> Any:
    """The config of one of ``MODELS`` as transformers has it, with ``changes``."""
    from transformers import AutoConfig

    model_type, own = MODELS[name]
    return AutoConfig.for_model(model_type, **{**_SHAPE, **own, **changes})


def library_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """One of ``MODELS`` in float32 with random weights; norms and biases are drawn too, so that none is neutral.

    Its experts are computed one by one, not the way the engine takes, and its attention by plain products: torch's
    would leave a soft-cap out without a word.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = library_config(name, **changes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation="eager")
    model = model.float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    return model.requires_grad_(requires_grad=False)


def save(model: Any, folder: Path) -> Path:
    """Config, weights as published files name them, and a tokenizer."""
    from tonnage.engine.models import quiet_transformers

    with quiet_transformers():
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
