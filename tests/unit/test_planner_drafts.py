"""A draft model beside the target, and the target's own layers for drafting: both in one pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shapes

from tonnage.config import LimitKnobs, Setting
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.costs.models import find_config
from tonnage.costs.price import weights_price
from tonnage.hardware import generic_card
from tonnage.planner import plan_ranks, plan_without_device
from tonnage.report.plan_json import bytes_per_token as shown_bytes_per_token
from tonnage.terms import LineKind, Rank
from tonnage.units import GiB, TiB

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
