"""Any claim can be switched off in a plan that nothing is built from, and snapshots of recurrent states are priced."""

from __future__ import annotations

import pytest
import shapes

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.kv import kv_layout
from tonnage.errors import InvalidSetting
from tonnage.hardware import card_for, generic_card
from tonnage.layout import state_bytes_per_sequence
from tonnage.planner import claims_for, plan_without_device, resolve_limits
from tonnage.planner.claims import without
from tonnage.units import GiB

LLAMA, HYBRID, H100 = shapes.config("llama-3.1-8b"), shapes.config("qwen3.6-27b"), card_for("H100", None)
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
    card, shape = generic_card(200 * GiB), {"max_seq_len": 16_384, "max_batch_size": 1}
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
