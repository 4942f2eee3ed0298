"""The command line as a user meets it: commands that must work, and what is said when they cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, FakeEngine, engine_fixture, main, tonnage_fixture  # noqa: F401 - fixtures
from report_samples import make_plan, make_run

from tonnage.cli import app
from tonnage.config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_NUM_TOKENS
from tonnage.errors import DriverOOM, StartupError
from tonnage.report import plan_text, run_text

Program = Callable[..., Ended]

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "configs" / "llama-3.1-8b"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ask nobody for a model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with one file of each kind: good, old, cut short, and not ours."""
    (tmp_path / "plan.json").write_text(plan_text(make_plan()))
    (tmp_path / "run.json").write_text(run_text(make_run()))
    (tmp_path / "short.json").write_text(plan_text(make_plan())[:1000])
    (tmp_path / "later.json").write_text('{"schema": "tonnage.plan/7"}')
    (tmp_path / "other.json").write_text('{"schema": "other/1"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "badjson").mkdir()
    (tmp_path / "badjson" / "config.json").write_text("{")
    (tmp_path / "nolayers").mkdir()
    config = json.loads((LLAMA / "config.json").read_text())
    del config["num_hidden_layers"]
    (tmp_path / "nolayers" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLAN = f"plan {LLAMA}"
H100 = f"{PLAN} --device H100"
NAMED = ("Llama 3.1 8B", str(LLAMA))

#: command line -> what its paragraph must hold. "|" separates the pieces.
BAD = {
    # what the device is
    PLAN: "does not know the device|Need: --device NAME or --memory SIZE|To change: add --device H100",
    f"{PLAN} --device A40 --memory 44GiB": "A40 is not in the catalogue|alone, such as --memory 45GiB",
    f"{PLAN} --device H100 --memory 80GiB": "both say how large|Need: one of them|--device H100 --total-bytes 80GiB",
    f"{PLAN} --device H1000": "'H1000'|not in the catalogue|close: H100|To change: use one of",
    f"{PLAN} --gpu H1000": "'H1000'|not in the catalogue|close: H100",
    f"{PLAN} --gpu h200-5g.99gb": "H200 has no MIG profile 5g.99gb|To change: use one of 1g.18gb",
    f"{PLAN} --device host": "host memory has no size|add --memory",
    # sizes
    f"{PLAN} --memory 0": "--memory = '0'|zero|To change: write",
    f"{PLAN} --memory -80GiB": "--memory = '-80GiB'|negative|To change: write",
    f"{PLAN} --memory NaN": "--memory = 'NaN'|not a number|To change: write",
    f"{PLAN} --memory inf": "--memory = 'inf'|not a number|To change: write",
    f"{PLAN} --memory 80GiBs": "--memory = '80GiBs'|'GiBs' is not a unit|To change: use B, KiB",
    f"{PLAN} --memory 80G": "--memory = '80G'|'G' is not a unit|GiB",
    f"{PLAN} --memory 0.3": "--memory = '0.3'|whole number of bytes",
    f"{PLAN} --memory 8O": "--memory = '8O'|not a unit",
    f"{PLAN} --memory=": "--memory = ''|not a number",
    # every knob names its flag
    f"{PLAN} --memory 80GiB --total-bytes 0": "--total-bytes = '0'|zero",
    f"{PLAN} --memory 80GiB --keep-free-bytes -1": "--keep-free-bytes = '-1'|negative",
    f"{PLAN} --memory 80GiB --kv-bytes lots": "--kv-bytes = 'lots'|not a number",
    f"{PLAN} --memory 80GiB --kv-tokens 0": "--kv-tokens = '0'|zero|at least 1",
    f"{PLAN} --memory 80GiB --kv-tokens 1.5": "--kv-tokens = '1.5'|not a whole number",
    f"{PLAN} --memory 80GiB --kv-fraction 0": "--kv-fraction = '0'|outside 0 < share <= 1|9/10",
    f"{PLAN} --memory 80GiB --kv-fraction 1.1": "--kv-fraction = '1.1'|outside|90%",
    f"{PLAN} --memory 80GiB --kv-fraction nan": "--kv-fraction = 'nan'|not a share",
    f"{PLAN} --memory 80GiB --kv-fraction 1/0": "--kv-fraction = '1/0'|not a share",
    f"{PLAN} --memory 80GiB --kv-dtype fp7": "--kv-dtype = 'fp7'|not a dtype|bfloat16",
    f"{PLAN} --memory 80GiB --dtype int4": "--dtype = 'int4'|not a dtype|bfloat16",
    f"{PLAN} --memory 80GiB --block-tokens 0": "--block-tokens = '0'|zero",
    f"{PLAN} --memory 80GiB --max-seq-len -3": "--max-seq-len = '-3'|negative|at least 1",
    f"{PLAN} --memory 80GiB --max-batch-size none": "--max-batch-size = 'none'|not a number",
    f"{PLAN} --memory 80GiB --max-num-tokens 1e3.5": "--max-num-tokens = '1e3.5'|not a number",
    f"{PLAN} --memory 80GiB --max-seq-len 200000": "max_seq_len = 200000|131,072|To change: use at most 131072",
    # what does not fit
    f"{PLAN} --memory 8GiB": "does not fit|weights alone take 14.96 GiB|Need: |Have: 8 GiB|short|To change: give it",
    f"{PLAN} --memory 80GiB --total-bytes 8GiB": "does not fit|Need: |Have: 8 GiB|To change: raise total_bytes",
    f"{PLAN} --memory 80GiB --keep-free-bytes 70GiB": "does not fit|Need: |Have: |lower keep_free_bytes",
    f"{PLAN} --memory 20GiB --max-seq-len 131072": "max_seq_len = 131,072|Need: |Have: |lower max_seq_len to",
    f"{PLAN} --memory 80GiB --kv-bytes 1KiB": "Need: |Have: |raise kv_bytes",
    # models
    "plan ./nowhere --memory 80GiB": "./nowhere|no such folder or file|To change: ",
    "plan nobody/nothing --memory 80GiB": "nobody/nothing|no such folder|To change: ",
    "plan empty --memory 80GiB": "empty|no config.json|To change: ",
    "plan llama-3.1-9b --memory 80GiB": "llama-3.1-9b|no such folder or built-in shape|close: llama-3.1-8b|To change: ",
    "plan ling-3.0-flash --memory 80GiB": "not among the built-in shapes|give its config.json",
    "plan badjson --memory 80GiB": "badjson|cannot be read|To change: ",
    "plan nolayers --memory 80GiB": "nolayers|num_hidden_layers",
    # files
    f"{PLAN} --memory 80GiB --output plan.json": "--output plan.json exists|To change: choose another|--force",
    f"{PLAN} --memory 80GiB --output no/plan.json": "there is no folder no|To change: make it first",
    "report nowhere.json": "there is no file nowhere.json",
    "report empty": "empty cannot be read: Is a directory",
    "report short.json": "short.json ends too early|To change: give a file that tonnage wrote",
    "report later.json": "later.json|'tonnage.plan/7'|reads tonnage.plan/1|To change: ",
    "report other.json": "other.json|neither a plan nor a run|To change: ",
    "diff plan.json short.json": "short.json ends too early",
    # run, before there is an engine
    "run m": "nothing to do|Need: one of --prompt TEXT|--input FILE|To change: add --prompt",
    "run m --prompt a --input plan.json": "both --prompt and --input|To change: keep one",
    "run m --input nowhere.jsonl": "--input nowhere.jsonl cannot be read: No such file|To change: check the path",
    "run m --input empty": "--input empty cannot be read: Is a directory|To change: name a file in it",
    "run m --input /dev/null": "holds no requests|To change: write one object a line",
    "run m --prompt a --memory 1500MB1": "--memory = '1500MB1'",
    "run m --prompt a --max-tokens 0": "--max-tokens = '0'|zero|at least 1",
    "run m --prompt a --output plan.json": "--output plan.json exists|--force",
    "run m --prompt a --run-file plan.json": "--run-file plan.json exists|--force",
    "run m --prompt a --output x --run-file x": "--output and --run-file both write x|To change: give them two names",
    "run m --prompt a --run-file -": "--run-file needs a file|use --json",
    f"{PLAN} --memory 80GiB --output -": "--output needs a file|use --json",
    "run m --prompt a --output - --json": "both write to stdout|To change: ",
    f"{PLAN} --graphs none.json": "--graphs = 'none.json' cannot be read: No|To change: check the path; write one",
    f"{PLAN} --corrections none.json": "about starts of other engines|To change: add --engine",
    f"{PLAN} --device H100 --engine vllm==0.19 --corrections none.json": "there is no file none.json",
    f"{PLAN} --device H100 --engine vllm==0.19 --corrections empty": "empty cannot be read: Is a directory",
    f"{PLAN} --device H100 --max-adapters {10**18}": "does not fit|To change: lower max_adapters to",
    f"{PLAN} --device H100 --lookahead-steps {10**18}": "does not fit|To change: lower lookahead_steps to",
    f"{PLAN} --device H100 --max-draft-tokens {10**18}": "does not fit|To change: lower max_draft_tokens to",
    f"{PLAN} --device H100 --max-batch-size {10**8}": "does not fit|To change: lower max_batch_size to",
    f"{H100} --max-batch-size {10**8} --max-num-tokens {10**8}": "leave max_batch_size and max_num_tokens out",
    f"{PLAN} --memory 1GiB --max-batch-size {10**18}": "To change: leave max_batch_size out and give it",
    f"{PLAN} --memory {10**19}": "larger than any there is|To change: ",
    "explain-log x.log --corrections y.json": "nothing is to be kept|To change: add --save",
    "diff plan.json plan.json --gpu H100": "--device (--gpu) would change nothing|To change: leave it out",
    "diff plan.json plan.json --memory 80GiB --tp 2 --max-seq-len 8": "--memory, --max-seq-len, --tp would change",
    "diff plan.json plan.json --like vllm:max_num_seqs=3": "--like would change nothing",
    "diff plan.json plan.json --attention-dp --stage 0 --pp 1": "--pp, --stage, --attention-dp would change nothing",
    "diff plan.json plan.json --corrections x --dtype fp8": "--dtype, --corrections would|leave them out",
    f"diff {LLAMA} --gpu H100 --engine vllm==0.19 --engine vllm --pp 2 --stage 2": "--stage = 2: stages are",
    f"{H100} --output {'a' * 300}": "--output 'aaa|cannot be written: File name too long. To change: choose a shorter",
    f"{H100} --html {'a' * 300}": "--html 'aaa|To change: choose a shorter name",
    f"{H100} --reference max_beam_width={10**15}": "To change: give smaller numbers by --reference",
    # the program itself
    "paln x": "No such command 'paln'|Did you mean 'plan'?|To change: see tonnage --help",
    f"{PLAN} --memry 80GiB": "No such option '--memry'|Did you mean '--memory'?|To change: see tonnage plan --help",
    f"{PLAN} --max-model-len 8192": "a flag of vLLM. To change: write --max-seq-len.",
    f"{PLAN} --tensor-parallel-size 2": "a flag of vLLM, SGLang and TensorRT-LLM. To change: write --tp.",
    f"{PLAN} --kv-cache-dtype fp8": "To change: write --kv-dtype. See",
    f"{PLAN} --gpu-memory-utilization 0.9": "To change: write --like vllm:gpu_memory_utilization=VALUE.",
    f"{PLAN} --enforce-eager": "To change: write --like vllm:enforce_eager.",
    f"{PLAN} --max-prefill-tokens 5": "with --engine sglang, write --like sglang:max_prefill_tokens=VALUE.",
    f"{PLAN} --trust-remote-code": "leave it out; tonnage lint reads whole commands",
    f"fit {LLAMA} --gpu-memory-utilization 0.9": "leave it out; tonnage lint reads whole commands",
    "lint --max-model-len 8192": "No such option '--max-model-len'",
    f"{PLAN} --memory 80GiB --dtype fp8": "--dtype = 'fp8'|use one of float32|planned from their own config.json",
    "plan": "Missing argument 'MODEL'|To change: see tonnage plan --help",
    "diff plan.json": "diff compares two files, and one was given|MODEL with two --engine",
    f"{PLAN} --memory": "'--memory' requires an argument|To change: see tonnage",
    f"{PLAN} extra --memory 80GiB": "unexpected extra argument (extra)",
    "--nonsense": "No such option '--nonsense'",
}


@pytest.mark.parametrize("command", BAD, ids=lambda command: command.replace(str(LLAMA), "MODEL"))
def test_bad_input_is_told_in_one_paragraph(tonnage: Program, engine: FakeEngine, files: Path, command: str) -> None:
    ended = tonnage(*command.split())
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("tonnage: ")
    assert ended.err.count("To change: ") == 1
    for piece in BAD[command].split("|"):
        assert piece in ended.err
    assert engine.options is None


def test_a_refusal_names_a_length_that_then_works(tonnage: Program) -> None:
    refused = tonnage("plan", LLAMA, "--memory", "20GiB", "--max-seq-len", "131072")
    assert refused.code == 2
    found = re.search(r"max_seq_len to ([\d,]+)", refused.err)
    assert found is not None, refused.err
    fits = found[1].replace(",", "")
    works = tonnage("plan", LLAMA, "--memory", "20GiB", "--max-seq-len", fits, "--json")
    assert works.code == 0
    assert json.loads(works.out)["max_concurrency"] >= 1


GOOD = {
    f"{PLAN} --memory 80GiB": "131,072 bytes a token",
    f"{PLAN} --device H100 --kv-dtype fp8 --max-seq-len 8192": "65,536 bytes a token",
    f"{PLAN} --device A100-40GB --kv-tokens 40k --max-seq-len 8Ki --block-tokens 32": "40,000 tokens in 1,250 blocks",
    f"{PLAN} --memory 80GiB --kv-fraction 90% --keep-free-bytes 0 --total-bytes 60GiB --json": '"origin": "flag"',
    "plan smollm2 --device host --memory 1500MiB --output new.json": "SmolLM2-135M-Instruct on host",
    "run m --prompt hello --memory 1500MiB --run-file new.json": "Ledger, planned against actual",
    "report plan.json": "How the pool was found",
    "report run.json": "Ledger, planned against actual",
    "diff plan.json run.json": "nothing differs",
    "diff run.json run.json --json": '"tonnage.diff/1"',
    "--version": "tonnage 0.",
    "--help": "Commands:",
    "run --help": "--prompt TEXT",
}


@pytest.mark.parametrize("command", GOOD, ids=lambda command: command.replace(str(LLAMA), "MODEL"))
def test_good_commands(tonnage: Program, engine: FakeEngine, files: Path, command: str) -> None:
    ended = tonnage(*command.split())
    assert ended.code == 0, ended.err
    assert GOOD[command] in ended.out
    if "new.json" in command:
        assert tonnage("report", "new.json").code == 0


def test_the_plan_of_a_known_model(tonnage: Program) -> None:
    document: dict[str, Any] = json.loads(tonnage("plan", LLAMA, "--memory", "80GiB", "--json").out)
    assert document["device_bytes"] == 85_899_345_920
    assert sum(line["bytes"] for line in document["lines"]) == 85_899_345_920
    assert min(line["bytes"] for line in document["lines"]) >= 0
    assert document["kv"]["bytes_per_token"] == 131_072
    assert [cap["binding"] for cap in document["caps"]].count(True) == 1
    assert document["kv"]["blocks"] * document["kv"]["block_bytes"] == document["kv"]["bytes"]


def test_output_and_json_are_the_same_file(tonnage: Program, files: Path) -> None:
    ended = tonnage("plan", LLAMA, "--memory", "80GiB", "--json", "--output", "new.json")
    assert (files / "new.json").read_text() == ended.out
    assert tonnage("report", "new.json", "--json").out == ended.out
    assert tonnage("plan", LLAMA, "--memory", "81GiB", "--output", "new.json", "--force").code == 0
    assert (files / "new.json").read_text() != ended.out


def test_no_arguments_show_the_help(tonnage: Program) -> None:
    ended = tonnage()
    assert ended.code == 2
    assert "Commands:" in ended.err


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_the_help_says_defaults_of_planner_and_host(tonnage: Program, verb: str) -> None:
    told = " ".join(tonnage(verb, "--help").out.split())
    assert f"(default {DEFAULT_MAX_BATCH_SIZE}; 32 on the host)" in told
    assert f"(default {DEFAULT_MAX_NUM_TOKENS}; 512 on the host)" in told


@pytest.mark.parametrize("verb", ["plan", "fit", "curve"])
def test_the_built_in_shapes_are_listed(tonnage: Program, files: Path, verb: str) -> None:
    ended = tonnage(verb, "help")
    assert (ended.code, ended.err) == (0, "")
    assert all(name in ended.out for name in ("smollm2", "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "inferred *"))
    assert tonnage(verb, "HELP", "--memory", "nonsense").out == ended.out
    (files / "help").mkdir()  # a folder of that name is a model, if a bad one
    assert tonnage(verb, "help").code == 2


def test_gpu_is_another_word_for_device(tonnage: Program) -> None:
    asked = [tonnage("plan", "smollm2", flag, "h100-80", "--json") for flag in ("--device", "--gpu")]
    assert asked[0] == asked[1]
    assert asked[0].code == 0


def test_a_built_in_shape_is_planned_like_its_folder(tonnage: Program, files: Path) -> None:
    named, folder = (json.loads(tonnage("plan", model, "--device", "H100", "--json").out) for model in NAMED)
    assert named["lines"] == folder["lines"]
    assert named["kv"] == folder["kv"]


@pytest.mark.parametrize("command", ["report zero.json", "report nested.json", "diff plan.json zero.json"])
def test_impossible_files_are_the_users_not_our_defect(tonnage: Program, files: Path, command: str) -> None:
    document = json.loads((files / "plan.json").read_text())
    document["kv"]["layout"]["groups"][0]["block_tokens"] = 0
    (files / "zero.json").write_text(json.dumps(document))
    line = document["lines"][0]
    for _ in range(400):
        line = {**line, "children": [line]}
    document["lines"][0] = line
    (files / "nested.json").write_text(json.dumps(document))
    ended = tonnage(*command.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"tonnage: {command.split()[-1]}: ")
    assert "defect" not in ended.err


def test_every_verb_says_what_it_is_in_one_line(tonnage: Program) -> None:
    assert "..." not in tonnage("--help").out.split("Commands:")[1]


def broken_verb(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr("tonnage.report.files.read_file", fails)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ZeroDivisionError("by nought"), 1, "a defect of Tonnage, not of what you asked: ZeroDivisionError: by nought"),
        (DriverOOM("cuMemCreate", "2"), 1, "tonnage: cuMemCreate failed: 2"),
        (StartupError("load", "no file", history=["open: 0 -> 1"], remedy="look"), 1, "stage 'load': no file. Before"),
        (OSError(28, "No space left on device", "x.json"), 1, "tonnage: x.json: No space left on device."),
        (KeyboardInterrupt(), 130, "tonnage: interrupted"),
    ],
)
def test_whatever_happens_is_one_paragraph(
    tonnage: Program, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, told: str
) -> None:
    broken_verb(error, monkeypatch)
    ended = tonnage("report", "x")
    assert ended.code == code
    assert told in ended.err
    assert ended.err.count("\n") == 1


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken_verb(ZeroDivisionError(), monkeypatch)
    monkeypatch.setenv(app.TRACEBACK_VARIABLE, "1")
    assert main(["report", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_paragraphs_wrap_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    main(["plan", "x"])
    assert max(len(row) for row in capsys.readouterr().err.splitlines()) <= 40


def process(*args: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "tonnage", *args], stderr=subprocess.PIPE, text=True, **options)


def test_as_a_process(tmp_path: Path) -> None:
    with process("plan", str(LLAMA), "--memory", "80GiB", stdout=subprocess.PIPE) as run:
        out, err = run.communicate()
    assert (run.returncode, err) == (0, "")
    assert "\x1b" not in out
    with process("plan", str(LLAMA), "--memory", "eighty", stdout=subprocess.PIPE) as run:
        out, err = run.communicate()
    assert (run.returncode, out) == (2, "")
    assert err.startswith("tonnage: --memory = 'eighty': not a number")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_reader_who_leaves_early_hears_nothing(options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with process("plan", str(LLAMA), "--memory", "80GiB", *options, stdout=writer) as run:
        os.close(writer)
        _, err = run.communicate()
    assert err == ""
    assert run.returncode != 0


def test_a_terminal_without_unicode_gets_plain_signs() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    with process("plan", str(LLAMA), "--memory", "80GiB", stdout=subprocess.PIPE, env=environment) as run:
        out, err = run.communicate()
    assert (run.returncode, err) == (0, "")
    assert "####" in out
    assert re.search(r"derived, [\d.]+ - [\d.]+ GiB", out)
    assert " ? " not in out


def test_a_card_may_be_given_the_total_that_its_driver_reports(tonnage: Program) -> None:
    made = json.loads(tonnage("plan", LLAMA, "--device", "H100", "--memory", "79.11GiB", "--json").out)
    assert made["device_bytes"] == int(79.11 * 2**30)
    assert "79.11 GiB" in tonnage("plan", LLAMA, "--device", "H100", "--memory", "79.11GiB").out
