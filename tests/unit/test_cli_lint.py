"""``tonnage lint`` and ``tonnage explain-log`` on the command line: exit codes, files, stdin, and what they keep."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from cli_fakes import tonnage_fixture  # noqa: F401 - a fixture
from test_start_logs import LOG


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rules = dict.fromkeys(("vllm", "sglang", "trtllm"), "fake_rules:predict")
    monkeypatch.setattr("tonnage.peers.predict.RULES", rules)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


CLEAN = "vllm serve smollm2 --max-num-seqs 64"
PLACE = ("--device", "A100-80GB", "--engine", "vllm==0.19")


def test_exit_codes(tonnage) -> None:
    clean = tonnage("lint", *PLACE, "--", *CLEAN.split())
    assert (clean.code, clean.err) == (0, "")
    assert "starts: " in clean.out
    assert "1 launch: 0 errors, 0 warnings, 0 notes" in clean.out
    warned = ("lint", *PLACE, "--", *CLEAN.split(), "--enforce-eager")
    assert tonnage(*warned).code == 0
    assert tonnage("lint", "--strict", *warned[1:]).code == 1
    failing = tonnage("lint", *PLACE, "--", *CLEAN.split(), "--swap-space", "4")
    assert (failing.code, "TN005 error" in failing.out) == (2, True)
    assert "but for the errors below it starts: " in failing.out


def test_several_files_with_their_folders(tonnage, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("vllm serve $MODEL --max-num-seqs $N\n")
    (tmp_path / ".env").write_text("# of all\nexport N='32'\n")
    (tmp_path / "b.yaml").write_text(
        "services: {x: {image: 'lmsysorg/sglang:v0.5.9', command: sglang serve --model y}}"
    )
    ended = tonnage("lint", "a.sh", "b.yaml", *PLACE, "--set", "MODEL=smollm2", "--model", "y=smollm2", "--json")
    document = json.loads(ended.out)
    assert [(each["file"], each["engine"], each["version"]) for each in document["launches"]] == [
        ("a.sh", "vllm", "0.19"), ("b.yaml", "sglang", "0.5.9"),
    ]  # fmt: skip
    assert all(each["start"]["starts"] for each in document["launches"])


def test_stdin_and_annotations(tonnage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfvllm serve smollm2 -tp 2 \xff\n")))
    ended = tonnage("lint", "-", *PLACE, "--format", "github")
    assert ended.code == 2
    assert ended.out.startswith("::error file=-,line=1,title=TN030::2 tensor-parallel ranks: SmolLM2")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("lint", "nowhere.sh"), "there is no file nowhere.sh"),
        (("lint", "."), "is a folder"),
        (("lint", "--engine", "vllm", "--", "vllm", "serve", "m"), "names no release"),
        (("lint", "--engine", "nim==1.0", "--", "vllm", "serve", "m"), "no rules of an engine 'nim'"),
        (("lint", "--format", "xml", "--", "vllm", "serve", "m"), "no such format"),
        (("lint", "--set", "A", "--", "vllm", "serve", "m"), "no value is given"),
        (("lint", "--", "python", "-c", "1"), "starts no engine"),
        (("lint", "--corrections", "no.json", "--", "vllm", "serve", "m"), "there is no file no.json"),
        (("explain-log", "nowhere.log"), "there is no file nowhere.log"),
        (("lint", "--device", "H100", "--memory", "5GiB", "--", "vllm", "serve", "m"), "leave one of them out"),
        (("lint",), "Missing argument"),
    ],
)
def test_what_the_user_can_mend_is_a_paragraph(tonnage, argv, told: str) -> None:
    ended = tonnage(*argv)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count("\n") == 1


def test_a_log_is_kept_and_the_next_lint_says_so(tonnage, tmp_path: Path) -> None:
    text = LOG.replace("org/m", "smollm2").format(pool="60.00", peak="1.88", other="3.00").replace("14.96", "0.25")
    (tmp_path / "a.log").write_text(text)
    argv = ("explain-log", "a.log", "--device", "H100")
    plain = tonnage(*argv)
    assert plain.code == 0
    assert "The term that differs most is non-torch: +3 GiB in the log" in plain.out
    assert not (tmp_path / "data").exists()
    kept = tonnage(*argv, "--save")
    assert (kept.code, str(tmp_path / "data/tonnage/corrections.json") in kept.out.replace("\n", "")) == (0, True)
    place = ("--device", "H100", "--engine", "vllm==0.19.3", "--json", "--", *CLEAN.split())
    document = json.loads(tonnage("lint", *place).out)
    (launch,) = document["launches"]
    terms = {term["name"]: term for term in launch["start"]["terms"]}
    assert terms["non-torch"]["bytes"] == 3 * 2**30
    assert terms["non-torch"]["source"] == "measured"
    assert [each["code"] for each in launch["findings"] if each["code"] == "TN050"] == ["TN050"]
    elsewhere = json.loads(tonnage("lint", "--device", "A100-80GB", *place[2:]).out)
    assert "TN050" not in {each["code"] for each in elsewhere["launches"][0]["findings"]}


def test_nothing_is_kept_of_a_log_that_was_not_predicted(tonnage, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(LOG.replace("org/m", "./nowhere").format(pool="60.00", peak="1.88", other="3.00"))
    ended = tonnage("explain-log", "a.log", "--device", "H100", "--save")
    assert (ended.code, "there is nothing to keep" in ended.err) == (2, True)
    assert not (tmp_path / "data").exists()


def test_flags_that_the_log_does_not_print(tonnage, tmp_path: Path) -> None:
    text = LOG.replace("org/m", "smollm2").format(pool="60.00", peak="0.10", other="0.00").replace("14.96", "0.25")
    (tmp_path / "a.log").write_text(text)
    told = ("explain-log", "a.log", "--device", "H100", "--json")
    before, after = json.loads(tonnage(*told).out), json.loads(tonnage(*told, "--flags", "--max-num-seqs 55").out)
    rows = [{row["name"]: row for row in each["rows"]} for each in (before, after)]
    assert not rows[0]["activation peak"]["agrees"]
    assert rows[1]["activation peak"]["agrees"]


def test_a_file_of_wide_characters_is_read(tonnage, tmp_path: Path) -> None:
    (tmp_path / "wide.sh").write_text(CLEAN + "\n", encoding="utf-16")
    assert tonnage("lint", *PLACE, "wide.sh").code == 0


def test_a_folder_is_told_to_name_its_files(tonnage, tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for verb in ("lint", "explain-log"):
        assert "is a folder. To change: name its files: deploy/*" in tonnage(verb, "deploy/").err


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "-c", CLEAN), (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "smollm2"),
        ("CUDA_VISIBLE_DEVICES=0", *CLEAN.split()), ("nohup", *CLEAN.split()), ("tmux", "new", "-d", CLEAN),
    ],
)  # fmt: skip
def test_a_command_may_begin_with_what_starts_it(tonnage, command: tuple[str, ...]) -> None:
    ended = tonnage("lint", *PLACE, "--", *command)
    assert (ended.code, ended.err) == (0, "")
    assert "vLLM 0.19, smollm2" in ended.out
