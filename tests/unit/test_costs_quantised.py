"""Bytes of packed matrices, worked by hand from the shapes that each format stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Quantisation
from tonnage.costs.price import weights_price
from tonnage.costs.quantised import Packing, Span
from tonnage.costs.tensors import Component
from tonnage.errors import UnsupportedModel

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
ROWS, COLUMNS = 14_336, 4096
ELEMENTS = ROWS * COLUMNS


def packing(method: str, form: str, size: int | None = None, **options: object) -> Packing:
    kept = tuple(options.pop("kept", ()))  # type: ignore[call-overload]
    raw = {**dict(LLAMA_8B.raw), "quantization_config": {"quant_method": method, **options}}
    scheme = Quantisation(method=method, format=form, group_size=size, kept=kept)
    found = Packing.of(replace(LLAMA_8B, quantisation=scheme, raw=raw))
    assert found is not None
    return found


ASYMMETRIC = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": False}}}}
#: (packing, bytes): each sum names the stored tensors in order.
BY_HAND = [
    # weight, weight_scale_inv [112, 32] float32
    (packing("fp8", "fp8", 128), ELEMENTS + 112 * 32 * 4),
    # weight, weight_scale and input_scale, one float32 each
    (packing("fp8", "fp8"), ELEMENTS + 2 * 4),
    # weight, weight_scale [rows, 1] float32
    (packing("compressed-tensors", "fp8"), ELEMENTS + ROWS * 4),
    (packing("compressed-tensors", "int8"), ELEMENTS + ROWS * 4),
    # weight, weight_scale [rows, 32] of 16 bits, or [rows, 128] of one byte
    (packing("compressed-tensors", "fp8", 128), ELEMENTS + ROWS * 32 * 2),
    (packing("compressed-tensors", "fp8", 32), ELEMENTS + ROWS * 128),
    # weight, SCB [rows] float32
    (packing("bitsandbytes", "int8"), ELEMENTS + ROWS * 4),
    # qweight [columns, rows / 8] int32, scales [32, rows] float16, qzeros [32, rows / 8] int32
    (packing("awq", "int4", 128), ELEMENTS // 8 * 4 + 32 * ROWS * 2 + 32 * ROWS // 8 * 4),
    # the same, and g_idx [columns] int32
    (packing("gptq", "int4", 128), ELEMENTS // 8 * 4 + 32 * ROWS * 2 + 32 * ROWS // 8 * 4 + COLUMNS * 4),
    (packing("gptq", "int4", -1), ELEMENTS // 8 * 4 + ROWS * 2 + ROWS // 8 * 4 + COLUMNS * 4),
    # qweight [columns / 4, rows] int32, scales [32, rows] float16, qzeros [32, rows / 4] int32, g_idx
    (packing("gptq", "int8", 128), ELEMENTS // 4 * 4 + 32 * ROWS * 2 + 32 * ROWS // 4 * 4 + COLUMNS * 4),
    # weight_packed int32, weight_scale [rows, 32] of 16 bits; asymmetric: weight_zero_point packed too
    (packing("compressed-tensors", "int4", 128), ELEMENTS // 2 + ROWS * 32 * 2),
    (packing("compressed-tensors", "int4", 128, **ASYMMETRIC), ELEMENTS // 2 + ROWS * 32 * 2 + ROWS * 32 // 2),
    # weight, absmax [elements / 64] float32
    (packing("bitsandbytes", "nf4", 64), ELEMENTS // 2 + ELEMENTS // 64 * 4),
    # weight, absmax of one byte, nested absmax [elements / 64 / 256] float32
    (
        packing("bitsandbytes", "nf4", 64, bnb_4bit_use_double_quant=True),
        ELEMENTS // 2 + ELEMENTS // 64 + ELEMENTS // 16_384 * 4,
    ),
    # weight, weight_scale [rows, columns / 16] fp8, weight_scale_2, input_scale
    (packing("modelopt", "nvfp4", 16), ELEMENTS // 2 + ELEMENTS // 16 + 8),
    # blocks [rows, columns / 32, 16], scales [rows, columns / 32]
    (packing("mxfp4", "mxfp4", 32), ELEMENTS // 32 * 17),
]


@pytest.mark.parametrize(("packed", "num_bytes"), BY_HAND, ids=lambda value: str(value)[:40])
def test_by_hand(packed, num_bytes):
    span = packed.span(ROWS, COLUMNS)
    assert span.bytes == num_bytes
    assert span.low <= span.bytes <= span.high


def test_what_a_format_leaves_open_is_the_bar():
    static = packing("fp8", "fp8").span(ROWS, COLUMNS)
    assert (static.low, static.high) == (ELEMENTS + 4, ELEMENTS + ROWS * 4 + 8)
    ordered = packing("gptq", "int4", 128).span(ROWS, COLUMNS)
    assert ordered.bytes - ordered.low == COLUMNS * 4  # engines drop the index of groups
    odd = packing("modelopt", "nvfp4", 16).span(100, 80)
    assert (odd.bytes, odd.high) == (4000 + 500 + 8, 4000 + 128 * 8 + 8)
    experts = packing("mxfp4", "mxfp4", 32).span(2880, 2880)
    assert experts.high == 3072 * 3072 // 32 * 17


SIZES = st.integers(1, 600)


@given(SIZES, SIZES, st.sampled_from([packed for packed, _bytes in BY_HAND]))
def test_never_less_than_the_elements_nor_out_of_order(rows, columns, packed):
    bits = 8 if packed.scheme.format in ("fp8", "int8") else 4
    span = packed.span(rows, columns)
    assert rows * columns * bits // 8 <= span.low <= span.bytes <= span.high
    more = packed.span(rows + 1, columns)
    assert more.bytes >= span.bytes


KEPT = [
    (("lm_head",), "lm_head", True),
    (("lm_head",), "model.layers.0.mlp.down_proj", False),
    (("gate",), "model.layers.3.mlp.gate", True),
    (("gate",), "model.layers.3.mlp.gate_proj", False),
    (("model.layers.0.mlp.gate",), "model.layers.0.mlp.gate", True),
    (("model.layers.0.mlp.gate",), "model.layers.10.mlp.gate", False),
    (("model.layers.*.self_attn",), "model.layers.7.self_attn.q_proj", True),
    (("model.layers.*.self_attn",), "model.layers.7.mlp.down_proj", False),
    (("*mlp.gate",), "model.layers.7.mlp.gate", True),
    (("re:.*self_attn.*",), "model.layers.7.self_attn.q_proj", True),
    (("re:.*gate$",), "model.layers.7.mlp.gate_proj", False),
    (("visual",), "visual.blocks.0.attn.qkv", True),
    (("mlp.experts",), "model.layers.1.mlp.experts.up_proj", True),
]


@pytest.mark.parametrize(("kept", "module", "wide"), KEPT)
def test_exceptions_by_name(kept, module, wide):
    assert packing("fp8", "fp8", 128, kept=kept).keeps(module) is wide


def quantised(method: str, form: str, size: int | None = None, kept: tuple[str, ...] = ()) -> ModelConfig:
    return replace(LLAMA_8B, quantisation=Quantisation(method=method, format=form, group_size=size, kept=kept))


def test_tables_norms_and_the_head_stay_wide():
    wide, packed = weights_price(LLAMA_8B), weights_price(quantised("fp8", "fp8", 128))
    for component in (Component.EMBEDDINGS, Component.HEAD, Component.NORMS):
        assert packed.bytes_of(component) == wide.bytes_of(component)
    linear = 1_342_177_280 + 5_637_144_576
    scales = linear // 128**2 * 4
    assert packed.bytes_of(Component.ATTENTION) + packed.bytes_of(Component.FEED_FORWARD) == linear + scales


def test_a_kept_layer_stays_wide_alone():
    packed = weights_price(quantised("fp8", "fp8"))
    one = weights_price(quantised("fp8", "fp8", kept=("model.layers.31.mlp.down_proj",)))
    assert one.quantity.bytes - packed.quantity.bytes == ELEMENTS * 2 - (ELEMENTS + 8)
    whole = weights_price(quantised("fp8", "fp8", kept=("self_attn",)))
    assert whole.bytes_of(Component.ATTENTION) == weights_price(LLAMA_8B).bytes_of(Component.ATTENTION)


def test_a_head_is_packed_where_the_file_says_so():
    raw = {**dict(LLAMA_8B.raw), "quantization_config": {"quant_method": "gptq", "lm_head": True}}
    config = replace(quantised("gptq", "int4", 128), raw=raw)
    table = 128_256 * 4096
    assert weights_price(config).bytes_of(Component.HEAD) < table
    assert weights_price(quantised("gptq", "int4", 128)).bytes_of(Component.HEAD) == 2 * table


def test_spans_add():
    span = Span(bytes=3, low=2, high=5)
    assert span + Span.exact(1) == Span(bytes=4, low=3, high=6)
    assert span.times(2) == Span(bytes=6, low=4, high=10)


def test_a_format_without_a_formula_is_refused():
    with pytest.raises(UnsupportedModel, match="'int3' have no price"):
        weights_price(quantised("gptq", "int3", 128))
