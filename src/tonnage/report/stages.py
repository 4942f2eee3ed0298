"""The pipeline stages of one engine side by side: what each holds, and which of them decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tonnage.report.draw import grid, show
from tonnage.report.plan_json import bytes_per_token
from tonnage.terms import LineKind, MemoryPlan
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_stages(stages: Sequence[MemoryPlan], console: Console) -> None:
    """Print the table."""
    show([stages_table(stages)], console)


def stages_table(stages: Sequence[MemoryPlan]) -> Table:
    """One row a stage; ranks of one stage are alike."""
    rows = [
        (
            str(number),
            str(len({layer for group in made.kv.layout.groups for layer in group.layers})),
            format_bytes(made.bytes_of(LineKind.WEIGHTS)),
            f"{float(bytes_per_token(made.kv)):,.0f}",
            format_bytes(made.kv.bytes),
            f"{made.kv.tokens:,}",
            _limit(made),
        )
        for number, made in enumerate(stages)
    ]
    columns = ["stage", "layers>", "weights>", "bytes/token>", "kv>", "tokens>", "limited by"]
    return grid(columns, rows, title="Pipeline stages")


def _limit(made: MemoryPlan) -> str:
    return next((cap.setting for cap in made.caps if cap.binding), "")
