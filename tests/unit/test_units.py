"""Sizes, counts and shares: exact, and refused with the knob's name when they cannot be read."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import InvalidSetting
from tonnage.units import (
    LARGEST,
    GiB,
    MiB,
    TiB,
    ceil_div,
    check_number,
    check_whole,
    exact,
    format_bytes,
    parse_bytes,
    parse_count,
    parse_fraction,
    round_down,
    round_up,
    shown,
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


@pytest.mark.parametrize(
    "text",
    ["9" * 5000, "1e60GB", 10**400, 10**5000, LARGEST + 1, Fraction(1, 2), None, ["1GiB"]],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
def test_what_is_too_large_or_of_another_kind_is_told_in_a_line(parse, text):
    with pytest.raises(InvalidSetting, match=r"^host_kv_bytes = ") as caught:
        parse(text, knob="host_kv_bytes")
    assert len(str(caught.value)) < 250


def test_the_largest_size_is_one():
    assert parse_bytes(LARGEST, knob="memory") == parse_bytes(str(LARGEST), knob="memory") == 2**63 - 1


@given(st.integers(0, 2**53))
def test_printed_sizes_are_those_that_floats_give_where_they_are_exact(size):
    for unit, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", 1024)):
        if size >= scale:
            assert format_bytes(size) == (f"{size / scale:.2f} {unit}" if size % scale else f"{size // scale} {unit}")
            return
    assert format_bytes(size) == f"{size} B"


def test_a_size_beyond_all_floats_is_printed():
    assert format_bytes(2**40 * 10**400 + 2**38) == "1" + "0" * 400 + ".25 TiB"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (7, "7"),
        ("x" * 80, repr("x" * 80)),
        (10**40, "100000000000... (41 digits)"),
        (10**400 - 1, "999999999999... (400 digits)"),
        (-(10**9999), "-100000000000... (10,000 digits)"),
        ("y" * 500, repr("y" * 80) + "... (500 characters)"),
        (Fraction(10**5000), "a Fraction"),
        ([0] * 100, "[" + "0, " * 26 + "0... (a list)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_long_is_shown_short(value, told):
    assert repr(shown(value)) == told
    error = InvalidSetting("knob", shown(value), "wrong")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == f"knob = {told}: wrong."


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (10**400, "out of range"),
        (-(10**400), "out of range"),
        (10**5000, "out of range"),
        (math.inf, "out of range"),
        (-math.inf, "out of range"),
        (math.nan, "not a number"),
        (True, "not a number"),
        ("1", "not a number"),
        (None, "not a number"),
        (Decimal("0.5"), "a Decimal, and neither an int nor a float"),
        (Fraction(1, 2), "a Fraction, and neither an int nor a float"),
        (1j, "a complex, and neither an int nor a float"),
        (0, "out of range"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers(value, told):
    with pytest.raises(InvalidSetting, match=told):
        check_number("x", value, 0, 1, above=True)


def test_the_ends_of_a_range_of_numbers():
    check_number("x", 10**400, 0, math.inf)
    with pytest.raises(InvalidSetting, match="out of range"):
        check_number("x", math.inf, 0, math.inf)
    check_number("x", 1, 0, 1, above=True)
    check_number("x", 1e-300, 0, 1, above=True)


@pytest.mark.parametrize("value", [0.5, 1.0, True, None, "1", Decimal(1), Fraction(1), math.nan])
def test_no_whole_numbers(value):
    with pytest.raises(InvalidSetting, match="not a whole number"):
        check_whole("x", value, 0)


@pytest.mark.parametrize("text", ["1e99999", "1e-99999", "1E+1_000_000_000", "9" * 2000, "x", ""])
def test_a_number_without_end_is_none(text):
    with pytest.raises(ValueError, match=r"too large|Invalid literal"):
        exact(text)
    with pytest.raises(InvalidSetting):
        parse_fraction(text, knob="share")


def test_a_number_is_exact():
    assert exact("1e-3") == Fraction(1, 1000)
    assert exact("9/10") == Fraction(9, 10)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("79.11GiB", 84943715696), ("0.3KiB", 307), ("1.0000001GB", 1000000100)]
)
def test_a_size_is_as_exact_as_it_was_printed(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, knob="x") == num_bytes


@pytest.mark.parametrize("text", ["0.3", "1.5B", "0.0001KiB"])
def test_no_size_is_a_part_of_a_byte(text: str) -> None:
    with pytest.raises(InvalidSetting):
        parse_bytes(text, knob="x")
