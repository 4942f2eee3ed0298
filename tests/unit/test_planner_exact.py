"""A plan whose stages somebody else knows: the seam, the table, and what is said where torch is missing."""

from __future__ import annotations

import builtins
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from rich.console import Console

from tonnage.config import LimitKnobs, Limits, Setting
from tonnage.costs.config import ModelConfig
from tonnage.hardware import Card, find_card
from tonnage.planner import plan_ranks, plan_without_device
from tonnage.report.plan_json import parse_plan, plan_text
from tonnage.report.table import show_plan
from tonnage.terms import LineKind, MemoryPlan, Quantity, Rank, Source, StagePeak, StepShape
from tonnage.units import GiB, MiB

Program = Callable[..., Ended]

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "configs" / "llama-3.1-8b"
LLAMA = ModelConfig.read(FOLDER)
H200 = find_card("H200")


def seen(num_bytes: int) -> Quantity:
    return Quantity(
        bytes=num_bytes, low=num_bytes * 9 // 10, high=num_bytes * 11 // 10, source=Source.SIMULATED, ref="by a fake"
    )


@dataclass
class Fake:
    """Knows prefill alone: a MiB for each token that a step computes."""

    knows: bool = True
    identity: str = "a fake"
    asked: list[tuple[str, int]] = field(default_factory=list)

    def stages(
        self, config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str
    ) -> tuple[StagePeak, ...] | None:
        self.asked.append((config.name, limits.max_num_tokens))
        if not self.knows:
            return None
        size = limits.max_num_tokens * MiB
        shape = StepShape(num_tokens=limits.max_num_tokens)
        made = StagePeak(
            stage="prefill", shape=shape, allocated=seen(size), reserved=seen(size + GiB), uncompiled_bytes=2 * size
        )
        return (made,)


def limit(tokens: int) -> LimitKnobs:
    return LimitKnobs(max_num_tokens=Setting.flag(tokens, str(tokens), "--max-num-tokens"))


def test_the_stages_of_a_probe_take_the_place_of_the_closed_forms():
    probe = Fake()
    made = plan_without_device(LLAMA, card=H200, limit_knobs=limit(512), probe=probe)
    assert set(probe.asked) == {(LLAMA.name, 512)}
    transient = next(line for line in made.lines if line.name == "transient")
    assert [child.name for child in transient.children] == ["prefill"]
    assert transient.bytes >= 512 * MiB
    assert transient.source == Source.SIMULATED
    fragmentation = next(line for line in made.lines if line.name == "fragmentation")
    assert fragmentation.bytes == GiB
    assert [stage.stage for stage in made.stages] == ["prefill"]


def test_where_the_probe_knows_nothing_closed_forms_answer():
    closed = plan_without_device(LLAMA, card=H200)
    fallen = plan_without_device(LLAMA, card=H200, probe=Fake(knows=False))
    assert fallen.lines == closed.lines
    assert fallen.stages == closed.stages
    assert fallen.fingerprint != closed.fingerprint  # it was asked another way, with other versions behind it


def test_a_draft_model_is_probed_too():
    probe = Fake()
    made = plan_without_device(LLAMA, card=H200, limit_knobs=limit(64), draft=LLAMA, probe=probe)
    assert [stage.stage for stage in made.stages] == ["prefill", "draft"]


def test_every_pipeline_stage_is_probed():
    probe = Fake()
    made = plan_ranks(LLAMA, card=H200, limit_knobs=limit(64), rank=Rank(size=2, pp=2), probe=probe)
    assert len(made) == 2
    assert all(plan.stages[0].allocated.ref == "by a fake" for plan in made)


def test_a_plan_keeps_its_stages_in_a_file():
    made = plan_without_device(LLAMA, card=H200, limit_knobs=limit(64), probe=Fake())
    text = plan_text(made)
    assert json.loads(text)["stages"][0]["uncompiled_bytes"] == 128 * MiB
    assert parse_plan(text, file="plan.json").plan == made
    older = json.loads(text)
    del older["stages"]
    assert parse_plan(json.dumps(older), file="plan.json").plan.stages == ()
    assert made.bytes_of(LineKind.TRANSIENT) > 64 * MiB


def shown(plan: MemoryPlan) -> str:
    stream = io.StringIO()
    show_plan(plan, Console(file=stream, width=100))
    return stream.getvalue()


def test_the_table_has_intervals_and_how_they_are_known():
    assert "Peaks of the stages" not in shown(plan_without_device(LLAMA, card=H200))
    told = shown(plan_without_device(LLAMA, card=H200, limit_knobs=limit(1000), probe=Fake()))
    for piece in (
        "Peaks of the stages",
        "prefill",
        "1,000",
        "1000 MiB",
        "900 MiB – 1.07 GiB",
        "1.95 GiB",
        "prefill: by a fake.",
    ):
        assert piece in told, told


def test_torch_may_be_missing(tonnage: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name: str, *args: Any, **how: Any) -> Any:
        if name == "tonnage.engine.exact":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    ended = tonnage("plan", FOLDER, "--device", "H200", "--exact")
    assert (ended.code, ended.out) == (2, "")
    assert "tonnage plan --exact needs the engine's libraries, and 'torch' is not installed" in ended.err
    assert "pip install 'tonnage[engine]'" in ended.err
    assert tonnage("plan", FOLDER, "--device", "H200").code == 0


def test_libraries_may_not_fit_together(tonnage: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def other_version(name: str, *args: Any, **how: Any) -> Any:
        if name == "tonnage.engine.exact":
            raise ImportError("cannot import name 'AttentionInterface'", name="transformers")
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", other_version)
    ended = tonnage("plan", FOLDER, "--device", "H200", "--exact")
    assert (ended.code, ended.out) == (2, "")
    assert "cannot load the engine's libraries: cannot import name 'AttentionInterface'" in ended.err
    assert "pip install 'tonnage[engine]'" in ended.err
