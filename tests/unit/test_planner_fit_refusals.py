"""Fits that are refused: need, have, and remedies that work when their words are followed."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import shapes
from asked import knobs, limits, workload

from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import Card, find_card, generic_card
from tonnage.planner.fit import ALONE, LENGTH_IS_OPEN, fit
from tonnage.planner.workload import Goal, Workload
from tonnage.units import GiB, parse_bytes

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
H100 = find_card("H100")
LONGEST, MOST = Goal.LONGEST_CONTEXT, Goal.MOST_CONCURRENCY


#: card, workload, knobs set, limits set; every one is refused
REFUSED = [
    (H100, workload(256, 4000, 1000), {}, {}),
    (H100, workload(64, 4000, 1000), {"kv_bytes": 4 * GiB}, {}),
    (H100, workload(64, 4000, 1000), {"kv_tokens": 100_000}, {}),
    (H100, workload(64, 4000, 1000), {"total_bytes": 20 * GiB}, {}),
    (H100, workload(64, 4000, 1000), {"kv_fraction": Fraction(1, 10)}, {}),
    (H100, workload(64, 4000, 1000), {"keep_free_bytes": 50 * GiB}, {}),
    (generic_card(20 * GiB), workload(30, 4000, 1000), {}, {"max_num_tokens": 30_000}),
    (generic_card(15 * GiB), workload(2, 4000, 1000), {}, {}),
    (find_card("T4"), workload(1, 1), {}, {}),
]


@pytest.mark.parametrize(("card", "goal", "asked", "shape"), REFUSED)
def test_every_remedy_of_a_workload_works_when_its_words_are_followed(card, goal, asked, shape):
    with pytest.raises(DoesNotFit) as caught:
        fit(LLAMA_8B, card=card, goal=goal, knobs=knobs(**asked), limit_knobs=limits(**shape))
    error = caught.value
    assert error.remedies
    assert error.shortfall_bytes > 0
    assert goal.told() in str(error)
    for remedy in error.remedies:
        changed = followed(remedy, card, goal, asked, shape)
        assert fit(LLAMA_8B, **changed).plan.kv.tokens > 0


def followed(remedy: str, card: Card, goal: Workload, asked: dict, shape: dict) -> dict[str, object]:
    """Do what the words say."""
    words = remedy.split(" (")[0]
    asked, shape = dict(asked), dict(shape)
    if found := re.fullmatch(r"lower users to (\d+)", words):
        goal = replace(goal, num_users=int(found[1]))
    elif found := re.fullmatch(r"lower output_tokens to (\d+)", words):
        goal = replace(goal, output_tokens=int(found[1]))
    elif found := re.fullmatch(r"lower prompt_tokens and output_tokens to (\d+) together", words):
        goal = workload(goal.num_users, int(found[1]))
    elif found := re.fullmatch(r"(?:give it|use a device of at least) (\S+)(?: of memory)?", words):
        card = card.with_total(parse_bytes(found[1], knob="memory"))
    elif found := re.fullmatch(r"lower max_num_tokens to (\d+)", words):
        shape["max_num_tokens"] = int(found[1])
    elif found := re.fullmatch(r"raise kv_fraction to (\S+)", words):
        asked["kv_fraction"] = Fraction(found[1])
    else:
        name, text = re.fullmatch(r"(?:set|raise|lower) (\w+) to (\S+)", words).groups()
        asked[name] = int(text) if name == "kv_tokens" else parse_bytes(text, knob=name, allow_zero=True)
    return {"card": card, "goal": goal, "knobs": knobs(**asked), "limit_knobs": limits(**shape)}


def test_one_user_more_and_one_token_more_are_too_many():
    goal = workload(256, 4000, 1000)
    with pytest.raises(DoesNotFit) as caught:
        fit(LLAMA_8B, card=H100, goal=goal)
    told = str(caught.value)
    users, output = (int(re.search(rf"lower {name} to (\d+)", told)[1]) for name in ("users", "output_tokens"))
    for changed in (replace(goal, num_users=users + 1), replace(goal, output_tokens=output + 1)):
        with pytest.raises(DoesNotFit):
            fit(LLAMA_8B, card=H100, goal=changed)


def test_host_memory_makes_a_workload_possible_and_the_answer_says_how():
    goal = workload(256, 4000, 1000)
    made = fit(LLAMA_8B, card=H100, goal=goal, knobs=knobs(host_kv_bytes=20 * GiB))
    assert made.tier is not None
    assert made.tier.num_resident + made.tier.num_waiting == 256
    assert made.tier.kv_bytes <= 20 * GiB
    assert made.plan.kv.tokens >= made.tier.num_resident * 5008
    assert "waiting in host memory" in made.reached
    assert any(flag.startswith("--host-kv-bytes") for flag in made.flags)
    assert not any("--host-kv-bytes" in note for note in made.notes), "the engine has it, too"
    with pytest.raises(DoesNotFit) as caught:
        fit(LLAMA_8B, card=H100, goal=goal, knobs=knobs(host_kv_bytes=GiB))
    assert "host_kv_bytes" not in str(caught.value)


@pytest.mark.parametrize(("key", "users"), [("gemma-3-27b", 100), ("qwen3.6-27b", 60), ("gpt-oss-20b", 4000)])
def test_what_there_is_does_not_contradict_what_would_help(key, users):
    """Windows and states cost a user much and its further tokens little, so what there is is told in users."""
    config, asked = shapes.config(key), {"kv_dtype": "bfloat16"}
    goal = workload(users, 7000, 1000)
    with pytest.raises(DoesNotFit) as caught:
        fit(config, card=H100, goal=goal, knobs=knobs(**asked))
    told = str(caught.value)
    have = int(re.search(r"room for ([\d,]+) such user", told)[1].replace(",", ""))
    fewer = int(re.search(r"lower users to (\d+)", told)[1])
    assert not re.search(r"of KV \([\d,]+ bytes\), [\d,]+ tokens", told)
    assert have == fewer or (have < fewer and f"beside what {users:,} at once need" in told)
    for remedy in caught.value.remedies:
        changed = followed(remedy, H100, goal, asked, {})
        assert fit(config, **changed).plan.kv.tokens > 0


def test_one_sequence_alone_says_that_the_length_is_open():
    made = fit(LLAMA_8B, card=generic_card(24 * GiB), goal=MOST)
    assert "the longest that fits, so no second one does: set max_seq_len" in made.reached
    assert made.notes[0] == ALONE
    set_to = fit(LLAMA_8B, card=generic_card(24 * GiB), goal=MOST, limit_knobs=limits(max_seq_len=4096))
    assert "the longest that fits" not in set_to.reached
    assert not {ALONE, LENGTH_IS_OPEN} & set(set_to.notes)
    many = fit(LLAMA_8B, card=H100, goal=MOST)
    assert many.notes[0] == LENGTH_IS_OPEN


@pytest.mark.parametrize("goal", [LONGEST, MOST])
def test_a_goal_on_a_card_too_small_is_refused_with_what_would_do(goal):
    with pytest.raises(DoesNotFit) as caught:
        fit(LLAMA_8B, card=generic_card(15 * GiB), goal=goal)
    (size,) = re.findall(r"give it (\S+) of memory", str(caught.value))
    assert fit(LLAMA_8B, card=generic_card(parse_bytes(size, knob="memory")), goal=goal).plan.kv.tokens > 0


def test_a_length_that_was_set_and_does_not_fit_is_refused():
    with pytest.raises(DoesNotFit) as caught:
        fit(LLAMA_8B, card=generic_card(20 * GiB), goal=LONGEST, limit_knobs=limits(max_seq_len=131_072))
    assert caught.value.remedies[0].startswith("lower max_seq_len to 64")


@pytest.mark.parametrize(
    ("goal", "asked", "said"),
    [
        (workload(2, 131_000, 1000), {}, "132,000 tokens each, and llama-3.1-8b has 131,072 positions"),
        (workload(2, 4000, 1000), {"max_seq_len": 4096}, "below the 5,000 tokens of each user"),
        (workload(64, 4000), {"max_batch_size": 63}, "below the 64 users at once"),
        (workload(64, 4000), {"max_num_tokens": 63}, "below the 64 users who each get a token"),
        (workload(64, 4000), {"max_num_tokens": 255, "max_draft_tokens": 3}, "below the 256 tokens of 64 users"),
        (LONGEST, {"max_seq_len": 200_000}, "131,072 positions"),
    ],
)
def test_settings_that_contradict_the_goal(goal, asked, said):
    with pytest.raises(InvalidSetting, match=said):
        fit(LLAMA_8B, card=H100, goal=goal, limit_knobs=limits(**asked))
