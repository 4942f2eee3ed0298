"""Flags of the verbs that only plan: ranks, features, the reference's knobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.cli.reference import knob_names, reference_knobs
from tonnage.errors import InvalidSetting

Program = Callable[..., Ended]

LLAMA = str(Path(__file__).resolve().parents[2] / "examples" / "configs" / "llama-3.1-8b")


def planned(tonnage: Program, *flags: str) -> dict:
    ended = tonnage("plan", LLAMA, "--device", "H100", "--json", *flags)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def refused(tonnage: Program, *flags: str) -> str:
    ended = tonnage("plan", LLAMA, "--device", "H100", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    return ended.err


def test_stages_follow_the_smallest(tonnage: Program) -> None:
    shown = planned(tonnage, "--pp", "2", "--stage-layers", "20,12")
    assert shown["rank"]["index"] == 0
    last = planned(tonnage, "--pp", "2", "--stage-layers", "20,12", "--stage", "1")
    assert (last["rank"]["index"], last["kv"]["tokens"]) == (1, shown["kv"]["tokens"])
    table = tonnage("plan", LLAMA, "--device", "H100", "--pp", "2").out
    assert "Pipeline stages" in table


def test_features_become_limits_and_knobs(tonnage: Program) -> None:
    plain = planned(tonnage)
    more = planned(tonnage, "--max-adapters", "4", "--prompt-logprobs", "--graphs", "1,2", "--attention", "flashinfer")
    assert (more["limits"]["max_adapters"], more["limits"]["max_adapter_rank"]) == (4, 16)
    assert more["limits"]["graph_batch_sizes"] == [1, 2]
    assert more["limits"]["prompt_logprobs"] is True
    assert more["kv"]["tokens"] != plain["kv"]["tokens"]
    without = planned(tonnage, "--without", "penalty tables")
    assert without["knobs"]["disabled_claims"] == ["penalty tables"]
    assert without["kv"]["tokens"] > plain["kv"]["tokens"]
    assert (
        "switched off: penalty tables" in tonnage("plan", LLAMA, "--device", "H100", "--without", "penalty tables").out
    )


@pytest.mark.parametrize("how", ["", "--explain"])
def test_limits_that_were_asked_are_shown(tonnage: Program, how: str) -> None:
    flags = f"--device H100 --lookahead-steps 1 --max-adapters 2 --prompt-logprobs {how}".split()
    told = " ".join(tonnage("plan", LLAMA, *flags).out.replace(" = ", " ").split())
    for each in ("lookahead_steps 1", "max_adapters 2", "prompt_logprobs yes"):
        assert f"{each} (--{each.split()[0].replace('_', '-')})" in told
    assert "max_draft_tokens" not in told


def test_the_reference_policy(tonnage: Program) -> None:
    made = planned(tonnage, "--policy", "reference", "--reference", "max_tokens=100k", "--reference", "manager=v2")
    assert made["kv"]["tokens"] <= 100_000 / 0.95 + 32
    assert made["kv"]["block_tokens"] == 32


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "vendor"], "no such policy"),
        (["--policy", "own", "--reference", "max_tokens=1"], "a knob of the other policy"),
        (["--reference", "max_token=1"], "did you mean max_tokens"),
        (["--reference", "max_tokens"], "not a knob and its value"),
        (["--policy", "reference", "--kv-tokens", "100"], "knobs of its own"),
        (["--stage", "1"], "stages are numbered from 0 to 0"),
        (["--pp", "2", "--stage-layers", "20,20"], "32 layers"),
        (["--tp", "0"], "--tp"),
        (["--graphs", "0"], "--graphs = '0'"),
        (["--scratch", "lend"], "cannot be lent"),
        (["--attention", "nothing"], "no such backend"),
        (["--attention", ""], "no such backend"),
        (["--cp", "10000"], "a context is spread over at most 4,096 ranks. To change: write at most 4096"),
        (["--max-encoder-tokens", "5"], "has no encoder"),
        (["--without", "weights"], "no claim of that name"),
    ],
)
def test_what_cannot_be(tonnage: Program, flags: list[str], said: str) -> None:
    assert said in refused(tonnage, *flags)


def test_knobs_of_the_reference_by_their_types() -> None:
    made = reference_knobs(
        [
            "free_gpu_memory_fraction=0.8", "max-tokens=1000", "max_gpu_total_bytes=4GiB", "has_seat_headroom=no",
            "max_attention_window=128,4096,-2147483647", "pool_ratio=0.25,0.75", "manager=v2",
            "TRTLLM_SKIP_KV_CACHE_ESTIMATION=1",
        ]
    )  # fmt: skip
    assert made.free_gpu_memory_fraction == Fraction(4, 5)
    assert (made.max_tokens, made.max_gpu_total_bytes, made.has_seat_headroom) == (1000, 4 * 2**30, False)
    assert made.max_attention_window == (128, 4096, -(2**31) + 1)
    assert made.pool_ratio == (Fraction(1, 4), Fraction(3, 4))
    assert (made.manager, made.environment.skip_estimation) == ("V2", True)


def test_every_plain_knob_of_the_reference_can_be_written() -> None:
    """Its default, written as text, comes back."""
    usual = ReferenceKnobs()
    for name in knob_names():
        value = getattr(usual, name)
        if value is not None:
            assert getattr(reference_knobs([f"{name}={value}"]), name) == value


@pytest.mark.parametrize("text", ["max_tokens=", "=1", "max_tokens=1.5", "has_seat_headroom=maybe", "pool_ratio=1,x"])
def test_texts_that_are_no_knob(text: str) -> None:
    with pytest.raises(InvalidSetting):
        reference_knobs([text])


def test_a_knob_given_twice() -> None:
    with pytest.raises(InvalidSetting, match="given twice"):
        reference_knobs(["max_tokens=1", "max-tokens=2"])
