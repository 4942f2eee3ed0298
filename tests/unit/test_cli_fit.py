"""``tonnage fit`` as a user meets it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture

from tonnage.planner.dimensions import COSTS
from tonnage.planner.host_tier import GEN3, GEN4, GEN5

Program = Callable[..., Ended]

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "configs" / "llama-3.1-8b"
FIT = f"fit {LLAMA}"
USERS = "--users 64 --prompt-tokens 4000 --output-tokens 1000"

#: command line -> what its paragraph must hold. "|" separates the pieces.
BAD = {
    f"{FIT} --device H100": "does not know what for|Need: --goal NAME, or --users|add --goal longest-context",
    f"{FIT} --device H100 --goal fastest": "--goal = 'fastest'|no such goal|longest-context or most-concurrency",
    f"{FIT} --device H100 --goal longest-context --users 3": "--goal and --users are two goals|leave out",
    f"{FIT} --device H100 --users 3": "--prompt-tokens and --output-tokens are missing|add --prompt-tokens N",
    f"{FIT} --device H100 --users 3 --prompt-tokens 4": "and --output-tokens is missing|add --output-tokens N",
    f"{FIT} --device H100 --least-ranks": "--least-ranks needs a workload|add --users N --prompt-tokens N --output",
    f"{FIT} --least-memory": "--least-memory needs a workload|add --users N",
    f"{FIT} --device H100 {USERS} --stage-layers 16,16": "of 2 pipeline stages, and there is one|add --pp 2",
    f"{FIT} --goal longest-context": "tonnage fit does not know the device|add --device H100",
    f"{FIT} {USERS}": "tonnage fit does not know the device",
    f"{FIT} {USERS} --least-ranks": "tonnage fit does not know the device",
    f"{FIT} --device H100 --memory 80GiB --goal longest-context": "both say how large",
    f"{FIT} --device H100 --users 0 --prompt-tokens 1 --output-tokens 1": "--users = '0'|zero",
    f"{FIT} --device H100 --users 1 --prompt-tokens x --output-tokens 1": "--prompt-tokens = 'x'|not a number",
    f"{FIT} --device H100 --users 1 --prompt-tokens 200000 --output-tokens 0": "131,072 positions|use at most 131072",
    f"{FIT} --device H100 --goal longest-context --least-memory": "--least-memory needs a workload|Need: --users",
    f"{FIT} --device H100 {USERS} --least-memory --least-ranks": "two answers|keep one",
    f"{FIT} --device H100 {USERS} --max-batch-size 8": "max_batch_size = 8|below the 64 users|raise it to 64",
    f"{FIT} --device H100 {USERS} --graphs often": "graphs = 'often'|write none, default",
    f"{FIT} --device H100 {USERS} --host-kv-bytes much": "--host-kv-bytes = 'much'|not a number",
    f"{FIT} --device H100 {USERS} --kv-dtype fp7": "--kv-dtype = 'fp7'",
    f"{FIT} --memory 15GiB --goal longest-context": "does not fit|Need: |Have: |give it",
    f"{FIT} --memory 20GiB {USERS}": "64 users at 4,000 prompt + 1,000 output tokens do not fit|set host_kv_bytes to",
    f"{FIT} --device H100 {USERS} --least-ranks --tp 2": "--least-ranks looks for the ranks itself|leave out --tp",
    f"fit ./nowhere --device H100 {USERS}": "./nowhere|no such folder or file",
}


@pytest.mark.parametrize("command", BAD, ids=lambda command: command.replace(str(LLAMA), "MODEL"))
def test_bad_input_is_told_in_one_paragraph(tonnage: Program, command: str) -> None:
    ended = tonnage(*command.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    for piece in BAD[command].split("|"):
        assert piece in ended.err


GOOD = {
    f"{FIT} --device H100 --goal longest-context": "reached  sequences of 131,072 tokens|Order of sacrifice|1 graphs",
    f"{FIT} --memory 24GiB --goal most_concurrency": "given up|bfloat16 became float8_e4m3fn: |it costs: |KV cache",
    f"{FIT} --device H100 {USERS}": "64 users at 4,000 prompt + 1,000 output|all 64 resident|To type: tonnage plan",
    f"{FIT} --least-memory {USERS}": "a MiB less is refused|With nothing given up: |To type: tonnage plan",
    f"{FIT} --device H200 --least-memory {USERS}": "planned with what H200 has besides its size",
    f"{FIT} --device L4 --least-ranks {USERS}": "devices are enough: tp |refused before: tp 1 pp 1",
    f"{FIT} --device H100 --least-ranks {USERS}": "1 device is enough: tp 1, pp 1",
    f"{FIT} --memory 20GiB {USERS} --host-kv-bytes 100GiB": "host tier  |in host memory|must still fit on the device",
    "fit smollm2 --device host --memory 1500MiB --goal longest-context": "SmolLM2-135M-Instruct on host|max_num_tokens",
    "fit smollm2 --device host --least-memory --users 4 --prompt-tokens 99 --output-tokens 1": "--device host --memory",
    f"{FIT} --memory 24GiB --goal most-concurrency": "the longest that fits, so no second one does|max_seq_len is open",
    f"{FIT} --device V100 --goal longest-context": "V100-32GB has no arithmetic in bfloat16",
    f"{FIT} --device H100 {USERS} --max-adapter-rank 8": "max_adapter_rank has no effect here",
    f"{FIT} --device H100 {USERS} --host-kv-bytes 20GiB": "host_kv_bytes 20 GiB holds the cache of",
    "fit --help": "--goal NAME|--users N|--least-memory|--host-kv-bytes SIZE|--max-seq-len N",
}


@pytest.mark.parametrize("command", GOOD, ids=lambda command: command.replace(str(LLAMA), "MODEL"))
def test_good_commands(tonnage: Program, command: str) -> None:
    ended = tonnage(*command.split())
    assert ended.code == 0, ended.err
    told = " ".join(ended.out.split())
    for piece in GOOD[command].split("|"):
        assert " ".join(piece.split()) in told


def documented() -> list[str]:
    """The commands of the page."""
    return re.findall(r"^tonnage (fit .*)$", (ROOT / "docs" / "fit.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("command", documented())
def test_the_commands_of_the_page_work(tonnage: Program, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(ROOT)
    assert tonnage(*command.split()).code == 0
    assert len(documented()) == 6


def test_the_page_says_what_the_code_says() -> None:
    page = " ".join((ROOT / "docs" / "fit.md").read_text().split())
    for link in (GEN3, GEN4, GEN5):
        assert f"{link.bytes_per_second / 10**9:.1f}" in page
    for name, costs in COSTS.items():
        assert re.search(rf"`{name}`[^|]* \| [^|]* \| {costs.split(',')[0].split(';')[0]}", page), name


def document(tonnage: Program, command: str) -> dict[str, Any]:
    ended = tonnage(*shlex.split(command), "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize(
    "command",
    [
        f"{FIT} --device H100 --goal longest-context",
        f"{FIT} --device H100 {USERS} --kv-fraction 9/10 --dtype fp16",
        f"{FIT} --memory 60GiB {USERS} --keep-free-bytes 1GiB",
        "fit smollm2 --device host --memory 1500MiB --goal most-concurrency --max-seq-len 512",
        f"{FIT} --memory 24GiB --goal longest-context",
        f"{FIT} --device L4 {USERS} --tp 2 --max-draft-tokens 3 --without 'penalty tables'",
        f"{FIT} --device L4 --users 256 --prompt-tokens 4000 --output-tokens 1000 --least-ranks",
        f"{FIT} {USERS} --least-memory",
    ],
    ids=lambda command: command.replace(str(LLAMA), "MODEL"),
)
def test_the_command_that_is_printed_gives_the_same_plan(tonnage: Program, command: str) -> None:
    found = document(tonnage, command)
    planned = document(tonnage, found["command"].removeprefix("tonnage "))
    (fitted,) = [plan for plan in found["plans"] if plan["rank"] == planned["rank"]]
    assert (planned["kv"], planned["limits"], planned["lines"]) == (fitted["kv"], fitted["limits"], fitted["lines"])


@pytest.mark.parametrize("columns", ["60", "100", "300"])
@pytest.mark.parametrize("folder", ["plain", "with a space", "it's $HOME `x`; \\"])
def test_what_is_printed_to_type_can_be_pasted(
    tonnage: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: str, folder: str
) -> None:
    """Quoted where it must be, also what a size was typed as."""
    (tmp_path / folder).mkdir()
    shutil.copy(LLAMA / "config.json", tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", columns)
    command = ["fit", f"./{folder}", "--memory", "80 GiB", "--goal", "longest-context", "--kv-bytes", "60 GiB"]
    ended = tonnage(*command, "--without", "penalty tables")
    typed = ended.out.split("To type:\n")[1].split("\n\n")[0]
    assert ("\\\n" in typed) == (columns != "300")
    assert subprocess.run(["bash", "-n", "-c", typed], check=False).returncode == 0
    words = shlex.split(typed.replace("\\\n", " "))
    assert words == shlex.split(document(tonnage, shlex.join([*command, "--without", "penalty tables"]))["command"])
    assert words[2] == f"./{folder}"
    assert words[words.index("--memory") + 1] == "80 GiB"
    assert words[words.index("--kv-bytes") + 1] == "60 GiB"
    assert tonnage(*words[1:]).code == 0


def test_json_says_what_the_table_says(tonnage: Program) -> None:
    found = document(tonnage, f"{FIT} --device H100 --users 256 --prompt-tokens 4000 --output-tokens 1000 "
                              "--host-kv-bytes 20GiB")  # fmt: skip
    assert found["schema"] == "tonnage.fit/1"
    assert found["goal"] == "256 users at 4,000 prompt + 1,000 output tokens"
    names = ["max_seq_len", "max_batch_size", "graphs", "max_num_tokens", "kv_dtype"]
    assert [each["name"] for each in found["order"]] == names
    assert all(each["kept"] in each["values"] for each in found["order"])
    assert [each["name"] for each in found["sacrifices"] if each["name"] not in names] == []
    tier = found["host_tier"]
    assert tier["num_resident"] + tier["num_waiting"] == 256
    assert tier["kv_bytes"] == tier["num_waiting"] * tier["sequence_bytes"] <= 20 * 2**30
    assert tier["swap_microseconds"] == round(2 * tier["sequence_bytes"] * 10**6 / tier["link_bytes_per_second"])
    assert found["inverse"] is None


def test_json_of_the_inverse(tonnage: Program) -> None:
    memory = document(tonnage, f"{FIT} --least-memory {USERS}")["inverse"]
    assert memory["device_bytes"] % 2**20 == 0
    assert memory["device_bytes"] < memory["comfortable_bytes"]
    ranks = document(tonnage, f"{FIT} --device L4 --least-ranks {USERS}")
    assert ranks["inverse"]["num_ranks"] == ranks["inverse"]["tp"] * ranks["inverse"]["pp"] > 1
    assert len(ranks["plans"]) == ranks["inverse"]["pp"]


def test_what_was_set_is_no_dimension_and_comes_back_in_the_command(tonnage: Program) -> None:
    found = document(tonnage, f"{FIT} --memory 24GiB --goal longest-context --kv-dtype bf16 --graphs 1,2,4")
    assert [each["name"] for each in found["order"]] == ["max_num_tokens", "max_batch_size"]
    assert re.search(r"--kv-dtype bf16 .*--graphs 1,2,4", found["command"])


def test_graphs_are_a_flag_of_run_too(tonnage: Program) -> None:
    for value in ("+64", "auto"):
        found = document(tonnage, f"{FIT} --memory 24GiB --goal longest-context --kv-dtype bf16 --graphs {value}")
        assert f"--graphs {value}" in found["command"]
        assert not any("--graphs" in note for note in found["notes"])
