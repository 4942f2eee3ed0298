"""``tonnage curve``: the cache against what a step may attend to, and bytes against tokens, drawn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tonnage.cli import options as opt
from tonnage.cli.groups import grouped
from tonnage.cli.plan import card_of, check_stages, plan_like
from tonnage.cli.planning import FeatureOptions, Planning, PolicyOptions, RankOptions

if TYPE_CHECKING:
    from tonnage.config import Knobs, LimitKnobs
    from tonnage.terms import MemoryPlan


@grouped
def curve(
    *,
    model: opt.PlannedModel,
    device: opt.Device = None,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    features: FeatureOptions,
    ranks: RankOptions,
    like: opt.LikeOptions,
    as_json: opt.AsJson = False,
) -> None:
    """Draw how cache and scratch share a device's memory.

    MODEL is a folder, a config.json, a hub id, or a built-in shape (tonnage curve help lists them).
    Example: tonnage curve llama-3.1-8b --device H100
    """
    knobs, limits = features.knobs(pool), features.limits(pool)
    card = card_of(device, memory, verb="curve")
    check_stages(ranks)
    planning = Planning.of(model, pool=pool, features=features, ranks=ranks, policy=PolicyOptions())

    from tonnage.planner.asked import on_rank
    from tonnage.planner.curve import curve_without_device
    from tonnage.report.curve_table import curve_text, show_curve

    def plan_with(knobs: Knobs, limits: LimitKnobs) -> MemoryPlan:
        return planning.plan(knobs, limits, card)

    # The plan first: it chooses the stage, translates other engines' knobs, and refuses with remedies.
    made = plan_like(like.like, knobs, limits, plan_with)
    asked = planning.asked(made.knobs, made.limit_knobs, card)
    drawn = curve_without_device(planning.config, **on_rank(asked, made.rank))
    if as_json:
        print(curve_text(drawn), end="")
        return

    from tonnage.report.draw import console_for

    show_curve(drawn, console_for(sys.stdout))
