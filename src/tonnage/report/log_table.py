"""An explained log for a person: the log against itself, then beside the prediction, then the term that differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tonnage.peers.logs.explanation import Explanation
from tonnage.peers.logs.log import Unit
from tonnage.peers.logs.rows import Row
from tonnage.report.draw import grid, hanging, plural, show, signed_bytes, spread
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def show_explanation(found: Explanation, console: Console, *, kept: str = "") -> None:
    """Print it. ``kept``: the file that a correction was written to."""
    parts: list[RenderableType] = [_title(found)]
    if found.own:
        parts.append(_table("The log against itself", found.own, "recomputed>"))
    if found.rows:
        parts.append(_table("The log beside the prediction", found.rows, "predicted>"))
    told = [_text(sentence, console.width) for sentence in _sentences(found, kept)]
    show([*parts, *(["\n".join(told)] if told else [])], console)


def _title(found: Explanation) -> Text:
    from rich.text import Text

    log = found.log
    version = f" {found.version}" if found.version else ""
    model, card = f", {log.model}" if log.model else "", f" on {found.card}" if found.card else ""
    text = Text.assemble((f"{_TITLES[log.engine]}{version}{model}{card}", "bold"))
    return text.append(f": {plural(len(log.figures), 'figure')} in {plural(log.num_lines, 'line')}")


def _table(title: str, rows: Sequence[Row], column: str) -> Table:
    cells = [
        (
            row.name,
            str(row.line) if row.line else "",
            shown(row.said, row.unit),
            shown(row.found, row.unit),
            "same" if not row.difference else _difference(row),
            "yes" if row.agrees else "NO",
            f"{row.how}{_range(row)}",
        )
        for row in rows
    ]
    return grid(["term", "line>", "log>", column, "log is>", "agrees", "how"], cells, title=title)


def shown(value: int, unit: Unit) -> str:
    """A figure in its unit."""
    if unit is Unit.TIMES:
        return f"{value / 1000:.2f}"
    if unit is Unit.SHARE:
        return f"{value / 10**6:.4f}"
    return f"{value:,}" if unit is Unit.COUNT else format_bytes(value)


def _difference(row: Row) -> str:
    if row.unit is Unit.BYTES:
        return signed_bytes(row.difference)
    return f"{'+' if row.difference > 0 else '-'}{shown(abs(row.difference), row.unit)}"


def _range(row: Row) -> str:
    return f"; {spread(row.low, row.high)}" if row.unit is Unit.BYTES and row.high > row.low else ""


def _sentences(found: Explanation, kept: str) -> Iterable[str]:
    if found.unpredicted:
        yield f"It was not predicted: {found.unpredicted}"
    yield from found.spread
    apart = [row for row in found.own if not row.agrees]
    if apart:
        names = ", ".join(row.name for row in apart)
        yield f"The log contradicts itself in {names}: its lines are of two starts, or of two ranks."
    if found.worst is not None:
        row = found.worst
        yield f"The term that differs most is {row.name}: {_difference(row)} in the log ({row.how})."
    for told in found.why:
        yield f"It may be that {told}."
    for told in found.if_so:
        yield f"It would agree with {told}."
    if found.rows and found.worst is None:
        yield "Every figure lies within the prediction's interval."
    for ended in found.ended:
        yield f"Line {ended.failure.line}: {ended.means}."
        if ended.change:
            yield f"To change: {'; or '.join(ended.change)}."
    if kept:
        yield f"The differences are kept in {kept}; a prediction that takes them says so."


def _text(told: str, width: int) -> str:
    return hanging(told, "", width)
