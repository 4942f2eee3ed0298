"""What the library's own models leave in their caches against the layout, element by element."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import transformers

from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import kv_layout
from tonnage.costs.layers import Attention, Latent
from tonnage.costs.reading import class_defaults
from tonnage.layout import KVGroupKind, KVLayout

NUM_TOKENS, WINDOW, KERNEL = 12, 4, 4
TINY = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 101, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": KERNEL}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": KERNEL,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
OLD = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 101}

FAMILIES: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("phi3", {}),
    ("qwen3", {"head_dim": 24}),
    ("mistral", {"sliding_window": WINDOW}),
    ("gemma2", {"sliding_window": WINDOW, "head_dim": 16}),
    ("gemma3_text", {"sliding_window": WINDOW, "head_dim": 16, "num_hidden_layers": 7}),
    (
        "gemma3n_text",
        {
            "sliding_window": WINDOW, "head_dim": 16, "num_hidden_layers": 10, "num_kv_shared_layers": 5,
            "vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 10,
        },
    ),
    (
        "gemma4_text",
        {
            "sliding_window": WINDOW, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 101, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    ("cohere2", {"sliding_window": WINDOW}),
    ("gpt_oss", {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("mimo_v2_flash", {**EXPERTS, "n_routed_experts": 4, "sliding_window": WINDOW, "head_dim": 24, "v_head_dim": 16}),
    (
        "llama4_text",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 96},
    ),
    ("gpt2", OLD),
    ("gpt_bigcode", OLD),
    ("falcon", {"num_key_value_heads": None}),
    ("qwen3_next", {**DELTA, **EXPERTS}),
    ("olmo_hybrid", DELTA),
    ("lfm2", {"full_attn_idxs": [1, 3], "conv_L_cache": 3}),
    ("mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2}),
    ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    (
        "granitemoehybrid",
        {**MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 32},
    ),
    ("falcon_h1", {**MAMBA, "mamba_d_ssm": 128}),
    (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-M", "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16,
            "n_groups": 2, "conv_kernel": KERNEL, "head_dim": 16,
        },
    ),
    (
        "jamba",
        {
            "mamba_d_state": 16, "num_experts": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False,
            "attn_layer_period": 4, "attn_layer_offset": 1,
        },
    ),
    (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 16,
            "num_key_value_heads": 4,
        },
    ),
]  # fmt: skip
_OWN_SIZES = ("gpt2", "gpt_bigcode")
_NO_HEADS = ("mamba2",)


def library_config(model_type: str, changes: dict[str, object]) -> transformers.PretrainedConfig:
    fields = {} if model_type in _OWN_SIZES else dict(TINY)
    for key in ("num_attention_heads", "num_key_value_heads") if model_type in _NO_HEADS else ():
        fields.pop(key)
    fields.update(changes)
    return transformers.AutoConfig.for_model(model_type, **{k: v for k, v in fields.items() if v is not None})


def ours(library: transformers.PretrainedConfig) -> ModelConfig:
    """Through JSON, as it would be on disk."""
    return ModelConfig.from_dict(json.loads(library.to_json_string(use_diff=False)), name="tiny")


def kept(library: transformers.PretrainedConfig) -> list[tuple[int, int, int, int]]:
    """(tokens, elements of keys and values, of the convolution, of the matrix) of every layer after a prefill."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(library).eval()
        made = model(torch.arange(3, 3 + NUM_TOKENS)[None], use_cache=True)
    cache = made.past_key_values if getattr(made, "past_key_values", None) is not None else made.cache_params
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
        conv, matrix = (sum(t.numel() for t in each.values() if torch.is_tensor(t)) for each in states)
        tokens = keys.shape[-2] if torch.is_tensor(keys) else 0
        elements = keys.numel() + values.numel() if torch.is_tensor(keys) else 0
        found.append((tokens, elements, conv, matrix))
    return found


def expected(config: ModelConfig, layout: KVLayout) -> list[tuple[int, int, int, int]]:
    """The same from the layout. The library drops the oldest token of a window before the next is there, and keeps
    as many inputs of a convolution as its kernel has, one more than any step reads."""
    found = [[0, 0, 0, 0] for _ in config.layers]
    for group in layout.groups:
        for part in group.parts:
            elements = math.prod(part.shape[1:])
            for layer in group.layers:
                if group.kind is KVGroupKind.STATE and part.name == "conv":
                    found[layer][2] += elements * (part.shape[1] + 1) // part.shape[1]
                elif group.kind is KVGroupKind.STATE:
                    found[layer][3] += elements
                else:
                    tokens = NUM_TOKENS if group.window is None else min(NUM_TOKENS, group.window - 1)
                    found[layer][0] = tokens
                    found[layer][1] += elements // group.block_tokens * tokens
    return [tuple(each) for each in found]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # an old family's own code
