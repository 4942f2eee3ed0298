"""A GGUF file in place of a config.json: its own metadata become the model's shape."""

from __future__ import annotations

import json
import struct

import pytest

from tonnage.costs.checkpoint import read_checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.models import find_config
from tonnage.costs.price import weights_price
from tonnage.errors import InputError, ModelConfigError, ModelNotFound, UnsupportedModel
from tonnage.terms import Source

LLAMA = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a"] * 1000,
    "tokenizer.ggml.scores": [0.5] * 1000,
    "tokenizer.ggml.add_bos_token": True,
}
F32, F16, Q4_K, Q6_K = 0, 1, 12, 14
BLOCK = [
    ("attn_q", (256, 256), Q4_K), ("attn_k", (256, 64), Q4_K), ("attn_v", (256, 64), Q6_K),
    ("attn_output", (256, 256), Q4_K), ("ffn_gate", (256, 512), Q4_K), ("ffn_up", (256, 512), Q4_K),
    ("ffn_down", (512, 256), Q6_K), ("attn_norm", (256,), F32), ("ffn_norm", (256,), F32),
]  # fmt: skip
TENSORS = [
    ("token_embd.weight", (256, 1000), Q4_K),
    *((f"blk.{i}.{name}.weight", dims, kind) for i in range(2) for name, dims, kind in BLOCK),
    ("output_norm.weight", (256,), F32),
]
HEAD = ("output.weight", (256, 1000), Q6_K)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item) -> bytes:
    """Type number and bytes, as the format has them."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    inner = [value(each) for each in item]
    return struct.pack("<I", 9) + inner[0][:4] + struct.pack("<Q", len(inner)) + b"".join(each[4:] for each in inner)


def gguf(metadata, tensors) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    out += b"".join(text(key) + value(item) for key, item in metadata.items())
    for name, dims, kind in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        out += struct.pack("<IQ", kind, 0)
    return out


def write(folder, metadata=LLAMA, tensors=(*TENSORS, HEAD), name="tiny-q4.gguf"):
    file = folder / name
    file.write_bytes(gguf(metadata, tensors))
    return file


def test_metadata_become_the_shape(tmp_path):
    config = ModelConfig.read(write(tmp_path))
    assert (config.name, config.model_type, config.num_layers, config.hidden_size) == ("tiny-q4", "llama", 2, 256)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (8, 2, 32, 512)
    assert (config.vocab_size, config.max_position_embeddings, config.dtype) == (1000, 4096, "float16")
    assert config.quantisation is not None
    assert config.quantisation.format == "gguf"
    assert config.tie_word_embeddings is False
    assert ModelConfig.read(tmp_path) == config == find_config(str(tmp_path))


def test_its_weights_are_those_of_the_header(tmp_path):
    """Norms are held in the dtype asked for; everything else as it is stored."""
    config = find_config(str(write(tmp_path)))
    counted = weights_price(config, checkpoint=read_checkpoint(tmp_path)).quantity
    matrices = 2 * (2 * 65536 + 16384 + 2 * 131072) * 144 // 256 + 2 * (16384 + 131072) * 210 // 256
    ends = 256_000 * (144 + 210) // 256
    assert counted.bytes == matrices + ends + 5 * 256 * 2
    assert counted.source == Source.COUNTED
    predicted = weights_price(config).quantity
    assert predicted.low < counted.bytes < predicted.high


def test_no_output_matrix_means_tied(tmp_path):
    assert ModelConfig.read(write(tmp_path, tensors=TENSORS)).tie_word_embeddings is True


def test_a_file_that_packs_nothing_is_a_plain_model(tmp_path):
    wide = [(name, dims, F16) for name, dims, _ in (*TENSORS, HEAD)]
    config = ModelConfig.read(write(tmp_path, tensors=wide))
    assert (config.quantisation, config.unsupported, config.dtype) == (None, (), "float16")


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [({"llama.expert_count": 8, "llama.expert_used_count": 2}, "mixtral"), ({"llama.vocab_size": 1200}, "llama")],
)
def test_keys_that_few_files_have(tmp_path, changes, model_type):
    config = ModelConfig.read(write(tmp_path, {**LLAMA, **changes}))
    assert config.model_type == model_type
    assert config.vocab_size == changes.get("llama.vocab_size", 1000)


def test_parts_of_one_model(tmp_path):
    write(tmp_path, name="m-00001-of-00002.gguf", tensors=TENSORS)
    second = write(tmp_path, {"split.no": 1}, [HEAD], name="m-00002-of-00002.gguf")
    assert ModelConfig.read(tmp_path).tie_word_embeddings is False
    assert read_checkpoint(second).total_bytes == read_checkpoint(tmp_path).total_bytes
    with pytest.raises(UnsupportedModel, match=r"need the config\.json"):
        ModelConfig.read(second)


def test_several_models_must_be_told_apart(tmp_path):
    write(tmp_path)
    other = write(tmp_path, name="other.gguf")
    with pytest.raises(InputError, match="2 GGUF models: other, tiny-q4"):
        ModelConfig.read(tmp_path)
    assert find_config(str(other)).name == "other"


def test_a_config_beside_it_wins(tmp_path):
    write(tmp_path)
    shape = {"model_type": "llama", "num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 8,
             "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert ModelConfig.read(tmp_path).num_layers == 7


@pytest.mark.parametrize(
    ("metadata", "error", "told"),
    [
        ({"general.architecture": "rwkv9"}, UnsupportedModel, r"plans need the config\.json.*'rwkv9'"),
        ({}, UnsupportedModel, "'missing'"),
        ({"general.architecture": "llama"}, ModelConfigError, r"llama\.block_count is missing"),
        ({"general.architecture": "llama", "llama.block_count": 2}, ModelConfigError, "hidden_size is missing"),
    ],
)
def test_what_metadata_do_not_tell(tmp_path, metadata, error, told):
    with pytest.raises(error, match=told):
        ModelConfig.read(write(tmp_path, metadata))


def test_files_that_are_no_gguf(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"{}")
    with pytest.raises(InputError, match="does not start like a GGUF file"):
        find_config(str(tmp_path / "a.gguf"))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelConfigError, match=r"holds weights, and plans need the config\.json"):
        find_config(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelNotFound):
        find_config(str(tmp_path / "b.gguf"))
