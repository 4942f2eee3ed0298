"""``tonnage plan``: the split of a device for a model, with neither at hand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli import options as opt
from tonnage.cli.engines import Compare, Engine
from tonnage.cli.groups import grouped
from tonnage.cli.planning import FeatureOptions, Planning, PolicyOptions, RankOptions
from tonnage.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tonnage.config import Knobs, LimitKnobs
    from tonnage.costs.config import ModelConfig
    from tonnage.hardware import Card
    from tonnage.terms import MemoryPlan

Output = Annotated[
    str | None, typer.Option("--output", metavar="FILE", help="Also keep the plan as JSON.", show_default=False)
]

Explain = Annotated[bool, typer.Option("--explain", help="Say in sentences how the number came about.")]


@grouped
def plan(
    *,
    model: opt.Model,
    device: opt.Device = None,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    features: FeatureOptions,
    ranks: RankOptions,
    policy: PolicyOptions,
    like: opt.LikeOptions,
    engine: Engine = None,
    compare: Compare = False,
    as_json: opt.AsJson = False,
    explain: Explain = False,
    output: Output = None,
    force: opt.Force = False,
) -> int | None:
    """Split a device's memory for a model, with neither at hand.

    MODEL is a folder, a config.json, smollm2, or a hub id. Example: tonnage plan ./llama-3.1-8b --device H100
    """
    if explain and as_json:
        raise UserError("both --explain and --json say how to print the plan", remedy="keep one of them")
    if engine or compare:
        refuse_beside_engines(explain=explain, output=output, features=features, policy=policy, compare=compare)
    knobs, limits = features.knobs(pool), features.limits(pool)
    card = card_of(device, memory, verb="plan")
    check_stages(ranks)

    from tonnage.report import check_writable, plan_text, write_file

    if output is not None:
        check_writable(output, force=force, flag="--output")
    planning = Planning.of(model, pool=pool, features=features, ranks=ranks, policy=policy)

    def plan_with(knobs: Knobs, limits: LimitKnobs, card: Card = card) -> MemoryPlan:
        return planning.plan(knobs, limits, card)

    if engine or compare:
        return _engines(engine or (), like.like or (), knobs, limits, planning, card, compare=compare, as_json=as_json)
    made = with_warnings(plan_like(like.like, knobs, limits, plan_with), planning, card)
    if output is not None:
        write_file(output, plan_text(made), force=force, flag="--output")
    if as_json:
        print(plan_text(made), end="")
        return None

    from tonnage.report.draw import console_for
    from tonnage.report.table import show_plan

    if explain:
        show_reasons(made, card, plan_with)
        return None
    show_plan(made, console_for(sys.stdout))
    if planning.rank.pp > 1:
        from tonnage.report.stages import show_stages

        show_stages(planning.stages(made.knobs, made.limit_knobs, card), console_for(sys.stdout))
    return None


def refuse_beside_engines(
    *, explain: bool, output: str | None, features: FeatureOptions, policy: PolicyOptions, compare: bool
) -> None:
    """Raise ``UserError`` for a flag that says something about our own plan alone, beside the start of an engine."""
    given = {
        "--explain": explain, "--output": output, "--policy": policy.policy, "--reference": policy.reference,
        "--attention": None if compare else features.attention, "--without": None if compare else features.without,
    }  # fmt: skip
    for flag, value in given.items():
        if value:
            raise UserError(
                f"{flag} is about our own plan, and --engine shows the start of another engine",
                remedy="leave one of the two out",
            )


def _engines(
    texts: Sequence[str],
    likes: Sequence[str],
    knobs: Knobs,
    limits: LimitKnobs,
    planning: Planning,
    card: Card,
    *,
    compare: bool,
    as_json: bool,
) -> int:
    """The starts of other engines, beside our own plan where several are asked for."""
    from tonnage.cli.engines import Place, able, read_engines, show_engines, starts_of
    from tonnage.peers.which import KNOWN
    from tonnage.planner.ranks import distinct_ranks

    notes: tuple[str, ...] = ()
    asked = read_engines(texts or [known.name for known in KNOWN])
    if not texts:
        asked, notes = able(asked, planning.rank)
    is_compared = compare or len(asked) > 1
    stages = distinct_ranks(planning.rank)
    place = Place(
        config=planning.config, checkpoint=planning.checkpoint, card=card, dtype=planning.dtype, draft=planning.draft,
        ranks=tuple(stages) if planning.stage is None else (stages[planning.stage],),
    )  # fmt: skip
    starts = starts_of(asked, likes, knobs, limits, place, is_compared=is_compared)
    own = (lambda: planning.plan(knobs, limits, card)) if is_compared else None
    return show_engines(asked, starts, compared_with=own, notes=notes, as_json=as_json)


def show_reasons(made: MemoryPlan, card: Card, plan_on: Callable[[Knobs, LimitKnobs, Card], MemoryPlan]) -> None:
    """The path of the number, with what one GiB more would give."""
    from tonnage.planner.curve import one_more_gib
    from tonnage.report.draw import console_for
    from tonnage.report.explain import show_explanation

    found = one_more_gib(made, card=card, plan_on=plan_on)
    show_explanation(made, console_for(sys.stdout), more=None if found is None else (found.what, found.plan))


def plan_like(
    likes: Sequence[str] | None,
    knobs: Knobs,
    limits: LimitKnobs,
    plan_with: Callable[[Knobs, LimitKnobs], MemoryPlan],
) -> MemoryPlan:
    """The plan with other engines' knobs beside our own, and a warning for each that means something else here."""
    if not likes:
        return plan_with(knobs, limits)
    from dataclasses import replace

    from tonnage.peers import translate

    asked = translate(likes, knobs=knobs, limit_knobs=limits, plan_with=plan_with)
    made = plan_with(asked.knobs, asked.limit_knobs)
    return replace(made, warnings=(*made.warnings, *asked.notes))


