"""How ``tonnage run`` ends when it is told to stop: nothing that finished is lost, and the handlers come back."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import (  # noqa: F401 - fixtures
    Ended,
    FakeEngine,
    engine_fixture,
    lines_of,
    prompts_fixture,
    tonnage_fixture,
)

from tonnage.cli.asks import from_prompts
from tonnage.cli.display import PlainLines
from tonnage.cli.interrupt import noted_interrupts
from tonnage.cli.serving import ResultLines, Serving
from tonnage.errors import InputError

Program = Callable[..., Ended]


def test_ctrl_c_keeps_what_had_finished(tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path) -> None:
    path = prompts('{"prompt": "a"}', '{"prompt": "stop!"}', '{"prompt": "never"}')
    out, kept = tmp_path / "out.jsonl", tmp_path / "run.json"
    ended = tonnage("run", "m", "--input", path, "--output", out, "--run-file", kept)
    assert ended.code == 130
    assert [line["id"] for line in lines_of(out)] == ["line-1"]
    assert f"interrupted: 1 of 3 requests had finished, kept in {out}" in ended.err
    counts = json.loads(kept.read_text())["requests"]
    assert counts.items() >= {"finished": 1, "failed": 0, "cancelled": 2, "waited": 2}.items()
    assert "[line-1]\nyou said a" in ended.out
    assert engine.closed


def test_sigterm_winds_down_too(tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path) -> None:
    engine.signals = (signal.SIGTERM,)
    out = tmp_path / "out.jsonl"
    ended = tonnage("run", "m", "--input", prompts('{"prompt": "a"}', '{"prompt": "stop!"}'), "--output", out)
    assert ended.code == 143
    assert [line["id"] for line in lines_of(out)] == ["line-1"]
    assert f"interrupted: 1 of 2 requests had finished, kept in {out}" in ended.err
    assert "1 finished, 0 failed, 1 cancelled" in ended.out
    assert engine.closed


def test_an_interrupt_between_two_writes_loses_none(
    tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.per_step = 3
    write = ResultLines.write

    def interrupted(self: ResultLines, record: dict[str, Any]) -> None:
        write(self, record)
        if record["id"] == "line-1":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ResultLines, "write", interrupted)
    out = tmp_path / "out.jsonl"
    ended = tonnage("run", "m", "--input", prompts(*['{"prompt": "a"}'] * 5), "--output", out)
    assert ended.code == 130
    assert [line["id"] for line in lines_of(out)] == ["line-1", "line-2", "line-3"]
    assert "interrupted: 3 of 5 requests had finished" in ended.err
    assert "3 finished, 0 failed, 2 cancelled" in ended.out


def test_a_step_that_was_interrupted_still_hands_over(
    tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path
) -> None:
    engine.per_step = 3
    out = tmp_path / "out.jsonl"
    path = prompts('{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "stop!"}', '{"prompt": "never"}')
    assert tonnage("run", "m", "--input", path, "--output", out).code == 130
    assert [line["id"] for line in lines_of(out)] == ["line-1", "line-2"]


def test_an_interrupt_while_a_request_is_submitted(
    tonnage: Program, engine: FakeEngine, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(request: dict[str, Any]) -> None:
        engine.queue.append(request)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine, "submit", submit)
    ended = tonnage("run", "m", "--input", prompts(*['{"prompt": "a"}'] * 3))
    assert ended.code == 130
    assert len(engine.asked) == 1
    assert "0 finished, 0 failed, 3 cancelled" in ended.out
    assert "interrupted: 0 of 3 requests had finished" in ended.err


def test_a_request_is_known_before_it_is_submitted(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(
        engine, from_prompts(["a"]), results=ResultLines(None, force=False), display=PlainLines(io.StringIO())
    )  # type: ignore[arg-type]

    def submit(request: dict[str, Any]) -> None:
        assert request["id"] in serving._open
        raise InputError("there is one already")

    monkeypatch.setattr(engine, "submit", submit)
    serving.run(chat=False, on_delta=None)
    assert [failure.why for failure in serving.tally.failures] == ["there is one already."]
    assert not serving._open


def test_an_interrupt_during_the_last_step_is_told(tonnage: Program, engine: FakeEngine, prompts: Any) -> None:
    def finish(request: dict[str, Any]) -> Any:
        signal.raise_signal(signal.SIGINT)
        return FakeEngine._finish(engine, request)

    engine._finish = finish  # type: ignore[method-assign]
    ended = tonnage("run", "m", "--input", prompts('{"prompt": "a"}'))
    assert ended.code == 130
    assert "1 finished, 0 failed, 0 cancelled" in ended.out
    assert "interrupted: 1 of 1 requests had finished" in ended.err


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_it_at_once(
    tonnage: Program, engine: FakeEngine, prompts: Any, tmp_path: Path, second: int
) -> None:
    engine.signals = (signal.SIGINT, second)
    out = tmp_path / "out.jsonl"
    ended = tonnage("run", "m", "--input", prompts('{"prompt": "a"}', '{"prompt": "stop!"}'), "--output", out)
    assert ended.code == 130
    assert ended.err.splitlines()[-2:] == [f"1 finished requests are kept in {out}", "tonnage: interrupted"]
    assert ended.out == ""
    assert [line["id"] for line in lines_of(out)] == ["line-1"]
    assert engine.closed


@pytest.mark.parametrize("signals", [(), (signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_the_handlers_from_before_come_back(
    tonnage: Program, engine: FakeEngine, prompts: Any, signals: tuple[int, ...]
) -> None:
    def own(*_: object) -> None:
        raise AssertionError

    old = signal.signal(signal.SIGINT, own), signal.signal(signal.SIGTERM, own)
    try:
        engine.signals = signals
        tonnage("run", "m", "--input", prompts('{"prompt": "a"}', '{"prompt": "stop!"}' if signals else ""))
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGINT, old[0])
        signal.signal(signal.SIGTERM, old[1])


def test_handlers_come_back_after_an_error_and_ignored_signals_stay_so() -> None:
    def fail_inside() -> None:
        with noted_interrupts() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop
            assert signal.getsignal(signal.SIGTERM) == stop.note
            raise InputError("the device is lost")

    old = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(InputError):
            fail_inside()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, old[0])
        signal.signal(signal.SIGTERM, old[1])


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def serve() -> None:
        with noted_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert seen == [before]


def test_ctrl_c_before_the_engine_is_up(tonnage: Program, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["tonnage.engine"], "start", interrupted)
    ended = tonnage("run", "m", "--prompt", "a")
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "tonnage: interrupted"
