"""Sampling in ``tonnage run``: flags, keys of lines, which of them counts, and what comes back for it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import (  # noqa: F401 - fixtures
    Completion,
    Ended,
    FakeEngine,
    engine_fixture,
    lines_of,
    main,
    prompts_fixture,
    tonnage_fixture,
)

from tonnage.cli.asks import from_lines
from tonnage.cli.sampling import SamplingOptions
from tonnage.config import Origin
from tonnage.sampling import SamplingParams, child_seed

Program = Callable[..., Ended]

#: flag and text -> field and value
FLAGS = {
    "--temperature 0.7": ("temperature", 0.7),
    "--top-p 0.9": ("top_p", 0.9),
    "--top-k 40": ("top_k", 40),
    "--min-p 0.05": ("min_p", 0.05),
    "--repetition-penalty 1.2": ("repetition_penalty", 1.2),
    "--presence-penalty -0.5": ("presence_penalty", -0.5),
    "--frequency-penalty 0.25": ("frequency_penalty", 0.25),
    "--seed 18446744073709551615": ("seed", 2**64 - 1),
    "--stop END --stop ###": ("stop", ("END", "###")),
    "--logprobs 0": ("logprobs", 0),
    "--min-tokens 3": ("min_tokens", 3),
    "--max-tokens 8k": ("max_tokens", 8000),
    "--ignore-eos": ("ignore_eos", True),
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_flag_is_a_field(tonnage: Program, engine: FakeEngine, flags: str) -> None:
    assert tonnage("run", "m", "--prompt", "hello", *flags.split()).code == 0
    name, value = FLAGS[flags]
    assert engine.asked[0]["params"] == SamplingParams(**{name: value})


def test_every_flag_is_tried_above() -> None:
    assert {name for name, _ in FLAGS.values()} == {field.name for field in fields(SamplingOptions)} - {"n"}


def test_nothing_given_is_greedy(tonnage: Program, engine: FakeEngine) -> None:
    tonnage("run", "m", "--prompt", "hello")
    assert engine.asked[0]["params"] == SamplingParams()


def test_every_field_may_be_a_key_of_a_line_and_counts_before_the_flag(engine: FakeEngine) -> None:
    given = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
        "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"42": -100},
        "seed": 5, "stop": ["x"], "stop_token_ids": [7], "ignore_eos": True, "include_stop": True, "n": 2,
        "logprobs": 1, "prompt_logprobs": 2, "skip_special_tokens": False, "priority": -4,
        "cache": {"salt": "s", "priority": 80, "reuse": True},
    }  # fmt: skip
    assert given.keys() == {field.name for field in fields(SamplingParams)}
    flags = {"temperature": 1.0, "seed": 1, "n": 3}
    lines = [json.dumps({"prompt": "a"} | given), '{"prompt": "b", "seed": null, "stop": "bare"}']
    asks = from_lines([line.encode() for line in lines], file="f", sampling=flags)
    assert not asks.failures
    assert not asks.ignored
    assert asks.asks[0].params == SamplingParams(**given | {"logit_bias": {42: -100}})  # type: ignore[arg-type]
    assert asks.asks[1].params == SamplingParams(**flags, stop=["bare"])  # type: ignore[arg-type]


#: command line -> what its paragraph must hold. "|" separates the pieces.
BAD = {
    "--temperature hot": "--temperature = 'hot': not a number|To change: write at least 0",
    "--temperature -1": "--temperature = '-1': out of range",
    "--temperature nan": "--temperature = 'nan': not a number",
    "--temperature 0.001": "--temperature = '0.001': so small|write 0 for greedy",
    "--top-p 0": "--top-p = '0': out of range|more than 0 and at most 1",
    "--top-p 1.5": "--top-p = '1.5'",
    "--top-k 2.5": "--top-k = '2.5': not a whole number",
    "--top-k -1": "--top-k = '-1': out of range",
    "--min-p 2": "--min-p = '2'",
    "--repetition-penalty 0": "--repetition-penalty = '0'",
    "--presence-penalty 3": "--presence-penalty = '3'",
    "--frequency-penalty -2.5": "--frequency-penalty = '-2.5'",
    "--seed x": "--seed = 'x': not a whole number",
    "--seed 99999999999999999999": "--seed = '99999999999999999999': out of range",
    "--stop=": "--stop = ['']: not a string of at least one character",
    "--n 0": "--n = '0': out of range",
    "--logprobs 21": "--logprobs = '21': out of range|at most 20",
    "--min-tokens 5 --max-tokens 4": "--min-tokens = '5': above max_tokens = 4",
    "--max-tokens 0": "--max-tokens = '0': zero",
    "--admission first-come": "--admission = 'first-come': no such policy|optimistic or reserve_all",
    "--chunk-tokens 0": "--chunk-tokens = '0': zero",
    "--chunk-tokens some": "--chunk-tokens = 'some': not a number",
}


@pytest.mark.parametrize("flags", BAD)
def test_a_bad_flag_is_told_before_anything_starts(tonnage: Program, engine: FakeEngine, flags: str) -> None:
    ended = tonnage("run", "m", "--prompt", "a", *flags.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    for piece in BAD[flags].split("|"):
        assert piece in ended.err
    assert engine.options is None


def test_a_flag_that_contradicts_a_line_fails_that_line(tonnage: Program, engine: FakeEngine, prompts: Any) -> None:
    path = prompts('{"prompt": "a", "max_tokens": 2}', '{"prompt": "b"}')
    ended = tonnage("run", "m", "--input", path, "--min-tokens", "5")
    assert ended.code == 1
    assert "failed: line 1 (id line-1)" not in ended.err
    assert "failed: line 1: min_tokens = 5: above max_tokens = 2" in ended.err
    assert "1 finished, 1 failed" in ended.out


@pytest.mark.parametrize(
    ("flags", "policy", "chunk"),
    [
        ("", None, "absent"),
        ("--admission reserve-all", "reserve_all", "absent"),
        ("--admission OPTIMISTIC --chunk-tokens 64", "optimistic", 64),
        ("--chunk-tokens none", None, "none"),
    ],
)
def test_how_the_engine_schedules(tonnage: Program, engine: FakeEngine, flags: str, policy: Any, chunk: Any) -> None:
    assert tonnage("run", "m", "--prompt", "hello", *flags.split()).code == 0
    admission = engine.options.knobs.admission
    assert admission.value == policy
    assert admission.origin == (Origin.FLAG if policy else Origin.DEFAULT)
    assert getattr(engine.options, "chunk_tokens", "absent") == chunk


@pytest.mark.parametrize("verb", [("run", "m", "--prompt", "a"), ("run", "m", "--prompt", "a", "--attention", "sdpa")])
def test_a_plan_file_goes_to_the_engine_as_it_was_typed(
    tonnage: Program, engine: FakeEngine, tmp_path: Path, verb: Any
) -> None:
    path = str(tmp_path / "Plan of Mine.json")
    assert tonnage(*verb, "--plan-file", path).code == 0
    assert engine.options.plan_file == path


@pytest.mark.parametrize(("flags", "overlap"), [((), "absent"), (("--overlap",), True), (("--no-overlap",), False)])
def test_overlap_goes_to_the_engine_where_it_is_asked_for(
    tonnage: Program, engine: FakeEngine, flags: Any, overlap: Any
) -> None:
    assert tonnage("run", "m", "--prompt", "a", *flags).code == 0
    assert getattr(engine.options, "overlap", "absent") == overlap


def test_log_probabilities_come_where_they_were_asked_for(
    tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    path = prompts(
        '{"prompt": "a"}', '{"prompt": "b", "logprobs": 0}', '{"prompt": "c", "logprobs": 2, "prompt_logprobs": 1}',
        '{"prompt": "d", "prompt_logprobs": 0, "stop": "END"}',
    )  # fmt: skip
    assert tonnage("run", "m", "--input", path, "--output", out).code == 0
    none, chosen, both, prompt = lines_of(out)
    assert not {"logprobs", "prompt_logprobs"} & none.keys()
    assert chosen["logprobs"] == [{"token": 1, "logprob": -0.5}, {"token": 2, "logprob": None}]
    assert both["logprobs"][0]["top"] == [{"token": 1, "logprob": -0.5}, {"token": 7, "logprob": -1.5}]
    assert both["prompt_logprobs"] == [{"token": 8, "logprob": -2.0, "top": [{"token": 9, "logprob": -1.0}]}]
    assert prompt["prompt_logprobs"] == [{"token": 8, "logprob": -2.0}]
    assert prompt["stop_reason"] == "END"
    assert "Infinity" not in out.read_text()


def test_samples_are_requests_of_their_own_and_one_line(
    tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path
) -> None:
    out, taken = tmp_path / "out.jsonl", '{"id": "a, sample 2", "prompt": "b", "n": 2}'
    path = prompts('{"id": "a", "prompt": "wait", "n": 3, "seed": 7}', taken)
    ended = tonnage("run", "m", "--input", path, "--output", out)
    assert ended.code == 0
    first, second = lines_of(out)
    assert [sample["text"] for sample in first["samples"]] == ["you said wait"] * 3
    assert (first["id"], second["id"]) == ("a", "a, sample 2")
    assert (first["num_prompt_tokens"], first["samples"][0]["num_suspended"]) == (3, 2)
    assert "text" not in first
    params = [asked["params"] for asked in engine.asked]
    assert [each.n for each in params] == [1] * 5
    assert [each.seed for each in params] == [child_seed(7, index) for index in range(3)] + [None, None]
    assert len({asked["id"] for asked in engine.asked}) == 5
    assert "2 finished, 0 failed, 0 cancelled; 1 had to wait" in ended.out
    assert "[a, sample 1]\nyou said wait\n" in ended.out


def test_one_failed_sample_fails_the_request_and_keeps_the_others(
    tonnage: Program, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FakeEngine._finish

    def second_fails(self: FakeEngine, request: dict[str, Any]) -> Completion:
        if request["id"].endswith("sample 2"):
            return Completion(request["id"], "", (), 3, "error", error="not finite")
        return finish(self, request)

    monkeypatch.setattr(FakeEngine, "_finish", second_fails)
    out = tmp_path / "out.jsonl"
    ended = tonnage("run", "m", "--prompt", "a", "--n", "2", "--output", out)
    assert ended.code == 1
    assert "failed: --prompt 1 (id prompt-1): sample 2: not finite" in ended.err
    (line,) = lines_of(out)
    assert line["error"] == "sample 2: not finite"
    assert [sample["text"] for sample in line["samples"]] == ["you said a", ""]
    assert line["samples"][1]["error"] == "not finite"


def test_a_refusal_of_samples_is_told_once(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", "--prompt", "long", "--n", "3")
    assert ended.code == 1
    assert ended.err.count("failed: ") == 1
    assert "0 finished, 1 failed, 0 cancelled" in ended.out


def test_samples_that_had_ended_are_kept_when_the_others_are_cancelled(
    tonnage: Program, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FakeEngine._finish

    def interrupted(self: FakeEngine, request: dict[str, Any]) -> Completion:
        signal.raise_signal(signal.SIGINT)
        return finish(self, request)

    monkeypatch.setattr(FakeEngine, "_finish", interrupted)
    out = tmp_path / "out.jsonl"
    ended = tonnage("run", "m", "--prompt", "a", "--n", "2", "--prompt", "b", "--output", out)
    assert ended.code == 130
    (line,) = lines_of(out)
    assert [sample["finish_reason"] for sample in line["samples"]] == ["stop", "cancelled"]
    assert "0 finished, 0 failed, 2 cancelled" in ended.out


def test_several_samples_are_not_streamed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["run", "m", "--prompt", "hello", "--n", "2"]) == 0
    assert engine.asked[0]["on_delta"] is None
    assert capsys.readouterr().out.count("you said hello") == 2
