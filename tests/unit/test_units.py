"""Sizes, counts and shares: exact, and refused with the knob's name when they cannot be read."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import InvalidSetting
from tonnage.units import (
    GiB,
    MiB,
    ceil_div,
    format_bytes,
    parse_bytes,
    parse_count,
    parse_fraction,
    round_down,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 85_899_345_920),
        ("1.5 GiB", 1_610_612_736),
        ("64gb", 64 * 10**9),
        ("1_000", 1000),
        ("1500MiB", 1500 * MiB),
        (7, 7),
        ("0.5KiB", 512),
        (" 2e3 ", 2000),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text, knob="total_bytes") == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "12 parsecs", "nan", "inf", "-1GiB", "0", "0.3B", "1GiBB", True, "1,5GiB", "0x10"]
)
def test_no_sizes(text):
    with pytest.raises(InvalidSetting) as caught:
        parse_bytes(text, knob="kv_bytes")
    assert caught.value.knob == "kv_bytes"
    assert "kv_bytes" in str(caught.value)


def test_zero_where_it_means_something():
    assert parse_bytes("0", knob="keep_free_bytes", allow_zero=True) == 0


@pytest.mark.parametrize(("text", "count"), [("8192", 8192), ("8,192", 8192), ("8k", 8000), ("8Ki", 8192), (5, 5)])
def test_counts(text, count):
    assert parse_count(text, knob="max_seq_len") == count


@pytest.mark.parametrize("text", ["", "1.5", "-3", "0", "many", "8GiB", True, None])
def test_no_counts(text):
    with pytest.raises(InvalidSetting):
        parse_count(text, knob="max_seq_len")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("0.9", Fraction(9, 10)),
        ("9/10", Fraction(9, 10)),
        ("90%", Fraction(9, 10)),
        ("1", 1),
        (Fraction(1, 3), Fraction(1, 3)),
    ],
)
def test_shares(text, share):
    assert parse_fraction(text, knob="kv_fraction") == share


@pytest.mark.parametrize("text", ["0", "1.1", "-0.5", "nan", "inf", "", "half", 0.9, True, "1/0", "110%"])
def test_no_shares(text):
    with pytest.raises(InvalidSetting):
        parse_fraction(text, knob="kv_fraction")


@given(st.fractions(min_value=Fraction(1, 10**6), max_value=1))
def test_a_share_survives_its_text(share):
    assert parse_fraction(str(share), knob="kv_fraction") == share


def test_sizes_are_printed_for_people():
    assert [format_bytes(n) for n in (0, 1023, 80 * GiB, 1_610_612_737, -MiB)] == [
        "0 B", "1023 B", "80 GiB", "1.50 GiB", "-1 MiB",
    ]  # fmt: skip


@given(st.integers(0, 10**15), st.integers(1, 10**9))
def test_rounding(value, multiple):
    down, up = round_down(value, multiple), round_up(value, multiple)
    assert down <= value <= up
    assert down % multiple == up % multiple == 0
    assert up - down in (0, multiple)
    assert ceil_div(value, multiple) == up // multiple
