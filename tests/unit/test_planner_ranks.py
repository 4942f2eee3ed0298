"""Plans for all stages of a parallel engine: one schedule, the smallest pool decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import generic_card
from tonnage.planner import plan_ranks, plan_without_device
from tonnage.terms import Rank
from tonnage.units import GiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
CARD = generic_card(24 * GiB)


def limits(**asked) -> LimitKnobs:
    return LimitKnobs(**{name: Setting(value) for name, value in asked.items()})


def test_one_stage_is_the_plan_itself():
    rank = Rank(size=2, tp=2)
    assert plan_ranks(LLAMA_8B, card=CARD, rank=rank) == (plan_without_device(LLAMA_8B, card=CARD, rank=rank),)


def test_all_stages_have_the_tokens_of_the_smallest():
    rank = Rank(size=4, pp=4, partition=(12, 8, 8, 4))
    shape = limits(max_seq_len=8192)
    alone = [
        plan_without_device(LLAMA_8B, card=CARD, rank=replace(rank, index=index), limit_knobs=shape)
        for index in range(4)
    ]
    made = plan_ranks(LLAMA_8B, card=CARD, rank=rank, limit_knobs=shape)
    smallest = min(plan.kv.tokens for plan in alone)
    assert len({plan.kv.tokens for plan in alone}) > 1
    assert {plan.kv.tokens for plan in made} == {smallest}
    assert [plan.rank.index for plan in made] == [0, 1, 2, 3]
    for plan in made:
        assert sum(line.bytes for line in plan.lines) == plan.device_bytes
        (binding,) = [cap for cap in plan.caps if cap.binding]
        assert (binding.name == "ranks") == (alone[plan.rank.index].kv.tokens > smallest)


def test_a_length_that_was_left_open_is_the_same_on_all_stages():
    made = plan_ranks(LLAMA_8B, card=generic_card(13 * GiB), rank=Rank(size=2, pp=2, partition=(20, 12)))
    assert len({plan.limits.max_seq_len for plan in made}) == 1
    assert made[0].limits.max_seq_len < LLAMA_8B.max_position_embeddings


def test_the_rank_that_has_no_plan_is_named():
    with pytest.raises(DoesNotFit, match=r"rank 0 of 2: llama-3.1-8b"):
        plan_ranks(LLAMA_8B, card=generic_card(10 * GiB), rank=Rank(size=2, pp=2, partition=(31, 1)))


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (Rank(size=3, pp=3, partition=(16, 16)), "partition"),
        (Rank(size=2, pp=2, partition=(16, 15)), "partition"),
        (Rank(size=64, tp=64), "query heads"),
        (Rank(size=40, pp=40), "has only 32 layers"),
        (Rank(size=2, tp=2, ep=3), "ep"),
    ],
)
def test_splits_that_cannot_be(rank, said):
    with pytest.raises(InvalidSetting, match=said):
        plan_ranks(LLAMA_8B, card=CARD, rank=rank)


def test_context_parallel_ranks_hold_each_others_tokens():
    """Two ranks with the whole model each: the same pool in bytes, and blocks that stand for two."""
    one = plan_without_device(
        LLAMA_8B, card=CARD, knobs=Knobs(kv_bytes=Setting(2 * GiB)), limit_knobs=limits(max_seq_len=8192)
    )
    two = plan_without_device(
        LLAMA_8B,
        card=CARD,
        knobs=Knobs(kv_bytes=Setting(2 * GiB)),
        limit_knobs=limits(max_seq_len=8192),
        rank=Rank(size=2, cp=2),
    )
    assert one.kv.bytes == two.kv.bytes == 2 * GiB
    assert two.kv.tokens == 2 * one.kv.tokens
    assert two.max_concurrency == 2 * one.max_concurrency
