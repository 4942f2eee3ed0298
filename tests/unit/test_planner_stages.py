"""Stages whose layers keep different things: one count of tokens, and remedies that work for all of them."""

from __future__ import annotations

import re

import pytest
import shapes

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.errors import DoesNotFit
from tonnage.hardware import card_for, generic_card
from tonnage.planner import plan_ranks
from tonnage.terms import Rank
from tonnage.units import GiB, parse_bytes


def limits(**asked) -> LimitKnobs:
    return LimitKnobs(**{name: Setting(value) for name, value in asked.items()})


def pipeline(pp: int) -> Rank:
    return Rank(size=pp, pp=pp)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("key", ["gemma-2-27b", "gemma-3-27b", "qwen3.6-27b", "kimi-linear-48b", "deepseek-v4-flash"])
@pytest.mark.parametrize("rows", [1, 16])
def test_stages_with_units_of_their_own_hold_the_same_tokens(key, pp, rows):
    config, card = shapes.config(key), generic_card(2000 * GiB)
    made = plan_ranks(config, card=card, limit_knobs=limits(max_seq_len=4096, max_batch_size=rows), rank=pipeline(pp))
    assert len({plan.kv.tokens for plan in made}) == 1
    assert made[0].kv.tokens >= 4096 * rows
    assert len({plan.max_concurrency for plan in made}) == 1
    for plan in made:
        assert sum(line.bytes for line in plan.lines) == plan.device_bytes


REFUSED = [
    ("gpt-oss-20b", 8 * GiB, {"max_seq_len": 32768}, 2),
    ("llama-3.1-8b", 8 * GiB, {"max_seq_len": 4096, "max_batch_size": 16}, 2),
    ("qwen3.6-27b", 20 * GiB, {"max_seq_len": 8192}, 3),
    ("gemma-3-27b", 20 * GiB, {"max_seq_len": 16384, "max_batch_size": 8}, 3),
]


@pytest.mark.parametrize(("key", "memory", "shape", "pp"), REFUSED)
def test_every_remedy_works_on_all_stages(key, memory, shape, pp):
    config = shapes.config(key)
    with pytest.raises(DoesNotFit) as caught:
        plan_ranks(config, card=generic_card(memory), limit_knobs=limits(**shape), rank=pipeline(pp))
    assert caught.value.remedies
    for remedy in caught.value.remedies:
        changed = dict(shape)
        changed |= {name: int(text) for name, text in re.findall(r"lower (max_\w+) to (\d+)", remedy)}
        sizes = re.findall(r"give it (\S+) of memory", remedy)
        keep = re.findall(r"lower keep_free_bytes to (\S+)", remedy)
        knobs = Knobs(keep_free_bytes=Setting(parse_bytes(keep[0], knob="", allow_zero=True))) if keep else Knobs()
        card = generic_card(parse_bytes(sizes[0], knob="") if sizes else memory)
        assert changed != shape or sizes or keep, remedy
        plan_ranks(config, card=card, knobs=knobs, limit_knobs=limits(**changed), rank=pipeline(pp))


def test_a_card_too_small_is_told_of_more_cards_and_of_a_narrower_cache():
    card, shape = card_for("H100", None), limits(max_seq_len=131_072, max_batch_size=4)
    with pytest.raises(DoesNotFit) as caught:
        plan_ranks(shapes.config("llama-3.1-70b"), card=card, limit_knobs=shape, rank=Rank())
    spread = re.search(r"spread it over tp (\d+)", str(caught.value))
    assert spread
    tp = int(spread[1])
    plan_ranks(shapes.config("llama-3.1-70b"), card=card, limit_knobs=shape, rank=Rank(size=tp, tp=tp))
    with pytest.raises(DoesNotFit):
        plan_ranks(shapes.config("llama-3.1-70b"), card=card, limit_knobs=shape, rank=Rank(size=tp // 2, tp=tp // 2))
    narrow = card.with_total(32 * GiB)
    with pytest.raises(DoesNotFit, match="set kv_dtype to fp8"):
        plan_ranks(shapes.config("llama-3.1-8b"), card=narrow, limit_knobs=shape, rank=Rank())
    fp8 = Knobs(kv_dtype=Setting("fp8"))
    plan_ranks(shapes.config("llama-3.1-8b"), card=narrow, knobs=fp8, limit_knobs=shape, rank=Rank())


def test_scratch_set_aside_whole_may_be_set_aside_for_less():
    knobs = Knobs(scratch=Setting("reserve"), kv_dtype=Setting("fp8"))
    asked = {
        "card": card_for("H100", None),
        "backend": "trtllm",
        "limit_knobs": limits(max_seq_len=32768),
        "rank": Rank(),
    }
    with pytest.raises(DoesNotFit) as caught:
        plan_ranks(shapes.config("deepseek-v2-lite"), knobs=knobs, **asked)
    bound = re.search(r"set attended_tokens to (\d+)", str(caught.value))
    assert bound
    bounded = Knobs(scratch=Setting("reserve"), kv_dtype=Setting("fp8"), attended_tokens=Setting(int(bound[1])))
    (made,) = plan_ranks(shapes.config("deepseek-v2-lite"), knobs=bounded, **asked)
    assert made.attended_cap == int(bound[1])


@pytest.mark.parametrize("key", ["gemma-2-27b", "qwen3.6-27b"])
def test_the_reference_policy_shares_them_too(key):
    made = plan_ranks(
        shapes.config(key),
        card=generic_card(400 * GiB),
        limit_knobs=limits(max_seq_len=4096, max_batch_size=8),
        rank=pipeline(3),
        reference=ReferenceKnobs(),
    )
    assert len({plan.kv.tokens for plan in made}) == len({plan.max_concurrency for plan in made}) == 1
    for plan in made:
        assert sum(line.bytes for line in plan.lines) == plan.device_bytes


def test_a_stage_of_states_alone_follows_the_others():
    """It has no tokens of its own to count, and no policy divides by what one costs there."""
    rank = Rank(size=3, pp=3, partition=(3, 1, 60))
    shape = limits(max_seq_len=4096, max_batch_size=8)
    for reference in (None, ReferenceKnobs()):
        made = plan_ranks(
            shapes.config("qwen3.6-27b"), card=generic_card(70 * GiB), limit_knobs=shape, rank=rank, reference=reference
        )
        assert len({plan.kv.tokens for plan in made}) == 1
