"""Any claim can be switched off in a plan that nothing is built from, and snapshots of recurrent states are priced."""

from __future__ import annotations

import pytest
import shapes

from tonnage.budget.pool import group_prices
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.kv import kv_layout
from tonnage.errors import InvalidSetting
from tonnage.hardware import card_for, generic_card
from tonnage.layout import state_bytes_per_sequence
from tonnage.planner import claims_for, plan_without_device, resolve_limits
from tonnage.planner.claims import without
from tonnage.planner.site import holds, kv_bytes_for
from tonnage.units import GiB

LLAMA, HYBRID, H100 = shapes.config("llama-3.1-8b"), shapes.config("qwen3.6-27b"), card_for("H100", None)
CARD = generic_card(200 * GiB)
LIMITS = resolve_limits(LLAMA, LimitKnobs())[0]


def planned(config=LLAMA, *, card=H100, off=(), **asked):
    shape = LimitKnobs(**{name: Setting(value) for name, value in asked.items()})
    return plan_without_device(config, card=card, limit_knobs=shape, knobs=Knobs(disabled_claims=frozenset(off)))


ALL = [claim.name for claim in claims_for(LLAMA, LIMITS, chip=H100.chip)]


@pytest.mark.parametrize("name", ALL)
def test_each_claim_can_be_switched_off_and_the_plan_shows_it(name):
    made, usual = planned(off=[name]), planned()
    (shown,) = [claim for claim in made.not_charged if claim.name == name]
    assert shown.switched_off
    assert made.kv.tokens >= usual.kv.tokens
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    names = {child.name for line in made.lines for child in line.children}
    assert name not in names


@pytest.mark.parametrize(
    "name", ["cuda graphs", "allocator fragmentation", "page table", "sdpa: gathered pages and masks"]
)
def test_those_that_cost_something_give_it_to_the_pool(name):
    made = planned(off=[name])
    assert made.kv.tokens > planned().kv.tokens
    assert any(name in warning and "only shows what it costs" in warning for warning in made.warnings)


def test_the_engine_switches_off_only_what_it_can_do_without():
    claims = claims_for(LLAMA, LIMITS, chip=H100.chip)
    with pytest.raises(InvalidSetting, match=r"can be switched off: .*penalty tables"):
        without(claims, frozenset({"page table"}))
    with pytest.raises(InvalidSetting, match="no claim of that name"):
        without(claims, frozenset({"weights"}), is_what_if=True)


def test_a_snapshot_of_every_state_for_so_many_tokens():
    """The pool of one sequence grows by a state for each 4,096 of its 16,384 tokens, padding of slabs included."""
    card, shape = generic_card(200 * GiB), {"max_seq_len": 16_384, "max_batch_size": 1, "prefix_caching": False}
    usual, kept = planned(HYBRID, card=card, **shape), planned(HYBRID, card=card, snapshot_tokens=4096, **shape)
    layout = kv_layout(HYBRID)
    num_states = sum(1 for group in layout.groups if not group.block_tokens)
    assert kept.kv.tokens == usual.kv.tokens
    assert kept.kv.num_slabs - usual.kv.num_slabs == 4 * num_states
    (line,) = [child for line in kept.lines for child in line.children if child.name == "state snapshots"]
    assert line.bytes == 4 * state_bytes_per_sequence(layout)
    assert "snapshot" not in str([child.name for line in usual.lines for child in line.children])


def test_more_snapshots_leave_fewer_tokens():
    card, shape = generic_card(80 * GiB), {"max_seq_len": 65_536, "max_batch_size": 32}
    tokens = [planned(HYBRID, card=card, snapshot_tokens=every, **shape).kv.tokens for every in (1024, 8192, 0)]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 3


def test_every_rank_of_a_sequence_keeps_all_its_snapshots():
    """Ranks that share a sequence hold a part of its tokens each, and the whole of its states."""
    layout = kv_layout(HYBRID)
    shape = {"max_seq_len": 16_384, "max_batch_size": 1, "snapshot_tokens": 4096}
    limits = resolve_limits(HYBRID, LimitKnobs(**{name: Setting(value) for name, value in shape.items()}))[0]
    whole, shared = (
        [
            price.blocks(8192 // cp)
            for price in group_prices(layout, limits=limits, unit=16, cp=cp)
            if price.snapshot_tokens
        ]
        for cp in (1, 2)
    )
    assert whole == shared == [2 * sum(1 for group in layout.groups if not group.block_tokens)]


def test_snapshots_count_in_what_a_fit_promises():
    shape = {"max_seq_len": 16_384, "max_batch_size": 4}
    usual, kept = planned(HYBRID, card=CARD, **shape), planned(HYBRID, card=CARD, snapshot_tokens=4096, **shape)
    layout = kv_layout(HYBRID)
    states = 4 * sum(1 for group in layout.groups if not group.block_tokens)
    more = kv_bytes_for(kept, 3, 16_384) - kv_bytes_for(usual, 3, 16_384)
    assert more == 3 * states * layout.slab_bytes
    assert holds([kept], num_sequences=4, seq_tokens=16_384)


def test_recurrent_states_switch_prefix_caching_off_and_the_plan_says_so():
    told = "prefix_caching is off: layers of"
    usual = planned(HYBRID, card=CARD)
    assert not usual.limits.prefix_caching
    assert sum(each.startswith(told) for each in usual.warnings) == 1
    assert planned(HYBRID, card=CARD, prefix_caching=True).limits == usual.limits
    for shape in ({"prefix_caching": False}, {"snapshot_tokens": 4096}):
        made = planned(HYBRID, card=CARD, max_seq_len=8192, max_batch_size=4, **shape)
        assert made.limits.prefix_caching == ("snapshot_tokens" in shape)
        assert not any(each.startswith(told) for each in made.warnings)
    plain = planned(LLAMA, card=H100)
    assert plain.limits.prefix_caching
    assert plain.fingerprint != planned(LLAMA, card=H100, prefix_caching=False).fingerprint
