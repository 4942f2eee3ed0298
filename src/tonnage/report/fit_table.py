"""A fit for a person and for a program: the order of sacrifice, what was given up and why, the plan, what to type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tonnage.budget.fit import Dimension, Fitted
from tonnage.report import codec
from tonnage.report.draw import grid, hanging, show
from tonnage.report.plan_json import plan_document
from tonnage.report.shell import pasteable
from tonnage.report.table import header, pool_text
from tonnage.terms import MemoryPlan

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

FIT_SCHEMA = "tonnage.fit/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitView:
    """What is shown. ``order``: what was open, first given up first. ``plans``: one for each pipeline stage, and
    ``plan`` the one that is drawn.

    command  what to type to have the plan again
    inverse  figures of ``--least-memory`` or ``--least-ranks``, by name, and ``told`` in a sentence
    host     figures of the host tier, with its sentence; empty where everybody is resident
    """

    goal: str
    reached: str
    order: tuple[Dimension, ...]
    fitted: Fitted
    plan: MemoryPlan
    plans: tuple[MemoryPlan, ...]
    command: str
    notes: tuple[str, ...] = ()
    inverse: Mapping[str, object] = field(default_factory=dict)
    host: Mapping[str, object] = field(default_factory=dict)


def fit_text(view: FitView) -> str:
    """Canonical JSON text."""
    return codec.dumps(fit_document(view))


def fit_document(view: FitView) -> dict[str, Any]:
    """The view as plain JSON values; absent figures are null."""
    kept = view.fitted.as_mapping()
    return {
        "schema": FIT_SCHEMA,
        "goal": view.goal,
        "reached": view.reached,
        "order": [codec.to_json(each) | {"kept": kept[each.name]} for each in view.order],
        "sacrifices": codec.to_json(view.fitted.sacrifices),
        "command": view.command,
        "notes": list(view.notes),
        "inverse": codec.to_json(view.inverse) or None,
        "host_tier": codec.to_json(view.host) or None,
        "plans": [plan_document(plan) for plan in view.plans],
    }


def show_fit(view: FitView, console: Console) -> None:
    """Print all of it."""
    show(fit_parts(view, console.width), console)


def fit_parts(view: FitView, width: int) -> list[RenderableType]:
    """The pieces, top to bottom; empty ones are left out."""
    from rich.text import Text

    parts: list[RenderableType] = [goal_text(view, width)]
    if view.order:
        parts.append(order_table(view))
    if view.fitted.sacrifices:
        parts.append(sacrifices_text(view, width))
    if view.host:
        parts.append(Text(hanging(str(view.host["told"]), "host tier  ", width)))
    parts += [header(view.plan, width), pool_text(view.plan, width), command_text(view, width)]
    if view.notes:
        parts.append(Text("\n".join(hanging(note, "! ", width) for note in view.notes), style="yellow"))
    return parts


def command_text(view: FitView, width: int) -> Text:
    """What to type, in rows that a shell reads as one; its own rows alone, so that they can be copied whole."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    return text.append("To type:", "bold").append("\n" + pasteable(view.command, width))


def goal_text(view: FitView, width: int) -> Text:
    """The goal, how far it was reached, and the inverse where that was asked."""
    from rich.text import Text

    text = Text.assemble((view.goal, "bold"), "\n" + hanging(view.reached, "reached  ", width))
    if view.inverse:
        text.append("\n" + hanging(str(view.inverse["told"]), "least    ", width))
    return text


def order_table(view: FitView) -> Table:
    """Every knob that was open, with its candidates and the one that was taken."""
    from rich.text import Text

    kept, given_up = view.fitted.as_mapping(), {each.name for each in view.fitted.sacrifices}
    rows = [
        (
            Text(f"{place} {each.name}", style="bold" if each.name in given_up else ""),
            _value(kept[each.name]),
            "given up" if each.name in given_up else "kept",
            ", ".join(_value(value) for value in each.values),
        )
        for place, each in enumerate(view.order, 1)
    ]
    return grid(["first given up", "value>", "", "from the most wanted"], rows, title="Order of sacrifice")


def sacrifices_text(view: FitView, width: int) -> Text:
    """One paragraph for each: from, to, what it buys, what it costs."""
    from rich.text import Text

    told = [
        hanging(
            f"{_value(each.wanted)} became {_value(each.kept)}: {each.why}; it costs: {each.costs}",
            f"{each.name}  ",
            width,
        )
        for each in view.fitted.sacrifices
    ]
    return Text("\n".join(told))


def _value(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
