"""The backend that runs where none was asked for: by what is there, and by what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.attention import choice
from tonnage.attention.choice import LOAD, RATES, Point, choose, fastest
from tonnage.attention.flashinfer_modules import Variant

DECODE, PREFILL = LOAD
PLAIN = Variant(dtype="bfloat16", head_dim=128)
WINDOW = Variant(dtype="bfloat16", head_dim=128, has_window=True)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def there(monkeypatch):
    """Says what is installed and built."""

    def says(*, triton=True, built=()):
        monkeypatch.setattr(choice, "find_spec", lambda name: object() if triton else None)
        monkeypatch.setattr(choice, "is_built", lambda variant: variant in built)
        monkeypatch.setattr(choice, "find_module", lambda family, variant: family == "fa3" or None)

    return says


def test_a_host_and_a_card_without_triton_have_torch(there):
    there(built=(PLAIN,))
    assert choose("host", (PLAIN,)) == "sdpa"
    there(triton=False, built=(PLAIN,))
    assert choose("cuda", (PLAIN,)) == "sdpa"


def test_kernels_count_where_all_that_the_model_needs_is_compiled(there, monkeypatch):
    monkeypatch.setattr(choice, "RATES", {"triton": {DECODE: 1}, "flashinfer": {DECODE: 2}, "paired": {DECODE: 1}})
    there(built=(PLAIN, WINDOW))
    assert choose("cuda", (PLAIN,), sm=90) == "flashinfer"
    assert choose("cuda", sm=90) == "triton", "no model is known yet"
    there(built=(WINDOW,))
    assert choose("cuda", (PLAIN,), sm=90) == "triton"


def test_kernels_count_for_what_was_measured_of_them(there, monkeypatch):
    monkeypatch.setattr(choice, "RATES", {"triton": {DECODE: 1}, "flashinfer": {DECODE: 2}, "paired": {DECODE: 1}})
    others = (WINDOW, replace(PLAIN, head_dim=64), replace(PLAIN, has_softcap=True))
    there(built=(PLAIN, *others))
    assert choose("cuda", (PLAIN,), sm=90) == "flashinfer"
    assert choose("cuda", (PLAIN,), sm=90, among=("triton", "sdpa")) == "triton", "the layers have sinks, say"
    assert choose("cuda", (PLAIN,), sm=80) == choose("cuda", (PLAIN,)) == "triton"
    for other in others:
        assert choose("cuda", (PLAIN, other), sm=90) == "triton"
    monkeypatch.setattr(choice, "find_module", lambda family, variant: None)
    assert choose("cuda", (PLAIN,), sm=90) == "triton", "prompts would go through fa2, which is slower"


@pytest.mark.parametrize(
    ("ours", "theirs", "best"),
    [
        ({DECODE: 4000}, {DECODE: 4000}, "ours"),
        ({DECODE: 4000}, {DECODE: 4001}, "theirs"),
        ({DECODE: 4000}, {DECODE: 4000, PREFILL: 300}, "ours"),  # whose prompts were not measured is not slower
        ({DECODE: 4000, PREFILL: 300}, {DECODE: 3999, PREFILL: 900}, "theirs"),
    ],
)
def test_the_least_time_of_what_was_measured_for_all(ours, theirs, best):
    assert fastest(["ours", "theirs"], {"ours": ours, "theirs": theirs}) == best


def test_the_load_is_256_sequences_of_1024_tokens_with_256_more():
    """In one layer: 4 KiB of keys and values a token, read by each of 256 decodes of 256 sequences; and half of the
    1,024 x 1,024 pairs, each 2 * 128 operations for scores and as many for values, by 32 heads."""
    assert LOAD[DECODE] == sum(256 * 4096 * (1024 + 128) for _ in range(256))
    assert LOAD[PREFILL] == 256 * 32 * (1024 * 1024 // 2) * 4 * 128


def test_rates_are_those_on_file():
    def filed(name):
        return json.loads((RESULTS / f"2026-11-30-h200-attention-{name}.json").read_text())["rows"]

    decodes = {Point("decode", row["batch"], row["context"]): row["gb_per_s"] for row in filed("decode")
               if row["page"] == 16}  # fmt: skip
    ours = {point: rate for point, rate in RATES["triton"].items() if point.stage == "decode"}
    assert ours.items() <= decodes.items()
    assert {point for point in RATES["flashinfer"] if point.stage == "decode"} == set(ours)
    for name, told in (("triton", "triton"), ("flashinfer", "flashinfer fa3")):
        prompts = {Point("prefill", row["rows"], row["count"]): round(row["tflop_per_s"]) for row in filed("prefill")
                   if row["backend"] == told and not row["cached"]}  # fmt: skip
        assert prompts == {point: rate for point, rate in RATES[name].items() if point.stage == "prefill"}


def test_auto_is_the_pair_by_what_has_been_measured(there):
    """It decodes as the one and computes prompts as the other."""
    there(built=(PLAIN,))
    assert choose("cuda", (PLAIN,), sm=90) == "paired"
    assert {
        point: RATES["flashinfer" if point.stage == "prefill" else "triton"][point] for point in RATES["paired"]
    } == (RATES["paired"])
    there()
    assert choose("cuda", (PLAIN,), sm=90) == "triton"
