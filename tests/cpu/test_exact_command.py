"""``tonnage plan --exact``: the table, the JSON, the sentences, and what it says on the way."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tonnage.terms import MemoryPlan
from tonnage.units import MiB

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from tonnage.cli import plan as verb
    from tonnage.cli.app import main

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
LLAMA, DEEPSEEK = str(CONFIGS / "llama-3.1-8b"), str(CONFIGS / "deepseek-v2-lite")


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert main(["plan", "--device", "H200", "--exact", *argv]) == 0
    return capsys.readouterr()


def test_the_table_comes_again_from_a_file(capsys, tmp_path):
    kept = str(tmp_path / "plan.json")
    out, _ = told(capsys, LLAMA, "--output", kept)
    for piece in ("Peaks of the stages", "prefill", "decode", "sampler", "between", "868", "1.13 GiB", "fake tensors"):
        assert piece in out
    assert main(["report", kept]) == 0
    assert capsys.readouterr().out == out


def test_the_json_has_every_stage_with_its_interval(capsys):
    out, _ = told(capsys, DEEPSEEK, "--json", "--prompt-logprobs", "--max-num-tokens", "2048")
    stages = {stage["stage"]: stage for stage in json.loads(out)["stages"]}
    assert list(stages) == ["prefill", "decode", "prompt log-probs", "sampler"]
    for stage in stages.values():
        for name in ("allocated", "reserved"):
            found = stage[name]
            assert found["source"] == "simulated"
            assert 0 < found["low"] <= found["bytes"] <= found["high"]
    prefill = stages["prefill"]
    assert prefill["shape"]["num_tokens"] == 2048
    assert prefill["allocated"]["high"] <= prefill["uncompiled_bytes"]


def test_explain_says_where_they_come_from(capsys):
    out, _ = told(capsys, LLAMA, "--explain")
    assert "Counted on a forward of fake tensors, with no weights and no device" in " ".join(out.split())


def test_who_waits_is_told(capsys, monkeypatch):
    monkeypatch.setattr(verb, "PATIENCE_SECONDS", 0.0)
    out, err = told(capsys, LLAMA, "--json")
    json.loads(out)
    assert err == "--exact: running the model on fake tensors ...\n"


def test_what_cannot_be_run_is_a_warning(capsys, tmp_path):
    raw = json.loads((CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    kinds = ["conv", "full_attention"] * 16
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "lfm2", "layer_types": kinds}))
    out, _ = told(capsys, str(tmp_path))
    said = " ".join(out.split())
    assert "! --exact has nothing for" in said
    assert "closed forms" in said


def test_fewer_tokens_leave_more_to_the_cache(capsys):
    """Every limit that is tried is counted anew."""
    plans: list[MemoryPlan] = []
    for tokens in ("1024", "8192"):
        out, _ = told(capsys, LLAMA, "--json", "--max-num-tokens", tokens)
        plans.append(json.loads(out))
    small, large = ({line["name"]: line["bytes"] for line in plan["lines"]} for plan in plans)
    assert small["kv"] > large["kv"]
    assert large["transient"] - small["transient"] > 600 * MiB
