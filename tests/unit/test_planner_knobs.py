"""Knobs that only plans know: graphs, attended tokens, the worst case of growing scratch, features of requests."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting
from tonnage.hardware import generic_card
from tonnage.planner import check_knobs, plan_without_device, refuse_planned_only, resolve_limits
from tonnage.units import GiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")


def knobs(**asked) -> Knobs:
    return Knobs(**{name: Setting.flag(value, value, f"--{name}") for name, value in asked.items()})


def test_fewer_graphs_leave_more_for_the_pool():
    tokens = [
        plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), knobs=knobs(graphs=text)).kv.tokens
        for text in ("none", "1,2,4,8", "default")
    ]
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == 3


def test_named_graphs_that_end_early_are_told_of():
    for text, is_told in (("1,2,4", True), ("x2", False), ("none", False), ("1,256", False)):
        made = plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), knobs=knobs(graphs=text))
        assert any("graphs end at 4" in told for told in made.warnings) == is_told


@pytest.mark.parametrize(
    "asked",
    [{"state_dtype": "bfloat16"}, {"scratch": "cap"}, {"attended_tokens": 1}],
)
def test_the_engine_refuses_what_only_plans_know(asked):
    (name,) = asked
    check_knobs(knobs(**asked))
    with pytest.raises(InvalidSetting, match=f"{name}.*only plans do"):
        refuse_planned_only(knobs(**asked), LimitKnobs())


ENGINE_LIMITS = ("max_seq_len", "max_batch_size", "max_num_tokens", "prompt_logprobs", "prefix_caching")


@pytest.mark.parametrize("name", [each.name for each in fields(LimitKnobs) if each.name not in ENGINE_LIMITS])
def test_the_engine_refuses_limits_that_only_plans_know(name):
    with pytest.raises(InvalidSetting, match=f"{name}.*only plans do"):
        refuse_planned_only(Knobs(), LimitKnobs(**{name: Setting(4)}))


def test_the_engine_takes_the_other_limits():
    refuse_planned_only(Knobs(), LimitKnobs(**dict.fromkeys(ENGINE_LIMITS, Setting(1))))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"disk_kv_bytes": 1}, "not in this release"),
        ({"scratch": "lend"}, "cannot be lent"),
        ({"scratch": "borrow"}, "no such policy"),
        ({"state_dtype": "float3"}, "not a dtype"),
        ({"attended_tokens": 0}, "not a whole number above 0"),
        ({"host_kv_bytes": -1}, "not a whole number of at least 0"),
        ({"host_kv_bytes": 10**400}, "larger than any there is"),
        ({"kv_bytes": 10**4000}, "larger than any there is"),
    ],
)
def test_knobs_refused(asked, said):
    with pytest.raises(InvalidSetting, match=said):
        plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), knobs=knobs(**asked))


def test_features_of_requests():
    asked = LimitKnobs(max_adapters=Setting(4), prompt_logprobs=Setting(True), max_draft_tokens=Setting(3))
    limits, _ = resolve_limits(LLAMA_8B, asked)
    assert (limits.max_adapters, limits.max_adapter_rank, limits.prompt_logprobs) == (4, 16, True)
    assert (limits.max_draft_tokens, limits.extra_tokens, limits.max_encoder_tokens) == (3, 3, 0)
    with pytest.raises(InvalidSetting, match="has no encoder"):
        resolve_limits(LLAMA_8B, LimitKnobs(max_encoder_tokens=Setting(100)))
