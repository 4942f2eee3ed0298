"""The cache's layout and its price a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import KV_DTYPES, parse_dtype
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.costs.models import find_config
from tonnage.errors import InvalidSetting
from tonnage.layout import KVGroupKind, KVOrder
from tonnage.terms import Rank

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")


def dense(layers, kv_heads, *, heads=64, head_dim=128):
    raw = {
        **dict(LLAMA_8B.raw),
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": head_dim,
    }
    return ModelConfig.from_dict(raw)


def test_one_group_one_part():
    layout = kv_layout(LLAMA_8B)
    (group,) = layout.groups
    (part,) = group.parts
    assert (layout.order, group.kind, group.window) == (KVOrder.BLOCK_MAJOR, KVGroupKind.FULL, None)
    assert group.layers == tuple(range(32))
    assert (part.name, part.dtype, part.shape, part.offset_bytes) == ("kv", "bfloat16", (32, 2, 16, 8, 128), 0)
    assert layout.slab_bytes == group.block_bytes == part.num_bytes == 2 * 2**20


@pytest.mark.parametrize(
    ("config", "kv_dtype", "rank", "num_bytes"),
    [
        (LLAMA_8B, None, Rank(), 131_072),
        (LLAMA_8B, "fp8", Rank(), 65_536),
        (find_config("smollm2"), None, Rank(), 46_080),
        (dense(80, 8), None, Rank(size=8, tp=8), 40_960),
        (dense(80, 8), None, Rank(size=8, tp=8, attention_dp=True), 327_680),
        (dense(80, 8), None, Rank(size=4, pp=4), 81_920),
        (dense(48, 4), None, Rank(size=8, tp=8), 24_576),
    ],
)
def test_bytes_per_token_of_one_rank(config, kv_dtype, rank, num_bytes):
    """The last row: fewer heads than ranks, so each rank keeps a whole head, twice the even share."""
    assert bytes_per_token(kv_layout(config, kv_dtype=kv_dtype, rank=rank)) == num_bytes


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 64])
def test_any_block_size(block_tokens):
    layout = kv_layout(LLAMA_8B, block_tokens=block_tokens)
    assert layout.slab_bytes == 131_072 * block_tokens


@pytest.mark.parametrize("block_tokens", [0, -16, True, 10**6])
def test_no_block_size(block_tokens):
    with pytest.raises(InvalidSetting, match="block_tokens"):
        kv_layout(LLAMA_8B, block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp8", "float8_e4m3fn"),
        ("BF16", "bfloat16"),
        ("torch.float16", "float16"),
        ("fp32", "float32"),
        ("half", "float16"),
    ],
)
def test_names_of_dtypes(text, name):
    assert parse_dtype(text, knob="kv_dtype") == name


@pytest.mark.parametrize("text", ["int4", "", "auto", "float64"])
def test_unknown_dtypes_list_the_known(text):
    with pytest.raises(InvalidSetting) as caught:
        kv_layout(LLAMA_8B, kv_dtype=text or "?")
    assert all(name in str(caught.value) for name in KV_DTYPES)
