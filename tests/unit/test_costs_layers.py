"""From config.json to layers: each way of saying what a layer is, old names, experts, and what cannot be read."""

from __future__ import annotations

import json

import pytest
import shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import kv_layout
from tonnage.costs.layers import Attention, Dense, Experts, Latent, Recurrent
from tonnage.costs.reading import class_defaults
from tonnage.errors import ModelConfigError, UserError

BASE = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 100_000,
    "torch_dtype": "bfloat16",
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}


def config(model_type: str, **changes) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, "model_type": model_type, **changes}, name="tiny")


def letters(model: ModelConfig) -> str:
    """F full, W window, S state, B attention and state, C cross, L latent, - nothing: one a layer."""
    text = ""
    for layer in model.layers:
        mixer = layer.mixer
        if mixer is None:
            text += "-"
        elif isinstance(mixer, Latent):
            text += "L"
        elif isinstance(mixer, Recurrent):
            text += "S"
        elif isinstance(layer.beside, Recurrent):
            text += "B"
        else:
            text += "C" if mixer.is_cross else "W" if mixer.window else "F"
    return text


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, "FFFFFFFF"),
        ("mistral", {}, "WWWWWWWW"),
        ("mistral", {"sliding_window": None}, "FFFFFFFF"),
        ("gemma2", {"sliding_window": 64}, "WFWFWFWF"),
        ("gemma3_text", {"sliding_window": 64}, "WWWWWFWW"),
        ("gemma3_text", {"sliding_window": 64, "sliding_window_pattern": 4}, "WWWFWWWF"),
        ("gemma4_text", {"sliding_window": 64}, "WWWWWFWF"),
        ("cohere2", {"sliding_window": 64}, "WWWFWWWF"),
        ("gpt_oss", {"sliding_window": 64, "num_local_experts": 4}, "WFWFWFWF"),
        ("exaone4", {"sliding_window": 64, "sliding_window_pattern": "LLG"}, "WWFWWFWW"),
        ("olmo3", {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4}, "WFWFWFWF"),
        ("mimo_v2_flash", {"sliding_window": 64}, "FWWWWFWW"),
        ("mimo_v2_flash", {"sliding_window": 64, "hybrid_layer_pattern": [0, 1, 1, 0] * 2}, "FWWFFWWF"),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5}, "FFFFFWWW"),
        ("qwen2", {"sliding_window": 64, "max_window_layers": 5}, "FFFFFFFF"),
        ("llama4_text", {"attention_chunk_size": 64}, "WWWFWWWF"),
        ("llama4_text", {"attention_chunk_size": 64, "no_rope_layers": [1, 0] * 4}, "WFWFWFWF"),
        ("mllama_text_model", {"cross_attention_layers": [3, 7]}, "FFFCFFFC"),
        ("gpt_neo", {"attention_types": [[["global", "local"], 4]], "window_size": 64}, "FWFWFWFW"),
        ("qwen3_next", DELTA, "SSSFSSSF"),
        ("qwen3_next", {**DELTA, "full_attention_interval": 2}, "SFSFSFSF"),
        ("granitemoehybrid", {**MAMBA, "layer_types": ["mamba"] * 7 + ["attention"]}, "SSSSSSSF"),
        ("bamba", {**MAMBA, "attn_layer_indices": [2, 6]}, "SSFSSSFS"),
        ("zamba2", {**MAMBA, "hybrid_layer_ids": [1, 4]}, "SBSSBSSS"),
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 1}, "SFSSSFSS"),
        ("falcon_h1", MAMBA, "BBBBBBBB"),
        ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "M-M*E|M*"}, "S-SF-SF"),
        ("lfm2", {"full_attn_idxs": [2, 5], "conv_L_cache": 3}, "SSFSSFSS"),
        ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "conv_L_cache": 3}, "SSFSSSFS"),
        ("recurrent_gemma", {"attention_window_size": 64}, "SSWSSWSS"),
        ("minimax", {"attn_type_list": [0, 0, 0, 1] * 2}, "SSSFSSSF"),
        (
            "kimi_linear",
            {
                **LATENT,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3, 5, 6, 7],
                    "full_attn_layers": [4, 8],
                    "head_dim": 32,
                    "num_heads": 8,
                    "short_conv_kernel_size": 4,
                },
            },
            "SSSLSSSL",
        ),
        ("deepseek_v3", LATENT, "LLLLLLLL"),
        ("deepseek_v2", {"kv_lora_rank": None}, "FFFFFFFF"),
        ("deepseek_v2", {"use_mla": False}, "FFFFFFFF"),
        ("deepseek_v2", {}, "LLLLLLLL"),
        ("mamba2", {"num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 2, "conv_kernel": 4}, "SSSSSSSS"),
        (
            "nobody_knows",
            {"layer_types": ["sliding_attention"] * 6 + ["full_attention"] * 2, "sliding_window": 9},
            "WWWWWWFF",
        ),
    ],
)
def test_kinds_of_layers(model_type, changes, expected):
    assert letters(config(model_type, **changes)) == expected


