"""``tonnage curve``: the cache against what a step may attend to, and bytes against tokens, drawn."""

from __future__ import annotations

import sys

from tonnage.cli import options as opt
from tonnage.cli.groups import grouped
from tonnage.cli.plan import card_of


@grouped
def curve(
    *,
    model: opt.Model,
    device: opt.Device = None,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    as_json: opt.AsJson = False,
) -> None:
    """Draw how cache and scratch share a device's memory, before choosing.

    MODEL is a folder, a config.json, smollm2, or a hub id. Example: tonnage curve ./llama-3.1-8b --device H100
    """
    knobs, limits = pool.knobs(), pool.limits()
    card, weights_dtype = card_of(device, memory), pool.weights_dtype()

    from tonnage.planner import find_config
    from tonnage.planner.curve import curve_without_device
    from tonnage.report.curve_table import curve_text, show_curve

    made = curve_without_device(find_config(model), card=card, knobs=knobs, limit_knobs=limits, dtype=weights_dtype)
    if as_json:
        print(curve_text(made), end="")
        return

    from tonnage.report.draw import console_for

    show_curve(made, console_for(sys.stdout))
