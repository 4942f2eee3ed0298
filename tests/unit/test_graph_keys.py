"""Ranks agree on one graph or on none (invariant 38), whatever each of them holds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.graphs.keys import GraphKey, SamplingTier, Wish, agree, common_keys

GREEDY, FULL = SamplingTier.GREEDY, SamplingTier.FULL


def key(batch_size: int, **fields: object) -> GraphKey:
    return GraphKey(batch_size=batch_size, **fields)  # type: ignore[arg-type]


CAPTURED = frozenset(key(size, tier=tier) for size in (1, 2, 4, 8) for tier in (GREEDY, FULL))
KEYS = st.builds(
    GraphKey,
    batch_size=st.integers(1, 9),
    draft_tokens=st.integers(0, 1),
    is_short=st.booleans(),
    tier=st.sampled_from(SamplingTier),
    adapter_dtype=st.sampled_from([None, "bf16"]),
)
WISHES = st.builds(Wish, st.one_of(KEYS, KEYS, KEYS, st.none()), st.sampled_from([True, True, True, False]))


@pytest.mark.parametrize(
    ("wishes", "agreed"),
    [
        ([Wish(key(3, tier=GREEDY))], key(4, tier=GREEDY)),
        ([Wish(key(3, tier=GREEDY)), Wish(key(5, tier=GREEDY))], key(8, tier=GREEDY)),
        ([Wish(key(3, tier=GREEDY)), Wish(key(5, tier=FULL))], key(8, tier=FULL)),
        ([Wish(key(3, tier=GREEDY)), Wish(None)], None),
        ([Wish(key(9, tier=GREEDY))], None),
        ([Wish(key(4, tier=GREEDY), may_pad=False)], key(4, tier=GREEDY)),
        ([Wish(key(3, tier=GREEDY), may_pad=False)], None),
        ([Wish(key(4, tier=GREEDY), may_pad=False), Wish(key(5, tier=GREEDY))], None),
        ([Wish(key(8, tier=GREEDY), may_pad=False), Wish(key(5, tier=GREEDY))], key(8, tier=GREEDY)),
        ([Wish(key(3, tier=GREEDY, draft_tokens=2)), Wish(key(3, tier=GREEDY))], None),
        ([Wish(key(3, tier=GREEDY, is_short=True))], None),
        ([Wish(key(3)), Wish(key(3, tier=FULL))], None),
        ([], None),
    ],
)
def test_what_is_agreed_on(wishes, agreed):
    assert agree(wishes, CAPTURED) == agreed


def test_a_greedy_batch_may_replay_the_full_tier_where_there_is_no_other():
    assert agree([Wish(key(3, tier=GREEDY))], {key(4, tier=FULL)}) == key(4, tier=FULL)
    assert agree([Wish(key(3, tier=FULL))], {key(4, tier=GREEDY)}) is None


def test_encoder_tokens_are_rounded_up_to_a_captured_key():
    captured = [key(0, encoder_tokens=size) for size in (64, 256)]
    assert agree([Wish(key(0, encoder_tokens=65))], captured) == key(0, encoder_tokens=256)
    assert agree([Wish(key(0, encoder_tokens=257))], captured) is None
    assert agree([Wish(key(1, encoder_tokens=3))], captured) is None


def test_the_tokens_of_a_replay():
    assert key(8, draft_tokens=3).num_tokens == 32
    assert key(8, num_contexts=2, context_tokens=5, encoder_tokens=7).num_tokens == 25


def test_keys_that_mean_nothing():
    for fields in ({"batch_size": 0}, {"batch_size": -1}, {"batch_size": 1, "num_contexts": 2}):
        with pytest.raises(AssertionError):
            GraphKey(**fields)


class Rank:
    """One process: its own captures, its own trouble; it knows of the others what they exchanged."""

    def __init__(self, captured: frozenset[GraphKey]) -> None:
        self.captured = captured
        self.common: frozenset[GraphKey] = frozenset()


@given(
    st.lists(st.frozensets(KEYS, max_size=8), min_size=1, max_size=5),
    st.lists(st.lists(WISHES, min_size=5, max_size=5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_all_ranks_choose_one_graph_or_all_run_eagerly(captured, steps, order):
    """Each rank captured what it could, and meets its own batches: they exchange lists once, wishes every step."""
    # Without this most draws would share no key at all.
    shared = {key(size, tier=FULL) for size in (2, 4, 8)}
    ranks = [Rank(each | shared) for each in captured]
    for rank in ranks:
        rank.common = common_keys([each.captured for each in ranks])
    for wishes in steps:
        gathered = wishes[: len(ranks)]
        chosen = []
        for rank in ranks:
            heard = list(gathered)
            order.shuffle(heard)  # not even the order in which they are heard matters
            chosen.append(agree(heard, rank.common))
        assert len(set(chosen)) == 1
        agreed = chosen[0]
        if agreed is None:
            continue
        for rank, wish in zip(ranks, gathered, strict=True):
            assert agreed in rank.captured
            assert wish.batch is not None
            assert agreed.batch_size >= wish.batch.batch_size
            assert wish.may_pad or agreed.batch_size == wish.batch.batch_size
            rest = replace(wish.batch, batch_size=agreed.batch_size, tier=agreed.tier)
            assert rest == agreed
            assert agreed.tier is wish.batch.tier or (agreed.tier, wish.batch.tier) == (FULL, GREEDY)


@given(st.lists(st.builds(Wish, KEYS), min_size=1, max_size=4), st.frozensets(KEYS, max_size=12))
def test_a_graph_that_holds_everybody_is_never_passed_over(wishes, captured):
    """Eager only where no captured key serves all batches; and no smaller one would have done."""
    agreed = agree(wishes, captured)
    serving = [each for each in captured if all(each.fits(wish.batch) for wish in wishes if wish.batch)]
    assert (agreed is None) == (not serving)
    if agreed is not None:
        assert agreed.batch_size == min(each.batch_size for each in serving)


def test_what_one_rank_skipped_is_no_graph_for_anybody():
    assert common_keys([{key(1), key(2)}, {key(2), key(4)}]) == {key(2)}
    assert common_keys([]) == frozenset()


#: Reads what every rank exchanged, in the order in which it heard of it, and says what it would replay in each step.
RANK = """
import json, random, sys
from tonnage.graphs.keys import GraphKey, SamplingTier, Wish, agree, common_keys

