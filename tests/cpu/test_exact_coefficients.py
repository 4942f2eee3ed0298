"""Intervals around estimates: what they rest on, and how far they reach."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from tonnage.engine.exact.coefficients import Coefficient, coefficient, records

ROOT = Path(__file__).parents[2]


def test_an_interval_cut_off_above_keeps_its_margin_below():
    """What runs uncompiled is a bound; an estimate at the bound is no better known for that."""
    low, best, high, margin = Fraction(118, 100), Fraction(6, 5), Fraction(5, 4), Fraction(3, 100)
    above = Coefficient(low=low, best=best, high=high, margin=margin, told="")
    cut = above.of(10**9, at_most=10**9, told="")
    assert (cut.low, cut.bytes, cut.high) == (970_000_000, 10**9, 10**9)
    free = above.of(10**9, at_most=None, told="")
    assert (free.low, free.bytes, free.high) == (1_180_000_000, 1_200_000_000, 1_250_000_000)


def test_a_kind_that_nobody_measured_has_the_widest_margin():
    nothing = coefficient("a phase of tomorrow")
    assert (nothing.low, nothing.best, nothing.high) == (1 - (nothing.high - 1), 1, nothing.high)
    measured = coefficient("feed-forward")
    assert nothing.high > coefficient("packed feed-forward").high > measured.high > 1
    assert measured.told.endswith("NVIDIA H200, 2026-11-29 and NVIDIA H200, 2026-11-30 (Gemma-3-12B, Llama-3.1-8B)")
    assert all((ROOT / record.result).is_file() for record in records())
