"""What a request asks of the cache: each field is checked, and a mapping of fields is as good."""

from __future__ import annotations

import pytest

from tonnage.caching import MAX_SALT_BYTES, CacheParams
from tonnage.errors import InvalidSetting
from tonnage.sampling import SamplingParams

BAD = [
    ({"reuse": 1}, "reuse = 1: neither True nor False"),
    ({"salt": ""}, "salt"),
    ({"salt": 7}, "salt"),
    ({"salt": "x" * (MAX_SALT_BYTES + 1)}, "salt"),
    ({"salt": "\u00e9" * (MAX_SALT_BYTES // 2 + 1)}, "salt"),  # bytes count, not characters
    ({"priority": -1}, "cache priority = -1: out of range"),
    ({"priority": 101}, "cache priority"),
    ({"priority": True}, "cache priority"),
    ({"priority": 3.0}, "cache priority"),
    ({"retain_seconds": 0}, "retain_seconds = 0"),
    ({"retain_seconds": float("inf")}, "retain_seconds"),
    ({"retain_seconds": float("nan")}, "retain_seconds"),
    ({"retain_seconds": True}, "retain_seconds"),
    ({"retain_tokens": -1}, "retain_tokens"),
    ({"retain_tokens": 1.5}, "retain_tokens"),
    ({"pin": True}, "write any of reuse, salt, priority, retain_seconds, retain_tokens"),
]


@pytest.mark.parametrize(("fields", "told"), BAD, ids=str)
def test_what_cannot_be_is_refused_by_name(fields, told):
    with pytest.raises(InvalidSetting, match=told):
        CacheParams.read(fields)


def test_what_is_no_mapping_is_refused():
    with pytest.raises(InvalidSetting, match="cache = 'salt'"):
        SamplingParams(cache="salt")  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_fine():
    CacheParams(salt="x" * MAX_SALT_BYTES, priority=0, retain_seconds=1e-9, retain_tokens=0, reuse=False)
    CacheParams(priority=100, retain_seconds=10**9, retain_tokens=10**9)


def test_a_mapping_is_as_good_as_the_value():
    asked = {"salt": "a", "priority": 80}
    assert SamplingParams(cache=asked).cache == CacheParams(**asked)  # type: ignore[arg-type]
    assert SamplingParams().cache == CacheParams()
