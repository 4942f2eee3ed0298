"""``tonnage run`` with an engine made of paper: what is asked of it, what is kept, how it ends."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import (  # noqa: F401 - fixtures
    Ended,
    FakeEngine,
    Progress,
    engine_fixture,
    lines_of,
    main,
    prompts_fixture,
    tonnage_fixture,
)

from tonnage.cli.asks import from_lines
from tonnage.cli.display import Bar, PlainLines
from tonnage.config import Origin
from tonnage.errors import InputError

Program = Callable[..., Ended]


def test_a_prompt_becomes_text_and_a_ledger(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", "--prompt", "hello", "--prompt", "wait a bit", "--memory", "1500MiB")
    assert ended.code == 0
    assert "[prompt-1]\nyou said hello\n" in ended.out
    assert "[prompt-2]\nyou said wait a bit\n" in ended.out
    assert "2 finished, 0 failed, 0 cancelled; 1 had to wait for memory" in ended.out
    assert "Ledger, planned against actual" in ended.out
    assert "unattributed" in ended.out
    assert "start-up: load" in ended.err
    assert engine.closed
    assert engine.options.memory_bytes == 1500 * 2**20
    assert engine.asked[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert engine.asked[0]["params"].max_tokens is None  # the engine's own default, which stops at max_seq_len


def test_settings_reach_the_engine_with_their_flags(tonnage: Program, engine: FakeEngine) -> None:
    flags = "--max-seq-len 512 --kv-fraction 90% --keep-free-bytes 0 --kv-dtype bf16 --dtype fp32 --max-tokens 7"
    flags += " --graphs X2"
    assert tonnage("run", "m", "--prompt", "hello", *flags.split()).code == 0
    assert engine.options.limit_knobs.max_seq_len.value == 512
    assert engine.options.knobs.keep_free_bytes.value == 0
    assert engine.options.knobs.kv_dtype.value == "bfloat16"
    assert engine.options.dtype == "float32"
    fraction = engine.options.knobs.kv_fraction
    assert (fraction.text, fraction.origin, fraction.where) == ("90%", Origin.FLAG, "--kv-fraction")
    assert engine.asked[0]["params"].max_tokens == 7
    assert engine.options.memory_bytes is None
    graphs = engine.options.knobs.graphs
    assert (graphs.value, graphs.text, graphs.where) == ("x2", "X2", "--graphs")


@pytest.mark.parametrize(
    ("flag", "template", "chats"),
    [("--chat", False, True), ("--no-chat", True, False), (None, True, True), (None, False, False)],
)
def test_chat_or_not(tonnage: Program, engine: FakeEngine, flag: str | None, template: bool, chats: bool) -> None:
    engine.text.has_chat_template = template
    tonnage("run", "m", "--prompt", "hello", *([flag] if flag else []))
    assert (engine.asked[0]["prompt"] is None) == chats


def test_lines_are_served_and_kept(tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "wait"}]
    path = prompts(
        json.dumps({"prompt": "a"}), "", json.dumps({"id": 7, "messages": talk, "max_tokens": 3}), '{"prompt": "ü"}'
    )
    out, kept = tmp_path / "out.jsonl", tmp_path / "run.json"
    ended = tonnage("run", "m", "--input", path, "--output", out, "--run-file", kept)
    assert ended.code == 0
    assert [line["id"] for line in lines_of(out)] == ["line-1", "7", "line-4"]
    assert lines_of(out)[1] == {
        "id": "7",
        "text": "you said wait",
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_generated_tokens": 2,
        "num_cached_tokens": 0,
        "waited": True,
        "num_suspended": 2,
    }
    assert "ü" in out.read_text()
    assert engine.asked[1]["messages"] == talk
    assert engine.asked[1]["params"].max_tokens == 3
    document = json.loads(kept.read_text())
    assert document["requests"].items() >= {"finished": 3, "failed": 0, "cancelled": 0, "waited": 1}.items()
    assert tonnage("report", kept).code == 0


BROKEN = [
    ("{", "not JSON at column"),
    ("nonsense", "not JSON at column 1"),
    ("[1]", "not an object such as"),
    ('{"max_tokens": 4}', 'needs either "prompt" or "messages"'),
    ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "not both"),
    ('{"prompt": 5}', '"prompt" is not text'),
    ('{"messages": []}', '"messages" is not a list of messages'),
    ('{"messages": [{"role": "user"}]}', '"messages"[0] is not an object with text under "role" and "content"'),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens = 0: out of range. To change: write at least 1."),
    ('{"prompt": "a", "max_tokens": -4}', "max_tokens = -4: out of range"),
    ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens = 1.5: not a whole number"),
    ('{"prompt": "a", "max_tokens": true}', "max_tokens = True: not a whole number"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature = 'hot': not a number"),
    ('{"prompt": "a", "top_p": NaN}', "top_p = nan: not a number"),
    ('{"prompt": "a", "stop": ["x", ""]}', "stop = '': not a string of at least one character"),
    ('{"prompt": "a", "stop": 5}', "stop = 5: not a list"),
    ('{"prompt": "a", "logit_bias": [42]}', "logit_bias = [42]: not a mapping"),
    ('{"prompt": "a", "logit_bias": {"the": 1}}', "logit_bias = 'the': not a whole number"),
    ('{"prompt": "a", "min_tokens": 5, "max_tokens": 4}', "min_tokens = 5: above max_tokens = 4"),
    ('{"prompt": "a", "cache": {"salt": ""}}', "salt = 0 bytes: no text of a useful length"),
    ('{"prompt": "a", "cache": {"salt": "' + "x" * 2000 + '"}}', "salt = 2,000 bytes: no text of a useful length"),
    ('{"prompt": "a", "cache": {"foo": 1}}', "cache = 'foo': no field of that name"),
    ('{"prompt": "a", "cache": {"priority": 50.5}}', "cache priority = 50.5: not a whole number"),
    (
        '{"prompt": "a", "cache": {"retain_seconds": 1' + "0" * 400 + "}}",
        "retain_seconds = 100000000000... (401 digits)",
    ),
    ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "temperature = 100000000000... (401 digits): out of range"),
    ('{"prompt": "a", "top_p": -1' + "0" * 400 + "}", "top_p = -100000000000... (401 digits): out of range"),
    ('{"prompt": "a", "max_tokens": 1' + "0" * 400 + "}", "max_tokens = 100000000000... (401 digits): out of range"),
    ('{"prompt": "a", "top_k": 1' + "0" * 5000 + "}", "not JSON"),
    ('{"prompt": "a", "logit_bias": {"' + "1" * 5000 + '": 1}}', "not a whole number"),
    (
        '{"prompt": "a", "logit_bias": {"' + "1" * 50 + '": 1}}',
        "logit_bias = 111111111111... (50 digits): out of range",
    ),
    ('{"prompt": "a", "min_p": Infinity}', "min_p = inf: out of range"),
    ('{"prompt": "a", "cache": {"pin": true}}', "write any of reuse, salt, priority, retain_seconds, retain_tokens"),
    ('{"prompt": "a", "use_beam_search": true}', '"use_beam_search": beam search is not supported, a sequence goes on'),
    ('{"prompt": "a", "num_beams": 4}', 'or ask for independent samples with "n"'),
    ('{"prompt": "a", "best_of": 3, "n": 2}', '"best_of": beam search is not supported'),
    ('{"prompt": "a", "id": []}', '"id" is neither text nor a whole number'),
    ('{"prompt": "a", "id": "first"}', "id 'first' is that of line 1 too"),
    (b'{"prompt": "\xff"}', "not UTF-8 text (byte 13)"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("broken", "told"), BROKEN, ids=[told for _, told in BROKEN])
def test_a_broken_line_is_told_and_the_others_run(
    tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path, broken: str, told: str
) -> None:
    path = prompts('{"prompt": "a", "id": "first"}', broken, '{"prompt": "b"}')
    ended = tonnage("run", "m", "--input", path, "--output", tmp_path / "out.jsonl")
    assert ended.code == 1
    (line,) = [line for line in ended.err.splitlines() if line.startswith("failed: ")]
    assert line.startswith("failed: line 2")
    assert told in line
    assert len(line) < 400
    assert "2 finished, 1 failed" in ended.out
    ids = [line["id"] for line in lines_of(tmp_path / "out.jsonl") if "text" in line]
    assert ids == ["first", "line-3"]


def test_requests_that_fail_are_told_one_by_one(tonnage: Program, engine: FakeEngine, prompts: Any) -> None:
    path = prompts('{"prompt": "long ago"}', '{"id": "x", "prompt": "bad luck"}', '{"prompt": "fine"}')
    ended = tonnage("run", "m", "--input", path)
    assert ended.code == 1
    assert "failed: line 1 (id line-1): The prompt is too long. Need: 9 tokens. Have: max_seq_len = 8." in ended.err
    assert "failed: line 2 (id x): the step failed: it was bad" in ended.err
    assert "1 finished, 2 failed" in ended.out


def test_many_failures_are_not_all_told(tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path) -> None:
    ended = tonnage("run", "m", "--input", prompts(*["{"] * 30), "--output", tmp_path / "out.jsonl")
    assert ended.err.count("failed: line") == 20
    assert f"failed: 10 more, all in {tmp_path / 'out.jsonl'}" in ended.err
    assert len(lines_of(tmp_path / "out.jsonl")) == 30


def test_keys_that_mean_nothing_here_are_told(tonnage: Program, engine: FakeEngine, prompts: Any) -> None:
    ended = tonnage("run", "m", "--input", prompts('{"prompt": "a", "max_token": 5}', '{"prompt": "b"}'))
    assert ended.code == 0
    assert "ignored: 'max_token' in 1 lines" in ended.err


def test_json_is_alone_on_stdout(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", "--prompt", "a", "--json")
    document = json.loads(ended.out)
    assert {"schema", "requests", "tokens", "ledger", "plan"} <= document.keys()
    assert document["requests"]["finished"] == 1


def test_results_may_go_to_stdout(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", "--prompt", "a", "--prompt", "b", "--output", "-")
    assert [json.loads(line)["text"] for line in ended.out.splitlines()] == ["you said a", "you said b"]
    assert "Ledger" in ended.err
    assert tonnage("run", "m", "--prompt", "a", "--output", "-", "--json").code == 2


def test_input_from_stdin(tonnage: Program, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'\xef\xbb\xbf{"prompt": "a"}\n')))
    assert "you said a" in tonnage("run", "m", "--input", "-").out


def test_long_and_many_texts_are_shortened(tonnage: Program, engine: FakeEngine, prompts: Any) -> None:
    ended = tonnage("run", "m", "--input", prompts(*[json.dumps({"prompt": "x" * 1000})] * 5))
    assert ended.out.count("you said") == 3
    assert "x" * 401 not in ended.out
    assert "[2 more, --output FILE keeps them all]" in ended.out


def test_answers_to_typed_prompts_are_shown_whole(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", *["--prompt", "x" * 1000] * 5)
    assert ended.out.count("you said " + "x" * 1000) == 5


def test_files_are_checked_before_the_engine_starts(tonnage: Program, engine: FakeEngine, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("precious")
    for flag in ("--output", "--run-file"):
        ended = tonnage("run", "m", "--prompt", "a", flag, there)
        assert ended.code == 2
        assert f"{flag} {there} exists" in ended.err
        assert "--force" in ended.err
    assert engine.options is None
    assert there.read_text() == "precious"
    assert tonnage("run", "m", "--prompt", "a", "--output", there, "--force").code == 0
    assert lines_of(there)[0]["text"] == "you said a"


def test_an_old_output_survives_a_start_that_fails(
    tonnage: Program, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise InputError("no")

    monkeypatch.setattr(sys.modules["tonnage.engine"], "start", fails)
    (tmp_path / "there").write_text("precious")
    assert tonnage("run", "m", "--prompt", "a", "--output", tmp_path / "there", "--force").code == 2
    assert (tmp_path / "there").read_text() == "precious"


def test_the_engine_extra_may_be_missing(tonnage: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name: str, *args: Any, **how: Any) -> Any:
        if name == "tonnage.engine":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    ended = tonnage("run", "m", "--prompt", "a")
    assert ended.code == 2
    assert "'torch' is not installed" in ended.err
    assert "pip install 'tonnage[engine]' -c constraints.txt" in ended.err


def test_a_single_prompt_streams_to_a_terminal(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["run", "m", "--prompt", "hello"]) == 0
    assert capsys.readouterr().out.count("you said hello") == 1
    assert engine.asked[0]["on_delta"] is not None


def test_an_engine_that_dies_leaves_what_had_finished(
    tonnage: Program, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([engine.step])

    def dies() -> Any:
        try:
            return next(steps)()
        except StopIteration:
            raise InputError("the device is lost") from None

    monkeypatch.setattr(engine, "step", dies)
    out = tmp_path / "out.jsonl"
    ended = tonnage("run", "m", "--prompt", "a", "--prompt", "b", "--output", out)
    assert ended.code == 2
    assert f"1 finished requests are kept in {out}" in ended.err
    assert "the device is lost" in ended.err
    assert len(lines_of(out)) == 1
    assert engine.closed


def test_nothing_but_blank_lines_is_no_input() -> None:
    with pytest.raises(InputError, match="holds no requests"):
        from_lines([b"\n", b"  \n"], file="f")


def test_plain_lines_come_now_and_then() -> None:
    now, out = [0.0], io.StringIO()
    display = PlainLines(out, clock=lambda: now[0])
    display.begin(64)
    for _ in range(12):
        now[0] += 1.0
        display.step(Progress(generated_tokens=int(10 * now[0])), done=5)  # type: ignore[arg-type]
    assert (
        out.getvalue().splitlines() == ["5/64 requests done, 1 running, 2 waiting, KV 63 % in use, 10.0 tokens/s"] * 2
    )


@pytest.mark.parametrize("total", [64, None])
def test_the_bar_draws(total: int | None) -> None:
    out = io.StringIO()
    display = Bar(out)
    display.stage("load")
    display.begin(total)
    display.step(Progress(), done=5)  # type: ignore[arg-type]
    display.close()
    display.close()


def test_where_nobody_knows_how_many_will_come_there_is_no_total() -> None:
    now, out = [0.0], io.StringIO()
    display = PlainLines(out, clock=lambda: now[0])
    display.begin(None)
    now[0] = 6.0
    display.step(Progress(), done=5)  # type: ignore[arg-type]
    assert out.getvalue().startswith("5 requests done, 1 running")


def test_results_never_replace_their_input(tonnage: Program, engine: FakeEngine, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "hello"}\n')
    for flag in ("--output", "--run-file"):
        ended = tonnage("run", "m", "--input", str(lines), flag, str(lines), "--force", "--memory", "1500MiB")
        assert ended.code == 2
        assert f"{flag} and --input are the same file" in ended.err
    assert lines.read_text() == '{"prompt": "hello"}\n'


def test_json_without_an_output_file_holds_the_results(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", "--prompt", "hello", "--memory", "1500MiB", "--json")
    assert [record["text"] for record in json.loads(ended.out)["results"]] == ["you said hello"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_with_the_file_and_a_remedy(tonnage: Program, engine: FakeEngine) -> None:
    ended = tonnage("run", "m", "--prompt", "hello", "--memory", "1500MiB", "--output", "/dev/full", "--force")
    assert ended.code == 2
    assert "--output /dev/full cannot be written: No space left on device" in ended.err
    assert "To change: " in ended.err
