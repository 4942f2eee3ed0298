"""What a caller asks of the engine is checked before anything is read: every field, by name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tonnage.engine import EngineOptions
from tonnage.engine.settings import engine_options
from tonnage.errors import InvalidSetting

#: For each field, values that are none of its type; a bool is no number, and 0 no bool.
WRONG = {
    "model": [None, 3, b"m"],
    "device": [None, 0],
    "memory_bytes": ["4GiB", 1.5, True, 0],
    "knobs": [None, {}, "kv"],
    "limit_knobs": [None, {}],
    "dtype": [16, b"float32"],
    "attention": [None, 1],
    "chunk_tokens": [1.5, True, []],
    "fence": [None, 1, "yes"],
    "random_weights": [None, 1, "yes"],
    "compile": [None, 0, "no"],
    "scratch_head_bytes": [None, -1, 0.5, True],
    "transfer_slice_s": [None, 0, -1, "1"],
    "reference": ["trtllm", {}, 1],
    "plan_file": [3, True, b"plan"],
    "static_pool": [None, 1],
    "torch_segments": [None, 1],
    "watch_interval_s": [-1, "1", True, 3600],
}


def test_every_field_is_here():
    assert WRONG.keys() == {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_refused_by_name(name, value):
    with pytest.raises(InvalidSetting) as refused:
        EngineOptions(**{"model": "m", name: value})
    assert refused.value.knob == name
    assert refused.value.remedy
    assert "\n" not in str(refused.value)


def test_a_card_is_watched_and_the_host_is_not():
    assert EngineOptions(model="m").watch_s == 0
    assert EngineOptions(model="m", device="cuda:1").watch_s == 0.1
    assert EngineOptions(model="m", device="cuda", watch_interval_s=0).watch_s == 0
    assert EngineOptions(model="m", watch_interval_s=2).watch_s == 2


def test_a_plan_file_comes_through_from_python(tmp_path):
    assert engine_options("m", {"plan_file": tmp_path / "p"}).plan_file == tmp_path / "p"
    with pytest.raises(InvalidSetting, match="plan_file"):
        engine_options("m", {"plan_file": 3})
