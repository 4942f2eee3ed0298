"""Settings remember what was typed; knobs are frozen and listed in order."""

from __future__ import annotations

import dataclasses

import pytest

from tonnage.config import Knobs, LimitKnobs, Origin, Setting
from tonnage.errors import InvalidSetting


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


@pytest.mark.parametrize("kind", [Knobs, LimitKnobs])
@pytest.mark.parametrize("value", [40 * 2**20, "40MiB", None, False], ids=repr)
def test_a_plain_value_is_refused_with_what_to_write_instead(kind, value):
    for field in dataclasses.fields(kind):
        with pytest.raises(InvalidSetting, match=f"^{field.name} = ") as refused:
            kind(**{field.name: value})
        if field.name != "disabled_claims":
            assert f"{field.name}=Setting(value)" in str(refused.value)
            assert "tonnage.engine.settings.engine_options" in str(refused.value)


def test_names_of_claims_are_not_taken_apart_into_letters():
    with pytest.raises(InvalidSetting, match="disabled_claims = 'penalty tables': not a frozenset"):
        Knobs(disabled_claims="penalty tables")
