"""Weights told by files: headers, indexes, broken files, and a rank's share by the names of the tensors."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.costs.checkpoint import Checkpoint, read_checkpoint, safetensors_header
from tonnage.costs.config import ModelConfig
from tonnage.costs.price import weights_price
from tonnage.costs.stored import StoredTensor
from tonnage.costs.tensors import Component
from tonnage.costs.weights import weights_layout
from tonnage.errors import InputError, ModelNotFound
from tonnage.terms import Rank, Source

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 1000, "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIG = ModelConfig.from_dict(LLAMA, name="tiny")
NAMES = {"bfloat16": "BF16", "float32": "F32"}


def write(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]], *, metadata: bool = True) -> None:
    """A file with a header as the format has it, its data a hole."""
    header, end = {"__metadata__": {"format": "pt"}} if metadata else {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + end)


def stored(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...], int]]:
    layout = weights_layout(config)
    return {tensor.name: (NAMES[tensor.dtype], tensor.shape, tensor.num_bytes) for tensor in layout.tensors}


def test_headers_of_one_file(tmp_path):
    write(tmp_path / "model.safetensors", stored(CONFIG))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.total_bytes == sum(size for _dtype, _shape, size in stored(CONFIG).values())
    quantity = weights_price(CONFIG, checkpoint=checkpoint).quantity
    assert quantity.source == Source.COUNTED
    assert quantity.bytes == weights_price(CONFIG).quantity.bytes
    assert "headers of 1 safetensors file, 39 tensors" in quantity.ref


def test_shards_and_their_index(tmp_path):
    tensors = list(stored(CONFIG).items())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write(tmp_path / names[0], dict(tensors[:10]))
    write(tmp_path / names[1], dict(tensors[10:]))
    write(tmp_path / "other.safetensors", {"adapter": ("F32", (5,), 20)})
    weight_map = {name: names[i >= 10] for i, (name, _entry) in enumerate(tensors)}
    total = sum(entry[2] for _name, entry in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    both = read_checkpoint(tmp_path)
    assert both is not None
    assert (len(both.tensors), both.total_bytes) == (39, total)  # the index names two files, not the third
    (tmp_path / names[1]).unlink()
    alone = read_checkpoint(tmp_path)
    assert alone == Checkpoint(tensors=(), total_bytes=total, ref="model.safetensors.index.json: total_size")
    priced = weights_price(CONFIG, checkpoint=alone)
    assert (priced.quantity.bytes, priced.quantity.source) == (total, Source.COUNTED)
    assert sum(part.bytes for part in priced.parts) == total


def test_an_index_is_divided_as_the_arithmetic_is():
    checkpoint = Checkpoint(tensors=(), total_bytes=2 * weights_price(CONFIG).quantity.bytes, ref="index")
    rank = Rank(tp=2, size=2)
    told = weights_price(CONFIG, rank=rank, checkpoint=checkpoint).quantity
    assert told.bytes == 2 * weights_price(CONFIG, rank=rank).quantity.bytes
    assert told.source == Source.DERIVED


def test_one_model_file_stands_for_the_model(tmp_path):
    write(tmp_path / "model.safetensors", stored(CONFIG))
    write(tmp_path / "consolidated.safetensors", stored(CONFIG))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    assert len(checkpoint.tensors) == 39


def test_what_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "model-00001-of-00001.safetensors").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_nothing_there(tmp_path):
    assert read_checkpoint(tmp_path) is None
    with pytest.raises(ModelNotFound, match="no such"):
        read_checkpoint(tmp_path / "absent")


def checkpoint_of(config: ModelConfig, extra: dict[str, tuple[str, tuple[int, ...], int]] | None = None) -> Checkpoint:
    entries = {**stored(config), **(extra or {})}
    tensors = tuple(StoredTensor(name=n, dtype=d, shape=s, num_bytes=b) for n, (d, s, b) in entries.items())
    return Checkpoint(tensors=tensors, total_bytes=sum(t.num_bytes for t in tensors), ref="test")


@pytest.mark.parametrize(
    "rank",
    [Rank(tp=2, size=2), Rank(tp=4, size=4, index=3), Rank(pp=2, size=2, index=1), Rank(tp=2, pp=2, size=4)],
)
def test_a_rank_by_names_is_a_rank_by_arithmetic(rank):
    told = weights_price(CONFIG, rank=rank, checkpoint=checkpoint_of(CONFIG))
    computed = weights_price(CONFIG, rank=rank)
    assert told.parts == computed.parts
    assert told.quantity.source == Source.DERIVED


def test_a_tied_head_is_listed_once_and_tables_no_engine_loads_not_at_all():
    tied = ModelConfig.from_dict({**LLAMA, "tie_word_embeddings": True}, name="tied")
    extra = {
        "lm_head.weight": ("BF16", (1000, 64), 128_000),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (4,), 16),
    }
    told = weights_price(tied, checkpoint=checkpoint_of(tied, extra))
    assert told.parts == weights_price(tied).parts


def test_a_file_in_another_dtype_is_priced_at_the_one_asked_for():
    wide = ModelConfig.from_dict({**LLAMA, "torch_dtype": "float32"}, name="wide")
    checkpoint = checkpoint_of(wide)
    assert weights_price(wide, dtype="bf16", checkpoint=checkpoint).parts == weights_price(CONFIG).parts
    assert weights_price(wide, checkpoint=checkpoint).quantity.bytes == checkpoint.total_bytes


def test_kinds_are_told_by_name():
    mixture = ModelConfig.from_dict(
        {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        name="mixture",
    )
    names = {
        "model.embed_tokens.weight": Component.EMBEDDINGS,
        "lm_head.weight": Component.HEAD,
        "model.norm.weight": Component.NORMS,
        "model.layers.0.self_attn.q_norm.weight": Component.NORMS,
        "model.layers.0.self_attn.q_proj.qweight": Component.ATTENTION,
        "model.layers.0.mlp.gate.weight": Component.ROUTER,
        "model.layers.0.mlp.experts.3.up_proj.weight": Component.EXPERTS,
        "model.layers.0.mlp.experts.gate_up_proj_blocks": Component.EXPERTS,
        "model.layers.0.mlp.shared_expert.up_proj.weight": Component.SHARED_EXPERTS,
        "model.layers.0.linear_attn.in_proj_qkvz.weight": Component.RECURRENT,
        "model.layers.0.mlp.gate_proj.weight": Component.FEED_FORWARD,
        "visual.blocks.3.attn.qkv.weight": Component.TOWERS,
        "model.layers.4.eh_proj.weight": Component.MTP,
        "blk.1.attn_q.weight": Component.ATTENTION,
        "blk.1.ffn_gate_exps.weight": Component.EXPERTS,
        "token_embd.weight": Component.EMBEDDINGS,
        "output.weight": Component.HEAD,
        "output_norm.weight": Component.NORMS,
    }
    for name, component in names.items():
        tensor = StoredTensor(name=name, dtype="BF16", shape=(64, 64), num_bytes=8192)
        checkpoint = Checkpoint(tensors=(tensor,), total_bytes=8192, ref="one")
        told = weights_price(mixture, checkpoint=checkpoint, with_mtp=True)
        assert {part.component: part.bytes for part in told.parts if part.bytes} == {component: 8192}, name


BROKEN = [
    (b"", "claims a header of 0 bytes"),
    (b"\x05", "claims a header"),
    (struct.pack("<Q", 2**40) + b"{}", "claims a header of 1,099,511,627,776 bytes"),
    (struct.pack("<Q", 10) + b"{}", "claims a header of 10 bytes in a file of 10"),
    (struct.pack("<Q", 2) + b"{[", "no JSON"),
    (struct.pack("<Q", 2) + b"[]", "no JSON object"),
]


@pytest.mark.parametrize(("content", "told"), BROKEN)
def test_broken_files_are_refused_by_name(tmp_path, content, told):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=told) as caught:
        read_checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        None, 3, {}, {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [2]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [False, 8]},
        {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}, {"dtype": "F32", "shape": [2], "data_offsets": [0]},
    ],
)  # fmt: skip
def test_entries_that_do_not_add_up(tmp_path, entry):
    raw = json.dumps({"weight": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(InputError, match="'weight' does not add up"):
        safetensors_header(file)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}, "metadata": {"total_size": "x"}}',
        '{"weight_map": {}, "metadata": {"total_size": -5}}', '{"weight_map": {}, "metadata": {"total_size": true}}',
    ],
)  # fmt: skip
def test_broken_indexes(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match="no index"):
        read_checkpoint(tmp_path)


def test_the_same_tensor_in_two_files(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path / name, {"weight": ("F32", (2,), 8)})
    with pytest.raises(InputError, match="another file too"):
        read_checkpoint(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_a_refusal(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("any")
    for name in ("model.safetensors", "model.gguf"):
        file = folder / name
        file.write_bytes(b"GGUF" + content if name.endswith("gguf") else content)
        with contextlib.suppress(InputError):
            read_checkpoint(file)


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf(tensors: list[tuple[str, tuple[int, ...], int]], *, version: int = 3) -> bytes:
    pairs = (
        text("general.name") + struct.pack("<I", 8) + text("tiny")
        + text("general.count") + struct.pack("<II", 4, 7)
        + text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
        + text("scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8)
    )  # fmt: skip
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 4) + pairs
    for name, dims, kind in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        out += struct.pack("<IQ", kind, 0)
    return out


def test_a_gguf_header(tmp_path):
    tensors = [
        ("token_embd.weight", (64, 1000), 1),
        ("blk.0.attn_q.weight", (256, 64), 12),
        ("output.weight", (64, 32), 8),
    ]
    (tmp_path / "model.gguf").write_bytes(gguf(tensors))
    found = read_checkpoint(tmp_path)
    assert found is not None
    assert [t.num_bytes for t in found.tensors] == [128_000, 64 * 144, 64 * 34]
    assert found.tensors[0].shape == (1000, 64)
    assert found.ref == "header of model.gguf"
    (tmp_path / "second.gguf").write_bytes(gguf(tensors))
    with pytest.raises(InputError, match="2 GGUF models: model, second"):
        read_checkpoint(tmp_path)
    assert read_checkpoint(tmp_path / "second.gguf") is not None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"GGML", "does not start like"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
        (gguf([("w", (3, 3), 12)]), "9 elements, no multiple of 256"),
        (gguf([("w", (3, 3), 99)]), "of type 99"),
        (gguf([("w", (3, 3), 0)])[:-9], "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 100) + b"cut", "ends inside"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**50, 0), "counts 1,125,899,906,842,624"),
    ],
)
def test_broken_gguf_files(tmp_path, content, told):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(InputError, match=told):
        read_checkpoint(tmp_path)
