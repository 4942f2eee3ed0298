"""Lint, by vLLM's own rules: what adapters cost, ranks that divide tokens, models that draft."""

from __future__ import annotations

import json

import pytest
from test_lint import codes, linted
from test_peer_vllm_adapters import EACH, LLAMA, WORDS
from test_peer_vllm_heads import ELEMENTS, HEAD

from tonnage.hardware import find_card
from tonnage.peers.lint.finding import Severity
from tonnage.units import GiB, format_bytes

H200 = find_card("H200")
DRAFT = """--speculative-config '{"model": "%s", "num_speculative_tokens": 4}'"""


def test_a_few_adapters_are_a_note():
    finding = codes("vllm serve llama-3.1-8b --enable-lora --max-num-seqs 64")["TN046"]
    assert finding.severity is Severity.NOTE
    assert format_bytes((LLAMA + WORDS) * EACH) in finding.what
    assert "1 adapters of rank 16" in finding.what
    assert "vllm/lora/layers" in finding.why
    assert "TN046" not in codes("vllm serve llama-3.1-8b --max-loras 8 --max-num-seqs 64")


def test_many_are_a_warning_with_what_the_cache_would_hold():
    """Sixteen of rank 64 are 64 times as much: 5.5 GiB, a tenth of the cache."""
    command = "vllm serve llama-3.1-8b --enable-lora --max-loras 16 --max-lora-rank 64 --max-num-seqs 64"
    finding = codes(command)["TN046"]
    assert finding.severity is Severity.WARNING
    assert format_bytes(64 * (LLAMA + WORDS) * EACH) in finding.what
    assert "tokens more" in finding.why
    assert finding.change == ()  # on one rank nothing is split
    assert codes(f"{command} -tp 2")["TN046"].change == ("--fully-sharded-loras",)
    assert codes(f"{command} -tp 2 --fully-sharded-loras")["TN046"].change == ()


def test_a_rank_that_is_not_read_is_an_error():
    finding = codes("vllm serve llama-3.1-8b --enable-lora --max-lora-rank 24")["TN003"]
    assert finding.severity is Severity.ERROR
    assert finding.change == ("write 32",)


def test_ranks_that_divide_tokens_are_predicted():
    plain, divided = (
        linted(f"vllm serve deepseek-v3 -tp 8 --max-num-seqs 64 {flags}", card=H200)[0] for flags in ("", "-dcp 8")
    )
    assert divided.start.tokens.best == pytest.approx(8 * plain.start.tokens.best, rel=0.01)
    assert not {"TN008", "TN035"} & {finding.code for finding in divided.findings}


@pytest.mark.parametrize(
    ("model", "code", "change"),
    [("deepseek-v3", "TN035", "--decode-context-parallel-size 8"),
     ("qwen3-30b-a3b", "TN031", "--decode-context-parallel-size 2")],
)  # fmt: skip
def test_ranks_that_hold_the_same_are_told_that_they_could_divide_it(model, code, change):
    assert change in codes(f"vllm serve {model} -tp 8 --max-num-seqs 64", card=H200)[code].change


def test_more_ranks_than_replicas_are_an_error():
    finding = codes("vllm serve qwen3-30b-a3b -tp 8 -dcp 4", card=H200)["TN003"]
    assert finding.severity is Severity.ERROR
    assert finding.change == ("write at most 2",)


def test_a_draft_whose_shape_is_known_is_counted():
    command = "vllm serve llama-3.1-70b -tp 2 --max-num-seqs 64 "
    (plain,), (drafting,) = (linted(command + flags, card=H200) for flags in ("", DRAFT % "llama-3.1-8b"))
    assert "TN043" not in {finding.code for finding in drafting.findings}
    more = drafting.start.term("weights").bytes.bytes - plain.start.term("weights").bytes.bytes
    assert more == pytest.approx(7.48 * GiB, rel=1e-2)  # 8.03e9 elements in two bytes, half of them
    assert drafting.start.bytes_per_token == (80 + 32) * 2048


def test_a_draft_by_another_name_is_counted_where_its_shape_is_given():
    command = "vllm serve llama-3.1-70b -tp 2 --max-num-seqs 64 " + DRAFT % "/models/small"
    told = codes(command, card=H200)["TN043"]
    assert told.change == ("--model /models/small=MODEL of tonnage lint",)
    (found,) = linted(command, card=H200, shapes={"/models/small": "llama-3.1-8b"})
    assert found.start.launch.draft is not None
    assert "TN043" not in {finding.code for finding in found.findings}


@pytest.mark.parametrize("method", ["mlp_speculator", "medusa"])
def test_heads_of_other_kinds_are_told_and_not_counted(method):
    config = (
        f"""--speculative-config '{{"method": "{method}", "model": "llama-3.1-8b", "num_speculative_tokens": 3}}'"""
    )
    (found,) = linted(f"vllm serve llama-3.1-70b -tp 2 --max-num-seqs 64 {config}", card=H200)
    finding = {each.code: each for each in found.findings}["TN043"]
    assert found.start.launch.draft is None
    assert finding.change == ()
    assert "TN043" in codes(f"vllm serve llama-3.1-70b -tp 2 {DRAFT % './org-medusa'}", card=H200)


def test_a_head_of_eagle_is_counted_where_its_file_is_at_hand(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    command = f"vllm serve llama-3.1-8b --max-num-seqs 64 {DRAFT % tmp_path}"
    (plain,), (found,) = linted("vllm serve llama-3.1-8b --max-num-seqs 64"), linted(command)
    assert "TN043" not in {finding.code for finding in found.findings}
    more = found.start.term("weights").bytes.bytes - plain.start.term("weights").bytes.bytes
    assert more == pytest.approx(ELEMENTS * 2, rel=1e-3)


def test_layers_of_the_checkpoint_are_no_draft_beside_it():
    config = """--speculative-config '{"method": "mtp", "model": "deepseek-v3", "num_speculative_tokens": 1}'"""
    (found,) = linted(f"vllm serve deepseek-v3 -tp 8 --max-num-seqs 64 {config}", card=H200)
    assert "TN043" not in {finding.code for finding in found.findings}
    assert found.start.bytes_per_token == 62 * 1152
