"""Settings without effect are told, and only those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture

from tonnage.hardware import find_card
from tonnage.planner import find_config, plan_without_device
from tonnage.planner.host_tier import held_text, sequence_bytes
from tonnage.report import parse_plan
from tonnage.report.idle import idle_settings
from tonnage.terms import Rank

Program = Callable[..., Ended]

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
LLAMA, LATENT = f"plan {CONFIGS / 'llama-3.1-8b'}", f"plan {CONFIGS / 'deepseek-v2-lite'}"
GROWS = f"{LATENT} --device H100 --attention trtllm --kv-dtype fp8"

#: command line -> what is told to have no effect
TOLD = {
    f"{LLAMA} --device H100": [],
    f"{LLAMA} --device H100 --attended-tokens 1000000": ["attended_tokens"],
    f"{LLAMA} --device H100 --scratch reserve": ["scratch"],
    f"{GROWS} --attended-tokens 1000000": [],
    f"{GROWS} --max-seq-len 8192 --max-batch-size 8 --scratch cap": [],
    f"{LLAMA} --device H100 --max-adapter-rank 8": ["max_adapter_rank"],
    f"{LLAMA} --device H100 --max-adapter-rank 8 --max-adapters 2": [],
    f"{LLAMA} --device H100 --state-dtype fp32": ["state_dtype"],
    f"{LLAMA} --device H100 --snapshot-tokens 1024": ["snapshot_tokens"],
    f"{LLAMA} --device H100 --snapshot-tokens 0": [],
    f"{LLAMA} --device H100 --host-kv-bytes 20GiB": [],
    f"{LLAMA} --device H100 --host-kv-bytes 20GiB --no-prefix-caching": ["host_kv_bytes"],
    f"{LLAMA} --device H100 --no-prefix-caching": [],
}


@pytest.mark.parametrize("command", TOLD, ids=lambda command: command.replace(str(CONFIGS), ""))
def test_settings_without_effect(tonnage: Program, command: str) -> None:
    ended = tonnage(*command.split(), "--json")
    assert ended.code == 0, ended.err
    made = parse_plan(ended.out, file="stdout").plan
    assert [told.split()[0] for told in made.warnings if "has no effect here" in told] == TOLD[command]
    assert [told for told in made.warnings if "has no effect here" in told] == list(idle_settings(made))


@pytest.mark.parametrize("ranks", ["", "--tp 2", "--pp 2", "--tp 2 --pp 2"])
def test_the_host_tier_is_told(tonnage: Program, ranks: str) -> None:
    """131,072 bytes a token over all ranks, whatever the split: 1 GiB for 8,192 tokens."""
    ended = tonnage(*f"{LLAMA} --device H100 --max-seq-len 8192 --host-kv-bytes 20GiB {ranks}".split())
    told = " ".join(ended.out.split())
    assert "host_kv_bytes 20 GiB holds the cache of 20 more full-length sequences (1 GiB each, over all ranks)" in told
    assert "one sequence must still fit on the device" in told


def test_no_host_memory_no_word() -> None:
    plan = plan_without_device(find_config("smollm2"), card=find_card("H100"), rank=Rank())
    assert held_text([plan]) == ""
    assert sequence_bytes(plan, 16) > 0
