"""``tonnage curve``: what is drawn, in blocks and in plain letters, and that the JSON holds the same points."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from rich.console import Console
from test_budget_curve import GROUPS, claim, group, inputs, unbounded

from tonnage.budget.curve import CURRENT, Curve, attended_curve, curve
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.hardware import Card, card_for
from tonnage.layout import KVGroupKind
from tonnage.planner import find_config, plan_without_device
from tonnage.planner.curve import curve_without_device, one_more_gib
from tonnage.report.curve_draw import BLOCKS, HEIGHT, PLAIN, Area, Picture, area_at, draw
from tonnage.report.curve_table import crossing_told, curve_text, show_curve, stack_picture
from tonnage.terms import MemoryPlan
from tonnage.units import GiB

Program = Callable[..., Ended]
CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
LLAMA, LATENT = CONFIGS / "llama-3.1-8b", CONFIGS / "deepseek-v2-lite"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")


def latent(**asked: Any) -> Curve:
    """A model whose scratch grows: 256 sequences of 131,072 tokens beside 60 GiB of weights on 100 GiB."""
    groups = (group(KVGroupKind.LATENT, block_tokens=64, block_bytes=35_136 * 64),)
    claims = (claim(unbounded(rate=40_960)),)
    shape: dict[str, Any] = {"length": 131_072, "rows": 256, "page_bytes": 2**21, "weights": 60 * GiB}
    return curve(inputs(100 * GiB, groups=groups, claims=claims, **(shape | asked)))


def shown(drawn: Curve, *, encoding: str = "utf-8", width: int = 80) -> str:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show_curve(drawn, Console(file=buffer, width=width, highlight=False, markup=False, emoji=False))
    buffer.seek(0)
    return buffer.read()


def test_a_model_whose_scratch_does_not_grow_gets_one_picture(tonnage: Program) -> None:
    ended = tonnage("curve", LLAMA, "--memory", "80GiB")
    assert ended.code == 0, ended.err
    assert "Nothing here grows" in ended.out
    assert "Tokens in the cache" not in ended.out
    assert max(len(row) for row in ended.out.splitlines()) <= 80
    tokens = json.loads(tonnage("plan", LLAMA, "--memory", "80GiB", "--json").out)["kv"]["tokens"]
    assert f"the stack crosses the budget after {tokens:,} tokens: that is the plan" in ended.out


def test_the_json_has_the_points_of_the_picture(tonnage: Program) -> None:
    ended = tonnage("curve", LLAMA, "--memory", "80GiB", "--kv-tokens", "200000", "--json")
    made = json.loads(ended.out)
    assert (made["schema"], made["attended"]) == ("tonnage.curve/1", None)
    stack = made["stack"]
    assert (stack["plan_tokens"], stack["bound_by"]) == (200_000, "kv_tokens")
    assert {stack["plan_tokens"], stack["crossing_tokens"], 0} <= set(stack["tokens"])
    assert all(len(part["sizes"]) == len(stack["tokens"]) for part in stack["parts"])


def test_bad_settings_and_refusals_are_told_as_for_a_plan(tonnage: Program) -> None:
    for flags in (["--memory", "8GiB"], [], ["--memory", "80GiB", "--kv-fraction", "2"]):
        ended = tonnage("curve", LLAMA, *flags)
        assert (ended.code, ended.out) == (2, "")
        assert "To change: " in ended.err


def test_both_pictures_of_growing_scratch() -> None:
    drawn = latent(attended_tokens=1_000_000)
    told = shown(drawn)
    assert max(len(row.rstrip()) for row in told.splitlines()) <= 80
    assert drawn.attended is not None
    for point in drawn.attended.points:
        if point.marks:
            assert f"{point.attended_tokens:,}" in told
            assert f"{point.kv_tokens:,}" in told
            assert f"{point.attended_cap:,}" in told
    assert re.search(rf"- +{drawn.attended.lent_tokens:,} +- +- +lent", told)
    assert "an arena of its own" in " ".join(told.split())
    assert re.search(r"^ +1 +f? *c +w *$", told, re.MULTILINE)
    assert re.search(r"gather +21\.\d+ GiB", told)


def test_plain_letters_where_the_terminal_has_no_blocks() -> None:
    told = shown(latent(), encoding="ascii")
    assert told.isascii()
    assert "##" in told
    assert "---" in told
    assert not set(told) & set(BLOCKS)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_pictures_fit_their_terminal(width: int) -> None:
    picture = shown(latent(), width=width).partition("Points of the curve")[0]
    assert max(len(row) for row in picture.splitlines()) <= width


def test_no_terminal_is_too_narrow_for_whole_numbers() -> None:
    def numbers(width: int) -> list[str]:
        return re.findall(r"\d[\d,.]*", shown(latent(), width=width).partition("Points of the curve")[2])

    assert numbers(40) == numbers(200)


def test_the_json_of_growing_scratch() -> None:
    drawn = latent()
    made = json.loads(curve_text(drawn))
    assert drawn.attended is not None
    assert [point["kv_tokens"] for point in made["attended"]["points"]] == [p.kv_tokens for p in drawn.attended.points]
    assert made["attended"]["points"][0]["marks"] == ["one request"]
    assert made["attended"]["points"][-1]["marks"] == ["current setting", "worst case"]
    assert made["attended"]["lent_tokens"] == drawn.attended.lent_tokens


def test_a_setting_that_is_refused_is_told() -> None:
    """Set aside whole, the worst case leaves no room for one sequence."""
    drawn = latent(scratch="reserve", attended_tokens=262_144)
    assert drawn.attended is not None
    assert drawn.attended.refused_tokens
    assert "the pool would not hold one sequence: refused" in " ".join(shown(drawn).split())


def test_the_plan_that_stops_before_the_crossing_is_marked() -> None:
    drawn = latent(kv_tokens=131_072 * 2)
    assert "p the plan stops before, at 262,144 tokens, by kv_tokens" in crossing_told(drawn.stack)
    assert [mark for _, mark in stack_picture(drawn.stack).marks] == ["^", "p"]


def test_a_cell_shows_the_area_at_its_middle() -> None:
    areas = (Area(name="a", heights=(0, 50), style=""), Area(name="b", heights=(100, 50), style=""))
    picture = Picture(areas=areas, top=100, line=100, labels=((100, "all"),), marks=((1, "x"),))
    assert [area_at(picture, 0, row) for row in range(HEIGHT)] == [1] * HEIGHT
    assert [area_at(picture, 1, row) for row in range(HEIGHT)] == [0] * (HEIGHT // 2) + [1] * (HEIGHT // 2)
    rows = draw(picture, width=2, ascii_only=True).plain.splitlines()
    assert len(rows) == HEIGHT + 1
    assert rows[0].split() == ["all", "--"]
    assert rows[-2].split() == [PLAIN[1] + PLAIN[0]]
    assert rows[-1].endswith(" x")


def test_every_group_of_layers_is_in_the_legend() -> None:
    told = shown(curve(inputs(200_000, groups=GROUPS, rows=3)))
    for name in ("weights", "state", "full", "window", "gather"):
        assert re.search(rf"^ +\S\S {name} +[\d.]+ ", told, re.MULTILINE), name


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--attended-tokens 1000000",
        "--scratch reserve --attended-tokens 300000",
        "--kv-tokens 400000 --max-batch-size 64",
        "--tp 2 --attention-dp --ep 2",
        "--tp 2 --pp 2 --kv-fraction 9/10",
        "--like vllm:gpu_memory_utilization=0.8",
        "--without sampler --block-tokens 64",
    ],
)
def test_the_current_point_is_the_plan_of_the_same_flags(tonnage: Program, flags: str) -> None:
    asked = [str(LATENT), "--device", "H100", "--attention", "trtllm", *f"--kv-dtype fp8 {flags} --json".split()]
    planned, drawn = tonnage("plan", *asked), tonnage("curve", *asked)
    assert (planned.code, drawn.code) == (0, 0) or (planned.code, planned.err) == (drawn.code, drawn.err)
    if planned.code:
        return
    made, points = json.loads(planned.out), json.loads(drawn.out)["attended"]["points"]
    (current,) = (point for point in points if "current setting" in point["marks"])
    assert (current["kv_tokens"], current["kv_bytes"]) == (made["kv"]["tokens"], made["kv"]["bytes"])
    assert current["attended_cap"] == made["attended_cap"]
    assert json.loads(drawn.out)["stack"]["plan_tokens"] == made["kv"]["tokens"]


def test_one_sequence_is_one_point() -> None:
    """With one sequence the least and the most to attend to are the same."""
    drawn = attended_curve(inputs(rows=1))
    assert [point.marks for point in drawn.points] == [("one request", CURRENT, "worst case")]
    assert shown(curve(inputs(rows=1)))


def test_the_curve_of_the_planner_is_about_its_plan() -> None:
    """At a max_seq_len that the planner found itself, too."""
    config, card = find_config(str(LLAMA)), card_for(None, 24 * GiB)
    made = plan_without_device(config, card=card)
    drawn = curve_without_device(config, card=card)
    assert drawn.max_seq_len == made.limits.max_seq_len < 131_072
    assert drawn.stack.plan_tokens == made.kv.tokens


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({}, "the device"),
        ({"kv_fraction": "9/10"}, "the device"),
        ({"total_bytes": 40 * GiB}, "total_bytes"),
        ({"kv_bytes": 20 * GiB}, "kv_bytes"),
        ({"kv_tokens": 200_000}, None),
    ],
)
def test_one_more_gib_of_what_binds(asked: dict[str, Any], what: str | None) -> None:
    values = {name: Fraction(value) if name == "kv_fraction" else value for name, value in asked.items()}
    knobs = Knobs(**{name: Setting.flag(value, value, "test") for name, value in values.items()})
    config, card = find_config(str(LLAMA)), card_for(None, 80 * GiB)
    made = plan_without_device(config, card=card, knobs=knobs)

    def plan_on(knobs: Knobs, limits: LimitKnobs, card: Card) -> MemoryPlan:
        return plan_without_device(config, card=card, knobs=knobs, limit_knobs=limits)

    more = one_more_gib(made, card=card, plan_on=plan_on)
    assert (more and more.what) == what
    if more is not None:
        whole = GiB // 131_072
        share = values.get("kv_fraction", 1)
        assert abs(more.plan.kv.tokens - made.kv.tokens - int(whole * share)) <= 16
        assert more.plan.limits == made.limits


def test_a_host_tier_beside_the_device_is_no_part_of_the_curve(tonnage: Program) -> None:
    asked = ("curve", "llama-3.1-8b", "--device", "H100", "--json")
    plain, tiered = tonnage(*asked), tonnage(*asked, "--host-kv-bytes", "64GiB")
    assert (plain.code, tiered.code, tiered.err) == (0, 0, "")


@pytest.mark.parametrize("verb", ["plan", "curve"])
@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--pp", "33", "write at most 32"),
        ("--pp", str(10**18), "write at most as many stages as the model has layers"),
        ("--max-batch-size", str(10**18), "does not fit"),
    ],
)
def test_huge_numbers_are_refused_at_once(tonnage: Program, verb: str, flag: str, value: str, told: str) -> None:
    ended = tonnage(verb, "llama-3.1-8b", "--device", "H100", flag, value)
    assert ended.code == 2
    assert told in ended.err
