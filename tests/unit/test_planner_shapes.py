"""Every published shape has a plan or a refusal that can be followed; monotone in what is allowed."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
import shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit
from tonnage.hardware import card_for, generic_card
from tonnage.planner import plan_without_device
from tonnage.report import plan_text
from tonnage.report.plan_json import parse_plan
from tonnage.terms import Lifetime, LineKind, MemoryPlan
from tonnage.units import GiB, TiB, parse_bytes

KINDS = (
    "llama-3.1-8b", "gemma-3-27b", "qwen3.6-27b", "deepseek-v3", "gpt-oss-120b", "nemotron-3-nano-30b",
    "kimi-linear-48b",
)  # fmt: skip


def limits(**asked) -> LimitKnobs:
    return LimitKnobs(**{name: Setting(value) for name, value in asked.items()})


def checked(made: MemoryPlan) -> MemoryPlan:
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    assert all(line.bytes >= 0 and line.low <= line.bytes <= line.high for line in made.lines)
    for line in made.lines:
        if line.children and line.lifetime is not Lifetime.STEP:
            assert sum(child.bytes for child in line.children) == line.bytes, line.name
    for before, after in zip(made.steps, made.steps[1:], strict=False):
        assert before.after == after.before
    return made


@pytest.mark.parametrize("key", shapes.complete())
def test_every_shape_has_a_plan_that_survives_its_file(key):
    made = checked(
        plan_without_device(shapes.config(key), card=generic_card(8 * TiB), limit_knobs=limits(max_batch_size=16))
    )
    assert parse_plan(plan_text(made), file="plan.json").plan == made
    assert made.kv.tokens >= made.limits.max_seq_len
    assert made.kv.num_slabs * made.kv.layout.slab_bytes == made.kv.bytes
    padding = sum(line.bytes for line in made.lines if line.name == "padding")
    assert made.kv.bytes == made.bytes_of(LineKind.KV) + padding


def test_a_70b_in_fp8_on_80_gb_is_refused_with_its_sum_and_the_remedies_work():
    raw = {
        **shapes.raw_config("llama-3.1-70b"),
        "max_position_embeddings": 131_072,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }
    config = ModelConfig.from_dict(raw, name="llama-70b-fp8")
    card, shape = card_for("H100", None), limits(max_seq_len=131_072)
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(config, card=card, limit_knobs=shape)
    error = caught.value
    # 70.6 thousand million bytes of weights and one sequence of 131,072 tokens at 327,680 bytes each
    assert "one sequence of 131,072 tokens 40 GiB" in str(error)
    assert error.need_bytes > 65 * GiB + 40 * GiB
    assert error.remedies
    shorter = re.search(r"lower max_seq_len to (\d+)", str(error))
    larger = re.search(r"a device of at least (\d+[MG]iB)", str(error))
    assert shorter
    assert larger
    checked(plan_without_device(config, card=card, limit_knobs=limits(max_seq_len=int(shorter[1]))))
    checked(plan_without_device(config, card=card.with_total(parse_bytes(larger[1], knob="memory")), limit_knobs=shape))


@pytest.mark.parametrize("key", KINDS)
@given(data=st.data())
@settings(max_examples=12)
def test_more_allowed_is_never_fewer_tokens(key, data):
    """In total_bytes, kv_bytes, kv_tokens and the fraction, for every kind of cache."""
    config, card, shape = shapes.config(key), generic_card(4 * TiB), limits(max_batch_size=8, max_seq_len=4096)
    name = data.draw(st.sampled_from(["total_bytes", "kv_bytes", "kv_tokens", "kv_fraction"]))
    low, high = sorted(data.draw(st.tuples(st.integers(1, 1000), st.integers(1, 1000))))
    whole = {"total_bytes": 4 * TiB, "kv_bytes": TiB, "kv_tokens": 40_000, "kv_fraction": Fraction(1)}[name]

    def tokens(thousandths: int) -> int:
        value = whole * thousandths / 1000 if name == "kv_fraction" else whole * thousandths // 1000
        try:
            return plan_without_device(
                config, card=card, knobs=Knobs(**{name: Setting(value)}), limit_knobs=shape
            ).kv.tokens
        except DoesNotFit:
            return 0

    assert tokens(low) <= tokens(high)


@pytest.mark.parametrize("key", ["gemma-3-27b", "gemma-2-9b", "gpt-oss-120b", "llama-4-scout"])
def test_a_window_model_holds_no_fewer_tokens_than_with_full_attention(key):
    """The same layers with every window opened cost at least as much, but for what shared slabs waste."""
    config = shapes.config(key)
    full = replace(config, layers=tuple(_opened(layer) for layer in config.layers))
    card, shape = generic_card(2 * TiB), limits(max_batch_size=4, max_seq_len=8192)
    windows = plan_without_device(config, card=card, limit_knobs=shape, knobs=Knobs(kv_bytes=Setting(40 * GiB)))
    opened = plan_without_device(full, card=card, limit_knobs=shape, knobs=Knobs(kv_bytes=Setting(40 * GiB)))
    unit = windows.kv.tokens and max(group.block_tokens for group in windows.kv.layout.groups)
    assert windows.kv.tokens + unit >= opened.kv.tokens


def _opened(layer):
    return replace(layer, mixer=replace(layer.mixer, window=None))
