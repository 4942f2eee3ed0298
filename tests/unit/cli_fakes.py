"""An engine made of paper, and the program run in this process: for the tests of the command line."""

from __future__ import annotations

import json
import math
import signal
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_plan, make_run

from tonnage.errors import RequestRefused
from tonnage.sampling import SamplingParams

with warnings.catch_warnings():
    # typer 0.20 names what click 8.5 has deprecated; users never see it
    warnings.simplefilter("ignore", DeprecationWarning)
    from tonnage.cli.app import main


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(name="tonnage")
def tonnage_fixture(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``tonnage("plan", "x")`` runs the program and returns its exit code and output."""

    def run(*argv: object) -> Ended:
        code = main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ended(code, out, err)

    return run


@dataclass(frozen=True)
class TokenLogprobs:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: str
    error: str | None = None
    waited: bool = False
    stop_reason: str | int | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_suspended: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    request_id: str
    text: str


@dataclass(frozen=True)
class Progress:
    num_finished: int = 0
    num_running: int = 1
    num_waiting: int = 2
    kv_used_tokens: int = 63
    kv_total_tokens: int = 100
    generated_tokens: int = 10


@dataclass
class Text:
    has_chat_template: bool = True


@dataclass
class FakeEngine:
    """Finishes ``per_step`` requests a step, repeating their prompts. A prompt tells what becomes of it:

    "long ..." is refused on arrival, "bad ..." fails, "wait ..." waited and was suspended. "stop!" sends this process
    the ``signals`` one after the other when its turn comes, and does not finish.
    """

    options: Any = None
    plan: Any = field(default_factory=make_plan)
    text: Text = field(default_factory=Text)
    asked: list[dict[str, Any]] = field(default_factory=list)
    queue: list[dict[str, Any]] = field(default_factory=list)
    ended: list[Completion] = field(default_factory=list)
    closed: bool = False
    per_step: int = 1
    signals: tuple[int, ...] = (signal.SIGINT,)

    def request(
        self, id: str, params: SamplingParams, *, prompt: Any = None, messages: Any = None, on_delta: Any = None
    ) -> dict[str, Any]:
        told = prompt if prompt is not None else messages[-1]["content"]
        if told.startswith("long"):
            raise RequestRefused(id, "The prompt is too long", need="9 tokens", have="max_seq_len = 8")
        made = {"id": id, "params": params, "prompt": prompt, "messages": messages, "on_delta": on_delta}
        self.asked.append(made)
        return {"told": told, **made}

    def submit(self, request: dict[str, Any]) -> None:
        self.queue.append(request)

    def cancel(self, request_id: str) -> None:
        for request in [each for each in self.queue if each["id"] == request_id]:
            self.queue.remove(request)
            self.ended.append(Completion(request_id, "", (), 3, "cancelled", waited=True))

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.ended)

    def step(self) -> list[Completion]:
        ended, self.ended = self.ended, []
        while self.queue and len(ended) < self.per_step:
            if self.queue[0]["told"] == "stop!":
                for number in self.signals:
                    signal.raise_signal(number)
                break
            ended.append(self._finish(self.queue.pop(0)))
        return ended

    def _finish(self, request: dict[str, Any]) -> Completion:
        told = request["told"]
        if told.startswith("bad"):
            return Completion(request["id"], "", (), 3, "error", error="the step failed: it was bad")
        text = f"you said {told}"
        if request["on_delta"]:
            request["on_delta"](Delta(request["id"], text))
        waits, asks = told.startswith("wait"), request["params"]
        return Completion(
            request["id"], text, (1, 2), 3, "stop",
            waited=waits, num_suspended=2 * waits, stop_reason=asks.stop[0] if asks.stop else None,
            logprobs=(-0.5, -math.inf),
            top_logprobs=(((1, -0.5), (7, -1.5)), ((7, -0.25), (2, -math.inf))) if asks.logprobs else (),
            prompt_logprobs=(TokenLogprobs(8, -2.0, ((9, -1.0),)),) if asks.prompt_logprobs is not None else (),
        )  # fmt: skip

    def progress(self) -> Progress:
        return Progress()

    def result(self) -> Any:
        return make_run(self.plan, finished=99, failed=99, waited=99, cancelled=99)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(name="engine")
def engine_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """``tonnage run`` finds this one instead of the real engine."""
    made = FakeEngine()

    def start(options: Any, *, on_stage: Callable[[str], None] | None = None) -> FakeEngine:
        made.options = options
        if on_stage:
            on_stage("load")
        return made

    room = types.ModuleType("tonnage.engine")
    room.start, room.EngineOptions = start, types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tonnage.engine", room)
    return made


@pytest.fixture(name="prompts")
def prompts_fixture(tmp_path: Path) -> Callable[..., Path]:
    """``prompts(line, line)`` writes a file of them and returns its path."""

    def write(*lines: str | bytes) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
        return path

    return write


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
