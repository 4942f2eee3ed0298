"""What a start of the engine measures, beside what a plan on fake tensors said before it."""

from __future__ import annotations

import pytest
from small_models import library_model, save

from tonnage.config import LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.engine.exact import FakeProbe
from tonnage.hardware import host_card
from tonnage.planner import find_config, plan_without_device
from tonnage.units import GiB, MiB

WIDE = {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "num_hidden_layers": 5, "vocab_size": 8000,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3"])
def test_a_start_measures_what_the_plan_says(name, tmp_path):
    """Tensors alive in every stage, to a MiB, to which starts round."""
    folder = save(library_model(name, **WIDE), tmp_path)
    limits = LimitKnobs(max_seq_len=Setting(2048), max_num_tokens=Setting(2048), max_batch_size=Setting(64))
    asked = EngineOptions(model=str(folder), memory_bytes=3 * GiB, limit_knobs=limits, fence=False)
    with start(asked) as engine:
        measured = {stage.stage: stage.allocated.bytes for stage in engine.plan.stages}
    probe = FakeProbe()
    planned = plan_without_device(
        find_config(folder), card=host_card(3 * GiB), limit_knobs=limits, dtype="float32", probe=probe
    )
    assert probe.notes == []
    told = {stage.stage: stage.allocated.bytes for stage in planned.stages}
    assert told["sampler"] > told["decode"] > 2 * MiB
    for name in ("prefill", "decode", "sampler"):
        assert measured[name] - MiB <= told[name] <= measured[name], name
