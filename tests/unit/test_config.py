"""Settings remember what was typed; knobs are frozen and listed in order."""

from __future__ import annotations

import dataclasses

import pytest

from tonnage.config import Knobs, LimitKnobs, Origin, Setting


def test_an_unset_setting_takes_the_default():
    assert not Setting().is_set
    assert Setting().or_else(7) == 7
    assert Setting().origin == Origin.DEFAULT


def test_zero_is_set():
    setting = Setting.flag(0, "0", "--keep-free-bytes")
    assert setting.is_set
    assert setting.or_else(7) == 0
    assert (setting.text, setting.origin, setting.where) == ("0", Origin.FLAG, "--keep-free-bytes")


def test_knobs_are_listed_without_the_disabled_claims():
    names = [name for name, _ in Knobs().items()]
    assert names[:4] == ["total_bytes", "keep_free_bytes", "kv_bytes", "kv_tokens"]
    assert "disabled_claims" not in names
    assert not any(setting.is_set for _, setting in Knobs().items())


@pytest.mark.parametrize("made", [Knobs(), LimitKnobs(), Setting()])
def test_configuration_is_frozen(made):
    field = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field, None)
