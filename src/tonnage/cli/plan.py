"""``tonnage plan``: the split of a device for a model, with neither at hand."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli import options as opt
from tonnage.cli.engines import EngineStarts
from tonnage.cli.groups import grouped
from tonnage.cli.planning import FeatureOptions, Planning, PolicyOptions, RankOptions
from tonnage.errors import UserError
from tonnage.units import MiB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tonnage.config import Knobs, LimitKnobs
    from tonnage.costs.config import ModelConfig
    from tonnage.hardware import Card
    from tonnage.terms import MemoryPlan

Output = Annotated[
    str | None, typer.Option("--output", metavar="FILE", help="Also keep the plan as JSON.", show_default=False)
]

Html = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="Also write the plan as one self-contained page.", show_default=False),
]

#: How long forwards on fake tensors may take before somebody is told.
PATIENCE_SECONDS = 1.0
Exact = Annotated[
    bool, typer.Option("--exact", help="Count activations on a forward of fake tensors (needs torch, no GPU).")
]
Explain = Annotated[bool, typer.Option("--explain", help="Say in sentences how the number came about.")]


@grouped
def plan(
    *,
    model: opt.PlannedModel,
    device: opt.Device = None,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    features: FeatureOptions,
    ranks: RankOptions,
    policy: PolicyOptions,
    like: opt.LikeOptions,
    engines: EngineStarts,
    as_json: opt.AsJson = False,
    explain: Explain = False,
    exact: Exact = False,
    output: Output = None,
    html: Html = None,
    force: opt.Force = False,
) -> int:
    """Split a device's memory for a model, with neither at hand.

    MODEL is a folder, a config.json, a hub id, or a built-in shape (tonnage plan help lists them).
    Example: tonnage plan llama-3.1-8b --device H100
    """
    if explain and as_json:
        raise UserError("both --explain and --json say how to print the plan", remedy="keep one of them")
    engines.refuse_others(explain=explain, exact=exact, output=output, html=html, features=features, policy=policy)
    knobs, limits = features.knobs(pool), features.limits(pool)
    card = card_of(device, memory, verb="plan")
    check_stages(ranks)
    check_files(output, html, force=force)
    planning = Planning.of(model, pool=pool, features=features, ranks=ranks, policy=policy)

    def plan_with(knobs: Knobs, limits: LimitKnobs, card: Card = card) -> MemoryPlan:
        return planning.plan(knobs, limits, card)

    if engines.is_asked:
        return engines.show(like.like or (), knobs, limits, planning, card, as_json=as_json)
    with counted_on_fakes(planning) if exact else nullcontext(planning) as planning:
        made = with_warnings(plan_like(like.like, knobs, limits, plan_with), planning, card)
        write_files(made, planning, card, output=output, html=html, force=force)
    if as_json:
        from tonnage.report import plan_text

        print(plan_text(made), end="")
    elif explain:
        show_reasons(made, card, plan_with)
    else:
        show_table(made, planning, card)
    return 0


def show_table(made: MemoryPlan, planning: Planning, card: Card) -> None:
    """The plan of one stage, with a row for each of several stages."""
    from tonnage.report.draw import console_for
    from tonnage.report.table import show_plan

    show_plan(made, console_for(sys.stdout))
    if planning.rank.pp > 1:
        from tonnage.report.stages import show_stages

        show_stages(planning.stages(made.knobs, made.limit_knobs, card), console_for(sys.stdout))


def check_files(output: str | None, html: str | None, *, force: bool) -> None:
    """Before anything is planned: both files can be written, and are two. Raises ``UserError``."""
    from tonnage.report import check_writable

    found = [
        check_writable(path, force=force, flag=flag) for path, flag in ((output, "--output"), (html, "--html")) if path
    ]
    if len(found) == 2 and found[0].absolute() == found[1].absolute():
        raise UserError(f"--output and --html both write {found[0]}", remedy="give them two names")


def write_files(
    made: MemoryPlan, planning: Planning, card: Card, *, output: str | None, html: str | None, force: bool
) -> None:
    """The plan as JSON, and as a page with the plans around it. Raises ``InputError`` where one cannot be written."""
    from tonnage.report import plan_text, write_file

    page = None if html is None else _page_text(made, planning, card)  # what fails here leaves neither file
    if output is not None:
        write_file(output, plan_text(made), force=force, flag="--output")
    if html is not None and page is not None:
        write_file(html, page, force=force, flag="--html")


def _page_text(made: MemoryPlan, planning: Planning, card: Card) -> str:
    from tonnage import __version__
    from tonnage.planner.grid import axes, grid_without_device
    from tonnage.report.page import page_of, page_text

    lengths, batches = axes(made, positions=planning.config.max_position_embeddings)
    asked = planning.asked(made.knobs, made.limit_knobs, card)
    grid = grid_without_device(planning.config, lengths=lengths, batches=batches, shown=planning.shown, **asked)
    return page_text(page_of(made, grid, version=__version__))


@contextmanager
def counted_on_fakes(planning: Planning) -> Iterator[Planning]:
    """The same with a probe that runs the model on fake tensors; says so on stderr where it takes more than a second.

    Raises ``UserError`` where the engine's libraries are not installed.
    """
    from dataclasses import replace
    from threading import Timer

    from tonnage.cli.rooms import exact_room

    def tell() -> None:
        print("--exact: running the model on fake tensors ...", file=sys.stderr, flush=True)

    told = Timer(PATIENCE_SECONDS, tell)
    told.daemon = True
    told.start()
    try:
        yield replace(planning, probe=exact_room("plan --exact")())
    finally:
        told.cancel()


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
    found += getattr(planning.probe, "notes", ())
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


#: A total may be this far from what such cards report: logs print hundredths of a GiB.
_ROUNDED_BYTES = 8 * MiB


def card_of(device: str | None, memory: str | None, *, verb: str, takes_part: bool = True) -> Card:
    """The device that the two flags name. Raises ``UserError`` for neither, or for both where they contradict.
    ``takes_part``: the verb has --total-bytes."""
    from tonnage.hardware import card_for, find_card, is_host

    num_bytes = opt.read_bytes(memory, "--memory")
    if device is None and num_bytes is None:
        raise UserError(
            f"tonnage {verb} does not know the device",
            need="--device NAME or --memory SIZE",
            remedy="add --device H100, or --memory 80GiB for a device of that size",
        )
    if device is not None and num_bytes is not None and not is_host(device):
        card = find_card(device)  # a name that is not known is told first: no part can be taken of such a card
        if card.total.low - _ROUNDED_BYTES <= num_bytes <= card.total.high + _ROUNDED_BYTES:
            return card.with_total(num_bytes)  # as the driver of this very card reports it
        raise UserError(
            f"--device {device} and --memory {memory} both say how large the device is",
            need="one of them, or a total that such cards report",
            remedy=f"to take part of a card: --device {device} --total-bytes {memory}"
            if takes_part
            else "leave one of them out",
        )
    return card_for(device, num_bytes)
