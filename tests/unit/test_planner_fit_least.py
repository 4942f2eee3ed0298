"""The inverse of a fit: a MiB less and a device fewer are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked import workload
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import Card, find_card, generic_card, host_card
from tonnage.planner import find_config, plan_ranks
from tonnage.planner.fit import fit
from tonnage.planner.least import MOST_RANKS, least_memory, least_ranks, splits
from tonnage.planner.workload import Workload
from tonnage.terms import Rank
from tonnage.units import GiB, MiB, round_up

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")


def holds_at_the_least(card: Card, goal: Workload, rank: Rank | None = None) -> bool:
    """Whether the workload is resident with every knob at its smallest, planned without any search."""
    least = LimitKnobs(
        max_seq_len=Setting(goal.seq_tokens),
        max_batch_size=Setting(goal.num_users),
        max_num_tokens=Setting(max(512, goal.num_users)),
    )
    knobs = Knobs(kv_dtype=Setting("float8_e4m3fn"), graphs=Setting("none"))
    try:
        plans = plan_ranks(LLAMA_8B, card=card, rank=rank or Rank(), knobs=knobs, limit_knobs=least)
    except DoesNotFit:
        return False
    return all(plan.kv.tokens >= goal.num_users * round_up(goal.seq_tokens, 16) for plan in plans)


WORKLOADS = st.builds(workload, st.integers(1, 400), st.integers(1, 100_000), st.integers(0, 2000))


@settings(max_examples=5)
@given(WORKLOADS)
def test_a_mib_less_is_refused(goal: Workload):
    found = least_memory(LLAMA_8B, workload=goal, card=generic_card(GiB))
    card = generic_card(found.device_bytes)
    assert fit(LLAMA_8B, card=card, goal=goal) == found.fit
    assert holds_at_the_least(card, goal)
    assert not holds_at_the_least(generic_card(found.device_bytes - MiB), goal)


@pytest.mark.parametrize("goal", [workload(64, 4000, 1000), workload(1, 100), workload(300, 100)], ids=str)
def test_with_nothing_given_up_takes_more(goal):
    found = least_memory(LLAMA_8B, workload=goal, card=generic_card(GiB))
    assert found.comfortable_bytes > found.device_bytes
    assert fit(LLAMA_8B, card=generic_card(found.comfortable_bytes), goal=goal).fitted.sacrifices == ()
    assert fit(LLAMA_8B, card=generic_card(found.comfortable_bytes - MiB), goal=goal).fitted.sacrifices


def test_more_users_never_take_less():
    sizes = [
        least_memory(LLAMA_8B, workload=workload(users, 4000), card=generic_card(GiB)).device_bytes
        for users in (1, 8, 64)
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


def test_what_was_set_stays_and_the_size_of_the_card_does_not_matter():
    limits = LimitKnobs(max_batch_size=Setting.flag(200, "200", "--max-batch-size"))
    small, large = (
        least_memory(LLAMA_8B, workload=workload(8, 4000), card=find_card("H100").with_total(size), limit_knobs=limits)
        for size in (GiB, 500 * GiB)
    )
    assert small == large
    assert small.fit.plan.limits.max_batch_size == 200


def test_on_the_host():
    found = least_memory(SMOLLM2, workload=workload(4, 1000, 100), card=host_card(GiB))
    with pytest.raises(DoesNotFit):
        fit(SMOLLM2, card=host_card(found.device_bytes - MiB), goal=workload(4, 1000, 100))


def test_a_cap_that_keeps_every_size_out_is_told():
    knobs = Knobs(kv_bytes=Setting.flag(GiB, "1GiB", "--kv-bytes"))
    with pytest.raises(DoesNotFit, match="raise kv_bytes to"):
        least_memory(LLAMA_8B, workload=workload(64, 4000), card=generic_card(GiB), knobs=knobs)


def test_a_limit_below_the_workload_is_told():
    limits = LimitKnobs(max_seq_len=Setting.flag(100, "100", "--max-seq-len"))
    for least in (least_memory, least_ranks):
        with pytest.raises(InvalidSetting, match="below the 4,000 tokens"):
            least(LLAMA_8B, workload=workload(64, 4000), card=generic_card(GiB), limit_knobs=limits)


def test_splits_by_their_number_of_devices():
    found = list(splits(LLAMA_8B))
    assert found[:8] == [(1, 1), (2, 1), (1, 2), (1, 3), (4, 1), (2, 2), (1, 4), (1, 5)]
    assert max(tp * pp for tp, pp in found) <= MOST_RANKS
    assert {tp for tp, _ in found} == {1, 2, 4, 8, 16, 32}
    assert max(pp for _, pp in found) == LLAMA_8B.num_layers


@pytest.mark.parametrize(
    ("card", "goal", "split"),
    [
        ("H100", workload(64, 4000, 1000), (1, 1)),
        ("H100", workload(256, 4000, 1000), (2, 1)),
        ("L4", workload(25, 4000, 1000), (2, 1)),
        ("L4", workload(256, 4000, 1000), (2, 3)),
    ],
)
def test_a_device_fewer_is_refused_however_it_is_split(card, goal, split):
    found = least_ranks(LLAMA_8B, workload=goal, card=find_card(card))
    assert (found.tp, found.pp) == split
    assert len(found.fit.plans) == found.pp
    before = [(tp, pp) for tp, pp in splits(LLAMA_8B) if tp * pp < found.num_ranks]
    assert set(before) <= set(found.tried)
    for tp, pp in (*before, split):
        rank = Rank(size=tp * pp, tp=tp, pp=pp)
        assert holds_at_the_least(find_card(card), goal, rank) == ((tp, pp) == split)


def test_where_no_number_is_enough():
    with pytest.raises(DoesNotFit, match=f"on up to {MOST_RANKS} devices") as caught:
        least_ranks(LLAMA_8B, workload=workload(20_000, 4000), card=find_card("T4"))
    assert caught.value.remedies