def key(found):
    return None if found is None else GraphKey(**found | {"tier": SamplingTier(found["tier"])})

number, exchanged = int(sys.argv[1]), json.load(sys.stdin)
heard = random.Random(number)
captured = [[key(each) for each in rank] for rank in exchanged["captured"]]
heard.shuffle(captured)
common = common_keys(captured)
for wishes in exchanged["steps"]:
    heard.shuffle(wishes)
    print(agree([Wish(key(batch), may_pad) for batch, may_pad in wishes], common))
"""


def test_ranks_in_processes_of_their_own_choose_alike():
    """38 where nothing is shared: interpreters that hash, and so order their sets, in ways of their own."""
    drawn = random.Random(0)
    tiers, dtypes = [tier.value for tier in SamplingTier], [None, "bf16"]

    def draw() -> dict[str, object]:
        return {
            "batch_size": drawn.randint(1, 9), "draft_tokens": 0, "is_short": drawn.random() < 0.2,
            "tier": drawn.choice(tiers), "adapter_dtype": drawn.choice(dtypes),
        }  # fmt: skip

    shared = [{"batch_size": size, "tier": tier} for size in (1, 2, 4, 8) for tier in tiers]
    captured = [[*shared, *(draw() for _ in range(20))] for _ in range(3)]
    plain = [[[{"batch_size": drawn.randint(1, 8), "tier": "greedy"}, True] for _ in captured] for _ in range(50)]
    steps = [[[draw() if drawn.random() < 0.95 else None, drawn.random() < 0.8] for _ in captured] for _ in range(200)]
    exchanged = json.dumps({"captured": captured, "steps": [*plain, *steps]})
    told = [
        subprocess.run(
            [sys.executable, "-c", RANK, str(number)],
            input=exchanged, capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": str(number + 1)},
        ).stdout.splitlines()
        for number in range(3)
    ]  # fmt: skip
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 250
    assert sum(line != "None" for line in told[0]) >= 50, "steps that replay are among them"
