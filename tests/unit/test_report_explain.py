"""``plan --explain`` tells every step, line and cap; and the reasons that plans carry are sentences for users."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from report_samples import make_plan
from rich.console import Console
from shapes import config as shape
from test_budget_curve import GROUPS, claim, inputs, unbounded

from tonnage.budget.plan import plan
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.hardware import card_for
from tonnage.planner import find_config, plan_without_device
from tonnage.report.explain import explanation, show_explanation
from tonnage.terms import Line, MemoryPlan
from tonnage.units import GiB, format_bytes

Program = Callable[..., Ended]
LLAMA = str(Path(__file__).resolve().parents[2] / "examples" / "configs" / "llama-3.1-8b")

#: name -> model, device, memory in GiB, knobs, limits.
PLANS: dict[str, tuple[str, str | None, Fraction | None, dict[str, Any], dict[str, Any]]] = {
    "80 GiB": (LLAMA, None, Fraction(80), {}, {}),
    "H100": (LLAMA, "H100", None, {"kv_fraction": Fraction(9, 10)}, {}),
    "H200": (LLAMA, "H200", None, {"keep_free_bytes": 0, "kv_dtype": "float8_e4m3fn"}, {"max_seq_len": 8192}),
    "host": ("smollm2", "host", Fraction(2), {}, {}),
    "total": (LLAMA, "H200", None, {"total_bytes": 60 * GiB}, {}),
    "bytes": (LLAMA, "H100", None, {"kv_bytes": 30 * GiB}, {"max_batch_size": 32}),
    "tokens": (LLAMA, "H100", None, {"kv_tokens": 200_000, "kv_fraction": Fraction(1, 2)}, {}),
    "few": (LLAMA, "H200", None, {}, {"max_batch_size": 4, "max_seq_len": 4096, "prefix_caching": False}),
    "no penalties": (LLAMA, "H100", None, {"disabled_claims": frozenset({"penalty tables"})}, {}),
    "fitted": (LLAMA, None, Fraction(24), {}, {}),
    "prompt log-probs": (LLAMA, "H100", None, {}, {"prompt_logprobs": True}),
}


@cache
def planned(name: str) -> MemoryPlan:
    model, device, memory, knobs, limits = PLANS[name]
    asked = {key: value if key == "disabled_claims" else flag(key, value) for key, value in knobs.items()}
    return plan_without_device(
        find_config(model),
        card=card_for(device, None if memory is None else int(memory * GiB)),
        knobs=Knobs(**asked),
        limit_knobs=LimitKnobs(**{key: flag(key, value) for key, value in limits.items()}),
    )


def flag(name: str, value: object) -> Setting[Any]:
    return Setting.flag(value, value, f"--{name.replace('_', '-')}")


@cache
def made_by_hand(name: str) -> MemoryPlan:
    asked = {
        "several groups": inputs(200_000, groups=GROUPS, rows=3, claims=()),
        "growing scratch": inputs(attended_tokens=500, kv_fraction=Fraction(1, 2)),
        "smallest rank": replace(inputs(), ranks_tokens=400, ranks_attended=300),
        "reserved": inputs(scratch="reserve"),
        "scratch that keeps": inputs(claims=(claim(unbounded(rate=10), lendable=False),)),
    }
    return plan(asked[name])


@cache
def by_reference(**asked: Any) -> MemoryPlan:
    card = card_for("H100", None)
    return plan_without_device(find_config(LLAMA), card=card, reference=ReferenceKnobs(**asked))


@cache
def published(key: str) -> MemoryPlan:
    """A model whose layers keep different things."""
    limit = LimitKnobs(max_seq_len=flag("max_seq_len", 32_768))
    return plan_without_device(shape(key), card=card_for(None, 300 * GiB), limit_knobs=limit)


BY_HAND = ("several groups", "growing scratch", "smallest rank", "reserved")


def all_plans() -> Iterator[tuple[str, MemoryPlan]]:
    yield from ((name, planned(name)) for name in PLANS)


@cache
def told_of_all() -> str:
    made = [*(each for _, each in all_plans()), *map(made_by_hand, BY_HAND), by_reference(), published("gemma-3-12b")]
    # Notes of a model name fields of its config.json, which are not words of ours.
    return "\n".join(text_of(replace(each, warnings=())) for each in (*made, published("qwen3-next-80b-a3b")))


def walk(lines: tuple[Line, ...]) -> Iterator[Line]:
    for line in lines:
        yield line
        yield from walk(line.children)


def text_of(made: MemoryPlan, **more: Any) -> str:
    return "\n".join(
        "\n".join(
            (section.title, *(p.text for p in section.paragraphs), *(d for p in section.paragraphs for d in p.details))
        )
        for section in explanation(made, **more)
    )


# --- the reasons that plans carry


def reasons(made: MemoryPlan) -> Iterator[tuple[str, str]]:
    yield from ((line.name, line.reason) for line in walk(made.lines))
    yield from ((step.name, step.reason) for step in made.steps)
    yield from ((cap.name, cap.reason) for cap in made.caps)
    yield from ((claim.name, claim.because) for claim in made.not_charged if not claim.switched_off)


@pytest.mark.parametrize("name", PLANS)
def test_every_reason_is_there_and_says_more_than_the_name(name: str) -> None:
    for about, reason in reasons(planned(name)):
        words = reason.split()
        assert len(words) >= 3, f"{about}: {reason!r}"
        assert set(words) - set(about.replace("_", " ").split()), f"{about}: {reason!r}"
        assert reason == reason.strip()
        assert "None" not in words


#: What going without a cap would lead to, and what having it takes away: a reason names one of each.
FAILURES = r"run out of memory|ending the engine|stop all|never touched|no more than"
COSTS = r"costs nothing|unused|holds no tokens|wait|raise "


def test_every_cap_names_what_it_prevents_and_what_it_costs() -> None:
    seen = {cap.name: cap.reason for _, made in all_plans() for cap in made.caps}
    seen |= {cap.name: cap.reason for cap in made_by_hand("smallest rank").caps}
    assert seen.keys() == {"budget", "total_bytes", "kv_fraction", "kv_bytes", "kv_tokens", "limits", "ranks"}
    for name, reason in seen.items():
        assert re.search(FAILURES, reason), f"{name} prevents nothing: {reason}"
        assert re.search(COSTS, reason), f"{name} costs nothing: {reason}"


# --- the explanation


@pytest.mark.parametrize("name", [*PLANS, *BY_HAND])
def test_every_number_of_the_plan_is_told(name: str) -> None:
    made = planned(name) if name in PLANS else made_by_hand(name)
    told = text_of(made)
    for step in made.steps:
        if step.op == "-" and step.operand:
            assert f"{format_bytes(step.operand)} " in told, step
            assert f"{format_bytes(step.after)} are left" in told, step
    for line in made.lines:
        if line.bytes and line.kind != "kv":
            assert format_bytes(line.bytes) in told, line.name
    for cap in made.caps:
        assert f"{cap.setting}: allows {format_bytes(cap.kv_bytes)}" in told
    for spared in made.not_charged:
        assert spared.name in told
    assert f"{made.kv.tokens:,} tokens" in told
    assert [cap.binding for cap in made.caps].count(True) == told.count("and that binds")
    assert "  " not in told
    assert ".." not in told


def test_what_was_asked_is_told_with_its_flag() -> None:
    told = text_of(planned("tokens"))
    assert "kv_tokens = 200000 (--kv-tokens)." in told
    assert "kv_fraction = 1/2 (--kv-fraction)." in told
    assert "Nothing else was named" in text_of(planned("80 GiB"))
    assert "penalty tables: switched off." in text_of(planned("no penalties"))
    assert "(the largest that fits)" in text_of(planned("fitted"))


def test_each_kind_of_layer_has_its_words() -> None:
    told = text_of(made_by_hand("several groups"))
    assert "1 layer (full): keys and values of every token; a block of 4 tokens takes 100 B. " in told
    assert "1 layer (window): keys and values of the last tokens only" in told
    assert "1 layer (state): one state for each sequence, however long it is; a block takes 70 B. " in told
    assert "bytes a token" not in told


def test_groups_that_are_alike_are_told_together() -> None:
    told = text_of(published("qwen3-next-80b-a3b"))
    assert re.search(
        r"^36 layers \(state\): one state for each sequence, .*; in \d+ groups, so that", told, re.MULTILINE
    )
    assert told.count("recurrent states of 256 sequences") == 1
    assert "40 layers (window-1024): keys and values of the last tokens only" in text_of(published("gemma-3-12b"))


def test_the_reference_policy_is_explained_by_its_own_steps() -> None:
    made = by_reference()
    told = text_of(made)
    assert "What was asked\n" in told
    assert "the reference policy: everything beside the cache is one measured peak" in told
    assert "Nothing else was named" not in told
    peak = next(step for step in made.steps if step.name == "peak")
    assert f"{format_bytes(peak.operand)} for peak: " in told
    for line in made.lines:
        if line.bytes and line.kind != "kv":
            assert f"{format_bytes(line.bytes)} for {line.name}: " in told, line.name
    for about, reason in reasons(made):
        assert len(reason.split()) >= 2, f"{about}: {reason!r}"


def test_caps_of_the_reference_policy_say_what_to_raise() -> None:
    told = text_of(by_reference(max_tokens=200_000))
    assert "Nothing: max_tokens = 200,000 holds the cache back, not memory; for more, raise max_tokens." in told


def test_scratch_that_grows_is_told_with_what_a_step_may_attend_to() -> None:
    told = text_of(made_by_hand("growing scratch"))
    assert "One step may attend to at most 500 tokens" in told


def test_one_more_gib() -> None:
    made, more = planned("80 GiB"), planned("H100")
    told = text_of(made, more=("the device", replace(more, kv=replace(more.kv, tokens=made.kv.tokens + 7376))))
    assert f"the cache would hold {made.kv.tokens + 7376:,} tokens, 7,376 tokens more" in told
    assert "Nothing: kv_tokens = 200000 (--kv-tokens) holds the cache back, not memory" in text_of(planned("tokens"))
    assert "raise max_batch_size or max_seq_len" in text_of(planned("few"))


def test_a_plan_from_a_file_with_less_in_it_is_explained_too() -> None:
    """Older plans: caps without reasons, steps of other operations."""
    told = text_of(make_plan())
    assert "58.00 GiB are left" in told or "58 GiB are left" in told
    assert "--memory: allows" in told


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_wraps(width: int) -> None:
    stream = io.StringIO()
    show_explanation(planned("H100"), Console(file=stream, width=width, highlight=False, markup=False, emoji=False))
    rows = stream.getvalue().splitlines()
    assert max(len(row) for row in rows) <= width
    assert sum(row.startswith("    - ") for row in rows) > 5


def test_as_a_command(tonnage: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = tonnage("plan", LLAMA, "--memory", "80GiB", "--kv-fraction", "0.9", "--explain")
    assert ended.code == 0, ended.err
    assert "What one more GiB would give\n  With one GiB more of the device" in ended.out
    both = tonnage("plan", LLAMA, "--memory", "80GiB", "--explain", "--json")
    assert (both.code, both.out) == (2, "")
    assert "To change: keep one of them" in both.err


# --- its words


#: Words of the field that a reader may not know. Whichever of them is told must be in the glossary.
FIELD_WORDS = (
    "activation", "adapter", "admission", "allocator", "arena", "attend", "attention", "batch", "block", "bucket",
    "cache", "cap", "captured", "chunk", "claim", "collectives", "communicator", "context", "decode", "draft", "dtype",
    "encoder", "expert", "fragmentation", "graph", "group", "indexer", "kernel", "keys", "latent", "layer", "lend",
    "lent", "library", "log-prob", "logits", "look-ahead", "page", "page table", "peak", "penalties", "pool", "prefill",
    "probe", "prompt", "rank", "recurrent", "reserve", "sampler", "scratch", "sequence", "slab", "slot", "stage",
    "state", "step", "suspended", "table", "tile", "token", "transient", "vocabulary", "weights", "window",
    "workspace",
)  # fmt: skip
GLOSSARY = (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text().lower()


def in_glossary(word: str) -> bool:
    """Whether a row of the table is about the word, in singular or plural."""
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    return any(re.search(rf"\b{re.escape(word)}(s|es|ed)?\b", row) for row in rows)


@pytest.mark.parametrize("word", FIELD_WORDS)
def test_words_of_the_field_are_in_the_glossary(word: str) -> None:
    told = told_of_all()
    if re.search(rf"\b{re.escape(word)}(s|es|ed)?\b", told.lower()):
        assert in_glossary(word), f"{word!r} is told and docs/glossary.md does not explain it"


def test_names_of_settings_are_in_the_glossary() -> None:
    told = told_of_all()
    for name in sorted(set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", told))):
        assert f"`{name}`" in GLOSSARY, f"{name} is told and docs/glossary.md does not name it"
