"""A curve for a person: two pictures and the points that matter. And for a program: the same points as JSON."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from tonnage.budget.curve import (
    CURRENT,
    FAIR_SHARE,
    NUM_COLUMNS,
    ONE_REQUEST,
    WORST_CASE,
    AttendedCurve,
    Curve,
    CurvePoint,
    Stack,
    StackPart,
)
from tonnage.report import codec
from tonnage.report.curve_draw import Area, Picture, cells, draw, legend
from tonnage.report.draw import COLOURS, grid, hanging, plural, show
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: The character under the axis for each mark; where two meet the later one is shown.
MARKS = {WORST_CASE: "w", FAIR_SHARE: "f", ONE_REQUEST: "1", CURRENT: "c"}
WHAT = {
    ONE_REQUEST: "the least: one full sequence",
    CURRENT: "what was asked, or the default",
    FAIR_SHARE: "beyond it nothing changes",
    WORST_CASE: "all sequences, each full",
}
LENT = (
    "lent: what the pool would hold while no step uses that scratch, if its bytes went to cached blocks meanwhile; "
    "attention of this release runs in an arena of its own that is not lent, so this is what is left to gain"
)


def curve_text(curve: Curve) -> str:
    """Canonical JSON: schema ``tonnage.curve/1``, every point that the pictures are drawn from."""
    document: dict[str, Any] = codec.to_json(curve)
    return codec.dumps(document)


def show_curve(curve: Curve, console: Console) -> None:
    """Print both pictures."""
    show(curve_parts(curve, console), console)


def curve_parts(curve: Curve, console: Console) -> list[RenderableType]:
    """The pieces of the view, top to bottom."""
    from rich.text import Text

    head = Text.assemble((curve.model_name, "bold"), " on ", (curve.device_name, "bold"))
    if curve.rank.size > 1:
        head.append(f", rank {curve.rank.index} of {curve.rank.size}")
    head.append(f": {plural(curve.max_batch_size, 'sequence')} of up to {plural(curve.max_seq_len, 'token')}")
    parts: list[RenderableType] = [head]
    if curve.attended is None:
        parts.append(Text(hanging(_NOTHING_GROWS, "", console.width)))
    else:
        parts += _attended(curve.attended, console)
    return parts + _stacked(curve.stack, console)


_NOTHING_GROWS = (
    "Nothing here grows with the tokens that a step attends to: attention works in tiles of a bounded size, or reads "
    "the cache where it lies. attended_tokens would change nothing, and there is no choice to draw."
)


def _attended(drawn: AttendedCurve, console: Console) -> list[RenderableType]:
    from rich.text import Text

    plain = console.options.ascii_only
    picture, width = attended_picture(drawn), cells(console)
    parts: list[RenderableType] = [Text("Tokens in the cache, by what one step may attend to", style="bold")]
    parts.append(draw(picture, width=width, ascii_only=plain))
    told = ("tokens one step can attend to", "tokens of cache beside them")
    low, high = drawn.points[0].attended_tokens, drawn.points[-1].attended_tokens
    axis = Text(f"{'':13}{low:,} to {high:,} attended tokens, by factors\n")
    parts.append(axis.append_text(legend(picture, told, ascii_only=plain)))
    parts.append(points_table(drawn))
    notes = [f"grows with attended tokens: {', '.join(drawn.scratch)}"]
    if drawn.lent_tokens is not None:
        notes.append(LENT)
    if drawn.refused_tokens:
        least = drawn.refused_tokens[0]
        notes.append(f"from attended_tokens = {least:,} on, the pool would not hold one sequence: refused")
    parts.append(Text("\n".join(hanging(note, "", console.width) for note in notes)))
    return parts


def attended_picture(drawn: AttendedCurve) -> Picture:
    """Cache over cap, with the level that lending would reach."""
    points = drawn.points
    lent = drawn.lent_tokens
    highest = max(point.kv_tokens for point in points)
    top = max(highest, lent or 0) * 15 // 14
    caps = tuple(min(point.attended_cap, point.kv_tokens) for point in points)
    rest = tuple(point.kv_tokens - cap for point, cap in zip(points, caps, strict=True))
    labels = [(points[-1].kv_tokens, f"{points[-1].kv_tokens:,}"), (highest, f"{highest:,}")]
    if lent is not None:
        labels.append((lent, f"{lent:,}"))
    marks = [(at, MARKS[mark]) for mark in MARKS for at, point in enumerate(points) if mark in point.marks]
    return Picture(
        areas=(Area(name="cap", heights=caps, style="yellow"), Area(name="cache", heights=rest, style="green")),
        top=top,
        line=highest if lent is None else lent,
        labels=tuple(labels),
        marks=tuple(marks),
    )


def points_table(drawn: AttendedCurve) -> Table:
    """The points with a name, some of those between them, and the lent level."""
    rows = [_row(point) for point in drawn.points if point.marks or point in drawn.points[4:-4:8]]
    if drawn.lent_tokens is not None:
        rows.append(("-", f"{drawn.lent_tokens:,}", "-", "-", "lent", "while nobody uses scratch"))
    columns = ["attended>", "cache tokens>", "cap>", "scratch>", "mark", "what"]
    return grid(columns, rows, title="Points of the curve")


def _row(point: CurvePoint) -> tuple[str, ...]:
    marks = " ".join(MARKS[mark] for mark in point.marks)
    what = "; ".join(WHAT[mark] for mark in point.marks)
    figures = (point.attended_tokens, point.kv_tokens, point.attended_cap)
    return (*(f"{figure:,}" for figure in figures), format_bytes(point.scratch_bytes), marks, what)


def _stacked(drawn: Stack, console: Console) -> list[RenderableType]:
    from rich.text import Text

    plain = console.options.ascii_only
    picture, width = stack_picture(drawn), cells(console)
    at = drawn.tokens.index(drawn.plan_tokens)
    sizes = [f"{format_bytes(part.sizes[at]):>10}" for part in drawn.parts]
    parts: list[RenderableType] = [Text("Bytes, by tokens in the cache", style="bold")]
    parts.append(draw(picture, width=width, ascii_only=plain))
    axis = Text(
        f"{'':13}0 to {drawn.tokens[-1]:,} tokens; the line is the budget, {format_bytes(drawn.budget_bytes)}\n"
    )
    parts.append(axis.append_text(legend(picture, sizes, ascii_only=plain)))
    parts.append(Text(hanging(crossing_told(drawn), "", console.width)))
    return parts


def crossing_told(drawn: Stack) -> str:
    """Where the stack crosses the budget, and whether the plan stands there."""
    told = f"^ the stack crosses the budget after {plural(drawn.crossing_tokens, 'token')}"
    if drawn.plan_tokens == drawn.crossing_tokens:
        return f"{told}: that is the plan, with the bytes above"
    stops = f"p the plan stops before, at {plural(drawn.plan_tokens, 'token')}, by {drawn.bound_by}"
    return f"{told}; {stops}, with the bytes above"


def stack_picture(drawn: Stack) -> Picture:
    """The demands over an even axis of tokens; each position shows the last point at or before it."""
    last = drawn.tokens[-1]
    places = [bisect_right(drawn.tokens, last * step // NUM_COLUMNS) - 1 for step in range(NUM_COLUMNS + 1)]
    areas = tuple(
        Area(name=part.name, heights=tuple(part.sizes[place] for place in places), style=_style(part))
        for part in drawn.parts
    )
    highest = max(drawn.total_at(places[-1]), drawn.budget_bytes)
    budget = drawn.budget_bytes

    def position(tokens: int) -> int:
        return tokens * NUM_COLUMNS // last

    marks = [(position(drawn.crossing_tokens), "^")]
    if drawn.plan_tokens != drawn.crossing_tokens:
        marks.append((position(drawn.plan_tokens), "p"))
    labels = ((0, "0"), (highest, format_bytes(highest)), (budget, format_bytes(budget)))
    return Picture(areas=areas, top=highest, line=budget, labels=labels, marks=tuple(marks))


def _style(part: StackPart) -> str:
    return COLOURS.get(part.kind, "dim")
