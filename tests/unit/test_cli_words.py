"""Refusals and hints that name the verb that was typed, and what is in a file that is no plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture

Program = Callable[..., Ended]

LLAMA = Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b"

BAD = {
    f"curve {LLAMA}": "tonnage curve does not know the device|--device NAME",
    f"plan {LLAMA}": "tonnage plan does not know the device",
    f"plan {LLAMA} --device H100 --stage-layers 16,16": "--stage-layers 16,16|2 pipeline stages|add --pp 2",
    f"curve {LLAMA} --device H100 --stage-layers 8,8,16": "3 pipeline stages|add --pp 3",
    f"plan {LLAMA} --device H100 --pp 2 --stage-layers 16,8,8": "partition",
    f"plan {LLAMA} --device A100": "several sizes of this card|A100-40GB or A100-80GB",
    f"plan {LLAMA} --device A40": "no log at hand|--memory",
    f"plan {LLAMA} --device H100 --like vllm:tensor_parallel_size=4": "use --tp 4",
}


@pytest.mark.parametrize("command", BAD, ids=lambda command: command.replace(str(LLAMA), "MODEL"))
def test_what_is_wrong_is_told(tonnage: Program, command: str) -> None:
    ended = tonnage(*command.split())
    assert (ended.code, ended.out) == (2, "")
    for piece in BAD[command].split("|"):
        assert piece in ended.err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (f"fit {LLAMA} --device H100 --goal longest-context", 'a tonnage.fit/1 answer|under "plans"|"command"'),
        (f"curve {LLAMA} --device H100", "a tonnage.curve/1 answer|tonnage curve without --json"),
    ],
    ids=["fit", "curve"],
)
def test_report_says_what_a_file_is(tonnage: Program, tmp_path: Path, command: str, told: str) -> None:
    file = tmp_path / "answer.json"
    file.write_text(tonnage(*command.split(), "--json").out)
    ended = tonnage("report", str(file))
    assert (ended.code, ended.out) == (2, "")
    for piece in told.split("|"):
        assert piece in ended.err
    assert "only plans and runs can be shown or compared" in ended.err


def test_a_card_without_bfloat16_is_told_and_float16_is_not(tonnage: Program) -> None:
    told = tonnage("plan", str(LLAMA), "--device", "V100").out
    assert "V100-32GB has no arithmetic in bfloat16" in " ".join(told.split())
    assert "no arithmetic" not in tonnage("plan", str(LLAMA), "--device", "V100", "--dtype", "float16").out
