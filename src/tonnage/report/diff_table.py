"""A diff for a person: the settings that differ, then what moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tonnage.report.diff import Change, Diff, LineChange
from tonnage.report.draw import grid, plural, show, signed_bytes
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


def show_diff(diff: Diff, console: Console) -> None:
    """Print the whole comparison."""
    parts: list[RenderableType] = [_title(diff)]
    for title, changes in (("Settings that differ", diff.settings), ("Lines", diff.lines), ("Pool", diff.pool)):
        parts += _section(title, changes)
    parts += _section("Run", diff.run)
    show(parts, console)


def _section(title: str, changes: Iterable[Change | LineChange]) -> list[RenderableType]:
    lines = [change for change in changes if isinstance(change, LineChange)]
    values = [change for change in changes if isinstance(change, Change)]
    tables: list[RenderableType] = []
    if any(change.delta_bytes or change.why for change in lines):
        tables.append(_lines(title, lines))
    if values:
        tables.append(_values(title, values))
    return tables


def _title(diff: Diff) -> Text:
    from rich.text import Text

    moved = sum(line.delta_bytes != 0 for line in diff.lines)
    text = Text.assemble((diff.before, "bold"), " → ", (diff.after, "bold"), ": ")
    if not (moved or diff.settings or diff.pool or diff.run):
        return text.append("nothing differs")
    return text.append(f"{plural(len(diff.settings), 'setting')} and {plural(moved, 'line')} differ")


def _values(title: str, changes: list[Change]) -> Table:
    rows = [
        (change.name, _value(change, change.before), _value(change, change.after), _delta(change)) for change in changes
    ]
    return grid(["name", "before>", "after>", "change"], rows, title=title)


def _lines(title: str, changes: list[LineChange]) -> Table:
    rows = [
        (change.name, format_bytes(change.before_bytes), format_bytes(change.after_bytes), _moved(change), change.why)
        for change in changes
        if change.delta_bytes or change.why
    ]
    still = len(changes) - len(rows)
    if still:
        rows.append((f"{plural(still, 'other')}", "", "", "same", ""))
    return grid(["line", "before>", "after>", "change>", "why"], rows, title=title)


def _moved(change: LineChange) -> str:
    return signed_bytes(change.delta_bytes) if change.delta_bytes else "same"


def _value(change: Change, value: str | int | None) -> str:
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value
    return format_bytes(value) if _in_bytes(change.name) else f"{value:,}"


def _delta(change: Change) -> str:
    if change.delta is None:
        return ""
    return signed_bytes(change.delta) if _in_bytes(change.name) else f"{change.delta:+,}"


def _in_bytes(name: str) -> bool:
    return name.endswith(("_bytes", ".bytes"))
