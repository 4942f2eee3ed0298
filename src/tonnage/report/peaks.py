"""The stages of a step side by side: what each holds at its peak, between which bytes, and what the allocator takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tonnage.report.draw import grid, hanging, maybe_bytes, spread
from tonnage.terms import MemoryPlan, Quantity, Source, StagePeak
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def peaks_parts(plan: MemoryPlan, width: int) -> list[RenderableType]:
    """The table, and under it how each figure is known; empty for a plan whose peaks were not counted on a forward."""
    if not any(stage.allocated.source is Source.SIMULATED for stage in plan.stages):
        return []
    return [peaks_table(plan.stages), refs_text(plan.stages, width)]


def peaks_table(stages: Sequence[StagePeak]) -> Table:
    """One row a stage. "at most" is the same run operation by operation."""
    rows = [
        (
            stage.stage,
            f"{stage.shape.num_tokens:,}",
            format_bytes(stage.allocated.bytes),
            _between(stage.allocated),
            maybe_bytes(stage.uncompiled_bytes),
            format_bytes(stage.reserved.bytes),
            _between(stage.reserved),
        )
        for stage in stages
    ]
    columns = ["stage", "tokens>", "alive>", "between>", "at most>", "reserved>", "between"]
    return grid(columns, rows, title="Peaks of the stages")


def refs_text(stages: Sequence[StagePeak], width: int) -> Text:
    """One paragraph a stage."""
    from rich.text import Text

    told = [hanging(f"{stage.allocated.ref}.", f"{stage.stage}: ", width) for stage in stages]
    return Text("\n".join(told), style="dim italic")


def _between(quantity: Quantity) -> str:
    return spread(quantity.low, quantity.high) or "exact"
