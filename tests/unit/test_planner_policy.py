"""The reference policy through the planner: the same model, device and engine, another derivation."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import Knobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting
from tonnage.hardware import generic_card
from tonnage.planner import plan_without_device
from tonnage.terms import LineKind
from tonnage.units import GiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
CARD = generic_card(80 * GiB)


def by_reference(**given):
    return plan_without_device(LLAMA_8B, card=CARD, reference=ReferenceKnobs(**given))


def test_the_fraction_comes_after_the_peak_and_leaves_slack():
    made = by_reference()
    assert [step.name for step in made.steps][:1] == ["peak"]
    slack = made.bytes_of(LineKind.SLACK)
    assert slack > 0
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    assert made.kv.layout.groups[0].block_tokens == 32
    assert made.kv.tokens < plan_without_device(LLAMA_8B, card=CARD).kv.tokens


def test_its_own_knobs_move_it():
    usual = by_reference()
    assert by_reference(free_gpu_memory_fraction=Fraction(1, 2)).kv.bytes < usual.kv.bytes
    assert by_reference(max_tokens=200_000).kv.tokens == 200_000
    assert by_reference(tokens_per_block=64).kv.layout.groups[0].block_tokens == 64
    assert by_reference(kv_dtype="fp8").kv.tokens > 1.9 * usual.kv.tokens


@pytest.mark.parametrize("name", ["total_bytes", "kv_bytes", "kv_tokens", "keep_free_bytes", "block_tokens"])
def test_our_knobs_about_money_are_refused(name):
    knobs = Knobs(**{name: Setting.flag(4096, "4096", f"--{name}")})
    with pytest.raises(InvalidSetting, match=f"{name}.*knobs of its own"):
        plan_without_device(LLAMA_8B, card=CARD, knobs=knobs, reference=ReferenceKnobs())


def test_the_fingerprint_tells_policies_apart():
    made = [plan_without_device(LLAMA_8B, card=CARD), by_reference(), by_reference(max_tokens=200_000)]
    assert len({plan.fingerprint for plan in made}) == 3
