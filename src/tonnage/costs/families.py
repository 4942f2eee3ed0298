"""The model families whose tensors are known exactly, and what their classes assume when config.json is silent.

A config.json holds only what its author wrote; the rest comes from the family's class in transformers. Each row
repeats those defaults, and a test compares every row with the class itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. ``None`` means: no default of its own (KV heads = heads, head_dim = hidden / heads, no window).

    qkv_bias, out_bias   whether the projections carry a bias; ``"config"`` reads ``attention_bias``
    mlp_bias             likewise, reading ``mlp_bias``
    qk_norm              a norm over each query and key head
    packed               one qkv_proj and one gate_up_proj instead of five matrices
    """

    model_type: str
    class_name: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    packed: bool = False


FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family(
            model_type="llama",
            class_name="LlamaForCausalLM",
            qkv_bias="config",
            out_bias="config",
            mlp_bias="config",
        ),
        Family(model_type="mistral", class_name="MistralForCausalLM", num_kv_heads=8, sliding_window=4096),
        Family(model_type="qwen2", class_name="Qwen2ForCausalLM", num_kv_heads=32, qkv_bias=True),
        Family(
            model_type="qwen3",
            class_name="Qwen3ForCausalLM",
            num_kv_heads=32,
            head_dim=128,
            qkv_bias="config",
            out_bias="config",
            qk_norm=True,
        ),
        Family(model_type="phi3", class_name="Phi3ForCausalLM", packed=True),
    )
}