@pytest.mark.parametrize(
    ("raw", "numbers"),
    [
        (
            {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 6, "n_positions": 64, "vocab_size": 99},
            (3, 96, 6, 6, 16, 384),
        ),
        (
            {"model_type": "gptj", "n_layer": 3, "n_embd": 96, "n_head": 6, "n_positions": 64, "vocab_size": 99},
            (3, 96, 6, 6, 16, 384),
        ),
        (
            {
                "model_type": "opt",
                "num_hidden_layers": 3,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "ffn_dim": 200,
                "max_position_embeddings": 64,
                "vocab_size": 99,
            },
            (3, 96, 6, 6, 16, 200),
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 3,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_kv_heads": 6,
                "multi_query": True,
                "vocab_size": 99,
                "max_position_embeddings": 64,
            },
            (3, 96, 6, 1, 16, 384),
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 3,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_kv_heads": 2,
                "new_decoder_architecture": True,
                "vocab_size": 99,
                "max_position_embeddings": 64,
            },
            (3, 96, 6, 2, 16, 384),
        ),
        (
            {
                "model_type": "gpt_bigcode",
                "n_layer": 3,
                "n_embd": 96,
                "n_head": 6,
                "n_inner": 200,
                "n_positions": 64,
                "vocab_size": 99,
            },
            (3, 96, 6, 1, 16, 200),
        ),
        (
            {"model_type": "bloom", "n_layer": 3, "hidden_size": 96, "n_head": 6, "vocab_size": 99},
            (3, 96, 6, 6, 16, 384),
        ),
        (
            {
                "model_type": "mpt",
                "n_layers": 3,
                "d_model": 96,
                "n_heads": 6,
                "max_seq_len": 64,
                "vocab_size": 99,
                "attn_config": {"kv_n_heads": 2},
            },
            (3, 96, 6, 2, 16, 384),
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 3,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "kv_channels": 32,
                "multi_query_group_num": 2,
                "ffn_hidden_size": 200,
                "padded_vocab_size": 99,
                "seq_length": 64,
            },
            (3, 96, 6, 2, 32, 200),
        ),
        (
            {
                "model_type": "t5",
                "num_layers": 5,
                "num_decoder_layers": 3,
                "d_model": 96,
                "num_heads": 6,
                "d_kv": 32,
                "d_ff": 200,
                "vocab_size": 99,
                "is_encoder_decoder": True,
            },
            (3, 96, 6, 6, 32, 200),
        ),
    ],
)
def test_old_names(raw, numbers):
    """(layers, width, heads, KV heads, head, inner)."""
    made = ModelConfig.from_dict(raw, name="old")
    assert numbers == (
        made.num_layers, made.hidden_size, made.num_heads, made.num_kv_heads, made.head_dim, made.intermediate_size
    )  # fmt: skip


def test_a_text_model_inside_another():
    """Whatever the outer section is called, and deeper than one level."""
    inner = {**BASE, "model_type": "llama"}
    for nested in (
        {"text_config": inner},
        {"llm_config": inner},
        {"language_config": inner},
        {"thinker_config": {"text_config": inner}},
    ):
        made = ModelConfig.from_dict({"model_type": "outer", **nested}, name="outer")
        assert (made.model_type, made.layers) == ("llama", config("llama").layers)