def with_warnings(made: MemoryPlan, planning: Planning, card: Card) -> MemoryPlan:
    """The plan with a warning for each setting without effect, for what the host tier holds, and for a dtype
    that the card cannot compute in."""
    from dataclasses import replace

    from tonnage.planner.host_tier import held_text
    from tonnage.report.idle import idle_settings

    idle = [told for told in idle_settings(made) if told not in made.warnings]
    found = [*idle, dtype_warning_of(card, planning.dtype, planning.config)]
    if made.host.kv_bytes:
        stages = planning.stages(made.knobs, made.limit_knobs, card) if planning.rank.pp > 1 else (made,)
        found.append(held_text(stages))
    return replace(made, warnings=(*made.warnings, *filter(None, found)))


def dtype_warning_of(card: Card, dtype: str | None, config: ModelConfig) -> str:
    """Where the card has no arithmetic in the dtype asked for, or else the model's own; empty where it has."""
    from tonnage.hardware import dtype_warning

    return dtype_warning(card, dtype or config.dtype)


def check_stages(ranks: RankOptions) -> None:
    """Raises ``UserError`` for layers of several stages where their number was not given."""
    counts = (ranks.stage_layers or "").split(",")
    if ranks.pp is None and len(counts) > 1:
        raise UserError(
            f"--stage-layers {ranks.stage_layers} counts the layers of {len(counts)} pipeline stages, and there is one",
            need=f"--pp {len(counts)}",
            remedy=f"add --pp {len(counts)}, or leave --stage-layers out",
        )


def card_of(device: str | None, memory: str | None, *, verb: str) -> Card:
    """The device that the two flags name. Raises ``UserError`` for neither, or for both where they contradict."""
    from tonnage.hardware import card_for, find_card, is_host

    num_bytes = opt.read_bytes(memory, "--memory")
    if device is None and num_bytes is None:
        raise UserError(
            f"tonnage {verb} does not know the device",
            need="--device NAME or --memory SIZE",
            remedy="add --device H100, or --memory 80GiB for a device of that size",
        )
    if device is not None and num_bytes is not None and not is_host(device):
        find_card(device)  # a name that is not known is told first: no part can be taken of such a card
        raise UserError(
            f"--device {device} and --memory {memory} both say how large the device is",
            need="one of them",
            remedy=f"to take part of a card: --device {device} --total-bytes {memory}",
        )
    return card_for(device, num_bytes)