@pytest.mark.parametrize(("model_type", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_every_element_of_the_cache(model_type, changes):
    library = library_config(model_type, changes)
    config = ours(library)
    layout = kv_layout(config, kv_dtype="float32", state_dtype="float32", block_tokens=1)
    theirs = kept(library)
    mine = expected(config, layout)
    assert mine[: len(theirs)] == theirs
    # Layers that read another's cache have none of their own in the library.
    assert not any(any(each) for each in mine[len(theirs) :])


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", {**LATENT, "v_head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 32}),
        ("minicpm3", LATENT),
        ("glm_moe_dsa", {**LATENT, "v_head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 32}),
    ],
)
def test_latent_vectors(model_type, changes):
    """The library caches expanded heads; what an engine must keep is what the down-projection makes of a token."""
    library = library_config(model_type, {**changes, "num_key_value_heads": 4})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(library)
    sizes = [layer.self_attn.kv_a_proj_with_mqa.out_features for layer in model.model.layers]
    layers = ours(library).layers
    assert [layer.mixer.kv_lora_rank + layer.mixer.qk_rope_head_dim for layer in layers] == sizes
    assert all(isinstance(layer.mixer, Latent) for layer in layers)


def test_an_encoder_decoder_keeps_both_caches():
    library = transformers.BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=101, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    with torch.no_grad():
        model = transformers.BartForConditionalGeneration(library).eval()
        made = model(torch.arange(3, 3 + NUM_TOKENS)[None], decoder_input_ids=torch.arange(3, 8)[None], use_cache=True)
    cache = made.past_key_values
    raw = {**library.to_dict(), "is_encoder_decoder": True}
    layout = kv_layout(ModelConfig.from_dict(raw, name="bart"), kv_dtype="float32", block_tokens=1)
    for kind, part, tokens in (
        (KVGroupKind.FULL, cache.self_attention_cache, 5),
        (KVGroupKind.CROSS, cache.cross_attention_cache, NUM_TOKENS),
    ):
        theirs = sum(layer.keys.numel() + layer.values.numel() for layer in part.layers)
        groups = [group for group in layout.groups if group.kind is kind]
        assert sum(group.block_bytes // group.block_tokens for group in groups) * tokens == theirs * 4


def test_compressed_attention_keeps_windows_and_entries():
    """Single vectors, key and value at once; every fourth token an entry and an indexer's key."""
    library = library_config(
        "deepseek_v4",
        {
            "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32, "sliding_window": 8,
            "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "o_groups": 2,
            "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4,
        },
    )  # fmt: skip
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(library).eval()
        cache = model(torch.arange(3, 3 + NUM_TOKENS)[None], use_cache=True).past_key_values
    for layer, stored in zip(ours(library).layers, cache.layers, strict=True):
        near, past = layer.mixer, layer.beside
        assert isinstance(near, Attention)
        assert isinstance(past, Attention)
        assert stored.keys.shape[1:] == (1, near.window - 1, near.head_dim)
        assert stored.compressed_kv["compressor"].shape[1:] == (NUM_TOKENS // past.compress_ratio, past.head_dim)
        if past.index_head_dim:
            assert stored.compressed_kv["indexer"].shape[1:] == (NUM_TOKENS // past.compress_ratio, past.index_head_dim)
            # Values and gates of two series: half of what is kept of a token lies in each of these.
            assert stored.buffer_kv["compressor"].shape[-1] == 2 * past.head_dim
            assert stored.buffer_kv["indexer"].shape[-1] == 2 * past.index_head_dim


@pytest.mark.parametrize("model_type", sorted(class_defaults()))
def test_class_defaults_are_those_of_the_classes(model_type):
    """Every default that is kept here is the library's."""
    cls = transformers.CONFIG_MAPPING[model_type]
    theirs = {field.name: field.default for field in dataclasses.fields(cls)}
    for key, value in class_defaults()[model_type].items():
        default = theirs[key]
        assert (list(default) if isinstance(default, tuple) else default) == value or callable(default), key


#: No rule stands behind the layer lists of the first three; the default heads of the others do not divide their width,
#: and published files give head_dim.
NO_RULE = ("zamba", "zamba2", "nemotron_h", "glm4_moe", "glm4v_moe_text")


@pytest.mark.parametrize("model_type", sorted(set(class_defaults()) - set(NO_RULE)))
def test_a_class_and_a_silent_file_agree(model_type):
    """With the class's own sizes, layer lists written out or left out: the same layers."""
    raw = json.loads(transformers.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    told = ModelConfig.from_dict(raw, name="told")
    lists = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_layer_ids")
    quiet = {key: value for key, value in raw.items() if key not in lists}
    assert ModelConfig.from_dict(quiet, name="told").layers == told.layers