def test_a_nested_section_is_a_difference_to_its_class():
    """The published file of a small vision model says no more than this."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    made = ModelConfig.from_dict({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    assert (made.num_heads, made.num_kv_heads, made.head_dim, made.vocab_size) == (8, 4, 256, 262_208)
    assert letters(made).count("F") == 5
    assert "num_attention_heads is absent: 8, as the family's class has it" in made.notes


def test_heads_of_windows_and_of_full_layers_may_differ():
    gemma = config(
        "gemma4_text", sliding_window=64, attention_k_eq_v=True, num_global_key_value_heads=2, global_head_dim=64
    )
    pairs = {(m.num_kv_heads, m.head_dim, m.window) for layer in gemma.layers for m in layer.mixers}
    assert pairs == {(4, 32, 64), (2, 64, None)}
    assert (gemma.num_kv_heads, gemma.head_dim, gemma.sliding_window) == (2, 64, 64)
    mimo = config("mimo_v2_flash", sliding_window=64, v_head_dim=16, swa_num_key_value_heads=8, swa_head_dim=32)
    pairs = {(m.num_kv_heads, m.head_dim, m.v_head_dim, m.window) for layer in mimo.layers for m in layer.mixers}
    assert pairs == {(4, 32, 16, None), (8, 32, 16, 64)}


def test_layers_may_have_lists_of_heads():
    made = config("openelm", num_attention_heads=[4, 8] * 4, num_key_value_heads=[1, 2] * 4)
    assert [(layer.mixer.num_heads, layer.mixer.num_kv_heads) for layer in made.layers] == [(4, 1), (8, 2)] * 4


def test_searched_architectures_name_each_layer():
    blocks = [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True, "n_heads_in_group": None}}] * 4
    made = config("nemotron-nas", block_configs=blocks)
    assert letters(made) == "F-F-F-F-"
    assert made.num_kv_heads == 2


def test_compressed_attention():
    raw = {**BASE, "model_type": "deepseek_v4", "num_key_value_heads": 1, "head_dim": 512, "sliding_window": 128,
           "compress_ratios": [0, 128, 4, 128, 4, 128, 4, 0], "n_routed_experts": 4,
           "moe_intermediate_size": 64}  # fmt: skip
    made = ModelConfig.from_dict(raw, name="v4")
    assert [layer.beside.compress_ratio if layer.beside else 0 for layer in made.layers] == raw["compress_ratios"]
    assert [layer.beside.index_head_dim if layer.beside else 0 for layer in made.layers] == [
        0,
        0,
        128,
        0,
        128,
        0,
        128,
        0,
    ]
    assert all((layer.mixer.window, layer.mixer.v_head_dim) == (128, 0) for layer in made.layers)
    assert [layer.mixer.window for layer in made.mtp_layers] == [128]


def test_windows_without_a_length_are_noted():
    made = config("llama", layer_types=["sliding_attention", "full_attention"] * 4, sliding_window=None)
    assert letters(made) == "FFFFFFFF"
    assert any("sliding_window is null" in note for note in made.notes)


def test_shared_indexers_keep_no_keys():
    made = config("glm_moe_dsa", **LATENT, index_head_dim=128, index_n_heads=4, n_routed_experts=0,
                  indexer_types=["full", "full", "shared", "shared"] * 2)  # fmt: skip
    assert [layer.mixer.index_head_dim for layer in made.layers] == [128, 128, 0, 0] * 2


@pytest.mark.parametrize(
    ("model_type", "changes", "pattern"),
    [
        ("mixtral", {"num_local_experts": 4}, "EEEEEEEE"),
        (
            "deepseek_v3",
            {**LATENT, "n_routed_experts": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 3},
            "DDDEEEEE",
        ),
        (
            "deepseek_v3",
            {
                **LATENT,
                "n_routed_experts": 4,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 2,
            },
            "DDEDEDED",
        ),
        ("mimo_v2_flash", {"n_routed_experts": 4, "moe_layer_freq": [0, 1, 1, 0, 1, 1, 1, 1]}, "DEEDEEEE"),
        ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 2}, "DEDEDEDE"),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0, 7]}, "DEEEEEED"),
        ("llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 2}, "DEDEDEDE"),
        ("llama4_text", {"num_local_experts": 4, "moe_layers": [1, 2]}, "DEEDDDDD"),
        ("jamba", {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}, "DEDEDEDE"),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_layer_start_index": 2, "moe_layer_end_index": 6}, "DDEEEEED"),
        ("lfm2_moe", {"num_experts": 4, "num_dense_layers": 2, "conv_L_cache": 3}, "DDEEEEEE"),
        ("step3_text", {"moe_num_experts": 4, "moe_layers_enum": "4,5,6"}, "DDDDEEED"),
        (
            "deepseek_v32",
            {**LATENT, "n_routed_experts": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6},
            "DDEEEEEE",
        ),
        ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "ME*-", "n_routed_experts": 4}, "-E-D"),
        ("llama", {}, "DDDDDDDD"),
        ("llama", {"num_experts": 1}, "DDDDDDDD"),
    ],
)
def test_which_layers_have_experts(model_type, changes, pattern):
    made = config(model_type, **changes)
    found = "".join({Dense: "D", Experts: "E"}.get(type(layer.feed_forward), "-") for layer in made.layers)
    assert found == pattern


@pytest.mark.parametrize(
    ("model_type", "changes", "experts"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, (4, 2, 512, 0, True)),
        (
            "deepseek_v3",
            {
                **LATENT,
                "n_routed_experts": 4,
                "moe_intermediate_size": 64,
                "n_shared_experts": 2,
                "num_experts_per_tok": 3,
            },
            (4, 3, 64, 128, True),
        ),
        (
            "qwen2_moe",
            {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
            (4, 4, 64, 96, True),
        ),
        ("llama4_text", {"num_local_experts": 4}, (4, 1, 512, 512, True)),
        (
            "gemma4_text",
            {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64, "enable_moe_block": True},
            (4, 2, 64, 512, True),
        ),
        ("dbrx", {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 96}}, (4, 2, 512, 0, True)),
        (
            "nemotron_h",
            {
                **MAMBA,
                "hybrid_override_pattern": "*EEEEEEE",
                "n_routed_experts": 4,
                "moe_intermediate_size": 64,
                "moe_shared_expert_intermediate_size": 96,
                "n_shared_experts": 1,
            },
            (4, 2, 64, 96, False),
        ),
    ],
)
def test_experts(model_type, changes, experts):
    part = config(model_type, **changes).layers[-1].feed_forward
    assert isinstance(part, Experts)
    assert experts == (
        part.num_experts, part.num_experts_per_token, part.intermediate_size, part.shared_intermediate_size,
        part.is_gated,
    )  # fmt: skip


def test_widths_and_gates():
    assert {layer.feed_forward.is_gated for layer in config("starcoder2").layers} == {False}
    assert (
        config(
            "llama4_text", num_local_experts=4, interleave_moe_layer_step=2, intermediate_size_mlp=999
        ).intermediate_size
        == 999
    )
    assert config("qwen3_moe", num_experts=4, moe_intermediate_size=64, intermediate_size=None).intermediate_size == 64
    granite = config(
        "granitemoehybrid", **MAMBA, layer_types=["mamba"] * 8, num_local_experts=0, shared_intermediate_size=99
    )
    assert granite.intermediate_size == 99
    lists = config("gemma3n_text", intermediate_size=[64] * 4 + [128] * 4, num_kv_shared_layers=0)
    assert [layer.feed_forward.intermediate_size for layer in lists.layers] == [64] * 4 + [128] * 4
    wide = config("gemma4_text", num_kv_shared_layers=2, use_double_wide_mlp=True)
    assert [layer.feed_forward.intermediate_size for layer in wide.layers] == [512] * 6 + [1024] * 2


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
def test_draft_layers(name):
    made = config("qwen3_next", **DELTA, **{name: 2}, num_experts=4, moe_intermediate_size=64)
    assert [type(layer.mixer) for layer in made.mtp_layers] == [Attention] * 2
    assert isinstance(made.mtp_layers[0].feed_forward, Experts)
    assert config("llama").mtp_layers == ()


def test_recurrent_sizes():
    delta = config("qwen3_next", **DELTA).layers[0].mixer
    assert delta == Recurrent(kind="gated_delta", num_heads=4, head_dim=8, state_size=16,
                              conv_channels=2 * 2 * 16 + 4 * 8, conv_kernel=4, num_groups=2)  # fmt: skip
    mamba = config("bamba", **MAMBA, attn_layer_indices=[1]).layers[0].mixer
    assert mamba == Recurrent(kind="mamba2", num_heads=8, head_dim=64, state_size=16, conv_channels=8 * 64 + 2 * 2 * 16,
                              conv_kernel=4, num_groups=2)  # fmt: skip
    jamba = config("jamba", mamba_d_state=16, mamba_d_conv=4, mamba_expand=2).layers[0].mixer
    assert (jamba.kind, jamba.num_heads, jamba.state_size, jamba.conv_channels) == ("mamba1", 512, 16, 512)


def test_headless_models_say_so():
    """A model of states alone has no heads of attention: its own stand in their place."""
    made = config("mamba2", num_heads=8, head_dim=64, state_size=16, num_attention_heads=None, num_key_value_heads=None)
    assert (made.num_heads, made.head_dim) == (8, 64)


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llama", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 8 layers"),
        ("llama", {"layer_types": ["full_attention", "telepathy"] * 4}, "layer_types with 'telepathy'"),
        ("llama", {"layer_types": ["linear_attention"] * 8}, "layer_types names a recurrent layer"),
        ("llama", {"layer_types": ["sliding_attention"] * 8}, "sliding_window is missing"),
        ("llama", {"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ("zamba2", MAMBA, "layers_block_type is missing"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types with"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "only 3 layers are described"),
        ("gpt_neo", {"attention_types": ["global"]}, "attention_types with 'global'"),
        ("llama4_text", {"attention_chunk_size": 64, "no_rope_layers": [1, 0]}, "only 2 layers are described"),
        ("llama", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers = 1000000"),
        ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "MX"}, "hybrid_override_pattern with 'X'"),
        ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "----"}, "names no layer that mixes"),
        ("deepseek_v4", {"compress_ratios": [5] * 8}, "compress_ratios with 5"),
        ("deepseek_v4", {"compress_ratios": [{}] * 8}, "compress_ratios with {}"),
        ("mistral", {"sliding_pattern": "1:0"}, "sliding_pattern = '1:0'"),
        ("mixtral", {"num_local_experts": "many"}, "num_experts = 'many'"),
        ("mixtral", {"num_local_experts": 4, "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        ("llama", {"quantization_config": {"quant_method": "magic"}}, "quantization_config names a packing"),
        (
            "granitemoehybrid",
            {**MAMBA, "layer_types": ["mamba"] * 8, "mamba_ssm_dtype": "int2"},
            "mamba_ssm_dtype = 'int2'",
        ),
    ],
)
def test_what_cannot_be_read_names_the_field(model_type, changes, named):
    with pytest.raises(ModelConfigError) as caught:
        config(model_type, **changes)
    assert named in str(caught.value)


JUNK = st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=True) | st.text(max_size=5)
JUNK = JUNK | st.lists(JUNK, max_size=9) | st.dictionaries(st.text(max_size=4), JUNK, max_size=3)
KEYS = sorted({key for raw in map(shapes.raw_config, shapes.complete()) for key in raw} | {
    "layer_types", "layers_block_type", "quantization_config", "vision_config", "audio_config", "text_config",
    "linear_attn_config", "attention_types", "block_configs", "per_layer_config", "moe_layers", "is_encoder_decoder",
    "attn_type_list", "block_types", "num_nextn_predict_layers", "moe_layers_enum", "sliding_window_pattern",
})  # fmt: skip


@given(
    key=st.sampled_from(shapes.complete()),
    junk=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4),
    dropped=st.sets(st.sampled_from(KEYS), max_size=3),
)
@settings(max_examples=200)
def test_any_file_is_read_or_refused_with_a_reason(key, junk, dropped):
    """Never another exception, whatever a file says; what is read has a layout or is refused too."""
    raw = {name: value for name, value in {**shapes.raw_config(key), **junk}.items() if name not in dropped}
    try:
        kv_layout(ModelConfig.from_dict(raw, name="any"))
    except UserError:
        return


def test_every_family_with_defaults_is_read():
    """A nested section that names its family and no more, for each family whose class defaults are kept here."""
    refused: dict[str, str] = {}
    for name in class_defaults():
        raw = {"text_config": {"model_type": name, "head_dim": 64}, "model_type": "outer"}
        try:
            made = ModelConfig.from_dict(raw, name=name)
        except ModelConfigError as error:
            refused[name] = str(error)
        else:
            assert made.num_layers == len(made.layers)
    # Their classes compute what a silent file leaves out, or take any number of heads.
    assert set(refused) == {"zamba2", "nemotron_h", "jetmoe", "dbrx", "olmo_hybrid"}, refused


def test_reading_is_a_pure_function_of_the_file():
    for key in shapes.complete():
        raw = shapes.raw_config(key)
        again = json.loads(json.dumps(raw))
        assert ModelConfig.from_dict(raw, name=key) == ModelConfig.from_dict(again, name=key)
        assert raw == again
