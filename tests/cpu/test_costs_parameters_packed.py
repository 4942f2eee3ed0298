"""Packed weights and file headers against the libraries that make them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from tonnage.costs.checkpoint import read_checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.gguf import GGML_TYPES
from tonnage.costs.price import weights_price
from tonnage.costs.quantised import Packing
from tonnage.costs.tensors import Component
from tonnage.terms import Rank, Source

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def num_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


@pytest.mark.parametrize(("rows", "columns"), [(512, 256), (500, 300), (64, 1000)])
def test_block_scales_of_fp8(rows, columns):
    config = ModelConfig.from_dict(
        {
            **transformers.LlamaConfig(**SIZES).to_dict(),
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        }
    )
    packing = Packing.of(config)
    with torch.device("meta"):
        linear = FP8Linear(columns, rows, block_size=(128, 128), has_bias=False)
    assert packing.span(rows, columns).bytes == num_bytes(linear)


def test_blocks_and_scales_of_mxfp4():
    """The class keeps its biases in float32, the checkpoint has them in the model's dtype."""
    library = transformers.GptOssConfig(**SIZES, num_local_experts=6)
    raw = {**library.to_dict(), "dtype": "bfloat16"}
    config = ModelConfig.from_dict({**raw, "quantization_config": {"quant_method": "mxfp4"}})
    with torch.device("meta"):
        experts = Mxfp4GptOssExperts(library)
    blocks = [p.numel() for n, p in experts.named_parameters() if n.endswith("proj")]  # 16 bytes and one of scale
    biases = [p.numel() for n, p in experts.named_parameters() if n.endswith("bias")]
    each = sum(size + size // 16 for size in blocks) + 2 * sum(biases)
    assert weights_price(config).bytes_of(Component.EXPERTS) == 2 * each
    wide = weights_price(ModelConfig.from_dict(raw))
    for component in (Component.ATTENTION, Component.ROUTER, Component.EMBEDDINGS, Component.HEAD):
        assert weights_price(config).bytes_of(component) == wide.bytes_of(component)


MODELS = [
    ("llama", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("mixtral", {"num_local_experts": 4}),
    ("gemma3_text", {}),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}),
]
#: Keys that the class does not know.
FOREIGN = {"gpt2": ("head_dim", "num_key_value_heads", "intermediate_size"), "lfm2": ("head_dim",)}


@pytest.mark.parametrize(("model_type", "changes"), MODELS)
def test_files_that_the_library_writes(tmp_path, model_type, changes):
    """Each component of a saved model is what config.json alone says, and their sum is what the files hold."""
    sizes = {key: value for key, value in SIZES.items() if key not in FOREIGN.get(model_type, ())}
    library = transformers.AutoConfig.for_model(model_type, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(library, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    checkpoint = read_checkpoint(tmp_path)
    config = ModelConfig.read(tmp_path)
    told = weights_price(config, checkpoint=checkpoint)
    assert told.quantity.source == Source.COUNTED
    assert told.quantity.bytes == checkpoint.total_bytes == 2 * sum(p.numel() for p in model.parameters())
    assert {p.component: p.bytes for p in told.parts} == {p.component: p.bytes for p in weights_price(config).parts}


LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 2, "num_local_experts": 4,
    "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"],
}  # fmt: skip
DIVIDED = [
    ("llama", {}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    ("gpt_oss", {"num_local_experts": 4}),
    ("deepseek_v3", LATENT),
    ("qwen3_next", DELTA),
    ("granitemoehybrid", MAMBA),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}),
]
RANKS = [Rank(), Rank(tp=2, size=2), Rank(tp=2, size=2, ep=2), Rank(pp=2, size=2, index=1)]


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize(("model_type", "changes"), DIVIDED)
def test_a_rank_by_the_names_in_files(tmp_path, model_type, changes, rank):
    """What names say of a rank is what config.json says, but for tensors that are cut in part (a hundredth)."""
    sizes = {key: value for key, value in SIZES.items() if key not in (*FOREIGN.get(model_type, ()), "head_dim")}
    library = transformers.AutoConfig.for_model(model_type, **{**sizes, **changes})
    transformers.AutoModelForCausalLM.from_config(library, dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = ModelConfig.read(tmp_path)
    told = weights_price(config, rank=rank, checkpoint=read_checkpoint(tmp_path))
    computed = weights_price(config, rank=rank)
    assert abs(told.quantity.bytes - computed.quantity.bytes) <= 0.01 * computed.quantity.bytes
    for part in computed.parts:
        if part.component is not Component.NORMS:
            assert abs(told.bytes_of(part.component) - part.bytes) <= 0.02 * part.bytes + 2048, part.component


def test_every_dtype_that_safetensors_writes(tmp_path):
    kinds = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    tensors = {str(kind): torch.zeros(3, 5).to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_checkpoint(tmp_path)
    assert {t.name: (t.shape, t.num_bytes) for t in found.tensors} == {
        name: ((3, 5), tensor.nbytes) for name, tensor in tensors.items()
    }


def test_packed_types_of_gguf():
    """Every type of ours has the block that the format's own package gives it."""
    for kind, (name, elements, size) in GGML_TYPES.items():
        theirs = GGMLQuantizationType(kind)
        assert (theirs.name, GGML_QUANT_SIZES[theirs]) == (name, (elements, size))


def test_a_header_is_read_without_the_weights(tmp_path):
    """A file of 4 GiB with nothing in it."""
    raw = b'{"w":{"dtype":"BF16","shape":[1048576,2048],"data_offsets":[0,4294967296]}}'
    file = Path(tmp_path / "model.safetensors")
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + 2**32)
    assert read_checkpoint(file).total_bytes == 2**32
