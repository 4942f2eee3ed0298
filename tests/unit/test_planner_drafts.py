"""A draft model beside the target, and the target's own layers for drafting: both in one pool."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import shapes

from tonnage.config import LimitKnobs, Setting
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.costs.models import find_config
from tonnage.costs.price import weights_price
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import card_for, generic_card
from tonnage.planner import plan_ranks, plan_without_device
from tonnage.planner.fit import fit
from tonnage.planner.workload import Workload
from tonnage.report.plan_json import bytes_per_token as shown_bytes_per_token
from tonnage.terms import LineKind, Rank
from tonnage.units import GiB, MiB, TiB

TARGET, DRAFT = shapes.config("llama-3.1-70b"), shapes.config("llama-3.1-8b")
CARD = generic_card(400 * GiB)


def test_a_token_costs_what_it_costs_in_both():
    alone = plan_without_device(TARGET, card=CARD)
    made = plan_without_device(TARGET, card=CARD, draft=DRAFT)
    assert shown_bytes_per_token(made.kv) == 327_680 + 131_072
    assert made.limits.max_draft_tokens == 4
    added = made.bytes_of(LineKind.WEIGHTS) - alone.bytes_of(LineKind.WEIGHTS)
    assert added == weights_price(DRAFT).quantity.bytes == 16_060_522_496
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    assert made.fingerprint != alone.fingerprint


def test_it_lies_on_the_last_stage():
    first, last = plan_ranks(TARGET, card=CARD, rank=Rank(size=2, pp=2), draft=DRAFT)
    plain = plan_ranks(TARGET, card=CARD, rank=Rank(size=2, pp=2))
    assert first.bytes_of(LineKind.WEIGHTS) == plain[0].bytes_of(LineKind.WEIGHTS)
    assert last.bytes_of(LineKind.WEIGHTS) - plain[1].bytes_of(LineKind.WEIGHTS) == 16_060_522_496
    assert first.kv.tokens == last.kv.tokens < plain[0].kv.tokens


def test_vocabularies_that_differ_are_told():
    made = plan_without_device(TARGET, card=CARD, draft=find_config("smollm2"))
    assert any("share one tokenizer" in warning for warning in made.warnings)


@pytest.mark.parametrize("key", ["deepseek-v4-flash", "glm-5"])
def test_layers_for_drafting_cost_nothing_until_something_is_drafted(key):
    config = shapes.config(key)
    if not config.mtp_layers:
        config = replace(config, mtp_layers=config.layers[-1:])
    card = generic_card(4 * TiB)
    shape = LimitKnobs(max_batch_size=Setting(8), max_seq_len=Setting(4096))
    plain = plan_without_device(config, card=card, limit_knobs=shape)
    drafting = plan_without_device(config, card=card, limit_knobs=replace(shape, max_draft_tokens=Setting(1)))
    assert drafting.bytes_of(LineKind.WEIGHTS) > plain.bytes_of(LineKind.WEIGHTS)
    assert bytes_per_token(kv_layout(config, with_mtp=True)) >= bytes_per_token(kv_layout(config))


def test_a_decode_step_computes_the_drafts_too():
    shape = LimitKnobs(max_batch_size=Setting(256), max_draft_tokens=Setting(7))
    plain = plan_without_device(DRAFT, card=CARD, limit_knobs=replace(shape, max_draft_tokens=Setting(0)))
    drafting = plan_without_device(DRAFT, card=CARD, limit_knobs=shape)
    assert (plain.limits.max_logits_rows, drafting.limits.max_logits_rows) == (256, 256 * 8)
    assert drafting.bytes_of(LineKind.GRAPHS) > plain.bytes_of(LineKind.GRAPHS)
    with pytest.raises(InvalidSetting, match=r"8 tokens, drafts included.*raise max_num_tokens to 2048"):
        plan_without_device(DRAFT, card=CARD, limit_knobs=replace(shape, max_num_tokens=Setting(256)))


def test_a_fit_gives_every_user_room_for_drafts():
    shape = LimitKnobs(max_draft_tokens=Setting(3))
    workload = Workload(num_users=200, prompt_tokens=2000, output_tokens=500)
    made = fit(DRAFT, card=card_for("H100", None), goal=workload, limit_knobs=shape)
    assert made.plan.limits.max_num_tokens >= 4 * made.plan.limits.max_batch_size >= 4 * 200


def test_a_refusal_with_drafts_names_a_smaller_step():
    shape = LimitKnobs(max_draft_tokens=Setting(4), max_seq_len=Setting(4096), max_batch_size=Setting(256))
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(DRAFT, card=generic_card(18_600 * MiB), limit_knobs=shape)
    smaller = re.search(r"lower max_num_tokens to (\d+)", str(caught.value))
    assert smaller
    lowered = replace(shape, max_num_tokens=Setting(int(smaller[1])))
    plan_without_device(DRAFT, card=generic_card(18_600 * MiB), limit_knobs=lowered)
