"""The benchmark that judges exact plans runs the steps that they count, and outlives a case that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tonnage.engine.exact.steps import sampling, tile_elements
from tonnage.engine.exact.trace import top_of
from tonnage.engine.family import FAMILIES
from tonnage.engine.tracker import StorageTracker
from tonnage.hardware import find_card
from tonnage.planner.limits import MAX_LOGPROBS

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
TOKENS, ROWS = 64, 16


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, BENCHMARKS)
    try:
        import exact_peaks
    finally:
        sys.path.remove(BENCHMARKS)
    return exact_peaks


def peak(step, known) -> int:
    with StorageTracker(known) as tracker:
        step()
    return tracker.peak_bytes


def test_its_steps_take_what_plans_count(bench):
    """A prefill and a decode with everything asked of the sampler, uncompiled, on the host."""
    name, host = "llama", torch.device("cpu")
    config = bench.config_of(name, {**bench.HOST_SHAPES[name], "num_hidden_layers": 2, "vocab_size": 50_000})
    model = bench.built(config, FAMILIES[config.model_type], host)
    known = [*model.parameters(), *model.buffers()]
    told = bench.estimates(config, FAMILIES[config.model_type], TOKENS, ROWS)["eager"]["allocated"]
    assert peak(bench.Step(model, TOKENS, ROWS, host), known) == pytest.approx(told, rel=0.01)
    drawn = sampling(
        hidden_bytes=ROWS * config.hidden_size * 2,
        logits_rows=ROWS,
        vocab_size=config.vocab_size,
        dtype=bench.DTYPE,
        num_logprobs=MAX_LOGPROBS,
        penalties=False,
        tile_elements=tile_elements("cuda"),
    )
    step = bench.Step(model, ROWS, ROWS, host, draws="everything")
    assert peak(step, known) == pytest.approx(top_of(drawn.events).num_bytes, rel=0.01)


def test_a_case_that_fails_is_a_row(bench, capsys):
    config = bench.config_of("broken", {**bench.HOST_SHAPES["llama"], "hidden_act": "no such function"})
    (row,) = bench.tried("broken", config, (64,), packed=False, device="cpu")
    assert row["case"] == "broken"
    assert row["error"].startswith("KeyError")
    out, err = capsys.readouterr()
    assert "broken, apart" in out
    assert "KeyError" in err


def test_what_a_card_took_lies_in_what_is_said_of_it_now(bench):
    """Peaks alive and reserved of four published shapes on an H200, and their eager peaks within 1 %."""
    filed = json.loads((Path(BENCHMARKS) / "results" / "2026-11-30-h200-exact-peaks.json").read_text())
    judged = [row for row in filed["rows"] if row.get("stages")]
    assert {(row["case"], row["tokens"]) for row in judged} == {
        (name, tokens) for name in bench.CARD_SHAPES for tokens in bench.CARD_TOKENS
    }
    for row in filed["rows"]:
        assert row["eager"]["allocated"] == pytest.approx(row["eager"]["estimate"]["allocated"], rel=0.01)
    for row in judged[::3]:  # the smallest of each shape: they differ most from what is said
        config = bench.config_of(row["case"], bench.CARD_SHAPES[row["case"]])
        said = bench.intervals(config, row["tokens"], card=find_card("H200"))
        for stage, was in row["stages"].items():
            now = said[stage]
            assert was["low"] <= was["measured"] <= was["high"]
            assert now.low <= was["measured"] <= now.high, (row["case"], row["tokens"], stage)
            assert now.high - now.low <= 0.15 * now.bytes
