"""What a fit promises, on the real planner: the best of all combinations, and a fixed point."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import shapes
from asked import knobs, limits, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.budget.fit import Values
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit
from tonnage.hardware import Card, generic_card
from tonnage.planner.dimensions import dimensions
from tonnage.planner.fit import Fit, fit, fit_site
from tonnage.planner.site import Site, holds
from tonnage.planner.workload import Goal, Workload
from tonnage.units import GiB, MiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
LONGEST, MOST = Goal.LONGEST_CONTEXT, Goal.MOST_CONCURRENCY


def from_flags(made: Fit) -> dict[str, object]:
    """Settings from what is printed."""
    found: dict[str, dict[str, object]] = {"knobs": {}, "limit_knobs": {}}
    for flag in made.flags:
        name, text = flag.removeprefix("--").replace("-", "_").split(" ")
        kind = "limit_knobs" if name.startswith("max_") else "knobs"
        value = text if name in ("graphs", "kv_dtype") else Fraction(text) if name == "kv_fraction" else int(text)
        found[kind][name] = value
    return {"knobs": knobs(**found["knobs"]), "limit_knobs": limits(**found["limit_knobs"])}


MEMORIES = st.integers(16 * 1024, 48 * 1024).map(lambda mib: generic_card(mib * MiB))
GOALS = st.one_of(
    st.sampled_from([LONGEST, MOST]),
    st.builds(workload, st.integers(1, 300), st.integers(1, 20_000), st.integers(0, 1000)),
)


@settings(max_examples=6)
@given(MEMORIES, GOALS, st.data())
def test_a_fit_is_a_fixed_point(card: Card, goal: Goal | Workload, data: st.DataObject):
    """The same again, and the same with any of the chosen values set by the user, the length included."""
    try:
        made = fit(LLAMA_8B, card=card, goal=goal)
    except DoesNotFit:
        return
    assert fit(LLAMA_8B, card=card, goal=goal) == made
    names = sorted(flag.split()[0] for flag in made.flags)
    kept = data.draw(st.sets(st.sampled_from(names)))
    pinned = from_flags(replace(made, flags=tuple(flag for flag in made.flags if flag.split()[0] in kept)))
    again = fit(LLAMA_8B, card=card, goal=goal, **pinned)
    assert set(again.flags) == set(made.flags)
    assert again.plan.kv == made.plan.kv
    assert made.reached.startswith(again.reached)  # an open length says in addition that it was open


def every(site: Site, goal: Workload, met) -> dict[str, object] | None:
    """All combinations tried, the least sacrifice kept: most precious (last) first."""
    order = dimensions(site.first, least_rows=goal.num_users, least_seq_len=goal.seq_tokens)
    combinations = product(*(range(len(dimension.values)) for dimension in order))
    for places in sorted(combinations, key=lambda places: places[::-1]):
        values: Values = {d.name: d.values[place] for d, place in zip(order, places, strict=True)}
        if site.reaches(values, met):
            return dict(values)
    return None


@pytest.mark.parametrize(
    ("memory", "goal", "asked"),
    [
        (19 * GiB, workload(16, 1000, 200), {}),
        (21 * GiB, workload(40, 1000, 200), {"max_batch_size": 64}),
        (20 * GiB, workload(2, 30_000), {"max_num_tokens": 2048, "max_batch_size": 16}),
        (20 * GiB, workload(100, 100), {"max_seq_len": 4096}),
        (16420 * MiB, workload(1, 100), {"max_num_tokens": 512, "max_seq_len": 1000}),
    ],
)
def test_equals_brute_force(memory, goal, asked):
    site = Site.of(LLAMA_8B, card=generic_card(memory), limit_knobs=limits(**asked))
    best = every(site, goal, lambda plans: holds(plans, num_sequences=goal.num_users, seq_tokens=goal.seq_tokens))
    assert best is not None
    assert fit_site(site, goal).fitted.as_mapping() == best


@settings(max_examples=40)
@given(MEMORIES, st.integers(1, 300), st.integers(1, 20_000), st.data())
def test_giving_up_more_never_loses_a_workload(card: Card, users: int, length: int, data: st.DataObject):
    """What the greedy choice rests on, on the real planner."""
    site = Site.of(LLAMA_8B, card=card)
    little, much = {}, {}
    for dimension in dimensions(site.first, least_rows=users, least_seq_len=length):
        last = len(dimension.values) - 1
        at = data.draw(st.integers(0, last))
        little[dimension.name] = dimension.values[at]
        much[dimension.name] = dimension.values[data.draw(st.integers(at, last)) if dimension.ordered else at]

    def reaches(values: Values) -> bool:
        return site.reaches(values, lambda plans: holds(plans, num_sequences=users, seq_tokens=length))

    assert reaches(much) or not reaches(little)


#: Windows, latents, recurrent states beside latents or attention: a memory that holds each, and not all it could.
KINDS = [
    ("gemma-2-9b", 40, "sdpa"),
    ("deepseek-v2-lite", 40, "trtllm"),
    ("kimi-linear-48b", 120, "flashinfer"),
    ("granite-4.0-h-micro", 40, "sdpa"),
]


@pytest.mark.parametrize(("shape", "memory_gib", "backend"), KINDS)
def test_other_kinds_of_caches_have_fixed_points_too(shape, memory_gib, backend):
    config = ModelConfig.from_dict(shapes.raw_config(shape), name=shape)
    card = generic_card(memory_gib * GiB)
    for goal in (LONGEST, MOST, workload(24, 6000, 500)):
        made = fit(config, card=card, goal=goal, backend=backend)
        for pinned in ("max_num_tokens", "max_batch_size"):
            (flag,) = [flag for flag in made.flags if flag.startswith("--" + pinned.replace("_", "-"))]
            asked = limits(**{pinned: int(flag.split()[1])})
            again = fit(config, card=card, goal=goal, backend=backend, limit_knobs=asked)
            assert (again.reached, again.plan.kv, set(again.flags)) == (made.reached, made.plan.kv, set(made.flags))
