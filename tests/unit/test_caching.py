"""What a request asks of the cache: each field is checked, and a mapping of fields is as good."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

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
    ({"priority": 50.5}, r"cache priority = 50\.5: not a whole number"),
    ({"priority": "high"}, "cache priority = 'high': not a whole number"),
    ({"priority": True}, "cache priority = True: not a whole number"),
    ({"priority": 10**400}, r"cache priority = 100000000000\.\.\. \(401 digits\): out of range"),
    ({"retain_seconds": 10**400}, r"retain_seconds = 100000000000\.\.\. \(401 digits\): out of range"),
    ({"retain_seconds": Decimal(5)}, "a Decimal, and neither an int nor a float"),
    ({"retain_seconds": Fraction(5)}, "a Fraction, and neither an int nor a float"),
    ({"retain_tokens": 10**400}, "retain_tokens = 1000"),
    ({"retain_tokens": True}, "retain_tokens = True: not a whole number"),
    ({"foo": 1}, "cache = 'foo': no field of that name"),
    ({"salt": "a", 3: 1}, "cache = 3: no field of that name"),
    ({"pin": True}, "write any of reuse, salt, priority, retain_seconds, retain_tokens"),
]


@pytest.mark.parametrize(("fields", "told"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_by_name(fields, told):
    with pytest.raises(InvalidSetting, match=told):
        CacheParams.read(fields)


def test_what_is_no_mapping_is_refused():
    with pytest.raises(InvalidSetting, match="cache = a str: not a mapping") as refused:
        SamplingParams(cache="tenant-7")  # type: ignore[arg-type]
    assert "tenant" not in str(refused.value)


def test_the_ends_of_the_ranges_are_fine():
    CacheParams(salt="x" * MAX_SALT_BYTES, priority=0, retain_seconds=1e-9, retain_tokens=0, reuse=False)
    CacheParams(priority=100, retain_seconds=10**9, retain_tokens=10**9)


def test_a_mapping_is_as_good_as_the_value():
    asked = {"salt": "a", "priority": 80}
    assert SamplingParams(cache=asked).cache == CacheParams(**asked)  # type: ignore[arg-type]
    assert SamplingParams().cache == CacheParams()


def test_none_is_the_default():
    assert SamplingParams(cache=None).cache == CacheParams.read(None) == CacheParams()


@pytest.mark.parametrize(
    ("salt", "told"),
    [
        ("s3cret" * 200, "salt = 1,200 bytes: no text of a useful length"),
        ("", "salt = 0 bytes"),
        (b"s3cret", "salt = a bytes: not a text"),
        (["s3cret"], "salt = a list: not a text"),
    ],
)
def test_a_salt_is_never_told(salt, told):
    for fields in ({"salt": salt}, {"salt": salt, "priority": "s3cre"}, {"salt": "s3cret", "foo": 1}):
        with pytest.raises(InvalidSetting) as refused:
            CacheParams.read(fields)
        assert "s3cret" not in f"{refused.value} {refused.value.value} {refused.value!r}"
    with pytest.raises(InvalidSetting, match=told):
        CacheParams(salt=salt)
